"""Write the API reference as Markdown, from annotations and docstrings; tools/build_site.py calls it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

PAGES = {
    "psfleet": "psfleet",
    "fleet": "psfleet.fleet.fleet",
    "layers": "psfleet.layers",
    "optimizer": "psfleet.optimizer",
    "lr": "psfleet.optimizer.lr",
    "torch": "psfleet.torch",
    "metrics": "psfleet.metrics",
    "entry": "psfleet.core.engine.schema.entry",
    "initializer": "psfleet.initializer",
    "regularizer": "psfleet.regularizer",
    "clip": "psfleet.clip",
    "testing": "psfleet.fleet.testing.local_fleet",
    "features": "psfleet.features",
    "datasets": "psfleet.data",
    "fluid": "psfleet.fluid",
    "consistency": "psfleet.core.engine.consistency",
    "errors": "psfleet.core.base.errors",
}
"""By name of the page the module whose public names it has."""


def write(root: Path, to: Path) -> None:
    """Write a page for each public module below `to`."""
    to.mkdir(parents=True)
    package: Any = griffe.load(
        "psfleet",
        search_paths=[root],
        docstring_parser="google",
        docstring_options={"warnings": False},
        resolve_aliases=True,
    )
    for page, path in PAGES.items():
        module = package if path == "psfleet" else package[path.removeprefix("psfleet.")]
        (to / f"{page}.md").write_text("\n".join(_page(module)) + "\n")


def _page(module: Any) -> Iterator[str]:
    yield f"# {module.path}\n"
    yield from _docstring(module)
    for name in module.exports or []:
        found = module.members.get(str(name))
        if found is None:
            continue
        if found.is_alias:
            found = found.final_target
        if not found.is_module:
            yield from _thing(found, 2)


def _thing(thing: Any, level: int) -> Iterator[str]:
    """A class, function or value."""
    yield f"\n{'#' * level} {thing.name}\n"
    if thing.is_function or thing.is_class:
        yield from ("```python", _signature(thing), "```\n")
    yield from _docstring(thing)
    if not thing.is_class:
        return
    for member in thing.members.values():
        if not member.is_alias and not member.name.startswith("_") and member.docstring:
            yield from _thing(member, level + 1)


def _signature(thing: Any) -> str:
    """As one writes it, over several lines where it is long."""
    returns = f" -> {thing.returns}" if thing.is_function and thing.returns else ""
    word = "def" if thing.is_function else "class"
    said = [_parameter(one) for one in _parameters(thing) if one.name not in ("self", "cls")]
    line = f"{word} {thing.name}({', '.join(said)}){returns}: ..."
    if len(line) <= 100:
        return line
    return f"{word} {thing.name}(\n    " + ",\n    ".join(said) + f",\n){returns}: ..."


def _parameters(thing: Any) -> Any:
    """Return the arguments, those of a learning-rate schedule by its fields."""
    decorators = [one.callable_path for one in thing.decorators] if thing.is_class else []
    if "psfleet.optimizer.lr.scheduler.schedule" not in decorators:
        return thing.parameters
    kind = griffe.ParameterKind.positional_or_keyword
    return [
        griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=field.value)
        for field in thing.members.values()
        if field.is_attribute and field.annotation is not None
    ]


def _parameter(one: Any) -> str:
    stars = {"variadic positional": "*", "variadic keyword": "**"}
    text = stars.get(one.kind.value, "") + one.name
    if one.annotation is not None:
        text += f": {one.annotation}"
    is_starred = one.kind.value in stars
    if one.default is None or is_starred:
        return text
    return f"{text} = {one.default}" if one.annotation is not None else f"{text}={one.default}"


def _docstring(thing: Any) -> Iterator[str]:
    """The text, then arguments, results and errors as lists."""
    for section in thing.docstring.parsed if thing.docstring else ():
        if section.kind.value == "text":
            yield f"{_fenced(section.value)}\n"
            continue
        if not isinstance(section.value, list):
            yield f"{section.value.description}\n"
            continue
        yield f"**{section.kind.value.capitalize()}**\n"
        for one in section.value:
            name = getattr(one, "name", "") or ""
            kind = str(one.annotation) if not name and one.annotation else name
            text = " ".join(one.description.split())
            yield f"- `{kind}`: {text}" if kind else f"- {text}"
        yield ""


def _fenced(text: str) -> str:
    """Indented code as fences, so that it gets colours."""
    lines: list[str] = []
    is_code = False
    for line in text.splitlines():
        if line.strip() and line.startswith("    ") != is_code:
            is_code = not is_code
            if not is_code and not lines[-1]:
                lines.pop()
            lines.append("```python" if is_code else "```\n")
        lines.append(line.removeprefix("    ") if is_code else line)
    return "\n".join([*lines, "```"] if is_code else lines)

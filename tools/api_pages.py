"""Writes the API reference as Markdown pages, from the annotations and docstrings of `psfleet`.

`tools/build_site.py` calls it.
"""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

PAGES = {
    "psfleet": ("psfleet", "psfleet.core.client"),
    "fleet": ("psfleet.fleet",),
    "callbacks": ("psfleet.fleet.callbacks",),
    "strategy": ("psfleet.core.runtime.strategy",),
    "layers": ("psfleet.layers",),
    "optimizer": ("psfleet.optimizer",),
    "lr": ("psfleet.optimizer.lr",),
    "torch": ("psfleet.torch",),
    "metrics": ("psfleet.metrics",),
    "serving": ("psfleet.serving",),
    "checkpoint": ("psfleet.checkpoint",),
    "entry": ("psfleet.core.engine.schema.entry",),
    "initializer": ("psfleet.initializer",),
    "regularizer": ("psfleet.regularizer",),
    "clip": ("psfleet.clip",),
    "testing": ("psfleet.fleet.testing.local_fleet",),
    "features": ("psfleet.features",),
    "datasets": ("psfleet.data",),
    "consistency": ("psfleet.core.engine.consistency",),
    "errors": ("psfleet.core.base.errors",),
    "fluid": (
        "psfleet.fluid",
        "psfleet.fluid.dygraph",
        "psfleet.fluid.io",
        "psfleet.fluid.layers",
        "psfleet.fluid.learning_rate_scheduler",
        "psfleet.fluid.metrics",
        "psfleet.fluid.nn",
        "psfleet.fluid.static",
        "psfleet.fluid.static.nn",
    ),
}
"""For each page its modules, whose public names it lists.

A name that an earlier page describes is only linked.
"""


def write(root: Path, to: Path) -> None:
    """Write one page for each entry of `PAGES` into the folder `to`."""
    to.mkdir(parents=True)
    package: Any = griffe.load(
        "psfleet",
        search_paths=[root],
        docstring_parser="google",
        # A result is one paragraph, over several lines too, and not a list of one item for each line.
        docstring_options={"warnings": False, "returns_multiple_items": False},
        resolve_aliases=True,
    )
    page_of: dict[str, str] = {}
    things: dict[str, list[tuple[Any, dict[str, Any]]]] = {}
    for page, paths in PAGES.items():
        things[page] = []
        for path in paths:
            module = package[path.removeprefix("psfleet.")] if path != "psfleet" else package
            things[page].append((module, _public(module)))
            for thing in things[page][-1][1].values():
                page_of.setdefault(thing.path, page)
    for page, modules in things.items():
        (to / f"{page}.md").write_text("\n".join(_page(page, modules, page_of)) + "\n")


def _public(module: Any) -> dict[str, Any]:
    """Return the public names of a module and the objects they name, without submodules."""
    exports = [str(name) for name in module.exports or ()]
    names = exports or [n for n, m in module.members.items() if n[0] != "_" and not m.is_alias]
    members = {name: _member(module, name) for name in names}
    return {name: thing for name, thing in members.items() if not thing.is_module}


def _member(module: Any, name: str) -> Any:
    """Return the object that a module exports under a name, with aliases resolved.

    The module itself may have no such member: some of its exports are declared only by the stub of a
    submodule.
    """
    modules = [module, *(m for m in module.modules.values() if name in (m.exports or ()))]
    thing = next(m.members[name] for m in modules if name in m.members)
    return thing.final_target if thing.is_alias else thing


def _page(
    page: str, modules: list[tuple[Any, dict[str, Any]]], page_of: dict[str, str]
) -> Iterator[str]:
    written: set[str] = set()
    for level, (module, things) in enumerate(modules, 1):
        yield f"{'#' * min(level, 2)} {module.path}\n"
        yield from _docstring(module)
        for name, thing in things.items():
            if thing.path in written or (
                str(getattr(thing, "value", "")) == f"_fleet.{name}" and not thing.docstring
            ):
                continue  # the latter are methods of Fleet, on the same page
            written.add(thing.path)
            if page_of[thing.path] == page:
                yield from _thing(thing, name, min(level, 2) + 1, page_of)
            else:
                other_page = page_of[thing.path]
                yield f"\n{'#' * (min(level, 2) + 1)} {name}\n"
                yield f"Described under [{PAGES[other_page][0]}]({other_page}.md).\n"


def _thing(thing: Any, name: str, level: int, page_of: dict[str, str]) -> Iterator[str]:
    """Describe one class, function or value, and the public members of a class."""
    yield f"\n{'#' * level} {name}\n"
    if thing.is_function or thing.is_class:
        yield from ("```python", _signature(thing), "```\n")
    elif not thing.docstring:
        yield f"`{name} = {thing.value}`\n"
    yield from _docstring(thing)
    if not thing.is_class:
        return
    for word, member in thing.all_members.items():
        target = member.final_target if member.is_alias else member
        if not target.docstring:  # it overrides one that has a text
            bases = (base.members.get(word) for base in thing.mro())
            target = next((m for m in bases if m is not None and m.docstring), target)
        # Members inherited from a class that has a page of its own are described there.
        is_own = target.parent.path == thing.path or not any(
            word in base.all_members for base in thing.mro() if base.path in page_of
        )
        alias = str(getattr(target, "value", ""))  # another name of a method
        is_shown = target.docstring or (alias in thing.all_members and alias != word)
        if is_own and is_shown and not word.startswith("_"):
            yield from _thing(target, word, level + 1, page_of)


def _signature(thing: Any) -> str:
    """Return the signature as Python code, with one argument per line if it is longer than 100 characters."""
    returns = f" -> {thing.returns}" if thing.is_function and thing.returns else ""
    word = "def" if thing.is_function else "class"
    arguments = [_parameter(p) for p in _parameters(thing) if p.name not in ("self", "cls")]
    line = f"{word} {thing.name}({', '.join(arguments)}){returns}: ..."
    if len(line) <= 100:
        return line
    return f"{word} {thing.name}(\n    " + ",\n    ".join(arguments) + f",\n){returns}: ..."


def _parameters(thing: Any) -> Any:
    """Return the arguments. For a learning-rate schedule these are the fields of its class."""
    decorators = [d.callable_path for d in thing.decorators] if thing.is_class else []
    if "psfleet.optimizer.lr.scheduler.schedule" not in decorators:
        return thing.parameters
    kind = griffe.ParameterKind.positional_or_keyword
    return [
        griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=field.value)
        for field in thing.members.values()
        if field.is_attribute and field.annotation is not None
    ]


def _parameter(parameter: Any) -> str:
    stars = {"variadic positional": "*", "variadic keyword": "**"}
    text = stars.get(parameter.kind.value, "") + parameter.name
    if parameter.annotation is not None:
        text += f": {parameter.annotation}"
    is_starred = parameter.kind.value in stars
    if parameter.default is None or is_starred:
        return text
    return (
        f"{text} = {parameter.default}"
        if parameter.annotation is not None
        else f"{text}={parameter.default}"
    )


def _docstring(thing: Any) -> Iterator[str]:
    """Write a docstring as Markdown, with arguments, results and errors as lists."""
    docstring = thing.docstring
    if (
        docstring is None and thing.is_class
    ):  # one of a stub, whose text is made when it is imported
        kind = getattr(importlib.import_module(thing.parent.path), thing.name)
        docstring = griffe.Docstring(inspect.getdoc(kind) or "", parent=thing, parser="google")
    for section in docstring.parsed if docstring else ():
        if section.kind.value == "text":
            yield f"{_fenced(section.value)}\n"
            continue
        if not isinstance(section.value, list):
            yield f"{section.value.description}\n"
            continue
        yield f"**{section.kind.value.capitalize()}**\n"
        for item in section.value:
            name = getattr(item, "name", "") or ""
            kind = str(item.annotation) if not name and item.annotation else name
            text = " ".join(item.description.split())
            yield f"- `{kind}`: {text}" if kind else f"- {text}"
        yield ""


def _fenced(text: str) -> str:
    """Put indented code between Markdown fences, so that the site colours it."""
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

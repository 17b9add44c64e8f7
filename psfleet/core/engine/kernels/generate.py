"""From a rule or an eviction policy to its kernels: its text goes into a template, the template to a file."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from string import Template
from textwrap import dedent
from types import ModuleType
from typing import Any

import numba

from psfleet.core.base.errors import RuleError
from psfleet.core.engine.kernels.cache import load_text
from psfleet.core.engine.kernels.row_format import RowFormat, row_parts, weight_parts
from psfleet.core.engine.kernels.rule_source import RuleSource
from psfleet.core.engine.rules.eviction_policy import EvictionPolicy
from psfleet.core.engine.rules.finding_rules import NamedDefinition
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.schema.table import RowPrecision

_SOURCES = Path(__file__).parent / "sources"
_ONE_USE = "\n        store_f32(row, PLACE + SCORES, np.float32(1))"


_ARGUMENTS = {
    "age": "float64(age)",
    "shows": "float64(load_f32(row, place))",
    "clicks": "float64(load_f32(row, place + 1))",
    "frequency": "decayed(float64(load_f32(row, place + FREQUENCY)), age)",
}


@cache
def static_kernels(name: str, *only: str) -> ModuleType:
    """The kernels of `sources/<name>.py`, which depend on no rule and no width; `only`: see `_chosen`."""
    return load_text(name, _chosen(name, only))


@cache
def width_kernels(name: str, dim: int, *only: str) -> ModuleType:
    """The kernels of `sources/<name>.py` for rows of `dim` values, a constant to the compiler.

    only: See `_chosen`.
    """
    return load_text(f"{name}_{dim}", _set(_chosen(name, only), "DIM", dim))


@cache
def dense_kernels(rule: Rule, l1: bool, l2: bool, width: int = 0) -> ModuleType:
    """`push` for dense arrays under this rule.

    Args:
        rule: Only its functions and the number of its slots matter here.
        l1, l2: True if these regularizations are added to the gradient.
        width: Number of weights of a unit, as a constant for the compiler; 0: an argument of the
            call.
    """
    text = RuleSource(rule, l1, l2, width=width)
    return compiled(
        rule,
        f"dense_{rule.name}",
        filled(
            "dense.txt",
            core=text.core(),
            signature=", ".join(["int64"] * (5 + len(text.pointers))),
            pointers=", ".join(text.pointers),
            unit_pointers=", ".join(text.unit_pointers()),
            load_scalars=text.load_scalars(),
        ),
    )


@cache
def pull_kernels(dim: int, is_plain: bool, stride: int) -> ModuleType:
    """`pull` for rows of `dim` weights, whatever their rule is.

    Args:
        is_plain: Rows are float32; else their weights are bfloat16.
        stride: Bytes of a row. Rows that do not begin where cache lines do have kernels of their own.
    """
    is_split = stride % 64 != 0 and 64 % stride != 0
    parts = weight_parts(is_plain)
    return load_text(f"pull_{dim}", filled("pull.txt", dim=dim, split=int(is_split), **parts))


@cache
def sparse_kernels(
    rule: Rule,
    l1: bool,
    l2: bool,
    dim: int,
    rests: bool,
    scores: int = 0,
    has_frequency: bool = False,
    precision: RowPrecision = "float32",
) -> ModuleType:
    """`push` for rows of `dim` weights under this rule, or `rest` for those that a push does not name.

    Args:
        rests: `rest`, which only a table that updates every row needs.
        scores: So many values follow a row's state, and a push's gradients: the ones are added to the others.
        has_frequency: One value more follows a row's state, its frequency: 1 in a new row.
        precision: Storage of rows.
    """
    text, form = RuleSource(rule, l1, l2, dim), RowFormat(rule, dim, precision)
    kernel = "push.txt" if not rests else "rest.txt" if form.plain else "rest_packed.txt"
    parts = row_parts(text, rule, form)
    parts["first_row"] += _ONE_USE * has_frequency
    return compiled(
        rule,
        f"sparse_{rule.name}_{dim}",
        filled(
            "rows_head.txt",
            _source(kernel),
            core=text.core(),
            dim=dim,
            scores=scores,
            place=form.words,
            stride=4 * (form.words + scores + has_frequency),
            load_scalars=text.load_scalars(),
            **parts,
        ),
    )


def address_of_kernel(kernel: Any) -> int:
    """Return the address of the machine code of a kernel, for kernels that call it."""
    compiled_kernel = kernel.overloads[kernel.signatures[0]]
    name = compiled_kernel.fndesc.llvm_func_name
    return int(compiled_kernel.library.get_pointer_to_function(name))


def filled(template: str, more: str = "", **parts: object) -> str:
    """The text of a template with its parts in their places; `more`: text behind the template."""
    return Template(_source(template) + more).substitute(parts)


def compiled(rule: NamedDefinition, stem: str, text: str) -> ModuleType:
    """The module of a rule's kernels.

    Raises:
        RuleError: The compiler does not take them.
    """
    try:
        return load_text(stem, text)
    except (numba.core.errors.NumbaError, TypeError, NameError) as error:
        why = " ".join(str(error).split())
        raise RuleError(f"the kernels of {rule} do not compile: {why[:300]}") from error


def _source(name: str) -> str:
    return (_SOURCES / name).read_text()


def _chosen(name: str, only: tuple[str, ...]) -> str:
    """The text of `sources/<name>.py` with only these of its kernels, as each is slow to compile; (): all."""
    parts = _source(f"{name}.py").split("\n\n\n")
    return "\n\n\n".join(
        part
        for part in parts
        if not only
        or not part.startswith("@kernel")
        or re.findall(r"(?m)^def (\w+)", part)[0] in only
    )


def _set(text: str, constant: str, value: int) -> str:
    """The text with the line `constant = ...` changed."""
    changed, count = re.subn(rf"(?m)^{constant} = .*$", f"{constant} = {value}", text)
    assert count == 1, f"the template defines {constant} {count} times"
    return changed


@cache
def eviction_kernels(policy: EvictionPolicy, pushed_scores: int) -> ModuleType:
    """`rank` and `use` for a policy with a score function.

    Args:
        policy: The policy.
        pushed_scores: So many scores of a row come before its frequency.

    Raises:
        RuleError: The compiler does not take its score function.
    """
    arguments = _ARGUMENTS | {"h": repr(tuple(map(float, policy.scalars())))}
    text = filled(
        "eviction.txt",
        factor=repr(_factor(policy.frequency_half_life)),
        frequency=pushed_scores if "frequency" in policy.arguments else -1,
        function=ast.unparse(_function(policy)),
        arguments=", ".join(arguments[name] for name in policy.arguments),
    )
    return compiled(policy, f"eviction_{policy.name}", text)


def _function(policy: EvictionPolicy) -> ast.FunctionDef:
    """The score function, by the name of `score` and without annotations."""
    function = policy.score()
    assert function is not None
    [tree] = ast.parse(dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    tree.name, tree.returns = "score", None
    for argument in tree.args.args:
        argument.annotation = None
    return tree


def _factor(half_life: float) -> float:
    """By what a frequency falls with each update: decimal, since a library's pow differs by machine."""
    if not half_life:
        return 1.0
    from decimal import Decimal  # few tables need it, and every process imports this module

    return float(Decimal(2) ** (-1 / Decimal(half_life)))

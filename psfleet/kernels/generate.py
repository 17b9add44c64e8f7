"""From a rule to its kernels: the rule's source text goes into a template, the template to a file."""

import re
from functools import cache
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

import numba

from psfleet.errors import RuleError
from psfleet.kernels.cache import load_text
from psfleet.kernels.packed_text import RowFormat, row_parts, weight_parts
from psfleet.kernels.rule_text import RuleSource
from psfleet.rules.finding_rules import NamedDefinition
from psfleet.rules.rule import Rule
from psfleet.schema.table import RowPrecision

_SOURCES = Path(__file__).parent / "sources"
_ONE_USE = "\n        store_f32(row, PLACE + SCORES, np.float32(1))"


@cache
def static_kernels(name: str) -> ModuleType:
    """The kernels of `sources/<name>.py`, which depend on no rule and no width."""
    return load_text(name, _source(f"{name}.py"))


@cache
def width_kernels(name: str, dim: int, more: str = "") -> ModuleType:
    """The kernels of `sources/<name>.py` for rows of `dim` values, a constant to the compiler.

    more: The text `sources/<name>_<more>.txt` follows: a kernel that few need who need another of them.
    """
    text = _source(f"{name}.py") + (_source(f"{name}_{more}.txt") if more else "")
    return load_text(f"{name}_{dim}", _set(text, "DIM", dim))


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
            "sparse.txt",
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


def _set(text: str, constant: str, value: int) -> str:
    """The text with the line `constant = ...` changed."""
    changed, count = re.subn(rf"(?m)^{constant} = .*$", f"{constant} = {value}", text)
    assert count == 1, f"the template defines {constant} {count} times"
    return changed

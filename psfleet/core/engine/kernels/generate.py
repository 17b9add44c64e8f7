"""Kernels by name: loads the fixed ones, and generates those of a rule or an eviction policy.

`static_kernels` and `width_kernels` take a file of sources/ as it is or for one width of rows. For a rule its
source text is put into a template of sources/ (rule_source.py, row_format.py write the parts), so that numba
compiles one loop for the rule with all sizes as constants. The result is a module, compiled once per machine
(cache.py). The first call for new arguments takes seconds if the cache is empty; later ones return at once.
"""

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
from psfleet.core.engine.rules.named_definition import NamedDefinition
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.schema.table import RowPrecision

_SOURCES = Path(__file__).parent / "sources"
_ONE_USE = "\n        store_f32(row, PLACE + SCORES, np.float32(1))"


# How a policy's arguments are computed in eviction.txt.
_ARGUMENTS = {
    "age": "float64(age)",
    "shows": "float64(load_f32(row, place))",
    "clicks": "float64(load_f32(row, place + 1))",
    "frequency": "decayed(float64(load_f32(row, place + FREQUENCY)), age)",
}


@cache
def static_kernels(name: str, *only: str) -> ModuleType:
    """Return the module of `sources/<name>.py`, whose kernels depend on no rule and no width.

    Args:
        name: Name of the file without suffix.
        only: Kernels to compile, or none for all of them. Each takes a while.
    """
    return load_text(name, _chosen(name, only))


@cache
def width_kernels(name: str, dim: int, *only: str) -> ModuleType:
    """Return the module of `sources/<name>.py` for rows of `dim` values, a constant to the compiler.

    Args:
        name: Name of the file without suffix.
        dim: Value of DIM there.
        only: Kernels to compile, or none for all of them.
    """
    return load_text(f"{name}_{dim}", _set(_chosen(name, only), "DIM", dim))


@cache
def dense_kernels(rule: Rule, l1: bool, l2: bool, width: int = 0) -> ModuleType:
    """Return the module with `push` for dense arrays under this rule.

    Args:
        rule: Rule whose functions and slots the kernel has. Its hyperparameters are arguments of each push.
        l1, l2: True if these regularizations are added to the gradient.
        width: Number of weights of a unit as a constant for the compiler, or 0 for an argument of each call.
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
    """Return the module with `pull` for rows of `dim` weights. It is the same for all rules.

    Args:
        dim: Number of weights of a row.
        is_plain: True if rows are float32, False if their weights are bfloat16.
        stride: Bytes of a row.
    """
    # A row that does not begin where a cache line does may touch one line more, to be prefetched too.
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
    """Return the module with `push` for rows of `dim` weights under this rule, or with `rest`.

    Args:
        rule: Rule of the table.
        l1, l2: True if these regularizations are added to the gradient.
        dim: Number of weights of a row.
        rests: True for `rest`, which updates the rows that a push does not name. Only tables that update
        every
            row need it.
        scores: Number of score values behind a row's state. A push has as many behind each gradient; they are
            added.
        has_frequency: True if the row's frequency follows the scores. It is 1 in a new row.
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
    """Return the text of a template, and of `more` behind it, with these parts filled in."""
    return Template(_source(template) + more).substitute(parts)


def compiled(rule: NamedDefinition, stem: str, text: str) -> ModuleType:
    """Return the module with this text, made for a rule or policy.

    Raises:
        RuleError: The compiler refuses the text, because of what the rule's functions do.
    """
    try:
        return load_text(stem, text)
    except (numba.core.errors.NumbaError, TypeError, NameError) as error:
        why = " ".join(str(error).split())
        raise RuleError(f"the kernels of {rule} do not compile: {why[:300]}") from error


def _source(name: str) -> str:
    """Return the text of a file of sources/."""
    return (_SOURCES / name).read_text()


def _chosen(name: str, only: tuple[str, ...]) -> str:
    """Return the text of `sources/<name>.py` with only these kernels, or with all if `only` is empty."""
    # Two blank lines separate the functions of these files. Helpers always stay; they cost nothing uncalled.
    parts = _source(f"{name}.py").split("\n\n\n")
    return "\n\n\n".join(
        part
        for part in parts
        if not only
        or not part.startswith("@kernel")
        or re.findall(r"(?m)^def (\w+)", part)[0] in only
    )


def _set(text: str, constant: str, value: int) -> str:
    """Return the text with the one line `constant = ...` changed to this value."""
    changed, count = re.subn(rf"(?m)^{constant} = .*$", f"{constant} = {value}", text)
    assert count == 1, f"the template defines {constant} {count} times"
    return changed


@cache
def eviction_kernels(policy: EvictionPolicy, pushed_scores: int) -> ModuleType:
    """Return the module with `rank` and `use` for a policy that has a score function.

    Args:
        policy: Policy of the table.
        pushed_scores: Number of scores of a row before its frequency.

    Raises:
        RuleError: The compiler refuses the score function.
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
    """Return the syntax of the score function, renamed to `score`, without annotations."""
    function = policy.score()
    assert function is not None
    [tree] = ast.parse(dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    tree.name, tree.returns = "score", None
    for argument in tree.args.args:
        argument.annotation = None
    return tree


def _factor(half_life: float) -> float:
    """Return the factor on a frequency for each update, given its half-life in updates, or 1 for 0.

    Computed in decimal, because the C library's pow is not the same on all machines.
    """
    if not half_life:
        return 1.0
    from decimal import Decimal  # few tables need it, and every process imports this module

    return float(Decimal(2) ** (-1 / Decimal(half_life)))

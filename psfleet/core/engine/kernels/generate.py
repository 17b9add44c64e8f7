"""Loads kernels by name, and generates the kernels of an optimizer's rule or of an eviction policy.

A kernel is a function that numba compiles from a text. Each function here makes the text of a module and
returns the compiled module, whose attributes are the kernels:

    function            file in sources/                           compiled once for each
    static_kernels      <name>.py, as it is                        name
    width_kernels       <name>.py, with DIM replaced               name, width
    pull_kernels        pull.txt                                   width, precision
    dense_kernels       dense.txt                                  rule
    sparse_kernels      rows_head.txt + push.txt or rest*.txt      rule, width, precision, scores
    eviction_kernels    eviction.txt                               policy

A .txt file is a `string.Template`. The source of the rule's functions is inserted into it (rule_source.py and
row_format.py write the parts), so that numba compiles one loop that contains the rule and in which all sizes
are constants.

The first call with new arguments takes seconds if the cache (cache.py) is empty; later calls return the same
module at once. All functions are thread-safe. Most kernels take addresses of arrays as int64, so the caller
keeps the arrays alive until the kernel returns. Kernels release the GIL unless their docstring says
otherwise.
"""

import ast
import re
from functools import cache
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

import numba

from psfleet.core.base.errors import RuleError, one_line
from psfleet.core.engine.kernels.cache import load_text
from psfleet.core.engine.kernels.row_format import RowFormat, row_parts, weight_parts
from psfleet.core.engine.kernels.rule_source import RuleSource
from psfleet.core.engine.rules.eviction_policy import EvictionPolicy
from psfleet.core.engine.rules.named_definition import NamedDefinition
from psfleet.core.engine.rules.rule import Rule, tree_of
from psfleet.core.engine.schema.table import RowPrecision

_SOURCES = Path(__file__).parent / "sources"
_ONE_USE = "\n        store_f32(row, PLACE + SCORES, np.float32(1))"  # frequency of a new row


# Expression for each argument that a policy's score function may have. In eviction.txt the expressions are
# part of `key_of`, where `row` is the address of a row and `place` the position of its scores.
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
        only: Names of the kernels to compile, which saves time, or none to compile every kernel of the file.
    """
    return load_text(name, _chosen(name, only))


@cache
def width_kernels(name: str, dim: int, *only: str) -> ModuleType:
    """Return the module of `sources/<name>.py` for rows of `dim` values, a constant to the compiler.

    Args:
        name: Name of the file without suffix.
        dim: Number of values of a row, which replaces DIM in the file.
        only: Names of the kernels to compile, or none to compile every kernel of the file.
    """
    return load_text(f"{name}_{dim}", _set(_chosen(name, only), "DIM", dim))


@cache
def dense_kernels(rule: Rule, l1: bool, l2: bool, width: int = 0) -> ModuleType:
    """Return the module with the kernel `push` that updates dense arrays by this rule.

    Args:
        rule: Rule whose functions are compiled in. Its hyperparameters are arguments of each call.
        l1, l2: True if this regularization is added to the gradient.
        width: Number of weights of a unit, which share sums (`Rule.unit`), as a constant for the compiler, or
            0 if each call passes the number.
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
    """Return the module with the kernel `pull` that reads rows of `dim` weights, for tables of any rule.

    Args:
        dim: Number of weights of a row.
        is_plain: True if weights are stored as float32, False if as bfloat16.
        stride: Distance from one row to the next in bytes.
    """
    # With such a stride some rows begin in the middle of a cache line and may extend over one more line than
    # their length says. The kernel has to prefetch that line too.
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
    pad: int = 0,
) -> ModuleType:
    """Return the module with the kernel `push`, or `rest`, that updates rows of a sparse table by this rule.

    Args:
        rule: Rule of the table.
        l1, l2: True if this regularization is added to the gradient.
        dim: Number of weights of a row.
        rests: True for the kernel `rest`, which updates the rows that a push does not name. Only tables that
            update every row in each step need it.
        scores: Number of scores (such as shows and clicks) that a row has behind its state. A push has as
            many behind each gradient, which are added to those of the row.
        has_frequency: True if a float32 behind the scores is the row's frequency, which is 1 in a new row.
        precision: Format of the weights and the state in memory.
        pad: Unused bytes behind each row.
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
            stride=4 * (form.words + scores + has_frequency) + pad,
            load_scalars=text.load_scalars(),
            **parts,
        ),
    )


def address_of_kernel(kernel: Any) -> int:
    """Return the address of a kernel's machine code, for another kernel that calls it."""
    compiled_kernel = kernel.overloads[kernel.signatures[0]]
    name = compiled_kernel.fndesc.llvm_func_name
    return int(compiled_kernel.library.get_pointer_to_function(name))


def filled(template: str, more: str = "", **parts: object) -> str:
    """Return the text of a template of sources/ with all parts filled in.

    Args:
        template: Name of the template's file.
        more: Text to append to the template before the parts are filled in.
        parts: Text for each `$name` of the template.
    """
    return Template(_source(template) + more).substitute(parts)


def compiled(rule: NamedDefinition, stem: str, text: str) -> ModuleType:
    """Compile a text that was generated for a rule or policy, and load it.

    Args:
        rule: Rule or policy, named in the error.
        stem: Start of the file's name.
        text: Python source of the module.

    Raises:
        RuleError: The text does not compile, because of code in the functions of the rule.
    """
    try:
        return load_text(stem, text)
    except (numba.core.errors.NumbaError, TypeError, NameError) as error:
        why = one_line(error)[:300]
        raise RuleError(f"the kernels of {rule} do not compile: {why}") from error


def _source(name: str) -> str:
    """Return the text of a file of sources/."""
    return (_SOURCES / name).read_text()


def _chosen(name: str, only: tuple[str, ...]) -> str:
    """Return the text of `sources/<name>.py` with only these kernels, or with all if `only` is empty."""
    # Two blank lines separate the functions of these files, so a part begins with a decorator. Only functions
    # marked @kernel are left out; helpers are always kept, because a helper that no kernel calls costs
    # nothing.
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
    """Return the module with the kernels `rank` and `use` for a policy that has a score function.

    Args:
        policy: Policy of the table.
        pushed_scores: Number of scores of a row that pushes add to. The frequency is the float32 behind them.

    Raises:
        RuleError: The score function does not compile.
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
    """Parse the score function of a policy; return it with the name `score` and without annotations.

    The annotations may name types that the generated module does not import.
    """
    function = policy.score()
    assert function is not None
    tree = tree_of(function)
    assert isinstance(tree, ast.FunctionDef)
    tree.name, tree.returns = "score", None
    for argument in tree.args.args:
        argument.annotation = None
    return tree


def _factor(half_life: float) -> float:
    """Return 2 ** (-1 / half_life), the factor on a frequency for each update of the table.

    It is computed in decimal arithmetic, because the C library's pow may differ in the last bit from machine
    to machine.

    Args:
        half_life: Half-life in updates, or 0 for frequencies that never fall, which gives the factor 1.
    """
    if not half_life:
        return 1.0
    from decimal import Decimal  # few tables need it, and every process imports this module

    return float(Decimal(2) ** (-1 / Decimal(half_life)))

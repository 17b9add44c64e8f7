"""The scalar functions of a rule, and what they may contain so that they can become kernels."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from psfleet.errors import RuleError

if TYPE_CHECKING:
    from psfleet.rules.rule import Rule

_MATH = ("copysign", "pow", "sqrt")  # the same bits in compiled code, in NumPy and on a device
_BUILT_IN = ("abs", "max", "min")
_KERNELS_OWN = re.compile(
    r"[a-z]\d*|add|apply|combined|end|fold(ed)?|gradient|helper|inlined|kernel|lanes|pull|push|rest|start|turn"
    r"|whole|(load|read|store|find|fill|prefetch|insert|first)(_\w+)?|(widen|narrow)_row|row_bits"
)


def functions_of(rule: "Rule") -> Iterator[Callable[..., tuple[float, ...]]]:
    """The functions that go into the rule's kernels."""
    functions = (rule.scalar(), rule.advance(), rule.direction(), rule.measure(), rule.combine())
    yield from (function for function in functions if function is not None)


def check_functions(rule: "Rule") -> None:
    """Refuse functions that kernels cannot take as they stand.

    Raises:
        RuleError: One uses a name, a number or a form that kernels do not know.
    """
    for function in functions_of(rule):
        why = fault_of(function)
        if why:
            raise RuleError(f"rule {rule.name!r}: the function {function.__name__} {why}")


@cache
def fault_of(function: Callable[..., Any], numbers: bool = False) -> str:
    """Describe the fault of a function; empty: none. numbers: they are no fault."""
    name = function.__name__
    if not inspect.isfunction(function) or function.__qualname__ != name or name == "<lambda>":
        return "must be defined by def at the top of its module"
    if _KERNELS_OWN.fullmatch(name):
        return "has a name that the kernels use themselves; give it another"
    try:
        (tree,) = ast.parse(inspect.getsource(function)).body
    except (OSError, SyntaxError, ValueError) as error:
        return f"has no source that can be read ({error}); put it into a module that is a file"
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        return "must be defined by a plain def, without decorators"
    names = {argument.arg for argument in tree.args.args} | {"math", *_BUILT_IN}
    names |= {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    for node in _body(tree):
        if isinstance(node, ast.Name) and node.id not in names:
            return f"uses {node.id!r}; it may use its arguments, {', '.join(_BUILT_IN)} and math"
        if isinstance(node, ast.Attribute) and not (_is_math(node) and node.attr in _MATH):
            choices = ", ".join(f"math.{name}" for name in _MATH)
            return f"uses {ast.unparse(node)!r}; of math it may use {choices}"
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not numbers:
            return (
                f"has the number {node.value!r}, which would widen its arithmetic to 64 bits; return "
                "it from `scalars` and take it from h"
            )
    return ""


@cache
def is_same_on_devices(function: Callable[..., Any]) -> bool:
    """Return whether devices give the same bits: their powers and remainders are other functions."""
    other = (ast.Pow, ast.FloorDiv, ast.Mod)
    return not any(
        (isinstance(node, ast.Attribute) and node.attr == "pow")
        or (isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, other))
        for node in ast.walk(ast.parse(dedent(inspect.getsource(function))))
    )


def _body(tree: ast.FunctionDef) -> Iterator[ast.AST]:
    """The syntax below the function's arguments, without the places in h."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        inner = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
        pending.extend(inner)


def _is_math(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "math"

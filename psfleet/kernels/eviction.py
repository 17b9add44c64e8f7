"""From an eviction policy to its kernels: the text of its score function goes into a template."""

import ast
import inspect
from decimal import Decimal
from functools import cache
from textwrap import dedent
from types import ModuleType

from psfleet.kernels.generate import compiled, filled
from psfleet.rules.eviction_policy import EvictionPolicy

_ARGUMENTS = {
    "age": "float64(age)",
    "shows": "float64(load_f32(row, place))",
    "clicks": "float64(load_f32(row, place + 1))",
    "frequency": "decayed(float64(load_f32(row, place + FREQUENCY)), age)",
}
_DEVICE_ARGUMENTS = {
    "age": "float64(age)",
    "shows": "float64(rows[at])",
    "clicks": "float64(rows[at + 1])",
    "frequency": "decayed(float64(rows[at + FREQUENCY]), age)",
}


@cache
def eviction_kernels(policy: EvictionPolicy, pushed_scores: int) -> ModuleType:
    """`rank` and `use` for a policy with a score function.

    Args:
        policy: The policy.
        pushed_scores: So many scores of a row come before its frequency.

    Raises:
        RuleError: The compiler does not take its score function.
    """
    text = _filled("eviction.txt", policy, pushed_scores, _function(policy), _ARGUMENTS)
    return compiled(policy, f"eviction_{policy.name}", text)


@cache
def device_eviction_kernels(policy: EvictionPolicy, pushed_scores: int) -> ModuleType:
    """The same for a device. Arguments as for `eviction_kernels`, whose compiler has taken the function."""
    from psfleet.kernels.device.cuda import load_kernels  # loads numba.cuda
    from psfleet.kernels.device.cuda_text import Rounded

    function = Rounded("rounded_double_product").visit(_function(policy))
    text = _filled("device_eviction.txt", policy, pushed_scores, function, _DEVICE_ARGUMENTS)
    return load_kernels(f"cuda_eviction_{policy.name}", text)


def _filled(
    template: str,
    policy: EvictionPolicy,
    pushed_scores: int,
    function: ast.AST,
    arguments: dict[str, str],
) -> str:
    arguments = arguments | {"h": repr(tuple(map(float, policy.scalars())))}
    return filled(
        template,
        factor=repr(_factor(policy.frequency_half_life)),
        frequency=pushed_scores if "frequency" in policy.arguments else -1,
        function=ast.unparse(function),
        arguments=", ".join(arguments[name] for name in policy.arguments),
    )


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
    return float(Decimal(2) ** (-1 / Decimal(half_life))) if half_life else 1.0

"""Parameter groups: each group trains as by an optimizer of its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet import fleet, optimizer
from psfleet.clip import ClipGradByGlobalNorm, ClipGradByNorm
from psfleet.core.base.errors import ConfigError
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program import names
from psfleet.core.runtime.strategy import DistributedStrategy
from psfleet.fluid import dygraph, nn, to_tensor
from psfleet.layers import mean
from psfleet.regularizer import L1Decay, L2Decay

pytestmark = pytest.mark.quick


def two(start: int = 0) -> tuple[Parameter, Parameter]:
    """Two parameters with equal values, whatever their names."""
    return (
        Parameter(f"a{start}", np.linspace(-1, 1, 6)),
        Parameter(f"b{start}", np.linspace(1, 2, 4).reshape(2, 2)),
    )


def gradients(a: Parameter, b: Parameter, step: int) -> list[tuple[Parameter, Any]]:
    """Seeded gradients of one step."""
    draw = np.random.default_rng(step)
    return [(p, draw.normal(size=p.shape).astype(np.float32)) for p in (a, b)]


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "Adam": (optimizer.Adam, {"weight_decay": 0.01}, {"beta1": 0.8, "epsilon": 1e-4}),
    "AdamW": (optimizer.AdamW, {"weight_decay": 0.01}, {"weight_decay": 0.1, "beta2": 0.9}),
    "Adamax": (optimizer.Adamax, {}, {"beta1": 0.5, "weight_decay": L1Decay(0.1)}),
    "Momentum": (optimizer.Momentum, {"momentum": 0.9}, {"momentum": 0.1, "use_nesterov": True}),
    "Adagrad": (optimizer.Adagrad, {}, {"epsilon": 0.1, "initial_accumulator_value": 0.5}),
    "Adadelta": (optimizer.Adadelta, {}, {"rho": 0.5}),
    "RMSProp": (optimizer.RMSProp, {}, {"rho": 0.5, "centered": True, "momentum": 0.5}),
    "Lamb": (optimizer.Lamb, {}, {"lamb_weight_decay": 0.2}),
    "SGD": (optimizer.SGD, {"grad_clip": ClipGradByNorm(0.5)}, {"weight_decay": L2Decay(0.1)}),
    "clip": (optimizer.SGD, {}, {"grad_clip": ClipGradByNorm(0.1)}),
    "older name": (optimizer.SGD, {"regularization": L2Decay(0.3)}, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_groups_are_optimizers_of_their_own(case: str) -> None:
    """The bits of each group are those of an optimizer with its settings; the rate is a factor."""
    make, common, own = CASES[case]
    a, b = two()
    whole = make(
        0.1, parameters=[{"params": [a]}, {"params": [b], "learning_rate": 0.5, **own}], **common
    )
    apart = two(1)
    merged = {**common, **own}
    if "weight_decay" in own:
        merged.pop("regularization", None)
    for p, opt in zip(apart, (make(0.1, **common), make(0.05, **merged)), strict=True):
        for step in range(4):
            opt.apply_gradients([(p, gradients(*apart, step)[p is apart[1]][1])])
    for step in range(4):
        whole.apply_gradients(gradients(a, b, step))
    np.testing.assert_array_equal(a.numpy(), apart[0].numpy())
    np.testing.assert_array_equal(b.numpy(), apart[1].numpy())


def test_a_global_norm_is_of_one_group() -> None:
    """Each group is clipped by its own gradients' norm, with the optimizer's clip too."""
    a, b = two()
    opt = optimizer.SGD(
        1.0, parameters=[{"params": [a]}, {"params": [b]}], grad_clip=ClipGradByGlobalNorm(1.0)
    )
    before = a.numpy().copy(), b.numpy().copy()
    grads = gradients(a, b, 3)
    opt.apply_gradients(grads)
    for p, was, (_, grad) in zip((a, b), before, grads, strict=True):
        norm = np.sqrt(np.sum(np.square(grad, dtype=np.float64)))
        expected = was - grad * np.float32(1.0 / norm) if norm > 1 else was - grad
        np.testing.assert_allclose(p.numpy(), expected, rtol=1e-6)


def test_the_documents_example() -> None:
    """Eager layers in groups: step(), clear_grad(), a schedule, the state of all of them."""
    with dygraph.guard(), names.guard():
        first, second = nn.Linear(10, 10), nn.Linear(10, 10)
        assert second.bias is not None
        out = second(first(to_tensor(np.ones((2, 10), np.float32))))
        adam = optimizer.Adam(
            learning_rate=optimizer.lr.StepDecay(0.1, 1, 0.5),
            parameters=[
                {"params": first.parameters()},
                {
                    "params": second.parameters(),
                    "weight_decay": 0.001,
                    "learning_rate": 0.1,
                    "beta1": 0.8,
                },
            ],
            weight_decay=0.01,
            beta1=0.9,
        )
        mean(out).backward()
        before = second.bias.numpy().copy()
        adam.step()
        adam.clear_grad()
    assert np.abs(second.bias.numpy() - before).max() == pytest.approx(0.01, rel=1e-3)
    assert len(adam.parameters) == 4
    assert adam.rule(second.bias).beta1 == 0.9  # type: ignore[attr-defined]  # the whole's
    assert adam.lender(second.bias).rule(second.bias).beta1 == 0.8  # type: ignore[attr-defined]
    assert {name.rpartition(".")[0] for name in adam.get_opti_var_name_list()} == {
        p.name for p in adam.parameters
    }
    assert adam.get_opti_var_name_list()[0] in adam.state_dict()


def test_a_strategy_that_replaces_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """lars, lamb and dgc would lose the groups, so they refuse them."""
    monkeypatch.setattr(fleet._fleet, "_strategy", None)
    strategy = DistributedStrategy(lars=True)
    made = optimizer.Momentum(0.1, parameters=[{"params": [two()[0]], "weight_decay": 0.1}])
    with pytest.raises(ConfigError, match="strategy lars replaces the optimizer Momentum"):
        optimizer.DistributedOptimizer(made, strategy)

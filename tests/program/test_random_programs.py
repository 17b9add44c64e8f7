"""Properties of programs that nobody wrote: eager = static = recomputed, whatever the graph."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import psfleet as ps
from psfleet import layers
from psfleet.program.program import default_startup_program
from psfleet.program.variable import Variable, to_variable
from tests.program.hand import HandSGD
from tests.runtimes import own_programs

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
Choices = list[tuple[int, int, int]]
GRAPHS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=14
)


def build(x: Variable, choices: Choices) -> tuple[Variable, list[Variable]]:
    """A loss over a graph with shared and unused variables; and the variables of the graph."""
    pool = [x]
    for kind, first, second in choices:
        a, b = pool[first % len(pool)], pool[second % len(pool)]
        match kind:
            case 0:
                new = layers.fc(a, 5, act="relu")
            case 1:
                new = layers.dropout(a, 0.3)
            case 2:
                new = layers.tanh(a) * b
            case 3:
                new = a + b
            case 4:
                new = layers.fc([a, b], 5)
            case 5:
                new = layers.layer_norm(a)
            case 6:
                new = layers.slice(layers.concat([a, b], axis=1), [1], [2], [7])
            case _:
                new = layers.softmax(layers.matmul(a, b, transpose_y=True) * 0.1)
                new = layers.matmul(new, b)
        pool.append(new)
    return layers.mean(layers.fc(pool[-1], 1) + layers.reduce_sum(x * 0.01)), pool[1:]


def run_static(choices: Choices, marks: list[int] | None = None) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a program, recomputed if there are marks."""
    with own_programs():
        loss, pool = build(layers.data("x", [6, 5]), choices)
        sgd = HandSGD(0)
        needed = {record.output for record in _ancestors(loss)}
        cuts = (
            None if marks is None else [v for i, v in enumerate(pool) if i in marks and v in needed]
        )
        sgd.minimize(loss, checkpoints=cuts)
        (value,) = ps.Executor().run(feed={"x": X}, fetch_list=[loss])
        return value.item(), sgd.last


def run_eager(choices: Choices) -> tuple[float, dict[str, Any]]:
    """The same, computed at once."""
    with own_programs():
        loss, _ = build(to_variable(X), choices)
        loss.backward()
        return loss.item(), {
            name: parameter.grad
            for name, parameter in default_startup_program().parameters.items()
            if parameter.grad is not None
        }


def _ancestors(loss: Variable) -> list[Any]:
    from psfleet.program.gradient import ancestors

    return ancestors([loss])


def assert_same(first: tuple[float, dict[str, Any]], second: tuple[float, dict[str, Any]]) -> None:
    """Equal bit for bit."""
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        np.testing.assert_array_equal(gradient, second[1][name])


@given(GRAPHS)
@settings(max_examples=20, deadline=None)
def test_eager_is_static(choices: Choices) -> None:
    """Loss and gradients of random graphs."""
    assert_same(run_static(choices), run_eager(choices))


@given(GRAPHS, st.lists(st.integers(0, 13), max_size=6))
@settings(max_examples=25, deadline=None)
def test_recomputed_is_plain(choices: Choices, marks: list[int]) -> None:
    """Random checkpoints of random graphs."""
    assert_same(run_static(choices), run_static(choices, marks))

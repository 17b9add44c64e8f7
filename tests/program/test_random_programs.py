"""Properties of programs that nobody wrote: eager = static = recomputed, whatever the graph."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from psfleet import layers
from psfleet.program.gradient import ancestors
from psfleet.program.variable import Variable
from tests.program.hand import Build, assert_same, run_eager, run_static

FEED = {"x": np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)}
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


def graph(choices: Choices, marks: list[int] | None = None) -> Build:
    """A random graph, with checkpoints where there are marks."""

    def build_marked(x: Variable) -> tuple[Variable, list[Variable] | None]:
        loss, pool = build(x, choices)
        if marks is None:
            return loss, None
        needed = {record.output for record in ancestors([loss])}
        return loss, [v for i, v in enumerate(pool) if i in marks and v in needed]

    return build_marked


@given(GRAPHS)
@settings(max_examples=20, deadline=None)
def test_eager_is_static(choices: Choices) -> None:
    """Loss and gradients of random graphs."""
    assert_same(run_static(graph(choices), FEED), run_eager(graph(choices), FEED))


@given(GRAPHS, st.lists(st.integers(0, 13), max_size=6))
@settings(max_examples=25, deadline=None)
def test_recomputed_is_plain(choices: Choices, marks: list[int]) -> None:
    """Random checkpoints of random graphs."""
    assert_same(run_static(graph(choices), FEED), run_static(graph(choices, marks), FEED))

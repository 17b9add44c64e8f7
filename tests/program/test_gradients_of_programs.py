"""What a script does with the pairs of backward(): clips and regularizers, and whole sparse parameters."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet import fluid, layers, optimizer, to_variable
from psfleet.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, set_gradient_clip
from psfleet.core.base.errors import PsfleetError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program import names
from psfleet.core.graph.program.attribute import ParamAttr
from psfleet.core.graph.program.program import (
    Program,
    default_main_program,
    default_startup_program,
    eager_guard,
    program_guard,
)
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current
from psfleet.optimizer import SGD, L1Decay, L2Decay
from tests.runtimes import own_programs, own_runtime

pytestmark = pytest.mark.quick

IDS = np.array([[1, 2], [3, 3], [0, 1]])
CLIPS: dict[str, Callable[[], Any]] = {
    "value": lambda: ClipGradByValue(0.02, -0.01),
    "norm": lambda: ClipGradByNorm(0.05),
    "global": lambda: ClipGradByGlobalNorm(0.05),
    "global, not reached": lambda: ClipGradByGlobalNorm(1e3),
}


def trained(train: Callable[[Any], Any], kind: str = "sparse", also: Any = None) -> list[Any]:
    """Weights after three steps of a program with rows and dense weights, one of them left out of clips."""
    with own_runtime(), own_programs(seed=3):
        ids = layers.data("ids", [None, 2], "int64")
        count = None if kind == "distributed" else 5
        rows = layers.embedding(
            ids, [count, 3], kind == "sparse", kind == "distributed", param_attr=ParamAttr("e")
        )
        hidden = layers.fc(layers.reshape(rows, [-1, 6]), 4, param_attr=ParamAttr(need_clip=False))
        loss = layers.mean(layers.square(layers.fc(hidden, 1) + 3.0))
        table = default_startup_program().parameters["e"]
        train(loss if also is None else loss + also(table))
        for _ in range(3):
            Executor().run(feed={"ids": IDS}, fetch_list=[loss])
        weights = [p for p in default_main_program().all_parameters() if p is not table]
        return [p.numpy().copy() for p in weights] + [table.lookup(np.arange(5)).copy()]


def same(actual: list[Any], expected: list[Any], atol: float = 0.0) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("value", "dense"), ("norm", "sparse"), ("global", "distributed")),
        *(("global", "dense"), ("global, not reached", "sparse")),
    ],
)
def test_clips_of_pairs(name: str, kind: str) -> None:
    """A clip called on backward()'s pairs, and set_gradient_clip, give the bits of grad_clip; gradients by
    rows stay by rows; need_clip=False leaves one out.
    """

    def by_pairs(loss: Any) -> None:
        opt = SGD(0.1)
        opt.apply_gradients(CLIPS[name]()(opt.backward(loss)))

    def by_program(loss: Any) -> None:
        set_gradient_clip(CLIPS[name]())
        SGD(0.1).minimize(loss)

    def plain(loss: Any) -> None:
        SGD(0.1).minimize(loss)

    expected = trained(lambda loss: SGD(0.1, grad_clip=CLIPS[name]()).minimize(loss), kind)
    same(trained(by_pairs, kind), expected)
    same(trained(by_program, kind), expected)
    changed = any((a != b).any() for a, b in zip(trained(plain, kind), expected, strict=True))
    assert changed == (name != "global, not reached")


@pytest.mark.parametrize("name", CLIPS)
def test_pairs_without_a_gradient(name: str) -> None:
    """They stay, among arrays, gradients by rows and variables; alone too."""
    p, q, e = (Parameter(n, np.ones((2, 2))) for n in "pqe")
    rows = SparseGrad(np.array([1]), np.ones((1, 2), np.float32))
    clip = CLIPS[name]()
    pairs = clip([(p, None), (q, np.ones((2, 2), np.float32)), (e, rows)])
    assert pairs[0] == (p, None)
    assert [pair[0] for pair in pairs] == [p, q, e]
    assert isinstance(pairs[2][1], SparseGrad)
    assert clip([(p, None)]) == [(p, None)]
    trained(lambda loss: clip([(p, None), *SGD(0.1).backward(loss)]) and SGD(0.1).minimize(loss))


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("decay", [L1Decay(0.3), L2Decay(0.3)], ids=str)
def test_append_regularization_ops(decay: Any, kind: str) -> None:
    """In a program both decays give the weights that the servers' decay gives."""

    def appended(loss: Any) -> None:
        opt = SGD(0.1)
        opt.apply_gradients(opt.append_regularization_ops(opt.backward(loss), decay))

    expected = trained(lambda loss: SGD(0.1, weight_decay=decay).minimize(loss), kind)
    same(trained(appended, kind), expected, 1e-6)


@pytest.mark.parametrize(
    ("decay", "clip"), [(L1Decay(0.3), "value"), (L2Decay(0.3), "norm"), (L1Decay(0.3), "global")]
)
def test_clip_then_regularize(decay: Any, clip: str) -> None:
    """Both together, in a program and with arrays, are the optimizer's own clip and decay."""

    def both(loss: Any) -> None:
        opt = SGD(0.1)
        opt.apply_gradients(opt.append_regularization_ops(CLIPS[clip]()(opt.backward(loss)), decay))

    made = lambda loss: SGD(0.1, weight_decay=decay, grad_clip=CLIPS[clip]()).minimize(loss)  # noqa: E731
    same(trained(both), trained(made), 1e-6)
    start = np.array([[1.0, -2.0], [0.5, 0.0]], np.float32)
    rows = SparseGrad(np.array([1, 1]), np.ones((2, 2), np.float32))
    w, v = Parameter("w", start, sparse=True), Parameter("v", start, sparse=True)
    opt = SGD(0.1)
    opt.apply_gradients(opt.append_regularization_ops(CLIPS[clip]()([(w, rows)]), decay))
    SGD(0.1, weight_decay=decay, grad_clip=CLIPS[clip]()).apply_gradients([(v, rows)])
    np.testing.assert_allclose(w.numpy(), v.numpy(), rtol=1e-6)


WHOLE: dict[str, Callable[[Any], Any]] = {
    "square": layers.square,
    "abs": layers.abs,
    "exp": layers.exp,
    "tanh": layers.tanh,
    "sigmoid": layers.sigmoid,
    "relu": layers.relu,
    "softmax": layers.softmax,
    "scale": lambda e: layers.scale(e, 2.0, 1.0),
    "add": lambda e: layers.elementwise_add(e, e),
    "times": lambda e: layers.elementwise_mul(e, np.full((5, 3), 2, np.float32)),
    "matmul": lambda e: layers.matmul(e, np.ones((3, 2), np.float32)),
    "gather": lambda e: layers.gather(e, to_variable(np.array([1, 1]))),
    "concat": lambda e: layers.concat([e, e]),
    "transpose": lambda e: layers.transpose(e, [1, 0]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_sparse_parameters(name: str) -> None:
    """Any operation on a sparse parameter takes all of its rows; beside a lookup the gradients add up to the
    dense parameter's.
    """

    def penalty(table: Any) -> Any:
        return layers.mean(WHOLE[name](table))

    def train(loss: Any) -> None:
        SGD(0.1).minimize(loss)

    same(trained(train, "sparse", penalty), trained(train, "dense", penalty), 1e-6)
    with eager_guard():
        w, v = Parameter("w", np.ones((5, 3)), sparse=True), Parameter("v", np.ones((5, 3)))
        for parameter in (w, v):
            layers.mean(WHOLE[name](parameter)).backward()
        np.testing.assert_array_equal(np.asarray(w.grad), np.asarray(v.grad))


def test_rows_for_any_id_have_no_whole() -> None:
    """What needs all rows, or an array of them, says so in a sentence."""
    with pytest.raises(
        PsfleetError, match="Square needs all rows of 'e', which has rows for any id"
    ):
        trained(
            lambda loss: SGD(0.1).minimize(loss),
            "distributed",
            lambda table: layers.mean(layers.square(table)),
        )
    e = Parameter("e", shape=(-1, 2), sparse=True, distributed=True)
    rows = SparseGrad(np.array([1]), np.ones((1, 2), np.float32))
    with pytest.raises(PsfleetError, match="'e' has rows for any id, and no array of them"):
        SGD(0.1).append_regularization_ops([(e, rows)], L1Decay(0.1))


def test_set_gradient_clip() -> None:
    """It can name parameters, is taken back by None, and gives way to the optimizer's own clip."""
    with own_programs():
        x = layers.data("x", [None, 2])
        layers.fc(layers.fc(x, 2, name="a"), 1, name="b")
        known = default_startup_program().parameters
        fluid.clip.set_gradient_clip(ClipGradByValue(1.0), ["a.w_0", known["b.w_0"]])
        assert [name for name, p in known.items() if p.gradient_clip] == ["a.w_0", "b.w_0"]
        fluid.clip.set_gradient_clip(None, param_list=["a.w_0"])
        assert known["a.w_0"].gradient_clip is None
        for said, sentence in (
            ((3,), "clip is 3, it must be a ClipGradBase or None"),
            (
                (None, ["c"]),
                "param_list has 'c', which is no parameter of the program; it has a.w_0",
            ),
            ((None, "a.w_0"), "param_list is 'a.w_0', it must be a list"),
        ):
            with pytest.raises(PsfleetError, match=sentence):
                set_gradient_clip(*said)

    def both(loss: Any) -> None:
        set_gradient_clip(ClipGradByValue(1e-9))
        SGD(0.1, grad_clip=ClipGradByNorm(0.05)).minimize(loss)

    same(
        trained(both),
        trained(lambda loss: optimizer.SGD(0.1, grad_clip=ClipGradByNorm(0.05)).minimize(loss)),
    )


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse": {"is_sparse": True},
    "distributed": {"is_distributed": True},
}


def looked_up(kind: str, places: int) -> tuple[list[float], np.ndarray]:
    """The losses of three steps of SGD and the table's rows after them."""
    fresh = EmbeddedRuntime()
    before, startup = current().use(fresh), Program()
    with names.guard(), program_guard(Program(), startup):
        fields = [layers.data(f"ids_{i}", [None, 2], dtype="int64") for i in range(places)]
        rows = [layers.embedding(ids, [20, 4], name="shared", **KINDS[kind]) for ids in fields]
        loss = layers.mean(layers.square(layers.sums(rows) - 1.0))
        optimizer.SGD(0.5).minimize(loss)
        dice, losses = np.random.default_rng(places), []
        for _ in range(3):
            feed = {f"ids_{i}": dice.integers(0, 20, (4, 2)) for i in range(places)}
            losses += Executor().run(feed=feed, fetch_list=[loss])
        found = startup.parameters["shared.w_0"].lookup(np.arange(20))
    current().use(before)
    fresh.close()
    return [float(loss) for loss in losses], found


@pytest.mark.parametrize("places", [1, 2, 10])
@pytest.mark.parametrize("kind", ["sparse", "distributed"])
def test_places(kind: str, places: int) -> None:
    """However many places look it up, a table by rows trains as a dense one.

    To rounding: a dense gradient is summed in each place and then over the places.
    """
    losses, rows = looked_up(kind, places)
    expected_losses, expected = looked_up("dense", places)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-6)
    # It has moved from the first values, which are within 0.01.
    assert np.abs(expected).max() > 0.05

"""DGCMomentum: what is sent, what is kept, and that nothing is lost."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.optimizer import DGCMomentum, L1Decay, Momentum
from tests.optimizer.workers import run_two_workers
from tests.recordings import arrays, hyper


@pytest.mark.parametrize("shape", ["7", "5x3"])
def test_recording(shape: str) -> None:
    """With nothing held back the rule is the reference's: momentum, then SGD with what is sent."""
    z, h = arrays(f"dgc_momentum_{shape}"), hyper(f"dgc_momentum_{shape}")
    begin = int(h["rampup_begin_step"])
    w = Parameter("w", z["param0"])
    opt = DGCMomentum(h["lr"], h["mu"], begin, sparsity=[0.0])
    for t, gradient in enumerate(z["grads"]):
        opt.apply_gradients([(w, gradient / h["nranks"])])  # the servers' mean over the workers
        np.testing.assert_allclose(w.numpy(), z["params"][t], rtol=0, atol=2e-6)


def gradients(count: int, shape: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(5)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(count)]


def test_before_compression_it_is_momentum() -> None:
    """Until rampup_begin_step, and for sparse parameters always, the bits are Momentum's."""
    pair = [Parameter(name, np.ones((6, 5))) for name in "ab"]
    rows = [Parameter(name, np.ones((6, 5)), sparse=True) for name in "cd"]
    ids = np.array([1, 4])
    for opt, w, e in zip([DGCMomentum(0.1, 0.9, 3), Momentum(0.1, 0.9)], pair, rows, strict=True):
        for number, gradient in enumerate(gradients(6, (6, 5))):
            opt.apply_gradients(
                [(e, SparseGrad(ids, gradient[:2]))] + ([(w, gradient)] if number < 3 else [])
            )
    np.testing.assert_array_equal(pair[0].numpy(), pair[1].numpy())
    np.testing.assert_array_equal(rows[0].numpy(), rows[1].numpy())


@pytest.mark.parametrize("nesterov", [False, True])
def test_small_parameters_are_sent_whole(nesterov: bool) -> None:
    """The smallest ones beside a large one, while all that costs no more bytes than its elements: their
    steps are Momentum's to rounding, the large one's and the next one's are compressed."""
    sizes = {"large": 3000, "middle": 60, "bias": 20, "tiny": 1}
    opt = DGCMomentum(0.1, 0.9, 0, sparsity=[0.99], use_nesterov=nesterov)
    plain = Momentum(0.1, 0.9, use_nesterov=nesterov)
    values = {name: Parameter(name, np.zeros(size)) for name, size in sizes.items()}
    expected = {name: Parameter(f"{name} too", np.zeros(size)) for name, size in sizes.items()}
    for step in range(6):
        given = {name: gradients(step + 1, (size,))[-1] for name, size in sizes.items()}
        opt.apply_gradients([(values[name], g) for name, g in given.items()])
        plain.apply_gradients([(expected[name], g) for name, g in given.items()])
    for name in ("tiny", "bias"):
        np.testing.assert_allclose(
            values[name].numpy(), expected[name].numpy(), rtol=1e-5, atol=1e-6
        )
    for name in ("middle", "large"):
        assert np.count_nonzero(values[name].numpy()) < sizes[name] / 2


class Reference:
    """The reference's operators in float64: dgc_momentum until `begin`, then dgc without a limit on what
    is sent (the share 1 - sparsity); weight decay is added to each worker's gradient first.
    """

    def __init__(self, start: Any, rate: float, momentum: float, begin: int, decay: Any) -> None:
        self.w = start.astype(np.float64)
        self._rate, self._momentum, self._begin, self._decay = rate, momentum, begin, decay
        self._u: list[Any] = []
        self._v: list[Any] = []

    def step(self, number: int, grads: list[Any], sparsity: float, clip: float | None) -> None:
        """One step of a worker for each gradient."""
        if not self._u:
            self._u = [np.zeros_like(self.w) for _ in grads]
            self._v = [np.zeros_like(self.w) for _ in grads]
        total = np.zeros_like(self.w)
        for worker, gradient in enumerate(grads):
            g = gradient.astype(np.float64)
            if clip is not None and number >= self._begin:
                g = g * min(1.0, clip / len(grads) ** 0.5 / np.sqrt((g * g).sum()))
            rest = 0 * g if number >= self._begin and not sparsity else self._u[worker]
            u = self._u[worker] = self._momentum * rest + g + self._decay(self.w)
            if number < self._begin:
                total += u  # the mean of the workers' velocities is the velocity of the mean
                continue
            v = self._v[worker] + u
            count = max(1, round(v.size * (1 - sparsity)))
            sent = np.zeros(v.size, bool)
            sent[np.argsort(-np.abs(v).reshape(-1), kind="stable")[:count]] = True
            sent = sent.reshape(v.shape)
            total += np.where(sent, v, 0)
            self._u[worker], self._v[worker] = np.where(sent, 0, u), np.where(sent, 0, v)
        self.w -= self._rate * total / len(grads)


DECAYS: dict[str, tuple[Any, Any]] = {
    "none": (None, lambda w: 0 * w),
    "l2": (0.1, lambda w: 0.1 * w),
    "l1": (L1Decay(0.05), lambda w: 0.05 * np.sign(w)),
}


@pytest.mark.parametrize(
    ("decay", "sparsity", "clip"),
    [
        *(("none", [0.0], 1.5), ("l2", [0.0], None), ("l1", [0.0], None)),
        *(("none", [0.5, 0.75], None), ("l2", [0.5, 0.75], 1.5), ("l1", [0.5, 0.75], 1.5)),
    ],
)
def test_follows_the_reference_across_the_ramp(
    decay: str, sparsity: list[float], clip: float | None
) -> None:
    """Momentum, the ramp and compression give the reference's float64 weights: the largest are sent,
    the others kept, and the decay is in the momentum before and after compression begins, and not clipped."""
    start = np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)
    w, said = Parameter("w", start), DECAYS[decay]
    given = {"sparsity": sparsity, "weight_decay": said[0], "local_grad_clip_norm": clip}
    opt = DGCMomentum(0.01, 0.9, 5, 4, num_trainers=1, **given)
    model = Reference(start, 0.01, 0.9, 5, said[1])
    for number, gradient in enumerate(gradients(20, (6, 4))):
        model.step(number, [gradient], opt.sparsity(), clip)
        opt.apply_gradients([(w, gradient)])
        np.testing.assert_allclose(w.numpy(), model.w, rtol=0, atol=2e-6)


def test_a_parameters_own_regularizer_comes_first() -> None:
    """It replaces the optimizer's; rows of sparse parameters are decayed by the servers."""
    plain, own = Parameter("plain", np.ones(4)), Parameter("own", np.ones(4), regularizer=0.0)
    rows = Parameter("rows", np.ones((4, 5)), sparse=True)
    opt = DGCMomentum(0.1, 0.0, 0, sparsity=[0.0], weight_decay=0.5)
    zero = SparseGrad(np.arange(4), np.zeros((4, 5), np.float32))
    opt.apply_gradients([(plain, np.zeros(4)), (own, np.zeros(4)), (rows, zero)])
    np.testing.assert_allclose(plain.numpy(), 0.95, rtol=1e-6)
    np.testing.assert_array_equal(own.numpy(), 1)
    np.testing.assert_allclose(rows.numpy(), 0.95, rtol=1e-6)


SCRIPT = """
import sys
import numpy as np
from psfleet import fleet, optimizer
from psfleet.core.graph.parameters.parameter import Parameter

fleet.init()
w = Parameter("w", np.load("start.npy"))
opt = fleet.distributed_optimizer(
    optimizer.DGCMomentum(0.01, 0.9, 5, 4, [0.5, 0.75], weight_decay=0.1, local_grad_clip_norm=2.0)
)
for both in np.load("grads.npy"):
    opt.apply_gradients([(w, both[fleet.worker_index()])])
if fleet.worker_index() == 0:
    np.save("end.npy", w.numpy())
fleet.barrier_worker()
fleet.stop_worker()
"""


def test_two_workers_decay_once(tmp_path: Path) -> None:
    """Each worker adds the whole decay and the servers take the mean: a sync step of two workers has it once,
    and the weights are the float64 model's, whose sparsities take turns in equal parts of rampup_step."""
    rng = np.random.default_rng(7)
    start = rng.normal(size=(6, 4)).astype(np.float32)
    grads = rng.normal(size=(20, 2, 6, 4)).astype(np.float32)
    np.save(tmp_path / "start.npy", start)
    np.save(tmp_path / "grads.npy", grads)
    (tmp_path / "train.py").write_text(SCRIPT)
    run_two_workers(tmp_path / "train.py", 2)
    model = Reference(start, 0.01, 0.9, 5, DECAYS["l2"][1])
    fractions = [0.0] * 5 + [0.5, 0.5] + [0.75] * 13
    for number, (both, share) in enumerate(zip(grads, fractions, strict=True)):
        model.step(number, list(both), share, 2.0)
    np.testing.assert_allclose(np.load(tmp_path / "end.npy"), model.w, rtol=0, atol=2e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_velocity_is_handed_over(nesterov: bool) -> None:
    """Compression begins with the velocity of the steps before, also of a state that was set by then: a
    parameter that is sent whole goes on as under Momentum.
    """
    given = gradients(12, (3,))
    w, expected = Parameter("w", np.ones(3)), Parameter("expected", np.ones(3))
    large = np.zeros(2000, np.float32)
    plain = Momentum(0.1, 0.9, use_nesterov=nesterov)
    first, second = (
        DGCMomentum(0.1, 0.9, 6, sparsity=[0.99], use_nesterov=nesterov) for _ in range(2)
    )
    beside = Parameter("beside", large)
    for number, gradient in enumerate(given):
        if number == 4:
            second.set_state_dict(first.state_dict())
        opt = first if number < 4 else second
        opt.apply_gradients([(w, gradient), (beside, large)])
        plain.apply_gradients([(expected, gradient)])
        np.testing.assert_allclose(w.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)

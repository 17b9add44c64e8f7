"""DGCMomentum: what is sent, what is kept, and that nothing is lost."""

from typing import Any

import numpy as np
import pytest

from psfleet.errors import ConfigError
from psfleet.optimizer import SGD, DGCMomentum, Momentum
from psfleet.parameter import Parameter, SparseGrad
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


@pytest.mark.parametrize("nesterov", [False, True])
def test_nothing_is_lost(nesterov: bool) -> None:
    """All that was accumulated was either sent or is kept: w0 - w = lr * (sum of u - kept v)."""
    w = Parameter("w", np.zeros((8, 5)))
    opt = DGCMomentum(1.0, 0.0, 0, sparsity=[0.8], use_nesterov=nesterov)
    total = np.zeros((8, 5))
    for gradient in gradients(12, (8, 5)):
        opt.apply_gradients([(w, gradient)])
        total += gradient
    kept = opt.state_dict()["w.dgc_v"]
    assert np.count_nonzero(kept)
    np.testing.assert_allclose(-w.numpy() + kept, total, atol=1e-5)


def test_the_largest_are_sent() -> None:
    """A step moves the share 1 - sparsity of the weights, those with the largest accumulated values;
    there velocity and rest start anew (factor masking), elsewhere they grow (momentum correction).
    """
    w, opt = Parameter("w", np.zeros(10)), DGCMomentum(1.0, 0.5, 0, sparsity=[0.8])
    gradient = np.array([1, -9, 2, 3, 8, 4, 5, -6, 7, 0], np.float32)
    opt.apply_gradients([(w, gradient)])
    assert np.flatnonzero(w.numpy()).tolist() == [1, 4]
    state = opt.state_dict()
    assert state["w.dgc_u"][1] == state["w.dgc_v"][4] == 0
    opt.apply_gradients([(w, gradient)])
    # After two steps an element that was not sent has v = g + (0.5 g + g).
    assert np.flatnonzero(w.numpy()).tolist() == [1, 4, 7, 8]
    assert w.numpy()[8] == -2.5 * 7
    assert opt.state_dict()["w.dgc_v"][3] == 2.5 * 3


def test_ramp_up() -> None:
    """The sparsities take turns in equal parts of rampup_step, the last one stays."""
    w, opt = Parameter("w", np.zeros(4)), DGCMomentum(0.1, 0.9, 2, 4, sparsity=[0.25, 0.5])
    seen = []
    for _ in range(9):
        seen.append(opt.sparsity())
        opt.apply_gradients([(w, np.ones(4))])
    assert seen == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_before_compression_it_is_momentum() -> None:
    """Until rampup_begin_step, and for sparse parameters always, the bits are Momentum's."""
    pair = [Parameter(name, np.ones((6, 2))) for name in "ab"]
    rows = [Parameter(name, np.ones((6, 2)), sparse=True) for name in "cd"]
    ids = np.array([1, 4])
    for opt, w, e in zip([DGCMomentum(0.1, 0.9, 3), Momentum(0.1, 0.9)], pair, rows, strict=True):
        for number, gradient in enumerate(gradients(6, (6, 2))):
            opt.apply_gradients(
                [(e, SparseGrad(ids, gradient[:2]))] + ([(w, gradient)] if number < 3 else [])
            )
    np.testing.assert_array_equal(pair[0].numpy(), pair[1].numpy())
    np.testing.assert_array_equal(rows[0].numpy(), rows[1].numpy())


def test_local_clipping() -> None:
    """Each gradient is clipped to local_grad_clip_norm / sqrt(trainers) before it is accumulated."""
    w = Parameter("w", np.zeros(4))
    opt = DGCMomentum(1.0, 0.0, 0, sparsity=[0.0], local_grad_clip_norm=3.0, num_trainers=9)
    opt.apply_gradients([(w, np.array([0, 0, 3, 4]))])
    np.testing.assert_allclose(w.numpy(), [0, 0, -0.6, -0.8], rtol=1e-6)


def test_state_goes_on() -> None:
    """A second optimizer with the state of the first continues with the same bits."""
    steps = gradients(8, (5, 4))
    whole, halves = Parameter("whole", np.ones((5, 4))), Parameter("halves", np.ones((5, 4)))
    one, first, second = (DGCMomentum(0.1, 0.9, 2, sparsity=[0.5]) for _ in range(3))
    for gradient in steps:
        one.apply_gradients([(whole, gradient)])
    for gradient in steps[:4]:
        first.apply_gradients([(halves, gradient)])
    second.set_state_dict(first.state_dict())
    for gradient in steps[4:]:
        second.apply_gradients([(halves, gradient)])
    np.testing.assert_array_equal(halves.numpy(), whole.numpy())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rampup_begin_step": -1}, "rampup_begin_step is -1"),
        ({"rampup_begin_step": 0, "rampup_step": 0}, "rampup_step is 0"),
        ({"rampup_begin_step": 0, "sparsity": [1.0]}, r"sparsity is \[1.0\]"),
        ({"rampup_begin_step": 0, "num_trainers": 0}, "num_trainers is 0"),
        ({"rampup_begin_step": 0, "local_grad_clip_norm": -1.0}, "clip_norm is -1.0"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], text: str) -> None:
    """A bad argument is refused with the value quoted."""
    with pytest.raises(ConfigError, match=text):
        DGCMomentum(0.1, 0.9, **arguments)  # type: ignore[arg-type]


def test_sgd_phase_regularizes() -> None:
    """Regularization is added by the servers, in the compressed phase too."""
    w, v = Parameter("w", np.ones(3)), Parameter("v", np.ones(3))
    opt = DGCMomentum(0.1, 0.9, 0, sparsity=[0.0], regularization=0.5)
    opt.apply_gradients([(w, np.ones(3))])
    SGD(0.1, weight_decay=0.5).apply_gradients([(v, np.ones(3))])
    np.testing.assert_array_equal(w.numpy(), v.numpy())


@pytest.mark.parametrize("nesterov", [False, True])
def test_small_parameters_are_sent_whole(nesterov: bool) -> None:
    """The smallest ones beside a large one, while all that costs no more bytes than its elements: their
    steps are Momentum's to rounding, the large one's and the next one's are compressed."""
    sizes = {"large": 3000, "middle": 60, "bias": 20, "tiny": 1}
    opt = DGCMomentum(0.1, 0.9, 0, sparsity=[0.99], use_nesterov=nesterov)
    plain = Momentum(0.1, 0.9, use_nesterov=nesterov)
    found = {name: Parameter(name, np.zeros(size)) for name, size in sizes.items()}
    expected = {name: Parameter(f"{name} too", np.zeros(size)) for name, size in sizes.items()}
    for step in range(6):
        given = {name: gradients(step + 1, (size,))[-1] for name, size in sizes.items()}
        opt.apply_gradients([(found[name], g) for name, g in given.items()])
        plain.apply_gradients([(expected[name], g) for name, g in given.items()])
    for name in ("tiny", "bias"):
        np.testing.assert_allclose(
            found[name].numpy(), expected[name].numpy(), rtol=1e-5, atol=1e-6
        )
    for name in ("middle", "large"):
        assert np.count_nonzero(found[name].numpy()) < sizes[name] / 2

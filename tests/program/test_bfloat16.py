"""Matrix products in bfloat16: what is rounded, and what stays float32."""

import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import psfleet as ps
from psfleet import layers
from psfleet.core.base.errors import ConfigError
from psfleet.core.engine.kernels.number_formats import rounded
from psfleet.core.graph.program.ops.matmul import FLOAT32, has_bfloat16, products_under
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime.strategy import AMPSettings, Settings
from psfleet.optimizer import SGD
from psfleet.optimizer.distributed import DistributedOptimizer
from tests.runtimes import own_programs

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")

Floats = NDArray[np.float32]
BATCH, WIDTH = 320, 256
SIGHT: Floats = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)
START: Floats = (np.random.default_rng(2).normal(size=(WIDTH, WIDTH)) / 16).astype(np.float32)
SLOPE: Floats = np.random.default_rng(3).normal(size=(BATCH, WIDTH)).astype(np.float32)


def parameter(name: str, wide: int = WIDTH) -> Any:
    """An attribute that starts with a part of START."""
    start = ps.initializer.NumpyArrayInitializer(START[:, :wide])
    return ps.ParamAttr(name=name, initializer=start)


def minimized(loss: Variable, **parts: dict[str, Any]) -> dict[str, Variable]:
    """Minimize under these parts of a strategy: the gradients by parameter."""
    opt = DistributedOptimizer(SGD(0.1), Settings.from_parts(parts))
    return {p.name: gradient for p, gradient in opt.minimize(loss)[1]}


def close(actual: Floats, left: Floats, right: Floats) -> None:
    """The value is in bfloat16, and as near as that allows to the product of rounded factors."""
    exact = rounded(left, "bfloat16").astype(float) @ rounded(right, "bfloat16").astype(float)
    assert np.array_equal(actual, rounded(actual, "bfloat16"))
    assert not np.array_equal(actual, left @ right)
    np.testing.assert_allclose(actual, exact, rtol=2.0**-8, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("kind", ["fc", "matmul", "transposed matmul"])
def test_a_product_and_both_of_its_gradients(kind: str) -> None:
    """Factors are rounded to bfloat16, summed in float32 and rounded once, forward and back."""
    x = layers.data("x", [None, WIDTH])
    x.stop_gradient = False
    if kind == "fc":
        out = layers.fc(x, WIDTH, param_attr=parameter("w"), bias_attr=False)
    else:
        flip = kind == "transposed matmul"
        w = layers.create_parameter([WIDTH, WIDTH], attr=parameter("w"))
        out = layers.matmul(x, w, transpose_y=flip)
    actual = minimized(layers.reduce_sum(out * SLOPE), amp={"compute": "bfloat16"})
    product, gradient = ps.Executor().run(feed={"x": SIGHT}, fetch_list=[out, actual["w"]])
    close(product, SIGHT, START.T if kind == "transposed matmul" else START)
    if kind == "transposed matmul":
        close(gradient, SLOPE.T, SIGHT)
    else:
        close(gradient, SIGHT.T, SLOPE)


def test_the_gradient_of_the_input_and_the_bias() -> None:
    """What flows through a layer to the one below is such a product too; a bias is added in float32."""
    x = layers.data("x", [None, WIDTH])
    below = x * layers.create_parameter([WIDTH], attr=ps.ParamAttr(name="below"))
    out = layers.fc(below, WIDTH, param_attr=parameter("w"), bias_attr=ps.ParamAttr(name="b"))
    actual = minimized(layers.reduce_sum(out * SLOPE), amp={"compute": "bfloat16"})
    gradients = ps.Executor().run(feed={"x": SIGHT}, fetch_list=[actual["below"], actual["b"]])
    back = rounded(SLOPE, "bfloat16") @ rounded(START, "bfloat16").T
    expected = (rounded(back, "bfloat16") * SIGHT).sum(axis=0)
    np.testing.assert_allclose(gradients[0], expected, rtol=1e-3, atol=1e-1)
    np.testing.assert_array_equal(gradients[1], SLOPE.sum(axis=0))


def test_weights_and_evaluation_stay_in_float32() -> None:
    """An update keeps bits that bfloat16 lacks; a clone for tests, what is computed at once, and amp that
    says so have the bits of NumPy."""
    x = layers.data("x", [None, WIDTH])
    out = layers.fc(x, WIDTH, param_attr=parameter("w"), bias_attr=False)
    minimized(layers.mean(layers.square(out)), amp={"compute": "bfloat16"})
    program, executor = default_main_program(), ps.Executor()
    executor.run(feed={"x": SIGHT})
    weights = program.all_parameters()[0].numpy()
    assert not np.array_equal(weights, rounded(weights, "bfloat16"))
    assert not np.array_equal(weights, START)
    (tested,) = executor.run(program.clone(for_test=True), {"x": SIGHT}, [out])
    np.testing.assert_array_equal(tested, SIGHT @ weights)
    at_once = layers.matmul(ps.to_variable(SIGHT), ps.to_variable(weights))
    np.testing.assert_array_equal(at_once.numpy(), SIGHT @ weights)
    assert products_under(AMPSettings(compute="float32")) is FLOAT32
    assert products_under(AMPSettings(dtype="float16")) is FLOAT32


def test_small_products_stay_in_float32() -> None:
    """Converting a small product costs more than it saves: its bits are NumPy's."""
    x = layers.data("x", [None, WIDTH])
    out = layers.fc(x, 3, param_attr=parameter("w", 3), bias_attr=False)
    minimized(layers.mean(out), amp={"compute": "bfloat16"})
    (product,) = ps.Executor().run(feed={"x": SIGHT[:8]}, fetch_list=[out])
    np.testing.assert_array_equal(product, SIGHT[:8] @ np.ascontiguousarray(START[:, :3]))


def losses(**parts: dict[str, Any]) -> list[Any]:
    """Of 3 steps of a deeper model."""
    with own_programs():
        hidden = layers.data("x", [None, WIDTH])
        for name in "abcd":
            hidden = layers.fc(hidden, WIDTH, act="relu", param_attr=parameter(name))
        loss = layers.mean(layers.square(hidden))
        minimized(loss, amp={"compute": "bfloat16"}, **parts)
        executor = ps.Executor()
        return [executor.run(feed={"x": SIGHT}, fetch_list=[loss])[0].item() for _ in range(3)]


def test_recompute_gives_the_same_bits() -> None:
    """What is computed again is rounded again in the same way."""
    plain = losses()
    assert losses(recompute={}) == plain
    assert plain[2] < plain[1] < plain[0]


def test_processors() -> None:
    """A processor multiplies in bfloat16 if one of its flags says so, on x86-64 and on Arm."""
    assert has_bfloat16("flags\t: fpu avx512f avx512_bf16 clzero\n")
    assert has_bfloat16("flags\t: fpu amx_bf16 avx512_fp16 amx_tile\n")
    assert has_bfloat16("Features\t: fp asimd bf16 sve\n")
    assert not has_bfloat16("flags\t: fpu avx512f avx512_vnni avx2\nmodel name: bf16ish\n")


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself amp then computes in float32 and says so; who asks for bfloat16 is refused."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.warns(UserWarning, match="computes in float32 here, as torch is not installed"):
        assert products_under(AMPSettings()) is FLOAT32
    with pytest.raises(ConfigError, match="amp compute is 'bfloat16', and torch"):
        products_under(AMPSettings(compute="bfloat16"))

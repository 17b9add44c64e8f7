"""Programs of the older face, as they are written for the reference, against its recordings."""

from typing import Any

import numpy as np
import pytest

import psfleet.fluid as fluid
from tests.recordings import arrays, hyper, widened

TOLERANCE = 1e-6


@pytest.mark.parametrize(("lazy", "amsgrad"), [(False, False), (True, True)])
def test_sparse_adam(lazy: bool, amsgrad: bool) -> None:
    """A program with a sparse embedding and a plain `fluid.optimizer.Adam` has the reference's weights."""
    name = f"sparse_{'amsgrad' if amsgrad else 'adam'}_{'' if lazy else 'non'}lazy"
    z, h = arrays(name), hyper(name)
    first = fluid.initializer.NumpyArrayInitializer(widened(z["param0"]))
    ids = fluid.layers.data(name="ids", shape=[1], dtype="int64")
    slope = fluid.layers.data(name="slope", shape=[5], dtype="float32")
    attribute = fluid.ParamAttr(name="w", initializer=first)
    rows = fluid.layers.embedding(ids, size=[9, 5], is_sparse=True, param_attr=attribute)
    loss = fluid.layers.reduce_sum(fluid.layers.elementwise_mul(rows, slope))
    more: dict[str, Any] = {"amsgrad": True} if amsgrad else {}
    fluid.optimizer.Adam(
        h["lr"], h["beta1"], h["beta2"], h["epsilon"], lazy_mode=lazy, **more
    ).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    weights = fluid.default_main_program().all_parameters()[0]
    for batch, gradients, expected in zip(
        z["ids"], widened(z["row_grads"]), z["params"], strict=True
    ):
        exe.run(feed={"ids": batch[:, None], "slope": gradients}, fetch_list=[loss])
        np.testing.assert_allclose(weights.numpy()[:, :3], expected, rtol=0, atol=TOLERANCE)

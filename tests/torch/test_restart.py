"""A worker that is started anew in the middle of a job finds trained tables, and keeps them."""

import contextlib
import copy
from typing import Any

import numpy as np
import torch

import psfleet.torch as pst
from psfleet import optimizer
from psfleet.errors import Fenced
from psfleet.parameters.parameter import Parameter, SparseGrad
from psfleet.runtime.process_runtime import current
from psfleet.testing.local_fleet import LocalFleet
from tests.leaks import nothing_left
from tests.torch.models import MODELS, OPTIMIZERS, batches, curve


def rows_parameter(value: np.ndarray[Any, Any]) -> Parameter:
    """A sparse parameter that a script makes with a value, in each of its incarnations."""
    return Parameter("rows", value, sparse=True)


def test_second_incarnation_of_a_worker_keeps_what_the_first_has_trained() -> None:
    """Neither psfleet.torch nor psfleet.optimizer writes first values over trained ones.

    The first incarnation is left as a crash leaves it: without goodbye, with its seat taken by the second.
    """
    torch.manual_seed(3)
    start = MODELS["sequence"]()
    first = np.ones((20, 3), np.float32)
    with nothing_left(), LocalFleet(2, 1, in_process=True) as fleet:
        dead = fleet.connect(0, "sync")
        model = copy.deepcopy(start)
        model, opt = pst.convert(model, OPTIMIZERS["adam"](model), runtime=dead)
        curve(model, [opt], batches(3))
        current().use(dead)
        rows = rows_parameter(first)
        sgd = optimizer.SGD(0.5, parameters=[rows])
        sgd.apply_gradients([(rows, SparseGrad(np.array([4]), np.ones((1, 3), np.float32)))])
        trained, trained_rows = model.state_dict(), rows.numpy().copy()

        living = fleet.connect(0, "sync")
        current().use(living)
        again = copy.deepcopy(start)
        again, opt = pst.convert(again, OPTIMIZERS["adam"](again), runtime=living)
        for name, value in again.state_dict().items():
            assert torch.equal(value, trained[name]), name
        assert not torch.equal(
            trained["towers.user.weight"], start.get_parameter("towers.user.weight")
        )
        rows = rows_parameter(first)
        sgd = optimizer.SGD(0.5, parameters=[rows])
        sgd.apply_gradients([(rows, SparseGrad(np.array([4]), np.ones((1, 3), np.float32)))])
        assert rows.numpy()[4].tolist() == [0, 0, 0]
        assert trained_rows[4].tolist() == [0.5, 0.5, 0.5]
        with contextlib.suppress(Fenced):
            dead.close()
        living.close()

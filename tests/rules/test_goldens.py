"""The rules against trajectories of the reference's operators (tests/goldens, see its README)."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.rules import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    DecayedAdagrad,
    DGCMomentum,
    Ftrl,
    Lamb,
    LarsMomentum,
    Momentum,
    NAdam,
    ProximalGD,
    RAdam,
    RMSProp,
    Rprop,
    Rule,
)
from psfleet.schema.table import DecaySpec, TableSpec
from psfleet.tables.dense import DenseTable
from psfleet.tables.sparse import SparseTable
from tests.recordings import arrays

TOLERANCE = 2e-6
# Exceptions. Ftrl's `linear` reaches 59, where float32 itself steps by 3.8e-6; the recording is
# 1.2e-5 away from the same formula in float64 (its square root is approximate).
RELATIVE = {"state_linear": 3e-7}
L2 = DecaySpec(l2=0.03)

# Entry: rule, learning rate, recorded names of its slots, decay, factor on the recorded gradients.
# The factor stands for the operators' rescale_grad (lars) and division by ranks (dgc); the CPU
# momentum operator ignores its rescale_grad.
Case = tuple[Rule, float, list[str], DecaySpec, float]
NONE, ONE = DecaySpec(), 1.0
MOMENTS = ["state_m1", "state_m2"]
RMS = ["state_moment", "state_mean_square"]
NAMED = ["state_w_moment1_0", "state_w_moment2_0"]
CASES: dict[str, Case] = {
    "sgd": (SGD(), 0.07, [], NONE, ONE),
    "sgd_l1decay": (SGD(), 0.05, [], DecaySpec(l1=0.02), ONE),
    "sgd_l2decay": (SGD(), 0.05, [], DecaySpec(l2=0.02), ONE),
    "momentum": (Momentum(0.85), 0.05, ["state_velocity"], NONE, ONE),
    "momentum_l2_rescale": (Momentum(0.85), 0.05, ["state_velocity"], L2, ONE),
    "momentum_nesterov": (Momentum(0.85, True), 0.05, ["state_velocity"], NONE, ONE),
    "momentum_nesterov_l2_rescale": (Momentum(0.85, True), 0.05, ["state_velocity"], L2, ONE),
    "momentum_l2_nesterov": (
        Momentum(0.9, True),
        0.05,
        ["state_w_velocity_0"],
        DecaySpec(l2=0.02),
        ONE,
    ),
    "adam": (Adam(0.8, 0.95, 1e-3), 0.02, MOMENTS, NONE, ONE),
    "adam_l2decay": (Adam(), 0.05, NAMED, DecaySpec(l2=0.02), ONE),
    "adamw": (AdamW(0.8, 0.95, 1e-3, 0.05), 0.02, MOMENTS, NONE, ONE),
    "adamax": (Adamax(0.8, 0.97, 0.01), 0.03, ["state_moment", "state_inf_norm"], NONE, ONE),
    "adagrad": (Adagrad(0.01, 0.1), 0.1, ["state_moment"], NONE, ONE),
    "decayed_adagrad": (DecayedAdagrad(0.9, 0.01), 0.1, ["state_moment"], NONE, ONE),
    "adadelta": (
        Adadelta(0.9, 1e-3),
        0.5,
        ["state_avg_squared_grad", "state_avg_squared_update"],
        NONE,
        ONE,
    ),
    "rmsprop": (RMSProp(0.9, 0.01), 0.02, RMS, NONE, ONE),
    "rmsprop_momentum": (RMSProp(0.9, 0.01, 0.8), 0.02, RMS, NONE, ONE),
    "rmsprop_centered": (RMSProp(0.9, 0.01, 0.0, True), 0.02, [*RMS, "state_mean_grad"], NONE, ONE),
    "rmsprop_centered_momentum": (
        RMSProp(0.9, 0.01, 0.8, True),
        0.02,
        [*RMS, "state_mean_grad"],
        NONE,
        ONE,
    ),
    "ftrl_lrpower0p5": (Ftrl(0.05, 0.1), 0.1, ["state_squared", "state_linear"], NONE, ONE),
    "ftrl_lrpower0p4": (Ftrl(0.05, 0.1, -0.4), 0.1, ["state_squared", "state_linear"], NONE, ONE),
    "lamb": (Lamb(0.8, 0.95, 1e-3, 0.05), 0.02, MOMENTS, NONE, ONE),
    "lamb_wd0": (Lamb(0.8, 0.95, 1e-3, 0.0), 0.02, MOMENTS, NONE, ONE),
    "lars_momentum": (LarsMomentum(0.85, 0.01, 0.03, 0.01), 0.4, ["state_velocity"], NONE, 0.5),
    "lars_momentum_wd0": (LarsMomentum(0.85, 0.01, 0.0, 0.01), 0.4, ["state_velocity"], NONE, 0.5),
    "dgc_momentum": (DGCMomentum(0.9, 4), 0.05, ["state_velocity"], NONE, 0.5),
    "asgd": (ASGD(3), 0.05, ["state_w_d_0"], NONE, ONE),
    "nadam": (NAdam(0.8, 0.95, 1e-3, 0.01), 0.05, NAMED, NONE, ONE),
    "radam": (RAdam(0.8, 0.95, 1e-3), 0.05, NAMED, NONE, ONE),
    "rprop": (
        Rprop(0.05, 0.001, 0.5, 0.4, 1.3),
        0.05,
        ["state_w_prevs_0", "state_w_learning_rates_0"],
        NONE,
        ONE,
    ),
    "proximal_gd": (ProximalGD(0.1, 0.2), 0.1, [], NONE, ONE),
}

# Sparse trajectories: rule, recorded slots. A pushed id's row is updated, others are left alone.
# One recording is deliberately not matched. sparse_lamb: the reference's norm spans the whole array,
# which no server of a hashed table sees; here it spans the row.
SPARSE: dict[str, tuple[Rule, list[str]]] = {
    "sparse_sgd": (SGD(), []),
    "sparse_adagrad": (Adagrad(0.01, 0.1), ["state_w_moment_0"]),
    "sparse_adam_lazy": (Adam(0.8, 0.95, 1e-3, bias_correction_step=1), NAMED),
}


@pytest.mark.parametrize("shape", ["7", "5x3"])
@pytest.mark.parametrize("case", CASES)
def test_dense_trajectory(case: str, shape: str) -> None:
    """Weights and every slot stay within 2e-6 of what the reference computed, for 10 steps."""
    rule, rate, slots, decay, factor = CASES[case]
    data = arrays(f"{case}_{shape}")
    start = data["param0"]
    table = DenseTable(TableSpec("w", "dense", start.shape, rule, decay), start.reshape(-1))
    for step, gradient in enumerate(data["grads"]):
        table.push((gradient * np.float32(factor)).reshape(-1), rate)
        weights, *state = table.state()
        close(weights, data["params"][step])
        for name, value in zip(slots, state, strict=False):
            close(value, data[name][step], RELATIVE.get(name, 0))
        assert len(slots) in (len(state), 1 if case == "asgd" else -1)


@pytest.mark.parametrize("shape", ["7", "5x3"])
def test_asgd_slots(shape: str) -> None:
    """The gradients that ASGD keeps are those of the reference, in the same order."""
    data = arrays(f"asgd_{shape}")
    start = data["param0"]
    table = DenseTable(TableSpec("w", "dense", start.shape, ASGD(3), NONE), start.reshape(-1))
    for step, gradient in enumerate(data["grads"]):
        table.push(gradient.reshape(-1), 0.05)
        for turn, kept in enumerate(table.state()[2:]):
            close(kept, data["state_w_y_0"][step][turn])


@pytest.mark.parametrize("case", SPARSE)
def test_sparse_trajectory(case: str) -> None:
    """Rows named by a push follow the reference's sparse operators, the others rest."""
    rule, slots = SPARSE[case]
    data = arrays(case)
    check_sparse(SparseTable(TableSpec("w", "sparse", (3,), rule)), data, slots)


@pytest.mark.parametrize(
    ("case", "slots"),
    [
        ("sparse_momentum", ["state_w_velocity_0"]),
        ("sparse_adam_nonlazy", NAMED),
        ("sparse_rmsprop", ["state_w_momentum_0", "state_w_mean_square_0", "state_w_mean_grad_0"]),
    ],
)
def test_sparse_trajectory_of_every_row(case: str, slots: list[str]) -> None:
    """The reference updates every row under these rules: `every_row` gives the same."""
    rules = {
        "sparse_momentum": Momentum(),
        "sparse_rmsprop": RMSProp(0.9, 0.01, 0.5, True),
        "sparse_adam_nonlazy": Adam(0.8, 0.95, 1e-3, 1, unscaled_rest=True),
    }
    table = SparseTable(TableSpec("w", "sparse", (3,), rules[case], every_row=True))
    check_sparse(table, arrays(case), slots)


def check_sparse(table: SparseTable, data: dict[str, NDArray[Any]], slots: list[str]) -> None:
    rows, dim = data["param0"].shape
    state = [np.full((rows, dim), slot.initial, np.float32) for slot in table.spec.rule.slots]
    table.restore(np.arange(rows), np.concatenate([data["param0"], *state], axis=1))
    for step, (ids, gradients) in enumerate(zip(data["ids"], data["row_grads"], strict=True)):
        unique, inverse = np.unique(ids, return_inverse=True)
        summed = np.zeros((len(unique), dim), np.float32)
        np.add.at(summed, inverse, gradients)
        table.push(unique.astype(np.int64), summed, 0.05)
        _, got = table.state(0, rows)
        for place, name in enumerate(["params", *slots]):
            close(got[:, place * dim : (place + 1) * dim], data[name][step])


def close(got: NDArray[np.float32], wanted: NDArray[np.float32], relative: float = 0) -> None:
    np.testing.assert_allclose(got.reshape(-1), wanted.reshape(-1), rtol=relative, atol=TOLERANCE)

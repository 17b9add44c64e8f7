"""Generated kernels against their NumPy twin, bit for bit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psfleet.core.engine.rules import ASGD, RULES, Adam, DGCMomentum, Ftrl, Momentum, RMSProp, Rule
from psfleet.core.engine.schema.table import DecaySpec
from psfleet.fleet.testing.rule_conformance import check_dense, check_rows, check_split

pytestmark = pytest.mark.quick

VARIANTS: dict[str, Rule] = {
    "asgd_of_3": ASGD(3),
    "nesterov": Momentum(use_nesterov=True),
    "centered": RMSProp(centered=True),
    "momentum_rmsprop": RMSProp(momentum=0.5),
    "ftrl_l1": Ftrl(0.3, 0.2),
    "dgc_of_2": DGCMomentum(0.9, 2),
    "ftrl_power": Ftrl(0.1, 0.1, -0.4),
    "unscaled_rest": Adam(0.8, 0.95, 1e-2, unscaled_rest=True),
}
RULE_CASES = {**{name: rule() for name, rule in RULES.items()}, **VARIANTS}
DECAYS = {
    "plain": DecaySpec(),
    "l2": DecaySpec(l2=0.1),
    "l1": DecaySpec(l1=0.2),
    "both": DecaySpec(0.1, 0.2),
}
COMBINATIONS = [(rule, "plain") for rule in RULE_CASES] + [
    (rule, decay)
    for rule, decays in (
        ("sgd", ("l2", "l1", "both")),
        ("lamb", ("both",)),
        ("rowwise_adagrad", ("both",)),
    )
    for decay in decays
]


@pytest.mark.parametrize(("name", "decay"), COMBINATIONS)
@settings(max_examples=8, deadline=None)
@given(
    n=st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 600])),
    seed=st.integers(0, 1000),
    rate=st.floats(1e-4, 2),
)
def test_dense_kernel_equals_twin(name: str, decay: str, n: int, seed: int, rate: float) -> None:
    """Weights and every slot are the twin's bits, for any size."""
    check_dense(RULE_CASES[name], DECAYS[decay], n, seed, rate)


@pytest.mark.parametrize("name", ["lamb", "lars_momentum"])
def test_norms_over_several_chunks(name: str) -> None:
    """The sum over a parameter has the twin's order beyond one chunk too."""
    check_dense(RULE_CASES[name], DecaySpec(), 2 * 4096 + 300)


WIDTHS = [*((name, 5) for name in RULE_CASES), ("adam", 16), ("adam", 1), ("rowwise_adagrad", 300)]
# One rule of each unit, number of slots and kind of step without a gradient. The kernel for such steps has
# the same text for all rules around the functions that the kernel of a push has too.
RESTING = [
    *("sgd", "adagrad", "adam", "amsgrad", "asgd_of_3", "centered", "nesterov"),
    *("rowwise_adagrad", "lamb", "adam_catch_up", "unscaled_rest"),
]


@pytest.mark.parametrize(
    ("name", "dim", "every_row"),
    [*((*case, False) for case in WIDTHS), *((name, 5, True) for name in RESTING)],
)
def test_sparse_kernel_equals_twin(name: str, dim: int, every_row: bool) -> None:
    """So are rows that a push names, and those that it does not."""
    check_rows(RULE_CASES[name], dim, every_row)


@pytest.mark.parametrize("name", [n for n, rule in RULE_CASES.items() if rule.unit == "element"])
@settings(max_examples=5, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=3), seed=st.integers(0, 99))
def test_any_split_gives_the_same_bits(name: str, cuts: list[int], seed: int) -> None:
    """Cut over several servers, a dense array ends with the bits it has on one."""
    check_split(RULE_CASES[name], cuts, seed)

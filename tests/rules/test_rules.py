"""Rules as values: they travel as a name and numbers, and refuse what makes no sense."""

import math

import pytest

from psfleet.core.engine.rules import (
    ASGD,
    Adam,
    Ftrl,
    Lamb,
    Momentum,
    RMSProp,
    Rprop,
    make_rule,
    own_rules,
    rule_class,
)
from tests.refusals import check_refusals

pytestmark = pytest.mark.quick

OWN = [rule.name for rule in own_rules()]


@pytest.mark.parametrize("name", OWN)
def test_a_rule_travels_as_numbers(name: str) -> None:
    """A rule is equal to the one made from its name and hyperparameters."""
    rule = rule_class(name)()
    assert make_rule(name, rule.hyperparameters()) == rule
    assert all(isinstance(value, float) for value in rule.hyperparameters().values())


def test_types_survive_the_journey() -> None:
    """Whole numbers and truth values come back as such."""
    assert make_rule("asgd", {"batch_num": 3.0}) == ASGD(3)
    assert len(make_rule("asgd", {"batch_num": 3.0}).slots) == 4
    assert make_rule("momentum", Momentum(0.5, True).hyperparameters()) == Momentum(0.5, True)
    assert make_rule("rmsprop", RMSProp(centered=True).hyperparameters()) == RMSProp(centered=True)


REFUSED = """
make_rule("adam", {"beta1": 1.0})  # beta1 is 1.0
make_rule("adam", {"beta2": -0.1})  # beta2 is -0.1
make_rule("adam", {"epsilon": -1e-8})  # epsilon is -1e-08
make_rule("adam", {"epsilon": inf})  # epsilon is inf, it must be a finite number of at least 0
make_rule("adam", {"beta1": nan})  # beta1 is nan
make_rule("ftrl", {"lr_power": 0.5})  # lr_power is 0.5, it must be ... of at most 0
make_rule("ftrl", {"l1": -1.0})  # l1 is -1.0
make_rule("momentum", {"momentum": 1.5})  # momentum is 1.5
make_rule("asgd", {"batch_num": 0.0})  # batch_num is 0
make_rule("adagrad", {"initial_accumulator_value": -0.5})  # initial_accumulator_value is -0.5
make_rule("lamb", {"weight_decay": inf})  # weight_decay is inf
make_rule("rprop", {"eta_plus": 0.9})  # eta_plus is 0.9
make_rule("rmsprop", {"rho": 2.0})  # rho is 2.0
make_rule("sgd", {"speed": 1.0})  # no hyperparameter 'speed'
Adam("0.9")  # Adam: beta1 is '0.9', it must be a finite number
Adam(None)  # Adam: beta1 is None, it must be a finite number
Adam([0.9])  # Adam: beta1 is [0.9], it must be a finite number
ASGD(1.5)  # batch_num is 1.5, it must be a whole number
ASGD(None)  # batch_num is None, it must be a whole number
rule_class("adma")  # rule 'adma' is unknown; use one of adadelta
Ftrl().scalars(0.0, 1)  # learning rate, which is 0.0
"""


def test_refusals() -> None:
    """Values out of range, of other types and unknown ones are quoted; Ftrl divides by the rate."""
    made = {"make_rule": make_rule, "rule_class": rule_class, "Adam": Adam, "ASGD": ASGD}
    check_refusals(REFUSED, {**made, "Ftrl": Ftrl, "inf": math.inf, "nan": math.nan})


@pytest.mark.parametrize("name", OWN)
def test_numbers_stay_finite_for_long_runs(name: str) -> None:
    """After ten million steps the batch's numbers are still numbers."""
    values = rule_class(name)().scalars(0.1, 10_000_000)
    assert not any(math.isnan(value) for value in values)


def test_slots_have_names_and_first_values() -> None:
    """State dicts and new rows rely on them."""
    assert [slot.name for slot in Adam().slots] == ["moment1", "moment2"]
    assert Rprop(0.25).slots[1].initial == 0.25
    assert Lamb().unit == "parameter"

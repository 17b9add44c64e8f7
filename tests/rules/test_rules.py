"""Rules as values: they travel as a name and numbers, and refuse what makes no sense."""

import math
from typing import Any

import pytest

from psfleet.errors import ConfigError
from psfleet.rules import (
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


@pytest.mark.parametrize(
    ("name", "values", "quoted"),
    [
        ("adam", {"beta1": 1.0}, r"beta1 is 1\.0"),
        ("adam", {"beta2": -0.1}, r"beta2 is -0\.1"),
        ("adam", {"epsilon": -1e-8}, "epsilon is -1e-08"),
        ("adam", {"beta1": math.nan}, "beta1 is nan"),
        ("ftrl", {"lr_power": 0.5}, r"lr_power is 0\.5, it must be .* of at most 0"),
        ("adam", {"epsilon": math.inf}, "epsilon is inf, it must be a finite number of at least 0"),
        ("ftrl", {"l1": -1.0}, r"l1 is -1\.0"),
        ("momentum", {"momentum": 1.5}, r"momentum is 1\.5"),
        ("asgd", {"batch_num": 0.0}, "batch_num is 0"),
        ("adagrad", {"initial_accumulator_value": -0.5}, r"initial_accumulator_value is -0\.5"),
        ("lamb", {"weight_decay": math.inf}, "weight_decay is inf"),
        ("rprop", {"eta_plus": 0.9}, r"eta_plus is 0\.9"),
        ("rmsprop", {"rho": 2.0}, r"rho is 2\.0"),
        ("sgd", {"speed": 1.0}, "no hyperparameter 'speed'"),
    ],
)
def test_bad_hyperparameters_are_refused(name: str, values: dict[str, float], quoted: str) -> None:
    """The message quotes the value and says which are allowed."""
    with pytest.raises(ConfigError, match=quoted):
        make_rule(name, values)


def test_what_is_no_number_is_refused() -> None:
    """So is a value that is no number, and a count that is not whole."""
    values: list[Any] = ["0.9", None, [0.9]]
    for value in values:
        with pytest.raises(ConfigError, match=r"Adam: beta1 is .*, it must be a finite number"):
            Adam(value)
    counts: list[Any] = [1.5, None]
    for count in counts:
        with pytest.raises(
            ConfigError, match=r"batch_num is (1\.5|None), it must be a whole number"
        ):
            ASGD(count)


def test_an_unknown_rule_is_refused() -> None:
    """The message lists the rules that there are."""
    with pytest.raises(ConfigError, match="rule 'adma' is unknown; use one of adadelta"):
        rule_class("adma")


def test_ftrl_refuses_a_rate_of_zero() -> None:
    """Its formula divides by the rate."""
    with pytest.raises(ConfigError, match=r"learning rate, which is 0\.0"):
        Ftrl().scalars(0.0, 1)


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

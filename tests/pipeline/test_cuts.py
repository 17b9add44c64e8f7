"""Cuts of a PipelineOptimizer: by variable or by name; what is no cut is refused and quoted."""

from collections.abc import Callable
from typing import Any

import pytest

from psfleet import fleet, layers
from psfleet.errors import ConfigError, UsageError
from psfleet.optimizer import SGD, PipelineOptimizer
from psfleet.program import names
from psfleet.program.program import Program, program_guard
from psfleet.program.variable import Variable


def cut(cuts: Callable[[Variable, Variable], Any]) -> list[int]:
    """How many records the forward pieces of a two-layer network have."""
    with names.guard(), program_guard(Program(), Program()):
        hidden = layers.fc(layers.data("x", [None, 2]), 3, act="tanh", name="first")
        loss = layers.mean(layers.fc(hidden, 1, name="second"))
        optimizer = PipelineOptimizer(SGD(0.1), cuts(hidden, loss))
        optimizer.minimize(loss)
        return [len(section.records) for section in optimizer.sections if section.forward]


def test_cuts_by_name() -> None:
    """A cut may name a variable, or a layer: then what the layer gives."""
    wanted = cut(lambda hidden, loss: [[hidden], [loss]])
    assert wanted == [2, 2]
    assert cut(lambda hidden, loss: [[hidden.name], [loss]]) == wanted
    assert cut(lambda hidden, loss: ["first", loss.name]) == wanted


REFUSED: dict[str, Callable[[Variable, Variable], Any]] = {
    r"cut_list is 'first', it must be a list": lambda hidden, loss: "first",
    r"cut 0: 3 is neither a variable nor the name": lambda hidden, loss: [[3], [loss]],
    r"cut 0: 'third' is not in the program": lambda hidden, loss: [["third"], [loss]],
    r"cut 0 is empty; it must have a variable": lambda hidden, loss: [[], [loss]],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused_cuts(sentence: str) -> None:
    """With a sentence that quotes it."""
    with pytest.raises(UsageError, match=sentence):
        cut(REFUSED[sentence])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"queue_size": "2"}, "queue_size is '2', it must be a whole number above 0"),
        (
            {"concurrency_list": [1, 0, 1]},
            "concurrency_list is .1, 0, 1., it must be a list, each a whole number above 0",
        ),
        (
            {"concurrency_list": [1, "2", 1]},
            "concurrency_list is .1, '2', 1., it must be a list, each a whole",
        ),
    ],
)
def test_refused_numbers(settings: Any, sentence: str) -> None:
    """So are numbers that are none."""
    with pytest.raises(ConfigError, match=sentence):
        PipelineOptimizer(SGD(0.1), **settings)


@pytest.mark.parametrize("strategy", ["1f1b", 3, ["pipeline"]])
def test_no_strategy(strategy: Any) -> None:
    """A strategy that is neither a DistributedStrategy nor a table of parts is quoted."""
    with pytest.raises(
        ConfigError, match=r"the strategy is .*; it must be a fleet.DistributedStrategy"
    ):
        fleet.distributed_optimizer(SGD(0.1), strategy)

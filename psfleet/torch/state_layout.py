"""Optimizer state in torch's layout: made of a table's state, and read back into one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from psfleet.errors import ShapeError, UsageError
from psfleet.rules.momentum import Momentum
from psfleet.rules.nadam import NAdam
from psfleet.rules.rule import Rule
from psfleet.rules.torch_rmsprop import TorchRMSprop
from psfleet.rules.torch_sparse_adam import TorchSparseAdam

__all__ = ["StateSlots", "entry_of", "slots_of"]

Floats = NDArray[np.float32]

_DERIVED = ("step", "mu_product")  # beside the slots


@dataclass(frozen=True, slots=True)
class StateSlots:
    """A table's state but for its weights.

    Attributes:
        step: How many updates the table has had; None: it is not said.
        values: One array per slot of the rule, float32 in the parameter's shape.
    """

    step: int | None
    values: list[Floats]


def entry_of(rule: Rule, step: int, values: list[Floats]) -> dict[str, Any]:
    """What torch's optimizer would keep of a parameter; empty for a rule without state.

    Args:
        rule: Of the parameter's table.
        step: How many updates the table has had.
        values: One array per slot.
    """
    entry: dict[str, Any] = {}
    if rule.slots and not isinstance(rule, Momentum):
        counted = step if isinstance(rule, TorchSparseAdam) else torch.tensor(float(step))
        entry["step"] = counted
    if isinstance(rule, NAdam):
        entry["mu_product"] = torch.tensor(rule.product(step))
    entry |= {
        name: torch.from_numpy(array) for name, array in zip(_names(rule), values, strict=False)
    }
    return entry


def slots_of(
    name: str, rule: Rule, shape: tuple[int, ...], entry: Mapping[str, Any] | None
) -> StateSlots:
    """The state that an entry of torch's optimizer stands for; None: of a parameter never updated.

    Args:
        name: Of the parameter, for messages.
        rule: Of its table.
        shape: Of the parameter.
        entry: Its part of an optimizer's state.

    Raises:
        UsageError: The entry is of another optimizer. ShapeError: It is of another parameter.
    """
    names = _names(rule)
    if entry is None:
        return StateSlots(0, [np.full(shape, slot.initial, np.float32) for slot in rule.slots])
    said = {key for key, value in entry.items() if value is not None}
    foreign = sorted(said - {*names, *_DERIVED})
    missing = sorted(set(names) - said - _needless(rule))
    if foreign or missing:
        lack = f"lacks {missing[0]!r}" if missing else f"has {foreign[0]!r}"
        raise UsageError(
            f"the optimizer state of {name!r} {lack}; it was saved by another optimizer, and the "
            f"rule here is {rule}"
        )
    values = [
        np.full(shape, slot.initial, np.float32) if key not in said else _array(name, entry, key)
        for key, slot in zip(names, rule.slots, strict=True)
    ]
    for key, array in zip(names, values, strict=True):
        if array.shape != shape:
            raise ShapeError(
                f"the optimizer state of {name!r} has {key!r} of shape {array.shape}; it must be "
                f"{shape}"
            )
    return StateSlots(int(entry["step"]) if "step" in said else None, values)


def _names(rule: Rule) -> list[str]:
    """How torch calls the rule's slots, in their order."""
    return rule.torch[0].state.split()[: len(rule.slots)] if rule.slots else []


def _needless(rule: Rule) -> set[str]:
    """What torch does not keep where nothing depends on it."""
    return {"momentum_buffer"} if isinstance(rule, TorchRMSprop) and not rule.momentum else set()


def _array(name: str, entry: Mapping[str, Any], key: str) -> Floats:
    value = entry[key]
    if not isinstance(value, Tensor):
        raise UsageError(
            f"the optimizer state of {name!r} has {key} {value!r}; it must be a tensor"
        )
    dense = value.detach().to_dense() if value.is_sparse else value.detach()
    array: Floats = dense.to("cpu", torch.float32).contiguous().numpy()
    return array

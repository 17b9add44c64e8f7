"""Parameter groups: some of an optimizer's parameters with settings of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psfleet.errors import ConfigError, WrongType
from psfleet.validation.annotations import NonNegative, check

__all__ = ["ParameterGroup", "groups_of"]

_DECAY = frozenset({"regularization", "weight_decay"})  # two names of one argument


@dataclass(frozen=True)
class ParameterGroup:
    """One dict of a list of groups.

    Attributes:
        parameters: As given.
        factor: On the optimizer's learning rate.
        settings: Arguments of the optimizer's constructor that differ in this group.
    """

    parameters: Sequence[Any]
    factor: float
    settings: dict[str, Any]

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Of an optimizer for this group, from those of the whole one."""
        replaced = {"parameters", *self.settings}
        if _DECAY & replaced:
            replaced |= _DECAY
        kept = {name: value for name, value in given.items() if name not in replaced}
        return kept | self.settings

    def lend(self, whole: Any, lender: Any) -> None:
        """Let the whole optimizer treat the group's parameters as the lender would."""
        lender.factor = self.factor
        whole.lend(lender, self.parameters)


def groups_of(owner: str, given: Mapping[str, Any], allowed: Sequence[str]) -> list[ParameterGroup]:
    """The groups that a constructor was given; none: plain parameters.

    Args:
        owner: The optimizer, for messages.
        given: The constructor's arguments by name.
        allowed: The arguments that a group may have of its own.

    Raises:
        ConfigError: A group is no dict, is empty, or has a setting that is not allowed.
    """
    said = given.get("parameters")
    said = given.get("parameter_list") if said is None else said
    if not isinstance(said, list | tuple) or not any(isinstance(item, Mapping) for item in said):
        return []
    return [_group(owner, item, allowed) for item in said]


def _group(owner: str, said: Any, allowed: Sequence[str]) -> ParameterGroup:
    if not isinstance(said, Mapping):
        raise WrongType(
            f"{owner}: parameters has {said!r} beside groups; each entry must be a dict with 'params'"
        )
    if "params" not in said:
        raise ConfigError(
            f"{owner}: a group of parameters is {dict(said)!r}; it must have 'params'"
        )
    settings = {k: v for k, v in said.items() if k not in ("params", "learning_rate")}
    unknown = [name for name in settings if name not in allowed]
    if unknown:
        raise ConfigError(
            f"{owner}: a group of parameters has {unknown[0]!r}; it may have params, learning_rate, "
            f"{', '.join(allowed)}"
        )
    factor = check(owner, "a group's learning_rate", said.get("learning_rate", 1.0), NonNegative)
    listed = said["params"]
    return ParameterGroup(
        list(listed) if isinstance(listed, list | tuple) else [listed], factor, settings
    )

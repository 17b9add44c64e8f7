"""The consistency modes that this process knows, by name and by number."""

import importlib
import re
from typing import Any, TypeVar

from psfleet.consistency.consistency_mode import ConsistencyMode
from psfleet.errors import ConfigError
from psfleet.settings.kinds import one_of

__all__ = ["MODES", "NO_MODE", "find_mode", "find_part", "listed", "register"]

MODES: dict[str, ConsistencyMode] = {}
"""Every mode with its default settings, by name, in the order of the numbers."""

NO_MODE = ConsistencyMode()
"""The mode of a fleet that no worker has joined."""

M = TypeVar("M", bound=ConsistencyMode)
_NAME = re.compile("[a-z][a-z0-9-]*")


def register(mode: type[M]) -> type[M]:
    """Make a mode known; a decorator above `@dataclass`. A class that is defined again replaces itself.

    Raises:
        ConfigError: The name or number is none, or another mode has it.
    """
    if not _NAME.fullmatch(mode.name) or not 0 < mode.number < 2**31:
        raise ConfigError(
            f"the mode {mode.__name__} has the name {mode.name!r} and the number {mode.number}; a name has "
            "lower-case letters, digits and hyphens, and a number is at least 1 and below 2^31"
        )
    one = mode()
    for name, value in one.agreed_settings.items():
        if type(value) is not int:
            raise ConfigError(
                f"servers know the setting {name!r} of the mode {_place(mode)}, whose default is {value!r}; "
                "what they know are whole numbers"
            )
    for known in MODES.values():
        same = {known.name, known.number} & {mode.name, mode.number}
        if same and _place(type(known)) != _place(mode):
            raise ConfigError(
                f"the mode {_place(mode)} has the name {mode.name!r} and the number {mode.number}, but "
                f"{known.name!r} is {_place(type(known))} with the number {known.number}; give it others"
            )
    found: list[ConsistencyMode] = [*_others(mode), one]
    found.sort(key=lambda one: one.number)
    MODES.clear()
    MODES.update({one.name: one for one in found})
    return mode


def _others(mode: type[ConsistencyMode]) -> list[ConsistencyMode]:
    return [known for known in MODES.values() if _place(type(known)) != _place(mode)]


def find_mode(name: str | None) -> ConsistencyMode:
    """The mode of this name, with its default settings; None or empty: NO_MODE.

    Raises:
        ConfigError: There is none.
    """
    if not name:
        return NO_MODE
    if name not in MODES:
        raise ConfigError(
            f"mode is {name!r}; it must be {listed()}, or name the module that defines it: "
            "psfleet-launch --rules MODULE, or PSFLEET_RULES"
        )
    return MODES[name]


def find_part(place: str) -> Any:
    """What a declaration names as `module:class`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def listed() -> str:
    """The names of all modes, for messages."""
    return one_of(*MODES).wanted


def _place(mode: type[ConsistencyMode]) -> str:
    return f"{mode.__module__}.{mode.__qualname__}"

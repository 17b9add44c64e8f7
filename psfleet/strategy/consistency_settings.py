"""The consistency mode of a fleet with its settings, as a strategy says it."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

from psfleet.consistency import MODES, ConsistencyMode, find_mode
from psfleet.errors import ConfigError
from psfleet.settings.declaration import Setting, settings_of
from psfleet.settings.kinds import one_of
from psfleet.settings.mode_names import Mode

__all__ = ["ConsistencySettings", "settings_of_mode"]


@dataclass(frozen=True, init=False)
class ConsistencySettings:
    """A consistency mode and its settings.

        ConsistencySettings("ssp", staleness=4).staleness == 4

    docs/strategies.md describes the modes. Every setting of every mode is an attribute; those of other
    modes have their defaults.

    Args:
        mode: The name of the mode.
        values: Its own settings by place, in the order of its declaration.
        settings: Its settings by name. One of another mode may only have its default.

    Attributes:
        declared: The mode, with these settings.

    Raises:
        ConfigError: The mode or a setting is unknown, a value is wrong, or the setting is of another mode.
    """

    declared: ConsistencyMode

    def __init__(self, mode: Mode = "sync", *values: float, **settings: float) -> None:
        known = {one.name: one for one in self.settings()}
        known.pop("mode").check(mode, "consistency mode")
        own = settings_of_mode(mode)
        for name, value in settings.items():
            if name not in known:
                raise ConfigError(f"consistency has no setting {name!r}; it has {', '.join(known)}")
            if name not in own and value != known[name].default:
                raise _contradiction(name, value, mode)
        taken = {name: value for name, value in settings.items() if name in own}
        declared = type(find_mode(mode))(*values, **taken)
        for name, one in known.items():
            object.__setattr__(self, name, getattr(declared, name, one.default))
        object.__setattr__(self, "declared", declared)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def mode(self) -> Mode:
        """The name of the mode."""
        return cast(Mode, self.declared.name)

    @staticmethod
    def settings() -> tuple[Setting, ...]:
        """The mode and the settings of all modes, those that several modes share at the end."""
        found: dict[str, Setting] = {}
        for known in MODES.values():
            for one in settings_of(type(known)):
                found.setdefault(one.name, one)
        listed = sorted(found.values(), key=lambda one: len(_modes_with(one.name)) > 1)
        mode = Setting("mode", one_of(*MODES), "sync", "When pushes take effect", flag="--mode")
        return (
            mode,
            *(replace(one, help=f"{_and(_modes_with(one.name))}: {one.help}") for one in listed),
        )


def settings_of_mode(mode: str | None) -> tuple[str, ...]:
    """The names of a mode's settings; none of a mode that is unknown or None."""
    known = MODES.get(mode or "")
    return () if known is None else tuple(one.name for one in fields(known))


def _modes_with(setting: str) -> list[str]:
    return [mode for mode in MODES if setting in settings_of_mode(mode)]


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _contradiction(name: str, value: Any, mode: str) -> ConfigError:
    return ConfigError(
        f"consistency {name} = {value} and mode = {mode!r} contradict each other: it is a setting of "
        f"{', '.join(_modes_with(name))}; leave one out"
    )

"""A setting is declared once, as a field of a frozen dataclass:

    @dataclass(frozen=True)
    class Recovery:
        dead_after: float = setting(
            0.0, "Go on without a worker that was silent for so long", SECONDS,
            names="--dead-after PSFLEET_DEAD_AFTER workers.dead_after")

The type, the default, the limits and the sentence of help stand there and nowhere else. Flags of commands
(psfleet_launch.commands.options), variables, keys of job files, checks and docs/settings.md follow from them.

Why not pydantic-settings or msgspec: what they would replace is this file, and their messages name a
model's field, where ours name the flag, variable or key that the user has written.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.kinds import SettingKind, kind_of


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        default: MISSING: it must be given.
        help: Meaning, without a full stop.
        flag: Flag of a command; `--no-x` switches off what is on by default. Empty: none.
        env: Its variable; empty: none.
        synonyms: Variables of the reference framework that say the same; `env` wins.
        key: In a job file, `table.key`; empty: none.
        metavar: Name of the value in help; empty: by its kind.
        least, most: Bounds of a number.
        wanted: Requirement of the value, where bounds alone would not say it well.
    """

    name: str
    kind: SettingKind
    default: Any
    help: str
    flag: str = ""
    env: str = ""
    synonyms: tuple[str, ...] = ()
    key: str = ""
    metavar: str = ""
    least: float = -math.inf
    most: float = math.inf
    wanted: str = ""

    def parse(self, text: str, source: str) -> Any:
        """Return the value that a flag or a variable says; `source` names that for messages.

        Raises:
            ConfigError: It is of another kind, or out of bounds.
        """
        try:
            value = self.kind.parse(text)
        except ConfigError:
            raise  # it says more than we could
        except (ValueError, OverflowError):
            raise _wrong(source, text, self.kind.written or self.kind.wanted) from None
        if not self._allows(value):
            raise ConfigError(f"{source} is {text:.200}; it must be {self._bounds()}")
        return value

    def take(self, value: Any, source: str) -> Any:
        """Return the value that a file says.

        Raises:
            ConfigError: It is of another kind, or out of bounds.
        """
        if isinstance(value, str) and self.kind.has_unit:
            return self.parse(value, source)
        if not self.kind.fits(value):
            raise _wrong(source, value, self.kind.wanted)
        self.check(value, source)
        if self.kind.has_unit:  # a number, which may be what the same text may be
            try:
                return self.kind.parse(str(value))
            except (ValueError, OverflowError):
                raise _wrong(source, value, self.kind.wanted) from None
        return tuple(value) if isinstance(value, list) else value

    def check(self, value: Any, source: str) -> None:
        """Refuse a value that is no choice or out of bounds.

        Raises:
            ConfigError: It is.
        """
        if self.kind.choices and value is not None and value not in self.kind.choices:
            raise _wrong(source, value, self.kind.wanted)
        if not self._allows(value):
            raise _wrong(source, value, self._bounds())

    def _allows(self, value: Any) -> bool:
        is_bounded = (self.least, self.most) != (-math.inf, math.inf)
        return not is_bounded or value is None or bool(self.least <= value <= self.most)

    def _bounds(self) -> str:
        low = f"at least {self.least:g}"
        return self.wanted or (low if self.most == math.inf else f"{low} and at most {self.most:g}")


def _wrong(source: str, value: Any, requirement: str) -> ConfigError:
    return ConfigError(f"{source} is {value!r:.200}; it must be {requirement}")


def setting(
    default: Any, help: str, kind: SettingKind | None = None, names: str = "", **more: Any
) -> Any:
    """Return a field that is a setting.

    Args:
        kind: If that does not follow from the annotation.
        names: Names of the setting, each recognised by its form: `--flag`, `VARIABLE`, its
            synonyms, `table.key`.
    """
    parts: dict[str, Any] = {"synonyms": ()}
    for name in names.split():
        if name.startswith("--"):
            parts["flag"] = name
        elif "." in name:
            parts["key"] = name
        elif "env" in parts:
            parts["synonyms"] += (name,)
        else:
            parts["env"] = name
    return dataclasses.field(
        default=default, metadata={"setting": {"help": help, "kind": kind, **parts, **more}}
    )


def settings_of(group: Any) -> tuple[Setting, ...]:
    """Return the settings that a dataclass declares or inherits, in order, or that its `settings()` lists."""
    return tuple(group.settings()) if hasattr(group, "settings") else _declared(group)


@functools.cache
def _declared(group: Any) -> tuple[Setting, ...]:
    hints = typing.get_type_hints(group)
    return tuple(
        Setting(field.name, more.pop("kind") or kind_of(hints[field.name]), field.default, **more)
        for field in dataclasses.fields(group)
        if (more := dict(field.metadata.get("setting", ())))
    )


def check(item: Any, source: Callable[[Setting], str]) -> None:
    """Check every setting of a dataclass; `source` names one for messages."""
    for one in settings_of(type(item)):
        one.check(getattr(item, one.name), source(one))


def from_variables(group: type, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a group that variables say; those that are not set or empty are left out.

    Raises:
        ConfigError: One is wrong.
    """
    return {
        one.name: one.parse(variables[name], name)
        for one in settings_of(group)
        if (name := _variable(one, variables))
    }


def from_variable(group: type, name: str, variables: Mapping[str, str]) -> Any:
    """Return one setting of a group, whatever variables say of the others.

    Raises:
        ConfigError: It is wrong.
    """
    one = next(one for one in settings_of(group) if one.name == name)
    text = _variable(one, variables)
    return one.parse(variables[text], text) if text else one.default


def _variable(one: Setting, variables: Mapping[str, str]) -> str:
    """Return the variable that says the setting; empty: none does."""
    return next(filter(variables.get, (one.env, *one.synonyms)), "")


def to_variables(item: Any, *groups: type) -> dict[str, str]:
    """Return the settings of these groups as variables, for a process that reads them.

    A default is left out, unless a synonym that the process inherits could say something else.
    """
    return {
        one.env: one.kind.text(value)
        for group in groups
        for one in settings_of(group)
        if one.env and ((value := getattr(item, one.name)) != one.default or one.synonyms)
    }


def from_tables(group: type, tables: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of a group that a file's tables say; `where` names the file for messages.

    Raises:
        ConfigError: One is wrong.
    """
    values = {}
    for one in settings_of(group):
        table, _, key = one.key.rpartition(".")
        if key in tables.get(table, {}):
            values[one.name] = one.take(tables[table][key], f"{one.key} in {where}")
    return values

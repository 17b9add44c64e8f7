"""Declaration of settings: each is declared once, as a field of a frozen dataclass.

    @dataclass(frozen=True)
    class Recovery:
        dead_after: float = setting(
            0.0, "Go on without a worker that was silent for so long", SECONDS,
            names="--dead-after PSFLEET_DEAD_AFTER workers.dead_after")

Type, default, limits and help text are written only there. Flags of commands
(psfleet_launch.commands.options), environment variables, keys of job files, checks and docs/settings.md are
derived from them.

pydantic-settings or msgspec could replace only this file. They are not used because their messages name the
field of a model. The messages here name the flag, variable or key that the user has written.
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
    """A declared setting.

    Attributes:
        default: Default value, or dataclasses.MISSING if a value must be given.
        help: Meaning, as a sentence without a full stop.
        flag: Flag of a command, or empty. `--no-x` switches off a setting that is on by default.
        env: Environment variable, or empty.
        synonyms: Variables of Paddle (PADDLE_*) with the same meaning. `env` takes precedence.
        key: Key in a job file as `table.key`, or empty.
        metavar: Name of the value in help texts, or empty to derive it from the kind.
        least, most: Bounds of a number.
        wanted: Allowed values in words, if the bounds alone do not describe them well.
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
        """Return the value of this setting in a text, which comes from a flag or a variable.

        `source`: Name of the flag or variable, for messages.

        Raises:
            ConfigError: The text is of another kind, or out of bounds.
        """
        try:
            value = self.kind.parse(text)
        except ConfigError:
            raise  # its text is more specific
        except (ValueError, OverflowError):
            raise _wrong(source, text, self.kind.written or self.kind.wanted) from None
        if not self._allows(value):
            raise ConfigError(f"{source} is {text:.200}; it must be {self._bounds()}")
        return value

    def take(self, value: Any, source: str) -> Any:
        """Return the value of this setting for a value in a file (TOML or JSON).

        `source`: Name of the key, for messages.

        Raises:
            ConfigError: The value is of another kind, or out of bounds.
        """
        if isinstance(value, str) and self.kind.has_unit:
            return self.parse(value, source)
        if not self.kind.fits(value):
            raise _wrong(source, value, self.kind.wanted)
        self.check(value, source)
        # A number for a setting that has a unit: the parser decides whether the unit may be left out.
        if self.kind.has_unit:
            try:
                return self.kind.parse(str(value))
            except (ValueError, OverflowError):
                raise _wrong(source, value, self.kind.wanted) from None
        return tuple(value) if isinstance(value, list) else value

    def check(self, value: Any, source: str) -> None:
        """Check that a value is one of the choices, and within the bounds.

        Raises:
            ConfigError: The value is not allowed.
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
    default: Any, help: str, kind: SettingKind | None = None, names: str = "", **attributes: Any
) -> Any:
    """Declare a dataclass field as a setting.

    Args:
        default: Default value.
        help: Meaning, as a sentence without a full stop.
        kind: Kind of the values, if the annotation does not determine it.
        names: Names of the setting, separated by spaces. A name `--x` is a flag, and `table.key` is a key of
            job files. The first other name is the environment variable, and all further ones its synonyms.
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
        default=default, metadata={"setting": {"help": help, "kind": kind, **parts, **attributes}}
    )


def settings_of(group: Any) -> tuple[Setting, ...]:
    """Return the settings that a dataclass declares or inherits, in order.

    If the class has a method `settings()`, that method lists them.
    """
    return tuple(group.settings()) if hasattr(group, "settings") else _declared(group)


@functools.cache
def _declared(group: Any) -> tuple[Setting, ...]:
    hints = typing.get_type_hints(group)
    return tuple(
        Setting(
            field.name,
            attributes.pop("kind") or kind_of(hints[field.name]),
            field.default,
            **attributes,
        )
        for field in dataclasses.fields(group)
        if (attributes := dict(field.metadata.get("setting", ())))
    )


def check(item: Any, source: Callable[[Setting], str]) -> None:
    """Check the values of all settings of `item`, an instance of a dataclass that declares settings.

    `source`: Returns the name of a setting, for messages.

    Raises:
        ConfigError: A value is not allowed.
    """
    for declared in settings_of(type(item)):
        declared.check(getattr(item, declared.name), source(declared))


def from_variables(group: type, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of those settings of a group whose variables are set and not empty.

    Returns:
        Values by the name of the field.

    Raises:
        ConfigError: A value is not allowed.
    """
    return {
        declared.name: declared.parse(variables[name], name)
        for declared in settings_of(group)
        if (name := _variable(declared, variables))
    }


def from_variable(group: type, name: str, variables: Mapping[str, str]) -> Any:
    """Return the value of one setting of a group, or its default. Does not check variables of other settings.

    Raises:
        ConfigError: The value is not allowed.
    """
    declared = next(declared for declared in settings_of(group) if declared.name == name)
    text = _variable(declared, variables)
    return declared.parse(variables[text], text) if text else declared.default


def _variable(declared: Setting, variables: Mapping[str, str]) -> str:
    """Return the name of the variable, own or synonym, that is set for this setting, or "" if none is."""
    return next(filter(variables.get, (declared.env, *declared.synonyms)), "")


def to_variables(item: Any, *groups: type) -> dict[str, str]:
    """Return the settings of these groups as environment variables for another process.

    Settings with default values are left out, except for those with synonyms: the other process could
    inherit a synonym with another value.
    """
    return {
        declared.env: declared.kind.text(value)
        for group in groups
        for declared in settings_of(group)
        if declared.env
        and ((value := getattr(item, declared.name)) != declared.default or declared.synonyms)
    }


def from_tables(group: type, tables: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values of those settings of a group that a file contains, by the name of the field.

    Args:
        where: Name of the file, for messages.

    Raises:
        ConfigError: A value is not allowed.
    """
    values = {}
    for declared in settings_of(group):
        table, _, key = declared.key.rpartition(".")
        if key in tables.get(table, {}):
            values[declared.name] = declared.take(tables[table][key], f"{declared.key} in {where}")
    return values

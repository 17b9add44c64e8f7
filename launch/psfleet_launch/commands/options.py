"""Flags and job files, both made from the declarations of settings."""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from psfleet.errors import ConfigError
from psfleet.settings.declaration import Setting, from_tables, settings_of
from psfleet.strategy import Settings, load_strategy_file, overridden
from psfleet.strategy.strategy_settings import PARTS

__all__ = [
    "given",
    "load_job_file",
    "merged",
    "mode_of",
    "options",
    "requested",
    "strategy_options",
]

Command = Callable[..., Any]


def options(
    settings: Iterable[Setting], shows_default: bool = True
) -> Callable[[Command], Command]:
    """Give a command the flags of these settings, in their order."""
    flagged: dict[str, Setting] = {}
    for one in settings:
        flagged.setdefault(one.flag, one)

    def decorate(command: Command) -> Command:
        for flag in filter(None, reversed(flagged)):
            command = _option(flagged[flag], shows_default)(command)
        return command

    return decorate


def _option(one: Setting, shows_default: bool) -> Callable[[Command], Command]:
    said: dict[str, Any] = {"help": f"{one.help}."}
    if isinstance(one.default, bool):
        return click.option(one.flag, _parameter(one), is_flag=True, **said)
    if one.default and shows_default:
        said |= {"default": one.kind.text(one.default), "show_default": True}
    if one.kind.choices:
        said["type"] = click.Choice(one.kind.choices)
    else:
        metavar = one.metavar or ("N" if one.kind.is_number else "TEXT")
        said |= {"callback": partial(_read, one), "metavar": metavar}
    return click.option(one.flag, _parameter(one), **said)


def _read(one: Setting, context: click.Context, option: click.Parameter, text: str | None) -> Any:
    return text if text in (None, one.default) else one.parse(text, one.flag)


def _parameter(one: Setting) -> str:
    """The name of a flag as a parameter of its command."""
    return one.flag.removeprefix("--").replace("-", "_")


def given(context: click.Context, settings: Iterable[Setting]) -> dict[str, Any]:
    """The settings whose flags were given, by name."""
    return {
        one.name: not one.default
        if isinstance(one.default, bool)
        else context.params[_parameter(one)]
        for one in settings
        if context.get_parameter_source(_parameter(one)) is ParameterSource.COMMANDLINE
    }


def strategy_options(*parts: str) -> Callable[[Command], Command]:
    """Give a command the flags of these parts of a strategy, and `--strategy`."""
    settings = [one for part in parts for one in settings_of(PARTS[part])]
    recompute = click.option(
        "--recompute",
        is_flag=True,
        help="Drop activations and compute them again in the backward pass.",
    )
    file = click.option(
        "--strategy",
        metavar="FILE",
        help="A TOML file of settings that go before the script's; flags go before it.",
    )
    return lambda command: options(settings, shows_default=False)(recompute(file(command)))


def requested(context: click.Context, mode: str | None = None) -> dict[str, dict[str, Any]]:
    """The strategy that a command's flags say; `mode`: what they say in other words."""
    flags = {name: given(context, settings_of(part)) for name, part in PARTS.items()}
    if mode:
        flags["consistency"]["mode"] = mode
    said = {name: found for name, found in flags.items() if found}
    return said | ({"recompute": {}} if context.params["recompute"] else {})


def mode_of(context: click.Context) -> str | None:
    """The mode that --sync, --async and --mode name; None: none.

    Raises:
        ConfigError: They name several.
    """
    mode = context.params["mode"]
    said = {flag: flag[2:] for flag in ("--sync", "--async") if context.params[flag[2:]]}
    said |= {f"--mode {mode}": mode} if mode else {}
    if len({*said.values()}) > 1:
        raise ConfigError(f"{' and '.join(said)} are different modes; name one")
    return next(iter(said.values()), None)


def merged(
    *sources: Mapping[str, Mapping[str, Any]], file: str | None = None
) -> dict[str, dict[str, Any]]:
    """The strategy of a job file, over it that of a strategy file, over it that of the flags."""
    *first, flags = sources
    parts: dict[str, dict[str, Any]] = {}
    for said in (*first, load_strategy_file(file) if file else {}, flags):
        parts = overridden(parts, said)
    if "mode" in parts.get("consistency", {}):  # else the script says what the rest belongs to
        Settings.from_parts({"consistency": parts["consistency"]})
    return parts


def load_job_file(path: str, *groups: type) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The settings of these groups that a job file says, by name, and its strategy.

    Raises:
        ConfigError: It is missing, not TOML, or says something wrong or unknown.
    """
    where = f"job file {path!r}"
    try:
        tables = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None
    strategy = tables.pop("strategy", {})
    if isinstance(tables.get("engine"), dict):
        tables |= {f"engine.{name}": said for name, said in tables.pop("engine").items()}
    _refuse_unknown(tables, where, groups)
    Settings.from_parts(strategy)
    return {
        name: value for group in groups for name, value in from_tables(group, tables, where).items()
    }, strategy


def _refuse_unknown(tables: Mapping[str, Any], where: str, groups: Iterable[type]) -> None:
    known: dict[str, list[str]] = {}
    for one in (one for group in groups for one in settings_of(group) if one.key):
        table, _, key = one.key.rpartition(".")
        known.setdefault(table, []).append(key)
    for table, said in tables.items():
        if table not in known or not isinstance(said, dict):
            raise ConfigError(
                f"{where} has no table {table!r}; it has {', '.join(known)}, strategy"
            )
        for key in said:
            if key not in known[table]:
                others = [f"; {other!r} has one" for other in known if key in known[other]]
                raise ConfigError(
                    f"table {table!r} of {where} has no setting {key!r}; it has "
                    f"{', '.join(known[table])}{next(iter(others), '')}"
                )

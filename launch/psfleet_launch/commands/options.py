"""Command-line options and job files, made from the declarations of settings, and help texts under headings.

A setting is declared once (`psfleet/core/base/settings/`). This module makes from it an option of click, a
key in job files, and a line of the help. The table of a job file in which the setting stands gives the
heading.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.files import read_toml
from psfleet.core.base.settings.declaration import Setting, from_tables, settings_of
from psfleet.core.runtime.strategy import Settings, load_strategy_file, overridden
from psfleet.core.runtime.strategy.distributed_strategy import PARTS
from psfleet.core.runtime.strategy.strategy_parts import ConsistencySettings, modes_with

Command = Callable[..., Any]


_HEADINGS = {
    "servers": "Servers",
    "workers": "Workers",
    "job": "The job",
    "network": "Network",
    "engine": "Machines",
    "chaos": "Chaos",
    "strategy": "Strategy",
    "": "Other options",
}
"""Heading of the help for each table of a job file, in the order of the help."""
_ALL = "psfleet.help_all"
USAGE_EXIT = 2  # exit code for wrong usage; retrying does not help


def options(
    settings: Iterable[Setting], shows_default: bool = True
) -> Callable[[Command], Command]:
    """Return a decorator that gives a command the flags of these settings, in this order."""
    by_flag: dict[str, Setting] = {}
    for setting in settings:
        by_flag.setdefault(setting.flag, setting)

    def decorate(command: Command) -> Command:
        for flag in filter(None, reversed(by_flag)):
            command = _option(by_flag[flag], shows_default)(command)
        return command

    return decorate


def _option(setting: Setting, shows_default: bool) -> Callable[[Command], Command]:
    options: dict[str, Any] = {"help": f"{setting.help}."}
    if isinstance(setting.default, bool):
        return click.option(setting.flag, _parameter(setting), is_flag=True, **options)
    if setting.default and shows_default:
        options |= {"default": setting.kind.text(setting.default), "show_default": True}
    if setting.kind.choices:
        options["type"] = click.Choice(setting.kind.choices)
    else:
        metavar = setting.metavar or ("N" if setting.kind.is_number else "TEXT")
        options |= {"callback": partial(_read, setting), "metavar": metavar}
    return click.option(setting.flag, _parameter(setting), **options)


def _read(
    setting: Setting, context: click.Context, option: click.Parameter, text: str | None
) -> Any:
    return text if text in (None, setting.default) else setting.parse(text, setting.flag)


def _parameter(setting: Setting) -> str:
    """Return the name of the command's Python parameter for a flag."""
    return setting.flag.removeprefix("--").replace("-", "_")


def given(context: click.Context, settings: Iterable[Setting]) -> dict[str, Any]:
    """Return the values of the settings whose flags are on the command line, by name."""
    return {
        setting.name: not setting.default
        if isinstance(setting.default, bool)
        else context.params[_parameter(setting)]
        for setting in settings
        if context.get_parameter_source(_parameter(setting)) is ParameterSource.COMMANDLINE
    }


def strategy_options(*parts: str) -> Callable[[Command], Command]:
    """Return a decorator that gives a command `--strategy` and the flags of these parts of a strategy."""
    settings = [setting for part in parts for setting in settings_of(PARTS[part])]
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
    """Return the strategy that the flags of a command set, by part. `mode` is the consistency mode, if not
    None."""
    flags = {name: given(context, settings_of(part)) for name, part in PARTS.items()}
    if mode:
        flags["consistency"]["mode"] = mode
    parts = {name: values for name, values in flags.items() if values}
    return parts | ({"recompute": {}} if context.params["recompute"] else {})


def mode_of(context: click.Context) -> str | None:
    """Return the mode that --sync, --async or --mode sets, or None if none of the flags is used.

    Raises:
        ConfigError: The flags set different modes.
    """
    mode = context.params["mode"]
    modes = {flag: flag[2:] for flag in ("--sync", "--async") if context.params[flag[2:]]}
    modes |= {f"--mode {mode}": mode} if mode else {}
    if len({*modes.values()}) > 1:
        raise ConfigError(f"{' and '.join(modes)} are different modes; name one")
    return next(iter(modes.values()), None)


def merged(
    *sources: Mapping[str, Mapping[str, Any]], file: str | None = None
) -> dict[str, dict[str, Any]]:
    """Merge the strategy of a job file, a strategy file and flags. Flags win over files.

    Args:
        sources: Strategy of the job file, then of the flags. Later ones override earlier ones.
        file: Strategy file, which overrides the job file, or None.

    Raises:
        ConfigError: Settings contradict each other, or belong to a mode that is not chosen.
    """
    *first, flags = sources
    parts: dict[str, dict[str, Any]] = {}
    for source in (*first, load_strategy_file(file) if file else {}, flags):
        parts = overridden(parts, source)
    consistency = parts.get("consistency", {})
    if consistency and "mode" not in consistency:
        name = next(iter(consistency))
        flag = next(
            setting.flag for setting in ConsistencySettings.settings() if setting.name == name
        )
        modes = modes_with(name)
        raise ConfigError(
            f"{flag or name} is {consistency[name]!r}, a setting of the consistency mode "
            f"{' or '.join(modes)}; name the mode too, as in --mode {modes[0]}"
        )
    Settings.from_parts(parts)
    return parts


def load_job_file(path: str, *groups: type) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the settings of these groups in a job file, by name, and its strategy.

    Raises:
        ConfigError: The file is missing or not TOML, or a setting is wrong or unknown.
    """
    where = f"job file {path!r}"
    tables = read_toml(path, where)
    strategy = tables.pop("strategy", {})
    if isinstance(tables.get("engine"), dict):
        tables |= {f"engine.{name}": values for name, values in tables.pop("engine").items()}
    _refuse_unknown(tables, where, groups)
    Settings.from_parts(strategy)
    return {
        name: value for group in groups for name, value in from_tables(group, tables, where).items()
    }, strategy


def _refuse_unknown(tables: Mapping[str, Any], where: str, groups: Iterable[type]) -> None:
    keys: dict[str, list[str]] = {}
    for setting in (setting for group in groups for setting in settings_of(group) if setting.key):
        table, _, key = setting.key.rpartition(".")
        keys.setdefault(table, []).append(key)
    for table, values in tables.items():
        if table not in keys or not isinstance(values, dict):
            raise ConfigError(f"{where} has no table {table!r}; it has {', '.join(keys)}, strategy")
        for key in values:
            if key not in keys[table]:
                hints = [
                    f"; {other_table!r} has one" for other_table in keys if key in keys[other_table]
                ]
                raise ConfigError(
                    f"table {table!r} of {where} has no setting {key!r}; it has "
                    f"{', '.join(keys[table])}{next(iter(hints), '')}"
                )


def _explained(
    error: click.NoSuchOption, context: click.Context, words: Sequence[str]
) -> click.UsageError:
    """Return an error for an unknown option. If a script follows, the error says where its options belong."""
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None:
        return error
    command = f"{context.command_path} {script} {error.option_name}"
    sentence = f"{error.format_message()} An option of the script goes after it: {command}"
    return click.UsageError(sentence, context)


def _help_all(context: click.Context, option: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


class GroupedCommand(click.Command):
    """A command with many options. `--help` shows the usual options under headings and examples.

    `--help-all` shows all options.

    Args:
        settings: Settings of the options. Their keys in job files determine the heading.
        more: Function that returns further settings. It is called only if a command line has an unknown
            option, because it imports all engines.
        tables: Heading for each table of a job file.
        examples: Pairs of a command line and its explanation.
        usual: Flags that `--help` shows, besides --help, --help-all and --version.
    """

    def __init__(
        self,
        *arguments: Any,
        settings: Iterable[Setting],
        more: Callable[[], Iterable[Setting]],
        tables: Mapping[str, str],
        examples: Iterable[tuple[str, str]],
        usual: Iterable[str],
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        options: dict[str, Any] = {"is_flag": True, "is_eager": True, "callback": _help_all}
        options |= {"expose_value": False, "help": "Show all options and exit."}
        self.params.append(click.Option(["--help-all"], **options))
        self._usual = {*usual, "--version", "--help-all", "-h"}
        self.settings = list(settings)
        self._more: Callable[[], Iterable[Setting]] | None = more
        self._tables = tables
        self._examples = list(examples)

    def complete(self) -> "GroupedCommand":
        """Add the options of `more`, and return the command."""
        if self._more is not None:
            settings, self._more = list(self._more()), None
            self.settings += settings
            options(reversed(settings))(self)  # decorators are applied in reverse order
        return self

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line. If it has an unknown option, parse it again with all options."""
        if ctx.resilient_parsing:  # a shell completes the line, so unknown options are no errors
            self.complete()
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption as error:
            if self._more is None:
                raise _explained(error, ctx, args) from None
        try:
            return super(GroupedCommand, self.complete()).parse_args(ctx, [*args])
        except click.NoSuchOption as error:
            raise _explained(error, ctx, args) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the completions of a word, from all options."""
        return super(GroupedCommand, self.complete()).shell_complete(ctx, incomplete)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, then the examples."""
        self.complete()
        tables = {setting.flag: setting.key.partition(".")[0] for setting in self.settings} | {
            **self._tables
        }
        groups: dict[str, list[tuple[str, str]]] = {table: [] for table in _HEADINGS}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None and (_ALL in ctx.meta or option.opts[0] in self._usual):
                groups[tables.get(option.opts[0], "")].append(record)
        for table, records in groups.items():
            if records:
                with formatter.section(_HEADINGS[table]):
                    formatter.write_dl(records)
        with formatter.section("Examples"):
            formatter.write_dl(self._examples)


class CommandGroup(click.Group):
    """Group of commands whose help shows the whole first sentence of each command, not shortened.

    `headings` lists the names of commands under each heading. Other commands are under "Commands".
    """

    def __init__(
        self, *arguments: Any, headings: Mapping[str, Sequence[str]] | None = None, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._headings = headings or {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings."""
        named = {name for names in self._headings.values() for name in names}
        without_heading = [name for name in self.list_commands(ctx) if name not in named]
        for heading, names in {**self._headings, "Commands": without_heading}.items():
            rows = [(name, self.commands[name].get_short_help_str(sys.maxsize)) for name in names]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def run_command(
    command: click.Command,
    name: str,
    words: Sequence[str] | None,
    errors: tuple[type[Exception], ...],
) -> int:
    """Run a command, and return its exit code. A mistake of the user is reported in one line on standard
    error.

    Args:
        name: Name of the program, for messages.
        words: Arguments, which the command also finds in its context. None means the arguments of this
            process.
        errors: Exceptions to report in one line, without a traceback.

    Raises:
        EOFError: The command itself has raised it. (Click would treat it as the end of input at a prompt.)
    """
    try:
        return command.main(words, prog_name=name, standalone_mode=False, obj=words) or 0
    except click.ClickException as error:
        message = error.format_message()
    except errors as error:
        message = str(error)
    except click.Abort as abort:
        if isinstance(abort.__cause__, EOFError):
            raise abort.__cause__ from None
        return 130
    print(f"{name}: {message}", file=sys.stderr)
    return USAGE_EXIT

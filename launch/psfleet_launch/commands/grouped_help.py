"""A command with many options, in groups, some of which are costly to know."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from psfleet.settings.declaration import Setting
from psfleet_launch.commands.options import options

__all__ = ["GroupedCommand"]

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
"""By table of a job file, in the order in which they are shown."""


class GroupedCommand(click.Command):
    """A command with many options; its help has them under headings, followed by examples.

    Args:
        settings: Those of its options, whose keys in job files say where they belong.
        more: Returns further settings, which become options where a command line may mean one of them.
        tables: Of options that have no key, the table where they belong.
        examples: Command lines, each with what it does.
    """

    def __init__(
        self,
        *arguments: Any,
        settings: Iterable[Setting],
        more: Callable[[], Iterable[Setting]],
        tables: Mapping[str, str],
        examples: Iterable[tuple[str, str]],
        **rest: Any,
    ) -> None:
        super().__init__(*arguments, **rest)
        self.settings = list(settings)
        self._more: Callable[[], Iterable[Setting]] | None = more
        self._tables = tables
        self._examples = list(examples)

    def complete(self) -> "GroupedCommand":
        """Have all options from now on; return the command."""
        if self._more is not None:
            found, self._more = list(self._more()), None
            self.settings += found
            options(reversed(found))(self)  # which a decorator finds in reverse
        return self

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read a command line, with all options if it has one that is not known yet."""
        if ctx.resilient_parsing:  # a shell completes a line, and no option is refused
            self.complete()
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption:
            if self._more is None:
                raise
            return super(GroupedCommand, self.complete()).parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Suggest any option."""
        return super(GroupedCommand, self.complete()).shell_complete(ctx, incomplete)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by heading, then the examples."""
        self.complete()
        tables = {one.flag: one.key.partition(".")[0] for one in self.settings} | {**self._tables}
        groups: dict[str, list[tuple[str, str]]] = {table: [] for table in _HEADINGS}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                groups[tables.get(option.opts[0], "")].append(record)
        for table, records in groups.items():
            with formatter.section(_HEADINGS[table]):
                formatter.write_dl(records)
        with formatter.section("Examples"):
            formatter.write_dl(self._examples)

"""Help whose options stand under headings, followed by examples."""

from collections.abc import Iterable, Mapping
from typing import Any

import click

from psfleet.settings.declaration import Setting

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
    """A command with many options.

    Args:
        settings: Those of its options, whose keys in job files say where they belong.
        tables: Of options that have no key, the table where they belong.
        examples: Command lines, each with what it does.
    """

    def __init__(
        self,
        *arguments: Any,
        settings: Iterable[Setting],
        tables: Mapping[str, str],
        examples: Iterable[tuple[str, str]],
        **rest: Any,
    ) -> None:
        super().__init__(*arguments, **rest)
        self._tables = {one.flag: one.key.partition(".")[0] for one in settings}
        self._tables |= tables
        self._examples = list(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by heading, then the examples."""
        groups: dict[str, list[tuple[str, str]]] = {table: [] for table in _HEADINGS}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                groups[self._tables.get(option.opts[0], "")].append(record)
        for table, records in groups.items():
            with formatter.section(_HEADINGS[table]):
                formatter.write_dl(records)
        with formatter.section("Examples"):
            formatter.write_dl(self._examples)

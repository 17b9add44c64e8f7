"""Prints the figures of a benchmark as a table, and writes them as JSON."""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import machine

__all__ = ["Report", "arguments", "finish", "torch_missing"]


@dataclass
class Report:
    """The figures of one benchmark.

    Attributes:
        name: Name of the script.
        title: Description of the measurement in one line.
        rows: One dict per line of the table. A line with other keys begins another table.
        skipped: Contenders that did not take part, each with the reason.
    """

    name: str
    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--runs", type=int, default=3, help="measured runs; medians are shown")
    parser.add_argument("--steps", type=int, default=0, help="steps of a run, 0: the script's own")
    parser.add_argument("--short", action="store_true", help="fewer steps and a smaller table")
    parser.add_argument("--no-peers", action="store_true", help="psfleet alone")
    parser.add_argument(
        "--all-peers",
        action="store_true",
        help="also peers with environments of their own, which `make bench-peers` makes",
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser


def finish(report: Report, path: Path | None) -> None:
    """Print the table and write the JSON."""
    here = machine()
    print(f"\n{report.title}")
    print(f"{here['processor']}, {here['cores']} cores, load {here['load']}, {here['time']}")
    for _, block in itertools.groupby(report.rows, key=list):
        for line in _table(list(block)):
            print(line)
    for name, reason in report.skipped.items():
        print(f"skipped: {name} ({reason})")
    if path is not None:
        content = {
            "name": report.name,
            "title": report.title,
            "machine": here,
            "rows": report.rows,
            "skipped": report.skipped,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")


def torch_missing() -> str | None:
    """Return the reason why torch cannot take part, or None."""
    try:
        import torch  # noqa: F401  (is it there?)
    except ImportError as error:
        return f"not installed: {error}"
    return None


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    cells = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


def _text(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 100
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )

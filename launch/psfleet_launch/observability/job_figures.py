"""The figures of a frame in other forms: what scripts have logged in a line, and all for TensorBoard."""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from psfleet.observability.event_file import EventFile
from psfleet.observability.panels import PANELS

__all__ = ["FigureEvents", "logged", "logged_in"]

Series = Mapping[str, float | None]

_PLACES = {panel.title: place for place, panel in enumerate(PANELS)}


def logged(series: Series) -> Iterator[str]:
    """`accuracy 0.93` for each name that scripts have logged: the mean over the workers.

    Args:
        series: The answer of the panel "Logged values", by name and rank.
    """
    values: dict[str, list[float]] = {}
    for key, value in series.items():
        if value is not None:
            values.setdefault(key.rpartition(" ")[0], []).append(value)
    for name, each in values.items():
        yield f"{name} {statistics.fmean(each):.4g}"


def logged_in(frame: Mapping[str, Any]) -> str:
    """The same of a frame of the recorder, in one line."""
    return " · ".join(logged(frame["panels"][_PLACES["Logged values"]]))


class FigureEvents:
    """Writes the answers to all panels' questions as scalars, a tag for each panel and series.

    Args:
        folder: For the event file.
    """

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder)

    def add_frame(self, frame: Mapping[str, Any]) -> None:
        """Write one frame of the recorder; the axis is that of the panel "Steps"."""
        steps = frame["panels"][_PLACES["Steps"]].get("") or 0.0
        found = {
            f"{panel.title}/{name}".removesuffix("/"): value
            for panel, series in zip(PANELS, frame["panels"], strict=True)
            if panel.title != "Logged values"  # workers write these themselves, every one
            for name, value in series.items()
            if value is not None
        }
        self._file.add(found, int(steps), frame["at"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

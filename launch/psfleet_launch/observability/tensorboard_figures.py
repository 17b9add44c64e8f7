"""Writes the figures of a job to event files for TensorBoard.

With `--tensorboard FOLDER` the launcher writes a scalar for each panel and series every 2 s. Values that
scripts log are left out, because the workers write them to their own event files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psfleet.core.base.observability.logged_values import EventFile
from psfleet.core.base.panels.process_panels import PANELS

_STEPS = next(number for number, panel in enumerate(PANELS) if panel.title == "Steps")


class FigureEvents:
    """Writes each frame of the recorder as scalars. Each panel and series has its own tag."""

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder)

    def add_frame(self, frame: Mapping[str, Any]) -> None:
        """Write a frame. Its step is the value of the panel "Steps"."""
        steps = frame["panels"][_STEPS].get("") or 0.0
        scalars = {
            f"{panel.title}/{name}".removesuffix("/"): value
            for panel, series in zip(PANELS, frame["panels"], strict=True)
            if panel.title != "Logged values"
            for name, value in series.items()
            if value is not None
        }
        self._file.add(scalars, int(steps), frame["at"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

"""The figures of a job as event files for TensorBoard, beside those that its workers write.

`--tensorboard FOLDER` has the launcher write one scalar for each panel and series at every look at the job.
The values that scripts log are not among them, because workers write every one of those.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psfleet.core.base.observability.logged_values import EventFile
from psfleet.core.base.panels.process_panels import PANELS

_STEPS = next(number for number, panel in enumerate(PANELS) if panel.title == "Steps")


class FigureEvents:
    """Writes each frame of the recorder as scalars, with a tag for each panel and series."""

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder)

    def add_frame(self, frame: Mapping[str, Any]) -> None:
        """Write a frame of the recorder at the step that the panel "Steps" has."""
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

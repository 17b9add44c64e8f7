"""The recent answers to all panels' questions, for the page of a job."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from psfleet.observability.expressions import Look
from psfleet.observability.panels import PANELS
from psfleet_launch.observability.fleet_reader import look_at

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["Recorder", "panel_texts"]

_EVERY = 2.0  # seconds between two looks
_KEPT = 450  # 15 minutes


class Recorder:
    """A thread that asks all questions again and again.

    Args:
        read: Reads the metrics of the job.
        listeners: Get each frame, in the thread.
    """

    def __init__(
        self,
        read: "Callable[[], list[Metric]]",
        listeners: Sequence[Callable[[dict[str, Any]], None]] = (),
        every: float = _EVERY,
    ) -> None:
        self._read = read
        self._listeners = listeners
        self._every = every
        self._changed = threading.Condition()
        self._frames: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._count = 0
        self._over = False
        self._thread = threading.Thread(target=self._run, name="psfleet-watch", daemon=True)

    def start(self) -> None:
        """Begin to look, unless it has begun."""
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and whoever follows."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def follow(self) -> Iterator[list[dict[str, Any]]]:
        """The frames that are kept, then each new one, until `stop`."""
        with self._changed:
            frames, seen = list(self._frames), self._count
        yield frames
        while not self._over:
            with self._changed:
                frames = list(self._frames)[-more:] if (more := self._count - seen) else []
                seen = self._count
                if not frames:
                    self._changed.wait()
            if frames:
                yield frames

    def _run(self) -> None:
        before: Look | None = None
        while not self._over:
            now = look_at(self._read())
            if before is not None:
                self._add(answers(now, before))
            before = now
            with self._changed:
                self._changed.wait_for(lambda: self._over, self._every)

    def _add(self, frame: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(frame)
        with self._changed:
            self._frames.append(frame)
            self._count += 1
            self._changed.notify_all()


def answers(now: Look, before: Look) -> dict[str, Any]:
    """Of each panel, in their order, its series by name."""
    return {
        "at": now.at,
        "panels": [
            {
                " ".join(key): value if math.isfinite(value) else None  # JSON has no infinity
                for key, value in panel.query.answer(now, before).items()
            }
            for panel in PANELS
        ],
    }


def panel_texts() -> list[dict[str, str]]:
    """What the page says about each panel."""
    return [
        {
            "section": panel.section,
            "title": panel.title,
            "unit": panel.unit,
            "meaning": panel.meaning,
            "advice": panel.advice,
            "by": " ".join(panel.query.by),
        }
        for panel in PANELS
    ]

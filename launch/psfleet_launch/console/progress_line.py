"""The line with a job's steps, speed and loss that the launcher and `psfleet top` show in a terminal.

The figures come from a frame of the job's history, so the line says what the page says.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from psfleet.core.base.panels.panel import counted, number_text, rate_text
from psfleet_launch.observability.fleet_reader import panel_texts
from psfleet_launch.observability.job_history import Figures, PastJob
from psfleet_launch.observability.job_view import Ask, known_values, logged


def progress_line(ask: Ask) -> str:
    """Return the progress line of a job, given its figures.

    `1,204 steps · 151 steps/s · 77.4 k samples/s · loss 0.4713 · 41,207 rows · 3.1 MiB/s`

    Figures that a job does not have are left out.
    """
    traffic = {
        f"{title} {series}": rate
        for title in ("Received by servers", "Sent by servers")
        for series, rate in ask(title).items()
    }
    forms: Sequence[tuple[Figures, Callable[[Iterable[float]], float], Callable[[float], str]]] = (
        (ask("Steps"), sum, "{:,.0f} steps".format),
        (ask("Steps per second"), max, lambda rate: rate_text(rate, "steps")),
        (_nonzero(ask("Samples per second")), sum, lambda rate: rate_text(rate, "samples")),
        (_nonzero(ask("Time left")), sum, lambda left: f"{number_text(left, 's')} left"),
        (ask("Loss"), statistics.fmean, lambda loss: f"loss {number_text(loss, 'none')}"),
        (ask("Staleness, 99th percentile"), max, "staleness p99 {:.0f}".format),
        (_nonzero(ask("Torn steps")), sum, lambda count: counted(int(count), "torn step")),
        (ask("Rows"), sum, "{:,.0f} rows".format),
        (traffic, sum, lambda rate: number_text(rate, "Bps")),
        (
            ask("Age of the last snapshot"),
            max,
            lambda age: f"last snapshot {number_text(age, 's')} old",
        ),
    )
    parts = [
        words(total(known)) for series, total, words in forms if (known := known_values(series))
    ]
    return " · ".join([*parts, *map(" ".join, logged(ask("Logged values")))])


def frame_progress(frame: Mapping[str, Any]) -> str:
    """Return the progress line of a running job from a frame, or "" before the first step."""
    ask = PastJob({"panels": panel_texts()}, frames=[dict(frame)]).newest
    return progress_line(ask) if any(known_values(ask("Steps"))) else ""


def _nonzero(figures: Figures) -> Figures:
    return figures if any(known_values(figures)) else {}

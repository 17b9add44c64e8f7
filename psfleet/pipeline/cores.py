"""Which CPU cores the processes of a pipeline keep to, where a script says from which one on."""

import contextlib
import functools
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from psfleet.settings.environment import threads
from psfleet.stages.links import StagePosition

__all__ = ["cores_of", "pin"]


def cores_of(place: StagePosition, start: int, width: int, available: Sequence[int]) -> list[int]:
    """The cores of a process: `width` of the available ones, side by side, process after process.

    Args:
        place: Of the process; those of worker 1 come after all of worker 0.
        start: The first process's first core, counted among the available ones. Behind the last
            core it begins anew, so that some are shared.
        width: Cores of each process.
    """
    first = start + (place.worker * place.processes + place.process) * width
    return sorted({available[(first + i) % len(available)] for i in range(width)})


def pin(place: StagePosition, start: int) -> None:
    """Keep all threads of this process to its cores: as many as its BLAS has threads.

    Processes of several workers that do not share a host are counted as if they did.
    """
    available, width = _available(), threads()
    own = cores_of(place, start, width, available)
    end = start + (place.worker + 1) * place.processes * width
    if end > len(available) and place.process == 0:
        warnings.warn(
            f"start_cpu_core_id is {start}: {place.processes} processes of {width} "
            f"thread(s) up to {place.name(0)} want {end} cores and there are {len(available)}, so "
            "some share one",
            stacklevel=2,
        )
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task.name), own)


@functools.cache
def _available() -> tuple[int, ...]:
    """The cores that the process was started with."""
    return tuple(sorted(os.sched_getaffinity(0)))

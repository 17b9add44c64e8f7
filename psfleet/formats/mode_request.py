"""The files by which a mode is requested from outside a job, in the folder of its logs."""

from pathlib import Path
from typing import Any

from psfleet.formats.document import Format

__all__ = ["DONE", "WISH", "read_answer", "read_request", "write_answer", "write_request"]

WISH = "mode.json"
"""What is requested: a number, which grows, and settings such as {"mode": "ssp", "staleness": 4}."""

DONE = "mode.told"
"""Number of the last request that the workers have been told of."""

_REQUEST = Format("mode request")
_ANSWER = Format("mode answer")


def write_request(folder: Path, number: int, consistency: dict[str, Any]) -> None:
    """Request a mode: the settings of the strategy's part `consistency`."""
    _REQUEST.write(folder / WISH, number=number, consistency=consistency)


def read_request(folder: Path) -> tuple[int, dict[str, Any]]:
    """The last request.

    Raises:
        FileNotFoundError: There is none.
        FrameError: It is damaged or of another version.
    """
    number, consistency = _REQUEST.read(folder / WISH, number=int, consistency=dict)
    return number, consistency


def write_answer(folder: Path, number: int) -> None:
    """The workers have been told of the request of this number."""
    _ANSWER.write(folder / DONE, number=number)


def read_answer(folder: Path) -> int:
    """Number of the last request that the workers have been told of; 0: of none."""
    try:
        [number] = _ANSWER.read(folder / DONE, number=int)
    except FileNotFoundError:
        return 0
    return int(number)

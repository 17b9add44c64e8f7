"""Which rows go because no push has named them for long."""

from psfleet.kernels.hash_index import SEGMENT_COUNT

__all__ = ["SETTLED", "due", "leaving"]

SETTLED = 1 << 29  # a step that is a multiple of this has stamps brought up to date
_PART = 16  # of a full table, the part that goes at a time


def due(step: int, ttl: int) -> tuple[int, int]:
    """The segments to be looked over at this step, so that each has its turn in ttl / 8 steps.

    A segment is chosen by the id's hash, so which step a row goes at depends on nothing else.
    """
    period = max(ttl // 8, 1)
    turn = step % period
    return turn * SEGMENT_COUNT // period, (turn + 1) * SEGMENT_COUNT // period


def leaving(held: int, wanted: int, capacity: int) -> int:
    """How many rows of those that are held have to go so that `wanted` more fit; 0 if they do.

    At least a sixteenth of the capacity goes, so that a full table is not looked over with each push.
    """
    short = held + wanted - capacity
    return max(short, capacity // _PART) if short > 0 else 0

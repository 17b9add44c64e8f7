"""Decides which workers are dead: those whose heartbeats have not come for too long.

The coordinator tells `WorkerLiveness` of each heartbeat and asks it at intervals who has been silent. Times
come from the caller, so that the tests need no clock.
"""

from psfleet_server.coordinator.membership import Membership

_START = 120.0  # seconds that a worker has at least to register for the first time


class WorkerLiveness:
    """Times of the workers' last heartbeats.

    Args:
        dead_after: Seconds of silence after which a worker counts as dead. With 0 no worker ever does.
    """

    def __init__(self, dead_after: float) -> None:
        self._dead_after = dead_after
        # Maps a worker to its incarnation and the time of that incarnation's last heartbeat.
        self._last: dict[int, tuple[int, float]] = {}

    def note(self, worker: int, incarnation: int, at: float) -> None:
        """Note a worker's heartbeat at time `at`, in seconds."""
        self._last[worker] = (incarnation, at)

    def dead(self, members: Membership, at: float) -> list[int]:
        """Return the workers that have been silent for more than `dead_after` seconds at time `at`.

        A worker that is seen here for the first time, or for the first time as a new incarnation (process),
        gets the whole `dead_after` from now on. So do all workers after a restart of server 0.
        """
        silent = []
        for worker in members.present() if self._dead_after else []:
            incarnation = members.seats[worker].incarnation
            last = self._last.get(worker)
            if last is None or last[0] != incarnation:
                self.note(worker, incarnation, at)
                continue
            # A seat without an incarnation waits for its first process, which may need long to start.
            patience = self._dead_after if incarnation else max(self._dead_after, _START)
            if at - last[1] > patience:
                silent.append(worker)
        return silent

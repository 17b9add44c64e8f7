"""How far the fleet is: each server's Status, added up, and the rates between two looks."""

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from psfleet.settings.environment import Environment
from psfleet.shard.staleness import quantile
from psfleet_launch.job.spawn import children_without_grpc

if TYPE_CHECKING:
    from psfleet.wire.v1.shard_pb2 import StatusReply

__all__ = ["FleetProgress", "ProgressPoller", "add_up", "line"]


@dataclass(frozen=True)
class FleetProgress:
    """Totals of the whole fleet at one moment.

    Attributes:
        at: Seconds of the poller's clock.
        steps: Steps of all workers.
        samples: Samples of all workers.
        loss: Mean of the workers' last losses; None: no worker has told one.
        rows: Rows of all sparse tables.
        bytes: Bytes of data calls, both ways.
        staleness: Which 99 % of all pushes did not exceed; None: of rounds, or no push yet.
        torn: Steps that some servers have and others have not, because a worker died between them.
        left: Samples of the fleet's datasets that nobody has had yet; 0: that is not known.
    """

    at: float
    steps: int = 0
    samples: int = 0
    loss: float | None = None
    rows: int = 0
    bytes: int = 0
    staleness: int | None = None
    torn: int = 0
    left: int = 0


def add_up(replies: "Sequence[StatusReply]", at: float, processes: int = 1) -> FleetProgress:
    """One picture from the servers' own.

    Args:
        replies: One of each server.
        at: When they came.
        processes: Of each worker; each pushes its part of a step.

    A step reaches every server that holds a part of it, so the busiest server has counted them all;
    samples and losses travel with a step and count once per worker.
    """
    samples: dict[int, int] = {}
    losses: dict[int, float] = {}
    for reply in replies:
        for worker, count in reply.samples.items():
            if count >= samples.get(worker, 0):
                samples[worker] = count
                losses.update({worker: reply.losses[worker]} if worker in reply.losses else {})
    return FleetProgress(
        at=at,
        steps=max((reply.pushes for reply in replies), default=0) // processes,
        samples=sum(samples.values()),
        loss=sum(losses.values()) / len(losses) if losses else None,
        rows=sum(
            table.count for reply in replies for table in reply.tables if table.kind == "sparse"
        ),
        bytes=sum(reply.bytes_in + reply.bytes_out for reply in replies),
        staleness=quantile((reply.staleness for reply in replies), 0.99),
        torn=sum(len(reply.torn) for reply in replies),
        left=max((reply.samples_left for reply in replies), default=0),
    )


def line(
    now: FleetProgress, before: FleetProgress | None = None, snapshot: float | None = None
) -> str:
    """`1,204 steps · 151 steps/s · 77,400 samples/s · loss 0.4713 · 41,207 rows · 312 MB`.

    Args:
        before: An earlier moment; rates are those since then.
        snapshot: Seconds since the last complete snapshot; None: there is none.
    """
    parts = [f"{now.steps:,} steps"]
    if before is not None and now.at > before.at:
        span = now.at - before.at
        parts.append(f"{(now.steps - before.steps) / span:,.0f} steps/s")
        if now.samples:  # a script may not tell
            rate = (now.samples - before.samples) / span
            parts.append(f"{rate:,.0f} samples/s")
            if now.left and rate:
                parts.append(f"{timedelta(seconds=round(now.left / rate))} left")
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4f}")
    if now.staleness is not None:
        parts.append(f"staleness p99 {now.staleness}")
    if now.torn:
        parts.append(f"{now.torn} torn step{'s' if now.torn > 1 else ''}")
    parts += [f"{now.rows:,} rows", f"{now.bytes / 1e6:,.0f} MB"]
    if snapshot is not None:
        parts.append(f"snapshot {snapshot:,.0f} s ago")
    return " · ".join(parts)


class ProgressPoller:
    """Asks the servers in a thread of its own, so that a slow answer holds nobody up.

    Processes may be forked meanwhile, to start again what has died; they must not use gRPC before `exec`.

    Attributes:
        history: Pictures so far, oldest first; a server that does not answer adds nothing.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        processes: int = 1,
        every: float = 1.0,
        environment: Environment | None = None,
    ) -> None:
        self.history: list[FleetProgress] = []
        self._environment = environment or Environment()
        self._endpoints = list(endpoints)
        self._processes = processes
        self._every = every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="psfleet-progress", daemon=True)

    def start(self) -> None:
        """Begin to ask. Call from the main thread, before gRPC is imported."""
        children_without_grpc()
        import grpc  # noqa: F401  # here, for other threads will import it too; not for a job without a display

        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        import grpc

        from psfleet.wire.access import Access
        from psfleet.wire.channel import open_channel
        from psfleet.wire.v1.shard_pb2 import StatusRequest
        from psfleet.wire.v1.shard_pb2_grpc import ShardStub

        with contextlib.ExitStack() as channels:
            access = Access.of(self._environment)
            opened = [channels.enter_context(open_channel(one, access)) for one in self._endpoints]
            stubs = [ShardStub(channel) for channel in opened]  # type: ignore[no-untyped-call]
            while not self._stopped.wait(self._every):
                with contextlib.suppress(grpc.RpcError):
                    replies = [
                        stub.Status(StatusRequest(), timeout=self._every, metadata=access.metadata)
                        for stub in stubs
                    ]
                    self.history.append(add_up(replies, time.monotonic(), self._processes))

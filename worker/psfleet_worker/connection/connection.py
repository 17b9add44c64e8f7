"""All servers of a fleet as one worker calls them: its life, its meetings, one call to each."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import (
    ConfigError,
    DeadlineExceeded,
    LimitExceeded,
    ProtocolError,
    ServerUnavailable,
)
from psfleet.fleet.progress import Progress
from psfleet.settings.environment import Environment
from psfleet.settings.mode import Mode
from psfleet.shard.events import Correction
from psfleet.wire.access import Access
from psfleet.wire.shared_memory import Offer
from psfleet.wire.table_messages import read_mode, write_mode
from psfleet.wire.v1 import coordinator_pb2, shard_pb2
from psfleet.wire.v1.frame_pb2 import Header
from psfleet.wire.v1.membership_pb2 import BeatRequest
from psfleet_worker.connection.server_client import Call, Client, Patience, Send, wait_all
from psfleet_worker.connection.tensor_memory import Lane, Memories
from psfleet_worker.connection.worker_heartbeat import Beats

__all__ = ["Connection", "reduced"]

_PAUSE = 0.05  # seconds between two looks whether the servers are in one mode


class Connection:
    """A worker's life in a fleet: registered with server 0, joined on every server.

    Attributes:
        sequence: Last push or round of this life that all servers know.
        access: How this process meets others over TCP.
        view: The last view of the members that any server has told of.
        first: Sync mode: the round from which on this life counts.
        progress: How far the script is, over all lives in this seat.
        clock: Ssp mode: pushes since all workers last met.
        turns: Changes of the mode between rounds and leases that this life has made.
        beats: Signs of life, from `start` to `close`.
    """

    def __init__(
        self,
        environment: Environment,
        mode: Mode,
        patience: Patience,
        meddle: Callable[[int, Send], Send] | None = None,
        staleness: int = 0,
    ) -> None:
        self.worker = environment.rank
        self._joined_file = environment.joined_file
        self._left_file = environment.left_file
        self.workers = environment.workers
        self.mode: Mode = mode
        self.staleness = staleness
        self.correction = Correction()
        self.clock = 0
        self.turns = 0
        self._switches = 0
        self._changes = 0  # of the mode that this life has come to
        self.patience = patience
        changed = threading.Condition()
        self.access = Access.of(environment)
        self.clients = [
            Client(index, endpoint, patience, changed, meddle, self.access)
            for index, endpoint in enumerate(environment.servers)
        ]
        self._memories = Memories()
        memories = self._memories if environment.lane == "auto" else None
        self.lanes = [
            Lane(memories, functools.partial(self._attach, client), client.is_idle)
            for client in self.clients
        ]
        self.incarnation = 0
        self.sequence = 0
        self.beats = Beats(
            functools.partial(self.clients[0].attempt, "Coordinator/Beat"),
            self._beat,
            environment.beat,
        )
        self.progress = Progress()
        self.view = 0
        self.first = 1
        self._boot = 0
        self._meetings = 0
        self._met = 0  # meetings that were over when this life began

    def start(self) -> None:
        """Begin a life; waits for servers that are still starting."""
        if self._left_file:
            Path(self._left_file).unlink(missing_ok=True)
        self._boot = int.from_bytes(os.urandom(8), "little")
        register = coordinator_pb2.RegisterRequest(
            worker=self.worker,
            boot=self._boot,
            workers=self.workers,
            servers=[client.endpoint for client in self.clients],
        )
        try:
            answer = self._first("Coordinator/Register", register, [self.clients[0]])[0]
        except ServerUnavailable as error:
            raise ServerUnavailable(
                f"{error}; start the servers first, or correct PSFLEET_SERVERS"
            ) from None
        life = coordinator_pb2.RegisterReply.FromString(answer)
        self.incarnation, self.view, self._met = life.incarnation, life.view, life.met
        self.first = max(life.first, 1)
        self.progress = Progress(life.progress)
        self._adopt(life)
        if self.mode == "sync":  # the servers may have come further, in another mode
            self.sequence = max(self.first - 1, self.sequence)
        if self._joined_file:
            Path(self._joined_file).touch()
        self.beats.start()

    def _beat(self) -> BeatRequest:
        return BeatRequest(
            index=self.worker, incarnation=self.incarnation, boot=self._boot, step=self.sequence
        )

    @property
    def rests(self) -> bool:
        """Whether the others would wait for this worker while it waits for them at a meeting."""
        return self.mode in ("sync", "ssp")

    def _adopt(self, life: coordinator_pb2.RegisterReply) -> None:
        """Join in the mode in which the fleet is by now, the same on every server.

        All workers may have met to change it, and none may have told the servers yet.
        """
        if life.switches:
            self.mode, self.staleness = read_mode(life.mode), life.staleness
        deadline = time.monotonic() + self.patience.start
        while len({*map(_mode_of, self._join(life.switches, life.last))}) > 1:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    "the servers are in different modes: a change was left half done"
                )
            time.sleep(_PAUSE)  # the workers that make the change are on their way

    def change_mode(self, mode: Mode, staleness: int, last: int) -> None:
        """Go on in another mode. All workers have met with nothing under way, and all do this.

        A change that the fleet had behind it when this life began is passed over. `last` is the highest push
        of any worker before it.
        """
        self._changes += 1
        if self._changes > self._switches:
            self.turns += (mode == "sync") != (self.mode == "sync")
            self.mode, self.staleness = mode, staleness
            self.join(self._changes, last)

    def join(self, switch: int = 0, last: int = 0) -> None:
        """Go on after a rest; learns the last round.

        Args:
            switch: See `change_mode`; the number of the change.
            last: Likewise.
        """
        sequences = [reply.sequence for reply in self._join(switch, last)]
        if len(set(sequences)) != 1:
            raise ProtocolError(f"the servers stand at different rounds: {sequences}")

    def _join(self, switch: int = 0, last: int = 0) -> list[Any]:
        """Begin or go on on every server, in the mode that it says."""
        request = shard_pb2.JoinRequest(
            worker=self.worker,
            incarnation=self.incarnation,
            mode=write_mode(self.mode),
            staleness=self.staleness,
            switch=switch,
            last=last,
        )
        replies = [
            shard_pb2.JoinReply.FromString(answer)
            for answer in self._first("Shard/Join", request, self.clients)
        ]
        for index, reply in enumerate(replies):
            if (reply.server, reply.servers) != (index, len(self.clients)):
                raise ConfigError(
                    f"{self.clients[index].name} is server {reply.server} of "
                    f"{reply.servers}; start it as {index} of {len(self.clients)}"
                )
        self.sequence = replies[0].sequence
        self._switches = replies[0].switches
        self.mode, self.staleness = read_mode(replies[0].mode), replies[0].staleness
        self.clock = min(reply.clock for reply in replies)
        return replies

    @property
    def passes(self) -> bool:
        """Whether the next meeting was over before this life began."""
        return self._meetings < self._met

    @property
    def meetings(self) -> tuple[int, int]:
        """How many meetings this life has come to, and how many changes of the mode are among them."""
        return self._meetings, self._changes

    def pass_meetings(self, meetings: int, changes: int) -> None:
        """Those that the script's earlier life came to in a part that this life passes over."""
        self._meetings += meetings
        self._changes += changes

    def meet(
        self,
        mode: str = "",
        value: NDArray[Any] | None = None,
        timeout: float | None = None,
        reached: tuple[int, int] = (0, 0),
    ) -> bytes:
        """Come to the next meeting of all workers: a barrier, or a reduction of `value`.

        Args:
            mode: How to combine; "switch": all go on in another mode.
            value: What this worker brings.
            timeout: In seconds.
            reached: To a change of the mode: leases of data used up, and samples of the next one.
        """
        seconds = self.patience.wait if timeout is None else timeout
        identity = {
            "worker": self.worker,
            "incarnation": self.incarnation,
            "number": self._meetings + 1,
        }
        request: Any = coordinator_pb2.BarrierRequest(**identity)
        if value is not None:
            request = coordinator_pb2.AllReduceRequest(
                **identity,
                mode=mode,
                dtype=value.dtype.name,
                shape=value.shape,
                value=value.tobytes(),
                change=self._changes + 1,
                round=self.sequence,
                leases=reached[0],
                samples=reached[1],
            )
        method = "Coordinator/Barrier" if value is None else "Coordinator/AllReduce"
        message = request.SerializeToString()
        [answer] = wait_all([self.clients[0].start(method, message, seconds=seconds)])
        self._meetings += 1
        return answer

    def rest(self) -> None:
        """Sync mode: let rounds close without this worker until all are at the next meeting."""
        wait_all(
            self.to_all(
                "Shard/Leave",
                shard_pb2.LeaveRequest(
                    worker=self.worker,
                    incarnation=self.incarnation,
                    last=self.sequence,
                    rest=self._meetings + 1,
                ),
            )
        )

    def leave(self) -> None:
        """End this life in order. A server that is gone has ended because everybody had left."""
        calls = self.to_all(
            "Shard/Leave",
            shard_pb2.LeaveRequest(
                worker=self.worker, incarnation=self.incarnation, last=self.sequence
            ),
            outage=self.patience.leave,
        )
        for call in calls:
            with contextlib.suppress(ServerUnavailable):
                wait_all([call])
        if self._left_file:
            Path(self._left_file).touch()

    def header(self, **fields: Any) -> Header:
        """The header of a frame from this worker."""
        return Header(worker=self.worker, incarnation=self.incarnation, **fields)

    def to_all(self, method: str, request: Any, **limits: Any) -> list[Call]:
        """The same call to every server."""
        message = request.SerializeToString()
        return [client.start(method, message, **limits) for client in self.clients]

    def _attach(self, client: Client, generation: int, offer: Offer) -> bool:
        """Offer memory to a server; one that knows nothing of this declines too."""
        request = shard_pb2.AttachRequest(
            worker=self.worker,
            incarnation=self.incarnation,
            generation=generation,
            boot=offer.boot,
            pid=offer.pid,
            descriptor=offer.descriptor,
            bytes=offer.size,
            token=offer.token,
        )
        call = client.start("Shard/Attach", request.SerializeToString())
        try:
            [answer] = wait_all([call])
        except (ProtocolError, LimitExceeded):
            return False
        return bool(shard_pb2.AttachReply.FromString(answer).attached)

    def close(self) -> None:
        """Let go of threads and connections. Safe to call twice."""
        for client in self.clients:
            client.close()
        self.beats.stop()
        self._memories.close()

    def _first(self, method: str, request: Any, clients: Sequence[Client]) -> list[bytes]:
        start = self.patience.start
        message = request.SerializeToString()
        return wait_all(
            [client.start(method, message, seconds=start, outage=start) for client in clients]
        )


def _mode_of(joined: Any) -> tuple[int, int, int]:
    return joined.mode, joined.staleness, joined.switches


def reduced(answer: bytes, value: NDArray[Any]) -> NDArray[Any]:
    """What a reduction gave, in the dtype and shape of what was brought to it."""
    combined = coordinator_pb2.AllReduceReply.FromString(answer).value
    return np.frombuffer(combined, value.dtype).reshape(value.shape).copy()

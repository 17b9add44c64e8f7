"""Connects a worker to all servers of its fleet: runs its state machines, sends heartbeats, makes calls.

`FleetConnection` owns one `ServerClient` per server, the shared memory and the heartbeats. `run` executes a
program of the state machines (`psfleet_worker.session`): it takes one step under a lock, carries out the
instruction, and sends the result back. Several threads may run programs at the same time, for example the
training thread and a thread that marks a snapshot.

Replies to registrations and collectives contain the servers' endpoints. If the number of servers has changed,
the worker connects to the new ones at this point, because no push or pull is under way.
"""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from psfleet.core.base.crash_points import Send
from psfleet.core.base.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    LimitExceeded,
    NotReady,
    ProtocolError,
    PsfleetError,
    ServerUnavailable,
)
from psfleet.core.base.logs import log_of
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.consistency import NO_MODE, ConsistencyMode
from psfleet.core.engine.shard.events import Join, Leave
from psfleet.core.net.connections.access import Access
from psfleet.core.net.membership_messages import read_mode_fields
from psfleet.core.net.shared_memory import MemoryHandle
from psfleet.core.net.v1 import coordinator_pb2, shard_pb2
from psfleet.core.net.v1.frame_pb2 import Header
from psfleet.core.net.v1.membership_pb2 import HeartbeatReply, HeartbeatRequest
from psfleet.core.net.worker_requests import write_join, write_leave
from psfleet_worker.connection.call import Call, wait_all
from psfleet_worker.connection.server_client import ServerClient
from psfleet_worker.connection.tensor_memory import Lane, WorkerMemory
from psfleet_worker.session.instructions import (
    CollectiveResult,
    Instruction,
    JoinCollective,
    Pause,
    Program,
    RegisterWorker,
    SeatGranted,
    ServerJoined,
)
from psfleet_worker.session.retry_policy import Patience
from psfleet_worker.session.worker_session import Session, Stream
from psfleet_worker.worker_metrics import StepTimes, WorkerMetrics

Listener = Callable[[HeartbeatReply], None]
"""Handles the coordinator's reply to a heartbeat. Called in the heartbeat thread, so it must not block."""


_log = log_of(__name__)
T = TypeVar("T")
Perform = Callable[[Instruction, float | None], Any]
"""Carries out an instruction and returns its result. The second argument limits waits for other workers."""


class WorkerHeartbeat:
    """Reports to the coordinator at intervals that this worker is alive.

    A failed heartbeat is not repeated and raises no error. The calls of the training find out whether the
    fleet is still reachable.

    Args:
        send: Makes one attempt, from the bytes of the request and the seconds that it may take.
        request: Returns the present heartbeat message.
        every: Seconds between two heartbeats.

    Attributes:
        listeners: Functions that are called with each reply.
        fenced: The coordinator's error if it has ended this worker's membership, or None. Heartbeats then
            stop.
    """

    def __init__(
        self,
        send: Callable[[bytes, float], bytes],
        request: Callable[[], HeartbeatRequest],
        every: float,
    ) -> None:
        self.listeners: list[Listener] = []
        self.fenced: Fenced | None = None
        self._send = send
        self._request = request
        self._every = every
        self._over = threading.Event()
        self._lock = threading.Lock()  # heartbeats reach the coordinator in order
        self._thread = ServiceThread(self._run, "heartbeats")

    def start(self) -> None:
        """Start the thread that sends heartbeats."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Close the connection before, or this waits for a running heartbeat."""
        self._over.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while self.fenced is None and not self._over.wait(self._every):
            self.send_now()

    def send_now(self) -> None:
        """Send a heartbeat and pass its reply to the listeners. Errors are ignored."""
        with self._lock, contextlib.suppress(PsfleetError):
            self._heartbeat()

    def _heartbeat(self) -> None:
        try:
            response = self._send(self._request().SerializeToString(), self._every)
        except Fenced as error:
            self.fenced = error
            return
        reply = HeartbeatReply.FromString(response)
        for listener in self.listeners:
            listener(reply)


class FleetConnection:
    """Connection of one worker to the servers of its fleet.

    Args:
        environment: Index of the worker, and endpoints of the servers.
        mode: Consistency mode in which the script begins.
        patience: Time limits of calls.
        inject_faults: Wraps the function that sends the calls to one server, for tests.

    Attributes:
        session: State machine of the worker's membership.
        stream: State machine of its pushes and pulls.
        heartbeats: Heartbeats to server 0, from `start` to `close`.
        lane_memory: Maximum number of bytes of unacknowledged pushes. A single push may have more.
        lock: Held while a state machine takes a step.
        metrics: Metrics of this worker. Heartbeats carry them to server 0 on request.
        clients: Client of each server. The list object stays the same when the number of servers changes.
        lanes: Shared memory with each server. The list object stays the same too.
        on_move: Functions to call after the number of servers has changed, with no call under way.
    """

    def __init__(
        self,
        environment: Environment,
        mode: ConsistencyMode,
        patience: Patience,
        inject_faults: Callable[[int, Send], Send] | None = None,
    ) -> None:
        self.worker = environment.rank
        self._joined_file = environment.joined_file
        self._left_file = environment.left_file
        self.workers = environment.workers
        self.session = Session(self.worker, mode, patience.start)
        self.stream = Stream(self.session)
        self.patience = patience
        condition = threading.Condition()
        self.access = Access.of(environment)
        self._client_at = functools.partial(
            ServerClient,
            patience=patience,
            changed=condition,
            inject_faults=inject_faults,
            access=self.access,
        )
        self.clients: list[ServerClient] = []
        self.lanes: list[Lane] = []
        self.lane_memory = environment.lane_memory
        self._memories = WorkerMemory(environment.lane_memory)
        self._shared = self._memories if environment.lane == "auto" else None
        self.on_move: list[Callable[[], None]] = []
        self._reach(environment.servers)
        self.heartbeats = WorkerHeartbeat(
            # The client of the moment: that of server 0 is replaced if the server has moved.
            lambda request, seconds: self.clients[0].attempt(
                "Coordinator/Heartbeat", request, seconds
            ),
            self._heartbeat,
            environment.heartbeat_seconds,
        )
        self.times = StepTimes()
        self.metrics = WorkerMetrics(self.times, lambda: sum(c.retries for c in self.clients))
        self.heartbeats.listeners.append(self._listen)
        self._boot = 0
        self.lock = threading.Lock()
        self.process = os.getpid()

    def start(self) -> None:
        """Register this process as the worker, join every server, and start heartbeats.

        Waits up to `Patience.start` seconds for servers that are still starting.
        """
        if self._left_file:
            Path(self._left_file).unlink(missing_ok=True)
        self._boot = int.from_bytes(os.urandom(8), "little")
        self.run(self.session.start())
        _log.debug(f"worker {self.worker} has joined as incarnation {self.session.incarnation}")
        if self._joined_file:
            Path(self._joined_file).touch()
        self.heartbeats.start()
        self.stream.begin()

    def _reach(self, endpoints: Sequence[str]) -> None:
        """Connect to the servers at these endpoints, and close the connections to any other servers.

        Connections to the first servers stay as long as their endpoints are the same.
        """
        count = 0
        for client, endpoint in zip(self.clients, endpoints, strict=False):
            if client.endpoint != endpoint:
                break
            count += 1
        former, lanes = self.clients[count:], self.lanes[count:]
        clients = [self._client_at(i, endpoints[i]) for i in range(count, len(endpoints))]
        self._memories.servers = len(endpoints)
        self.lanes[count:] = [
            Lane(self._shared, functools.partial(self._attach, client), client)
            for client in clients
        ]
        self.clients[count:] = clients
        # Last, so that no other thread, such as that of the heartbeats, finds a closed one in the lists.
        for lane in lanes:
            lane.close()
        for client in former:
            client.close()

    def _move_to(self, endpoints: Sequence[str]) -> None:
        """Continue with the servers at these endpoints. No call may be under way.

        Args:
            endpoints: Endpoints of all servers, or empty if their number has not changed.
        """
        if not endpoints or [client.endpoint for client in self.clients] == [*endpoints]:
            return
        with self.lock:
            self._reach(endpoints)
            self.stream.reroute()
        _log.info(f"worker {self.worker} goes on with {len(endpoints)} servers")
        for listener in self.on_move:
            listener()

    def _heartbeat(self) -> HeartbeatRequest:
        # A push that its caller has sent is not repeated while no thread waits for it. From the next
        # heartbeat on, the client's thread takes care of it.
        for client in [*self.clients]:
            client.take_unread()
        session, watch = self.session, self.metrics.watch
        nonfinite, at = (None if watch is None else watch.first) or ("", 0.0)
        return HeartbeatRequest(
            index=self.worker,
            incarnation=session.incarnation,
            boot=self._boot,
            step=session.sequence,
            metrics=self.metrics.text(),
            nonfinite=nonfinite,
            nonfinite_at=at,
            snapshot=self.stream.last_snapshot,
        )

    def _listen(self, reply: HeartbeatReply) -> None:
        self.metrics.wanted = reply.wants_metrics

    def send_last_figures(self) -> None:
        """Send the worker's last metrics to server 0, if the job is being watched.

        The first heartbeat asks whether metrics are wanted, and the second one carries them.
        """
        if not self.metrics.wanted:
            self.heartbeats.send_now()
        if self.metrics.wanted:
            self.heartbeats.send_now()

    def run(
        self, program: Program[T], perform: Perform | None = None, timeout: float | None = None
    ) -> T:
        """Run a program to its end, and return its result.

        A program is a generator of the worker's state machine (`WorkerSession`). It does no I/O itself, but
        yields an instruction such as Join; it gets the result, and yields the next one.

        Args:
            program: The program. Other threads may run other programs at the same time.
            perform: Function that carries out an instruction. None means `self.perform`, which can carry out
                all instructions that send and receive no arrays.
            timeout: Seconds that an instruction may wait for other workers. None means `Patience.wait`.
        """
        perform = perform or self.perform
        outcome: Any = None
        while True:
            try:
                with self.lock:
                    instruction = program.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = perform(instruction, timeout)

    def perform(self, instruction: Instruction, timeout: float | None = None) -> Any:
        """Carry out an instruction that needs no arrays, and return its result."""
        match instruction:
            case RegisterWorker():
                return self._register()
            case Join():
                return self._join(instruction)
            case Leave(rest=0):
                return self._leave(instruction)
            case Leave():
                return wait_all(self.to_all("Shard/Leave", write_leave(instruction)))
            case JoinCollective():
                return self._arrive(instruction, timeout)
            case Pause(seconds):
                return time.sleep(seconds)
            case _:
                raise AssertionError(f"nobody makes {instruction}")

    def _register(self) -> SeatGranted:
        request = coordinator_pb2.RegisterRequest(
            worker=self.worker,
            boot=self._boot,
            workers=self.workers,
            servers=[client.endpoint for client in self.clients],
        )
        try:
            response = self._first("Coordinator/Register", request, [self.clients[0]])[0]
        except ServerUnavailable as error:
            raise ServerUnavailable(
                f"{error}; start the servers first, or correct PSFLEET_SERVERS"
            ) from None
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"worker {self.worker} has asked for its seat: {error}; look at the log of server 0"
            ) from None
        reply = coordinator_pb2.RegisterReply.FromString(response)
        self._move_to(reply.servers)
        return SeatGranted(
            reply.incarnation,
            reply.first,
            reply.view,
            reply.completed,
            reply.switches,
            read_mode_fields(reply) if reply.switches else NO_MODE,
            reply.last,
            reply.progress,
        )

    def _join(self, join: Join) -> list[ServerJoined]:
        replies = [
            shard_pb2.JoinReply.FromString(response)
            for response in self._first("Shard/Join", write_join(join), self.clients)
        ]
        for index, reply in enumerate(replies):
            if (reply.server, reply.servers) != (index, len(self.clients)):
                raise ConfigError(
                    f"{self.clients[index].name} is server {reply.server} of "
                    f"{reply.servers}; start it as {index} of {len(self.clients)}"
                )
        return [
            ServerJoined(reply.sequence, reply.clock, read_mode_fields(reply), reply.switches)
            for reply in replies
        ]

    def _arrive(self, arrive: JoinCollective, timeout: float | None) -> CollectiveResult:
        identity = {
            "worker": self.worker,
            "incarnation": self.session.incarnation,
            "number": arrive.number,
        }
        value = arrive.value
        if value is None:
            request: Any = coordinator_pb2.BarrierRequest(**identity)
            response = self._meet("Coordinator/Barrier", request, timeout)
            reply = coordinator_pb2.BarrierReply.FromString(response)
            self._move_to(reply.servers)
            mode_request = reply.mode_request
            return CollectiveResult(
                None,
                (mode_request.mode, dict(mode_request.settings)) if mode_request.mode else None,
            )
        request = coordinator_pb2.AllReduceRequest(
            **identity,
            mode=arrive.mode,
            dtype=value.dtype.name,
            shape=value.shape,
            value=value.tobytes(),
            change=arrive.change,
            round=self.session.sequence,
            leases=arrive.reached[0],
            samples=arrive.reached[1],
        )
        response = self._meet("Coordinator/AllReduce", request, timeout)
        reduction = coordinator_pb2.AllReduceReply.FromString(response)
        self._move_to(reduction.servers)
        result = np.frombuffer(reduction.value, value.dtype).copy()
        # Workers may request modes with different numbers of settings. The result is then longer.
        return CollectiveResult(
            result if result.size != value.size else result.reshape(value.shape)
        )

    def _meet(self, method: str, request: Any, timeout: float | None) -> bytes:
        seconds = self.patience.wait if timeout is None else timeout
        message = request.SerializeToString()
        [response] = wait_all([self.clients[0].start(method, message, seconds=seconds)])
        return response

    def _leave(self, leave: Leave) -> None:
        """Report to every server that this worker has finished. An unreachable server has already ended."""
        message = write_leave(leave).SerializeToString()
        say = functools.partial(
            ServerClient.start, method="Shard/Leave", message=message, outage=self.patience.leave
        )
        for call in [say(client) for client in self.clients[1:]]:
            with contextlib.suppress(ServerUnavailable):
                wait_all([call])
        # Server 0 last: once it knows, it may install a view without this worker on all servers, or end the
        # fleet. Both must come after this worker's own message to the other servers. If server 0 refuses the
        # message, it has received an earlier attempt.
        with contextlib.suppress(ServerUnavailable, Fenced, NotReady):
            wait_all([say(self.clients[0])])
        if self._left_file:
            Path(self._left_file).touch()

    def header(self, **fields: Any) -> Header:
        """Return the header of a frame (a message on the wire) from this worker."""
        return Header(worker=self.worker, incarnation=self.session.incarnation, **fields)

    def to_all(self, method: str, request: Any, **limits: Any) -> list[Call]:
        """Start the same call on every server, and return the calls."""
        message = request.SerializeToString()
        return [client.start(method, message, **limits) for client in self.clients]

    def _attach(self, client: ServerClient, generation: int, offer: MemoryHandle) -> bool:
        """Offer shared memory to a server. Returns False if the server declines or does not know the call."""
        request = shard_pb2.AttachRequest(
            worker=self.worker,
            incarnation=self.session.incarnation,
            generation=generation,
            boot=offer.boot,
            pid=offer.pid,
            descriptor=offer.descriptor,
            bytes=offer.size,
            token=offer.token,
        )
        call = client.start("Shard/Attach", request.SerializeToString())
        try:
            [response] = wait_all([call])
        except (ProtocolError, LimitExceeded):
            return False
        return bool(shard_pb2.AttachReply.FromString(response).attached)

    def close(self) -> None:
        """Stop all threads and close all connections. Safe to call twice."""
        for client in self.clients:
            client.close()
        self.heartbeats.stop()
        self._memories.close()
        for lane in self.lanes:
            lane.close()

    def _first(self, method: str, request: Any, clients: Sequence[ServerClient]) -> list[bytes]:
        start = self.patience.start
        message = request.SerializeToString()
        return wait_all(
            [client.start(method, message, seconds=start, outage=start) for client in clients]
        )

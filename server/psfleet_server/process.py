"""One server process from start to end: bind, warm up, say ready, serve, stop."""

import faulthandler
import functools
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from psfleet.chaos.injection import say_what_is_held
from psfleet.checkpoint import load_shard
from psfleet.errors import ConfigError
from psfleet.faults.crash_points import CrashFaults
from psfleet.formats.ready_file import write_ready
from psfleet.kernels.dedup import merge_pushes
from psfleet.observability.tracing import open_tracing
from psfleet.rules import import_rules
from psfleet.settings.durations import SnapshotInterval
from psfleet.settings.environment import Environment
from psfleet.shard.shard import Shard
from psfleet.tables.memory_choice import MemoryChoice
from psfleet.wire.access import Access, is_tcp
from psfleet.wire.channel import server_options
from psfleet.wire.v1.membership_pb2 import BeatRequest
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.mode_requests import ModeRequestFile
from psfleet_server.durability.journal import Journal, open_log
from psfleet_server.durability.log import ServerLog
from psfleet_server.durability.recovery import go_on_from
from psfleet_server.engine.memory_budget import table_limit
from psfleet_server.engine.server_heartbeat import ServerHeartbeat
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.engine.ticker import Ticker
from psfleet_server.engine.view_changes import ViewInstaller
from psfleet_server.liveness import LivenessPipe
from psfleet_server.observability.server_metrics import ServerMetrics
from psfleet_server.observability.standby_metrics import standby_metrics
from psfleet_server.replication.standby import Standby
from psfleet_server.replication.takeover_commands import TakeoverCommands
from psfleet_server.rpc import endpoint
from psfleet_server.rpc.connection_limit import ConnectionLimit
from psfleet_server.rpc.deferred_reply import Deadlines
from psfleet_server.rpc.http2_listener import Http2Listener
from psfleet_server.rpc.inbound_limit import InboundLimit
from psfleet_server.rpc.token_check import gates
from psfleet_server.services.method_handlers import handlers, tensor_methods
from psfleet_server.services.metrics_service import metrics_handler
from psfleet_server.services.replica_service import feeds_standby, replica_handler
from psfleet_server.services.snapshot_services import snapshot_handlers
from psfleet_server.signals import stops_on_signals
from psfleet_server.snapshots.restored_states import RestoredStates
from psfleet_server.snapshots.snapshot_folder import SnapshotFolder
from psfleet_server.snapshots.snapshot_runner import SnapshotRunner
from psfleet_server.snapshots.snapshot_schedule import SnapshotSchedule

if TYPE_CHECKING:
    from psfleet.observability.spans import Tracing

__all__ = ["Server", "serve"]

_INCOMING = 256  # messages that may be on their way at once
_LINGER = 3.0  # seconds for workers that have left, and servers, to hear that all have left
_GRACE = 2.0  # seconds that calls in flight get to end


class Server:
    """A shard that listens. `with Server(environment) as server: server.wait()`.

    Attributes:
        endpoint: Where it listens, once entered.
        recovered: Records of the log that it took when it was entered.
        term: With which it has taken over from another process; 0: it has not.
    """

    def __init__(
        self,
        environment: Environment,
        load_path: str | None = None,
        pulse: LivenessPipe | None = None,
    ) -> None:
        if environment.role != "server":
            raise ConfigError(
                f"the role is {environment.role!r}; a server process needs the role "
                "server (PSFLEET_ROLE)"
            )
        self.environment = environment
        self.endpoint = environment.listen or environment.servers[environment.rank]
        self.recovered = 0
        self.term = 0
        self._access = Access.of(environment)
        self._load_path = load_path
        self._tell = (pulse or LivenessPipe()).tell
        self._log: ServerLog | None = None
        self._lingers = self._stopped = False
        self._shard = Shard(environment.rank, len(environment.servers), environment.workers)
        self._deadlines = Deadlines()
        coordinator = _coordinator_of(environment)
        self.host = ShardHost(self._shard, coordinator, self._deadlines, environment.limits)
        self.host.parts.tell = self._tell
        self._make_log: Callable[..., ServerLog] = ServerLog
        self._trace(open_tracing(environment))
        if environment.snapshot_folder:
            self.host.wishes = ModeRequestFile(Path(environment.snapshot_folder).parent)
        self._snapshots = None if coordinator is None else self._make_runner()
        self._schedule = self._make_schedule()
        self._ticker = Ticker(self.host)
        self.beats = ServerHeartbeat(self._beat, environment.beat, self._access)
        self.views = ViewInstaller(self.host, self._access, environment.beat)
        self._door = ConnectionLimit(environment.limits) if is_tcp(self.endpoint) else None
        self._pool = self._make_pool()
        self.standby: Standby | None = None
        self._tensors: Http2Listener | None = None
        self._server: grpc.Server | None = None

    def _trace(self, tracing: "Tracing | None") -> None:
        self.host.tracing = tracing
        if tracing is None:
            return
        from psfleet_server.durability.durability_spans import TracedLog, TracedShipping

        self._make_log = functools.partial(TracedLog, tracing.tracer)
        self.host.feed = TracedShipping(tracing.tracer, CrashFaults.wanted())

    def follow(self) -> bool:
        """Be the standby of the server that now has this place; whether it is to take that place.

        Raises:
            ServerUnavailable: The primary is gone, and there was no order to take over.
        """
        self._prepare()
        self.standby = Standby(self.host, self.environment, self._access)
        self.standby.metrics = functools.partial(standby_metrics, self.host, self.standby)
        self.standby.start()
        while (news := self.standby.wait()) == "required":
            _announce(self, f"standby {self.environment.standby} of server {self._shard.index}")
        if news != "promoted":
            self.standby.close()
            return False
        if self.host.keeper is not None:
            self.host.keeper.lead()
        if self.endpoint.startswith("unix:"):  # of the process that had this place
            endpoint.release(self.endpoint)
        return True

    def __enter__(self) -> "Server":
        if self.environment.ready_file:  # an earlier process of this place may have left it
            Path(self.environment.ready_file).unlink(missing_ok=True)
        server = grpc.server(
            self._pool,
            options=server_options(self.environment.limits),
            interceptors=self._interceptors(),
        )
        if self._is_awaited():
            # gRPC loses 20 seconds with a connection that is made after `bind` and before `start`, so
            # little comes between them.
            self._begin()
        self.endpoint = endpoint.bind(server, self.endpoint, self._access)
        try:
            self._add_services(server)
            if not self._is_awaited():
                self._begin()
            if self.environment.transport == "http2":
                self._tensors = Http2Listener(self.endpoint, self._access, self.environment.limits)
                self.host.tensor_endpoint = self._tensors.start(tensor_methods(self.host))
        except BaseException:
            endpoint.release(self.endpoint)
            raise
        if self._log is not None:
            self._log.waits = False
        self._start_threads()
        server.start()
        self._server = server
        self._join_fleet()  # not before: see above
        return self

    def _is_awaited(self) -> bool:
        """Whether workers may be waiting for this server to come back."""
        return self.environment.keeps_log or self.standby is not None

    def _add_services(self, server: grpc.Server) -> None:
        """What it answers, now that it knows its endpoint."""
        server.add_generic_rpc_handlers(handlers(self.host))
        server.add_generic_rpc_handlers(snapshot_handlers(self.host, self._snapshots))
        metrics = ServerMetrics(self.host, self._snapshots, self._schedule, self._door)
        server.add_generic_rpc_handlers([metrics_handler(self.host, metrics)])
        if self.environment.replicas:
            server.add_generic_rpc_handlers([replica_handler(self.host)])
        if self._snapshots is not None:
            self._snapshots.learn((self.endpoint, *self.environment.servers[1:]))

    def _start_threads(self) -> None:
        """All that works beside the calls."""
        if self._door is not None:
            self._door.start(self.endpoint)
        self._deadlines.start()
        self._ticker.start()
        self.host.lanes.start()
        if self._snapshots is not None:
            self._snapshots.start()
        if self._schedule is not None:
            self._schedule.start()

    def _interceptors(self) -> "list[grpc.ServerInterceptor[Any, Any]]":
        """What stands before the handlers: over TCP whoever has no token is sent away first."""
        found = gates(self._access, self.endpoint)
        if self._door is not None:
            incoming = self.environment.limits.incoming
            found.append(InboundLimit(incoming, _INCOMING, self._door.proved))
        return found

    def _begin(self) -> None:
        """Become ready: from what the standby has, from the log, from a checkpoint or empty."""
        if self.standby is not None:
            if self._log is not None:
                self._log.waits = True
            self.term = self.standby.term
            self._lingers = self._shard.rounds.is_over()
        else:
            self._recover()
        self._shard.workers.frozen = True  # until it hears who is in the fleet
        if self.environment.replicas:
            feeds_standby(self.host)
        if self.host.coordinator is not None:
            with self.host.changing():
                self.host.coordinator.rebooted(0, self.host.boot)
                self.host.coordinator.start()
        if self._snapshots is not None and self.environment.resume:
            self._snapshots.restored = RestoredStates.read(
                self.environment.resume, self.environment.workers
            )

    def _prepare(self) -> None:
        warm_up()
        self._shard.tables.choice = MemoryChoice.of_settings(self.environment)
        self._shard.tables.budget.limit = table_limit(self.environment.memory)
        self._log = open_log(self.environment, self._tell, self._make_log)
        if self._log is not None:
            folder = Path(self.environment.snapshot_folder)
            self.host.keeper = Journal(self._log, self._shard, self.host.coordinator, folder)

    def _recover(self) -> None:
        self._prepare()
        if self.host.keeper is not None:
            self.recovered = self.host.keeper.start(self._load_path, self.environment.resume)
            # It may have died before the last worker heard that it may go.
            self._lingers = self._shard.rounds.is_over()
        elif self.environment.resume:
            go_on_from(self.environment.resume, self._shard, self.host.coordinator)
        elif self._load_path is not None:
            load_shard(self._load_path, self._shard)

    def _make_pool(self) -> ThreadPoolExecutor:
        """The threads of calls. Calls that wait hold none, so a few are enough for any number of workers."""
        environment = self.environment
        threads = environment.workers + 2 + environment.replicas  # a standby that follows holds one
        if self._door is not None:
            threads += _INCOMING  # which calls hold whose message is on its way
        return ThreadPoolExecutor(threads, thread_name_prefix="rpc")

    def _make_schedule(self) -> SnapshotSchedule | None:
        if self._snapshots is None or not self.environment.snapshot_every:
            return None
        shard = self._shard
        return SnapshotSchedule(
            self._snapshots,
            SnapshotInterval.parse(self.environment.snapshot_every, "PSFLEET_SNAPSHOT_EVERY"),
            shard.progress,
            lambda: shard.consistency.declared.has_rounds,
            tell=self._tell,
        )

    def _make_runner(self) -> SnapshotRunner:
        path = self.environment.snapshot_folder
        folder = SnapshotFolder(Path(path)) if path else None
        return SnapshotRunner(self.host, self._access, folder, crashes=CrashFaults.wanted())

    def wait(self) -> None:
        """Return when every worker has left, or `stop` is called."""
        self.host.ended.wait(_LINGER if self._lingers else None)
        if self.host.coordinator is not None and not self._stopped:
            self.views.finish(_LINGER)

    def _join_fleet(self) -> None:
        """Tell the coordinator of this process, or be the coordinator."""
        if self.host.coordinator is None:
            self.host.aim = self.beats.aim
            if not self.environment.servers[0].endswith(":0"):
                self.beats.aim(self.environment.servers[0])
            self.beats.start()
            return
        self.host.poke, self.host.find = self.views.poke, self.views.aim
        self.views.aim(self.environment.servers)
        self.views.start()

    def _beat(self) -> BeatRequest:
        return BeatRequest(
            index=self._shard.index,
            server=True,
            boot=self.host.boot,
            step=self._shard.rounds.closed,
        )

    def stop(self) -> None:
        """Let `wait` return."""
        self._stopped = True
        self.host.ended.set()
        if self.standby is not None:
            self.standby.stop()

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self.beats.stop()
        self.host.parts.end()  # server 0 may be waiting for a cut, its own too
        if self._snapshots is not None:
            self._snapshots.stop()
        if self._schedule is not None:
            self._schedule.stop()
        self._ticker.stop()
        self.views.stop()
        self.host.feed.close()
        if self.standby is not None:
            self.standby.close()
        ended = self._server.stop(_GRACE)
        if self._tensors is not None:
            self._tensors.stop(_GRACE)
        ended.wait()
        if self._snapshots is not None:
            self._snapshots.close()
        if self._door is not None:
            self._door.stop()
        self._deadlines.stop()
        self.host.lanes.stop()
        self.host.parts.stop()
        self._pool.shutdown()
        say_what_is_held(self._shard)
        if self._log is not None:
            self._log.close()
        if self.host.tracing is not None:
            self.host.tracing.close()
        endpoint.release(self.endpoint)


def _coordinator_of(environment: Environment) -> Coordinator | None:
    """That of the fleet, on server 0."""
    if environment.rank:
        return None
    return Coordinator(environment.workers, len(environment.servers), environment.dead_after)


def serve(environment: Environment, load_path: str | None = None) -> None:
    """Run a server until every worker has left or the process is asked to end.

    Raises:
        ConfigError: The environment is not a server's, its endpoint cannot be had, or a module of rules
            cannot be imported.
        CheckpointError: `load_path` is not a checkpoint.
    """
    faulthandler.enable(2)  # a crash of machine code leaves the stack of every thread in the log
    import_rules(environment.rules, environment.rules_folder)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection takes a descriptor
    with LivenessPipe(environment.pulse) as pulse:
        _serve(Server(environment, load_path, pulse))


def _serve(server: Server) -> None:
    environment = server.environment
    if environment.replicas:
        TakeoverCommands(server.host.feed, lambda: server.standby).start()
    if environment.standby:
        with stops_on_signals(server.stop):
            if not server.follow():
                return
    with server, stops_on_signals(server.stop):
        _announce(server, f"server {environment.rank} of {len(environment.servers)}")
        server.wait()


def warm_up() -> None:
    """Load the compiled kernels that every server uses, so that the first step does not wait."""
    ids = np.zeros(2, np.int64)
    merge_pushes([(ids, np.zeros((2, 1), np.float32))], 0.5)


def _announce(server: Server, who: str) -> None:
    """Say that the server is ready: the ready file, which appears whole, and then one line.

    Who has read the line may rely on what the launcher does for a server that is ready.
    """
    environment = server.environment
    if environment.ready_file:
        write_ready(Path(environment.ready_file), environment.rank, server.endpoint, os.getpid())
    print(
        f"{who} ready at {server.endpoint} (process {os.getpid()})"
        + (f", back after {server.recovered} records of its log" if server.recovered else "")
        + (f", took over with term {server.term}" if server.term else ""),
        flush=True,
    )

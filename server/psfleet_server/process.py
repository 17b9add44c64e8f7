"""Runs one server process from start to end: recover, bind, announce that it is ready, serve, stop.

`Server` assembles all parts of a server. The order in which they start matters:

    run: [follow the primary, if this is a standby]   until the launcher promotes it
    __enter__: state from standby, log, checkpoint or nothing -> bind -> add services -> start threads
    __exit__: end the threads that make calls -> stop the RPC servers -> close the log

If workers may be waiting for the server to come back, its state is restored before it binds its addresses,
otherwise after. The main thread only waits in `wait`; `stop`, which signal handlers call, makes `wait`
return.
"""

import faulthandler
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from psfleet.checkpoint import load_shard
from psfleet.core.base import crash_points
from psfleet.core.base.errors import ConfigError
from psfleet.core.base.job_files import write_ready
from psfleet.core.base.logs import log_of, set_up_logs
from psfleet.core.base.observability.trace_setup import open_tracing
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import SnapshotInterval
from psfleet.core.base.threads import stops_on_signals
from psfleet.core.engine.kernels.dedup import merge_pushes
from psfleet.core.engine.rules import import_rules
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.memory_choice import MemoryChoice
from psfleet.core.net.connections.access import Access, is_tcp
from psfleet.core.net.connections.channel import server_options
from psfleet.core.net.connections.connection_limits import raise_descriptor_limit
from psfleet.core.net.http2.calls import InboundMessages
from psfleet.core.net.http2.http2_server import Http2Server
from psfleet.core.net.v1.membership_pb2 import HeartbeatRequest
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.request_files import ModeRequestFile, ScaleRequestFile
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log import ServerLog
from psfleet_server.durability.log_place import decided, job_folder, remove_earlier
from psfleet_server.durability.recovery import go_on_from, open_log
from psfleet_server.engine.memory_limit import spare, table_limit
from psfleet_server.engine.periodic_threads import LivenessPipe, ServerHeartbeat, Ticker
from psfleet_server.engine.row_moves import RowMoves
from psfleet_server.engine.server_scaling import ServerScaling
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.engine.view_changes import ViewInstaller
from psfleet_server.rpc import endpoints
from psfleet_server.rpc.call_admission import InboundLimit, gates
from psfleet_server.rpc.replies import Deadlines
from psfleet_server.server_metrics import MetricsService, ServerMetrics, standby_metrics
from psfleet_server.services.method_handlers import handlers, tensor_methods
from psfleet_server.services.scaling_service import scaling_handler
from psfleet_server.services.snapshot_services import snapshot_handlers
from psfleet_server.services.standby_service import feeds_standby, replica_handler
from psfleet_server.snapshots.job_snapshots import RestoredStates, SnapshotFolder
from psfleet_server.snapshots.snapshot_runner import SnapshotRunner
from psfleet_server.snapshots.snapshot_schedule import SnapshotSchedule
from psfleet_server.standby import Standby, TakeoverCommands

_log = log_of(__name__)

_INCOMING = 256  # messages that may be received at the same time
_LINGER = 3.0  # seconds for workers and servers to learn that all workers have left
_GRACE = 2.0  # seconds for calls under way to end when the server stops


class Server:
    """A server process: `with Server(environment) as server: server.wait()`.

    Attributes:
        environment: Environment of the process.
        endpoint: Endpoint of the server. Ports are known only inside the `with` block.
        recovered: Number of log records that were replayed at the start.
        term: Number that the launcher gave to the takeover in which this process replaced its primary, or 0
            if this process has not taken over.
        announce: Called with a line when the server is ready, after its ready file was written.
    """

    def __init__(
        self,
        environment: Environment,
        load_path: str | None = None,
        liveness: LivenessPipe | None = None,
    ) -> None:
        if environment.role != "server":
            raise ConfigError(
                f"the role is {environment.role!r}; a server process needs the role "
                "server (PSFLEET_ROLE)"
            )
        self._generation = 0
        # Replace the servers of the environment by the servers of the last committed move. Not for a standby:
        # it may belong to a number of servers that is not committed yet.
        if environment.keeps_log or (environment.replicas and not environment.standby):
            environment, self._generation = decided(environment)
        self.environment = environment
        self.endpoint = environment.listen or environment.servers[environment.rank]
        self.recovered = 0
        self.term = 0
        self.announce: Callable[[str], object] = _log.info
        self._access = Access.of(environment)
        self._load_path = load_path
        pipe = liveness or LivenessPipe()
        self._tell, self._wake_launcher = pipe.tell, pipe.signal
        self._lingers = self._stopped = False
        self._shard = Shard(environment.rank, len(environment.servers), environment.workers)
        self._deadlines = Deadlines()
        coordinator = _coordinator_of(environment)
        self.host = ShardHost(self._shard, coordinator, self._deadlines, environment.limits)
        self.host.parts.tell = self.host.worker_reports.tell = self._tell
        self.host.tracing = self.host.feed.tracing = open_tracing(environment)
        if environment.snapshot_folder:
            folder = job_folder(environment)
            self.host.mode_requests = ModeRequestFile(folder)
            self.host.scale_file = ScaleRequestFile(folder)
        self._snapshots = None if coordinator is None else self._make_runner()
        self._schedule = self._make_schedule()
        self._ticker = Ticker(self.host)
        self.heartbeats = ServerHeartbeat(
            self._heartbeat, environment.heartbeat_seconds, self._access
        )
        self.views = ViewInstaller(self.host, self._access, environment.heartbeat_seconds)
        self._scaling = self._make_scaling()
        self._moves = RowMoves(self.host, self._access, self._open_log, self._generation)
        self._messages = InboundMessages(environment.limits.incoming, _INCOMING)
        self._pool = self._make_pool()
        self.standby: Standby | None = None
        self._tensors: Http2Server | None = None
        self._server: grpc.Server | None = None

    def run(self, commands: int = 0) -> None:
        """Serve until every worker has left or `stop` is called.

        A standby (a process that keeps a copy of another server's state) first follows that server, its
        primary. It serves only after the launcher has promoted it.

        Args:
            commands: File descriptor from which the launcher's takeover commands are read.
        """
        if self.environment.replicas:
            TakeoverCommands(self._moves.release, lambda: self.standby, commands).start()
        if self.environment.standby:
            with stops_on_signals(self.stop):
                if not self.follow():
                    return
        with self, stops_on_signals(self.stop):
            self._say_ready(f"server {self.environment.rank} of {len(self.environment.servers)}")
            self.wait()

    def _say_ready(self, role: str) -> None:
        """Write the ready file, wake the launcher, and announce that the server is ready."""
        environment = self.environment
        if environment.ready_file:
            write_ready(Path(environment.ready_file), environment.rank, self.endpoint, os.getpid())
            self._wake_launcher()  # the launcher then looks for the file
        self.announce(
            f"{role} ready at {self.endpoint} (process {os.getpid()})"
            + (f", back after {self.recovered} records of its log" if self.recovered else "")
            + (f", took over with term {self.term}" if self.term else "")
        )

    def follow(self) -> bool:
        """Follow the primary as its standby, until the launcher promotes this process.

        Returns:
            True if this process takes over, False if it is not needed and ends.

        Raises:
            ServerUnavailable: The primary is gone, and no command to take over has come.
        """
        self._prepare()
        self.standby = Standby(self.host, self.environment, self._access)
        self.standby.metrics = functools.partial(standby_metrics, self.host, self.standby)
        self.standby.start()
        while (news := self.standby.wait()) == "required":
            self._say_ready(f"standby {self.environment.standby} of server {self._shard.index}")
        if news != "promoted":
            self.standby.close()
            return False
        _log.warning(f"takes over from its primary, with term {self.standby.term}")
        _, self._generation = decided(self.environment)
        self._moves.begin(self._generation)
        if self.host.journal is not None:
            self.host.journal.record_changes()
        # Remove the primary's socket file. `bind` would refuse the address if the deposed primary still
        # listened there.
        if self.endpoint.startswith("unix:"):
            endpoints.release(self.endpoint)
        return True

    def __enter__(self) -> "Server":
        if self.environment.ready_file:  # an earlier process of this server may have left it
            Path(self.environment.ready_file).unlink(missing_ok=True)
        server = grpc.server(
            self._pool,
            options=server_options(self.environment.limits),
            interceptors=self._interceptors(),
        )
        if self._is_awaited():
            # If a client connects after `bind` and before `start`, gRPC delays its connection by 20 seconds.
            # So little is done between the two.
            self._begin()
        self.endpoint, listener = endpoints.bind(server, self.endpoint, self._access)
        try:
            self._add_services(server)
            if not self._is_awaited():
                self._begin()
            self._tensors = endpoints.tensor_server(
                listener,
                self.endpoint,
                self._access,
                self.environment.limits,
                self._messages,
                tensor_methods(self.host),
            )
        except BaseException:
            listener.close()
            endpoints.release(self.endpoint)
            raise
        self._tensors.start()
        if self.host.journal is not None:
            self.host.journal.log.waits = False
        self._start_threads()
        server.start()
        self._server = server
        # After `server.start`: from here on other servers connect, and gRPC would delay an earlier connection
        # by 20 seconds (see above).
        self._join_fleet()
        return self

    def _is_awaited(self) -> bool:
        """Return whether workers may be waiting for this server to come back after a failure."""
        return self.environment.keeps_log or self.standby is not None

    def _add_services(self, server: grpc.Server) -> None:
        """Add the services that need this server's endpoint, once the endpoint is known."""
        server.add_generic_rpc_handlers(handlers(self.host))
        server.add_generic_rpc_handlers(snapshot_handlers(self.host, self._snapshots))
        server.add_generic_rpc_handlers([scaling_handler(self.host, self._moves)])
        metrics = ServerMetrics(self.host, self._snapshots, self._schedule)
        self._metrics = MetricsService(self.host, metrics)
        server.add_generic_rpc_handlers([self._metrics.handler])
        if self.environment.replicas:
            server.add_generic_rpc_handlers([replica_handler(self.host, self._moves)])
        if self._snapshots is not None:
            self._snapshots.learn((self.endpoint, *self.environment.servers[1:]))

    def _start_threads(self) -> None:
        """Start the server's own threads, which run beside the calls."""
        self._deadlines.start()
        self._ticker.start()
        self.host.lanes.start()
        if self._snapshots is not None:
            self._snapshots.start()
        if self._schedule is not None:
            self._schedule.start()

    def _interceptors(self) -> "list[grpc.ServerInterceptor[Any, Any]]":
        """Return the interceptors of all calls. Over TCP the first of them refuses calls without a token."""
        interceptors = gates(self._access, self.endpoint)
        if is_tcp(self.endpoint):
            interceptors.append(InboundLimit(self._messages))
        return interceptors

    def _begin(self) -> None:
        """Get the state to serve: from the standby, the log or a checkpoint, or an empty one."""
        if self.standby is not None:
            if self.host.journal is not None:
                self.host.journal.log.waits = True
            self.term = self.standby.term
            self._lingers = self._shard.rounds.is_over()
        else:
            self._recover()
        # Until the coordinator installs a view, this process does not know which workers are in the fleet.
        self._shard.workers.frozen = True
        if self.environment.replicas:
            feeds_standby(self.host)
        if self.host.coordinator is not None:
            with self.host.mutating():
                self._scaling.recover(
                    self.host.coordinator.scaling, self.environment.servers, self._generation
                )
                self.host.coordinator.rebooted(0, self.host.boot)
                self.host.coordinator.start()
        if self._snapshots is not None and self.environment.resume:
            self._snapshots.restored = RestoredStates.read(
                self.environment.resume, self.environment.workers
            )

    def _prepare(self) -> None:
        warm_up()
        self._shard.tables.choice = MemoryChoice.of_settings(self.environment)
        budget, memory = self._shard.tables.budget, self.environment.memory
        budget.limit, budget.spare = table_limit(memory), spare(memory)
        if self.environment.keeps_log:
            remove_earlier(self.environment)
        log = self._open_log(self._generation)
        if log is not None:
            log.tracing = self.host.tracing
            self.host.journal = Journal(
                log,
                self._shard,
                self.host.coordinator,
                self.environment.snapshot_place,
                begins=not self._generation,
            )

    def _open_log(self, generation: int, servers: int = 0) -> ServerLog | None:
        return open_log(self.environment, self._tell, generation, servers)

    def _recover(self) -> None:
        self._prepare()
        if self.host.journal is not None:
            self.recovered = self.host.journal.start(self._load_path, self.environment.resume)
            # The process before may have died before it replied to the last worker's Leave. This process then
            # only sends that reply, and ends soon.
            self._lingers = self._shard.rounds.is_over()
        elif self.environment.resume:
            go_on_from(self.environment.resume, self._shard, self.host.coordinator)
        elif self._load_path is not None:
            load_shard(self._load_path, self._shard)

    def _make_pool(self) -> ThreadPoolExecutor:
        """Make the thread pool for calls.

        Waiting calls hold no thread, so the pool does not limit workers.
        """
        environment = self.environment
        threads = (
            environment.workers + 2 + environment.replicas
        )  # a standby that follows holds a thread
        if is_tcp(self.endpoint):
            threads += (
                _INCOMING  # a call holds a thread while its message is received (`InboundLimit`)
            )
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

    def _make_scaling(self) -> ServerScaling:
        folder = self.environment.snapshot_folder
        return ServerScaling(
            self.host,
            self._access,
            job_folder(self.environment) if folder else None,
            lambda: self.views.endpoints,
            self._moved,
            self._wake_launcher,
        )

    def _moved(self, endpoints: Sequence[str]) -> None:
        self.views.move_to(endpoints)
        if self._snapshots is not None:
            self._snapshots.learn(endpoints)

    def _make_runner(self) -> SnapshotRunner:
        folder_or_url = self.environment.snapshot_place
        folder = SnapshotFolder(folder_or_url) if folder_or_url else None
        return SnapshotRunner(self.host, self._access, folder)

    def wait(self) -> None:
        """Return once every worker has left, or `stop` is called."""
        self.host.ended.wait(_LINGER if self._lingers else None)
        if self.host.coordinator is not None and not self._stopped:
            self.views.finish(_LINGER)

    def _join_fleet(self) -> None:
        """Start heartbeats to the coordinator, or on server 0 the coordinator's threads."""
        if self.host.coordinator is None:
            self.host.aim = self.heartbeats.aim
            if not self.environment.servers[0].endswith(":0"):
                self.heartbeats.aim(self.environment.servers[0])
            self.heartbeats.start()
            return
        self.host.poke, self.host.find = self.views.poke, self.views.aim
        self.views.aim(self.environment.servers)
        self.views.start()
        self.host.scale = self._scaling.poke
        self._scaling.start()

    def _heartbeat(self) -> HeartbeatRequest:
        return HeartbeatRequest(
            index=self._shard.index,
            server=True,
            boot=self.host.boot,
            step=self._shard.rounds.closed,
        )

    def stop(self) -> None:
        """Make `wait` return."""
        self._stopped = True
        self.host.ended.set()
        if self.standby is not None:
            self.standby.stop()

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        assert self._tensors is not None
        self._metrics.end()
        self.heartbeats.stop()
        self.host.parts.end()  # server 0 may be waiting for a cut, its own too
        if self._snapshots is not None:
            self._snapshots.stop()
        if self._schedule is not None:
            self._schedule.stop()
        self._ticker.stop()
        self._scaling.stop()
        self.views.stop()
        self.host.feed.close()
        if self.standby is not None:
            self.standby.close()
        ended = self._server.stop(_GRACE)
        self._tensors.stop(_GRACE)
        ended.wait()
        if self._snapshots is not None:
            self._snapshots.close()
        self._deadlines.stop()
        self.host.lanes.stop()
        self.host.parts.stop()
        self._pool.shutdown()
        if (chaos := crash_points.chaos()) is not None:
            chaos.write_held_tables(self._shard)
        if self.host.journal is not None:
            self.host.journal.log.close()
        if self.host.tracing is not None:
            self.host.tracing.close()
        endpoints.release(self.endpoint)


def _coordinator_of(environment: Environment) -> Coordinator | None:
    if environment.rank:
        return None
    return Coordinator(environment.workers, len(environment.servers), environment.dead_after)


def serve(environment: Environment, load_path: str | None = None) -> None:
    """Run a server until every worker has left or the process is requested to end.

    Args:
        load_path: Checkpoint to start from, or None.

    Raises:
        ConfigError: The environment is not a server's, its endpoint cannot be bound, or a module with
            optimizer rules cannot be imported.
        CheckpointError: `load_path` is not a checkpoint.
    """
    set_up_logs("server", environment.rank)
    faulthandler.enable(2)  # a crash of machine code leaves the stack of every thread in the log
    import_rules(environment.rules, environment.rules_folder)
    raise_descriptor_limit()
    with LivenessPipe(environment.liveness) as liveness:
        server = Server(environment, load_path, liveness)
        if environment.log_format != "json":
            server.announce = functools.partial(print, flush=True)
        server.run()


def warm_up() -> None:
    """Load the compiled kernels that every server uses, so that the first step does not wait."""
    ids = np.zeros(2, np.int64)
    merge_pushes([(ids, np.zeros((2, 1), np.float32))], 0.5)

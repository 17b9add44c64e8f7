"""Methods of the gRPC service Shard: parse and check a request, hand it to the shard, encode the reply.

There are two code paths for pushes and pulls, with the same replies and the same effects:

- `PlainCalls` handles the common calls without making an array or a protobuf object. For every other call
  it returns None and changes nothing.
- `ShardService` handles every call, and all other methods of the service.

The HTTP/2 server tries `PlainCalls` first. docs/decisions/0033-plain-calls.md explains why there are two
paths and which calls are plain: no log, no standby, no waiting, a known layout. Look there first if a fast
job has become slow. All methods may run in any thread.
"""

import time
from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint import Snapshot
from psfleet.core.base.errors import (
    CheckpointError,
    ConfigError,
    FrameError,
    IdError,
    LimitExceeded,
    NotReady,
    UnknownTable,
)
from psfleet.core.base.logs import log_of
from psfleet.core.base.memory import content_address
from psfleet.core.base.observability.exposition import LatencyHistogram
from psfleet.core.engine.kernels.dedup import first_repeat
from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.initial_values import address_of
from psfleet.core.engine.runtime_interface import Gradient, missing_table
from psfleet.core.engine.schema.table import TableSpec, key_of
from psfleet.core.engine.shard.event_shortcuts import apply_plain_call, is_plain, may_be_plain
from psfleet.core.engine.shard.events import CreateTable, PartState, Pull, Push, WriteState
from psfleet.core.engine.shard.table_placement import dense_range
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.net import frame, segments
from psfleet.core.net.membership_messages import mode_fields
from psfleet.core.net.protobuf_fields import ALIGNMENT
from psfleet.core.net.segments import TensorRequest
from psfleet.core.net.shared_memory import MemoryHandle
from psfleet.core.net.table_messages import read_spec, write_evictions, write_spec
from psfleet.core.net.v1 import shard_pb2
from psfleet.core.net.v1.frame_pb2 import OUTCOME_APPLIED, OUTCOME_UNSPECIFIED, Header
from psfleet.core.net.worker_requests import read_join, read_leave, read_push, read_shrink
from psfleet_server.engine.shard_host import OUTCOMES, ShardHost
from psfleet_server.rpc.call_layout import (
    CallLayout,
    CallPlanner,
    MessageLayouts,
    is_lasting,
    lay_out_call,
    push_response,
)
from psfleet_server.rpc.replies import DeferredReply, encoded, log_if_slow, parsed

_UNSIGNED = 2**64 - 1


_log = log_of(__name__)
_PAGE = 256 << 20  # most bytes of a reply to ReadState
_MOST_EVICTIONS = 1 << 20  # most ids in a reply to Evictions


class PlainCalls:
    """Fast path for pushes and pulls: takes a request's bytes, and returns the reply's bytes or None.

    A call is plain if its tensors can be used by address, and the call needs no log record, no standby, no
    snapshot under way, no round and no waiting. For any other call the result is None, nothing has changed,
    and `ShardService` must handle the call. So every check comes before the first change. An invalid call
    gives None too, and `ShardService` then raises the error.

    Any thread may call. The request's buffer must stay alive during the call, because kernels read it by
    address.

    Args:
        pulls: Histogram of the time from each pull to its reply.
        exchanges: Histogram of the time from each exchange to its reply.

    Attributes:
        push: Handles a Push request.
        pull: Handles a Pull request.
        exchange: Handles an Exchange request, a push and a pull in one message.
    """

    def __init__(
        self, host: ShardHost, pulls: LatencyHistogram, exchanges: LatencyHistogram
    ) -> None:
        self.push = partial(self._take, True, False, None)
        self.pull = partial(self._take, False, True, pulls)
        self.exchange = partial(self._take, True, True, exchanges)
        self._host = host
        self._planner = CallPlanner()
        kernels = static_kernels("plain_call")
        self._read, self._loss = kernels.read, kernels.LOSS
        # The kernel `read` writes the header's fields here, as int64. The loss is a double, so the same bytes
        # are also viewed as float64. All calls share the array, so it is used only under the host's lock.
        self._fields = np.zeros(kernels.FIELDS, np.int64)
        self._words, self._losses = self._fields.data, self._fields.view(np.float64).data
        self._place = address_of(self._fields)

    def _take(
        self, pushes: bool, pulls: bool, latency: LatencyHistogram | None, request: bytes
    ) -> bytes | None:
        began = time.perf_counter_ns()
        host, address, size = self._host, content_address(request), len(request)
        shard, sizes, push, pull = host.shard, host.bytes, None, None
        # One lock from the first check to `apply_plain_call`, because the checks are valid only while the
        # shard does not change. Cheap checks come first. The only change before `apply_plain_call` is the
        # claim of the shared memory.
        with host.lock:
            if not may_be_plain(shard) or host.waiting_calls >= host.limits.waiting_calls:
                return None
            if not self._read(address, size, self._place):
                return None
            # fmt: off
            (
                layout, layout_end, worker, incarnation, sequence, samples, has_loss, _, clock, leases,
                lease_samples, skipped, progress, progress_end, has_lane, generation, turn, payload,
                cut, cut_after, addressed, addressed_end,
            ) = self._words.tolist()
            # fmt: on
            # Tensors are either in shared memory (a lane, no payload), and the plan has addresses, or in the
            # payload, and the plan has offsets from `base`. ShardService handles any other combination.
            encoded_segments, plan, base = request[layout:layout_end], None, 0
            planner = self._planner
            if planner.renew(shard.tables):
                host.lanes.forget_layouts()
            if has_lane and not payload:
                generation &= _UNSIGNED  # the kernel's int64 back to the message's fixed64
                plan = host.lanes.plan(worker, generation, encoded_segments, planner)
            elif payload and not (has_lane or payload % ALIGNMENT):
                plan = planner.plan_message(encoded_segments, size - payload)
                base = address + payload
            if plan is None or plan.pushes != pushes or plan.pulls != pulls:
                return None
            if pushes:
                loss = self._losses[self._loss] if has_loss else None
                position = (leases, lease_samples) if leases or lease_samples else None
                try:
                    text = request[progress:progress_end].decode() if progress else ""
                    lasts = (
                        frame.read_header(request[addressed:addressed_end]).addressed
                        if addressed
                        else ()
                    )
                except (UnicodeDecodeError, FrameError):
                    return None
                marked = (cut, cut_after) if cut else None
                push = Push(
                    worker,
                    incarnation,
                    sequence,
                    (),
                    samples=samples,
                    loss=loss,
                    clock=clock,
                    cut=marked,
                    position=position,
                    progress=text,
                    skipped=skipped,
                    addressed=tuple(lasts),
                )
            if pulls:
                pull = Pull(worker, incarnation, (), 0, clock)
            if not is_plain(shard, push, plan, pull, base):
                return None
            # Last, because it uses up the call's turn in the shared memory: ShardService would refuse the
            # call after that.
            if has_lane and not host.lanes.claim(worker, generation, turn):
                return None
            apply_plain_call(shard, push, plan, pull, base)
            sizes.plain += 1
        if has_lane:
            sizes.push += plan.gradient_bytes
        outcome = OUTCOME_UNSPECIFIED
        if pushes:
            outcome = OUTCOME_APPLIED
            spent, measured = time.perf_counter_ns() - began, host.latencies.push
            measured.counts[spent.bit_length()] += 1
            measured.total += spent
        if latency is None:
            log_if_slow(host.latencies.push.name, spent)
            sizes.push += size
            return push_response(outcome)
        if pushes:
            sizes.exchange += size
        else:
            sizes.pull += size
        # Without the lock, as `ShardHost` reads values: other pushes continue meanwhile.
        message, sent = plan.respond(base, outcome, shard.workers.view)
        sizes.values += sent
        spent = time.perf_counter_ns() - began
        latency.counts[spent.bit_length()] += 1
        latency.total += spent
        log_if_slow(latency.name, spent)
        return message


class ShardService:
    """Methods of the service Shard (protos/psfleet/v1/shard.proto), one for each of its calls.

    A method takes the request's bytes and returns the reply's bytes. A method whose reply may have to wait
    takes a `DeferredReply` as well and returns nothing. A PsfleetError that a method raises becomes the error
    of the call.
    """

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._layouts = MessageLayouts()

    def push(self, request: bytes) -> bytes:
        header, call = self._open(request)
        self._host.bytes.push += len(request)
        if call.tensors.reads:
            raise FrameError("the frame of a push has a read; make an exchange of it")
        reply = self._host.ask(self._push(header, call))
        assert reply.outcome is not None
        return push_response(OUTCOMES[reply.outcome])

    def pull(self, request: bytes, reply: DeferredReply) -> None:
        header, call = self._open(request)
        self._host.bytes.pull += len(request)
        if call.tensors.gradients:
            raise FrameError("the frame of a pull has a gradient; make an exchange of it")
        if header.seatless:
            if call.room is not None:
                raise FrameError("a pull without a seat is in shared memory; send its tensors")
            reply.complete(self._host.read(call.tensors.reads))
            return
        reply.response = None if call.room is None else call.room.again()
        self._host.submit(_pull(header, call.tensors), reply)

    def exchange(self, request: bytes, reply: DeferredReply) -> None:
        header, call = self._open(request)
        self._host.bytes.exchange += len(request)
        reply.response = None if call.room is None else call.room.again()
        self._host.exchange(self._push(header, call), _pull(header, call.tensors), reply)

    def attach(self, request: bytes) -> bytes:
        message = parsed(shard_pb2.AttachRequest, request)
        with self._host.lock:
            self._host.shard.workers.admit(message.worker, message.incarnation)
        if message.bytes > self._host.limits.lane:
            raise LimitExceeded(
                f"worker {message.worker} offers {message.bytes} bytes of shared memory, the limit is "
                f"{self._host.limits.lane}; raise lane in PSFLEET_LIMITS"
            )
        offer = MemoryHandle(
            message.boot, message.pid, message.descriptor, message.bytes, message.token
        )
        shared = self._host.lanes.attach(
            message.worker, message.incarnation, message.generation, offer
        )
        return encoded(shard_pb2.AttachReply(attached=shared))

    def _open(self, request: bytes) -> tuple[Header, CallLayout]:
        """Parse a push, pull or exchange and return its header and layout.

        Workers send the header in two parts: first only the segments (the layout), then everything else. For
        a known layout the segments are not parsed, and the returned header has none.

        Raises:
            FrameError: The message is damaged, or its segments do not fit the tables.
            LaneLost: The tensors are in shared memory that this server does not have, or that a later call
                has claimed.
        """
        lanes = self._host.lanes
        layout, head, payload = frame.split(request)
        header = frame.read_header(head)
        call = None
        # Segments in the second part would add to those of the layout. Then the whole header must be parsed.
        if layout and not header.segments:
            call = (
                self._layouts.known(header, layout, payload)
                if payload
                else lanes.known(header, layout)
            )
        if call is None:
            header = frame.read_header(layout + head) if layout else header
            memory = lanes.of(header)
            content = payload if memory is None else memory.bytes
            tensors = segments.read_request(header, content, self._spec_of)
            call = lay_out_call(tensors, memory, self._host.shard.tables.shape_of)
            if layout and is_lasting(layout, header):
                if memory is None:
                    self._layouts.keep(layout, payload, tensors)
                else:
                    lanes.keep(header, layout, call)
        if call.room is not None:
            self._host.bytes.push += call.tensors.gradient_bytes
        return header, call

    def _push(self, header: Header, call: CallLayout) -> Push:
        gradients: Iterable[Gradient] = call.tensors.gradients
        if call.room is not None and self._host.shard.consistency.declared.has_rounds:
            # The shard keeps the push until its round closes, but the reply goes out now, and the worker may
            # then write the next tensors to the same memory.
            gradients = map(_kept, gradients)
        gradients = tuple(gradients)
        for gradient in gradients:
            if gradient.ids is not None:
                _refuse_repeats(gradient.ids, self._host.shard.tables[gradient.table].spec)
        cut = (header.cut, header.cut_after) if header.cut else None
        return read_push(header, gradients, cut)

    def join(self, request: bytes) -> bytes:
        message = parsed(shard_pb2.JoinRequest, request)
        join = read_join(message)
        reply = self._host.ask(join)
        # After the shard has accepted the join: a delayed request of an old process must not take the memory
        # away from the worker's present process.
        self._host.lanes.drop(message.worker, before=message.incarnation)
        shard = self._host.shard
        return encoded(
            shard_pb2.JoinReply(
                server=shard.index,
                servers=shard.servers,
                sequence=reply.number,
                clock=reply.clock,
                switches=shard.consistency.switches,
                **mode_fields(shard.consistency.declared if shard.mode else join.mode),
            )
        )

    def leave(self, request: bytes) -> bytes:
        message = parsed(shard_pb2.LeaveRequest, request)
        reply = self._host.ask(read_leave(message))
        if not message.rest:
            fields = {"worker": message.worker, "incarnation": message.incarnation}
            _log.info(f"worker {message.worker} has left", extra=fields)
            self._host.lanes.drop(message.worker)
            if self._host.coordinator is not None:
                self._host.meet(lambda c: c.leave(message.worker, message.incarnation))
            self._host.end_if_over()
        return encoded(shard_pb2.LeaveReply(remaining=reply.number))

    def create_table(self, request: bytes) -> bytes:
        message = parsed(shard_pb2.CreateTableRequest, request)
        # A request with only a name creates no table: a reader requests the definition.
        if message.spec == shard_pb2.TableSpec(name=message.spec.name):
            return self._definition(message.spec.name)
        spec = read_spec(message.spec)
        if len(message.value) % 4:
            raise FrameError(
                f"table {spec.name!r}: a first value of {len(message.value)} bytes is "
                "no whole number of float32"
            )
        value = np.frombuffer(message.value, "<f4")
        with self._host.mutating():
            self._refuse_if_awaited(spec, len(value))
            self._refuse_if_too_many(spec)
            is_new = self._host.shard.create(spec, value, message.worker)
            tables = self._host.shard.tables
            # Compared by worker, not by worker process: if the maker dies after it has created the table on
            # some of the servers, its restarted process continues.
            created = tables.makers.get(spec.key) == message.worker
            existing = None if is_new else write_spec(tables[spec.key].spec)
        return encoded(shard_pb2.CreateTableReply(table=spec.key, created=created, spec=existing))

    def _definition(self, name: str) -> bytes:
        """Reply with the definition of a table, for a reader that only knows the table's name."""
        with self._host.lock:
            tables = self._host.shard.tables
            table = tables.get(key_of(name))
            names = [known.spec.name for known in tables.values()]
        if table is None:
            raise UnknownTable(missing_table(name, names))
        spec = write_spec(table.spec)
        return encoded(shard_pb2.CreateTableReply(table=table.spec.key, spec=spec))

    def _refuse_if_too_many(self, spec: TableSpec) -> None:
        tables, limit = self._host.shard.tables, self._host.limits.tables
        if len(tables) >= limit and spec.key not in tables:
            raise LimitExceeded(
                f"table {spec.name!r} would be table {len(tables) + 1} of server "
                f"{self._host.shard.index}, its limit is {limit}; raise tables in PSFLEET_LIMITS"
            )

    def _refuse_if_awaited(self, spec: TableSpec, values: int) -> None:
        """Raise NotReady for a dense table that does not exist yet if the request has no initial values.

        Only the worker that makes a table sends the initial values. Other workers repeat their request until
        that worker has done so.
        """
        shard = self._host.shard
        if spec.kind == "sparse" or values or spec.key in shard.tables:
            return
        low, high = dense_range(spec, shard.index, shard.servers)
        if high > low:
            raise NotReady(f"table {spec.name!r} is not yet on server {shard.index}")

    def read_state(self, request: bytes) -> bytes:
        message = parsed(shard_pb2.StateRequest, request)
        with self._host.lock:
            table = self._host.shard.tables[message.table]
        # Read without the host's lock, because a page may have 256 MiB. The table's own lock keeps it
        # consistent, and pushes to other tables continue.
        limit = min(message.limit, _page(table.spec))
        if isinstance(table, DenseTable):
            step, values = table.part(message.offset, message.offset + limit)
            state = PartState(message.table, step, values)
        else:
            step, rows = table.step, table.page(message.offset, limit)
            state = PartState(message.table, step, rows.values, rows.ids, rows.touched, rows.scores)
        self._host.settle_read()
        return segments.message(Header(), [segments.write_state(state)])

    def write_state(self, request: bytes) -> bytes:
        header, payload = frame.decode(request)
        states = segments.read_states(header, payload, self._spec_of)
        self._host.ask(
            WriteState(tuple(states), header.worker, header.incarnation, header.sequence)
        )
        return frame.encode(Header())

    def load(self, request: bytes) -> bytes:
        message = parsed(shard_pb2.LoadRequest, request)
        shard, count = self._host.shard, 0
        try:
            snapshot = Snapshot(_path(message.path))
            # One event at a time, releasing the lock in between: reads of other tables continue meanwhile.
            existing = shard.tables.specs()
            for event in snapshot.events(shard.index, shard.servers, there=existing):
                if isinstance(event, CreateTable):
                    with self._host.mutating():
                        shard.create(event.spec, event.value)
                else:
                    self._host.ask(event)
                    count += len(event.columns.get("ids", event.columns.get("value", ())))
        except OSError as error:
            raise CheckpointError(
                f"server {shard.index} cannot read {message.path!r}: {error.strerror}"
            ) from None
        return encoded(shard_pb2.LoadReply(loaded=count))

    def shrink(self, request: bytes) -> bytes:
        reply = self._host.ask(read_shrink(parsed(shard_pb2.ShrinkRequest, request)))
        return encoded(shard_pb2.ShrinkReply(removed=reply.number))

    def evictions(self, request: bytes) -> bytes:
        message = parsed(shard_pb2.EvictionsRequest, request)
        with self._host.lock:
            tables = self._host.shard.tables
            page = tables.evicted(
                message.table, message.position, min(message.limit, _MOST_EVICTIONS)
            )
        self._host.settle_read()
        return encoded(write_evictions(page))

    def status(self, request: bytes) -> bytes:
        parsed(shard_pb2.StatusRequest, request)
        return encoded(self._host.status())

    def _spec_of(self, key: int) -> TableSpec:
        return self._host.shard.tables[key].spec


def _pull(header: Header, tensors: TensorRequest) -> Pull:
    return Pull(
        header.worker,
        header.incarnation,
        tuple(tensors.reads),
        header.commit,
        header.clock,
        header.progress,
    )


def _kept(gradient: Gradient) -> Gradient:
    """Return a copy of a gradient, in memory that no worker shares."""
    ids = None if gradient.ids is None else gradient.ids.copy()
    return Gradient(gradient.table, gradient.values.copy(), ids, gradient.learning_rate)


def _page(spec: TableSpec) -> int:
    """Return how many rows (sparse table) or values (dense table) fit into one reply."""
    # 4 bytes for each float32, 8 for a row's id.
    values = (1 + len(spec.rule.slots)) * (spec.dim if spec.kind == "sparse" else 1)
    return _PAGE // (4 * values + 8)


def _refuse_repeats(ids: NDArray[np.int64], spec: TableSpec) -> None:
    """Raise IdError if a push names an id twice.

    An optimizer must be applied once to the sum of a row's gradients. psfleet's workers sum before they push,
    so a repeated id is the bug of another client.
    """
    if spec.kind == "dense" or (position := first_repeat(ids)) is None:
        return
    raise IdError(
        f"table {spec.name!r}: the push names id {ids[position]} twice; sum its rows before the push"
    )


def _path(path: str) -> str:
    if not path or "\0" in path:
        raise ConfigError(f"the folder of a snapshot is {path!r}; name one")
    return path

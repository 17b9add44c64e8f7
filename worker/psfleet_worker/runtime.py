"""The parameters of a cluster as one worker sees them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint import read_specs
from psfleet.dealing import Range
from psfleet.environment import Environment
from psfleet.errors import ConfigError, PsfleetError, UnknownTable, UsageError
from psfleet.kernels.dedup import owned_by
from psfleet.packing import Packer
from psfleet.pipeline.links import Place
from psfleet.routing import check_gradient, check_ids, check_spec_value
from psfleet.runtime import Awaited, Gradient, Pulled, Read, TableState
from psfleet.shard.events import Mode
from psfleet.shard.layout import dense_ranges
from psfleet.strategy import Wire
from psfleet.tables.spec import TableSpec
from psfleet.testing.chaos import Audit, Meddler
from psfleet.wire import frame, segments
from psfleet.wire.segments import Piece, State
from psfleet.wire.specs import read_mode, write_mode, write_spec
from psfleet.wire.v1 import coordinator_pb2, shard_pb2
from psfleet.wire.v1.frame_pb2 import Header
from psfleet_worker.beats import Listener
from psfleet_worker.client import Call, Client, Patience, Send, wait_all
from psfleet_worker.connection import Connection, reduced
from psfleet_worker.gradients import add_gradients
from psfleet_worker.marking import Marks
from psfleet_worker.parcel import Parcel
from psfleet_worker.pulls import PullTicket
from psfleet_worker.pushes import Pushes, PushTicket
from psfleet_worker.routing import Plans, deal_read
from psfleet_worker.saving import save
from psfleet_worker.shares import Shares, Trainer
from psfleet_worker.stages import StageLinks

__all__ = ["ClusterRuntime"]

Floats = NDArray[np.float32]

_WINDOW = 4  # async mode: pushes under way at most
_LINGERS = 4 << 20  # bytes to a server; a larger push is not worth a copy for a call less
_PAGE_ROWS = 1 << 16
_PAGE_VALUES = 1 << 23


class ClusterRuntime:
    """Implements psfleet.runtime.Runtime on the servers of a cluster.

    Sync mode: a push is held by every server; the next pull or flush commits it and waits for the
    round to close, whose update is the mean of all workers' gradients. Every other mode: pushes leave
    in order, a few at a time; a pull comes after the pushes before it, and takes the last one with it.
    Ssp mode: the pull waits while this worker is too far ahead of another.

    An error of a push is raised by its ticket and by every later call: no push is skipped.

    Args:
        environment: Says which worker this is and where the servers are.
        mode: The same for all workers.
        staleness: Ssp mode: how many pushes a worker may be ahead of the slowest.
        wire: In which form gradients and values travel.
        patience: How long to wait for whom.
        meddle: For tests, see psfleet.testing.faults.
    """

    def __init__(
        self,
        environment: Environment,
        mode: Mode,
        staleness: int = 0,
        wire: Wire | None = None,
        *,
        patience: Patience | None = None,
        meddle: Callable[[int, Send], Send] | None = None,
    ) -> None:
        if environment.role != "worker":
            raise ConfigError(
                f"the role is {environment.role!r}; a cluster's runtime is for "
                "workers (PSFLEET_ROLE=worker)"
            )
        meddle = meddle or Meddler.wanted(environment.rank)
        self._fleet = Connection(
            environment, mode, patience or Patience.of(environment), meddle, staleness
        )
        self._specs: dict[int, TableSpec] = {}
        self._plans = Plans(len(self._fleet.clients))
        self._wire = wire or Wire()
        self._packer = Packer(environment.rank, self._wire.gradients, feeds=mode != "sync")
        self._pushes = Pushes(self._fleet.clients)
        self._marks = Marks(self._fleet)
        self._fleet.beats.listeners.append(self._marks.listen)
        self._open = 0  # sync mode: the round that is pushed and not committed
        self._ahead: PullTicket | None = None  # a pull that may be under way
        self._overtaken = False  # and a push has been made after it
        self._writes = 0  # WriteState calls of this life
        self._wish: tuple[str, dict[str, int]] | None = None
        self._closed = False
        self._links: StageLinks | None = None
        self._shares = Shares(self._fleet)
        try:
            self._fleet.start()
            # Server 0 cannot know ports that the others have chosen.
            self._marks.introduce(keeps=False)
        except BaseException:
            self._fleet.close()
            raise
        self._audit = Audit.wanted(self.worker_index, self._fleet.incarnation, self.server_num)
        if self._mode == "sync":  # of a life that follows another, the round before its first
            self._open = self._fleet.sequence

    @property
    def worker_index(self) -> int:
        """See Runtime."""
        return self._fleet.worker

    @property
    def worker_num(self) -> int:
        """See Runtime."""
        return self._fleet.workers

    @property
    def server_num(self) -> int:
        """See Runtime."""
        return len(self._fleet.clients)

    @property
    def mode(self) -> tuple[Mode, int]:
        """The mode in which the fleet runs, and its staleness: another one than was asked for, if the
        mode has been changed before this life began."""
        return self._fleet.mode, self._fleet.staleness

    @property
    def _mode(self) -> Mode:
        return self._fleet.mode

    # -- training ------------------------------------------------------------------------------

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """See Runtime.create. The worker that server 0 hears first gives the value everywhere."""
        flat = check_spec_value(spec, value)
        parts = [flat] * self.server_num
        if spec.kind == "dense":
            parts = [flat[low:high] for low, high in dense_ranges(spec, self.server_num)]
        first, *others = self._fleet.clients
        [answer] = wait_all([self._create_on(first, spec, parts[0])])
        mine = shard_pb2.CreateTableReply.FromString(answer).created
        wait_all(
            [
                self._create_on(client, spec, part if mine else part[:0])
                for client, part in zip(others, parts[1:], strict=True)
            ]
        )
        self._specs[spec.key] = spec
        return spec.key

    def _create_on(self, client: Client, spec: TableSpec, part: Floats) -> Call:
        request = shard_pb2.CreateTableRequest(
            spec=write_spec(spec),
            value=part.tobytes(),
            worker=self.worker_index,
            incarnation=self._fleet.incarnation,
        )
        return client.start(
            "Shard/CreateTable", request.SerializeToString(), outage=self._fleet.patience.start
        )

    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """See Runtime.pull. One call to each server that has a part in it."""
        return self._pull(reads, None)

    @property
    def reads_ahead(self) -> bool:
        """See ReadsAhead. In modes whose pulls wait for other workers nothing overtakes anything."""
        return self._mode == "async"

    def pull_ahead(self, reads: Sequence[Read]) -> Awaited:
        """See ReadsAhead.pull_ahead."""
        if not self.reads_ahead:
            return Pulled(self.pull(reads))
        self._arrive()
        self._ahead, self._overtaken = self._ask(reads, None), False
        return self._ahead

    def _arrive(self) -> None:
        """Let what was read ahead be here: what follows may use its places in memory anew."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.wait()
            self._fleet.view = max(self._fleet.view, ahead.view)

    def _pull(self, reads: Sequence[Read], timeout: float | None) -> list[Floats]:
        self._arrive()
        if self._mode == "sync":  # a pull commits what every server holds
            self._pushes.settle()
        ticket = self._ask(reads, timeout)
        joined = ticket.wait()
        self._fleet.view = max(self._fleet.view, ticket.view)
        self._open = 0
        self._pushes.settle()
        return joined

    def _ask(self, reads: Sequence[Read], timeout: float | None) -> PullTicket:
        dealt = [deal_read(self._spec(read.table), read, self._plans) for read in reads]
        with self._pushes.lock:
            ticket = self._pushes.take()
            parcels = ticket.parcels if ticket else self._parcels(commit=self._open)
            asked = [deal.ask(parcels) for deal in dealt]
            calls = {
                server: self._call(server, parcel, ticket is not None, timeout)
                for server, parcel in enumerate(parcels)
                if parcel.reads or ticket or self._open
            }
            if ticket:
                self._pushes.sent(ticket, list(calls.values()))
        return PullTicket(calls, parcels, dealt, asked, self._spec)

    def _parcels(self, **fields: Any) -> list[Parcel]:
        """An empty parcel for each server, with a header of these fields."""
        fields.setdefault("clock", self._fleet.clock)
        form = self._wire.values
        return [Parcel(self._header(**fields), lane.held(), form) for lane in self._fleet.lanes]

    def _call(self, server: int, parcel: Parcel, pushes: bool, timeout: float | None) -> Call:
        method = "Shard/Pull"
        if pushes:
            method = "Shard/Exchange" if parcel.reads else "Shard/Push"
        return self._fleet.clients[server].start(
            method, parcel.request(), cargo=parcel, seconds=self._seconds(timeout)
        )

    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> PushTicket:
        """See Runtime.push."""
        if self._audit is not None:
            gradients = [*gradients, self._audited(self._audit)]
        tables = [gradient.table for gradient in gradients]
        if len(set(tables)) != len(tables):
            raise UsageError("a push names a table twice; sum its gradients first")
        if self._open:
            self.flush()
        if self._overtaken:
            self._arrive()
        self._overtaken = self._ahead is not None
        self._pushes.settle(_WINDOW - 1)
        specs = [self._spec(table) for table in tables]
        checked = [check_gradient(*pair) for pair in zip(specs, gradients, strict=True)]
        sequence, clock = self._fleet.sequence + 1, self._fleet.clock + 1
        leases, used = self._shares.position or (0, 0)
        parcels = self._parcels(
            sequence=sequence,
            clock=clock,
            samples=samples,
            loss=loss,
            leases=leases,
            lease_samples=used,
        )
        try:
            add_gradients(parcels, specs, checked, gradients, self._plans, self._packer)
        except PsfleetError:
            for parcel in parcels:
                parcel.close()
            raise
        cut = self._marks.begin(sequence)
        for parcel in parcels:
            parcel.say(**cut)
        ticket = self._pushes.add(
            parcels,
            linger=self._mode != "sync"
            and all(not parcel.is_inline or parcel.bytes <= _LINGERS for parcel in parcels),
        )
        self._fleet.sequence, self._fleet.clock = sequence, clock
        self._open = sequence if self._mode == "sync" else 0
        return ticket

    def _audited(self, audit: Audit) -> Gradient:
        """Under `psfleet-launch --chaos`: what counts this push on every server."""
        if audit.spec.key not in self._specs:
            self.create(audit.spec)
        return audit.gradient(self._mode)

    def flush(self, timeout: float | None = None) -> None:
        """See Runtime.flush."""
        self._arrive()
        self._pushes.send()
        self._pushes.settle(timeout=timeout)
        if self._open:
            self._pull([], timeout)

    def barrier(self, timeout: float | None = None) -> None:
        """See Runtime.barrier. Sync mode: rounds of the others go on without this worker."""
        reply = coordinator_pb2.BarrierReply.FromString(self._gather(timeout))
        self._wish = (reply.wish.mode, dict(reply.wish.settings)) if reply.wish.mode else None

    def take_wish(self) -> tuple[str, dict[str, int]] | None:
        """The mode and its settings that somebody outside wants, if the last barrier has told all workers
        so: each of them then comes to `set_mode`."""
        wish, self._wish = self._wish, None
        return wish

    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        """See Runtime.all_reduce."""
        if mode not in ("sum", "max", "min"):
            raise UsageError(f"all_reduce mode is {mode!r}; it must be sum, max or min")
        brought = np.ascontiguousarray(value)
        return reduced(self._gather(None, mode, brought), brought).reshape(np.shape(value))

    def _gather(
        self, timeout: float | None, mode: str = "", value: NDArray[Any] | None = None
    ) -> bytes:
        """Meet all workers. While this one waits, it is no member of rounds."""
        passes = self._fleet.passes
        answer = self._meet(timeout, mode, value)
        if self._mode == "sync" and not passes:
            self._fleet.join()
        return answer

    def _meet(
        self, timeout: float | None, mode: str = "", value: NDArray[Any] | None = None
    ) -> bytes:
        self.flush(timeout)
        if self._fleet.passes:
            return self._fleet.meet(mode, value, timeout)
        if self._fleet.rests:
            self._fleet.rest()
        answer = self._fleet.meet(mode, value, timeout)
        self._fleet.clock = 0
        return answer

    def set_mode(self, mode: Mode, staleness: int = 0) -> None:
        """Go on in another mode; every worker must come here between two of its steps.

        A worker that has started again passes over the changes that the fleet has behind it.

        Args:
            mode: The same on all workers.
            staleness: Ssp mode: likewise.

        Raises:
            ConfigError: The workers want different things; nothing was changed.
        """
        if mode == "geo" and self._wire != Wire():
            raise ConfigError(
                "what travels in geo mode is added to the weights as it is; "
                f"it does not go with {self._wire}"
            )
        wish = np.array([write_mode(mode), staleness], np.int64)
        brought, passes = np.concatenate([wish, -wish]), self._fleet.passes
        most = reduced(self._meet(None, "max", brought), brought)
        if (most[:2] != -most[2:]).any():
            if self._mode == "sync" and not passes:
                self._fleet.join()
            raise ConfigError(
                f"worker {self.worker_index} asks for mode {mode!r} with staleness {staleness} and "
                "another worker for something else; let all of them ask for the same"
            )
        self._fleet.change_mode(mode, staleness)
        self._packer.forget()
        self._packer.feeds = mode != "sync"

    # -- whole tables --------------------------------------------------------------------------

    def read_table(self, table: int) -> TableState:
        """See Runtime.read_table."""
        self.flush()
        spec = self._spec(table)
        pages = [list(self._pages(client, spec)) for client in self._fleet.clients]
        step = max(page.step for server in pages for page in server)
        if spec.kind == "dense":
            flat = np.empty((1 + len(spec.rule.slots), spec.size), np.float32)
            for (low, high), server in zip(dense_ranges(spec, self.server_num), pages, strict=True):
                flat[:, low:high] = np.concatenate([page.values for page in server], axis=1)
            return TableState(step, [plane.reshape(spec.shape) for plane in flat])
        every = [page for server in pages for page in server]
        ids = np.concatenate([page.ids for page in every if page.ids is not None])
        rows = np.concatenate([page.values for page in every])
        touched = np.concatenate([page.touched for page in every if page.touched is not None])
        scores = np.concatenate([page.scores for page in every if page.scores is not None])
        order = np.argsort(ids, kind="stable")
        planes = np.split(rows[order], 1 + len(spec.rule.slots), axis=1)
        return TableState(
            step,
            [np.ascontiguousarray(plane) for plane in planes],
            ids[order],
            touched[order],
            scores[order],
        )

    def _pages(self, client: Client, spec: TableSpec) -> Iterator[State]:
        """What one server holds of a table; the last page is empty."""
        offset, limit = 0, _PAGE_VALUES if spec.kind == "dense" else _PAGE_ROWS
        while True:
            request = shard_pb2.StateRequest(table=spec.key, offset=offset, limit=limit)
            [answer] = wait_all([client.start("Shard/ReadState", request.SerializeToString())])
            [page] = segments.read_states(*frame.decode(answer), self._spec)
            yield page
            count = page.values.shape[1] if page.ids is None else len(page.ids)
            if count == 0:
                return
            offset += count

    def write_table(self, table: int, state: TableState) -> None:
        """See Runtime.write_table."""
        self.flush()
        self._packer.forget()
        spec = self._spec(table)
        for parts in self._deal_state(spec, state):
            self._writes += 1
            wait_all(
                [
                    client.start(
                        "Shard/WriteState",
                        segments.message(self._header(sequence=self._writes), [part]),
                    )
                    for client, part in zip(self._fleet.clients, parts, strict=True)
                ]
            )

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        """See Runtime.shrink."""
        self.flush()
        self._writes += 1
        request = shard_pb2.ShrinkRequest(
            table=table,
            threshold=threshold,
            unseen=unseen,
            worker=self.worker_index,
            incarnation=self._fleet.incarnation,
            number=self._writes,
        )
        answers = wait_all(
            self._fleet.to_all("Shard/Shrink", request, seconds=self._fleet.patience.wait)
        )
        return sum(shard_pb2.ShrinkReply.FromString(answer).removed for answer in answers)

    def _deal_state(self, spec: TableSpec, state: TableState) -> Iterator[list[Piece]]:
        """Pages of the state, each as one piece for every server."""
        if spec.kind == "dense":
            planes = np.stack([np.asarray(plane, np.float32).reshape(-1) for plane in state.values])
            ranges = dense_ranges(spec, self.server_num)
            most = max(high - low for low, high in ranges)
            length = _PAGE_VALUES // len(planes) if spec.rule.unit == "element" else most
            for start in range(0, max(most, 1), max(length, 1)):
                yield [
                    _dense_page(spec, state.step, planes[:, low:high], start, length)
                    for low, high in ranges
                ]
            return
        ids = check_ids(spec, state.ids)
        rows = np.concatenate(state.values, axis=1, dtype=np.float32)
        touched = None if state.touched is None else np.asarray(state.touched, np.int64)
        scores = None if state.scores is None else np.asarray(state.scores, np.float32)
        for start in range(0, max(len(ids), 1), _PAGE_ROWS):
            page = slice(start, start + _PAGE_ROWS)
            owned = [
                owned_by(ids[page], server, self.server_num) for server in range(self.server_num)
            ]
            yield [
                segments.write_state(
                    State(
                        spec.key,
                        state.step,
                        rows[page][mine],
                        ids[page][mine],
                        None if touched is None else touched[page][mine],
                        None if scores is None else scores[page][mine],
                    )
                )
                for mine in owned
            ]

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        """See Runtime.save. The servers must see the same file system as this worker."""
        self.flush()
        return save(self._fleet, path, delta=delta, base=base)

    def keep(self, state_at: Callable[[int], bytes]) -> bytes:
        """Snapshots get what `state_at` gives of this worker; returns what it has kept in the one from
        which the fleet has started (JSON; empty: nothing).

        Args:
            state_at: Of the number of its last push in the snapshot (below 0: of its last ones, see
                psfleet.remembering); called by another thread.
        """
        self._marks.state_at = state_at
        return self._marks.introduce(keeps=True)

    @property
    def step(self) -> int:
        """Number of the last push."""
        return self._fleet.sequence

    def load(self, path: str) -> None:
        """See Runtime.load."""
        self.flush()
        self._packer.forget()
        absolute = str(Path(path).absolute())
        specs = read_specs(absolute)
        wait_all(
            self._fleet.to_all(
                "Shard/Load",
                shard_pb2.LoadRequest(path=absolute),
                seconds=self._fleet.patience.wait,
            )
        )
        self._specs |= {spec.key: spec for spec in specs}

    def shares(
        self, trainer: Trainer, size: int, batch: int, epochs: int, seed: int, merged: int
    ) -> Iterator[tuple[Range, ...]]:
        """What this worker has to train with, step by step, as the fleet hands it out.

        Args:
            trainer: Who pushes.
            size: Samples of an epoch.
            batch: Samples of a step.
            epochs: How many epochs.
            seed: Of the order of samples; only compared between workers.
            merged: Steps of one push.

        Returns:
            For each step the positions of its samples (psfleet.dealing).
        """
        return self._shares.steps(trainer, size, batch, epochs, seed, merged)

    @property
    def coming(self) -> tuple[Range, ...]:
        """Of the step after the present one of `shares`: its positions, if they are known; else empty."""
        return self._shares.coming

    def on_beat(self, listener: Listener) -> None:
        """Let `listener` hear what the coordinator answers to signs of life, in their thread."""
        self._fleet.beats.listeners.append(listener)

    # -- the rest ------------------------------------------------------------------------------

    def specs(self) -> dict[int, TableSpec]:
        """See Runtime.specs."""
        return dict(self._specs)

    def stats(self) -> list[dict[str, Any]]:
        """See Runtime.stats. Each server counts every push, so samples are equal on all."""
        return [
            _stats(shard_pb2.StatusReply.FromString(answer))
            for answer in wait_all(self._fleet.to_all("Shard/Status", shard_pb2.StatusRequest()))
        ]

    def stage_links(self, place: Place, queue_size: int) -> StageLinks:
        """The way to the other stages of this worker; it is open until this runtime is closed."""
        self._links = StageLinks(place, queue_size, self._fleet.patience.wait, self._fleet.access)
        return self._links

    def abandon(self) -> None:
        """Let go of every resource without a word to the fleet, as if this process had died."""
        self._closed = True
        self._fleet.close()
        self._pushes.close()

    def close(self) -> None:
        """See Runtime.close."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
            self._marks.say_goodbye()
            self._fleet.leave()
        finally:
            if self._links is not None:
                self._links.close()
            self._pushes.close()
            self._fleet.close()
            self._marks.close()

    def _spec(self, table: int) -> TableSpec:
        spec = self._specs.get(table)
        if spec is None:
            raise UnknownTable(
                f"table {table:#x} is unknown to worker {self.worker_index}; create it first"
            )
        return spec

    def _header(self, **fields: Any) -> Header:
        return Header(worker=self.worker_index, incarnation=self._fleet.incarnation, **fields)

    def _seconds(self, timeout: float | None) -> float:
        return self._fleet.patience.wait if timeout is None else timeout


def _dense_page(spec: TableSpec, step: int, planes: Floats, start: int, page: int) -> Piece:
    """Values from `start` on of one server's part; none where that has ended."""
    start = min(start, planes.shape[1])
    part = planes[:, start : start + page]
    return segments.write_state(State(spec.key, step, part, start=start))


def _stats(status: Any) -> dict[str, Any]:
    return {
        "server": status.server,
        "pid": status.pid,
        "mode": read_mode(status.mode) if status.mode else None,
        "staleness": dict(status.staleness),
        "lead": status.lead,
        "pushes": status.pushes,
        "repeats": status.repeats,
        "samples": sum(status.samples.values()),
        "losses": dict(status.losses),
        "round": status.round,
        "workers": status.workers,
        "torn": [
            {"worker": step.worker, "incarnation": step.incarnation, "last": dict(step.last)}
            for step in status.torn
        ],
        "bytes_in": status.bytes_in,
        "bytes_out": status.bytes_out,
        "cpu_seconds": status.cpu_seconds,
        "resident_bytes": status.resident_bytes,
        "tables": [
            {
                "name": table.name,
                "kind": table.kind,
                "count": table.count,
                "bytes": table.bytes,
                "step": table.step,
            }
            for table in status.tables
        ],
    }

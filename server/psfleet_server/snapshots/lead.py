"""Server 0 leads a snapshot: one cut through all servers, complete when every part is on the disk.

Rules R11 and R12 of the protocol. What goes wrong on the way ends this snapshot and nothing else; the
next one has another number. Complete is what has its name on the disk: the manifest is the decision.
"""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psfleet.checkpoint import (
    Cut,
    Draft,
    Manifest,
    Part,
    linked,
    merged_specs,
    own_name,
    read_manifest,
)
from psfleet.checkpoint.worker_state import redealt
from psfleet.errors import CheckpointError, DeadlineExceeded, PsfleetError
from psfleet.faults.crash_points import Crashes
from psfleet.platform.notices import say
from psfleet.wire.access import Access
from psfleet.wire.v1 import snapshot_pb2
from psfleet_server.durability.recovery import check_restart
from psfleet_server.engine.shard_host import Host
from psfleet_server.rpc.deferred_reply import Reply
from psfleet_server.rpc.peer import Peer

__all__ = ["GaveWay", "Lead", "Limits", "Wanted"]

_LOOK = 0.05  # seconds between looks whether a worker has left


@dataclass(frozen=True)
class Limits:
    """How long a snapshot may take, in seconds.

    Attributes:
        cut: Until every server is cut; pushes behind a mark wait as long.
        file: Until every file is on the disk.
        worker: Until every worker has brought what it keeps.
    """

    cut: float = 10.0
    file: float = 600.0
    worker: float = 10.0


@dataclass(frozen=True)
class Wanted:
    """A snapshot that somebody asks for.

    Attributes:
        path: Where it is to lie; empty: in the job's folder under its number.
        delta: Only what has changed since the last base or delta; everything, if a server has
            forgotten that one because it was started again.
        base: The next delta says the changes since this one.
        every: Sync mode: cut after the next round whose number is a multiple of this; 0: after any.
    """

    path: str = ""
    delta: bool = False
    base: bool = False
    every: int = 0


class GaveWay(CheckpointError):
    """A snapshot is not taken now although nothing is wrong: the fleet is changing, or another is wanted."""


class Lead:
    """Takes one snapshot after the other.

    Args:
        host: Of server 0.
        access: With what it proves itself to the others.
        folder: Where snapshots without a path lie; None: nowhere.
        keep: How many of those stay.
        limits: How long each step may take.
        crashes: For tests.

    Attributes:
        endpoints: Where the servers listen, in order.
        restored: By seat what its worker has kept in the snapshot from which the fleet has started.
        others: How many workers that fleet had, if not as many as this one; else 0.
    """

    def __init__(
        self,
        host: Host,
        access: Access,
        folder: Path | None = None,
        keep: int = 3,
        limits: Limits | None = None,
        crashes: Crashes | None = None,
    ) -> None:
        self.endpoints: Sequence[str] = ()
        self.restored: Mapping[int, Any] = {}
        self.others = 0
        self._host = host
        self._access = access
        self._folder = folder
        self._keep = keep
        self._limits = limits or Limits()
        self._crashes = crashes
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._number = 0
        self._tried = 0  # the last number that was used, perhaps in vain
        self._members: dict[int, int] = {}
        self._round: int | None = None  # sync: where it was cut
        self._last_round = 0  # of the last one that is complete
        self._callers = 0
        self._ready: dict[int, Reply] = {}
        self._kept: dict[int, Any] = {}
        self._keepers: dict[tuple[int, int], bool] = {}  # by seat and life
        self._last: dict[int, Any] = {}  # of workers that leave: [step, state] of their last steps
        self._last_base: tuple[int, Path] | None = None
        self._closing = False

    def stop(self) -> None:
        """Give up waiting for workers: the server ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def expect(self, worker: int, incarnation: int, *, keeps: bool) -> None:
        """Whether this worker has something to keep, so that snapshots wait for it."""
        with self._changed:
            self._keepers[worker, incarnation] = keeps
            self._last.pop(worker, None)

    def learn(self, endpoints: Sequence[str]) -> None:
        """Where all servers listen, in order; one that ends in :0 is not known yet."""
        if not any(endpoint.endswith(":0") for endpoint in endpoints) or not self.endpoints:
            self.endpoints = tuple(endpoints)

    def restored_of(self, worker: int) -> bytes:
        """What a worker has kept in the snapshot from which the fleet has started; empty: nothing."""
        state: Any = self.restored.get(worker)
        if self.others:
            state = redealt(self.restored, self.others, worker) or None
        return b"" if state is None else json.dumps(state).encode()

    # -- taking one ----------------------------------------------------------------------------

    def take(self, wanted: Wanted) -> tuple[int, str]:
        """Take a snapshot; its number and where it lies.

        Raises:
            CheckpointError: It could not be taken; what was there is untouched.
            DeadlineExceeded: A worker or a server did not do its part in time.
            GaveWay: Of one that waits for its round, or while it is not known where all servers are.
        """
        with self._asking(), self._turn, contextlib.ExitStack() as opened:
            number = self._next_number()
            path = Path(wanted.path) if wanted.path else self._own_path(number)
            peers = self._peers()
            for peer in peers:
                opened.callback(peer.close)
            try:
                with Draft(path, self._crashes) as draft:
                    parts, base = self._parts(peers, number, draft.folder, wanted)
                    manifest = self._manifest(number, parts, path, base)
                    draft.finish(manifest, check_restart)
            except BaseException as error:
                self._settle(peers, number, complete=False)
                raise _explained(error, number) from error
            finally:
                self._end_orders()
            self._reach("complete")
            self._last_round = self._round or 0
            if wanted.base or wanted.delta:
                self._last_base = (number, path.absolute())
            # Only what the job keeps itself will be there for a log to begin with.
            self._settle(peers, number, complete=not wanted.path)
            if not wanted.path:
                self._drop_old()
            return number, str(path)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Within, somebody wants a snapshot; one that waits for its round gives way."""
        with self._changed:
            self._callers += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._callers -= 1

    def _parts(
        self, peers: Sequence[Peer], number: int, folder: str, wanted: Wanted
    ) -> tuple[list[Part], tuple[int, Path] | None]:
        """What each server says of its file, when all of them are on the disk; what they build on."""
        asked = snapshot_pb2.BeginCutRequest(
            number=number, folder=folder, hold=True, remember=wanted.base or wanted.delta
        )
        said = self._begin_on_all(peers, asked)
        base = self._base(number, said) if wanted.delta else None
        if base is not None:
            asked.since = base[0]
        asked.hold = False
        self._agree(asked, said, wanted.every)
        for peer in peers:
            self._begin(peer, asked)
        if self._round is not None and wanted.every:
            self._await_round(number)
        self._tell_workers(number, said[0])
        self._await_ready()
        for peer in peers:
            self._finish(peer, number, cut=True)
        found = [Part.decode(self._finish(peer, number, cut=False)) for peer in peers]
        self._await_workers()
        return found, base

    def _base(self, number: int, said: Sequence[Any]) -> tuple[int, Path] | None:
        """What a delta says the changes of; None: it must hold everything, and a line says why."""
        base = self._last_base
        forgetful = [
            f"server {index}"
            for index, reply in enumerate(said)
            if base is None or base[0] not in reply.remembered
        ]
        if not forgetful:
            return base
        say(
            f"snapshot {number} was to be a delta and holds everything: {', '.join(forgetful)} "
            "remembers no earlier one (a server that was started again does not)"
        )
        return None

    def _agree(self, asked: Any, said: Sequence[Any], every: int) -> None:
        """Where all servers cut: after the same round, or at the marks of the same lives."""
        if _is_sync(said[0].mode):
            asked.at_round, asked.round = True, max(reply.closed for reply in said)
            if every:
                asked.round = _multiple(max(asked.round, self._last_round + 1), every)
            self._round = asked.round
            return
        self._round = None
        asked.members.update(said[0].lives)

    def _await_round(self, number: int) -> None:
        """Wait until this server is cut, however long the training takes to come to the round."""
        cuts = self._host.shard.cuts
        while True:
            with self._host.lock:
                made, now = cuts.last >= number, cuts.under_way
            if made:
                return
            if now is None or now.number != number:
                raise GaveWay("a worker or a server came or went")
            with self._changed:
                if self._closing or self._callers > 1:
                    raise GaveWay(f"it waited for round {self._round}")
                self._changed.wait(_LOOK)

    def _begin_on_all(self, peers: Sequence[Peer], asked: Any) -> list[Any]:
        """What all servers say of themselves, once they agree on who is in the fleet.

        A worker that comes or goes is at one server before the other.
        """
        deadline = time.monotonic() + self._limits.cut
        while True:
            said = [self._begin(peer, asked) for peer in peers]
            lives = dict(said[0].lives)
            if _is_sync(said[0].mode) or all(dict(reply.lives) == lives for reply in said):
                return said
            with self._changed:
                if self._closing or time.monotonic() > deadline:
                    raise DeadlineExceeded("the servers do not agree on who is in the fleet")
                self._changed.wait(_LOOK)

    def _manifest(
        self, number: int, parts: Sequence[Part], path: Path, base: tuple[int, Path] | None
    ) -> Manifest:
        files = tuple(part.file for part in parts)
        specs = merged_specs([part.tables for part in parts])
        cut = Cut(number, parts[0].mode, parts[0].round, parts[0].pushes)
        link = None if base is None else linked(base[1], path)
        return Manifest(specs, files, cut, link, self._states(cut))

    # -- workers -------------------------------------------------------------------------------

    def ready(self, number: int, worker: int, incarnation: int, reply: Reply) -> bool:
        """A worker has heard of the snapshot; the reply comes when all have. False: too late."""
        with self._changed:
            if number != self._number or self._members.get(worker) != incarnation:
                return False
            self._ready[worker] = reply
            self._changed.notify_all()
            at_once = self._round is not None
        if at_once:
            self._release_workers()
        return True

    def keep(self, number: int, worker: int, incarnation: int, state: bytes) -> None:
        """A worker brings what it keeps in the snapshot."""
        with self._changed:
            if number == 0 and self._keepers.get((worker, incarnation)):
                self._last[worker] = json.loads(state)
            if number == self._number and self._members.get(worker) == incarnation:
                self._kept[worker] = json.loads(state) if state else None
                self._changed.notify_all()

    def _tell_workers(self, number: int, said: Any) -> None:
        with self._changed:
            self._number, self._members = number, dict(said.lives)
            self._ready, self._kept = {}, {}
        coordinator = self._host.coordinator
        assert coordinator is not None
        with self._host.lock:
            coordinator.orders.snapshot = (number, coordinator.view)

    def _await_ready(self) -> None:
        """Unless rounds are cut: wait until all workers have heard of it, then let them mark at once."""
        deadline = time.monotonic() + self._limits.cut
        while self._round is None:
            with self._changed:
                missing = self._living() - set(self._ready)
                if not missing:
                    break
                if self._closing or time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"workers {sorted(missing)} have not heard of it in time"
                    )
                self._changed.wait(_LOOK)
        self._release_workers()

    def _living(self) -> set[int]:
        """Seats of the cut whose workers have not left since."""
        return set(self._members) - self._host.shard.rounds.left

    def _release_workers(self) -> None:
        with self._changed:
            ready, self._ready = self._ready, {}
        answer = snapshot_pb2.ReadyReply(mark=self._round is None, round=self._round or 0)
        for reply in ready.values():
            reply.answer(answer.SerializeToString())

    def _await_workers(self) -> None:
        """Wait until the workers of the cut have brought what they keep."""
        with self._changed:
            deadline = time.monotonic() + self._limits.worker
            while missing := self._keeping() - set(self._kept) - set(self._last):
                if self._closing or time.monotonic() > deadline:
                    raise DeadlineExceeded(f"it waits for what workers {sorted(missing)} keep")
                self._changed.wait(_LOOK)

    def _states(self, cut: Cut) -> dict[int, Any]:
        """By seat what its worker keeps as of the cut; of those that have left what they said then."""
        found: dict[int, Any] = {}
        for seat, steps in self._last.items():
            last = cut.round if self._round is not None else cut.pushes.get(seat, (0, 0))[1]
            until = [state for step, state in steps if step <= last]
            found |= {seat: until[-1]} if until else {}
        kept = {seat: state for seat, state in self._kept.items() if state is not None}
        return {**found, **kept}

    def _keeping(self) -> set[int]:
        """Those of them that have something to keep, or have not said so since server 0 has started."""
        coordinator = self._host.coordinator
        assert coordinator is not None
        return {
            seat
            for seat in self._living()
            if self._keepers.get((seat, self._members[seat]), (False, seat) in coordinator.beats)
        }

    def _end_orders(self) -> None:
        coordinator = self._host.coordinator
        assert coordinator is not None
        with self._host.lock:
            coordinator.orders.snapshot = None

    # -- servers -------------------------------------------------------------------------------

    def _peers(self) -> list[Peer]:
        unknown = [i for i, endpoint in enumerate(self.endpoints) if endpoint.endswith(":0")]
        if unknown or not self.endpoints:
            raise GaveWay(f"server 0 does not know yet where servers {unknown} listen")
        return [
            Peer(f"server {index} at {endpoint}", endpoint, self._access)
            for index, endpoint in enumerate(self.endpoints)
        ]

    def _begin(self, peer: Peer, asked: Any) -> Any:
        answer = peer.call("Snapshots/Begin", asked.SerializeToString(), self._limits.cut)
        return snapshot_pb2.BeginCutReply.FromString(answer)

    def _finish(self, peer: Peer, number: int, *, cut: bool) -> bytes:
        asked = snapshot_pb2.FinishRequest(number=number, cut=cut)
        seconds = self._limits.cut if cut else self._limits.file
        answer = peer.call("Snapshots/Finish", asked.SerializeToString(), seconds)
        return snapshot_pb2.FinishReply.FromString(answer).part

    def _settle(self, peers: Sequence[Peer], number: int, *, complete: bool) -> None:
        """Tell the servers how it ended. One that does not hear it learns it with the next one."""
        base = self._last_base[0] if self._last_base else 0
        asked = snapshot_pb2.SettleRequest(number=number, complete=complete, base=base)
        for peer in peers:
            try:
                peer.call("Snapshots/Settle", asked.SerializeToString(), self._limits.cut)
            except PsfleetError:
                continue

    # -- places --------------------------------------------------------------------------------

    def _next_number(self) -> int:
        """One that no server and no folder has seen."""
        there = [self._tried, self._host.shard.cuts.last]
        if self._folder is not None and self._folder.is_dir():
            there += [int(path.name[-6:]) for path in self._own()]
        self._tried = max(there) + 1
        return self._tried

    def _own_path(self, number: int) -> Path:
        if self._folder is None:
            raise CheckpointError("this job keeps no snapshots; say where the snapshot is to lie")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # for nobody but the job's user
        for left in self._folder.glob(".snapshot-*.partial"):  # of a process that died
            shutil.rmtree(left, ignore_errors=True)
        return self._folder / own_name(number)

    def _own(self) -> list[Path]:
        assert self._folder is not None
        return sorted(path for path in self._folder.glob("snapshot-??????") if path.is_dir())

    def _drop_old(self) -> None:
        """Remove all but the last few of the job's own snapshots, and what they build on."""
        own = self._own()
        needed = {folder for path in own[-self._keep :] for folder in _built_on(path)}
        for path in own:
            if path.absolute() not in needed:
                shutil.rmtree(path, ignore_errors=True)

    def _reach(self, point: str) -> None:
        if self._crashes is not None:
            self._crashes.reach(point)


def _built_on(path: Path) -> list[Path]:
    folder = path.absolute()
    found = [folder]
    while (base := read_manifest(folder).base) is not None:
        folder = (folder / base.path).resolve()
        found.append(folder)
    return found


def _multiple(number: int, every: int) -> int:
    """The first multiple of `every` from `number` on."""
    return -(-number // every) * every


def _is_sync(mode: int) -> bool:
    return mode in (0, 1)  # nobody has joined: nothing is under way


def _explained(error: BaseException, number: int) -> BaseException:
    if isinstance(error, PsfleetError):
        return type(error)(f"snapshot {number} was not taken: {error}")
    if isinstance(error, OSError):
        return CheckpointError(f"snapshot {number} was not taken: {error}")
    return error

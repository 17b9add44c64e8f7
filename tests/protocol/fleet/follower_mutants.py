"""What followers rest on, and what their cuts are without it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from psfleet.core.engine.shard.follower_changes import ChangeLog
from psfleet.core.net.table_messages import NO_IDS
from psfleet.core.net.v1.follower_pb2 import ChangesReply, ChangesRequest
from psfleet.serving import follower_state_machine
from psfleet.serving.follower_state_machine import AskChanges, Filling, Following, WeightCopy
from psfleet.serving.row_source import ServedRows
from psfleet_server.engine.follower_requests import Followers
from psfleet_server.snapshots.snapshot_coordinator import SnapshotUnderWay
from tests.protocol.fleet.calls import Response
from tests.protocol.fleet.followed import Followed
from tests.protocol.fleet.follower import Changes
from tests.protocol.fleet.mutants import instead, replaced, without
from tests.protocol.fleet.primary import Primary
from tests.protocol.scheduler import Instruction, Send

_LATE = 5  # events


@instead(
    (Primary, "hold"),
    "F1: changes are sent when the log has what they rest on",
    "async followers@11",
    "sync followers@52",
)
def _send_before_the_log(hold: Any, primary: Primary, out: list[Instruction]) -> list[Instruction]:
    """Logs are written a few events late, and all answers wait for that but those of followers."""
    late: deque[list[Instruction]] = primary.__dict__.setdefault("late", deque())
    ahead, rest = _apart(out)
    late.append(hold(primary, rest))
    return [*(late.popleft() if len(late) > _LATE else []), *ahead]


@instead(
    (Primary, "hold"),
    "F2: changes are sent when the standby has what they rest on",
    "sync standbys followers@21",
    "async standbys followers@5",
)
def _send_before_the_standby(
    hold: Any, primary: Primary, out: list[Instruction]
) -> list[Instruction]:
    ahead, rest = _apart(out)
    return [*hold(primary, rest), *ahead]


def _apart(out: list[Instruction]) -> tuple[list[Instruction], list[Instruction]]:
    """The answers to followers, and all else."""
    ahead = [one for one in out if _is_changes(one)]
    return ahead, [one for one in out if not _is_changes(one)]


def _is_changes(one: Instruction) -> bool:
    message = one.message if isinstance(one, Send) else None
    return isinstance(message, Response) and isinstance(message.content, Changes)


@without("F3: ids whose rows have gone are named", "sync followers@0", "async followers@5")
def _forget_removed(patch: pytest.MonkeyPatch) -> None:
    change = Followers._change
    patch.setattr(
        Followers, "_change", lambda *given: replace(change(*given), removed=NO_IDS.copy())
    )


@without(
    "F4: changes after a question raise the version", "sync followers@24", "async followers@98"
)
def _keep_the_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChangeLog, "version", property(lambda log: log._floor + len(log._intervals)))


without("F5: a cut is of one round", "sync followers@6", "sync standbys followers@23")(
    lambda patch: patch.setattr(follower_state_machine, "_are_one_cut", lambda replies: True)
)


@instead(
    (Followers, "_changes"),
    "F6: versions of another server process mean nothing",
    "async standbys followers@14",
    "sync followers@26",
    "async followers@11",
)
def _take_any_process(changes: Any, followers: Followers, request: ChangesRequest) -> Any:
    other = ChangesRequest()
    other.CopyFrom(request)
    other.boot = followers._boot if request.boot else 0
    return changes(followers, other)


@instead(
    (ChangeLog, "since"),
    "F7: who asks for changes that are kept no more is told so",
    "async followers@98",
)
def _hide_gaps(since: Any, log: ChangeLog, version: int, tables: Any) -> Any:
    return since(log, max(version, log._floor) if version and log.is_kept else version, tables)


@instead(
    (WeightCopy, "fill"), "F8: changes since the begin of a copy make it exact", "async followers@0"
)
def _begin_behind_the_pages(
    fill: Any, copy: WeightCopy, replies: Sequence[ChangesReply]
) -> Filling:
    yield from fill(copy, replies)
    for reply in (yield AskChanges([ChangesRequest(parts=1) for _ in replies])):
        copy._reached[reply.server] = reply.boot, reply.version


@without("F9: a snapshot is known by its own checksum", "async snapshots followers@14")
def _take_any_snapshot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Followed, "_number_of", lambda followed, sha: max(followed._server.parts, default=0)
    )


without("F10: pushes of incarnations that are over count on", "async followers@11")(
    replaced(Following, "_count", lambda way, cut: sum(n for own in cut for _, n in own.values()))
)


@instead(
    (WeightCopy, "begin"),
    "F11: what has changed since a snapshot is applied to it",
    "async snapshots followers@122",
)
def _take_the_snapshot_alone(begin: Any, copy: WeightCopy, rows: ServedRows) -> None:
    begin(copy, rows)

    def reach(replies: Sequence[ChangesReply]) -> int:
        copy._reached |= {reply.server: (reply.boot, reply.version) for reply in replies}
        del copy.__dict__["apply"]
        return 0

    copy.__dict__["apply"] = reach


@instead(
    (SnapshotUnderWay, "states_at_cut"),
    "R12: a number may have been begun before: only states as of the cut count",
    "async snapshots followers@228",
)
def _take_states_of_earlier_attempts(_: Any, now: SnapshotUnderWay) -> dict[int, Any]:
    return {seat: state for (seat, _), state in now.states.items()}

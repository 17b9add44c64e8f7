"""What must hold at the end of a run, from what the shards hold and what their logs say."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from psfleet.core.engine.kernels.dedup import merge_pushes
from psfleet.core.engine.kernels.id_routing import owned_by
from psfleet.core.engine.round_plan import PlanEntry, RoundPlan
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.engine.shard.events import CloseRound, Join, Push
from psfleet.core.engine.shard.membership_view import InstallView, SeatView
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet_server.coordinator.data_dispatch import TornStep
from tests.protocol.fleet.calls import Published, Taken
from tests.protocol.fleet.job import (
    COUNTS,
    IDS,
    ROWS,
    Ids,
    Job,
    Rows,
    count_ids,
    own_sample,
    places,
    slopes,
)
from tests.protocol.fleet.pushes import Pushes
from tests.protocol.scheduler import Broken, Disk

Round = dict[int, Ids]
"""Of a closed round: by seat its samples."""
History = Sequence[object]


def check(
    job: Job,
    shards: Sequence[Shard],
    again: Sequence[Shard],
    histories: Sequence[History],
    torn: Sequence[TornStep],
    pushes: Pushes,
) -> None:
    """Raise Broken if a promise is broken.

    Args:
        again: What the logs make of a shard.
        histories: By server the records of its log.
        torn: What the coordinator has declared torn.
    """
    for server, (shard, other) in enumerate(zip(shards, again, strict=True)):
        if _content(shard) != _content(other):
            raise Broken(f"the log of server {server} does not give what it holds")
    if len({shard.rounds.closed for shard in shards}) > 1 and job.phases[-1].mode == "sync":
        raise Broken("servers stand at different rounds")
    if job.mode_requests:
        _check_ways(job, shards, histories, torn, pushes)
    elif not job.deals:
        _check_own(job, shards)
    elif job.phases[0].mode == "sync":
        _check_rounds(job, shards, histories, pushes)
    else:
        _check_leases(job, shards, histories, torn, pushes)


def rows_of(shards: Sequence[Shard]) -> Rows:
    """The weights of all of them."""
    rows = np.zeros((len(IDS), 2), np.float32)
    for server, shard in enumerate(shards):
        mine = owned_by(IDS, server, len(shards))
        [rows[mine]] = shard.tables.read([Read(ROWS.key, IDS[mine])])
    return rows


def counts_of(shard: Shard, samples: Ids) -> list[float]:
    """How often each of these samples was used, in parts of a round."""
    [rows] = shard.tables.read([Read(COUNTS.key, count_ids(samples, shard.index))])
    return [round(float(value), 5) for value in rows[:, 0]]


def _content(shard: Shard) -> bytes:
    reads = [Read(ROWS.key, IDS), Read(COUNTS.key, count_ids(np.arange(5000), shard.index))]
    return b"".join(rows.tobytes() for rows in shard.tables.read(reads))


def check_weights(shards: Sequence[Shard], rounds: Iterable[Round]) -> None:
    if rows_of(shards).tobytes() != plain_rows(rounds).tobytes():
        raise Broken("the weights are not those of these rounds in one table without faults")


def plain_rows(rounds: Iterable[Round]) -> Rows:
    """The weights after these rounds: one table, no servers, no faults."""
    *_, last = plain_states(rounds)
    return last


def plain_states(rounds: Iterable[Round]) -> Iterator[Rows]:
    """Likewise, before the first round and after each."""
    table = SparseTable(ROWS)
    rows = np.zeros((len(IDS), 2), np.float32)
    table.pull_into(IDS, rows)
    yield rows
    for members in rounds:
        parts = [(IDS, slopes(rows, members[seat])) for seat in sorted(members)]
        if parts:
            table.push(*merge_pushes(parts, 1.0 / len(parts)), 0.1)
        rows = np.zeros((len(IDS), 2), np.float32)
        table.pull_into(IDS, rows)
        yield rows


def _check_counts(shards: Sequence[Shard], wanted: Mapping[int, float]) -> None:
    """Every sample is there as often as wanted, on every server."""
    samples = np.array(sorted(wanted), np.int64)
    expected = [wanted[sample] for sample in samples]
    for server, shard in enumerate(shards):
        counts = counts_of(shard, samples)
        if not np.allclose(counts, expected, atol=1e-5):
            raise Broken(f"server {server} counts {counts} where {expected} were used")


def check_snapshot(job: Job, snapshot: Published, disks: Sequence[Disk], pushes: Pushes) -> None:
    """Raise Broken unless a complete snapshot is one cut through all servers, all before it is in it, its
    files are on the disks, and the states of workers are as of the cut."""
    sync, parts = job.phases[0].mode == "sync", snapshot.parts
    files = [disk.files.get(snapshot.number) for disk in disks]
    if files != list(parts):
        raise Broken(f"the files of snapshot {snapshot.number} are {files}, it says {parts}")
    cuts = {seat: last for seat, (_, last) in parts[0].pushes.items()}
    late = {
        seat: at
        for seat, at in snapshot.states.items()
        if at != (parts[0].round if sync else cuts[seat])
    }
    if late:
        raise Broken(f"states of snapshot {snapshot.number} are as of {late}, it is cut at {cuts}")
    left = snapshot.left | parts[0].left
    if missing := parts[0].pushes.keys() - left - snapshot.states.keys():
        raise Broken(f"snapshot {snapshot.number} lacks the states of workers {missing}")
    if len({part.round if sync else tuple(_last_pushes(part, parts)) for part in parts}) > 1:
        raise Broken(f"servers are cut at different places: {parts}")
    if sync:
        _check_cut_rows(job, parts)
        return
    for server, part in enumerate(parts):
        inside = _samples(
            pushes,
            {(seat, incarnation): (0, last) for seat, (incarnation, last) in part.pushes.items()},
            server,
        )
        if any(round(part.counts.get(sample, 0.0), 5) != 1 for sample in inside):
            raise Broken(f"a push before the cut is missing: {part}")
        last = {(seat, incarnation): number for seat, (incarnation, number) in part.pushes.items()}
        behind = [
            int(sample)
            for (seat, incarnation, number), samples in pushes.items()
            if (seat, incarnation) in last and number > last[seat, incarnation]
            for sample in samples
        ]
        if any(part.counts.get(sample) for sample in behind):
            raise Broken(f"a push behind the cut is in it: {part}")


def _last_pushes(part: Taken, parts: Sequence[Taken]) -> Iterator[int]:
    """The last push of each seat's newest incarnation, as far as one server knows of that incarnation."""
    for seat in sorted({seat for each in parts for seat in each.pushes}):
        newest = max(each.pushes.get(seat, (0, 0))[0] for each in parts)
        incarnation, last = part.pushes.get(seat, (0, 0))
        yield last if incarnation == newest else 0


def _check_cut_rows(job: Job, parts: Sequence[Taken]) -> None:
    rounds = _undisturbed(job)[: parts[0].round]
    expected = plain_rows(rounds)
    rows = {key: row for part in parts for key, row in part.rows[ROWS.name].items()}
    if len(rows) != (len(IDS) if rounds else 0):
        raise Broken(f"a snapshot after round {len(rounds)} has {len(rows)} rows")
    if any(row != expected[key].tobytes() for key, row in rows.items()):
        raise Broken(f"a snapshot is not the state after round {len(rounds)}")


# -- data of the workers' own ---------------------------------------------------------------------


def _check_own(job: Job, shards: Sequence[Shard]) -> None:
    """Every step of every worker is there once; with rounds alone: the bits of a run without faults."""
    rounds: list[Round] = []
    wanted: dict[int, float] = {}
    total = [0] * job.workers
    for phase in job.phases:
        assert phase.steps is not None
        for step in range(max(phase.steps)):
            members: Round = {}
            for worker in [w for w, steps in enumerate(phase.steps) if steps > step]:
                total[worker] += 1
                members[worker] = own_sample(worker, total[worker])
            rounds.append(members)
            share = 1.0 / len(members) if phase.mode == "sync" else 1.0
            wanted |= {int(samples[0]): share for samples in members.values()}
    _check_counts(shards, wanted)
    if {phase.mode for phase in job.phases} == {"sync"}:
        check_weights(shards, rounds)


# -- data that the fleet hands out ------------------------------------------------------------------


def _check_rounds(
    job: Job, shards: Sequence[Shard], histories: Sequence[History], pushes: Pushes
) -> None:
    """All servers close the same rounds, and every sample is in exactly one of them."""
    rounds = rounds_of(job, histories, pushes)
    used = Counter(
        int(sample) for members in rounds for samples in members.values() for sample in samples
    )
    if used != Counter(range(job.samples)):
        raise Broken(f"not every sample is in one round: {used}")
    check_weights(shards, rounds)
    _check_counts(shards, shares_of(rounds))


def shares_of(rounds: Iterable[Round]) -> dict[int, float]:
    """The share of each sample in its round, which is the mean of its members."""
    return {
        int(sample): 1.0 / len(members)
        for members in rounds
        for samples in members.values()
        for sample in samples
    }


def rounds_of(job: Job, histories: Sequence[History], pushes: Pushes) -> list[Round]:
    """The rounds that all servers have closed."""
    if not job.removal:
        return _undisturbed(job)
    closed = [_closed(history) for history in histories]
    longest = max(closed, key=len)
    if any(own != longest[: len(own)] or len(longest) - len(own) > 1 for own in closed):
        raise Broken(f"servers close different rounds: {closed}")
    return [
        {seat: pushes[seat, incarnation, number] for seat, incarnation in members}
        for number, members in enumerate(longest, 1)
    ]


def check_cuts(
    job: Job, cuts: Sequence[tuple[int, Rows]], histories: Sequence[History], pushes: Pushes
) -> None:
    """Raise Broken unless the weights of followers at each round are those of training after it."""
    states = [*plain_states(rounds_of(job, histories, pushes))]
    for number, rows in cuts:  # rounds without samples come last
        if rows.tobytes() != states[min(number, len(states) - 1)].tobytes():
            raise Broken(f"a cut of round {number} is not the training after it")


def _undisturbed(job: Job) -> list[Round]:
    """The rounds of a run in which nobody dies."""
    seats = tuple(range(job.workers))
    stream = tuple((epoch * job.size, (epoch + 1) * job.size) for epoch in range(job.epochs))
    plan = RoundPlan(job.size, job.batch, (PlanEntry(1, seats, stream),))
    return [
        {seat: places(plan.share(seat, number)) for seat in seats}
        for number in range(1, plan.last() + 1)
    ]


def _closed(history: History) -> list[tuple[tuple[int, int], ...]]:
    """The rounds that a server has closed, as seats and incarnations, from its log alone."""
    held: dict[int, Push] = {}
    closed: list[tuple[tuple[int, int], ...]] = []
    for record in history:
        match record:
            case Push():
                held[record.worker] = record
            case InstallView(_, seats):
                held = {seat: push for seat, push in held.items() if _counts(seats, push)}
            case CloseRound(number, members):
                if number != len(closed) + 1 or sorted(held) != list(members):
                    raise Broken(f"round {number} of {members} closes with {held}")
                closed.append(tuple((seat, held[seat].incarnation) for seat in members))
                held = {}
    return closed


def _counts(seats: Mapping[int, SeatView], push: Push) -> bool:
    incarnations = seats[push.worker].incarnations if push.worker in seats else ()
    return any(
        incarnation.incarnation == push.incarnation and incarnation.is_member_in(push.sequence)
        for incarnation in incarnations
    )


def _check_leases(
    job: Job,
    shards: Sequence[Shard],
    histories: Sequence[History],
    torn: Sequence[TornStep],
    pushes: Pushes,
) -> None:
    """On every server pushes 1, 2, 3, ... of each incarnation as far as they were sent to it, no sample
    twice, and missing are only those of steps that are declared torn."""
    tops = [_tops(history, pushes, server) for server, history in enumerate(histories)]
    highest = {
        incarnation: max(top[incarnation] for top in tops) for top in tops for incarnation in top
    }
    for server, top in enumerate(tops):
        for incarnation, last in highest.items():
            while (
                top[incarnation] < last
                and server not in pushes.sent[*incarnation, top[incarnation] + 1]
            ):
                top[incarnation] += 1
    declared = {(step.worker, step.incarnation) for step in torn}
    incarnations = {incarnation for top in tops for incarnation in top}
    if {
        incarnation for incarnation in incarnations if len({top[incarnation] for top in tops}) > 1
    } != declared:
        raise Broken(f"servers differ in {tops}, declared torn are {declared}")
    for server, top in enumerate(tops):
        used = Counter(
            _samples(pushes, {incarnation: (0, last) for incarnation, last in top.items()}, server)
        )
        if used and max(used.values()) > 1:
            raise Broken(f"server {server} has used samples twice: {used}")
        furthest = {
            incarnation: (top[incarnation], highest[incarnation]) for incarnation in declared
        }
        everything = _samples(pushes, {incarnation: (0, last) for incarnation, last in top.items()})
        lacking = {*_samples(pushes, furthest), *everything} - set(used)
        if set(range(job.samples)) - set(used) != lacking:
            raise Broken(f"server {server} lacks more than torn steps: {used}")
        _check_counts(
            [shards[server]], {sample: float(used[sample]) for sample in range(job.samples)}
        )


def _check_ways(
    job: Job,
    shards: Sequence[Shard],
    histories: Sequence[History],
    torn: Sequence[TornStep],
    pushes: Pushes,
) -> None:
    """Rounds and leases follow each other: on every server no sample is used twice, and missing are only
    those of steps that are declared torn."""
    every = [in_effect(job, history) for history in histories]
    declared = {(step.worker, step.incarnation) for step in torn}
    known = set().union(*every)
    # What a push after it on another server has passed is torn, too, even if nobody has it.
    highest = Counter[tuple[int, int]]()
    for seat, incarnation, number in known:
        highest[seat, incarnation] = max(number, highest[seat, incarnation])
    lost = {push for push in pushes if push[:2] in declared and push[2] < highest[push[:2]]}
    for server, own in enumerate(every):
        used = Counter(int(sample) for push in own for sample in pushes[push])
        if used and max(used.values()) > 1:
            raise Broken(f"server {server} has used samples twice: {used}")
        due = {push for push in known if server in pushes.sent[push]}
        if not {push[:2] for push in due - own} <= declared:
            raise Broken(f"server {server} lacks {known - own}, declared torn are {declared}")
        lacking = {int(sample) for push in (known | lost) - own for sample in pushes[push]}
        if set(range(job.samples)) - set(used) != lacking:
            raise Broken(f"server {server} lacks more than torn steps: {used}")


def in_effect(job: Job, history: History) -> set[tuple[int, int, int]]:
    """The pushes (worker, incarnation, sequence) that a server's log says are applied."""
    found: set[tuple[int, int, int]] = set()
    held: dict[int, Push] = {}
    mode: str = job.phases[0].mode
    switches = 0
    for record in history:
        match record:
            case Join() if record.switch > switches:
                mode, switches = record.mode.name, record.switch
            case Push() if mode == "sync":
                held[record.worker] = record
            case Push():
                found.add((record.worker, record.incarnation, record.sequence))
            case InstallView(_, seats):
                held = {seat: push for seat, push in held.items() if _counts(seats, push)}
            case CloseRound():
                found |= {(p.worker, p.incarnation, p.sequence) for p in held.values()}
                held = {}
    return found


def _tops(history: History, pushes: Pushes, server: int) -> Counter[tuple[int, int]]:
    """By incarnation its last push on a server."""
    top: Counter[tuple[int, int]] = Counter()
    for record in history:
        if isinstance(record, Push):
            incarnation = (record.worker, record.incarnation)
            between = range(top[incarnation] + 1, record.sequence)
            if record.sequence <= top[incarnation] or any(
                server in pushes.sent[*incarnation, number] for number in between
            ):
                raise Broken(
                    f"push {record.sequence} of {incarnation} comes after {top[incarnation]}"
                )
            top[incarnation] = record.sequence
    return top


def _samples(
    pushes: Pushes, between: Mapping[tuple[int, int], tuple[int, int]], server: int | None = None
) -> list[int]:
    """The samples of each incarnation's pushes after the first number up to the second; those sent to one
    server."""
    return [
        int(sample)
        for (seat, incarnation), (low, high) in between.items()
        for number in range(low + 1, high + 1)
        if server is None or server in pushes.sent[seat, incarnation, number]
        for sample in pushes[seat, incarnation, number]
    ]

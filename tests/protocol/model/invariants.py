"""What must hold when a run of the model has ended."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.protocol.model.decisions import Decisions
from tests.protocol.model.settings import Settings
from tests.protocol.model.values import Closed, Core, Key, Plan, Push, Stretch, digest, samples_of
from tests.protocol.scheduler import Broken

__all__ = ["Acknowledged", "Outcome", "check"]


@dataclass(frozen=True)
class Acknowledged:
    """An answer that was sent: a push is applied (or, `is_push` False, a round is closed)."""

    is_push: bool
    shard: int
    key: Key
    number: int
    generation: int


@dataclass(frozen=True)
class Outcome:
    """The end of a run. `files`: of each shard the snapshots on its servers' disks."""

    decisions: Decisions
    cores: list[Core]
    files: list[dict[Any, Any]]
    acknowledged: list[Acknowledged]


def check(settings: Settings, outcome: Outcome) -> None:
    """Check every promise of the modes that the run has used.

    Raises:
        Broken: One does not hold; the text says which, and where.
    """
    rounds = [[x for x in core.history if isinstance(x, Closed)] for core in outcome.cores]
    pushes = [[x for x in core.history if isinstance(x, Push)] for core in outcome.cores]
    _check_rounds(rounds)
    _check_acknowledged_rounds(outcome, rounds[0], settings.switch)
    used = [sample for closed in rounds[0] for sample in closed.samples]
    if settings.mode == "sync" and not settings.switch:
        if sorted(used) != list(range(settings.samples)):
            raise Broken(f"samples are not used exactly once: {sorted(used)}")
        _check_bits(settings, outcome, rounds[0])
    else:
        if len(set(used)) != len(used):
            raise Broken("a sample is in two rounds")
        _check_sequences(settings, outcome, pushes, set(used))
        _check_cuts(settings, outcome)


# -- rounds -------------------------------------------------------------------------------------


def _check_rounds(rounds: list[list[Closed]]) -> None:
    if any(found != rounds[0] for found in rounds):
        raise Broken("servers disagree on rounds or their members")
    if [closed.round for closed in rounds[0]] != list(range(1, len(rounds[0]) + 1)):
        raise Broken("rounds are not contiguous")


def _check_acknowledged_rounds(outcome: Outcome, rounds: list[Closed], every: bool) -> None:
    have = {(closed.round, key) for closed in rounds for key in closed.members}
    for said in outcome.acknowledged:
        lasts = every or said.generation == outcome.decisions.generation
        if not said.is_push and lasts and (said.number, said.key) not in have:
            raise Broken(f"an acknowledged round is lost: {said}")


def _replay(
    settings: Settings, plan: Plan, rounds: Iterable[tuple[int, list[str]]]
) -> Iterator[tuple[int, dict[int, int]]]:
    """The weights after each round: a plain loop that knows no servers."""
    weights = Core.fresh(range(settings.blocks)).blocks
    for number, seats in rounds:
        version = digest(tuple(sorted(weights.items())))
        samples = {seat: samples_of(plan, number, seat, settings.batch) for seat in seats}
        if any(samples.values()):
            for block in weights:
                terms = tuple(
                    (seat, digest(version, seat, number, samples[seat], block))
                    for seat in sorted(seats)
                )
                weights[block] = digest(weights[block], terms)
        yield number, weights


def _check_bits(settings: Settings, outcome: Outcome, rounds: list[Closed]) -> None:
    decisions = outcome.decisions
    final = {block: value for core in outcome.cores for block, value in core.blocks.items()}
    agreed = [(closed.round, [seat for seat, _ in closed.members]) for closed in rounds]
    weights = Core.fresh(range(settings.blocks)).blocks
    for number, weights in _replay(settings, decisions.plan, agreed):
        for name, snapshot in decisions.snapshots.items():
            if (snapshot.closed, snapshot.generation) == (number, decisions.generation):
                _check_file(settings, outcome, name, weights)
    if weights != final:
        raise Broken("the weights are not those of the agreed rounds")
    if not settings.removal:
        seats = sorted(settings.seats)
        count = -(-settings.samples // (settings.batch * len(seats)))
        plan = (Stretch(1, tuple(seats), tuple(range(settings.samples))),)
        *_, (_, weights) = _replay(settings, plan, [(n, seats) for n in range(1, count + 1)])
        if weights != final:
            raise Broken("the weights are not those of the run without faults")


def _check_file(
    settings: Settings, outcome: Outcome, name: Any, weights: Mapping[int, int]
) -> None:
    found = {
        block: value
        for files in outcome.files
        if name in files
        for block, value in files[name].blocks.items()
    }
    if len(found) == settings.blocks and found != weights:
        raise Broken(f"snapshot {name} is not the state after its round")


# -- pushes in sequence -------------------------------------------------------------------------


def _check_sequences(
    settings: Settings, outcome: Outcome, pushes: list[list[Push]], in_rounds: set[int]
) -> None:
    decisions = outcome.decisions
    lasts = [_lasts(shard, history) for shard, history in enumerate(pushes)]
    for said in outcome.acknowledged:
        lasts_on = said.is_push and said.generation == decisions.generation
        if lasts_on and lasts[said.shard].get(said.key, 0) < said.number:
            raise Broken(f"an acknowledged push is lost: {said}")
    every = {key for last in lasts for key in last}
    torn = {key for key in every if len({last.get(key, 0) for last in lasts}) > 1}
    if not torn <= set(decisions.torn):
        raise Broken(f"torn steps {torn} are not declared: {decisions.torn}")
    missing = _missing(pushes, lasts, torn)
    for shard, history in enumerate(pushes):
        used = [sample for push in history for sample in push.samples]
        if len(used) != len(set(used)) or set(used) & in_rounds:
            raise Broken(f"a sample is used twice on shard {shard}")
        if set(range(settings.samples)) - set(used) - in_rounds != missing[shard]:
            raise Broken(f"shard {shard} misses samples that are not of a torn step")


def _lasts(shard: int, history: Sequence[Push]) -> dict[Key, int]:
    """The last push of each life; none may be missing or doubled."""
    lasts: dict[Key, int] = {}
    for push in history:
        key = (push.seat, push.incarnation)
        if push.sequence != lasts.get(key, 0) + 1:
            raise Broken(f"shard {shard}: push {push.sequence} of {key} after {lasts.get(key, 0)}")
        lasts[key] = push.sequence
    return lasts


def _missing(
    pushes: list[list[Push]], lasts: list[dict[Key, int]], torn: set[Key]
) -> list[set[int]]:
    """Of each shard the samples of torn steps that it does not have."""
    missing: list[set[int]] = [set() for _ in pushes]
    for key in torn:
        samples = {
            push.sequence: push.samples
            for history in pushes
            for push in history
            if (push.seat, push.incarnation) == key
        }
        for shard, last in enumerate(lasts):
            for number, used in samples.items():
                if number > last.get(key, 0):
                    missing[shard] |= set(used)
    return missing


def _check_cuts(settings: Settings, outcome: Outcome) -> None:
    for name, snapshot in outcome.decisions.snapshots.items():
        if name[0] == "r":
            continue
        cores: list[Core] = [files[name] for files in outcome.files if name in files]
        if len(cores) < settings.shards:
            if settings.standby:
                continue
            raise Broken(f"a file of the complete snapshot {name} is missing")
        for key in {key for core in cores for key in core.sequences}:
            stands = {core.sequences.get(key, (0, None)) for core in cores}
            is_live = snapshot.live.get(key[0]) == key[1]
            if len(stands) > 1 and (key not in snapshot.torn or is_live):
                raise Broken(f"snapshot {name} cuts {key} at {stands}")
        _check_causes(name, snapshot.generation, cores)


def _check_causes(name: Any, generation: int, cores: list[Core]) -> None:
    """No push inside was computed from values behind the cut of another shard."""
    for core in cores:
        for push in core.history:
            if not isinstance(push, Push):
                continue
            for shard, (seen_in, length) in push.seen.items():
                if seen_in == generation and length > len(cores[shard].history):
                    raise Broken(f"snapshot {name} holds a push that saw shard {shard} behind it")

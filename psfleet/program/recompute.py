"""Recompute: drop activations between checkpoints and compute them again in the backward pass.

The forward records are cut into segments. A dropped segment saves nothing in the forward pass; what
later segments take from it stays. The backward pass computes it again, with the same operations on
the same values, and goes back through it. So gradients are the same bits, dropout masks included.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from psfleet.errors import UsageError
from psfleet.program.backward import Automatic, Backward
from psfleet.program.gradient import ancestors
from psfleet.program.operation import Record
from psfleet.program.plan import BackwardPlan, ExecutionPlan, last_uses
from psfleet.program.recompute_cuts import choose_cuts, owner_of, profile
from psfleet.program.run import ProgramRun
from psfleet.program.variable import Variable

__all__ = ["ActivationMeter", "RecomputePlan", "RecomputingRun", "Segment"]


@dataclass
class Segment:
    """Records that are run, dropped and replayed together.

    Attributes:
        records: In the forward pass.
        dropped: Whether the forward saves nothing.
        replay: Of those, the ones to run again.
        active: Of those, the ones that gradients go through.
        own: Variables made here that stay for other segments.
        releases: By record of the replay, values that nobody needs after it.
    """

    records: list[Record]
    dropped: bool
    replay: list[Record]
    active: list[Record]
    own: list[Variable]
    releases: dict[Record, list[Variable]]


@dataclass
class RecomputePlan:
    """The segments in forward order, and the variables that stay for replays."""

    segments: list[Segment]
    stay: set[Variable]


class RecomputingRun(ProgramRun):
    """A run that recomputes."""

    def main(self) -> None:
        """Run the segments forward; a dropped one saves nothing."""
        if self.plan.recompute is None:
            self.plan.recompute = make_recompute_plan(self)
        plan: RecomputePlan = self.plan.recompute
        for segment in plan.segments:
            for record in segment.records:
                needs = () if segment.dropped else self.plan.needs.get(record, ())
                self.step(record, needs)
                for variable in self.plan.releases.get(record, ()):
                    if variable not in plan.stay:
                        self.values.pop(variable, None)

    def _backward(self, plan: BackwardPlan, keep: bool) -> None:
        sweep = self.seeded(plan)
        recompute: RecomputePlan = self.plan.recompute
        for segment in reversed(recompute.segments):
            # Everybody who took these has gone back already; a replay makes them anew.
            for variable in segment.own:
                if variable not in self.plan.kept:
                    self.values.pop(variable, None)
            if segment.dropped:
                self._replay(segment)
            sweep.run(segment.active, self.contexts)
        self.take_gradients(plan, sweep)

    def _replay(self, segment: Segment) -> None:
        for record in segment.replay:
            self.step(record, self.plan.needs.get(record, ()))
            for variable in segment.releases.get(record, ()):
                self.values.pop(variable, None)


def make_recompute_plan(run: ProgramRun) -> RecomputePlan:
    """Cut the plan's forward records at the checkpoints, or where a measurement says."""
    plan = run.plan
    if len(plan.backwards) != 1:
        raise UsageError(f"the program has {len(plan.backwards)} losses; recompute works with one")
    backward = plan.backwards[0]
    wanted = backward.backward.checkpoints
    if isinstance(wanted, Automatic):
        costs = profile(run)
        edges, drops = choose_cuts(costs, wanted.budget)
    else:
        edges = _edges(plan, backward.backward, wanted or [])
        drops = [True] * (len(edges) - 2) + [False]
    parts = [plan.forward[start:end] for start, end in pairwise(edges)]
    return _segmented(plan, backward, parts, drops)


def _edges(plan: ExecutionPlan, backward: Backward, checkpoints: Sequence[Variable]) -> list[int]:
    """Positions in the forward records behind the checkpoints, with both ends."""
    places = {record.output: i for i, record in enumerate(plan.forward)}
    used = ancestors([backward.loss])
    needed = {variable for record in used for variable in (record.output, *record.inputs)}
    strange = [v.name for v in checkpoints if v not in needed]
    if strange:
        raise UsageError(
            f"the loss {backward.loss.name!r} does not depend on the checkpoint {strange[0]!r}"
        )
    cuts = {places[v] + 1 for v in checkpoints if v in places}
    return sorted({0, *cuts, len(plan.forward)})


def _segmented(
    plan: ExecutionPlan,
    backward: BackwardPlan,
    parts: Sequence[list[Record]],
    drops: Sequence[bool],
) -> RecomputePlan:
    home = {record: i for i, part in enumerate(parts) for record in part}
    replays = [
        _replayed(part, backward) if dropped else []
        for part, dropped in zip(parts, drops, strict=True)
    ]
    stay = {
        v
        for i, replay in enumerate(replays)
        for record in replay
        for v in record.inputs
        if v.record is not None and home.get(v.record) != i
    }
    active = set(backward.records)
    segments = []
    for part, dropped, replay in zip(parts, drops, replays, strict=True):
        segments.append(
            Segment(
                part,
                dropped,
                replay,
                [record for record in part if record in active],
                [record.output for record in part if record.output in stay],
                last_uses(replay, plan.kept | _made_elsewhere(replay)),
            )
        )
    return RecomputePlan(segments, stay)


def _replayed(part: Sequence[Record], backward: BackwardPlan) -> list[Record]:
    """The records of a segment that gradients go through, and those that these need."""
    active = set(backward.records)
    needed = set(ancestors([record.output for record in part if record in active]))
    return [record for record in part if record in needed]


def _made_elsewhere(records: Sequence[Record]) -> set[Variable]:
    made = {record.output for record in records}
    return {v for record in records for v in record.inputs if v not in made}


class ActivationMeter:
    """Measures a run's peak of activation bytes: set it as `executor.meter`.

    Attributes:
        peak_bytes: The most that was alive at once of values and of what forwards have saved, without
            feeds, parameters and gradients. Memory shared by several arrays counts once.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0

    def measure(self, run: ProgramRun) -> None:
        """Look at what is alive now."""
        given = {id(owner_of(run.values[v])) for v in run.inputs if v in run.values}
        alive = {id(owner): owner.nbytes for owner in _owners(run) if id(owner) not in given}
        self.peak_bytes = max(self.peak_bytes, sum(alive.values()))


def _owners(run: ProgramRun) -> Iterable[Any]:
    for variable, value in run.values.items():
        if isinstance(value, np.ndarray) and variable not in run.inputs:
            yield owner_of(value)
    for context in run.contexts.values():
        for value in context.saved:
            if isinstance(value, np.ndarray):
                yield owner_of(value)

"""A plan cut into pieces, one for each chunk of a pipeline: what each computes, takes and gives.

Values go from the piece that makes them straight to each piece that computes with them. The gradient
of a value (or of a parameter) that several pieces use goes back from the last of them to the one
before, and so on: each adds its part. So it is summed in the order in which the whole program's
backward pass would have summed it, and comes out in the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from psfleet.errors import UsageError
from psfleet.parameters.parameter import Parameter
from psfleet.program.backward import Backward
from psfleet.program.gradient import ancestors
from psfleet.program.operation import Record
from psfleet.program.plan import BackwardPlan, ExecutionPlan, last_uses
from psfleet.program.variable import Variable

__all__ = ["ChunkPlan", "cut_plan"]


@dataclass(eq=False)
class ChunkPlan:
    """The part of a plan that belongs to one chunk.

    Attributes:
        plan: Its forward records, its part of the backward pass (none if no gradient goes through
            it) and what may be released when.
        early: Records that compute ids of its lookups: every piece runs them for itself.
        lookups: Its sparse parameters with the variables of their ids.
        dense: Leaves of its dense parameters.
        takes: By variable of another piece that it computes with, that piece.
        gives: By own variable that others compute with, those pieces.
        next_user: By variable, the piece that the gradient so far comes from.
        last_user: By variable, the piece that its gradient, with this piece's part, goes to.
        owned: Leaves whose whole gradient comes together here.
    """

    plan: ExecutionPlan
    early: list[Record]
    lookups: list[tuple[Parameter, Variable]]
    dense: list[Variable]
    takes: dict[Variable, int] = field(default_factory=dict)
    gives: dict[Variable, list[int]] = field(default_factory=dict)
    next_user: dict[Variable, int] = field(default_factory=dict)
    last_user: dict[Variable, int] = field(default_factory=dict)
    owned: list[Variable] = field(default_factory=list)


def cut_plan(plan: ExecutionPlan, parts: Sequence[Sequence[Record]]) -> list[ChunkPlan]:
    """The pieces of a plan.

    Args:
        plan: With one backward pass.
        parts: Records of the loss by chunk, in forward order. What else the plan computes goes to
            the first chunk that has all it needs.

    Raises:
        UsageError: The program has several losses, or computes with gradients.
    """
    if len(plan.backwards) != 1:
        raise UsageError(f"the program has {len(plan.backwards)} losses; a pipeline works with one")
    if plan.late:
        raise UsageError(
            f"{plan.late[0].output.name!r} is computed from gradients; "
            "a pipeline can only fetch them"
        )
    [backward] = plan.backwards
    home = _homes(plan, parts)
    records = [[r for r in plan.forward if home[r] == i] for i in range(len(parts))]
    pieces = [_piece(plan, backward, own) for own in records]
    _connect_values(pieces, records, home)
    _connect_gradients(pieces, backward.backward, home)
    for piece in pieces:
        piece.plan.kept = {v for v in plan.kept if v.record in set(piece.plan.forward)}
        piece.plan.kept |= set(piece.gives)
        piece.plan.releases = last_uses(piece.plan.forward, piece.plan.kept)
    return pieces


def _homes(plan: ExecutionPlan, parts: Sequence[Sequence[Record]]) -> dict[Record, int]:
    home = {record: i for i, part in enumerate(parts) for record in part}
    for record in plan.forward:
        if record not in home:
            home[record] = max(
                (home[v.record] for v in record.inputs if v.record in home), default=0
            )
    return home


def _piece(plan: ExecutionPlan, backward: BackwardPlan, records: list[Record]) -> ChunkPlan:
    own = set(records)
    active = [record for record in backward.records if record in own]
    needs = {record: backward.needs[record] for record in active}
    used = dict.fromkeys(v for record in records for v in record.inputs)
    backwards = [BackwardPlan(backward.backward, active, needs)] if active else []
    early = set(plan.early)
    lookups = {
        (each.parameter.name, each.inputs[0]): (each.parameter, each.inputs[0])
        for each in plan.lookups
        if each.record in own
    }
    return ChunkPlan(
        ExecutionPlan(constants=plan.constants, forward=records, backwards=backwards, needs=needs),
        [record for record in ancestors(used) if record in early],
        [*lookups.values()],
        [v for v in plan.dense if v in used],
    )


def _connect_values(
    pieces: list[ChunkPlan], records: list[list[Record]], home: dict[Record, int]
) -> None:
    for user, own in enumerate(records):
        for variable in dict.fromkeys(v for record in own for v in record.inputs):
            maker = home.get(variable.record) if variable.record is not None else None
            if maker is not None and maker != user:
                pieces[user].takes[variable] = maker
                pieces[maker].gives.setdefault(variable, []).append(user)


def _connect_gradients(
    pieces: list[ChunkPlan], backward: Backward, home: dict[Record, int]
) -> None:
    users: dict[Variable, set[int]] = {leaf: set() for leaf in backward.wanted}
    for user, piece in enumerate(pieces):
        for record, needs in piece.plan.needs.items():
            for variable, need in zip(record.inputs, needs, strict=True):
                if need:
                    users.setdefault(variable, set()).add(user)
    for variable, found in users.items():
        maker = {home[variable.record]} if variable.record in home else set()
        chain = sorted(found | maker)
        for before, after in pairwise(chain):
            pieces[before].next_user[variable] = after
            pieces[after].last_user[variable] = before
        if chain and variable in backward.wanted:
            pieces[chain[0]].owned.append(variable)

"""A plan cut into the chunks of a pipeline, and one micro-batch in one chunk.

Values go from the piece that makes them straight to each piece that computes with them. The gradient
of a value (or of a parameter) that several pieces use goes back from the last of them to the one
before, and so on: each adds its part. So it is summed in the order in which the whole program's
backward pass would have summed it, and comes out in the same bits.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from psfleet.core.base.errors import ConfigError, ShapeError, UsageError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.interface import PooledIds
from psfleet.core.graph.parameters.gradient_norms import gathering
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.backward import Backward
from psfleet.core.graph.program.operation import Array, BackwardPass, Gradient, Record, ancestors
from psfleet.core.graph.program.ops.loss import AreaUnderCurve
from psfleet.core.graph.program.program import Program
from psfleet.core.graph.program.recompute import RecomputingRun
from psfleet.core.graph.program.run import BackwardPlan, ExecutionPlan, ProgramRun, last_uses
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime.stages import even_sizes, exchange, here, links, next_step


def micro_sizes(feeds: Mapping[Variable, Array], micro_batches: int) -> list[int]:
    """Samples of each micro-batch, see `even_sizes`.

    Raises:
        ShapeError: No feed leaves its first extent open, or those that do differ in length.
    """
    lengths = {v.name: len(array) for v, array in feeds.items() if _is_open(v)}
    if not lengths:
        if micro_batches == 1:
            return [1]
        raise ShapeError(
            "no feed leaves its first extent open, so the batch cannot be cut into "
            f"{micro_batches} micro-batches; declare data with None in front"
        )
    if len(set(lengths.values())) > 1:
        raise ShapeError(
            f"feeds have different numbers of samples: {lengths}; a pipeline cuts all of "
            "them into the same micro-batches"
        )
    return even_sizes(next(iter(lengths.values())), micro_batches)


def micro_feeds(
    feeds: Mapping[Variable, Array], sizes: Sequence[int]
) -> list[dict[Variable, Array]]:
    """The feeds of each micro-batch; one with a fixed first extent goes whole to all."""
    parts, start = [], 0
    for size in sizes:
        parts.append(
            {v: array[start : start + size] if _is_open(v) else array for v, array in feeds.items()}
        )
        start += size
    return parts


def combine(variable: Variable, values: Sequence[Array], fractions: Sequence[float]) -> Array:
    """A result of the batch: samples side by side; of single numbers the mean over the samples.

    An accumulated AUC and whole numbers are those of the last micro-batch.
    """
    if _is_open(variable):
        return np.concatenate(values)
    metric = variable.record is not None and isinstance(variable.record.op, AreaUnderCurve)
    if metric or variable.dtype.kind != "f" or len(values) == 1:
        return np.array(values[-1])
    mean = np.average(np.stack(values).astype(np.float64), axis=0, weights=fractions)
    return np.asarray(mean, variable.dtype)


def _is_open(variable: Variable) -> bool:
    return bool(variable.shape) and variable.shape[0] is None


def settled(value: Gradient | None) -> Gradient | None:
    """A value as it would arrive at another process: the same layout, so the same bits."""
    if isinstance(value, np.ndarray) and not value.flags.forc:
        return np.ascontiguousarray(value)
    return value


def pack(value: Gradient | None) -> list[Array]:
    """A value or gradient as arrays: none, one, or ids and rows (and shows and clicks)."""
    if value is None:
        return []
    if not isinstance(value, SparseGrad):
        return [value]
    return [value.ids, value.rows, *([] if value.scores is None else [value.scores])]


def unpack(arrays: Sequence[Array]) -> Gradient | None:
    """Unpack a packed gradient."""
    if len(arrays) > 1:
        return SparseGrad(*arrays)
    return arrays[0] if arrays else None


def shared_norms(names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Inside the block a global norm is over the parameters of all stages of this worker.

    Args:
        names: Names of all of them, in the order in which one process would add them up.
    """
    if here().processes == 1:
        return contextlib.nullcontext()
    places = {name: i for i, name in enumerate(names)}

    def gather(own: list[str], squares: list[float]) -> list[float]:
        place, far, tag = here(), links(), f"norm/{next_step()}"
        if max(place.copies) > 1:
            raise ConfigError(
                "clipping by the global norm needs whole gradients, and copies of a stage "
                "have parts of them; clip each gradient by its norm or use no copies"
            )
        mine = np.array([[places[name] for name in own], squares], np.float64)
        parts = exchange(place, far, tag, range(place.processes), [mine])
        whole = np.concatenate([part for [part] in parts], axis=1)
        return [float(square) for square in whole[1, np.argsort(whole[0], kind="stable")]]

    return gathering(gather)


@dataclass(eq=False)
class ChunkPlan:
    """The part of a plan that belongs to one chunk.

    Attributes:
        plan: Its forward records, its part of the backward pass (none if no gradient goes through
            it) and what may be released when.
        early: Records that compute ids of its lookups: every piece runs them for itself.
        lookups: Its sparse parameters with the variables of their ids.
        takes: By variable of another piece that it computes with, that piece.
        gives: By own variable that others compute with, those pieces.
        next_user: By variable, the piece that the gradient so far comes from.
        last_user: By variable, the piece that its gradient, with this piece's part, goes to.
        own_leaves: Leaves whose whole gradient comes together here.
    """

    plan: ExecutionPlan
    early: list[Record]
    lookups: list[tuple[Parameter, Variable]]
    dense: list[Variable]
    takes: dict[Variable, int] = field(default_factory=dict)
    gives: dict[Variable, list[int]] = field(default_factory=dict)
    next_user: dict[Variable, int] = field(default_factory=dict)
    last_user: dict[Variable, int] = field(default_factory=dict)
    own_leaves: list[Variable] = field(default_factory=list)


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
    chunk_of = _chunks_of_records(plan, parts)
    records = [[r for r in plan.forward if chunk_of[r] == i] for i in range(len(parts))]
    chunk_parts = [_chunk_plan(plan, backward, own) for own in records]
    _connect_values(chunk_parts, records, chunk_of)
    _connect_gradients(chunk_parts, backward.backward, chunk_of)
    for part in chunk_parts:
        part.plan.kept = {v for v in plan.kept if v.record in set(part.plan.forward)}
        part.plan.kept |= set(part.gives)
        part.plan.releases = last_uses(part.plan.forward, part.plan.kept)
    return chunk_parts


def _chunks_of_records(plan: ExecutionPlan, parts: Sequence[Sequence[Record]]) -> dict[Record, int]:
    chunk_of = {record: i for i, part in enumerate(parts) for record in part}
    for record in plan.forward:
        if record not in chunk_of:
            chunk_of[record] = max(
                (chunk_of[v.record] for v in record.inputs if v.record in chunk_of), default=0
            )
    return chunk_of


def _chunk_plan(plan: ExecutionPlan, backward: BackwardPlan, records: list[Record]) -> ChunkPlan:
    own = set(records)
    active = [record for record in backward.records if record in own]
    needs = {record: backward.needs[record] for record in active}
    inputs = dict.fromkeys(v for record in records for v in record.inputs)
    backwards = [BackwardPlan(backward.backward, active, needs)] if active else []
    early = set(plan.early)
    lookups = {
        (each.parameter.name, each.inputs[0]): (each.parameter, each.inputs[0])
        for each in plan.lookups
        if each.record in own
    }
    return ChunkPlan(
        ExecutionPlan(constants=plan.constants, forward=records, backwards=backwards, needs=needs),
        [record for record in ancestors(inputs) if record in early],
        [*lookups.values()],
        [v for v in plan.dense if v in inputs],
    )


def _connect_values(
    chunk_parts: list[ChunkPlan], records: list[list[Record]], chunk_of: dict[Record, int]
) -> None:
    for user, own in enumerate(records):
        for variable in dict.fromkeys(v for record in own for v in record.inputs):
            maker = chunk_of.get(variable.record) if variable.record is not None else None
            if maker is not None and maker != user:
                chunk_parts[user].takes[variable] = maker
                chunk_parts[maker].gives.setdefault(variable, []).append(user)


def _connect_gradients(
    chunk_parts: list[ChunkPlan], backward: Backward, chunk_of: dict[Record, int]
) -> None:
    users: dict[Variable, set[int]] = {leaf: set() for leaf in backward.gradients}
    for user, part in enumerate(chunk_parts):
        for record, needs in part.plan.needs.items():
            for variable, need in zip(record.inputs, needs, strict=True):
                if need:
                    users.setdefault(variable, set()).add(user)
    for variable, chunks in users.items():
        maker = {chunk_of[variable.record]} if variable.record in chunk_of else set()
        chain = sorted(chunks | maker)
        for before, after in pairwise(chain):
            chunk_parts[before].next_user[variable] = after
            chunk_parts[after].last_user[variable] = before
        if chain and variable in backward.gradients:
            chunk_parts[chain[0]].own_leaves.append(variable)


class StepRows:
    """Stands for a sparse parameter: the rows that the whole step has fetched, by array of ids."""

    def __init__(self, parameter: Parameter) -> None:
        self.name = parameter.name
        self.shape = parameter.shape
        self.distributed = parameter.distributed
        self._parameter = parameter
        self._known: list[tuple[Array, Array]] = []

    def add(self, ids: Array, rows: Array) -> None:
        """Remember the rows of these ids, this very array."""
        self._known.append((ids, rows))

    def lookup(self, ids: Array) -> Array:
        """The rows, from here or from the parameter."""
        for array, rows in self._known:
            if array is ids:
                return rows
        return self._parameter.lookup(ids)

    def pooled(self, ids: PooledIds) -> tuple[PooledIds, Array]:
        """Pool the rows."""
        return ids, ids.pool(self.lookup(ids.ids))


class ChunkRun(ProgramRun):
    """A run of a piece on one micro-batch.

    Attributes:
        arrived: Gradients that other pieces have sent, by variable.
        gradients: After the backward: by variable of another piece, and by leaf.
    """

    def __init__(
        self,
        program: Program,
        part: ChunkPlan,
        values: dict[Variable, Array],
        rows: dict[str, StepRows],
        meter: Any,
    ) -> None:
        super().__init__(program, part.plan, values, meter)
        self.arrived: dict[Variable, Gradient] = {}
        self.gradients: dict[Variable, Gradient] = {}
        self._rows = rows

    def input(self, variable: Variable) -> Any:
        """Return an operation's input: rows that are here in place of a sparse parameter."""
        return self._rows.get(variable.name) or super().input(variable)

    def seeded(self, plan: BackwardPlan) -> BackwardPass:
        """A sweep that starts with what has arrived, and with 1 if the loss is made here."""
        seeds = dict(self.arrived)
        if plan.backward.loss.record in set(self.plan.forward):
            seeds.update(super().seeded(plan).gradients)
        return BackwardPass(seeds)

    def take_gradients(self, plan: BackwardPlan, sweep: BackwardPass) -> None:
        """Keep what the sweep has left."""
        self.gradients.update(sweep.gradients)


class RecomputingChunkRun(ChunkRun, RecomputingRun):
    """The same with recomputing."""


def chunk_run(
    program: Program,
    part: ChunkPlan,
    values: dict[Variable, Array],
    rows: dict[str, StepRows],
    meter: Any,
) -> ChunkRun:
    """A run of the piece, recomputing if its backward pass asks for it."""
    kind = RecomputingChunkRun if part.plan.recomputes else ChunkRun
    return kind(program, part, values, rows, meter)

"""Cuts an execution plan into the chunks of a pipeline, and runs one micro-batch through one chunk.

A value is sent from the chunk that computes it directly to every chunk that uses it. Its gradient takes
another way: from the last chunk that uses the value to the one before, and so on. Each chunk adds its part:

    value      chunk 0 makes x  ->  chunk 1, chunk 2, chunk 3
    gradient   chunk 3: g3  ->  chunk 2: g3 + g2  ->  chunk 1: g3 + g2 + g1  ->  chunk 0

So the gradient is summed in the same order as in the backward pass of the whole program, and is
bit-identical. If several chunks use a parameter, its gradient is summed in the same way, ending in the
first of them.

`pipelined_run.py` decides which chunk runs when, and sends values between processes.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from psfleet.core.base.errors import ConfigError, ShapeError, UsageError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.runtime_interface import PooledIds
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
    """Return the number of samples in each micro-batch. `even_sizes` divides the batch.

    Raises:
        ShapeError: No feed has an unknown first extent, or the feeds with one differ in length.
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
    """Divide feeds into micro-batches. A feed with a fixed first extent goes whole to each micro-batch."""
    parts, start = [], 0
    for size in sizes:
        parts.append(
            {v: array[start : start + size] if _is_open(v) else array for v, array in feeds.items()}
        )
        start += size
    return parts


def combine(variable: Variable, values: Sequence[Array], fractions: Sequence[float]) -> Array:
    """Combine the results of the micro-batches to a result of the batch.

    A result with one entry per sample is concatenated. Other floats are averaged over the samples. Of an
    accumulated AUC, and of whole numbers, the value of the last micro-batch is used.
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
    """Return a value in the memory layout that it would have after it was sent to another process.

    NumPy may sum another layout in another order. Without this, the result would depend on the number of
    stages.
    """
    if isinstance(value, np.ndarray) and not value.flags.forc:
        return np.ascontiguousarray(value)
    return value


def pack(value: Gradient | None) -> list[Array]:
    """Convert a value or gradient to arrays for a message.

    Returns:
        No array for None, and the array itself for an array. For a SparseGrad, its ids, its rows and, if it
        has them, its counts of shows and clicks.
    """
    if value is None:
        return []
    if not isinstance(value, SparseGrad):
        return [value]
    return [value.ids, value.rows, *([] if value.scores is None else [value.scores])]


def unpack(arrays: Sequence[Array]) -> Gradient | None:
    """Convert the arrays that `pack` has returned to the value or gradient."""
    if len(arrays) > 1:
        return SparseGrad(*arrays)
    return arrays[0] if arrays else None


def shared_norms(names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Compute global norms over the parameters of all stages of this worker within the block.

    All stages must clip within the block, because each stage waits there for the squared norms of all stages.

    Args:
        names: Names of the parameters of all stages, in the order in which a single process would add them.
    """
    if here().processes == 1:
        return contextlib.nullcontext()
    positions = {name: i for i, name in enumerate(names)}

    # Every stage sends its squared norms with their positions in `names`. All stages add them up in this
    # order, so that the norm is bit-identical to that of a run in one process.
    def gather(own_names: list[str], squares: list[float]) -> list[float]:
        position, stage_links, tag = here(), links(), f"norm/{next_step()}"
        if max(position.copies) > 1:
            raise ConfigError(
                "clipping by the global norm needs whole gradients, and copies of a stage "
                "have parts of them; clip each gradient by its norm or use no copies"
            )
        own_squares = np.array([[positions[name] for name in own_names], squares], np.float64)
        parts = exchange(position, stage_links, tag, range(position.processes), [own_squares])
        whole = np.concatenate([part for [part] in parts], axis=1)
        return [float(square) for square in whole[1, np.argsort(whole[0], kind="stable")]]

    return gathering(gather)


@dataclass(eq=False)
class ChunkPlan:
    """Part of an execution plan that belongs to one chunk. Chunks are numbered in forward order.

    Attributes:
        plan: Forward records, the part of the backward pass (none if no gradient flows through the chunk),
            and the releases of values.
        early: Records that compute ids of the chunk's look-ups. Every stage computes them itself from the
            feed, and receives none from other stages.
        lookups: Sparse parameters that the chunk reads, each with the variable of its ids.
        dense: Leaves (variables that no record computes) that represent dense parameters of the chunk.
        takes: For each variable of another chunk that this chunk uses, the chunk that computes it.
        gives: For each variable computed here that other chunks use, those chunks.
        next_user: For each variable, the chunk that sends the sum of later chunks' gradients to this one.
        last_user: For each variable, the chunk that this one sends the sum to, after adding its own gradient.
        own_leaves: Leaves whose gradient is complete in this chunk, because no earlier chunk uses them.
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
    """Cut a plan into chunks, and connect the chunks' values and gradients.

    Args:
        plan: Plan with one backward pass.
        parts: Records of the loss for each chunk, in forward order. Each other record of the plan is added
            to the first chunk in which all its inputs are known.

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
    chunk_parts = [_chunk_plan(plan, backward, chunk_records) for chunk_records in records]
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
    chunk_records = set(records)
    active = [record for record in backward.records if record in chunk_records]
    needs = {record: backward.needs[record] for record in active}
    inputs = dict.fromkeys(v for record in records for v in record.inputs)
    backwards = [BackwardPlan(backward.backward, active, needs)] if active else []
    early = set(plan.early)
    lookups = {
        (lookup.parameter.name, lookup.inputs[0]): (lookup.parameter, lookup.inputs[0])
        for lookup in plan.lookups
        if lookup.record in chunk_records
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
    for user, chunk_records in enumerate(records):
        for variable in dict.fromkeys(v for record in chunk_records for v in record.inputs):
            maker = chunk_of.get(variable.record) if variable.record is not None else None
            if maker is not None and maker != user:
                chunk_parts[user].takes[variable] = maker
                chunk_parts[maker].gives.setdefault(variable, []).append(user)


def _connect_gradients(
    chunk_parts: list[ChunkPlan], backward: Backward, chunk_of: dict[Record, int]
) -> None:
    """Set the way of each variable's gradient through the chunks: `next_user` and `last_user` of ChunkPlan.

    The way leads from the last chunk that uses the variable, through all others that use it, to the chunk
    that computes it.
    """
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
    """Rows that a step has pulled for all its micro-batches. Replaces the sparse parameter in operations.

    Rows are found by the identity of the array of ids, not by its content. That works because every chunk
    gets the same array objects that the rows were pulled for.
    """

    def __init__(self, parameter: Parameter) -> None:
        self.name = parameter.name
        self.shape = parameter.shape
        self.distributed = parameter.distributed
        self._parameter = parameter
        self._known: list[tuple[Array, Array]] = []

    def add(self, ids: Array, rows: Array) -> None:
        """Add the rows that were pulled for this array of ids."""
        self._known.append((ids, rows))

    def lookup(self, ids: Array) -> Array:
        """Return the rows that were pulled for this array of ids. For other arrays, reads the parameter."""
        for array, rows in self._known:
            if array is ids:
                return rows
        return self._parameter.lookup(ids)

    def pooled(self, ids: PooledIds) -> tuple[PooledIds, Array]:
        """Look up rows and pool them, as `Parameter.pooled` does: float32 [bags, dim]."""
        return ids, ids.pool(self.lookup(ids.ids))


class ChunkRun(ProgramRun):
    """Run of one chunk on one micro-batch.

    Attributes:
        arrived: Gradients that later chunks have sent, by variable.
        gradients: Result of the backward pass: gradients of parameters and data, and of variables of earlier
            chunks.
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
        """Return an operation's input. For a sparse parameter, these are the rows pulled in this step."""
        return self._rows.get(variable.name) or super().input(variable)

    def seeded(self, plan: BackwardPlan) -> BackwardPass:
        """Return a backward sweep that starts with the gradients that have arrived.

        If the loss is computed in this chunk, the sweep also starts with 1 for the loss.
        """
        seeds = dict(self.arrived)
        if plan.backward.loss.record in set(self.plan.forward):
            seeds.update(super().seeded(plan).gradients)
        return BackwardPass(seeds)

    def take_gradients(self, plan: BackwardPlan, sweep: BackwardPass) -> None:
        """Keep the gradients of variables that are not computed in this chunk."""
        self.gradients.update(sweep.gradients)


class RecomputingChunkRun(ChunkRun, RecomputingRun):
    """Run of one chunk on one micro-batch. It drops activations, and computes them again to go back."""


def chunk_run(
    program: Program,
    part: ChunkPlan,
    values: dict[Variable, Array],
    rows: dict[str, StepRows],
    meter: Any,
) -> ChunkRun:
    """Make a run of a chunk on one micro-batch.

    The run drops activations and computes them again if its backward pass has checkpoints.
    """
    kind = RecomputingChunkRun if part.plan.recomputes else ChunkRun
    return kind(program, part, values, rows, meter)

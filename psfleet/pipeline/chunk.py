"""One micro-batch in one chunk: a run whose backward may come in two halves."""

from typing import Any

from psfleet.parameters.parameter import Parameter
from psfleet.pipeline.chunk_plan import ChunkPlan
from psfleet.program.gradient import BackwardPass
from psfleet.program.operation import Array, Context, Gradient, Record
from psfleet.program.plan import BackwardPlan
from psfleet.program.program import Program
from psfleet.program.recompute import RecomputingRun
from psfleet.program.run import ProgramRun
from psfleet.program.variable import Variable
from psfleet.runtime.pooled_ids import PooledIds

__all__ = ["ChunkRun", "RecomputingChunkRun", "StepRows", "chunk_run"]


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
        for known, rows in self._known:
            if known is ids:
                return rows
        return self._parameter.lookup(ids)

    def pooled(self, asked: PooledIds) -> tuple[PooledIds, Array]:
        """What is pooled of the rows."""
        return asked, asked.pool(self.lookup(asked.ids))


class ChunkRun(ProgramRun):
    """A run of a piece on one micro-batch.

    Attributes:
        arrived: Gradients that other pieces have sent, by variable.
        gradients: After the backward: by variable of another piece, and by leaf.
    """

    def __init__(
        self,
        program: Program,
        piece: ChunkPlan,
        values: dict[Variable, Array],
        rows: dict[str, StepRows],
        meter: Any,
    ) -> None:
        super().__init__(program, piece.plan, values, meter)
        self.arrived: dict[Variable, Gradient] = {}
        self.gradients: dict[Variable, Gradient] = {}
        self._rows = rows
        self._piece = piece
        self._pending: list[tuple[Record, Context, Gradient, tuple[bool, ...]]] = []

    def input(self, variable: Variable) -> Any:
        """What an operation gets: rows that are here in place of a sparse parameter."""
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

    def backward_inputs(self) -> None:
        """First half: the gradients of what other pieces have made, and of what they share."""
        for plan in self.plan.backwards:
            sweep = self.seeded(plan)
            own = {v for v in self._piece.owned if v not in self._piece.next_user}
            for record in reversed(plan.records):
                self._inputs_of(record, plan.needs[record], own, sweep)
            self.gradients.update(sweep.gradients)

    def _inputs_of(
        self, record: Record, needs: tuple[bool, ...], own: set[Variable], sweep: BackwardPass
    ) -> None:
        context = self.contexts.pop(record)
        gradient = sweep.gradients.pop(record.output, None)
        if gradient is None:
            return
        late = tuple(need and v in own for v, need in zip(record.inputs, needs, strict=True))
        context.needs = tuple(a and not b for a, b in zip(needs, late, strict=True))
        if any(context.needs):
            sweep.step(record, context, gradient)
        if any(late):
            self._pending.append((record, context, gradient, late))

    def backward_weights(self) -> None:
        """Second half: the other gradients of parameters."""
        sweep = BackwardPass({})
        for record, context, gradient, late in self._pending:
            context.needs = late
            sweep.step(record, context, gradient)
        self._pending.clear()
        self.gradients.update(sweep.gradients)


class RecomputingChunkRun(ChunkRun, RecomputingRun):
    """The same with recomputing."""


def chunk_run(
    program: Program,
    piece: ChunkPlan,
    values: dict[Variable, Array],
    rows: dict[str, StepRows],
    meter: Any,
) -> ChunkRun:
    """A run of the piece, recomputing if its backward pass asks for it."""
    kind = RecomputingChunkRun if piece.plan.recomputes else ChunkRun
    return kind(program, piece, values, rows, meter)

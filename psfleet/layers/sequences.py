"""Pooling of padded sequences and of bags of ids, to one row for each."""

from typing import Any

from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.graph.program.ops.reduce import SequencePool
from psfleet.core.graph.program.variable import Variable, apply

__all__ = ["sequence_first_step", "sequence_last_step", "sequence_pool"]


@checked
def sequence_pool(
    input: Variable,
    pool_type: str,
    lengths: Any = None,
    mask: Any = None,
    pad_value: float = 0.0,
    name: str | None = None,
) -> Variable:
    """Pool each padded sequence to one row: [batch, time, ...] to [batch, ...].

        rows = layers.embedding(ids, [None, 16], is_distributed=True)   # [batch, 20, 16]
        pooled = layers.sequence_pool(rows, "average", lengths=lengths)  # [batch, 16]

    Values of padding steps have no effect. A bag of ids is such a sequence too.

    Args:
        input: float32 [batch, time, ...].
        pool_type: sum, average (sum / n), sqrt (sum / sqrt(n)), max of each column, or the first or last
            step. Upper and lower case are equal.
        lengths: int64 [batch] or [batch, 1], each from 0 to time.
        mask: [batch, time], nonzero for the steps of the sequence, which may have gaps. Used instead of
            lengths. Without both, all steps belong to the sequence.
        pad_value: Result for an empty sequence.

    Raises:
        ConfigError: pool_type is unknown.
        ShapeError: A length is out of range, or a shape does not fit.
        UsageError: Both lengths and a mask are given.
    """
    if lengths is not None and mask is not None:
        raise UsageError("sequence_pool got lengths and a mask; give one of them")
    kind = pool_type.lower() if isinstance(pool_type, str) else pool_type
    ends = [value for value in (lengths, mask) if value is not None]
    op = SequencePool(kind, float(pad_value), mask is not None)
    return apply(op, input, *ends, name=name)


@checked
def sequence_first_step(input: Variable, lengths: Any = None, mask: Any = None) -> Variable:
    """The first step of each padded sequence, as sequence_pool with "first"."""
    return sequence_pool(input, "first", lengths, mask)


@checked
def sequence_last_step(input: Variable, lengths: Any = None, mask: Any = None) -> Variable:
    """The last step of each padded sequence, as sequence_pool with "last"."""
    return sequence_pool(input, "last", lengths, mask)

"""Pooling: combine the rows of each padded sequence, or of each sample's list of ids, to one row."""

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

    Values of padding steps have no effect.

    Args:
        input: float32 [batch, time, ...].
        pool_type: "sum", "average" (sum / n), "sqrt" (sum / sqrt(n)), "max" of each column, "first" or
            "last" step, in upper or lower case.
        lengths: Length of each sequence, int64 [batch] or [batch, 1], from 0 to time. Without lengths and
            mask, all steps belong to the sequence.
        mask: [batch, time], nonzero for steps that belong to the sequence, which may have gaps. An
            alternative to `lengths`.
        pad_value: Result for an empty sequence.
        name: Name of the operation.

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
    """Return the first step of each padded sequence, as sequence_pool with "first" does."""
    return sequence_pool(input, "first", lengths, mask)


@checked
def sequence_last_step(input: Variable, lengths: Any = None, mask: Any = None) -> Variable:
    """Return the last step of each padded sequence, as sequence_pool with "last" does."""
    return sequence_pool(input, "last", lengths, mask)

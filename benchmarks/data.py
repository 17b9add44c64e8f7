"""Synthetic batches for all contenders. The same seeds give the same bytes."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FIELDS",
    "W1_BATCH",
    "W1_IDS",
    "W3_BATCH",
    "W3_DENSE",
    "W3_IDS",
    "Floats",
    "Ids",
    "batches_w1",
    "batches_w3",
]

W1_IDS = 10_000_000
W1_BATCH = 65_536
W3_IDS = 1_000_000
W3_BATCH = 2_048
W3_DENSE = 13
FIELDS = 26

_EXPONENT = 1.05
_SCATTER = 7_368_787  # prime, so multiplying by it permutes the ids of either vocabulary

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


def batches_w1(count: int, seed: int, ids: int = W1_IDS, batch: int = W1_BATCH) -> list[Ids]:
    """Return `count` batches of W1: int64 [65,536], or [batch], Zipf(1.05) over `ids` ids."""
    rng = np.random.default_rng(seed)
    return [_zipf(rng, ids, (batch,)) * _SCATTER % ids for _ in range(count)]


def batches_w3(
    count: int, seed: int, ids: int = W3_IDS, batch: int = W3_BATCH
) -> list[tuple[Ids, Floats, Floats]]:
    """Return `count` batches of W3: ids int64 [2048, 26], numbers float32 [2048, 13], labels [2048, 1].

    Args:
        count: Number of batches.
        seed: Seed of the batches.
        ids: Number of distinct ids.
        batch: Number of samples of a batch.
    """
    rng = np.random.default_rng(seed)
    fields = np.arange(FIELDS, dtype=np.int64) * 99_991 * 7
    return [
        (
            (_zipf(rng, ids, (batch, FIELDS)) * _SCATTER + fields) % ids,
            rng.standard_normal((batch, W3_DENSE)).astype(np.float32),
            (rng.random((batch, 1)) < 0.25).astype(np.float32),
        )
        for _ in range(count)
    ]


def _zipf(rng: np.random.Generator, ids: int, shape: tuple[int, ...]) -> Ids:
    ranks = np.searchsorted(_distribution(ids), rng.random(shape)).astype(np.int64)
    return np.minimum(ranks, ids - 1)


@cache
def _distribution(ids: int) -> NDArray[np.float64]:
    weights = np.cumsum(np.arange(1, ids + 1, dtype=np.float64) ** -_EXPONENT)
    return weights / weights[-1]

"""Possible savings of a row cache in the worker: a simulation without servers, with an unlimited cache.

Workers train on batches of W3: each pulls the distinct ids of a batch, and then all push them. A pull leaves
out a row that at most `bound` pushes have changed since this worker read it. "Others' changes": a worker's
own pushes are not counted, as if the worker applied them to its copy, for which it would need the optimizer's
state.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from data import W3_BATCH, W3_IDS, Ids, batches_w3
from reporting import Report, arguments, finish

DIM, ID, SCALE, VERSION = 16, 8, 4, 4  # values of a row; bytes of an id, a scale and a version
PUSH = ID + SCALE + DIM  # int8
ROW = 2 * DIM  # bfloat16
FLOAT32 = 2 * (ID + 4 * DIM)


def share(batches: Sequence[Ids], workers: int, bound: int, *, own: bool) -> float:
    """Return the fraction of rows that pulls leave out, in the second half of the batches.

    Args:
        batches: Distinct ids of each batch. The workers take them in turn.
        workers: Number of workers.
        bound: Number of changes of a row that its reader may miss.
        own: True if a worker's own pushes count as changes.
    """
    pushes = np.zeros(W3_IDS, np.int64)
    own_pushes = np.zeros((workers, W3_IDS), np.int64)
    read = np.full(
        (workers, W3_IDS), -bound - 1
    )  # changes that each worker has seen; none: not read
    left_out = total = 0
    for start in range(0, len(batches) - workers + 1, workers):
        turn = batches[start : start + workers]
        for worker, ids in enumerate(turn):
            changes = pushes[ids] - (0 if own else own_pushes[worker, ids])
            stale = changes - read[worker, ids] > bound
            read[worker, ids[stale]] = changes[stale]
            if 2 * start >= len(batches):
                left_out += len(ids) - np.count_nonzero(stale)
                total += len(ids)
        for worker, ids in enumerate(turn):
            pushes[ids] += 1
            own_pushes[worker, ids] += 1
    return left_out / total


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("row_cache", "Rows that a cache in the worker leaves out of pulls")
    count = options.steps or (40 if options.short else 1600)
    batches = [np.unique(ids) for ids, _, _ in batches_w3(count, seed=1)]
    rows = sum(map(len, batches)) / count / W3_BATCH
    for workers in (1, 2, 4):
        for bound in (0, 4, 16):
            report.rows.append(row(batches, workers, bound, rows))
    finish(report, options.json)


def row(batches: Sequence[Ids], workers: int, bound: int, rows: float) -> dict[str, Any]:
    left_out = share(batches, workers, bound, own=True)
    cached = ID + VERSION + (1 - left_out) * ROW + PUSH
    return {
        "workers": workers,
        "bound": bound,
        "left out": left_out,
        "left out, others' changes": share(batches, workers, bound, own=False),
        "bytes / sample": rows * (ID + ROW + PUSH),
        "with a cache": rows * cached,
        "of float32": cached / FLOAT32,
    }


if __name__ == "__main__":
    main()

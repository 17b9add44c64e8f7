"""The sparse path in the shape of DLRM-DCNv2, compared with FBGEMM's CPU kernels (TBE), with one thread each.

26 tables, 214 ids per sample, pooled by sums, dim 128 and 16, row-wise Adagrad. A step looks up all bags, and
updates their rows with a gradient for each bag. There is no dense model. Ids of a table are log-uniform over
its rows (Zipf-like, exponent 1). "embedded": psfleet in one process. "2 servers": one worker and two servers
that share memory. "TLS": as between hosts. FBGEMM is in another environment (--fbgemm PYTHON; see README.md).
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from features import Step, lookup_step
from measuring import Summary, in_turn
from parquet import HOT
from processes import Connection, Crew, environment, obey, psfleet_crew, release, start, wait_ready
from reporting import Report, arguments, finish

BATCHES, RATE, EPS = 4, 0.05, 1e-8
OVER_TLS = "2 servers, TLS"
NAMES = [f"cat_{number}" for number in range(len(HOT))]


def batches(samples: int, rows: int) -> list[list[Any]]:
    """Return for each batch the ids of each feature, int64 [samples, ids per sample]."""
    dice = np.random.default_rng(0)
    return [
        [(rows ** dice.random((samples, hot))).astype(np.int64) - 1 for hot in HOT]
        for _ in range(BATCHES)
    ]


def psfleet_step(ps: Any, dim: int, samples: int, rows: int) -> Step:
    """Return a step with one pull of all bags, and one push of their gradients."""
    from psfleet.features import Feature, FeatureSet, Jagged, Table
    from psfleet.optimizer import RowWiseAdagrad

    optimizer = RowWiseAdagrad(RATE, epsilon=EPS)
    features = FeatureSet(Feature(name, Table(name, dim, optimizer)) for name in NAMES)
    inputs = [
        {
            name: Jagged(ids.reshape(-1), np.full(samples, ids.shape[1]))
            for name, ids in zip(NAMES, batch, strict=True)
        }
        for batch in batches(samples, rows)
    ]
    return lookup_step(ps, features, inputs, samples, dim)


def fbgemm_step(dim: int, samples: int, rows: int) -> Step:
    """Return a step with one forward and one backward pass of FBGEMM's table-batched embeddings.

    The backward pass also updates the rows.
    """
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    torch.set_num_threads(1)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * len(HOT),
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
        eps=EPS,
    )
    lengths = torch.tensor(np.repeat(HOT, samples))
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    id_batches = [
        torch.from_numpy(np.concatenate([ids.reshape(-1) for ids in batch]))
        for batch in batches(samples, rows)
    ]
    gradient = torch.full((samples, dim * len(HOT)), 0.01)

    def step(number: int) -> None:
        tables(id_batches[number % BATCHES], ends).backward(gradient)

    return step


@contextlib.contextmanager
def fbgemm_crew(python: Path, dim: int, samples: int, rows: int) -> Iterator[Crew]:
    """Context with a process in FBGEMM's environment."""
    with contextlib.ExitStack() as stack:
        sizes = (str(dim), str(samples), str(rows))
        command = [str(python), "-W", "ignore", __file__, "--worker", "fbgemm", *sizes]
        process = start(stack, command, environment())
        stack.callback(release, [process])
        wait_ready(process)
        yield Crew("FBGEMM", [], [process])


def work(contender: str, dim: int, samples: int, rows: int) -> None:
    """Run a worker, which makes steps on request."""
    if contender == "fbgemm":
        obey(fbgemm_step(dim, samples, rows))
        return
    import psfleet
    from psfleet.core.base.settings.environment import Environment

    alone = Environment(None, 0, (), 1) if contender == "embedded" else None
    with psfleet.connect(alone, mode="async") as ps:
        obey(psfleet_step(ps, dim, samples, rows), ps.flush)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--samples", type=int, default=1024, help="of a step")
    parser.add_argument("--rows", type=int, default=50_000, help="of a table")
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 16])
    parser.add_argument("--fbgemm", type=Path, help="the Python that has fbgemm-gpu-cpu and torch")
    options = parser.parse_args()
    steps = options.steps or (4 if options.short else 12)
    title = f"26 tables of {options.rows:,} rows, {sum(HOT)} ids a sample, row-wise Adagrad"
    report = Report("pooled", title)
    for dim in options.dims:
        sizes = (dim, options.samples, options.rows)
        with contextlib.ExitStack() as stack:
            crews = [
                stack.enter_context(
                    psfleet_crew(
                        f"psfleet, {contender}",
                        [__file__, "--worker", contender, *map(str, sizes)],
                        servers=2,
                        over=Connection.TLS if contender == OVER_TLS else Connection.MEMORY,
                    )
                )
                for contender in ("embedded", "2 servers", OVER_TLS)
            ]
            if options.fbgemm and not options.no_peers:
                crews.append(stack.enter_context(fbgemm_crew(options.fbgemm, *sizes)))
            else:
                report.skipped["FBGEMM"] = "left out"
            summaries = in_turn(crews, warm=2 * BATCHES, steps=steps, runs=options.runs)
        samples = steps * options.samples
        report.rows += [row(name, dim, samples, summary) for name, summary in summaries.items()]
    finish(report, options.json)


def row(name: str, dim: int, samples: int, summary: Summary) -> dict[str, Any]:
    return {
        "contender": name,
        "dim": dim,
        "CPU-s / M samples": summary.cpu / samples * 1e6,
        "servers": summary.parts["servers"] / samples * 1e6,
        "samples / s": samples / summary.wall,
        **summary.noise,
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(sys.argv[-4], *map(int, sys.argv[-3:]))
    else:
        main()

"""The figures of tables on one GPU, in one process and a few minutes: look-ups, W1, W3 and pooled look-ups.

    python benchmarks/gpu_figures.py [--only rows w1 w3 pooled] [--short] [--json FILE]

- "rows": find ids, push and pull, with arrays in host memory and on the GPU (--rows rows of 16, Adam).
- "w1": look up a batch of ids, give each row a gradient, and step. Tables and tensors on the GPU, beside
  tables in host memory (with the model on the CPU and on the GPU), and torch's EmbeddingBag with SparseAdam.
- "w3": the model of w3_ctr.py, whose dense layers torch trains on the GPU, beside torch alone.
- "pooled": the sparse path of DLRM-DCNv2 (pooled.py), all 26 features in one table, beside FBGEMM's TBE on
  the GPU.

Wall clock, from an idle GPU to an idle GPU. Contenders take turns, and medians of the runs are shown. "CPU
ms" is that of the process. A line is also printed as soon as it is known; what cannot run here is named.
"""

# mypy: disable-error-code="no-untyped-call"

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from data import FIELDS, W1_IDS, W3_IDS, batches_w1, batches_w3
from gpu import bench_sparse
from parquet import HOT
from pooled import EPS, RATE, batches
from reporting import Report, arguments, finish, torch_missing

from psfleet.core.engine.tables.memory_choice import why_no_gpu

DIM, BATCHES = 16, 8
Step = Callable[[int], Any]
Contenders = dict[str, Callable[[], Step]]
ON_GPU = "psfleet, on the GPU"
ON_HOST = "psfleet, host memory"
MIXED = "psfleet, host memory, model on the GPU"


class Measurement:
    """Builds contenders, lets them take turns, and adds a line for each to the report."""

    def __init__(self, options: Namespace, report: Report) -> None:
        self._options = options
        self._report = report

    def add(self, what: str, ids: int, contenders: Contenders) -> None:
        """Measure the contenders, whose steps have this number of ids each."""
        steps: dict[str, Step] = {}
        for name, build in contenders.items():
            self._try(f"{what}: {name}", steps, name, build)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for _ in range(self._options.runs):
            for name, step in steps.items():
                times[name].append(self._timed(step))
        for name, runs in times.items():
            wall, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
            self.line(f"{what}: {name}", ids / wall / 1e6, wall * 1e3, cpu * 1e3)

    def line(self, what: str, rate: float, wall_ms: float, cpu_ms: float) -> None:
        """Add a line to the report, and print it."""
        figures = {"what": what, "M ids / s": rate, "ms": wall_ms, "CPU ms": cpu_ms}
        self._report.rows.append(figures)
        print(f"{what}: {rate:.3f} M ids/s, {wall_ms:.3f} ms, {cpu_ms:.3f} CPU ms", flush=True)

    def skip(self, what: str, why: str) -> None:
        """Name what does not take part, and the reason."""
        self._report.skipped[what] = why
        print(f"SKIPPED {what}: {why}", flush=True)

    def _try(self, what: str, steps: dict[str, Step], name: str, build: Callable[[], Step]) -> None:
        """Build a contender and let it see each batch once. One that fails does not stop the others."""
        try:
            step = build()
            for number in range(BATCHES):
                step(number)
            synchronize()
            steps[name] = step
        except Exception as error:  # whatever a peer raises; the other figures are still wanted
            self.skip(what, f"{type(error).__name__}: {error}")

    def _timed(self, step: Step) -> tuple[float, float]:
        """Return the seconds and CPU seconds of a step, over as many steps as fit into a run."""
        synchronize()
        begin, cpu, number = time.perf_counter(), time.process_time(), 0
        while number < 2 or time.perf_counter() - begin < self._options.seconds:
            step(number)
            number += 1
        synchronize()
        return (time.perf_counter() - begin) / number, (time.process_time() - cpu) / number


def synchronize() -> None:
    """Wait until the GPU has no work."""
    from numba import cuda

    cuda.synchronize()  # of the whole context, which torch shares


def gpu() -> Any:
    """Return the GPU as a device of torch."""
    from psfleet.torch import device_tensors

    return device_tensors.table_gpu()


def bench_rows(options: Namespace, measurement: Measurement) -> None:
    """Measure kernels on ids that all have rows: first as gpu.py does, then with tensors of torch."""
    for figures in bench_sparse(options.rows, DIM, options.runs, peers=False):
        rate = figures["1e9 rows/s"] * 1e3
        n = int(figures["what"].split(", ")[-1].split(" ")[0].replace(",", ""))
        measurement.line(figures["what"], rate, n / rate / 1e3, 0.0)
    for n in options.w1:
        batch = np.random.default_rng(0).permutation(options.rows)[:n].astype(np.int64)
        contenders = {"pull": partial(pull_there, options), "push": partial(push_there, options)}
        measurement.add(
            f"{n:,} distinct ids, tensors",
            len(batch),
            {name: partial(build, batch) for name, build in contenders.items()},
        )


def filled_table(options: Namespace) -> Any:
    """Return a table on the GPU with rows for ids 0 to `rows` - 1."""
    from psfleet.core.engine.rules import Adam
    from psfleet.core.engine.schema.table import TableSpec
    from psfleet.core.engine.tables.sparse import SparseTable

    table = SparseTable(TableSpec("there", "sparse", (DIM,), Adam()), device="cuda")
    fill(table, options.rows)
    return table


def fill(table: Any, rows: int) -> None:
    """Give each id from 0 to `rows` - 1 a row."""
    zeros = np.zeros((1 << 20, table.spec.push_width), np.float32)
    for start in range(0, rows, len(zeros)):
        ids = np.arange(start, min(start + len(zeros), rows), dtype=np.int64)
        table.push(ids, zeros[: len(ids)], 1e-3)


def pull_there(options: Namespace, batch: Any) -> Step:
    """Return a step that reads rows to a tensor."""
    import torch

    from psfleet.torch.device_tensors import TensorArray

    table, ids = filled_table(options), torch.from_numpy(batch).to(gpu())
    out = torch.empty(len(batch), DIM, device=gpu())
    return lambda number: table.pull_to_device(TensorArray(ids), TensorArray(out))


def push_there(options: Namespace, batch: Any) -> Step:
    """Return a step that sums gradients of a tensor by id and updates the rows."""
    import torch

    from psfleet.torch.device_tensors import device_gradient

    table, ids = filled_table(options), torch.from_numpy(batch).to(gpu())
    values = torch.full((len(batch), DIM), 0.01, device=gpu())

    def step(number: int) -> None:
        sums = device_gradient(ids, values).sums()
        assert sums is not None
        table.push(sums.ids, sums, 1e-3)

    return step


def bench_w1(options: Namespace, measurement: Measurement) -> None:
    """Measure W1 with batches of each size."""
    for n in options.w1:
        ids = batches_w1(BATCHES, 10, options.ids or W1_IDS, n)
        measurement.add(
            f"W1, {n:,} ids",
            n,
            {
                ON_GPU: partial(w1_psfleet, options, ids, "cuda", gpu()),
                ON_HOST: partial(w1_psfleet, options, ids, "cpu", "cpu"),
                MIXED: partial(w1_psfleet, options, ids, "cpu", gpu()),
                "torch EmbeddingBag, SparseAdam": partial(w1_torch, options, ids),
            },
        )


def w1_psfleet(options: Namespace, batches: list[Any], memory: Any, device: Any) -> Step:
    """Return the step of W1 with the table in this memory, and tensors on this device."""
    import psfleet.torch as pst
    from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
    from psfleet.optimizer import Adam

    runtime, optimizer = EmbeddedRuntime(), Adam(1e-3, lazy_mode=True)
    rows = pst.Embedding(None, DIM, name="w1", optimizer=optimizer, device=memory)
    opt = pst.DistributedOptimizer(rows, runtime=runtime)
    fill(runtime.table(next(iter(runtime.specs()))), options.ids or W1_IDS)
    return given_gradients(rows, opt, batches, device)


def w1_torch(options: Namespace, batches: list[Any]) -> Step:
    """Return the step of W1 in plain PyTorch, with a bag for each id."""
    import torch

    count = options.ids or W1_IDS
    rows = torch.nn.EmbeddingBag(count, DIM, mode="sum", sparse=True, device=gpu())
    opt = torch.optim.SparseAdam(list(rows.parameters()), lr=1e-3)
    return given_gradients(rows, opt, [ids[:, None] for ids in batches], gpu())


def given_gradients(rows: Any, opt: Any, batches: list[Any], device: Any) -> Step:
    """Return a step that looks ids up and updates their rows with a constant gradient."""
    import torch

    tensors = [torch.from_numpy(ids).to(device) for ids in batches]
    gradient = torch.full((len(batches[0]), DIM), 0.01, device=device)

    def step(number: int) -> None:
        rows(tensors[number % BATCHES]).backward(gradient)
        opt.step()
        opt.zero_grad()

    return step


def bench_w3(options: Namespace, measurement: Measurement) -> None:
    """Measure W3 with batches of each size."""
    for n in options.w3:
        data = batches_w3(BATCHES, 5, options.ids or W3_IDS, n)
        measurement.add(
            f"W3, {n:,} samples",
            n * FIELDS,
            {
                ON_GPU: partial(w3_step, options, data, "cuda"),
                MIXED: partial(w3_step, options, data, "cpu"),
                "torch, SparseAdam and Adam": partial(w3_step, options, data, None),
            },
        )


def w3_step(options: Namespace, data: list[Any], memory: Any) -> Step:
    """Return the step of W3 with rows in this memory of psfleet, or in torch if it is None."""
    import torch
    from peers.torch_model import Ctr

    import psfleet.torch as pst
    from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
    from psfleet.optimizer import Adam

    model: Any = Ctr(1 if memory else options.ids or W3_IDS, options.hidden).to(gpu())
    dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
    if memory:
        optimizer = Adam(1e-3, lazy_mode=True)
        model.rows = pst.Embedding(None, DIM, name="w3", optimizer=optimizer, device=memory)
        sparse: Any = pst.DistributedOptimizer(model.rows, runtime=EmbeddedRuntime())
    else:
        sparse = torch.optim.SparseAdam(list(model.rows.parameters()), lr=1e-3)
    tensors = [tuple(torch.from_numpy(part).to(gpu()) for part in batch) for batch in data]
    loss_of = torch.nn.BCEWithLogitsLoss()

    def step(number: int) -> None:
        ids, wind, label = tensors[number % BATCHES]
        sparse.zero_grad()
        dense.zero_grad()
        loss_of(model(ids, wind), label).backward()
        sparse.step()
        dense.step()

    return step


def bench_pooled(options: Namespace, measurement: Measurement) -> None:
    """Measure the sparse path of DLRM-DCNv2 with rows of each width."""
    for dim in options.dims:
        what = f"26 features, {options.samples:,} samples, dim {dim}"
        contenders = {
            ON_GPU: partial(pooled_psfleet, options, dim, "cuda", gpu()),
            MIXED: partial(pooled_psfleet, options, dim, "cpu", gpu()),
        }
        try:
            import fbgemm_gpu  # noqa: F401  (is it there?)
        except Exception as error:  # its libraries may also fail to load
            measurement.skip(f"{what}: FBGEMM's TBE", f"fbgemm_gpu does not load: {error}")
        else:
            contenders["FBGEMM's TBE"] = partial(pooled_fbgemm, options, dim)
        measurement.add(what, options.samples * sum(HOT), contenders)


def pooled_batches(options: Namespace, offset: int) -> list[Any]:
    """Return batches of flat ids, feature by feature. Each feature's ids begin `offset` after the last's."""
    import torch

    flat = [
        np.concatenate([ids.reshape(-1) + offset * i for i, ids in enumerate(features)])
        for features in batches(options.samples, options.table_rows)
    ]
    return [torch.from_numpy(ids).to(gpu()) for ids in flat]


def bag_starts(options: Namespace) -> Any:
    """Return the position of each bag's first id, and the number of all ids."""
    import torch

    lengths = torch.tensor(np.repeat(HOT, options.samples))
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(gpu())


def pooled_psfleet(options: Namespace, dim: int, memory: Any, device: Any) -> Step:
    """Return a step with one look-up of all bags in one table, and one push."""
    import torch

    import psfleet.torch as pst
    from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
    from psfleet.optimizer import RowWiseAdagrad

    optimizer = RowWiseAdagrad(RATE, epsilon=EPS)
    bags = pst.EmbeddingBag(None, dim, "sum", True, name="all", optimizer=optimizer, device=memory)
    opt = pst.DistributedOptimizer(bags, runtime=EmbeddedRuntime())
    ids, starts = pooled_batches(options, options.table_rows), bag_starts(options)
    gradient = torch.full((len(starts) - 1, dim), 0.01, device=device)

    def step(number: int) -> None:
        bags(ids[number % len(ids)], starts).backward(gradient)
        opt.step()
        opt.zero_grad()

    return step


def pooled_fbgemm(options: Namespace, dim: int) -> Step:
    """Return a step with a forward and a backward pass of FBGEMM's table-batched embeddings on the GPU."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(options.table_rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * len(HOT),
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
        eps=EPS,
    )
    ids, starts = pooled_batches(options, 0), bag_starts(options)
    gradient = torch.full((options.samples, dim * len(HOT)), 0.01, device=gpu())
    return lambda number: tables(ids[number % len(ids)], starts).backward(gradient)


BLOCKS = {"rows": bench_rows, "w1": bench_w1, "w3": bench_w3, "pooled": bench_pooled}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="*", choices=BLOCKS, default=[*BLOCKS])
    parser.add_argument("--rows", type=int, default=10_000_000, help='rows of "rows"')
    parser.add_argument("--w1", type=int, nargs="*", default=[65_536, 1_048_576], help="ids")
    parser.add_argument("--w3", type=int, nargs="*", default=[2_048, 65_536], help="samples")
    parser.add_argument("--ids", type=int, default=0, help="of W1 and W3; 0: as on the CPU")
    parser.add_argument("--hidden", type=int, default=400, help="width of W3's model")
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 16], help="of pooled rows")
    parser.add_argument("--samples", type=int, default=1024, help="of a pooled step")
    parser.add_argument("--table-rows", type=int, default=50_000, help="of a pooled feature")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a run of a contender")
    options = parser.parse_args()
    if options.short:
        options.rows, options.w1, options.w3 = 10**6, options.w1[:1], options.w3[:1]
        options.ids, options.seconds = options.ids or 10**6, min(options.seconds, 0.2)
    if why := why_no_gpu() or torch_missing():
        sys.exit(f"nothing was measured: {why}")
    import torch

    if gpu().type == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"nothing was measured: torch {torch.__version__} has no CUDA, or no GPU it can use"
        )
    report = Report("gpu_figures", "Tables and tensors on one GPU, one process")
    measurement = Measurement(options, report)
    for name in options.only:
        begin = time.perf_counter()
        try:
            BLOCKS[name](options, measurement)
        except Exception as error:  # the other blocks are still wanted
            measurement.skip(name, f"{type(error).__name__}: {error}")
        print(f"({name} took {time.perf_counter() - begin:.0f} s)", flush=True)
    finish(report, options.json)


if __name__ == "__main__":
    main()

"""Tables in the memory of a GPU: dense Adam compared with a copy, and the rates of a sparse table.

    python benchmarks/gpu.py [--size 1000000000] [--rows 100000000] [--tiers 4000000] [--packed 1000000000]
    python benchmarks/gpu.py --launches

Needs an NVIDIA GPU; without one it prints what is missing. The first lines have the time of the host for a
launch, a find, a push and a pull, each the mean of calls in a row; `--launches` measures nothing else. Other
times are wall-clock times, from an idle device to an idle device, medians over the runs. The variants of a
block take turns. "Found" and "added" ids are already on the device; a pull and a push copy ids and values to
and from the host. Then tables with all rows, half of them and none on the device, and one of `--packed` rows
in 16 bits under SGD.
"""

# mypy: disable-error-code="no-untyped-call"

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reporting import Report, arguments, finish, torch_missing

from psfleet.core.engine.rules import SGD, Adam
from psfleet.core.engine.schema.table import DecaySpec, TableSpec
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.memory_choice import why_no_gpu
from psfleet.core.engine.tables.sparse import SparseTable

BATCHES = (65_536, 1_048_576)  # ids: of a worker's step, and of the literature on hash tables
Rows = list[dict[str, Any]]
Variants = dict[str, Callable[[], Any]]


def in_turn(variants: Variants, runs: int) -> dict[str, float]:
    """Return the median seconds of each variant. The first run of each compiles and is left out."""
    from numba import cuda

    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(runs + 1):
        for name, work in variants.items():
            cuda.synchronize()
            begin = time.perf_counter()
            work()
            cuda.synchronize()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(durations[1:]) for name, durations in times.items()}


def bench_launches(runs: int) -> Rows:
    """Measure a launch by psfleet and by numba's dispatcher, and calls on few ids, whose work is launches."""
    from numba import cuda

    from psfleet.core.engine.kernels.device.cuda import table_kernels
    from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
    from psfleet.core.engine.kernels.device.cuda_launch import empty
    from psfleet.core.engine.kernels.device.cuda_queue import DeviceQueue
    from psfleet.core.engine.tables.device.device_rows import DeviceRowMemory
    from psfleet.core.engine.tables.device.device_updates import DeviceRowUpdate

    # Calls in a row: a device queues about a thousand launches. The simulator is slow.
    count, blocks, threads = (2, 1, 2) if SIMULATED else (200, 8, 128)
    dim, n = 16, 64
    queue, scale, size = DeviceQueue(), table_kernels("cuda_rows").scale, n * dim
    values, numbas = empty(size, np.float32), cuda.device_array(size, np.float32)
    sizes, factor, stream = (size, dim, dim), np.float32(1), cuda.stream()
    memory = DeviceRowMemory(3 * dim, 2**20, marks=False)
    update = DeviceRowUpdate(TableSpec("launches", "sparse", (dim,), Adam()), memory)
    ids, gradients = np.arange(1, n + 1), np.zeros((n, dim), np.float32)
    update.push(ids, gradients, numbers(1), 1)
    table = sparse_variants(update, memory, ids, gradients, [1])
    calls: Variants = {
        "a launch": lambda: queue.launch(scale, size, values, *sizes, factor),
        "a launch by numba": lambda: scale[blocks, threads, stream](numbas, *sizes, factor),
        **{f"{name}, {n} ids": table[name] for name in ("found", "push", "pull")},
    }

    def repeated(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: [call() for _ in range(count)]

    times = in_turn({name: repeated(call) for name, call in calls.items()}, runs)
    return [{"what": name, "us": seconds / count * 1e6} for name, seconds in times.items()]


def bench_dense(size: int, runs: int, peers: bool) -> Rows:
    """Measure a copy of `size` float32 on the device, and Adam over as many weights."""
    from psfleet.core.engine.kernels.device.cuda import CudaUpdate
    from psfleet.core.engine.kernels.device.cuda_launch import to_device
    from psfleet.core.engine.kernels.device.cuda_queue import DeviceQueue

    gradient = to_device(np.full(size, 0.01, np.float32))
    planes = [to_device(np.zeros(size, np.float32)) for _ in range(3)]
    queue = DeviceQueue()
    update, scalars = CudaUpdate(Adam(), DecaySpec(), queue), numbers(1)
    variants: Variants = {
        "copy": lambda: queue.copy(planes[0], gradient),
        "psfleet Adam": lambda: update.dense(planes, gradient, size, scalars, 1),
    }
    times = in_turn(variants, runs)
    if peers:
        del variants, planes, gradient  # torch needs as much once more
        times |= in_turn({"torch Adam fused": torch_adam(size)}, runs)
    bandwidth = 8 * size / times["copy"]
    return [
        {
            "what": f"{name}, {size:,} float32",
            "ms": seconds * 1e3,
            "GB/s": (moved := (8 if name == "copy" else 28) * size / seconds) / 1e9,
            "of copy": moved / bandwidth,
        }
        for name, seconds in times.items()
    ]


def torch_adam(size: int) -> Callable[[], Any]:
    """Return a step of torch's fused Adam on the same device."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(size, device="cuda"))
    weight.grad = torch.full((size,), 0.01, device="cuda")
    step: Callable[[], Any] = torch.optim.Adam([weight], lr=1e-3, fused=True).step
    return step


def bench_sparse(rows: int, dim: int, runs: int, peers: bool) -> Rows:
    """Measure find, insert-or-find, pull and push of ids of a table with `rows` rows under Adam."""
    from psfleet.core.engine.tables.device.device_rows import DeviceRowMemory
    from psfleet.core.engine.tables.device.device_updates import DeviceRowUpdate

    spec = TableSpec("bench", "sparse", (dim,), Adam())
    memory = DeviceRowMemory(3 * dim, 2**31, marks=False)
    update, random = DeviceRowUpdate(spec, memory), np.random.default_rng(0)
    memory.reserve(rows)
    largest = min(max(BATCHES), rows)
    zeros, step = np.zeros((largest, dim), np.float32), [1]
    for start in range(0, rows, largest):
        ids = np.arange(start, min(start + largest, rows)) * 7919
        update.push(ids, zeros[: len(ids)], numbers(1), 1)
    results: Rows = []
    for n in sorted({min(count, rows) for count in BATCHES}):
        ids = random.choice(rows, n, replace=False) * 7919
        variants = sparse_variants(update, memory, ids, zeros[:n], step)
        if peers:
            variants |= torch_rows(rows, dim, ids // 7919)
        results += [
            {"what": f"{name}, {n:,} of {rows:,} x {dim}", "1e9 rows/s": n / seconds / 1e9}
            for name, seconds in in_turn(variants, runs).items()
        ]
    return results


def sparse_variants(
    update: Any,
    memory: Any,
    ids: NDArray[np.int64],
    gradients: NDArray[np.float32],
    step: list[int],
) -> Variants:
    """Return the operations on rows of ids that all exist."""
    n, dim = gradients.shape
    device_ids, out, now = memory.send(ids), np.empty((n, dim), np.float32), np.array([1])
    known, values = update.mean([(ids, gradients)] * 2)

    def push() -> None:
        step[0] += 1
        update.push(ids, gradients, numbers(step[0]), step[0])

    return {
        "found": lambda: memory.find(device_ids),
        "found or added": lambda: memory.add(device_ids, now),
        "pull": lambda: update.pull_into(ids, out),
        "push": push,
        "push, ids and gradients on the device": lambda: update.push(known, values, numbers(1), 1),
    }


def bench_tiers(rows: int, dim: int, runs: int) -> Rows:
    """Measure pushes and pulls of tables under Adam with all rows on the device, half, and none."""
    spec, random = TableSpec("bench", "sparse", (dim,), Adam()), np.random.default_rng(0)
    n = min(BATCHES[0], rows)
    empty_bytes = SparseTable(spec, device="cuda").device_bytes
    whole = filled(SparseTable(spec, device="cuda"), rows, n)
    budget = MemoryBudget((empty_bytes + whole.device_bytes) // 2, place="the GPU's memory")
    half = filled(SparseTable(spec, device="cuda", device_budget=budget), rows, n)
    host = filled(SparseTable(spec), rows, n)
    batches = [np.unique(random.integers(0, rows, n)) for _ in range(runs + 1)]
    gradients, out = np.full((2, n, dim), 0.01, np.float32)
    share = half.spilled / rows
    tables = {"on the device": whole, f"{share:.0%} in host memory": half, "in host memory": host}
    results: Rows = []
    for call in ("push", "pull"):
        turns = {name: iter(batches) for name in tables}

        def one(name: str, turns: dict[str, Any] = turns, call: str = call) -> None:
            ids = next(turns[name])
            if call == "push":
                tables[name].push(ids, gradients[: len(ids)], 1e-3)
            else:
                tables[name].pull_into(ids, out[: len(ids)])

        times = in_turn({name: functools.partial(one, name) for name in tables}, runs)
        count = statistics.median(map(len, batches))
        results += [
            {"what": f"{call}, {rows:,} x {dim} {name}", "1e9 rows/s": count / seconds / 1e9}
            for name, seconds in times.items()
        ]
    return results


def bench_packed(rows: int, dim: int, runs: int) -> Rows:
    """Measure a table of `rows` rows in 16 bits: pushes that fill it, memory, pulls of uniform ids."""
    from numba import cuda

    spec, n = TableSpec("bench", "sparse", (dim,), SGD(), precision="bfloat16"), min(1 << 22, rows)
    begin = time.perf_counter()
    table = filled(SparseTable(spec, max_rows=2**32 - 3, device="cuda"), rows, n)
    cuda.synchronize()
    seconds = time.perf_counter() - begin
    ids = np.unique(np.random.default_rng(0).integers(0, rows, min(BATCHES[1], rows)))
    out = np.empty((len(ids), dim), np.float32)
    pull = in_turn({"pull": lambda: table.pull_into(ids, out)}, runs)["pull"]
    label = f"{rows:,} x {dim} in 16 bits, {table.device_bytes / 2**30:.1f} GiB, {table.spilled} on the host"
    return [
        {"what": f"fill {label}", "1e9 rows/s": rows / seconds / 1e9},
        {"what": f"pull {len(ids):,} of them", "1e9 rows/s": len(ids) / pull / 1e9},
    ]


def filled(table: SparseTable, rows: int, n: int) -> SparseTable:
    """Return the table with rows for ids 0 to rows - 1, pushed `n` at a time."""
    zeros = np.zeros((n, table.spec.dim), np.float32)
    for start in range(0, rows, n):
        ids = np.arange(start, min(start + n, rows))
        table.push(ids, zeros[: len(ids)], 1e-3)
    return table


def numbers(step: int) -> NDArray[np.float32]:
    """Return the scalars of a step that Adam's kernels need."""
    from psfleet.core.engine.kernels.rule_source import scalars_of

    return scalars_of(Adam(), DecaySpec(), 1e-3, step)


def torch_rows(rows: int, dim: int, positions: NDArray[np.int64]) -> Variants:
    """Return torch's rows by number (no hash) with SparseAdam, all on the same device."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(rows, dim, device="cuda"))
    optimizer, index = torch.optim.SparseAdam([weight], lr=1e-3), torch.from_numpy(positions).cuda()
    values = torch.full((len(positions), dim), 0.01, device="cuda")
    weight.grad = torch.sparse_coo_tensor(
        index[None], values, (rows, dim), check_invariants=False
    ).coalesce()
    return {
        "torch embedding": lambda: torch.nn.functional.embedding(index, weight),
        "torch SparseAdam": optimizer.step,
    }


def without_torch(options: Any) -> str | None:
    """Return the reason why torch does not take part, or None."""
    missing = "left out" if options.no_peers else torch_missing()
    if not missing and getattr(options, "torch_device", "cuda") == "cuda":
        import torch

        if not torch.cuda.is_available():
            return f"torch {torch.__version__} has no CUDA, or no device that it can use"
    return missing


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", type=int, default=1_000_000_000, help="weights of dense Adam")
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--tiers", type=int, default=4_000_000, help="rows of the tables by tier")
    parser.add_argument("--packed", type=int, default=1_000_000_000, help="rows in 16 bits")
    parser.add_argument("--launches", action="store_true", help="only the host's time for launches")
    parser.set_defaults(runs=7)
    options = parser.parse_args()
    if options.short:
        options.size, options.rows = min(options.size, 10**8), min(options.rows, 10**7)
        options.packed = min(options.packed, 10**8)
    if why := why_no_gpu():
        sys.exit(f"nothing was measured: {why}")
    from numba import cuda

    from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED

    name = "numba's simulator" if SIMULATED else str(cuda.get_current_device().name)
    report = Report("gpu", f"tables on {name}")
    report.rows += bench_launches(options.runs)
    if options.launches:
        finish(report, options.json)
        return
    missing = without_torch(options)
    if missing:
        report.skipped["torch"] = missing
    report.rows += bench_dense(options.size, options.runs, not missing)
    report.rows += bench_sparse(options.rows, options.dim, options.runs, not missing)
    report.rows += bench_tiers(options.tiers, options.dim, options.runs)
    report.rows += bench_packed(options.packed, options.dim, options.runs)
    finish(report, options.json)


if __name__ == "__main__":
    main()

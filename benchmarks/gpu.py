"""Tables in the memory of a GPU: dense Adam beside a copy, and the rates of a sparse table.

    python benchmarks/gpu.py [--size 1000000000] [--rows 100000000] [--runs 7] [--json FILE]

Needs an NVIDIA GPU; without one it says what is missing. Times are of the wall clock, from a device at
rest to a device at rest, median over the runs; the variants of a block run in turn. "Found" and "added" ids
are on the device already; a pull and a push copy ids and values to and from the host.
"""

# mypy: disable-error-code="no-untyped-call"

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reporting import Report, arguments, finish, torch_missing

from psfleet.rules import Adam
from psfleet.schema.table import DecaySpec, TableSpec
from psfleet.tables.device.cuda_memory import why_no_gpu

BATCHES = (65_536, 1_048_576)  # ids: of a worker's step, and of the literature on hash tables
Rows = list[dict[str, Any]]
Variants = dict[str, Callable[[], Any]]


def in_turn(variants: Variants, runs: int) -> dict[str, float]:
    """Median seconds of each; the first run of each compiles and does not count."""
    from numba import cuda

    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(runs + 1):
        for name, work in variants.items():
            cuda.synchronize()
            begin = time.perf_counter()
            work()
            cuda.synchronize()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def bench_dense(size: int, runs: int, peers: bool) -> Rows:
    """A copy of `size` float32 on the device, and Adam over as many weights."""
    from numba import cuda

    from psfleet.kernels.device.cuda import CudaUpdate
    from psfleet.kernels.device.cuda_queue import DeviceQueue

    gradient = cuda.to_device(np.full(size, 0.01, np.float32))
    planes = [cuda.to_device(np.zeros(size, np.float32)) for _ in range(3)]
    update, scalars = CudaUpdate(Adam(), DecaySpec(), DeviceQueue()), numbers(1)
    variants: Variants = {
        "copy": lambda: planes[0].copy_to_device(gradient),
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
    """A step of torch's fused Adam on the same device."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(size, device="cuda"))
    weight.grad = torch.full((size,), 0.01, device="cuda")
    step: Callable[[], Any] = torch.optim.Adam([weight], lr=1e-3, fused=True).step
    return step


def bench_sparse(rows: int, dim: int, runs: int, peers: bool) -> Rows:
    """Find, insert-or-find, pull and push of ids of a table of `rows` rows under Adam."""
    from psfleet.tables.device.device_rows import DeviceRowMemory
    from psfleet.tables.device.device_updates import DeviceRowUpdate

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
    """What is done with the rows of ids that are all there."""
    n, dim = gradients.shape
    given, out, now = memory.send(ids), np.empty((n, dim), np.float32), np.array([1])
    known, values = update.mean([(ids, gradients)] * 2)

    def push() -> None:
        step[0] += 1
        update.push(ids, gradients, numbers(step[0]), step[0])

    return {
        "found": lambda: memory.find(given),
        "found or added": lambda: memory.add(given, now),
        "pull": lambda: update.pull_into(ids, out),
        "push": push,
        "push, gradients on the device": lambda: update.push(known, values, numbers(1), 1),
    }


def numbers(step: int) -> NDArray[np.float32]:
    """What Adam's kernels need to know of a step."""
    from psfleet.kernels.rule_text import scalars_of

    return scalars_of(Adam(), DecaySpec(), 1e-3, step)


def torch_rows(rows: int, dim: int, places: NDArray[np.int64]) -> Variants:
    """torch's rows by number (no hash) with SparseAdam, all on the same device."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(rows, dim, device="cuda"))
    optimizer, index = torch.optim.SparseAdam([weight], lr=1e-3), torch.from_numpy(places).cuda()
    values = torch.full((len(places), dim), 0.01, device="cuda")
    weight.grad = torch.sparse_coo_tensor(
        index[None], values, (rows, dim), check_invariants=False
    ).coalesce()
    return {
        "torch embedding": lambda: torch.nn.functional.embedding(index, weight),
        "torch SparseAdam": optimizer.step,
    }


def without_torch(options: Any) -> str | None:
    """Why torch does not take part, or None."""
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
    parser.set_defaults(runs=7)
    options = parser.parse_args()
    if options.short:
        options.size, options.rows = min(options.size, 10**8), min(options.rows, 10**7)
    if why := why_no_gpu():
        sys.exit(f"nothing was measured: {why}")
    from numba import cuda

    from psfleet.kernels.device.cuda_arithmetic import SIMULATED

    name = "numba's simulator" if SIMULATED else str(cuda.get_current_device().name)
    report = Report("gpu", f"tables on {name}")
    missing = without_torch(options)
    if missing:
        report.skipped["torch"] = missing
    report.rows += bench_dense(options.size, options.runs, not missing)
    report.rows += bench_sparse(options.rows, options.dim, options.runs, not missing)
    finish(report, options.json)


if __name__ == "__main__":
    main()

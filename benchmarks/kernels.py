"""W4: kernels and the sparse table alone, in one thread, compared with torch if it is installed.

    python benchmarks/kernels.py [--size 50000000] [--rows 5000000] [--runs 7] [--json FILE]

Times are CPU time of the process, medians over the runs. The variants of a block take turns.

`stream` is the roofline of an optimizer: a kernel of the same shape (the same arrays read and written in
place) that only adds. An optimizer's figure is the fraction of that speed in GB/s that it reaches. Its bytes
are those that any program for it must move: each array is read once and, except the gradient, written once. A
value that a row shares counts once per row. A norm over the whole parameter, which is larger than the cache,
needs its arrays a second time. A row is still in the cache when it is read again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import numpy as np
from numpy.typing import NDArray
from reporting import Report, arguments, finish, torch_missing

from psfleet.core.engine.kernels.dedup import dedup
from psfleet.core.engine.rules import ASGD, RULES, Adam, RMSProp
from psfleet.core.engine.rules.rule import Rule, Slot
from psfleet.core.engine.schema.table import RowPrecision, TableSpec
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.sparse import SparseTable

Variants = dict[str, Callable[[], Any]]
Rows = list[dict[str, Any]]


def stream0(w, g, h):  # type: ignore[no-untyped-def]
    return (w + g,)


def stream1(w, g, a, h):  # type: ignore[no-untyped-def]
    return w + g, a + g


def stream2(w, g, a, b, h):  # type: ignore[no-untyped-def]
    return w + g, a + g, b + g


def stream3(w, g, a, b, c, h):  # type: ignore[no-untyped-def]
    return w + g, a + g, b + g, c + g


@dataclass(frozen=True)
class Stream(Rule):
    """Optimizer that reads weights, gradient and `count` slots, and writes weights and slots."""

    count: int = 0
    name: ClassVar[str] = "stream"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(f"s{i}") for i in range(self.count))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return (stream0, stream1, stream2, stream3)[self.count]

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate,)


def in_turn(variants: Variants, runs: int) -> dict[str, float]:
    """Return the median CPU seconds of each variant."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in range(runs + 1):
        for name, function in variants.items():
            start = time.process_time()
            function()
            if run:
                times[name].append(time.process_time() - start)
    return {name: float(np.median(values)) for name, values in times.items()}


def bench_rules(size: int, runs: int) -> Rows:
    """Measure every optimizer against the stream of its shape. Row-wise optimizers get rows of 64."""
    rules: dict[str, Rule] = {name: rule() for name, rule in RULES.items()}
    rules |= {"rmsprop_centered": RMSProp(centered=True), "asgd": ASGD(2)}
    results = []
    gradient = noise(size)
    for name, rule in rules.items():
        slots_in_use = rule.slots[: len(rule.slots) - max(rule.turns - 1, 0)]
        slots = sum(not slot.per_unit for slot in slots_in_use)
        table = DenseTable(TableSpec("bench", "dense", (size // 64, 64), rule), noise(size))
        stream = dense(Stream(slots), size)
        times = in_turn(
            {
                name: lambda t=table: t.push(gradient, 1e-3),  # type: ignore[misc]
                "stream": lambda t=stream: t.push(gradient, 1e-9),
            },
            runs,
        )  # type: ignore[misc]
        once = 4 * size * (3 + 2 * slots)
        shared = 8 * size // 64 * (len(slots_in_use) - slots)
        speed = (once + shared + second_pass(rule) * 4 * size) / times[name]
        results.append(
            {
                "what": f"dense {name}",
                "ms": times[name] * 1e3,
                "GB/s": speed / 1e9,
                "of stream": speed * times["stream"] / once,
            }
        )
    return results


def second_pass(rule: Rule) -> int:
    """Return how many values per weight an optimizer moves again for norms of the whole parameter.

    Lamb: weights and moments again. LARS: weights and gradient.
    """
    if rule.measure() is None or rule.unit != "parameter":
        return 0
    return 3 if rule.advance() is not None else 2


def bench_adam(size: int, runs: int, peers: bool) -> Rows:
    """Measure dense Adam and Lamb, and torch's Adam on the same size."""
    gradient, adam, lamb = noise(size), dense(Adam(), size), dense(RULES["lamb"](), size)
    variants: Variants = {
        "psfleet Adam": lambda: adam.push(gradient, 1e-3),
        "psfleet Lamb": lambda: lamb.push(gradient, 1e-3),
    }
    stream = dense(Stream(2), size)
    variants["stream 4 reads 3 writes"] = lambda: stream.push(gradient, 1e-9)
    if peers:
        import torch

        torch.set_num_threads(1)
        for kind, options in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
            weight = torch.nn.Parameter(torch.from_numpy(noise(size)))
            weight.grad = torch.from_numpy(gradient)
            variants[f"torch Adam {kind}"] = torch.optim.Adam([weight], lr=1e-3, **options).step
    times = in_turn(variants, runs)
    return [
        {
            "what": name,
            "ms": seconds * 1e3,
            "GB/s": 28 * size / seconds / 1e9,
            "of Adam": seconds / times["psfleet Adam"],
        }
        for name, seconds in times.items()
    ]


def bench_sparse(rows: int, dim: int, runs: int, peers: bool) -> Rows:
    """Measure pull and push of 65,536 distinct ids of a table with `rows` rows, Adam."""
    random = np.random.default_rng(0)
    ids = random.permutation(rows).astype(np.int64) * 7919
    table = SparseTable(TableSpec("bench", "sparse", (dim,), Adam()))
    table.reserve(rows)
    pauses = grow(table, ids, dim)
    n = min(65536, rows)
    batches = [random.permutation(ids)[:n] for _ in range(8)]
    gradients, out = noise(n * dim).reshape(n, dim), np.empty((n, dim), np.float32)
    position = [0]

    def batch() -> NDArray[np.int64]:
        position[0] = (position[0] + 1) % len(batches)
        return batches[position[0]]

    variants: Variants = {
        "psfleet pull": lambda: table.pull_into(batch(), out),
        "psfleet push": lambda: table.push(batch(), gradients, 1e-3),
    }
    if peers:
        variants |= torch_sparse(rows, dim, batches, gradients)
    times = in_turn(variants, max(runs, 12))
    results: Rows = [
        {"what": f"sparse {name}, {rows:,} x {dim}", "ns/row": seconds / n * 1e9}
        for name, seconds in times.items()
    ]
    return [
        *results,
        {
            "what": "insert 4,096 ids while growing",
            "ms": float(np.median(pauses)) * 1e3,
            "worst ms": max(pauses) * 1e3,
        },
    ]


def bench_precisions(rows: int, dim: int, runs: int) -> Rows:
    """Measure the same batches in a table of each storage precision, Adam."""
    random = np.random.default_rng(0)
    ids = random.permutation(rows).astype(np.int64) * 7919
    n = min(65536, rows)
    batch, gradients = ids[:n], noise(n * dim).reshape(n, dim)
    out = np.empty((n, dim), np.float32)
    variants: Variants = {}
    for precision in get_args(RowPrecision):
        table = SparseTable(TableSpec("bench", "sparse", (dim,), Adam(), precision=precision))
        grow(table, ids, dim)
        variants |= {
            f"pull, {precision}": lambda t=table: t.pull_into(batch, out),  # type: ignore[misc]
            f"push, {precision}": lambda t=table: t.push(batch, gradients, 1e-3),  # type: ignore[misc]
        }
    return [
        {"what": f"sparse {name}, {rows:,} x {dim}", "ns/row": seconds / n * 1e9}
        for name, seconds in in_turn(variants, max(runs, 12)).items()
    ]


def grow(table: SparseTable, ids: NDArray[np.int64], dim: int) -> list[float]:
    """Fill the table. Returns the CPU seconds of each push of 4,096 new ids.

    Wall-clock time would include the load of the machine.
    """
    gradients, pauses = noise(4096 * dim).reshape(4096, dim), []
    for start in range(0, len(ids), 4096):
        part = ids[start : start + 4096]
        begin = time.thread_time()
        table.push(part, gradients[: len(part)], 1e-3)
        pauses.append(time.thread_time() - begin)
    return pauses


def torch_sparse(
    rows: int, dim: int, batches: list[NDArray[np.int64]], gradients: NDArray[np.float32]
) -> Variants:
    """Return torch's rows by number (no hash) with SparseAdam."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(rows, dim))
    optimizer = torch.optim.SparseAdam([weight], lr=1e-3)
    positions = torch.from_numpy(batches[0] // 7919)
    weight.grad = torch.sparse_coo_tensor(
        positions[None], torch.from_numpy(gradients), (rows, dim), check_invariants=False
    ).coalesce()
    return {
        "torch embedding lookup": lambda: torch.nn.functional.embedding(positions, weight),
        "torch SparseAdam": optimizer.step,
    }


def bench_dedup(dim: int, runs: int, peers: bool) -> Rows:
    """Measure deduplication, sum and expansion of a Zipf batch of 65,536 ids."""
    n, random = 65536, np.random.default_rng(0)
    uniform = random.random(n)
    ranks = ((uniform * (1e7**-0.05 - 1) + 1) ** (1 / -0.05)).astype(np.int64)
    ids, gradients = ranks * 7919 % 10_000_019, noise(n * dim).reshape(n, dim)
    known = dedup(ids, 2)
    rows = known.merge(gradients)

    def numpy_twin() -> None:
        unique, inverse = np.unique(ids, return_inverse=True)
        np.add.at(np.zeros((len(unique), dim), np.float32), inverse, gradients)

    variants: Variants = {
        "dedup": lambda: dedup(ids, 2),
        "sum": lambda: known.merge(gradients),
        "dedup + sum": lambda: dedup(ids, 2).merge(gradients),
        "expand": lambda: known.expand(rows),
        "numpy unique + add.at": numpy_twin,
    }
    if peers:
        import torch

        index, values = torch.from_numpy(ids), torch.from_numpy(gradients)

        def torch_twin() -> None:
            unique, inverse = torch.unique(index, return_inverse=True)
            torch.zeros(len(unique), dim).index_add_(0, inverse, values)

        variants["torch unique + index_add"] = torch_twin
    return [
        {"what": f"{name}, Zipf 65,536 x {dim}", "ns/id": seconds / n * 1e9}
        for name, seconds in in_turn(variants, runs).items()
    ]


def noise(n: int) -> NDArray[np.float32]:
    """Return n small values. A part of them is repeated, so that large sizes are made quickly."""
    part = np.random.default_rng(1).standard_normal(min(n, 1 << 20)).astype(
        np.float32
    ) * np.float32(0.01)
    return np.resize(part, n)


def dense(rule: Rule, size: int) -> DenseTable:
    return DenseTable(TableSpec("bench", "dense", (size,), rule), noise(size))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", type=int, default=50_000_000, help="weights of dense Adam")
    parser.add_argument("--rule-size", type=int, default=8_000_000, help="weights for each rule")
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.set_defaults(runs=7)
    options = parser.parse_args()
    if options.short:
        options.size = min(options.size, 8_000_000)
        options.rows, options.runs = min(options.rows, 1_000_000), min(options.runs, 3)
    report = Report("kernels", "W4 kernels and the sparse table alone, one thread, CPU time")
    missing = "left out" if options.no_peers else torch_missing()
    if missing:
        report.skipped["torch"] = missing
    report.rows += bench_adam(options.size, options.runs, not missing)
    report.rows += bench_rules(options.rule_size, options.runs)
    report.rows += bench_sparse(options.rows, options.dim, options.runs, not missing)
    report.rows += bench_precisions(min(options.rows, 2_000_000), options.dim, options.runs)
    report.rows += bench_dedup(options.dim, options.runs, not missing)
    finish(report, options.json)


if __name__ == "__main__":
    main()

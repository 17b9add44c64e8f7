"""W1 and W3 with tables in the memory of a GPU, in batches of several sizes, and what limits them.

    python benchmarks/gpu_jobs.py [--w1 65536 1048576] [--w3 2048 65536] [--runs 3] [--json FILE]

One server with a GPU and workers without, as in w1_sparse.py and w3_ctr.py. It is compared with a server in
host memory, and with torch in one process on the same GPU. (torch holds all of W3's model on the GPU; in W1,
ids and gradients come from the host and rows go there.) 65,536 ids are a worker's step in W1, and 65,536
samples the batch of MLPerf's DLRM. A million keys is the batch of the literature on hash tables.

The last table shows which part of a run the server's GPU spent on copies to and from host memory, and on its
own work. The server measures these times with events (profiled_server.py), which costs it microseconds for
each copy and kernel. The host link is the limit if copies in one direction take most of the time at the
bandwidth of the link, which is measured first.
"""

# mypy: disable-error-code="no-untyped-call"

import contextlib
import functools
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from data import FIELDS, W1_IDS, W3_IDS, batches_w1
from gpu import Variants, in_turn, without_torch
from measuring import Sample, samples_in_turn, summarize
from peers.torch_group import torch_alone
from processes import Crew, psfleet_crew
from profiled_server import KINDS, read_totals
from reporting import Report, arguments, finish

from psfleet.core.engine.tables.memory_choice import why_no_gpu

SERVER = Path(__file__).with_name("profiled_server.py")
Rows = list[dict[str, Any]]


class ProfiledCrew:
    """Crew whose server measures its GPU's times. A run reports the increase of these times."""

    def __init__(self, crew: Crew, totals: Path) -> None:
        self.name = crew.name
        self.processes = crew.processes
        self._crew = crew
        self._totals = totals

    def run(self, steps: int) -> list[dict[str, Any]]:
        before = read_totals(self._totals)
        self._crew.run(steps)
        return [{"totals": read_totals(self._totals) - before}]


def link_bandwidth(size: int, runs: int) -> list[float]:
    """Return the bytes per second of copies of pinned memory to the GPU, and back."""
    from numba import cuda

    here, device_array = cuda.pinned_array(size, np.uint8), cuda.device_array(size, np.uint8)
    here[:] = 1
    variants: Variants = {
        "in": lambda: device_array.copy_to_device(here),
        "out": lambda: device_array.copy_to_host(here),
    }
    return [size / seconds for seconds in in_turn(variants, runs).values()]


@contextlib.contextmanager
def crews(options: Namespace, program: Sequence[str], torch: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the contenders of a workload.

    Args:
        options: Command line.
        program: psfleet's worker and its arguments.
        torch: Arguments of the torch process.
    """
    on_gpu = {"PSFLEET_DEVICE": "cuda"}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psfleet-bench-")))

        def crew(name: str, **extra: Any) -> Crew:
            made = psfleet_crew(name, program, servers=1, workers=options.workers, **extra)
            return stack.enter_context(made)

        totals = folder / "totals"
        timed = (str(SERVER), str(totals))
        subjects: list[Any] = [
            ProfiledCrew(crew("psfleet, GPU", variables=on_gpu, server=timed), totals),
            crew("psfleet, host memory", variables={"PSFLEET_DEVICE": "cpu"}),
        ]
        if not options.torch_missing:
            alone = torch_alone("torch, same GPU", *torch, workload=program[2])
            subjects.append(stack.enter_context(alone))
        yield subjects


def measure(options: Namespace, workload: str, batch: int, link: list[float]) -> tuple[Rows, Rows]:
    """Return a workload's lines with batches of this size: of the contenders, and of the server's GPU."""
    ids = options.ids or (W1_IDS if workload == "w1" else W3_IDS)
    sizes = (ids, batch, options.batches, options.hidden)
    program = [__file__, "--worker", workload, *map(str, sizes)]
    names = ("--ids", "--batch", "--batches", "--hidden")
    torch = ["--device", options.torch_device]
    torch += [text for pair in zip(names, map(str, sizes), strict=True) for text in pair]
    with crews(options, program, torch) as subjects:
        warm, steps = options.batches, options.steps or 20
        samples = samples_in_turn(subjects, warm=warm, steps=steps, runs=options.runs)
    load = f"{workload.upper()}, {batch:,}"
    rows, profiles = [], []
    for name, runs in samples.items():
        workers = 1 if name.startswith("torch") else options.workers
        rows.append(
            line(load, name, batch * (FIELDS if workload == "w3" else 1), runs, steps * workers)
        )
        if "totals" in runs[0].report[0]:
            profiles.append(profile(load, runs, steps * workers, link))
    return rows, profiles


def line(load: str, name: str, ids: int, samples: list[Sample], steps: int) -> dict[str, Any]:
    """Return the line with a contender's rates."""
    summary = summarize(samples)
    return {
        "batch": load,
        "contender": name,
        "M ids / s": ids * steps / summary.wall / 1e6,
        "M ids / CPU-s": ids * steps / summary.cpu / 1e6,
        "CPU ms / step": summary.cpu / steps * 1e3,
        "servers": summary.parts.get("servers", 0.0) / steps * 1e3,
        "workers' part": summary.parts["workers"] / steps * 1e3,
        **summary.noise,
    }


def profile(load: str, samples: list[Sample], steps: int, link: list[float]) -> dict[str, Any]:
    """Return the times of the server's GPU, as medians over the runs."""
    totals = np.array([sample.report[0]["totals"] for sample in samples])
    fractions = totals[:, :, 1] / np.array([sample.wall for sample in samples])[:, None]
    (size, seconds, _) = np.median(totals, 0).T
    figures: dict[str, Any] = {"batch": load}
    for kind, name in enumerate(KINDS[:2]):
        figures[f"MB {name} / step"] = float(size[kind] / steps / 1e6)
        figures[f"GB/s {name}"] = float(size[kind] / seconds[kind] / 1e9) if seconds[kind] else 0.0
        figures[f"link, GB/s {name}"] = link[kind] / 1e9
    for kind, name in enumerate(KINDS):
        figures[f"of the time {name}"] = float(np.median(fractions[:, kind]))
    return figures


def work(workload: str, ids: int, batch: int, batches: int, hidden: int) -> None:
    """Run a worker of psfleet."""
    if workload == "w3":
        from w3_ctr import work_program

        work_program(ids_in_all=ids, batch=batch, count=batches, hidden_size=hidden)
    else:
        import w1_sparse

        from psfleet.core.base.settings.environment import read_environment

        rank = read_environment().rank
        w1_sparse.work(rank, ids, False, batches_w1(batches, 10 + rank, ids, batch))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--w1", type=int, nargs="*", default=[65_536, 1_048_576], help="ids")
    parser.add_argument("--w3", type=int, nargs="*", default=[2_048, 65_536], help="samples")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ids", type=int, default=0, help="rows of a table; 0: as on the CPU")
    parser.add_argument("--batches", type=int, default=20, help="different ones")
    parser.add_argument("--hidden", type=int, default=400, help="width of W3's model")
    parser.add_argument("--link", type=int, default=1 << 28, help="bytes that are copied at a time")
    parser.add_argument("--torch-device", choices=["cpu", "cuda"], default="cuda")
    options = parser.parse_args()
    if options.short:
        options.w1, options.w3 = options.w1[:1], options.w3[:1]
    if why := why_no_gpu():
        sys.exit(f"nothing was measured: {why}")
    options.torch_missing = without_torch(options)
    report = Report("gpu_jobs", "W1 and W3, 1 server with its tables on a GPU")
    if options.torch_missing:
        report.skipped["torch, same GPU"] = options.torch_missing
    run = functools.partial(measure, options, link=link_bandwidth(options.link, options.runs))
    measured = [run("w1", batch) for batch in options.w1] + [
        run("w3", batch) for batch in options.w3
    ]
    report.rows = [row for rows, _ in measured for row in rows]
    report.rows += [row for _, profiles in measured for row in profiles]
    finish(report, options.json)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main()

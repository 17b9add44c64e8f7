"""Bytes that servers receive and model quality under DGC at 99.9 %, compared with the run without DGC.

Two jobs of 2 servers and 2 workers in sync mode, under Momentum: a perceptron, which has only dense
parameters, and the flights example, which consists mostly of rows (DGC does not change these).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from processes import environment
from reporting import Report, arguments, finish

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
STRATEGIES = {"dense": "", "dgc 99.9 %": "[dgc]\nsparsity = [0.999]\n"}
WIDTH, BATCH, RATE, ROUNDS = 1000, 64, 0.02, 400


def perceptron(steps: int, seed: int) -> dict[str, Any]:
    """Run a worker of the first job: two hidden layers of WIDTH, scored on new data."""
    import psfleet as ps
    from psfleet import fleet, layers, metrics, optimizer

    x, label = layers.data("x", [None, WIDTH]), layers.data("label", [None, 1])
    hidden = layers.fc(layers.fc(x, WIDTH, act="relu"), WIDTH, act="relu")
    logit = layers.fc(hidden, 1)
    loss = layers.mean(layers.sigmoid_cross_entropy_with_logits(logit, label))
    test = ps.default_main_program().clone(for_test=True)
    fleet.distributed_optimizer(optimizer.Momentum(RATE, 0.9)).minimize(loss)
    truth = np.random.default_rng(1).normal(size=(WIDTH, 1)).astype(np.float32)
    rng, executor = np.random.default_rng((seed, fleet.worker_index())), ps.Executor()

    def batch(size: int) -> dict[str, Any]:
        values = rng.normal(size=(size, WIDTH)).astype(np.float32)
        return {"x": values, "label": (values @ truth > 0).astype(np.float32)}

    for _ in range(steps):
        executor.run(feed=batch(BATCH))
    fleet.barrier_worker()
    feed = batch(4096)
    (predictions,) = executor.run(test, feed, [logit])
    return {
        "AUC": metrics.auc(feed["label"][:, 0], predictions[:, 0]),
        "values": _dense_values(),
        "pushes": steps * fleet.worker_num(),
    }


def flights(steps: int, seed: int) -> dict[str, Any]:
    """Run a worker of the second job: the model of examples/flights.py under Momentum.

    Args:
        steps: Number of steps. 0 trains a whole epoch.
        seed: Seed of the model.
    """
    sys.path.insert(0, str(EXAMPLES))
    import flights as example
    import flights_data

    import psfleet as ps
    from psfleet import fleet, optimizer

    data = flights_data.load().ranked(range(1, 10))
    settings = example.Settings(seed=seed)
    rows = np.random.default_rng(0).permutation(data.rows(range(1, 10)))
    rows = rows[: steps * settings.batch * fleet.worker_num() if steps else None]
    model = example.Model(settings)
    total = example.steps_of(rows, settings) // fleet.worker_num()
    rate = optimizer.lr.PolynomialDecay(0.02, total, end_lr=0.001)
    with ps.program_guard(model.program):
        fleet.distributed_optimizer(optimizer.Momentum(rate, 0.9)).minimize(model.loss)
    pushes = 0
    for batch in fleet.shard(example.batches(rows, settings)):
        model.executor.run(model.program, data.feed(batch), [model.loss])
        rate.step()
        pushes += 1
    pushes = int(fleet.util.all_reduce(np.array([pushes]))[0])
    auc = 0.0
    if fleet.is_first_worker():  # it alone reports
        auc, _ = example.score(data, example.TEST, example.predict(model, data, example.TEST))
    return {"AUC": auc, "values": _dense_values(), "pushes": pushes}


JOBS = {"perceptron": perceptron, "flights": flights}


def _dense_values() -> int:
    from psfleet.core.runtime.process_runtime import active

    return sum(spec.size for spec in active().specs().values() if spec.kind == "dense")


def work(job: str, steps: int, seed: int, out: str) -> None:
    """Run a worker process: train, and write the figures on worker 0."""
    from psfleet import fleet
    from psfleet.core.runtime.process_runtime import active

    fleet.init()
    figures = JOBS[job](steps, seed)
    active().barrier()
    if fleet.is_first_worker():
        figures["bytes"] = sum(server["bytes_in"] for server in active().stats())
        Path(out).write_text(json.dumps(figures))
    fleet.stop_worker()


def launch(job: str, strategy: str, steps: int, seed: int) -> dict[str, Any]:
    """Run a job, and return the figures of worker 0."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "strategy.toml", Path(folder) / "out.json"
        file.write_text(strategy)
        command = [
            sys.executable,
            "-m",
            "psfleet_launch",
            "--servers",
            "2",
            "--workers",
            "2",
            "--sync",
            "--no-progress",
            "--strategy",
            str(file),
            "--log-dir",
            folder,
            __file__,
        ]
        subprocess.run(
            [
                *command,
                "--worker",
                job,
                "--steps",
                str(steps),
                "--seed",
                str(seed),
                "--out",
                str(out),
            ],
            env=environment(),
            check=True,
        )
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def measure(job: str, steps: int, runs: int) -> list[dict[str, Any]]:
    """Return a line for each strategy. Its AUC is the mean over as many seeds as runs.

    Rows, pulls and headers cost the same with and without DGC.
    """
    scores: dict[str, float] = {}
    first_results: dict[str, dict[str, Any]] = {}
    for name, text in STRATEGIES.items():
        results = [launch(job, text, steps, seed) for seed in range(1, runs + 1)]
        first_results[name], scores[name] = (
            results[0],
            statistics.mean(result["AUC"] for result in results),
        )
    plain = first_results["dense"]
    whole = 4 * plain["values"] * plain["pushes"]
    other_bytes = plain["bytes"] - whole
    return [
        {
            "job": f"{job}, {name}",
            "dense values": float(result["values"]),
            "test AUC": f"{scores[name]:.4f}",
            "received MB": result["bytes"] / 1e6,
            "dense gradients MB": (result["bytes"] - other_bytes) / 1e6,
            "of the dense run": f"{(result['bytes'] - other_bytes) / whole:.2%}",
            "of all bytes": f"{result['bytes'] / plain['bytes']:.1%}",
        }
        for name, result in first_results.items()
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--worker", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=list(JOBS))
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.steps, options.seed, options.out)
        return
    report = Report(
        "dgc", "DGC: bytes of dense gradients and what is learned, 2 servers, 2 workers, sync"
    )
    for job in options.jobs:
        steps = options.steps or (30 if options.short else ROUNDS if job == "perceptron" else 0)
        report.rows += measure(job, steps, options.runs)
    finish(report, options.json)


if __name__ == "__main__":
    main()

"""Cost of staleness for a model, and remedies: a factorization machine under Adagrad at a high learning rate.

    python benchmarks/staleness.py [--runs 3] [--workers 4]

60,000 rows of 10 categorical fields with 5,382 values in all, the shape of Frappe, are drawn from a
factorization machine with noise; 48,000 train, 12,000 test. Learning rate 0.05, batches of 128, 3 epochs, on
2 servers. Each figure is the test RMSE (labels -1 and 1), median and range over seeds. Asynchronous runs
differ from run to run. Their staleness depends on how busy the machine is, so it is shown.
"""

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from measuring import quantile
from numpy.typing import NDArray

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime, connect
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from tests.trainings import in_threads  # noqa: E402 - found by the line before

FIELDS = (957, 4082, 7, 7, 2, 3, 9, 80, 233, 2)
ROWS, TRAIN, DIM, BATCH, EPOCHS, RATE = 60_000, 48_000, 8, 128, 3, 0.05

ADAGRAD = make_rule("adagrad", {})
BIAS = TableSpec("bias", "dense", (1,), ADAGRAD)
LINEAR = TableSpec("linear", "sparse", (1,), ADAGRAD, initializer=InitializerSpec("constant", 0.0))
FACTORS = TableSpec("factors", "sparse", (DIM,), ADAGRAD)

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Data:
    """Samples: ids [n, fields] and labels [n]."""

    ids: Ids
    labels: Floats


@dataclass(frozen=True)
class Trial:
    """Line of the table. `warm_up` is the number of rounds in sync mode before the mode begins."""

    name: str
    consistency: ConsistencySettings
    workers: int
    warm_up: int = 0


def generate() -> Data:
    """Return clicks of a factorization machine with noise. Popular values are frequent."""
    dice = np.random.default_rng(7)
    columns = []
    for size, start in zip(FIELDS, np.cumsum((0, *FIELDS[:-1])), strict=True):
        share = 1 / np.arange(1, size + 1) ** 0.9
        columns.append(dice.choice(size, ROWS, p=share / share.sum()) + start)
    ids = np.stack(columns, axis=1)
    linear = dice.standard_normal((sum(FIELDS), 1), np.float32) * np.float32(0.5)
    factors = dice.standard_normal((sum(FIELDS), DIM), np.float32) * np.float32(0.45)
    score = predict(np.zeros(1, np.float32), linear[ids], factors[ids])
    score += dice.standard_normal(ROWS, np.float32) * np.float32(0.8)
    return Data(ids, np.where(score > np.quantile(score, 0.67), 1, -1).astype(np.float32))


def predict(bias: Floats, linear: Floats, factors: Floats) -> Floats:
    """Return bias + sum of w + half of ((sum of v)^2 - sum of v^2) (Rendle, 2010).

    `linear` is [n, fields, 1].
    """
    total = factors.sum(axis=1)
    pairs = (total * total).sum(axis=1) - (factors * factors).sum(axis=(1, 2))
    scores: Floats = bias + linear.sum(axis=(1, 2)) + np.float32(0.5) * pairs
    return scores


def reads(ids: Ids) -> list[Read]:
    """Return the reads that a batch needs."""
    return [Read(BIAS.key), Read(LINEAR.key, ids), Read(FACTORS.key, ids)]


def step(runtime: Runtime, ids: Ids, labels: Floats) -> None:
    """Pull, compute the gradient of the mean squared error, and push."""
    bias, linear, factors = runtime.pull(reads(ids))
    error = 2 * (predict(bias, linear, factors) - labels) / np.float32(len(labels))
    total = factors.sum(axis=1, keepdims=True)
    wide = error[:, None, None]
    gradients = [
        Gradient(BIAS.key, error.sum(keepdims=True), None, RATE),
        Gradient(
            LINEAR.key, np.broadcast_to(wide, linear.shape).reshape(-1, 1), ids.reshape(-1), RATE
        ),
        Gradient(FACTORS.key, (wide * (total - factors)).reshape(-1, DIM), ids.reshape(-1), RATE),
    ]
    runtime.push(gradients)


def work(
    fleet: LocalFleet,
    trial: Trial,
    data: Data,
    batches: int,
    seed: int,
    results: list[float],
    seat: int,
) -> None:
    """Train one worker's share of the batches. Worker 0 then tests."""
    first = ConsistencySettings("sync") if trial.warm_up else trial.consistency
    runtime: ModeSwitchRuntime = connect(fleet.environment(seat), first)
    runtime.create(BIAS, np.zeros(1, np.float32))
    runtime.create(LINEAR)
    runtime.create(FACTORS)
    dice, number = np.random.default_rng(seed), 0
    for _ in range(EPOCHS):
        order = dice.permutation(TRAIN)
        whole = batches // trial.workers * trial.workers
        for batch in range(seat, whole, trial.workers):
            if trial.warm_up and number == trial.warm_up:
                runtime.set_mode(trial.consistency)
            rows = order[batch * BATCH : (batch + 1) * BATCH]
            step(runtime, data.ids[rows], data.labels[rows])
            number += 1
    runtime.flush()
    runtime.barrier()
    if seat == 0:
        bias, linear, factors = runtime.pull(reads(data.ids[TRAIN:]))
        wrong = predict(bias, linear, factors) - data.labels[TRAIN:]
        stale = quantile((status["staleness"] for status in runtime.stats()), 0.5)
        results += [float(np.sqrt(np.mean(wrong * wrong))), float(stale or 0)]
    runtime.barrier()
    runtime.close()


def main() -> None:
    """Run every trial `runs` times and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batches", type=int, default=TRAIN // BATCH, help="of an epoch, in all")
    options = parser.parse_args()
    late = ConsistencySettings("async")
    trials = [
        Trial("one worker", ConsistencySettings("sync"), 1),
        Trial("sync", ConsistencySettings("sync"), options.workers),
        Trial("ssp, staleness 1", ConsistencySettings("ssp", staleness=1), options.workers),
        Trial("async", late, options.workers),
        Trial("sync for 25 rounds, then async", late, options.workers, 25),
        Trial("sync for 75 rounds, then async", late, options.workers, 75),
    ]
    data = generate()
    print("| mode | test RMSE | range | median staleness |\n|---|---|---|---|")
    for trial in trials:
        scores, stale = [], []
        for seed in range(options.runs):
            results: list[float] = []
            with LocalFleet(servers=2, workers=trial.workers) as fleet:
                jobs = [
                    partial(work, fleet, trial, data, options.batches, seed, results, seat)
                    for seat in range(trial.workers)
                ]
                in_threads(jobs)
            scores.append(results[0])
            stale.append(results[1])
        print(
            f"| {trial.name} | {statistics.median(scores):.4f} | {min(scores):.4f} to "
            f"{max(scores):.4f} | {statistics.median(stale):.0f} |",
            flush=True,
        )
    print(f"\n{options.workers} workers, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()

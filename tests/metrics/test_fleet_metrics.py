"""Metrics over a fleet equal scikit-learn's values on the samples of all workers, each counted once."""

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from psfleet import metrics
from psfleet.core.base.errors import ConfigError, ShapeError
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Runtime
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.dataset_pass import batches
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.strategy import WireSettings
from psfleet.fleet.data_loops import DataLoops
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.metrics import FleetMetrics
from psfleet.metrics.fleet_metrics import Slices
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.metrics.pooled import Samples, every_metric, expected
from tests.trainings import in_threads
from tests.worker_deaths import DeathFault, SimulatedDeath

SLICES = ["phone", "tablet", "desktop"]
ROWS = TableSpec("rows", "sparse", (4,), make_rule("sgd", {}))
BATCHES = 20
SAMPLES = Samples.drawn(300, seed=2)


def count(scores: FleetMetrics, samples: Samples, task: str = "ctr") -> None:
    """A batch of samples."""
    samples.count(scores, samples.slices, task=task)


def push(runtime: Runtime, number: int = 0) -> None:
    """A step's gradients."""
    ids = np.arange(number, number + 5)
    runtime.push([Gradient(ROWS.key, np.ones((5, 4), np.float32), ids, 0.1)])


@cache
def by_place(samples: Samples) -> dict[str, dict[str, float]]:
    """What scikit-learn says of all samples and of each slice; it takes seconds."""
    chosen = {place: samples.where(samples.slices == k) for k, place in enumerate(SLICES)}
    return {place: expected(mine) for place, mine in {"": samples, **chosen}.items()}


def check(values: dict[str, float], samples: Samples, task: str = "ctr") -> None:
    """AUC lies within the error that the reading states, the rest is equal to 1e-9."""
    for place, wanted in by_place(samples).items():
        label = f"[{place}]" if place else ""
        for name, value in wanted.items():
            error = values.get(f"{task}/{name}_error{label}", 0.0)
            assert error < 3e-3
            assert values[f"{task}/{name}{label}"] == pytest.approx(value, abs=1e-9 + error), name


def trained(
    runtime: Runtime,
    parts: Sequence[Samples],
    results: list[dict[str, float]],
    tasks: Sequence[str],
    slices: Any = SLICES,
    of: Callable[[Samples], Any] = lambda part: part.slices,
) -> None:
    """A worker that counts every worker_num-th part, with slices that `of` gives, and pushes each time."""
    runtime.create(ROWS)
    scores = FleetMetrics(runtime, {task: every_metric() for task in tasks}, slices=slices)
    for number in range(runtime.worker_index, len(parts), runtime.worker_num):
        for task in tasks:
            parts[number].count(scores, of(parts[number]), task=task)
        push(runtime, number)
    runtime.barrier()
    results.append(scores.read().run)
    runtime.barrier()
    runtime.close()


@pytest.mark.parametrize(
    ("workers", "mode"), [*((3, "async"), (3, "sync"), (2, "ssp"), (2, "geo"), (2, "half-async"))]
)
def test_they_are_scikit_learns(workers: int, mode: Mode) -> None:
    """On two servers, by task and by slice; every worker reads the same bits."""
    results: list[dict[str, float]] = []
    settings = {"staleness": 2} if mode == "ssp" else {}

    def work(worker: int) -> None:
        runtime = fleet.connect(worker, mode, **settings)
        trained(runtime, SAMPLES.parts(BATCHES), results, ["ctr", "cvr"])

    with LocalFleet(2, workers, in_process=True) as fleet:
        in_threads([partial(work, worker) for worker in range(workers)])
        assert fleet.wait() == [0, 0]
    assert all(values == results[0] for values in results)
    check(results[0], SAMPLES, "ctr")
    check(results[0], SAMPLES, "cvr")


def test_a_process_without_servers_reads_the_same() -> None:
    """Embedded; gradients travel as int8, and what is counted does not."""
    results: list[dict[str, float]] = []
    runtime = EmbeddedRuntime(wire=WireSettings("int8", "int8"))
    trained(runtime, SAMPLES.parts(BATCHES), results, ["ctr"])
    check(results[0], SAMPLES)


def test_slices_are_values_of_features() -> None:
    """Each value that is listed, and the others together, equal scikit-learn's on the pooled samples."""
    samples = Samples.drawn(60, seed=5)
    results: list[dict[str, float]] = []
    slices: Slices = {"device": SLICES[:2], "digit": [7, 1, 4]}

    def values(part: Samples) -> Any:
        digits = [[int(group) % 10] for group in part.groups]
        return {"device": np.array(SLICES)[part.slices], "digit": digits, "more": None}

    parts = samples.parts(BATCHES)
    with LocalFleet(2, 2, in_process=True) as fleet:
        runtimes = [fleet.connect(worker, "sync") for worker in range(2)]
        in_threads([partial(trained, r, parts, results, ["ctr"], slices, values) for r in runtimes])
    digits = samples.groups % 10
    chosen = {f"device={SLICES[k]}": samples.slices == k for k in range(2)}
    chosen |= {f"digit={digit}": digits == digit for digit in (7, 1, 4)}
    chosen |= {"device=other": samples.slices == 2, "digit=other": ~np.isin(digits, (7, 1, 4))}
    for place, where in {"": np.ones(len(samples), np.bool_), **chosen}.items():
        label = f"[{place}]" if place else ""
        for name, value in expected(samples.where(where)).items():
            error = results[0].get(f"ctr/{name}_error{label}", 0.0)
            assert results[0][f"ctr/{name}{label}"] == pytest.approx(value, abs=1e-9 + error), name


def test_wrong_slices() -> None:
    """Values that are listed twice, numbers in place of features, another number of samples."""
    runtime = EmbeddedRuntime()
    for values in (["a", "a"], ["other"], "ab"):
        with pytest.raises(ConfigError, match="the slices of feature 'f' are"):
            FleetMetrics(runtime, [metrics.LogLoss()], slices={"f": values})
    scores = FleetMetrics(runtime, [metrics.LogLoss()], slices={"f": ["a"]})
    with pytest.raises(ShapeError, match="give a mapping with the values of f"):
        scores.update([0.5], [1], slices=[0])
    with pytest.raises(ShapeError, match="feature 'f' has 2 samples for 1 scores"):
        scores.update([0.5], [1], slices={"f": ["a", "b"]})
    scores.update([0.5, 0.5, 0.5], [1, 0, 1], slices={"f": [["a"], [], ["a", "b"]]})
    scores.publish()
    read = scores.read().run
    assert read["log_loss[f=a]"] == read["log_loss[f=other]"] == pytest.approx(np.log(2))
    with pytest.raises(ConfigError, match="other tasks, parameters or slices"):
        FleetMetrics(runtime, [metrics.LogLoss()], slices={"f": ["b"]})
    runtime.close()


def test_reading_stops_nobody_and_waits_for_nobody() -> None:
    """Async mode: worker 0 reads while worker 1 does nothing, and gets what both have pushed."""
    samples = Samples.drawn(80, seed=3)
    parts = samples.parts(4)
    with LocalFleet(2, 2, in_process=True) as fleet:
        runtimes = [fleet.connect(worker, "async") for worker in range(2)]
        scores = []
        for runtime in runtimes:
            runtime.create(ROWS)
            scores.append(FleetMetrics(runtime, {"ctr": every_metric()}, slices=SLICES))
        for worker in range(2):
            count(scores[worker], parts[worker])
            push(runtimes[worker])
            runtimes[worker].flush()
        check(scores[0].read().run, samples.where(np.isin(samples.groups, _groups(parts[:2]))))
        count(scores[1], parts[2])
        before = scores[1].read().run  # what no push has taken along is not in it
        scores[1].publish()
        after = scores[0].read().run
        assert before != after
        check(after, samples.where(np.isin(samples.groups, _groups(parts[:3]))))
        in_threads([runtime.close for runtime in runtimes])


def _groups(parts: Sequence[Samples]) -> Any:
    return np.concatenate([part.groups for part in parts])


def test_windows_and_decay() -> None:
    """A window of 2 readings has the samples since the reading before the last; decay by hand."""
    parts = Samples.drawn(200, seed=4).parts(5)
    runtime = EmbeddedRuntime()
    scores = FleetMetrics(
        runtime, {"ctr": [metrics.Calibration()]}, slices=SLICES, window=2, decay=0.5
    )
    weighted: list[tuple[float, float]] = []
    for number, part in enumerate(parts):
        count(scores, part)
        scores.publish()
        reading = scores.read()
        weighted = [(up / 2, down / 2) for up, down in weighted]
        weighted.append((float(part.weights @ part.predictions), float(part.weights @ part.labels)))
        up, down = np.sum(weighted, axis=0)
        assert reading.decayed["ctr/calibration"] == pytest.approx(up / down, abs=1e-9)
        recent = parts[max(number - 1, 0) : number + 1]
        ups = sum(part.weights @ part.predictions for part in recent)
        downs = sum(part.weights @ part.labels for part in recent)
        assert reading.window["ctr/calibration"] == pytest.approx(ups / downs, abs=1e-9)
    runtime.close()


def test_memory_is_constant() -> None:
    """A million predictions later the table has no row more than its sums need, and no byte more."""
    runtime = EmbeddedRuntime()
    scores = FleetMetrics(runtime, [metrics.Auc(), metrics.LogLoss()])
    dice = np.random.default_rng(0)
    for label in (0, 1):  # every bin of both classes
        scores.update(np.linspace(0, 1, 10_000), np.full(10_000, label), np.full(10_000, 0.1))
    sizes = []
    for _ in range(20):
        for _ in range(5):
            predictions = dice.random(10_000)
            scores.update(predictions, dice.random(10_000) < predictions, dice.random(10_000))
        scores.publish()
        [table] = runtime.stats()[0]["tables"]
        sizes.append((table["count"], table["bytes"]))
    assert sizes[-1] == sizes[0]
    assert sizes[0][0] <= 2 * (8192 + 2 + 31) // 32 + 2
    assert scores.read().run["auc"] > 0.8
    runtime.close()


def test_shrinking_leaves_them() -> None:
    """fleet.shrink removes rows that no push has named, but for those of metrics."""
    runtime = EmbeddedRuntime()
    runtime.create(ROWS)
    scores = FleetMetrics(runtime, [metrics.LogLoss()])
    scores.update([0.25], [1])
    push(runtime)
    before = scores.read()
    assert [runtime.shrink(unseen=1) for _ in range(3)] == [0, 5, 0]
    assert scores.read() == before
    runtime.close()


def test_other_metrics_under_a_name_are_refused() -> None:
    """By another worker, and twice in one; and what nobody can mean."""
    with LocalFleet(1, 2, in_process=True) as fleet:
        one, two = (fleet.connect(worker, "async") for worker in range(2))
        scores = FleetMetrics(one, [metrics.Auc()])
        with pytest.raises(ConfigError, match="'metrics' exist in this fleet with other tasks"):
            FleetMetrics(two, [metrics.Auc(num_thresholds=100)])
        with pytest.raises(ConfigError, match="counts metrics 'metrics' already; go on with"):
            FleetMetrics(one, [metrics.Auc()])
        with pytest.raises(ConfigError, match="task is 'ctr'; it must be one of"):
            scores.update([0.5], [1], task="ctr")
        with pytest.raises(ConfigError, match="give each its own name="):
            FleetMetrics(two, [metrics.Auc(), metrics.Auc()], "twins")
        with pytest.raises(ConfigError, match="there are no metrics in"):
            FleetMetrics(two, {"ctr": []}, "none")
        with pytest.raises(ConfigError, match="decay is 1"):
            FleetMetrics(two, [metrics.Auc()], "decaying", decay=1)
        mixed = FleetMetrics(one, [metrics.RMSE(), metrics.LogLoss()], "mixed")
        with pytest.raises(ShapeError, match="log_loss needs scores"):
            mixed.update([1.5], [1])  # RMSE could take it, and does not
        mixed.publish()
        assert np.isnan(mixed.read().run["rmse"])
        in_threads([one.close, two.close])


# -- deaths ------------------------------------------------------------------------------------


def incarnations(
    mode: Mode, deaths: dict[int, list[DeathFault]], before_push: bool, dealt: bool
) -> dict[str, float]:
    """What is counted by two workers that die at these calls and run their scripts again."""
    results: list[dict[str, float]] = []
    died: list[int] = []

    def script(runtime: ClusterRuntime) -> None:
        loops = DataLoops(
            runtime.worker_index, 2, runtime.barrier, runtime=lambda: runtime, restarts=True
        )
        runtime.create(ROWS)
        scores = loops.remember("scores", FleetMetrics(runtime, [metrics.Calibration("c")]))
        leased = loops.stepping(batches(60, 2, 1, 7, 1, lambda: runtime))
        for batch in leased if dealt else loops.shard(np.arange(60).reshape(30, 2), True):
            runtime.pull([])
            for counts in (before_push, not before_push):
                if counts:
                    # As numbers of bits: the sum says which samples are in it.
                    scores.update(np.zeros(2), 2.0 ** (np.asarray(batch) % 40))
                else:
                    push(runtime, int(batch[0]))
        scores.publish()
        runtime.barrier()
        results.append({"sum": _sum(scores), "samples": _samples(scores)})

    def work(worker: int) -> None:
        for death in [*deaths.get(worker, []), None]:
            runtime = None
            try:
                runtime = ClusterRuntime(fleet.environment(worker), mode, inject_faults=death)
                script(runtime)
                runtime.barrier()
                if death is not None:
                    death.calls = 0  # the script is over
                runtime.close()
                return
            except SimulatedDeath:
                died.append(worker)
                if runtime is not None:
                    runtime.abandon()

    with LocalFleet(2, 2, in_process=True) as fleet:
        in_threads([partial(work, worker) for worker in range(2)])
        assert fleet.wait() == [0, 0]
    assert set(died) == set(deaths)
    return results[0]


def _totals(scores: FleetMetrics) -> Any:
    runtime: Any = scores._runtime
    return scores._sums.totals(runtime.read_table(scores._sums.spec.key))


def _samples(scores: FleetMetrics) -> float:
    return float(_totals(scores)[0])


def _sum(scores: FleetMetrics) -> float:
    return float(_totals(scores)[2])


@pytest.mark.parametrize(
    ("seed", "dealt", "before_push"),
    [(0, True, True), (1, True, False), (2, False, True), (3, False, False)],
    ids=["dataset", "dataset, update after push", "shard", "shard, update after push"],
)
def test_who_starts_again_counts_every_sample_once(
    seed: int, dealt: bool, before_push: bool
) -> None:
    """Sync mode: both workers die, one of them twice, at calls that the seed chooses."""
    dice = random.Random(seed)
    deaths = {
        0: [DeathFault(dice.randint(15, 60), dice.random() < 0.5)],
        1: [DeathFault(dice.randint(15, 45), dice.random() < 0.5) for _ in range(2)],
    }
    figures = incarnations("sync", deaths, before_push, dealt)
    assert figures == {"samples": 60, "sum": float(sum(2 ** (n % 40) for n in range(60)))}


@pytest.mark.parametrize("seed", range(2))
def test_async_counts_no_sample_twice(seed: int) -> None:
    """Async mode: of a death between two servers, the step may be missing."""
    dice = random.Random(seed)
    deaths = {1: [DeathFault(dice.randint(15, 60), dice.random() < 0.5)]}
    figures = incarnations("async", deaths, before_push=True, dealt=False)
    assert 58 <= figures["samples"] <= 60


@pytest.mark.long
@pytest.mark.parametrize("servers", [1, 3])
def test_a_resumed_job_goes_on_counting(servers: int) -> None:
    """From a snapshot of two servers, on one and on three."""
    samples = Samples.drawn(200, seed=5)
    first, second = samples.parts(2)
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = fleet.connect(0, "async")
        scores = FleetMetrics(runtime, {"ctr": every_metric()}, slices=SLICES)
        count(scores, first)
        scores.publish()
        path = runtime.save("")
        with LocalFleet(servers, 1, resume=path, in_process=True) as later:
            again = later.connect(0, "async")
            scores = FleetMetrics(again, {"ctr": every_metric()}, slices=SLICES)
            check(scores.read().run, first)
            count(scores, second)
            scores.publish()
            check(scores.read().run, samples)
            again.close()
        runtime.close()


def test_a_push_from_another_thread_loses_nothing() -> None:
    """Half-async mode pushes in its own thread while batches are counted."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        runtime = fleet.connect(0, "half-async")
        runtime.create(ROWS)
        scores = FleetMetrics(runtime, [metrics.RMSE("r")])
        for number in range(200):
            scores.update(np.ones(3), np.zeros(3))
            push(runtime, number)
        scores.publish()
        assert _samples(scores) == 600
        runtime.close()

"""A fleet that goes on from a snapshot of another number of workers: no sample is lost."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.core.engine.worker_state import redealt
from psfleet.core.runtime.dataset_pass import batches
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.data_loops import DataLoops
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer.lr import StepDecay
from tests.consistency.workers import ready, step
from tests.trainings import on_fleet

SAMPLES, EPOCHS = 50, 2


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_left_is_dealt_to_the_others(mode: Any, tmp_path: Path) -> None:
    """Two workers use a dataset, and a part of another; three go on with the rest of that in batches of
    another size: together each sample is used as often as there are epochs."""
    used: Counter[int] = Counter()
    earlier: Counter[int] = Counter()
    path = str(tmp_path / "snapshot")

    def work(fleet: LocalFleet, worker: int, batch: int, stop: int) -> None:
        runtime = ready(fleet, worker, ConsistencySettings(mode))
        for size, counts in ((10, earlier), (SAMPLES, used)):
            for done, ranges in enumerate(
                runtime.data_steps(runtime, size, batch, EPOCHS, 0, 1), 1
            ):
                chosen = np.concatenate([np.arange(*pair) for pair in ranges])
                step(runtime, chosen)
                counts.update(chosen.tolist())
                if size == SAMPLES and done == stop:
                    break
        runtime.barrier()
        if stop and worker == 0:
            runtime.save(path)
        runtime.barrier()
        runtime.close()

    on_fleet(partial(work, batch=3, stop=5))
    assert earlier == Counter(dict.fromkeys(range(10 * EPOCHS), 1))
    assert 0 < sum(used.values()) < SAMPLES * EPOCHS
    on_fleet(partial(work, batch=4, stop=0), 1, 3, resume=path)
    assert earlier == Counter(dict.fromkeys(range(10 * EPOCHS), 1))
    assert used == Counter(dict.fromkeys(range(SAMPLES * EPOCHS), 1))


@pytest.mark.parametrize(("mode", "workers"), [("sync", 2), ("sync", 3), ("async", 3)])
def test_a_resumed_job_may_have_more_epochs(mode: Any, workers: int, tmp_path: Path) -> None:
    """A job whose dataset has ended goes on from its snapshot for two further epochs, with the same number of
    workers or another one: each sample is used once more, in the order of its epoch, and what is remembered
    goes on where it was."""
    used: list[Counter[int]] = [Counter(), Counter()]
    steps: list[Counter[int]] = [Counter(), Counter()]  # of each worker
    path = str(tmp_path / "snapshot")

    def work(fleet: LocalFleet, worker: int, count: int, epochs: int) -> None:
        job = epochs > EPOCHS
        runtime: Any = ready(fleet, worker, ConsistencySettings(mode))
        loops = DataLoops(worker, count, runtime.barrier, runtime=lambda: runtime, snapshots=True)
        rate = loops.remember("rate", StepDecay(0.1, step_size=1000))
        data = batches(SAMPLES, 3, epochs, 7, 1, lambda: runtime)
        for chosen in loops.stepping(data):
            step(runtime, chosen)
            assert rate.last_epoch == steps[job][worker] + (steps[0][worker % 2] if job else 0)
            rate.step()
            steps[job][worker] += 1
            used[job].update(chosen.tolist())
        runtime.barrier()
        if worker == 0 and not job:
            runtime.save(path)
        runtime.barrier()
        runtime.close()

    for count, epochs in ((2, EPOCHS), (workers, EPOCHS + 2)):
        resume = path if epochs > EPOCHS else ""
        on_fleet(partial(work, count=count, epochs=epochs), 1, count, resume=resume)
    for counts in used:
        assert counts == Counter(dict.fromkeys(range(SAMPLES), 2))


def test_what_is_remembered_goes_to_other_workers() -> None:
    """Schedulers go on everywhere, generators in their own seats, and loops before the first batch that
    somebody has not done."""
    noise = {"bit_generator": "PCG64", "state": {"state": 1, "inc": 2}}

    def state(loop: int, item: int) -> dict[str, Any]:
        place = {"loop": loop, "item": item, "inside": True, "broken": {}, "collectives": {}}
        return {
            "format": "worker state",
            "version": 1,
            "place": place,
            "states": {"rate": {"last_epoch": 7}},
            "generators": {"noise": noise},
        }

    # Batches 0, 1, 2, ... of two workers: worker 0 has done 0 and 2 and comes to 4, worker 1 to 3.
    two = {0: state(0, 3), 1: state(0, 2)}
    for worker in range(2):
        assert redealt(two, 2, worker) == state(0, 3)
    assert redealt(two, 2, 2) == {**state(0, 3), "generators": {}}
    assert redealt({0: state(1, 0), 1: state(0, 6)}, 2, 0)["place"] == state(0, 7)["place"]
    one = redealt({0: state(0, 3)}, 2, 0)  # nobody knows what worker 1 has done
    assert one["place"] is None
    assert redealt({}, 2, 0) == {}

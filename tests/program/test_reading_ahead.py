"""Steps that read ahead see values that lack their worker's last push, and no other."""

from typing import Any

import numpy as np
import pytest

import psfleet as ps
from psfleet import layers, optimizer
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.runtime.process_runtime import current
from psfleet.data.read_ahead import Peekable
from psfleet.fleet import Fleet
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime

IDS = np.arange(6, dtype=np.int64).reshape(3, 2)
STEPS = 6


@pytest.mark.parametrize(("mode", "behind"), [("async", 1), ("sync", 0)])
def test_one_push_behind(mode: Any, behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of each step is that of the step before it in async mode, its own in sync mode."""
    with LocalFleet(2, 1, in_process=True) as servers:
        cluster = ClusterRuntime(servers.environment(0), mode)
        before = current().use(cluster)
        try:
            plain = losses("plain", False)
            asked = count_asked(cluster, monkeypatch)
            ahead = losses("ahead", True)
        finally:
            current().use(before)
            cluster.close()
    steps = [max(step - behind, 0) for step in range(STEPS)]
    np.testing.assert_allclose(ahead, [plain[step] for step in steps], rtol=1e-5)
    assert len(asked) == (STEPS - 1) * behind


@pytest.mark.parametrize(("mode", "behind"), [("async", 1), ("sync", 0)])
def test_loops_of_run(mode: Any, behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executor.read_ahead does the same for any loop, and what the fleet hands out is seen before it is
    taken. Of a dataset each fourth batch is not known before."""
    fleet, feed = Fleet(), {"ids": IDS}
    sources = {
        "list": (feed for _ in range(STEPS)),
        "shard": fleet.shard([feed] * STEPS),
        "dataset": fleet.dataset([feed] * STEPS, 1),
    }
    with LocalFleet(2, 1, in_process=True) as servers:
        cluster = ClusterRuntime(servers.environment(0), mode)
        before = current().use(cluster)
        try:
            plain = losses("plain", False)
            asked = count_asked(cluster, monkeypatch)
            for name, source in sources.items():
                blind = {4} if name == "dataset" else set()  # that ask when it is their turn
                steps = [max(n - behind * (n not in blind), 0) for n in range(STEPS)]
                actual = looped(name, source)
                np.testing.assert_allclose(actual, [plain[n] for n in steps], rtol=1e-5)
                assert len(asked) == (STEPS - 1 - len(blind)) * behind
                asked.clear()
        finally:
            current().use(before)
            cluster.close()


def looped(name: str, source: Any) -> list[float]:
    """As `losses`, by a loop of `run`."""
    program, loss = small(name)
    exe, losses_seen = ps.Executor(), []
    for feed in exe.read_ahead(source, lambda batch: batch if type(batch) is dict else batch[0]):
        (value,) = exe.run(program, feed=feed, fetch_list=[loss])
        losses_seen.append(float(value.item()))
    return [value - losses_seen[0] for value in losses_seen]


def test_what_is_seen_is_what_comes() -> None:
    """peek gives what its source will give next, without taking it, and nothing where nothing is known."""
    taken: list[int] = []
    three = [[0], [1], [2]]

    def items() -> Any:
        for number in range(3):
            taken.append(number)
            yield three[number]

    known = [three[1], None]
    peekable = Peekable(items(), lambda: known.pop(0))
    assert next(peekable) == [0]
    seen = peekable.peek()
    assert taken == [0]
    assert next(peekable) is seen
    assert peekable.peek() is None
    assert [*peekable] == [[2]]


def losses(name: str, read_ahead: bool) -> list[float]:
    """Of a few steps that each move weights of both kinds by the same amount."""
    program, loss = small(name)
    found: list[float] = []
    ps.Executor().train_from_dataset(
        program,
        [{"ids": IDS}] * STEPS,
        fetch_list=[loss],
        fetch_handler=lambda values: found.append(float(values[0].item())),
        print_period=1,
        read_ahead=read_ahead,
    )
    return [value - found[0] for value in found]


def small(name: str) -> tuple[ps.Program, Any]:
    """A program with weights of both kinds, and its loss."""
    program = ps.Program()
    with ps.program_guard(program):
        ids = layers.data("ids", [None, 2], dtype="int64")
        rows = layers.embedding(ids, size=[100, 4], is_distributed=True, name=f"{name}.rows")
        value = layers.fc(layers.reshape(rows * 0.0 + 1.0, [-1, 8]), 1, name=f"{name}.fc")
        loss = layers.mean(value) + layers.mean(rows)
        optimizer.SGD(0.1).minimize(loss)
    return program, loss


def count_asked(cluster: ClusterRuntime, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is read ahead from now on."""
    asked: list[Any] = []
    inner = cluster.pull_ahead

    def pull_ahead(reads: list[Read]) -> Any:
        asked.append(reads)
        return inner(reads)

    monkeypatch.setattr(cluster._transfers, "pull_ahead", pull_ahead)
    return asked

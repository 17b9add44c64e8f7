"""Who uses a worker's tables where they cannot be used is told so at once, and does not wait."""

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import psfleet
from psfleet import fleet, metrics
from psfleet.core.base.errors import PsfleetError, UsageError
from psfleet.core.client import Client
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current, using
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD, Adam

IDS, GRADS = np.arange(3), np.ones((3, 4), np.float32)


def test_a_table_of_a_client_that_is_closed() -> None:
    """After `with psfleet.connect()` pushes and pulls are refused; they do not wait for an answer."""
    with LocalFleet(2, 1, in_process=True) as fleet:
        with psfleet.connect(fleet.environment(0)) as client:
            table = client.sparse_table("t", dim=4, optimizer=Adam(0.1))
            table.push(IDS, GRADS).wait(60)
        with pytest.raises(UsageError, match="this client is closed, and so are its tables"):
            table.pull(IDS)
        with pytest.raises(UsageError, match="this client is closed"):
            table.push(IDS, GRADS).wait(60)
        client.close()


def test_a_script_that_has_stopped_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """After fleet.stop_worker() what needs the servers is refused at once, until fleet.init()."""
    with LocalFleet(1, 1, in_process=True) as servers:
        monkeypatch.setenv("PSFLEET_ROLE", "worker")
        monkeypatch.setenv("PSFLEET_SERVERS", ",".join(servers.endpoints))
        fleet.init()
        fleet.init_worker()
        fleet.stop_worker()
        fleet.stop_worker()
        for use in (fleet.shrink, fleet.barrier_worker, psfleet.connect):
            with pytest.raises(UsageError, match=r"has left with fleet.stop_worker\(\)"):
                use()
        fleet.init()
        fleet._fleet.forget()


def _push_and_fail() -> None:
    with psfleet.connect(mode="sync") as client:
        client.sparse_table("t", dim=4, optimizer=SGD(1.0)).push(IDS, GRADS)
        raise KeyboardInterrupt


def test_a_block_that_fails_does_not_wait_for_others_without_end() -> None:
    """Sync mode: when a block fails in a round that the others have not come to, its error comes through,
    with a note, although nobody completes the round; if they come later, the push counts."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        mine, other = fleet.connect(0, "sync"), Client(fleet.connect(1, "sync"))
        current().use(mine)
        try:
            with pytest.raises(KeyboardInterrupt) as error:
                _push_and_fail()
            assert "the last pushes may not be applied" in error.value.__notes__[0]
            theirs = other.sparse_table("t", dim=4, optimizer=SGD(1.0))
            before = theirs.pull(IDS)
            theirs.push(IDS, 3 * GRADS)
            with concurrent.futures.ThreadPoolExecutor(1) as both:
                future = both.submit(mine.flush, 60)
                other.flush(60)
                future.result()
            assert np.array_equal(theirs.pull(IDS), before - 2)
        finally:
            current().use(None)
            mine.close()
            other.close()


def _said_in_fork(uses: Sequence[Callable[[], object]]) -> list[str]:
    """The replies that a forked process gets to each of these uses."""

    def tried() -> None:
        for use in uses:
            try:
                theirs.send(repr(use()))
            except PsfleetError as error:
                theirs.send(str(error))

    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        child = multiprocessing.get_context("fork").Process(target=tried)
        child.start()
        said = [ours.recv() for _ in uses if ours.poll(60)]
        child.join(60)
        assert child.exitcode == 0
    return said


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # that is the point
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_fork_of_a_worker_is_told_so(mode: str) -> None:
    """A forked process, as of a DataLoader, cannot use the worker's tables; the worker goes on."""
    with LocalFleet(1, 1) as fleet, psfleet.connect(fleet.environment(0), mode=mode) as client:
        table = client.sparse_table("t", dim=4, optimizer=Adam(0.1))
        table.push(IDS, GRADS)  # under way when the process forks
        said = _said_in_fork([lambda: table.pull(IDS), lambda: table.push(IDS, GRADS).wait(60)])
        assert len(said) == 2
        assert all("which has the connections to the servers" in one for one in said)
        before = table.pull(IDS)
        table.push(IDS, GRADS).wait(60)
        assert (table.pull(IDS) != before).all()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_of_an_embedded_fleet_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forked process would push, write or log is refused: its parent would not see it. It may read."""
    monkeypatch.setattr(fleet._fleet, "_joined", None)
    with using(EmbeddedRuntime()) as process:
        client = Client(process.active())
        table = client.sparse_table("t", dim=4, optimizer=SGD(1.0))
        table.push(IDS, GRADS)
        before = table.pull(IDS)
        counted = fleet.metrics([metrics.LogLoss()])
        uses: list[Callable[[], object]] = [
            lambda: table.push(IDS, GRADS),
            lambda: table.write(IDS, GRADS),
            lambda: psfleet.connect().sparse_table("other", dim=4, optimizer=SGD(1.0)),
            lambda: psfleet.connect().runtime.load("nowhere"),
            fleet.shrink,
            lambda: fleet.log("loss", 1.0),
            lambda: fleet.report_evaluation({"auc": 0.5}),
            lambda: counted.update([0.5], [1]),
        ]
        *said, read = _said_in_fork([*uses, lambda: table.pull(IDS).tolist()])
        assert len(said) == len(uses)
        assert all("was forked from process" in one for one in said), said
        assert read == repr(before.tolist())
        table.push(IDS, GRADS)
        counted.update([0.5], [1])
        np.testing.assert_array_equal(table.pull(IDS), before - 1)

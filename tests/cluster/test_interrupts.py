"""A KeyboardInterrupt, as Ctrl-C or a notebook's stop button sends it, and training after it."""

import contextlib
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import psfleet
from psfleet.core.base import threads
from psfleet.core.base.settings.environment import Environment
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD, Adam

TIMES = 60
EVERYWHERE = pytest.mark.parametrize("mode", ["embedded", "sync", "async", "half-async"])


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Tests that run in the background of a shell begin with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupter:
    """Interrupts the main thread at a moment that a seed decides."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._asked: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="interrupter")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within, it can interrupt."""
        self._thread.start()
        try:
            yield
        finally:
            self._asked.put(None)
            self._thread.join()

    def interrupt(self, action: Callable[[], object]) -> None:
        """Call the action; the interrupt comes within 10 ms, perhaps before it begins."""
        self._asked.put(self._dice.uniform(1e-4, 1e-2))
        action()

    def _run(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while (delay := self._asked.get()) is not None:
            threading.Event().wait(delay)
            signal.pthread_kill(main, signal.SIGINT)


@EVERYWHERE
def test_training_goes_on_after_interrupts(mode: str) -> None:
    """After 60 interrupts at any moment of a step, each push was applied whole or not at all, once."""
    with contextlib.ExitStack() as stack:
        environment = Environment(None, 0, (), 1)
        if mode != "embedded":
            environment = stack.enter_context(LocalFleet(2, 1, in_process=True)).environment(0)
        asked = "async" if mode == "embedded" else mode
        ps = stack.enter_context(psfleet.connect(environment, mode=asked))
        users = ps.sparse_table("users", dim=4, optimizer=Adam(0.01))
        total = ps.dense_table("total", np.zeros(90), optimizer=SGD(1.0), servers=2)
        ids, grads = np.arange(64), np.ones((64, 4))

        def step() -> None:
            ps.pull({users: ids, total: None})
            ps.push({users: (ids, grads), total: -np.ones(90)})

        def train() -> None:
            while True:
                step()

        step()
        interrupter = Interrupter(7)
        with interrupter.running():
            for _ in range(TIMES):
                with pytest.raises(KeyboardInterrupt):
                    interrupter.interrupt(train)
        step()
        ps.flush()
        steps = [{t["name"]: t["step"] for t in server["tables"]} for server in ps.stats()]
        count = steps[0]["total"]
        assert all(counts == {"users": count, "total": count} for counts in steps)
        if mode != "half-async":  # which sums gradients to fewer updates
            np.testing.assert_array_equal(total.pull(), np.full(90, count))
        assert count > 1


def test_an_interrupt_ends_a_wait() -> None:
    """Sync mode: a worker that waits for another's push is interrupted at once, and waits again later."""
    with (
        LocalFleet(1, 2, in_process=True) as fleet,
        psfleet.connect(fleet.environment(0), mode="sync") as ps,
    ):
        total = ps.dense_table("total", np.zeros(3), optimizer=SGD(1.0))
        ps.push({total: -np.ones(3)})
        interrupter = Interrupter(1)
        with interrupter.running():
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    interrupter.interrupt(total.pull)
        with psfleet.connect(fleet.environment(1), mode="sync") as other:
            same = other.dense_table("total", np.zeros(3), optimizer=SGD(1.0))
            same.push(-np.ones(3))
            thread = threading.Thread(target=other.flush)
            thread.start()
            np.testing.assert_array_equal(total.pull(), np.ones(3))
            thread.join()
            leaving = threading.Thread(target=other.close)
            leaving.start()
            ps.close()
            leaving.join()


def test_an_own_handler_stays() -> None:
    """A handler that the script has set is called once, after the block, and is in place again."""
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    try:
        own = signal.getsignal(signal.SIGINT)
        with threads.deferred(), threads.deferred():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)

"""Calls of `psfleet.connect()` for several tables: one call and one round instead of one for each."""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet.client import Client
from psfleet.entry import ShowClickEntry
from psfleet.errors import IdError, ShapeError, UsageError, WrongType
from psfleet.faults import MessageFaults, Send
from psfleet.optimizer import SGD, Adagrad, Adam
from psfleet.runtime.interface import Gradient, TableState
from psfleet.settings.environment import Environment
from psfleet.settings.mode_names import Mode
from psfleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.trainings import in_threads, same_bits

MODES: list[Mode] = ["sync", "async", "ssp", "geo", "half-async"]
STEPS = 12
ROW = ([1], np.ones((1, 4)))  # for "users"


class Model:
    """Three sparse tables and a dense one, trained with gradients that depend on what was pulled.

    Args:
        client: Its tables.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.users = client.sparse_table("users", dim=4, optimizer=Adam(0.01))
        self.items = client.sparse_table("items", dim=3, optimizer=Adagrad(0.1))
        self.tags = client.sparse_table("tags", dim=2, optimizer=SGD(0.1))
        self.bias = client.dense_table("bias", np.linspace(0, 1, 70), optimizer=Adam(0.05))
        self.sparse = [self.users, self.items, self.tags]

    def batches(self, worker: int) -> Iterator[list[Any]]:
        """Ids of each step, with repeats, in one and in two axes."""
        dice = np.random.default_rng(worker)
        for _ in range(STEPS):
            yield [dice.integers(-50, 50, 20), dice.integers(0, 9, (5, 2)), dice.integers(0, 99, 7)]

    def together(self, worker: int) -> None:
        """Each step is one pull and one push."""
        for ids in self.batches(worker):
            asked = dict(zip(self.sparse, ids, strict=True))
            rows = self.client.pull({**asked, self.bias: None})
            parts = {table: (asked[table], 0.1 * rows[table] + 1) for table in self.sparse}
            self.client.push({**parts, self.bias: 0.1 * rows[self.bias] + worker})
        self.client.flush()

    def one_by_one(self, worker: int) -> None:
        """Each step is four pulls and four pushes."""
        for ids in self.batches(worker):
            rows = [table.pull(i) for table, i in zip(self.sparse, ids, strict=True)]
            bias = self.bias.pull()
            for table, i, values in zip(self.sparse, ids, rows, strict=True):
                table.push(i, 0.1 * values + 1)
            self.bias.push(0.1 * bias + worker)
        self.client.flush()

    def result(self) -> list[TableState]:
        """All tables, optimizer state included."""
        return [
            self.client.runtime.read_table(table.spec.key) for table in [*self.sparse, self.bias]
        ]


def trained(mode: Mode, how: str, workers: int = 2, servers: int = 2) -> list[TableState]:
    """The tables after every worker has made its steps; how: together or one_by_one."""
    with LocalFleet(servers, workers, in_process=True) as fleet, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(psfleet.connect(fleet.environment(worker), mode=mode))
            for worker in range(workers)
        ]
        models = [Model(client) for client in clients]
        states: list[TableState] = []

        def work(worker: int) -> None:
            getattr(models[worker], how)(worker)
            clients[worker].barrier()
            if worker == 0:
                states.extend(models[0].result())
            clients[worker].barrier()

        in_threads([functools.partial(work, worker) for worker in range(workers)])
        return states


def embedded(how: str) -> list[TableState]:
    """The same without a fleet, by worker 0 alone."""
    with psfleet.connect(Environment(None, 0, (), 1)) as client:
        model = Model(client)
        getattr(model, how)(0)
        return model.result()


def test_the_same_bits_as_one_by_one() -> None:
    """Sync mode: one round for all tables gives each the bits that a round of its own gives it."""
    same_bits(trained("sync", "together"), trained("sync", "one_by_one"))


def test_the_same_bits_without_a_fleet() -> None:
    """Embedded, and with one worker in sync and async mode, all ways give the same bits."""
    alone = embedded("one_by_one")
    same_bits(embedded("together"), alone)
    same_bits(trained("sync", "together", workers=1), alone)
    same_bits(trained("async", "together", workers=1, servers=1), alone)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_applies_every_push(mode: Mode) -> None:
    """Two workers and two servers: each table counts all pushes of both workers, whatever the mode."""
    ids = np.arange(5)
    with LocalFleet(2, 2, in_process=True) as fleet, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(psfleet.connect(fleet.environment(worker), mode=mode))
            for worker in range(2)
        ]
        sums: list[tuple[Any, Any]] = []

        def work(client: Client) -> None:
            table = client.sparse_table("counts", dim=1, optimizer=SGD(1.0))
            total = client.dense_table("total", np.zeros(3), optimizer=SGD(1.0))
            start = table.pull(ids)
            client.barrier()
            for _ in range(STEPS):
                client.push({table: (ids, -np.ones((5, 1))), total: -np.ones(3)}).wait(60)
            client.barrier()
            got = client.pull({total: None, table: ids})
            assert list(got) == [total, table]
            sums.append((got[table] - start, got[total]))
            client.barrier()

        in_threads([functools.partial(work, client) for client in clients])
    wanted = STEPS if mode == "sync" else 2 * STEPS  # a round takes the mean
    for rows, total in sums:
        np.testing.assert_allclose(rows, wanted, rtol=1e-5)
        np.testing.assert_allclose(total, wanted, rtol=1e-5)


class Calls:
    """Counts the calls of a worker by method; give it to a ClusterRuntime as `meddle`."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, server: int, send: Send) -> Send:
        """`send` of one server."""

        def counted(method: str, request: bytes, seconds: float) -> bytes:
            with self._lock:
                self.made[method] += 1
            return send(method, request, seconds)

        return counted

    def of_training(self) -> int:
        """Pulls, pushes, and both in one."""
        return sum(self.made[f"Shard/{method}"] for method in ("Pull", "Push", "Exchange"))


def counted(mode: Mode, how: str) -> tuple[int, list[int]]:
    """Calls that a worker makes for its steps to a fleet of two servers, and the pushes they count."""
    calls = Calls()
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), mode, meddle=calls)
        with Client(runtime) as client:
            getattr(Model(client), how)(0)
            made = calls.of_training()
            return made, [server["pushes"] for server in client.stats()]


def test_one_round_for_all_tables() -> None:
    """Sync mode: a step with four tables is one round and two calls to each server, not four and eight."""
    calls, pushes = counted("sync", "together")
    assert pushes == [STEPS, STEPS]
    assert calls == 2 * (2 * STEPS + 1)  # a pull that commits, a push; at last a pull that commits
    calls, pushes = counted("sync", "one_by_one")
    assert pushes == [4 * STEPS, 4 * STEPS]
    assert calls > 2 * 8 * STEPS - 2 * STEPS


def test_one_push_for_all_tables_in_async_mode() -> None:
    """Async mode: each step is one push, in the company of the next pull where it can be."""
    calls, pushes = counted("async", "together")
    assert pushes == [STEPS, STEPS]
    assert 2 * (STEPS + 1) <= calls <= 2 * 2 * STEPS


def test_lost_replies_change_nothing() -> None:
    """With answers lost and requests repeated, the tables have the bits that they have without."""
    with LocalFleet(2, 1, in_process=True) as fleet:
        meddle = MessageFaults(3, drop=0.2, duplicate=0.2)
        with Client(ClusterRuntime(fleet.environment(0), "sync", meddle=meddle)) as client:
            model = Model(client)
            model.together(0)
            same_bits(model.result(), embedded("together"))
        assert meddle.dropped
        assert meddle.duplicated


def test_read_ahead_of_several_tables() -> None:
    """Values of several tables come ahead together, and lack exactly the push that overtook them."""
    with (
        LocalFleet(2, 1, in_process=True) as fleet,
        psfleet.connect(fleet.environment(0)) as client,
    ):
        table = client.sparse_table("rows", dim=2, optimizer=SGD(1.0))
        total = client.dense_table("total", np.zeros(3), optimizer=SGD(1.0))
        ids = np.arange(6).reshape(2, 3)
        start = table.pull(ids)
        ahead = client.pull_ahead({table: ids, total: None})
        for step in range(5):
            following = client.pull_ahead({table: ids, total: None})
            got = ahead.wait()
            np.testing.assert_allclose(start - got[table], max(step - 1, 0), atol=1e-5)
            np.testing.assert_array_equal(got[total], -max(step - 1, 0))
            client.push({table: (ids, np.ones((2, 3, 2))), total: np.ones(3)})
            ahead = following


def test_shows_and_clicks_beside_other_tables() -> None:
    """A part of four counts shows and clicks, and None stands for the usual ones."""
    with psfleet.connect(Environment(None, 0, (), 1)) as client:
        entry = ShowClickEntry("show", "click")
        shown = client.sparse_table("shown", dim=2, optimizer=SGD(1.0), entry=entry)
        plain = client.sparse_table("plain", dim=2, optimizer=SGD(1.0))
        grads = np.ones((3, 2))
        client.push({shown: ([1, 2, 2], grads, None, [0, 1, 1]), plain: ([1, 2, 3], grads)})
        state = client.runtime.read_table(shown.spec.key)
        assert state.scores is not None
        np.testing.assert_array_equal(state.scores, [[1, 0], [2, 2]])


def test_a_worker_without_a_batch_makes_its_round() -> None:
    """Sync mode: with an empty push a worker takes part in the round and changes nothing."""
    with LocalFleet(2, 2, in_process=True) as fleet, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(psfleet.connect(fleet.environment(worker), mode="sync"))
            for worker in range(2)
        ]
        found = []

        def work(worker: int) -> None:
            total = clients[worker].dense_table("total", np.zeros(3), optimizer=SGD(1.0))
            clients[worker].push({total: -np.ones(3)} if worker else {})
            found.append(clients[worker].pull({total: None})[total])

        in_threads([functools.partial(work, worker) for worker in range(2)])
    np.testing.assert_array_equal(found, np.ones((2, 3)))


@pytest.fixture(scope="module", params=["embedded", "sync", "async", "geo", "half-async"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    """Tables embedded, and of two servers in every mode."""
    with contextlib.ExitStack() as stack:
        environment = Environment(None, 0, (), 1)
        if request.param != "embedded":
            environment = stack.enter_context(LocalFleet(2, 1, in_process=True)).environment(0)
        mode: Mode = "async" if request.param == "embedded" else request.param
        model = Model(stack.enter_context(psfleet.connect(environment, mode=mode)))
        model.client.push({model.users: ROW})
        model.client.flush()  # its threads are there from now on
        yield model


WRONG: dict[str, tuple[type[UsageError], str, Callable[[Model], object]]] = {
    "a list": (WrongType, "gradients is .* it must be a dict", lambda m: m.client.push([])),  # type: ignore[arg-type]
    "a list to pull": (WrongType, "ids is 5, it must be a dict", lambda m: m.client.pull(5)),  # type: ignore[arg-type]
    "a name": (
        UsageError,
        "a key of this push is 'users'; it must be a table, as sparse_table",
        lambda m: m.client.push({m.bias: np.ones(70), "users": ROW}),  # type: ignore[type-var]
    ),
    "no tuple": (
        ShapeError,
        r"'users' is sparse; .* \(ids, grads\) or \(ids, grads, shows, clicks\), not a list of 2",
        lambda m: m.client.push({m.bias: np.ones(70), m.users: list(ROW)}),
    ),
    "no gradients": (
        ShapeError,
        r"'users' is sparse; .* not array\(\[1\]\) \(ndarray\)",
        lambda m: m.client.push({m.bias: np.ones(70), m.users: np.array([1])}),
    ),
    "ids to a dense table": (
        ShapeError,
        r"the gradient for table 'bias' cannot be read",
        lambda m: m.client.push({m.users: ROW, m.bias: ([1, 2], np.ones(70))}),
    ),
    "ids of a dense table": (
        ShapeError,
        r"'bias' is dense and is pulled whole; give None for it, not a list of 1",
        lambda m: m.client.pull({m.users: [1], m.bias: [1]}),
    ),
    "no ids": (IdError, "'users': ids have dtype object", lambda m: m.client.pull({m.users: None})),
    "width": (
        ShapeError,
        r"'items' has rows of 3; the gradient has \(1, 4\)",
        lambda m: m.client.push({m.users: ROW, m.items: ROW}),
    ),
    "shape": (
        ShapeError,
        r"'bias' has shape \(70,\), the gradient has \(71,\)",
        lambda m: m.client.push({m.users: ROW, m.bias: np.ones(71)}),
    ),
    "half an id": (
        IdError,
        "'tags': id 0.5",
        lambda m: m.client.push({m.users: ROW, m.tags: ([0.5], np.ones((1, 2)))}),
    ),
    "shows of a table that counts none": (
        UsageError,
        "'items' counts no shows",
        lambda m: m.client.push({m.users: ROW, m.items: ([1], np.ones((1, 3)), [1])}),
    ),
    "twice": (
        UsageError,
        "a push names table 'users' twice; sum its gradients first",
        lambda m: m.client.push({m.users: ROW, Model(m.client).users: ROW}),
    ),
    "ahead": (UsageError, "a key of this pull is 5", lambda m: m.client.pull_ahead({5: [1]})),  # type: ignore[type-var]
}


@pytest.mark.parametrize("case", WRONG)
def test_nothing_is_sent_where_one_part_is_wrong(model: Model, case: str) -> None:
    """One sentence names the table; no table has changed, and the next push works."""
    error, words, use = WRONG[case]
    before = model.result()
    with pytest.raises(error, match=words):
        use(model)
    same_bits(model.result(), before)
    model.client.push({model.users: ROW, model.bias: np.zeros(70)}).wait(60)


def test_tables_of_another_client() -> None:
    """A table is used by the client that made it."""
    alone = Environment(None, 0, (), 1)
    with psfleet.connect(alone) as one, psfleet.connect(alone) as other:
        users = Model(one).users
        with pytest.raises(UsageError, match=r"'users' belongs to another client; pull it with"):
            other.pull({users: [1]})


def test_a_gradient_that_stands_twice_is_refused_everywhere(model: Model) -> None:
    """The runtimes too take one gradient for each table: embedded the mean of both was applied."""
    gradient = Gradient(model.users.spec.key, np.ones((1, 4), np.float32), np.array([1]), 1.0)
    with pytest.raises(UsageError, match="names table 'users' twice"):
        model.client.runtime.push([gradient, gradient])

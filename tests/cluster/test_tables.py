"""Tables of `psfleet.connect()`: what a push may look like, and one round where a call is for several."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.client import Client
from psfleet.core.engine.runtime_interface import Gradient, TableState
from psfleet.core.engine.schema.entry import ShowClickEntry
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD, Adagrad, Adam
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.refusals import check_refusals
from tests.trainings import in_threads, same_bits
from tests.watched_calls import WatchedCalls

ONES = np.ones((2, 4), np.float32)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Tables of a fleet of two servers."""
    with (
        LocalFleet(2, 1, in_process=True) as fleet,
        psfleet.connect(fleet.environment(0)) as client,
    ):
        _rows(client).push([1, 2], ONES).wait(60)  # its thread is there from now on
        yield client


def test_gradients_in_the_shape_that_rows_come_in(client: Client) -> None:
    """What `pull` gives for ids of two axes, `push` takes; repeated ids are summed."""
    table = client.sparse_table("two axes", dim=4, optimizer=SGD(1.0))
    ids = np.array([[1, 2], [3, 1]])
    before = table.pull(ids)
    table.push(ids, np.ones_like(before)).wait(60)
    np.testing.assert_allclose((before - table.pull(ids))[..., 0], [[2, 1], [1, 2]], rtol=1e-6)


def test_shows_of_ids_with_two_axes(client: Client) -> None:
    """A show for each sample counts for all of its ids, one for each id counts alone."""
    entry = ShowClickEntry("show", "click")
    table = client.sparse_table("shown", dim=4, optimizer=SGD(1.0), entry=entry)
    ids = np.array([[1, 2], [3, 4]])
    table.push(ids, table.pull(ids), shows=[[1], [5]], clicks=np.zeros((2, 2))).wait(60)
    state = client.runtime.read_table(table.spec.key)
    assert state.ids is not None
    assert state.scores is not None
    shows = dict(zip(state.ids.tolist(), state.scores[:, 0].tolist(), strict=True))
    assert shows == {1: 1, 2: 1, 3: 5, 4: 5}
    message = r"the shows for table 'shown' are \(3,\), the ids \(2, 2\)"
    with pytest.raises(ShapeError, match=message):
        table.push(ids, table.pull(ids), shows=[1, 2, 3])


REFUSED = """
_rows(client).pull([[1], [2, 3]])  # IdError: ...ids cannot be read
_rows(client).pull(["a"])  # IdError: ...hash them
_rows(client).push([1], [["a"] * 4])  # ShapeError: ...'rows'
_rows(client).push([1, 2], [[1] * 4, [2] * 3])  # ShapeError: ...'rows'
_rows(client).push([1, 2], 1j * ONES)  # ShapeError: ...complex
_rows(client).push([[1, 2]], ONES)  # ShapeError: ...(2, 4) for ids (1, 2)
client.dense_table("dense", ONES, optimizer=SGD(1.0)).push("x")  # ShapeError: ...'dense' is 'x'
client.sparse_table("flag", True, SGD(1.0))  # WrongType: ...dim is True
client.sparse_table("e", 4, SGD(1.0), entry=5)  # WrongType: ...entry is 5
client.sparse_table("rows", 5, SGD(1.0))  # TableConflict: ...'rows' exists ...: its shape is (4,), not (5,);
client.sparse_table("rows", 4, optimizer.Adam(1.0))  # TableConflict: ...: its rule is SGD(), not Adam("""


def _rows(client: Any) -> Any:
    return client.sparse_table("rows", dim=4, optimizer=SGD(1.0))


def test_what_cannot_be_meant_is_refused(client: Client) -> None:
    """One sentence that names the table and quotes the value; the next push works.

    Two workers that declare a table differently hear in what, and of what is alike nothing.
    """
    check_refusals(REFUSED, globals() | vars(psfleet) | {"client": client})
    _rows(client).push([1, 2], ONES).wait(60)


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


def connected(fleet: LocalFleet, mode: Mode, stack: contextlib.ExitStack) -> list[Client]:
    """A client for each worker."""
    places = [fleet.environment(worker) for worker in range(fleet.workers)]
    return [stack.enter_context(psfleet.connect(place, mode=mode)) for place in places]


def trained(mode: Mode, how: str) -> list[TableState]:
    """The tables after both workers have made their steps; how: together or one_by_one."""
    with LocalFleet(2, 2, in_process=True) as fleet, contextlib.ExitStack() as stack:
        clients = connected(fleet, mode, stack)
        models = [Model(client) for client in clients]
        states: list[TableState] = []

        def work(worker: int) -> None:
            getattr(models[worker], how)(worker)
            clients[worker].barrier()
            if worker == 0:
                states.extend(models[0].result())
            clients[worker].barrier()

        in_threads([functools.partial(work, worker) for worker in range(2)])
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
    """Embedded too, which has the bits of a fleet: tests/cluster/test_bits.py."""
    same_bits(embedded("together"), embedded("one_by_one"))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_applies_every_push(mode: Mode) -> None:
    """Two workers and two servers: each table counts all pushes of both workers, whatever the mode."""
    ids = np.arange(5)
    with LocalFleet(2, 2, in_process=True) as fleet, contextlib.ExitStack() as stack:
        clients = connected(fleet, mode, stack)
        sums: list[tuple[Any, Any]] = []

        def work(client: Client) -> None:
            table = client.sparse_table("counts", dim=1, optimizer=SGD(1.0))
            total = client.dense_table("total", np.zeros(3), optimizer=SGD(1.0))
            start = table.pull(ids)
            client.barrier()
            for _ in range(STEPS):
                client.push({table: (ids, -np.ones((5, 1))), total: -np.ones(3)}).wait(60)
            client.barrier()
            actual = client.pull({total: None, table: ids})
            assert list(actual) == [total, table]
            sums.append((actual[table] - start, actual[total]))
            client.barrier()

        in_threads([functools.partial(work, client) for client in clients])
    expected = STEPS if mode == "sync" else 2 * STEPS  # a round takes the mean
    for rows, total in sums:
        np.testing.assert_allclose(rows, expected, rtol=1e-5)
        np.testing.assert_allclose(total, expected, rtol=1e-5)


def counted(mode: Mode, how: str) -> tuple[int, list[int]]:
    """Calls that a worker makes for its steps to a fleet of two servers, and the pushes they count."""
    calls = WatchedCalls()
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), mode, inject_faults=calls)
        with Client(runtime) as client:
            getattr(Model(client), how)(0)
            methods = ("Shard/Pull", "Shard/Push", "Shard/Exchange")
            made = sum(method in methods for method in calls.methods)
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


@pytest.fixture(scope="module", params=["embedded", "sync", "geo", "half-async"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    """Tables embedded, and of two servers."""
    with contextlib.ExitStack() as stack:
        environment = Environment(None, 0, (), 1)
        if request.param != "embedded":
            environment = stack.enter_context(LocalFleet(2, 1, in_process=True)).environment(0)
        mode: Mode = "async" if request.param == "embedded" else request.param
        model = Model(stack.enter_context(psfleet.connect(environment, mode=mode)))
        model.client.push({model.users: ROW})
        model.client.flush()  # its threads are there from now on
        yield model


REFUSED_TOGETHER = """
client.push([])  # WrongType: ...gradients is ... it must be a dict
client.pull(5)  # WrongType: ...ids is 5, it must be a dict
client.push({bias: ones(70), "users": ROW})  # UsageError: a key of this push is 'users'; it must be a table
client.push({bias: ones(70), users: list(ROW)})  # ShapeError: ...(ids, grads, shows, clicks), not a list of 2
client.push({bias: ones(70), users: ones(1)})  # ShapeError: ...'users' is sparse; ... array([1.]) (ndarray)
client.push({users: ROW, bias: ([1, 2], ones(70))})  # ShapeError: ...for table 'bias' cannot be read
client.pull({users: [1], bias: [1]})  # ShapeError: ...'bias' is dense and is pulled whole; give None for it
client.pull({users: None})  # IdError: ...'users': ids have dtype object
client.push({users: ROW, items: ROW})  # ShapeError: ...'items' has rows of 3; the gradient has (1, 4)
client.push({users: ROW, bias: ones(71)})  # ShapeError: ...'bias' has shape (70,), the gradient has (71,)
client.push({users: ROW, tags: ([0.5], ones((1, 2)))})  # IdError: ...'tags': id 0.5
client.push({users: ROW, items: ([1], ones((1, 3)), [1])})  # UsageError: ...'items' counts no shows
client.push({users: ROW, Model(client).users: ROW})  # UsageError: a push names table 'users' twice; sum its
client.pull_ahead({5: [1]})  # UsageError: a key of this pull is 5
runtime.push([gradient, gradient])  # UsageError: ...names table 'users' twice"""


def test_nothing_is_sent_where_one_part_is_wrong(model: Model) -> None:
    """One sentence names the table; no table has changed, and the next push works.

    The runtimes too take one gradient for each table: embedded the mean of both was applied.
    """
    before = model.result()
    gradient = Gradient(model.users.spec.key, np.ones((1, 4), np.float32), np.array([1]), 1.0)
    names = {"Model": Model, "ROW": ROW, "ones": np.ones, "gradient": gradient}
    check_refusals(REFUSED_TOGETHER, names | vars(model) | {"runtime": model.client.runtime})
    same_bits(model.result(), before)
    model.client.push({model.users: ROW, model.bias: np.zeros(70)}).wait(60)


def test_tables_of_another_client() -> None:
    """A table is used by the client that made it."""
    alone = Environment(None, 0, (), 1)
    with psfleet.connect(alone) as one, psfleet.connect(alone) as other:
        users = Model(one).users
        with pytest.raises(UsageError, match=r"'users' belongs to another client; pull it with"):
            other.pull({users: [1]})

"""Clients of psfleet.connect(): one seat with the fleet of their process, saved and loaded with it."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import psfleet
from psfleet import fleet, layers
from psfleet.checkpoint import read_specs
from psfleet.core.base.errors import CheckpointError, ConfigError, UsageError
from psfleet.core.base.logs import set_up_logs
from psfleet.core.base.settings.environment import read_environment, unknown_variables
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.client import Client
from psfleet.core.engine.kernels import cache
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import active, current
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD, Adam, Ftrl
from tests.refusals import check_refusals
from tests.trainings import in_threads

IDS, GRADS = np.arange(3), np.ones((3, 2), np.float32)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No runtime before, none afterwards."""
    before = current().use(None)
    yield
    fleet.stop_worker()
    current().provide(None)
    current().use(before)


def stepped(client: Client, first: int, last: int) -> list[bytes]:
    """Make these steps of a worker; then the tables."""
    rows = client.sparse_table("rows", dim=4, optimizer=Adam(0.05))
    bias = client.dense_table("bias", np.zeros(3), optimizer=Ftrl(0.1))
    ids = np.arange(64) * 2**40 - 7
    for step in range(first, last):
        numbers = np.random.default_rng((step, client.worker_index))
        rows.push(numbers.choice(ids, 32), numbers.normal(size=(32, 4)))
        bias.push(numbers.normal(size=3))
    client.flush()
    client.barrier()
    values = [rows.pull(ids).tobytes(), bias.pull().tobytes()]
    client.barrier()
    return values


def trained(servers: int, train: Callable[[Client], list[bytes]]) -> list[bytes]:
    """What two workers in sync mode do on so many servers, and then see alike."""
    seen: list[list[bytes]] = []

    def work(worker: int) -> None:
        with psfleet.connect(local.environment(worker), mode="sync") as client:
            seen.append(train(client))

    with LocalFleet(servers, 2, in_process=True) as local:
        in_threads([partial(work, worker) for worker in range(2)])
    assert seen[0] == seen[1]
    return seen[0]


def test_tables_are_saved_and_loaded_with_their_optimizers(tmp_path: Path) -> None:
    """A job of two workers that loads after five steps ends as one that never stopped, to the bit, on another
    number of servers. (By the fleet's save: tests/launch/test_going_back.py.)
    """
    folder = str(tmp_path / "model")
    halves: list[list[bytes]] = []

    def whole(client: Client) -> list[bytes]:
        halves.append(stepped(client, 0, 5))
        client.save(folder)
        return stepped(client, 5, 10)

    def half(client: Client) -> list[bytes]:
        client.sparse_table("rows", dim=4, optimizer=Adam(0.05))
        client.dense_table("bias", np.zeros(3), optimizer=Ftrl(0.1))
        client.load(folder)
        return stepped(client, 5, 10 if client.runtime.server_num == 3 else 5)

    expected = trained(2, whole)
    assert {spec.name for spec in read_specs(folder)} == {"rows", "bias"}
    assert expected != halves[0] == halves[1]
    assert trained(3, half) == expected
    assert trained(1, half) == halves[0]
    with psfleet.connect() as alone:
        assert half(alone) == halves[0]


def test_a_client_and_the_fleet_are_one(tmp_path: Path) -> None:
    """After fleet.init() a client shares the program's fleet: one checkpoint has the tables of both, and
    closing the client leaves the program's parameters alone."""
    fleet.init()
    with program_guard(Program(), Program()):
        x = layers.data("x", [None, 2])
        loss = layers.mean(layers.fc(x, 1, name="head"))
        SGD(0.1).minimize(loss)
        exe, feed = Executor(), {"x": np.ones((4, 2), np.float32)}
        with psfleet.connect() as ps:
            assert ps.runtime is active()
            table = ps.sparse_table("users", 2, Adam(0.1))
            table.push(IDS, GRADS)
            exe.run(feed=feed)
            fleet.save_persistables(str(tmp_path / "model"))
        (before,) = exe.run(feed=feed, fetch_list=[loss])
        (after,) = exe.run(feed=feed, fetch_list=[loss])
    assert before.item() != after.item()
    names = {spec.name for spec in read_specs(tmp_path / "model")}
    assert names > {"users"}
    assert any(name.startswith("head") for name in names)


@pytest.mark.parametrize("first", ["connect", "init"])
def test_two_clients_and_a_fleet_of_a_worker(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that calls connect() twice, before or after fleet.init(), has one seat: nobody is fenced,
    and the seat is left when the script ends."""
    with LocalFleet(1, 1, in_process=True) as servers:
        monkeypatch.setenv("PSFLEET_ROLE", "worker")
        monkeypatch.setenv("PSFLEET_SERVERS", ",".join(servers.endpoints))
        if first == "init":
            fleet.init()
        with psfleet.connect() as one:
            table = one.sparse_table("t", 2, Adam(0.1))
            if first == "connect":
                fleet.init()
                assert fleet.settings().consistency.mode == "async"
                with pytest.raises(ConfigError, match="connected in mode 'async'; pass"):
                    fleet.distributed_optimizer(SGD(0.1), fleet.DistributedStrategy(a_sync=False))
            with psfleet.connect() as two:
                again = two.sparse_table("t", 2, Adam(0.1))
                again.push(IDS, GRADS).wait(60)
            table.push(IDS, GRADS).wait(60)
            moved = table.pull(IDS)
        with pytest.raises(UsageError, match="this client is closed"):
            again.pull(IDS)
        with psfleet.connect() as three:
            np.testing.assert_array_equal(three.sparse_table("t", 2, Adam(0.1)).pull(IDS), moved)
            has: Mode = "sync" if first == "init" else "async"
            with pytest.raises(ConfigError, match=f"in mode {has!r}, and psfleet.connect"):
                psfleet.connect(mode="ssp")
        assert current().is_active  # the fleet's, until the script ends
        fleet.stop_worker()


def test_the_last_client_leaves() -> None:
    """Without fleet.init() the fleet of a process ends with its last client; the next begins again."""
    one, two = psfleet.connect(), psfleet.connect()
    table = one.sparse_table("t", 2, Adam(0.1))
    fresh = table.pull(IDS)
    table.push(IDS, GRADS)
    one.close()
    assert (two.sparse_table("t", 2, Adam(0.1)).pull(IDS) != fresh).all()
    two.close()
    with psfleet.connect() as three:
        np.testing.assert_array_equal(three.sparse_table("t", 2, Adam(0.1)).pull(IDS), fresh)


def test_a_mode_that_a_client_asks_for_is_the_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode said to connect() counts for a fleet.init() that said none."""
    with LocalFleet(1, 1, in_process=True) as servers:
        monkeypatch.setenv("PSFLEET_ROLE", "worker")
        monkeypatch.setenv("PSFLEET_SERVERS", ",".join(servers.endpoints))
        fleet.init()
        with psfleet.connect(mode="ssp"):
            assert fleet.settings().consistency.mode == "ssp"
        fleet.stop_worker()


def test_a_closed_client_says_so() -> None:
    """After close() whatever is asked of a client or its tables is one sentence, also a new table."""
    client = psfleet.connect()
    table, bias = (
        client.sparse_table("t", 2, Adam(0.1)),
        client.dense_table("b", [1.0], Adam(0.1)),
    )
    client.close()
    client.close()
    for use in (
        lambda: table.pull(IDS),
        lambda: table.push(IDS, GRADS),
        lambda: table.pull_ahead(IDS),
        bias.pull,
        lambda: bias.push([1.0]),
        lambda: client.sparse_table("u", 2, Adam(0.1)),
        lambda: client.dense_table("c", [1.0], Adam(0.1)),
        lambda: client.save("model"),
        lambda: client.load("model"),
        client.flush,
        client.barrier,
        client.stats,
    ):
        with pytest.raises(UsageError, match="this client is closed, and so are its tables"):
            use()


def test_saving_or_loading_nothing_is_an_error(tmp_path: Path) -> None:
    """A fleet without tables saves nothing, and a checkpoint of which the script has no table loads
    nothing: each is one sentence with the names, and nothing is written or changed."""
    model, none = str(tmp_path / "model"), str(tmp_path / "none")
    for save in (fleet.save_persistables, psfleet.connect().save):
        with pytest.raises(
            CheckpointError, match=r"nothing to save into .*none.*: the fleet has no"
        ):
            save(none)
    assert not (tmp_path / "none").exists()
    fleet.stop_worker()
    with psfleet.connect() as ps:
        ps.sparse_table("lone-users", 2, Adam(0.1)).push(IDS, GRADS)
        ps.save(model)
    with psfleet.connect() as ps:
        table = ps.sparse_table("items-of-another-model", 2, Adam(0.1))
        before = table.pull(IDS)
        said = "has table lone-users and the script .*: none of them would get"
        with pytest.raises(CheckpointError, match=said):
            ps.load(model)
        with pytest.raises(CheckpointError, match=said):
            fleet.load_model(model)
        assert [held["name"] for held in ps.stats()[0]["tables"]] == ["items-of-another-model"]
        np.testing.assert_array_equal(table.pull(IDS), before)
        with pytest.raises(UsageError, match="folder is 3, it must be a text or a PathLike"):
            ps.load(3)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="the folder to save into is ''"):
            ps.save("")


def test_a_model_may_be_loaded_before_its_first_step(tmp_path: Path) -> None:
    """Parameters whose tables are not made yet count as the script's: they start with what was loaded."""
    feed = {"x": np.ones((4, 2), np.float32)}
    seen = []
    for load in (False, True):
        fleet.init()
        with program_guard(Program(), Program()):
            x = layers.data("x", [None, 2])
            loss = layers.mean(layers.fc(x, 1, name="early"))
            SGD(0.1).minimize(loss)
            if load:
                fleet.load_model(str(tmp_path / "model"))
            exe = Executor()
            seen += [exe.run(feed=feed, fetch_list=[loss])[0].item() for _ in range(2)]
            if not load:
                fleet.save_persistables(str(tmp_path / "model"))
    assert len({*seen}) == 4
    # A straight line, one step each.
    np.testing.assert_allclose(np.diff(seen), np.diff(seen)[0], rtol=1e-4)


FORGOTTEN = """
fleet.worker_num()
fleet.is_server()
list(fleet.shard(range(4)))
next(iter(fleet.dataset(4, 2)))
fleet.distributed_optimizer(SGD(0.1))
fleet.barrier_worker()
SGD(0.1).apply_gradients([(psfleet.Parameter("w", [1.0]), np.ones(1))])
fleet.save_persistables("model")"""


def test_a_worker_that_forgets_init_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher a script without fleet.init() does not train alone: its first use of the fleet
    is refused with one sentence."""
    for name, value in {"ROLE": "worker", "RANK": "1", "WORKERS": "2", "SERVERS": "h:1"}.items():
        monkeypatch.setenv(f"PSFLEET_{name}", value)
    monkeypatch.setattr(fleet._fleet, "_joined", None)
    said = "worker 1 of 2, but the script has not called fleet.init"
    table = "\n".join(f"{line}  # {said}" for line in FORGOTTEN.strip().splitlines())
    check_refusals(table, globals())


def test_a_client_has_a_place_in_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a client of psfleet.connect() has the worker's seat, what asks for the role needs no
    fleet.init(): it is the role of that seat."""
    with LocalFleet(1, 1, in_process=True) as servers:
        for name, value in {"ROLE": "worker", "SERVERS": servers.endpoints[0]}.items():
            monkeypatch.setenv(f"PSFLEET_{name}", value)
        monkeypatch.setattr(fleet._fleet, "_joined", None)
        with psfleet.connect():
            assert (fleet.worker_num(), fleet.server_num(), fleet.is_worker()) == (1, 1, True)
            assert [*fleet.shard(range(4))] == [*range(4)]
            fleet.barrier_worker()
        fleet.stop_worker()


@pytest.mark.parametrize("name", ["PSFLEET_SERVERS", "PADDLE_PSERVERS_IP_PORT_LIST"])
def test_servers_without_a_role(name: str) -> None:
    """An environment with servers and no role is half of a cluster's, and refused."""
    with pytest.raises(ConfigError, match=f"{name} is 'h:1' but PSFLEET_ROLE is not set"):
        read_environment({name: "h:1"})


SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PADDLE_TRAINERS_NUM", "PSFLEET_WORKERS")


@pytest.mark.parametrize("name", SIZES)
def test_several_processes_without_a_fleet(name: str) -> None:
    """Another launcher's processes, which no fleet connects, are refused; a single process trains alone."""
    with pytest.raises(ConfigError, match=f"{name} is '2', so .* psfleet-launch --workers 2,"):
        read_environment({name: "2"})
    for alone in ("1", "", "many"):
        assert read_environment({name: alone}).role is None
    fleet_of_two = {"PSFLEET_ROLE": "worker", "PSFLEET_SERVERS": "h:1", "PSFLEET_RANK": "0"}
    assert read_environment({name: "2", **fleet_of_two}).role == "worker"


def test_unknown_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable that only looks like psfleet's is warned of, once, with the name that is meant. Those of
    tests, of docker-compose.yml, of the launcher and of a service in Kubernetes are known."""
    known = ["DURABILITY", "CHAOS", "TEST_GPU", "TORTURE", "SERVER_CORES", "JOB_ID", "SERVICE_HOST"]
    known += ["PORT_80_TCP_ADDR", "MASTER_SERVICE_PORT_HTTP"]
    variables = {f"PSFLEET_{name}": "1" for name in ("DURABILTY", "COLOUR", *known)}
    assert unknown_variables({**variables, "HOME": "/", "_PSFLEET_COMPLETE": "1"}) == [
        "PSFLEET_DURABILTY is set, and psfleet has no such variable; is PSFLEET_DURABILITY meant?",
        "PSFLEET_COLOUR is set, and psfleet has no such variable; docs/settings.md lists all variables",
    ]
    monkeypatch.setenv("PSFLEET_ON_NON", "stop")
    for _ in range(2):
        set_up_logs()
    assert capsys.readouterr().err == (
        "PSFLEET_ON_NON is set, and psfleet has no such variable; is PSFLEET_ON_NAN meant?\n"
    )


@pytest.mark.parametrize("repeats", [1, 30])
def test_a_pull_has_a_row_for_each_id(repeats: int) -> None:
    """Rows of repeated ids and of ids without a row are those of the distinct ids, in the ids' shape."""
    table = Client(EmbeddedRuntime()).sparse_table("rows", 6, SGD(0.5))
    table.push(np.arange(90), np.ones((90, 6)))
    distinct = np.arange(80, 100)
    rows = table.pull(distinct)
    ids = np.concatenate([np.full(repeats, 95), distinct[::-1], np.full(repeats, 80)])
    pulled = table.pull(ids.reshape(2, -1))
    assert pulled.shape == (2, len(ids) // 2, 6)
    np.testing.assert_array_equal(pulled.reshape(-1, 6), rows[ids - 80])


@pytest.mark.parametrize(("mode", "width"), [("embedded", 23), ("async", 29)])
def test_a_table_is_made_with_its_kernels(mode: str, width: int) -> None:
    """The first pull and push of a table load no kernel: making the table has loaded all of them."""
    with LocalFleet(1, 1) as fleet:
        runtime = EmbeddedRuntime() if mode == "embedded" else fleet.connect(0, mode)
        table = Client(runtime).sparse_table("rows", width, SGD(0.5))
        loaded = set(cache._modules)
        assert any(name.startswith(f"psfleet_kernel_row_sums_{width}") for name in loaded)
        ids = np.arange(200) // 2
        table.push(ids, np.ones_like(table.pull(ids)))
        runtime.flush()
        assert set(cache._modules) == loaded
        runtime.close()

"""The fleet API without a cluster, and what it makes of the environment."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.settings.environment import Environment, read_environment
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.strategy import resolve
from psfleet.fleet import (
    DistributedStrategy,
    Fleet,
    PaddleCloudRoleMaker,
    Role,
    UserDefinedRoleMaker,
)
from psfleet.optimizer import Adam
from tests.refusals import check_refusals

defined = UserDefinedRoleMaker


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """A fleet of its own, on a fresh embedded runtime."""
    instance = Fleet()
    instance.init()
    yield instance
    instance.stop_worker()
    current().provide(None)


def test_embedded_fleet_is_its_own_first_worker(fleet: Fleet) -> None:
    """Without a cluster the process is the only worker, and waiting returns at once."""
    assert fleet.is_worker()
    assert fleet.is_first_worker()
    assert not fleet.is_server()
    assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (0, 1, 0)
    fleet.init_worker()
    fleet.barrier_worker()
    assert fleet.util.all_reduce([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert list(fleet.shard(range(3))) == [0, 1, 2]


@pytest.mark.parametrize(("files", "workers"), [(5, 2), (2, 3), (0, 2), (9, 3)])
def test_file_shards_partition_the_files(files: int, workers: int) -> None:
    """Every file goes to one worker, in order, and no worker has two more than another."""
    names = [f"part-{i}" for i in range(files)]
    shards = []
    for index in range(workers):
        fleet = Fleet()
        fleet._joined = Environment("worker", index, ("h:1",), workers)
        shards.append(fleet.util.get_file_shard(names))
    assert [name for shard in shards for name in shard] == names
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_reference_names_of_the_environment_are_understood() -> None:
    """TRAINING_ROLE and PADDLE_* describe the same fleet as PSFLEET_*, which win where both are set."""
    reference = {
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:80,10.0.0.2:80",
    }
    own = {
        "PSFLEET_ROLE": "worker",
        "PSFLEET_RANK": "1",
        "PSFLEET_WORKERS": "2",
        "PSFLEET_SERVERS": "10.0.0.1:80,10.0.0.2:80",
    }
    assert read_environment(reference) == read_environment(own)
    assert read_environment({**reference, "PSFLEET_RANK": "0"}).rank == 0
    server = {
        "TRAINING_ROLE": "PSERVER",
        "POD_IP": "10.0.0.2",
        "PADDLE_PORT": "80",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:80,10.0.0.2:80",
    }
    assert (read_environment(server).role, read_environment(server).rank) == ("server", 1)


ENVIRONMENT = r"""
own(ROLE="boss")  # boss
own(ROLE="worker")  # PSFLEET_SERVERS
own(ROLE="worker", SERVERS="nowhere")  # nowhere
own(ROLE="worker", SERVERS="h:1", RANK="one")  # one
own(ROLE="worker", SERVERS="h:1", RANK="1")  # workers 0 to 0
own(ROLE="worker", SERVERS="h:1", WORKERS="0")  # is 0
own(ROLE="worker", SERVERS="h:1", WORKERS="2")  # one of 2 worker...set PSFLEET_RANK, from 0 to 1
own(ROLE="server", SERVERS="h:1,h:2")  # one of 2 server...set PSFLEET_RANK, from 0 to 1
theirs("TRAINER")  # one of 2 worker...set PADDLE_TRAINER_ID
theirs("PSERVER")  # one of 2 server...POD_IP:PADDLE_PORT (now ':'
theirs("PSERVER", POD_IP="10.0.0.3", PADDLE_PORT="80")  # now '10.0.0.3:80'
theirs("TRAINER", PADDLE_TRAINER_ID="0", PADDLE_TRAINERS_NUM="")  # PADDLE_TRAINERS_NUM is not set"""


def test_a_bad_environment_is_one_clear_sentence() -> None:
    """A wrong variable is quoted. An environment that does not say which of several processes this is is
    refused: two that took themselves for the first would read the same data."""

    def own(**variables: str) -> None:
        read_environment({f"PSFLEET_{name}": value for name, value in variables.items()})

    def theirs(role: str, **variables: str) -> None:
        servers = {"PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:80,10.0.0.2:80"}
        read_environment(
            {**servers, "PADDLE_TRAINERS_NUM": "2", "TRAINING_ROLE": role, **variables}
        )

    check_refusals(ENVIRONMENT, {"own": own, "theirs": theirs})


def test_launcher_has_the_last_word_on_the_mode() -> None:
    """Flags win over the script, the script over the default, which is sync."""
    script = DistributedStrategy(a_sync=True)
    assert resolve(None, "").consistency.mode == "sync"
    assert resolve(script, "").consistency.mode == "async"
    assert resolve(script, '{"consistency": {"mode": "sync"}}').consistency.mode == "sync"


def test_save_needs_a_folder(fleet: Fleet, tmp_path: Path) -> None:
    """save_persistables takes (dirname) or (executor, dirname); without a folder it says so."""
    with pytest.raises(UsageError, match="folder"):
        fleet.save_persistables(3)
    Adam(0.1).apply_gradients([(Parameter("w", [1.0]), np.ones(1))])
    fleet.save_persistables(object(), tmp_path / "model")
    assert (tmp_path / "model" / "manifest.json").exists()


def test_role_maker_names_the_seat() -> None:
    """A user-defined role maker stands for the environment."""
    fleet = Fleet()
    fleet.init(UserDefinedRoleMaker(1, Role.SERVER, 2, ["h:1", "h:2"]))
    assert fleet.is_server()
    assert fleet.server_index() == 1
    assert fleet.server_endpoints(to_string=True) == "h:1,h:2"
    with pytest.raises(UsageError, match="comm_world"):
        fleet.util.all_reduce(np.zeros(1), comm_world="server")


def test_role_makers_count_workers_once() -> None:
    """As many workers as endpoints, if no number is said; `init_gloo` and `is_collective` are taken."""
    servers, two = ["h:1"], ["h:2", "h:3"]
    maker = UserDefinedRoleMaker(
        current_id=1,
        role=Role.WORKER,
        server_endpoints=servers,
        worker_endpoints=two,
        is_collective=False,
        init_gloo=False,
    )
    assert (maker.environment.workers, maker.environment.rank) == (2, 1)
    assert UserDefinedRoleMaker(server_endpoints=servers).environment.workers == 1
    with pytest.raises(ConfigError, match="worker_num is 3 and worker_endpoints names 2 workers"):
        UserDefinedRoleMaker(0, Role.WORKER, 3, servers, two)
    assert PaddleCloudRoleMaker(is_collective=False, init_gloo=False).environment.role is None


REFUSED = """
init("F")  # role_maker is 'F', it must be a RoleMaker or None
init("")  # role_maker is ''
init(None, "yes")  # is_collective is 'yes'
PaddleCloudRoleMaker(is_collective=True)  # parameter servers only
defined(is_collective=True)  # parameter servers only
defined(server_endpoints="h:1")  # server_endpoints is 'h:1'
defined(server_endpoints=["h"])  # 'h' is neither
defined(server_endpoints=[1])  # server_endpoints
defined("0", server_endpoints=["h:1"])  # current_id is '0'
defined(worker_num=0, server_endpoints=["h:1"])  # worker_num is 0
defined(role="boss", server_endpoints=["h:1"])  # ConfigError
Fleet().run_server()  # ConfigError
resolve(None, '{"consistency": {"mode": "sometimes"}}')  # ConfigError
resolve(None, "sync")  # ConfigError
resolve(None, '{"speed": 1}')  # ConfigError
setattr(DistributedStrategy(), "a_synk", True)  # ConfigError
resolve(DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": -4}), "")  # ConfigError"""


def test_wrong_roles_and_settings_are_one_sentence() -> None:
    """Each quotes what is wrong."""
    check_refusals(REFUSED, {**globals(), "init": Fleet().init})


def test_loops_say_how_long_they_are_where_it_is_known() -> None:
    """A part has the batches of its worker, a dataset those of its one worker; a generator has no length."""
    fleet = Fleet()
    part = fleet.shard([1, 2, 3])
    assert len(part) == 3  # type: ignore[arg-type]
    assert [list(part), list(part)] == [[1, 2, 3]] * 2
    batches = fleet.dataset(10, 4, epochs=2)
    assert len(batches) == len(list(batches)) == 6  # type: ignore[arg-type]
    assert not hasattr(fleet.shard(iter([1])), "__len__")
    assert not hasattr(fleet.dataset(10, 4, epochs=None), "__len__")


def test_a_dataset_without_an_end_is_left() -> None:
    """`epochs=None` deals one epoch after the other until the script breaks."""
    seen = 0
    for batch in Fleet().dataset(10, 4, epochs=None, shuffle_seed=1):
        seen += len(batch)
        if seen == 50:
            break
    assert seen == 50

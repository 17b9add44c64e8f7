"""The fleet API without a cluster, and what it makes of the environment."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.errors import ConfigError, UsageError
from psfleet.fleet import (
    DistributedStrategy,
    Fleet,
    PaddleCloudRoleMaker,
    Role,
    UserDefinedRoleMaker,
)
from psfleet.optimizer import Adam
from psfleet.parameters.parameter import Parameter
from psfleet.runtime.process_runtime import current
from psfleet.settings.environment import Environment, read_environment
from psfleet.strategy import resolve

defined: Any = UserDefinedRoleMaker


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


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"PSFLEET_ROLE": "boss"}, "boss"),
        ({"PSFLEET_ROLE": "worker"}, "PSFLEET_SERVERS"),
        ({"PSFLEET_ROLE": "worker", "PSFLEET_SERVERS": "nowhere"}, "nowhere"),
        ({"PSFLEET_ROLE": "worker", "PSFLEET_SERVERS": "h:1", "PSFLEET_RANK": "one"}, "one"),
        (
            {"PSFLEET_ROLE": "worker", "PSFLEET_SERVERS": "h:1", "PSFLEET_RANK": "1"},
            "workers 0 to 0",
        ),
        ({"PSFLEET_ROLE": "worker", "PSFLEET_SERVERS": "h:1", "PSFLEET_WORKERS": "0"}, "is 0"),
    ],
)
def test_bad_environment_is_one_clear_sentence(variables: dict[str, str], word: str) -> None:
    """A wrong variable is quoted."""
    with pytest.raises(ConfigError, match=word):
        read_environment(variables)


REFERENCE = {"PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:80,10.0.0.2:80", "PADDLE_TRAINERS_NUM": "2"}


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (REFERENCE | {"TRAINING_ROLE": "TRAINER"}, "one of 2 worker.* set PADDLE_TRAINER_ID"),
        (
            REFERENCE | {"TRAINING_ROLE": "PSERVER"},
            r"one of 2 server.* POD_IP:PADDLE_PORT \(now ':'",
        ),
        (
            REFERENCE | {"TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.3", "PADDLE_PORT": "80"},
            "now '10.0.0.3:80'",
        ),
        (
            REFERENCE
            | {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": ""},
            "'TRAINER' and PADDLE_TRAINERS_NUM is not set",
        ),
        (
            {"PSFLEET_ROLE": "worker", "PSFLEET_SERVERS": "h:1", "PSFLEET_WORKERS": "2"},
            "one of 2 worker.* set PSFLEET_RANK, from 0 to 1",
        ),
        (
            {"PSFLEET_ROLE": "server", "PSFLEET_SERVERS": "h:1,h:2"},
            "one of 2 server.* set PSFLEET_RANK, from 0 to 1",
        ),
    ],
)
def test_which_process_it_is_is_not_guessed(variables: dict[str, str], text: str) -> None:
    """An environment that does not say which of several processes this is is refused: two that took
    themselves for the first would read the same data.
    """
    with pytest.raises(ConfigError, match=text):
        read_environment(variables)


def test_launcher_has_the_last_word_on_the_mode() -> None:
    """Flags win over the script, the script over the default, which is sync."""
    script = DistributedStrategy(a_sync=True)
    assert resolve(None, "").consistency.mode == "sync"
    assert resolve(script, "").consistency.mode == "async"
    assert resolve(script, '{"consistency": {"mode": "sync"}}').consistency.mode == "sync"


@pytest.mark.parametrize(
    "make",
    [
        lambda: resolve(None, '{"consistency": {"mode": "sometimes"}}'),
        lambda: resolve(None, "sync"),
        lambda: resolve(None, '{"speed": 1}'),
        lambda: setattr(DistributedStrategy(), "a_synk", True),
        lambda: resolve(DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": -4}), ""),
        lambda: defined(role="boss", server_endpoints=["h:1"]),
        lambda: Fleet().run_server(),
    ],
)
def test_bad_settings_are_refused(make: object) -> None:
    """Unknown or contradictory settings raise ConfigError."""
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


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


fleet_of: Any = Fleet().init


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fleet_of("F"), "role_maker is 'F', it must be a RoleMaker or None"),
        (lambda: fleet_of(""), "role_maker is ''"),
        (lambda: fleet_of(None, "yes"), "is_collective is 'yes'"),
        (lambda: PaddleCloudRoleMaker(is_collective=True), "parameter servers only"),
        (lambda: defined(is_collective=True), "parameter servers only"),
        (lambda: defined(server_endpoints="h:1"), "server_endpoints is 'h:1'"),
        (lambda: defined(server_endpoints=["h"]), "'h' is neither"),
        (lambda: defined(server_endpoints=[1]), "server_endpoints"),
        (lambda: defined("0", server_endpoints=["h:1"]), "current_id is '0'"),
        (lambda: defined(worker_num=0, server_endpoints=["h:1"]), "worker_num is 0"),
    ],
)
def test_wrong_roles_are_one_sentence(make: Callable[[], object], text: str) -> None:
    """Each quotes what is wrong."""
    with pytest.raises(ConfigError, match=text):
        make()


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

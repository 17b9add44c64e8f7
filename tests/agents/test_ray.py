"""Engine ray on a real cluster: what it refuses, and what becomes of an actor."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from psfleet_launch.engines.remote.ray_driver import names_of
from tests.agents.conftest import TRAINER, TWO, Site
from tests.agents.machines import Lab
from tests.agents.ray_cluster import RAY_HEAD, RAY_NODES, RAY_VARIABLES
from tests.agents.test_engines import DIGEST, LONG
from tests.launch.conftest import digest


@pytest.fixture(params=["ray"], scope="session")
def engine(request: pytest.FixtureRequest, ray_nodes: Lab) -> tuple[str, Lab]:
    """Only this engine."""
    return request.param, ray_nodes


def refused(site: Site, *arguments: str, **variables: str) -> str:
    """The one sentence of a job that cannot start."""
    launcher = site.start("--engine", "ray", *arguments, *TWO, TRAINER, "30", **variables)
    _, err = site.ends_with(2, launcher)
    return err.splitlines()[-1]


def test_a_cluster_that_is_too_small(site: Site) -> None:
    """It is said at once for how many bundles there is room."""
    said = refused(site, "--ray-address", RAY_HEAD, "--bundles", "3")
    assert "has room for 2 bundle(s) of 1 CPU, and the job wants 3" in said


def test_bundles_on_machines_of_their_own(site: Site) -> None:
    """Standbys need different machines, which counts only where they are asked for."""
    few = ("--bundles", "3", "--bundle-cores", "0.5")
    said = refused(site, "--ray-address", RAY_HEAD, "--replicas", "1", *few)
    assert "has room for 2 bundle(s) of 0.5 CPU on different machines, as --replicas 1" in said


def test_an_address_without_a_cluster(site: Site) -> None:
    """Nobody listens there."""
    message = refused(site, "--ray-address", f"{RAY_NODES[0]}:9")
    assert f"there is no Ray cluster at '{RAY_NODES[0]}:9' (Connection refused)" in message


def test_ray_client_is_refused(site: Site) -> None:
    """It could not hold agents."""
    message = refused(site, "--ray-address", f"ray://{RAY_HEAD}", "--listen", RAY_NODES[0])
    assert "Ray Client cannot hold agents" in message


HOLDS = """\
import ray, sys
ray.init(sys.argv[1], log_to_driver=False)
group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
assert group.wait(100)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_busy_cluster(site: Site) -> None:
    """The launcher says what is free, and the job runs once somebody else's has ended."""
    assert site.lab is not None
    with subprocess.Popen(
        [*site.lab.inside, sys.executable, "-c", HOLDS, RAY_HEAD],
        env=os.environ | RAY_VARIABLES,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        launcher = site.launch(*TWO, TRAINER, "30")
        waits = "Ray has not placed 2 bundle(s) of 1 CPU; free now: none\n"
        launcher.until(lambda: waits in site.said(), "busy cluster")
    out, err = site.ends_with(0, launcher)
    assert err.count(waits) == 1
    assert digest(out) == DIGEST


def test_a_killed_actor_is_the_first_cause(site: Site) -> None:
    """Its agent's standard input ends, and all of its processes with it."""
    launcher = site.launch(*TWO, *LONG)
    launcher.until_logged("workerlog.1", "step 9")
    agent = site.agent_pid(launcher, RAY_NODES[1])
    actor = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    _, err = site.ends_with(128 + signal.SIGKILL, launcher)
    assert f"failed first: the agent on host {RAY_NODES[1]} is lost: " in err


def test_several_agents_on_one_machine_have_names() -> None:
    """The machine's address, with a number where it has several."""
    assert names_of(["a", "b", "a"]) == ["a-1", "b", "a-2"]


READS = """\
import ray, sys
ray.init(sys.argv[1], log_to_driver=False)
from psfleet.data.batches import Batches
from psfleet.data.record_batches import RecordBatches
from psfleet.features import Feature, FeatureSet, Table
made = ray.data.range(40, override_num_blocks=5).map_batches(lambda rows: {"user": rows["id"]})
rows = RecordBatches(made, FeatureSet([Feature("user", Table("users", 4))]), ["user"], interleave=1)
print("read", [int(label) for batch in Batches(rows, 8) for label in batch.labels["user"]])
"""


def test_a_dataset_of_ray(site: Site) -> None:
    """The blocks of a Ray dataset, made on other nodes, are read in order."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")
    assert site.lab is not None
    command = [*site.lab.inside, sys.executable, "-c", READS, RAY_HEAD]
    reader = subprocess.run(
        command, env=os.environ | RAY_VARIABLES, capture_output=True, text=True, timeout=170
    )
    assert f"read {[*range(40)]}" in reader.stdout, reader.stderr

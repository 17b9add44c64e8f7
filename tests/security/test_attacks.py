"""No stranger ends a process of a job, whatever comes over its connections."""

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.core.base.job_files import read_running_job
from psfleet.core.base.settings.server_endpoints import addresses_of
from tests.agents.conftest import Site
from tests.security.attacks import ATTACKS, Address, address_of, attack
from tests.waiting import until

pytestmark = pytest.mark.long

COUNT = 20_000 if "PSFLEET_TORTURE" in os.environ else 120
_TRAINER = """
import sys
from pathlib import Path
import numpy as np
import psfleet
from psfleet import fleet
folder = Path(sys.argv[1])
fleet.init()
with psfleet.connect(mode="async") as ps:
    table = ps.sparse_table("users", dim=8, optimizer=psfleet.optimizer.SGD(0.01))
    steps = 0
    while not (folder / "stop").exists():
        table.push(np.arange(64), table.pull(np.arange(64)) - 0.5)
        ps.flush()
        steps += 1
        (folder / "step.new").write_text(str(steps))
        (folder / "step.new").rename(folder / "step")
"""


@contextlib.contextmanager
def serving(logs: Path) -> Iterator[dict[str, Address]]:
    """`psfleet serve` of the tables of a running job, plain; it ends with exit code 0."""
    command = [
        sys.executable,
        "-m",
        "psfleet_launch.commands.psfleet_cli",
        "serve",
        "--follow",
        str(logs),
    ]
    process = subprocess.Popen(
        [*command, "--port", "0", "--http-port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        found = re.findall(r"\d+\.\d+\.\d+\.\d+:\d+", process.stdout.readline())
        try:
            assert len(found) == 2, found
            yield {"serve, gRPC": address_of(found[0]), "serve, HTTP": address_of(found[1])}
            assert process.poll() is None
        finally:
            process.terminate()
            code = process.wait(60)
    assert code == 0


def of_servers(logs: Path) -> dict[str, Address]:
    """Both addresses of the server of a job."""
    control, tensors = addresses_of(read_running_job(logs).servers[0])
    return {"server, gRPC": address_of(control), "server, HTTP/2": address_of(tensors)}


@pytest.mark.timeout(10_000 if "PSFLEET_TORTURE" in os.environ else 300)
def test_no_stranger_ends_a_process(tmp_path: Path) -> None:
    """A job on another machine that trains beside each attack on each of its ports, and a service that
    follows it: all live, the worker makes steps, a look at the page is answered, the job ends well."""
    for module in ("httptools", "grpc_health", "grpc_reflection"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    (tmp_path / "train.py").write_text(_TRAINER)
    site, step = Site("join", tmp_path, None), tmp_path / "step"
    words = ("--watch", "0.0.0.0:0", "--job", "attacked", "--no-progress")
    try:
        launcher = site.launch(*words, str(tmp_path / "train.py"), str(tmp_path), agents=1)
        launcher.until(step.exists, "step of the worker")
        logs = tmp_path / "psfleet-logs/attacked"
        page = re.search(r"watch +https://([\d.:]+)(/\S+)", site.said())
        agents = re.search(r"agent --join (\S+:\d+)", site.said())
        assert page, site.said()
        assert agents, site.said()
        with serving(logs) as served:
            ports = {
                "page": ("127.0.0.1", address_of(page[1])[1]),
                "agents": address_of(agents[1]),
                **of_servers(logs),
                **served,
            }
            for port, address in ports.items():
                for name in ATTACKS:
                    began, before = time.monotonic(), int(step.read_text())
                    attack(address, name, COUNT)
                    launcher.until(
                        lambda before=before: int(step.read_text()) > before + 3,  # type: ignore[misc]
                        f"step of the worker after {name!r} at {port}",
                    )
                    made = int(step.read_text()) - before
                    took = time.monotonic() - began
                    print(f"{port}: {name}, {took:.1f} s, {made / took:.0f} steps/s")
            until(lambda: _is_answered(served["serve, HTTP"]))
        (tmp_path / "stop").touch()
        site.ends_with(0, launcher)
    finally:
        (tmp_path / "stop").touch()
        site.close()


def _is_answered(address: Address) -> bool:
    url = f"http://{address[0]}:{address[1]}/healthz"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60) as reply:
        return bool(reply.status == 200)
    return False

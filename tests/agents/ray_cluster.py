"""A cluster of Ray for tests: a head, where the launcher runs, and a node, each in a network namespace."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from psfleet_launch.job import guard
from psfleet_launch.job.spawn import dismiss_guard, start_guard
from tests.agents.machines import NETWORK, Lab, has, laboratory
from tests.programs import ended
from tests.waiting import until

RAY_NODES = (f"{NETWORK}.1", f"{NETWORK}.2")
RAY_HEAD = f"{RAY_NODES[0]}:6379"
RAY_VARIABLES = {"RAY_AUTH_MODE": "disabled"}  # a token in the home folder is none of ours
_SMALL = ("--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000", "--disable-usage-stats")
_SCRIPT = Path(sys.executable).with_name("ray")


@contextlib.contextmanager
def ray_cluster() -> Iterator[Lab]:
    """Start the cluster; skip by name where that cannot be done. All its processes end with this one."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("engine ray: Ray is not installed (pip install 'psfleet[ray]')")
    has("ray", (), "iproute2")
    # Ray's sockets lie there, whose names may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as made:
        folder = Path(made)
        with laboratory(folder, ("second",)) as lab:
            token = uuid.uuid4().hex
            (folder / "state").mkdir()
            journal = start_guard(token, folder / "state")
            nodes = []
            try:
                head = ("--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={made}")
                nodes.append(_start(lab, token, 0, *head))
                nodes.append(_start(lab, token, 1, f"--address={RAY_HEAD}"))
                try:
                    until(lambda: _living(lab) == len(RAY_NODES), _logs(lab))
                except AssertionError as error:
                    pytest.skip(f"engine ray: its nodes do not begin to work here: {error}")
                yield lab
            finally:
                guard.sweep(token)
                for node in nodes:
                    node.wait()
                dismiss_guard(journal)


def _start(lab: Lab, token: str, number: int, *words: str) -> "subprocess.Popen[bytes]":
    """Start a node; what it starts carries the token too."""
    command = [str(_SCRIPT), "start", "--block", f"--node-ip-address={RAY_NODES[number]}"]
    with (lab.folder / f"node.{number}").open("wb") as log:
        return subprocess.Popen(
            [*lab.within(number), *command, *_SMALL, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | RAY_VARIABLES | {guard.MARKER: token},
            start_new_session=True,
        )


def _living(lab: Lab) -> int:
    """How many nodes the head knows."""
    code = (
        "from ray._raylet import GcsClient\n"
        f"known = GcsClient(address={RAY_HEAD!r}).get_all_node_info().values()\n"
        "print(sum(node.state == 0 for node in known))\n"
    )
    process = ended([*lab.inside, sys.executable, "-c", code], env=os.environ | RAY_VARIABLES)
    output = process.stdout.strip()
    return int(output) if output.isdigit() else 0


def _logs(lab: Lab) -> Callable[[], str]:
    """What the nodes have written, when it is asked for."""

    def read() -> str:
        logs = sorted(lab.folder.glob("node.*"))
        return "\n".join(f"{one.name}: {one.read_text(errors='replace')[-2000:]}" for one in logs)

    return read

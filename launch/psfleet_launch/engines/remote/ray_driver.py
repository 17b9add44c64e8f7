"""Driver program of engine ray: reserves a placement group, and runs an agent in an actor in each bundle.

It is a separate program so that the launcher need not import Ray. The launcher passes a request (JSON) as
the argument and credentials on standard input. It reads the driver's output: lines that begin with FAILED
or WAITS. The agents end when the standard input is closed.

Credentials are arguments of the actors' constructors and not environment variables, because Ray shows
variables on its dashboard. This module is `__main__`, so Ray pickles the actor class by value. The class
can then be loaded on a machine without psfleet, and the error, which names the machine, comes when the
agent starts.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from psfleet.core.base.errors import ConfigError
from psfleet_launch.job.guard import MARKER

FAILED = "failed: "
"""Prefix of output lines that say why an agent has not started or has ended."""

WAITS = "waits: "
"""Prefix of output lines that say what the driver is waiting for."""

_CONNECT = 5.0  # seconds in which the cluster must answer
_LOOK = 0.2  # seconds between looks at the input and the actors
_QUIET = 3.0  # seconds for Ray to place bundles before a line says that it waits
_LEAVE = 3.0  # seconds for agents to end by themselves
_AGENT = ("-m", "psfleet_launch.commands.psfleet_cli", "agent", "--credentials", "-")


class _Actor:
    """Ray actor that runs one agent on its node.

    Ray kills the actor when the driver ends. The agent's standard input is then closed, so the agent ends
    too.
    """

    def __init__(self, invitation: bytes, variables: dict[str, str]) -> None:
        self._invitation = invitation
        self._variables = variables

    def address(self) -> str:
        """Return the address of the actor's node in Ray."""
        return str(importlib.import_module("ray").util.get_node_ip_address())

    def run(self, endpoint: str, name: str) -> str:
        """Run the agent until it ends, and return the last line of its output."""
        hidden = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")  # Ray sets them from the bundle's size
        environment = {
            variable: value for variable, value in os.environ.items() if variable != hidden[0]
        }
        if not environment.get(hidden[1]):
            environment.pop(hidden[1], None)
        # Ray's processes block SIGINT. The agent and its members would inherit the blocked signal, and a
        # script would never receive it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        command = [sys.executable, *_AGENT, "--join", endpoint, "--name", name]
        with subprocess.Popen(
            [*command, "--address", self.address()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment | self._variables,
            text=True,
        ) as agent:
            assert agent.stdin is not None
            assert agent.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                agent.stdin.write(self._invitation.decode())
                agent.stdin.flush()
            lines = [line.strip() for line in agent.stdout if line.strip()]
        return [f"exit code {agent.returncode}", *lines][-1]


class _Driver:
    """Driver: starts the actors, and keeps them until the standard input ends."""

    def __init__(self, request: dict[str, Any], invitation: bytes) -> None:
        self._wanted = request
        self._invitation = invitation
        self._deadline = time.monotonic() + request["seconds"]

    def run(self) -> None:
        """Connect to the cluster, start the agents, wait for the end of standard input, and end the actors.

        Raises:
            ConfigError: There is no cluster, or its resources are too small.
        """
        ray = _ray()
        self._connect()
        group = self._placed()
        agents = self._started(group)
        while agents and not _input_has_ended(_LOOK):
            self._report(agents)
        ray.wait([*agents], num_returns=max(len(agents), 1), timeout=_LEAVE)
        ray.util.remove_placement_group(group)
        ray.shutdown()

    def _connect(self) -> None:
        ray = _ray()
        address = self._wanted["address"]
        _check_head(address)
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise ConfigError(
                f"there is no Ray cluster at {address!r} ({why}); start one with `ray start`, and run the "
                "launcher on one of its machines"
            ) from None

    def _placed(self) -> Any:
        """Create the placement group, and return it once Ray has placed all bundles."""
        ray = _ray()
        count, bundle = self._wanted["bundles"], self._bundle
        self._check_resources(ray.nodes())
        strategy = "STRICT_SPREAD" if self._wanted["spread"] else "SPREAD"
        group = ray.util.placement_group([bundle] * count, strategy=strategy)
        # The launcher gives up at the deadline. End a little earlier, with a message that explains the
        # reason.
        seconds = max(self._deadline - time.monotonic() - 2 * _LOOK, 1.0)
        if not group.wait(min(_QUIET, seconds)):
            print(f"{WAITS}{self._not_placed()}", flush=True)
            if not group.wait(max(seconds - _QUIET, 0.0)):
                raise ConfigError(f"{self._not_placed()}; {self._wanted['seconds']:g} s are over")
        return group

    def _not_placed(self) -> str:
        """Describe the resources that the bundles need and that are free now."""
        resources = _ray().available_resources()
        free = _words({name: resources.get(name, 0.0) for name in self._bundle})
        count = self._wanted["bundles"]
        return f"Ray has not placed {count} bundle(s) of {_words(self._bundle)}; free now: {free}"

    @property
    def _bundle(self) -> dict[str, float]:
        return {name: amount for name, amount in self._wanted["resources"].items() if amount}

    def _check_resources(self, nodes: Sequence[dict[str, Any]]) -> None:
        """Raise ConfigError if the cluster could not place the bundles even if all its resources were
        free."""
        count, bundle = self._wanted["bundles"], self._bundle
        fitting = [
            min(int(node["Resources"].get(name, 0) // amount) for name, amount in bundle.items())
            for node in nodes
            if node["Alive"]
        ]
        if self._wanted["spread"]:
            fitting = [min(number, 1) for number in fitting]
        if sum(fitting) < count:
            apart = (
                " on different machines, as --replicas 1 needs them"
                if self._wanted["spread"]
                else ""
            )
            raise ConfigError(
                f"the Ray cluster has room for {sum(fitting)} bundle(s) of {_words(bundle)}{apart}, and the "
                f"job wants {count}; ask for less with --bundles or --bundle-cores, or add machines"
            )

    def _started(self, group: Any) -> dict[Any, str]:
        ray = _ray()
        strategy = importlib.import_module("ray.util.scheduling_strategies")
        made = ray.remote(_Actor)
        variables = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PSFLEET_") and name != MARKER
        }
        actors = [
            made.options(
                num_cpus=self._bundle.get("CPU", 0),
                num_gpus=self._bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=strategy.PlacementGroupSchedulingStrategy(group, number),
            ).remote(self._invitation, variables)
            for number in range(self._wanted["bundles"])
        ]
        addresses = ray.get([actor.address.remote() for actor in actors])
        endpoint = self._wanted["endpoint"]
        return {
            actor.run.remote(endpoint, name): name
            for actor, name in zip(actors, names_of(addresses), strict=True)
        }

    def _report(self, agents: dict[Any, str]) -> None:
        ray = _ray()
        ends, _ = ray.wait([*agents], num_returns=len(agents), timeout=0)
        for ended_run in ends:
            try:
                report = ray.get(ended_run)
            except ray.exceptions.RayError as error:
                report = f"its actor has ended: {type(error).__name__}"
            print(f"{FAILED}host {agents.pop(ended_run)}: {report}", flush=True)


def _ray() -> Any:
    """Return the module `ray`. mypy runs without Ray, so the module has no types here."""
    return importlib.import_module("ray")


def _check_head(address: str) -> None:
    """Raise ConfigError if the cluster's head does not answer. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if address.startswith("ray://"):
        raise ConfigError(
            f"--ray-address is {address!r}; Ray Client cannot hold agents, run the launcher on a machine of "
            "the cluster and name HOST:PORT of its head, or auto"
        )
    if not port.isdigit():
        if address != "auto":
            raise ConfigError(f"--ray-address is {address!r}; name HOST:PORT of the head, or auto")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
    except OSError as error:
        raise ConfigError(
            f"there is no Ray cluster at {address!r} ({error.strerror or error}); name HOST:PORT of its head "
            "with --ray-address"
        ) from None


def names_of(addresses: Sequence[str]) -> list[str]:
    """Return a name for each agent: the machine's address, with a number if the machine has several
    agents."""
    count, seen_so_far = Counter(addresses), Counter[str]()
    names = []
    for address in addresses:
        seen_so_far[address] += 1
        names.append(address if count[address] == 1 else f"{address}-{seen_so_far[address]}")
    return names


def _words(resources: dict[str, float]) -> str:
    """Return CPUs, GPUs and memory in words. Ray's special resources that name a node are left out."""
    parts = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
    if memory := resources.get("memory"):
        parts.append(f"{memory / 2**30:.1f} GiB")
    return " and ".join(parts) or "none"


def _input_has_ended(seconds: float) -> bool:
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 1 << 16)


def _main() -> int:
    line = b""
    while not line.endswith(b"\n") and (data := os.read(0, 1 << 16)):
        line += data
    try:
        _Driver(json.loads(sys.argv[1]), line).run()
    except ConfigError as error:
        print(f"{FAILED}{error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())

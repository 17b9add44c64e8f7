"""Starts TensorFlow's ParameterServerStrategy as a peer: 2 servers, workers and a coordinator.

TensorFlow is not imported here. Its processes run in an environment of their own.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from peers.environments import interpreter
from processes import Crew, environment, free_ports, release, start, wait_ready

__all__ = ["tensorflow_crew"]

_SERVER = Path(__file__).with_name("tensorflow_server.py")
_COORDINATOR = Path(__file__).with_name("tensorflow_coordinator.py")
_SERVERS = 2


@contextlib.contextmanager
def tensorflow_crew(name: str, workload: str, workers: int, rule: str) -> Iterator[Crew]:
    """Start servers, workers and the coordinator for the workload w1, w2 or w3 under `rule`."""
    python = str(interpreter("tensorflow"))
    variables = environment(
        CUDA_VISIBLE_DEVICES="-1",
        GRPC_FAIL_FAST="use_caller",  # as its documentation asks for
        TF_CPP_MIN_LOG_LEVEL="3",
        TF_USE_LEGACY_KERAS="1",
    )
    addresses = [f"127.0.0.1:{port}" for port in free_ports(_SERVERS + workers)]
    cluster = json.dumps({"ps": addresses[:_SERVERS], "worker": addresses[_SERVERS:]})
    with contextlib.ExitStack() as stack:
        kinds = [("ps", rank) for rank in range(_SERVERS)]
        kinds += [("worker", rank) for rank in range(workers)]
        processes = [
            start(
                stack, [python, "-W", "ignore", str(_SERVER), kind, str(rank), cluster], variables
            )
            for kind, rank in kinds
        ]
        stack.callback(release, processes)
        coordinator = start(
            stack, [python, "-W", "ignore", str(_COORDINATOR), workload, rule, cluster], variables
        )
        stack.callback(release, [coordinator])
        for process in (*processes, coordinator):
            wait_ready(process)
        pids = [process.pid for process in processes]
        yield Crew(name, pids[:_SERVERS], [coordinator], pids[_SERVERS:])

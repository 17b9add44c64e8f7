"""Starts Paddle's parameter servers and workers as a peer: 2 servers, in async mode.

Paddle is not imported here. Its processes run in an environment of their own.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from peers.environments import interpreter
from processes import Crew, environment, free_ports, release, start, wait_ready

__all__ = ["paddle_crew"]

_SCRIPT = Path(__file__).with_name("paddle_process.py")
_SERVERS = 2


@contextlib.contextmanager
def paddle_crew(name: str, workload: str, workers: int, rule: str, rows: int = 0) -> Iterator[Crew]:
    """Start servers and workers for the workload w1, w2 or w3.

    The table of W1 starts with ids 0 to `rows` - 1.
    """
    ports = free_ports(_SERVERS + workers + 1)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    shared = environment(
        PADDLE_PSERVERS_IP_PORT_LIST=",".join(addresses[:_SERVERS]),
        PADDLE_PSERVER_NUMS=str(_SERVERS),
        PADDLE_TRAINERS_NUM=str(workers),
        PADDLE_TRAINER_ENDPOINTS=",".join(addresses[_SERVERS:-1]),
        # Paddle's workers find each other through Gloo, which needs an HTTP server as meeting point.
        PADDLE_WITH_GLOO="1",
        PADDLE_GLOO_RENDEZVOUS="3",
        PADDLE_GLOO_HTTP_ENDPOINT=addresses[-1],
        POD_IP="127.0.0.1",
        GLOG_minloglevel="3",
        no_proxy="127.0.0.1",
    )
    with contextlib.ExitStack() as stack:
        processes = []
        for index, port in enumerate(ports[:-1]):
            serves = index < _SERVERS
            rank = str(index if serves else index - _SERVERS)
            variables = shared | {
                "TRAINING_ROLE": "PSERVER" if serves else "TRAINER",
                "PADDLE_PSERVER_ID" if serves else "PADDLE_TRAINER_ID": rank,
                "PADDLE_PORT": str(port),
            }
            python = str(interpreter("paddle"))
            command = [python, "-W", "ignore", str(_SCRIPT), workload, rule, str(rows)]
            processes.append(start(stack, command, variables))
            if serves:
                stack.callback(processes[-1].kill)  # once its workers have left; it would stay
        stack.callback(release, processes)
        for worker in processes[_SERVERS:]:
            wait_ready(worker)
        servers = [process.pid for process in processes[:_SERVERS]]
        yield Crew(name, servers, processes[_SERVERS:])

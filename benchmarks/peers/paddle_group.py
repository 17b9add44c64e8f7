"""The contender that a Paddle user would write: its parameter servers, 2 of them, async.

Paddle is never imported here; the processes run in its own environment.
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
    """Servers and workers of `workload` (w1, w2 or w3); W1's table holds ids 0 to `rows` - 1."""
    ports = free_ports(_SERVERS + workers + 1)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    shared = environment(
        PADDLE_PSERVERS_IP_PORT_LIST=",".join(addresses[:_SERVERS]),
        PADDLE_PSERVER_NUMS=str(_SERVERS),
        PADDLE_TRAINERS_NUM=str(workers),
        PADDLE_TRAINER_ENDPOINTS=",".join(addresses[_SERVERS:-1]),
        # Workers of Paddle find each other through Gloo, whose collective place is an HTTP server.
        PADDLE_WITH_GLOO="1",
        PADDLE_GLOO_RENDEZVOUS="3",
        PADDLE_GLOO_HTTP_ENDPOINT=addresses[-1],
        POD_IP="127.0.0.1",
        GLOG_minloglevel="3",
        no_proxy="127.0.0.1",
    )
    with contextlib.ExitStack() as stack:
        processes = []
        for place, port in enumerate(ports[:-1]):
            serves = place < _SERVERS
            rank = str(place if serves else place - _SERVERS)
            own = shared | {
                "TRAINING_ROLE": "PSERVER" if serves else "TRAINER",
                "PADDLE_PSERVER_ID" if serves else "PADDLE_TRAINER_ID": rank,
                "PADDLE_PORT": str(port),
            }
            python = str(interpreter("paddle"))
            command = [python, "-W", "ignore", str(_SCRIPT), workload, rule, str(rows)]
            processes.append(start(stack, command, own))
            if serves:
                stack.callback(processes[-1].kill)  # once its workers have left; it would stay
        stack.callback(release, processes)
        for worker in processes[_SERVERS:]:
            wait_ready(worker)
        servers = [process.pid for process in processes[:_SERVERS]]
        yield Crew(name, servers, processes[_SERVERS:])

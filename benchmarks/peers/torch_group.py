"""Starts parameter servers on torch.distributed.rpc as a peer: 2 servers and workers.

torch is not imported here. The processes run `torch_rpc.py` and `torch_single.py`.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from processes import Crew, environment, free_ports, release, start, wait_ready

__all__ = ["torch_alone", "torch_crew"]

_SCRIPT = Path(__file__).with_name("torch_rpc.py")
_SERVERS = 2


@contextlib.contextmanager
def torch_crew(name: str, workload: str, workers: int, *, over_tcp: bool = False) -> Iterator[Crew]:
    """Start servers and workers for a workload.

    Args:
        name: Name in tables.
        workload: w1, w2-sgd, w2-adam, w3 or w3-bf16.
        workers: Number of workers.
        over_tcp: True to send tensors over TCP, as between hosts, instead of from memory to memory.
    """
    with contextlib.ExitStack() as stack:
        processes = []
        [port] = free_ports(1)
        for rank in range(_SERVERS + workers):
            variables = environment(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                TENSORS_OVER_TCP=str(over_tcp),
                TP_SOCKET_IFNAME="lo",
                GLOO_SOCKET_IFNAME="lo",
            )
            command = [
                sys.executable,
                "-W",
                "ignore",
                str(_SCRIPT),
                workload,
                str(rank),
                str(_SERVERS),
                str(workers),
            ]
            processes.append(start(stack, command, variables))
        stack.callback(release, processes)
        for process in processes:
            wait_ready(process)
        servers = [process.pid for process in processes[:_SERVERS]]
        yield Crew(name, servers, processes[_SERVERS:])


@contextlib.contextmanager
def torch_alone(name: str, *options: str, workload: str = "w3") -> Iterator[Crew]:
    """Start one process without a cluster that runs W1 or W3, with options of `torch_single.py`."""
    script = str(_SCRIPT.with_name("torch_single.py"))
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-W", "ignore", script, workload, *options]
        process = start(stack, command, environment())
        stack.callback(release, [process])
        wait_ready(process)
        yield Crew(name, [], [process])

"""A parameter server or worker on torch.distributed.rpc, as a user of PyTorch would write it.

Arguments: workload (w1, w2-sgd, w2-adam, w3, w3-bf16), rank, servers, workers. Ranks below `servers` are
servers. Each push waits until it is applied. Server s stores the ids that are s modulo `servers`.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc
from data import FIELDS, W1_BATCH, W1_IDS, W3_DENSE, W3_IDS, batches_w1, batches_w3
from processes import obey
from torch import nn

DIM = 16
HIDDEN = 400
BATCHES = 40
HELD: dict[str, Any] = {}
MAKING = threading.Lock()


class Rows:
    """Rows of an embedding on one server, updated by SparseAdam."""

    def __init__(self, rows: int) -> None:
        self.lock = threading.Lock()
        self.embedding = nn.Embedding(rows, DIM, sparse=True)
        nn.init.normal_(self.embedding.weight, std=0.01)
        self.optimizer = torch.optim.SparseAdam(list(self.embedding.parameters()), lr=1e-3)

    def pull(self, places: torch.Tensor) -> torch.Tensor:
        """Return rows by their index on this server."""
        return self.embedding.weight.data.index_select(0, places)

    def push(self, places: torch.Tensor, gradients: torch.Tensor) -> None:
        """Update distinct rows, once each."""
        weight = self.embedding.weight
        with self.lock:
            weight.grad = torch.sparse_coo_tensor(
                places[None], gradients, weight.shape, is_coalesced=True
            )
            self.optimizer.step()
            weight.grad = None


class Dense:
    """Dense parameters on one server."""

    def __init__(self, shapes: list[tuple[int, ...]], kind: str) -> None:
        self.lock = threading.Lock()
        self.parameters = [nn.Parameter(_initial(shape)) for shape in shapes]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.parameters, 1e-3)
            if kind == "sgd"
            else torch.optim.Adam(self.parameters, 1e-3, foreach=True)
        )

    def pull(self) -> list[torch.Tensor]:
        """Return the values of all parameters."""
        return [parameter.data for parameter in self.parameters]

    def push(self, gradients: list[torch.Tensor]) -> None:
        """Update all parameters once."""
        with self.lock:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()


def _initial(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape) * (2 / shape[0]) ** 0.5 if len(shape) > 1 else torch.zeros(shape)


def make(name: str, kind: Callable[..., Any], *arguments: Any) -> None:
    """Create an object on this server, unless it exists. Workers call this by RPC."""
    with MAKING:
        if name not in HELD:
            HELD[name] = kind(*arguments)


def call(name: str, method: str, *arguments: Any) -> Any:
    """Call a method of an object on this server. Workers call this by RPC."""
    return getattr(HELD[name], method)(*arguments)


class Servers:
    """Calls of a worker to all servers."""

    def __init__(self, count: int) -> None:
        self.names = [f"server{s}" for s in range(count)]

    def make(self, name: str, kind: Callable[..., Any], *arguments: list[Any]) -> None:
        """Create one object on each server. Each argument is a list with one entry per server."""
        for s, server in enumerate(self.names):
            rpc.rpc_sync(server, make, (name, kind, *(a[s] for a in arguments)))

    def start(self, name: str, method: str, *arguments: list[Any]) -> list[Any]:
        """Start a call to every server, and return the futures.

        Each argument is a list with one entry per server.
        """
        return [
            rpc.rpc_async(server, call, (name, method, *(a[s] for a in arguments)))
            for s, server in enumerate(self.names)
        ]

    def deal(self, unique: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Split sorted distinct ids by server.

        Returns two lists with an entry per server: positions of its ids in `unique`, and row indices on the
        server.
        """
        count = len(self.names)
        chosen = [torch.nonzero(unique % count == s).squeeze(1) for s in range(count)]
        return chosen, [unique[index] // count for index in chosen]

    def pull(self, chosen: list[torch.Tensor], places: list[torch.Tensor]) -> torch.Tensor:
        """Return the rows of the distinct ids, in the order of the ids."""
        out = torch.empty(sum(map(len, chosen)), DIM)
        for index, future in zip(chosen, self.start("rows", "pull", places), strict=True):
            out[index] = future.wait()
        return out


def w1(servers: Servers, rank: int) -> Callable[[int], None]:
    """Return the step of W1."""
    count = len(servers.names)
    servers.make("rows", Rows, [W1_IDS // count] * count)
    batches = [torch.from_numpy(ids) for ids in batches_w1(BATCHES, 10 + rank)]
    gradient = torch.full((W1_BATCH, DIM), 0.01)

    def step(number: int) -> None:
        unique, inverse = torch.unique(batches[number % BATCHES], return_inverse=True)
        chosen, rows_of_servers = servers.deal(unique)
        servers.pull(chosen, rows_of_servers).index_select(0, inverse)
        merged = torch.zeros(len(unique), DIM).index_add_(0, inverse, gradient)
        for future in servers.start(
            "rows", "push", rows_of_servers, [merged[index] for index in chosen]
        ):
            future.wait()

    return step


def w2(servers: Servers, kind: str) -> Callable[[int], None]:
    """Return the step of W2: 16 arrays of a million values, half of them on each of 2 servers."""
    count = len(servers.names)
    arrays = 16 // count
    servers.make("dense", Dense, [[(1_000_000,)] * arrays] * count, [kind] * count)
    gradients = [[torch.full((1_000_000,), 1e-3) for _ in range(arrays)]] * count

    def step(number: int) -> None:
        for future in servers.start("dense", "pull"):
            future.wait()
        for future in servers.start("dense", "push", gradients):
            future.wait()

    return step


def w3(servers: Servers, rank: int, amp: bool) -> Callable[[int], None]:
    """Return the step of W3, with `amp` under autocast."""
    shapes = [
        (FIELDS * DIM + W3_DENSE, HIDDEN),
        (HIDDEN,),
        (HIDDEN, HIDDEN),
        (HIDDEN,),
        (HIDDEN, 1),
        (1,),
    ]
    owners = [0, 1, 0, 1, 1, 1]  # balances the bytes over 2 servers
    count = len(servers.names)
    servers.make("rows", Rows, [W3_IDS // count] * count)
    servers.make(
        "dense",
        Dense,
        [[shape for shape, o in zip(shapes, owners, strict=True) if o == s] for s in range(count)],
        ["adam"] * count,
    )
    batches = [tuple(map(torch.from_numpy, batch)) for batch in batches_w3(BATCHES, 5 + rank)]
    loss_of = nn.BCEWithLogitsLoss()

    def step(number: int) -> None:
        ids, wind, labels = batches[number % BATCHES]
        unique, inverse = torch.unique(ids, return_inverse=True)
        chosen, rows_of_servers = servers.deal(unique)
        pending = servers.start("dense", "pull")
        rows = servers.pull(chosen, rows_of_servers).requires_grad_()
        pulled = [iter(future.wait()) for future in pending]
        weights = [next(pulled[owner]).requires_grad_() for owner in owners]
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            hidden = torch.cat([nn.functional.embedding(inverse, rows).flatten(1), wind], 1)
            for layer in range(3):
                hidden = torch.addmm(weights[2 * layer + 1], hidden, weights[2 * layer])
                if layer < 2:
                    hidden = torch.relu(hidden)
            loss = loss_of(hidden, labels)
        loss.backward()
        gradients = [
            [w.grad for w, owner in zip(weights, owners, strict=True) if owner == s]
            for s in range(count)
        ]
        assert rows.grad is not None
        futures = servers.start("dense", "push", gradients)
        futures += servers.start(
            "rows", "push", rows_of_servers, [rows.grad[index] for index in chosen]
        )
        for future in futures:
            future.wait()

    return step


def main() -> None:
    workload, (rank, count, workers) = sys.argv[1], map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    serves = rank < count
    # By default PyTorch uses shared memory and polls it without a pause. Idle processes then use every free
    # core, their CPU time includes the wait, and the next contender has no core. Tensors are read from the
    # memory of the other process (CMA), unless they are to be sent as between hosts.
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=8,
        rpc_timeout=300,
        init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}",
        _transports=["uv"],
        _channels=["basic"] if os.environ["TENSORS_OVER_TCP"] == "True" else None,
    )
    rpc.init_rpc(
        f"server{rank}" if serves else f"worker{rank - count}",
        rank=rank,
        world_size=count + workers,
        rpc_backend_options=options,
    )
    if serves:
        print("READY", flush=True)
    else:
        servers, seat = Servers(count), rank - count
        obey(
            w1(servers, seat)
            if workload == "w1"
            else w3(servers, seat, amp=workload == "w3-bf16")
            if workload.startswith("w3")
            else w2(servers, workload.removeprefix("w2-"))
        )
    rpc.shutdown()


if __name__ == "__main__":
    sys.modules["torch_rpc"] = sys.modules["__main__"]
    main()

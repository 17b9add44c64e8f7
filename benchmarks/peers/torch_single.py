"""W1 and W3 in plain PyTorch: one process, one thread, no cluster.

Tables, model and optimizers are on --device. Ids and samples come from host memory. In W1 the gradients come
from host memory too, and the rows are copied there, as in a worker of a parameter server.
"""

import argparse
from collections.abc import Callable

import torch
from data import W1_IDS, W3_BATCH, W3_IDS, batches_w1, batches_w3
from peers.torch_model import DIM, HIDDEN, Ctr
from processes import obey
from torch import nn


def work_w1(options: argparse.Namespace) -> Callable[[int], None]:
    """Return the step of W1: read the rows of a batch, then update them by SparseAdam."""
    device = options.device
    rows = nn.Embedding(options.ids, DIM, sparse=True, device=device)
    optimizer = torch.optim.SparseAdam(list(rows.parameters()), lr=1e-3)
    batches = [
        torch.from_numpy(ids) for ids in batches_w1(options.batches, 10, options.ids, options.batch)
    ]
    gradient, weight = torch.full((options.batch, DIM), 0.01), rows.weight

    def step(number: int) -> None:
        ids = batches[number % len(batches)].to(device)
        weight.data.index_select(0, ids).cpu()
        weight.grad = torch.sparse_coo_tensor(
            ids[None], gradient.to(device), weight.shape, check_invariants=False
        )
        optimizer.step()

    return step


def work_w3(options: argparse.Namespace) -> Callable[[int], None]:
    """Return the step of W3."""
    device = options.device
    model = Ctr(options.ids, options.hidden).to(device)
    sparse = torch.optim.SparseAdam(list(model.rows.parameters()), lr=1e-3)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
    loss_of = nn.BCEWithLogitsLoss()
    batches = [
        tuple(map(torch.from_numpy, batch))
        for batch in batches_w3(options.batches, 5, options.ids, options.batch)
    ]

    def step(number: int) -> None:
        ids, wind, label = (part.to(device) for part in batches[number % len(batches)])
        sparse.zero_grad()
        dense.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=options.bf16):
            loss = loss_of(model(ids, wind), label)
        loss.backward()
        sparse.step()
        dense.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=["w1", "w3"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bf16", action="store_true", help="W3 under autocast")
    parser.add_argument("--ids", type=int, help="in all")
    parser.add_argument("--batch", type=int, default=W3_BATCH)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    options = parser.parse_args()
    options.ids = options.ids or (W1_IDS if options.workload == "w1" else W3_IDS)
    torch.set_num_threads(1)
    step = (work_w1 if options.workload == "w1" else work_w3)(options)
    obey(step, torch.cuda.synchronize if options.device == "cuda" else lambda: None)


if __name__ == "__main__":
    main()

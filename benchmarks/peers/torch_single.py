"""W3 in plain PyTorch: one process, one thread, no cluster; with the argument bf16 under autocast."""

import sys

import torch
from data import W3_IDS, batches_w3
from peers.torch_model import Ctr
from processes import obey


def main() -> None:
    torch.set_num_threads(1)
    model = Ctr(W3_IDS)
    sparse = torch.optim.SparseAdam(list(model.rows.parameters()), lr=1e-3)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
    loss_of = torch.nn.BCEWithLogitsLoss()
    batches = [tuple(map(torch.from_numpy, batch)) for batch in batches_w3(40, 5)]

    def step(number: int) -> None:
        ids, wind, label = batches[number % len(batches)]
        sparse.zero_grad()
        dense.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in sys.argv):
            loss = loss_of(model(ids, wind), label)
        loss.backward()
        sparse.step()
        dense.step()

    obey(step)


if __name__ == "__main__":
    main()

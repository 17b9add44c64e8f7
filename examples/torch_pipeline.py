"""Trains an nn.Sequential in a pipeline of stages. The script is the same with and without the pipeline.

    python examples/torch_pipeline.py
    psfleet-launch --pipeline 1f1b --stages 2 --micro-batches 8 examples/torch_pipeline.py

It learns from which of 10 groups a basket of ids comes. Embedding rows are on the servers, layers in the
stages.
"""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import psfleet.torch as pst
from psfleet import fleet

GROUPS, ROWS, BASKET = 10, 2_000, 8


def baskets(steps: int, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids, of which half identify the group. The batches are the same in every process."""
    dice = torch.Generator().manual_seed(0)
    for _ in range(steps):
        group = torch.randint(0, GROUPS, (samples,), generator=dice)
        ids = torch.randint(0, ROWS, (samples, BASKET), generator=dice)
        telling = torch.rand(samples, BASKET, generator=dice) < 0.5
        yield torch.where(telling, ids // GROUPS * GROUPS + group[:, None], ids), group


def main() -> None:
    """Train. The first worker's first stage prints the loss and the accuracy."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--samples", type=int, default=256)
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--depth", type=int, default=4)
    arguments = options.parse_args()

    fleet.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers = [
        (nn.Linear(arguments.width, arguments.width), nn.ReLU()) for _ in range(arguments.depth)
    ]
    model = nn.Sequential(
        nn.EmbeddingBag(ROWS, arguments.width, mode="sum", sparse=True),
        *(module for layer in layers for module in layer),
        nn.Linear(arguments.width, GROUPS),
    )
    rows, dense = [model.get_parameter("0.weight")], list(model[1:].parameters())
    trainer = pst.Pipeline(
        model, (torch.optim.SparseAdam(rows, 0.01), torch.optim.Adam(dense)), nn.CrossEntropyLoss()
    )
    batches = fleet.shard(baskets(arguments.steps, arguments.samples))
    for step, (ids, group) in enumerate(pst.prefetch(batches), 1):
        loss = trainer.step(ids, group)
        if fleet.is_first_worker() and step % 50 == 0:
            print(f"step {step}: loss {float(loss):.5f}", flush=True)

    ids, group = next(baskets(1, 2000))
    with torch.no_grad():
        right = (trainer.model.eval()(ids).argmax(1) == group).float().mean()
    fleet.util.print_on_rank(f"accuracy {float(right):.3f}", rank_id=0)


if __name__ == "__main__":
    main()

"""Predicts late flights with the DeepFM of torch_deepfm.py in PyTorch Lightning.

    pip install lightning
    python examples/torch_lightning.py                                     # embedded, one process
    psfleet-launch --servers 2 --workers 2 examples/torch_lightning.py     # a cluster, sync mode

Lightning runs the loop of each worker: its callbacks, progress and validation. The fleet distributes the
batches. Its optimizer makes the step, so the module calls that optimizer itself.
"""

# torch and Lightning annotate some of their methods only; without Lightning its class is Any.
# mypy: disable-error-code="no-untyped-call,misc"

import argparse
from typing import Any

import flights_data
import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_deepfm import DeepFM, tensors

import psfleet.torch as pst
from psfleet import fleet, metrics


class LateFlights(lightning.LightningModule):
    """DeepFM whose embeddings and layers are on the fleet."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        model = DeepFM()
        tables = [model.wide.weight, model.deep.weight]
        optimizers = torch.optim.SparseAdam(tables), torch.optim.Adam(model.mlp.parameters())
        self.model, self._optimizer = pst.convert(model, optimizers)
        self._found: list[tuple[Tensor, Tensor]] = []

    def configure_optimizers(self) -> None:
        """Return no optimizer for Lightning, because the fleet's optimizer makes the steps."""

    def training_step(self, batch: Any, number: int) -> None:
        """Make one training step of the fleet."""
        ids, numbers, late = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(ids, numbers), late)
        self._optimizer.zero_grad()
        self.manual_backward(loss)
        self._optimizer.step()
        fleet.log("loss", loss)
        self.log("loss", loss, prog_bar=True)

    def validation_step(self, batch: Any, number: int) -> None:
        """Keep the predictions of a batch."""
        ids, numbers, late = batch
        self._found.append((late, self.model(ids, numbers).sigmoid()))

    def on_validation_epoch_end(self) -> None:
        """Log the AUC, also for Lightning's callbacks such as EarlyStopping."""
        late, predictions = (torch.cat(parts).numpy() for parts in zip(*self._found, strict=True))
        self._found.clear()
        self.log("auc", float(metrics.auc(late, predictions)))


def main() -> None:
    """Train on January to September, and print the scores on November and December."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flights", type=int, metavar="N", help="train on N flights only")
    options = parser.parse_args()
    fleet.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    flights = flights_data.load().ranked(range(1, 10))
    loader = DataLoader(tensors(flights, range(1, 10), options.flights), batch_size=256)
    module = LateFlights()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,  # the fleet's snapshots have what is trained
        enable_progress_bar=fleet.is_first_worker(),
    )
    trainer.fit(module, fleet.shard(loader))
    test = DataLoader(tensors(flights, range(11, 13)), batch_size=4096)
    results = trainer.validate(module, test, verbose=False)[0]
    fleet.util.print_on_rank(f"November and December   AUC {results['auc']:.4f}", rank_id=0)


if __name__ == "__main__":
    main()

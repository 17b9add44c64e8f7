"""SASRec (Kang and McAuley, ICDM 2018), which predicts the next item in a session.

python examples/models/sasrec.py            # embedded; --plain: in torch alone
psfleet-launch --servers 2 --workers 2 examples/models/sasrec.py
"""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence

import numpy as np
import torch
from harness import ITEMS, LENGTH, Batch, Options, print_retrieval, sessions, table
from numpy.typing import NDArray
from torch import Tensor, nn

from psfleet.features import Feature, FeatureSet

WIDTH = 32


class SASRec(nn.Module):
    """Self-attention over a session. Each click attends to itself and the clicks before it."""

    def __init__(self, embed: nn.Module, layers: int = 2) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Parameter(0.05 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.attention = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)

    def states(self, values: Batch) -> Tensor:
        """Return the state after each click, float32 [n, LENGTH, WIDTH]."""
        future = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        start = values["history"] * WIDTH**0.5 + self.positions
        states: Tensor = self.norm(self.attention(start, mask=future, is_causal=True))
        return states

    def loss(self, batch: Batch) -> Tensor:
        """Return the binary cross entropy of the next click and of a random item, after each click."""
        values = self.embed({**batch, "other": torch.randint(1, ITEMS + 1, batch["next"].shape)})
        states = self.states(values)
        right, wrong = ((states * values[name]).sum(2) for name in ("next", "other"))
        softplus = nn.functional.softplus
        return (softplus(-right) + softplus(wrong)).mean()


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train on all clicks except each session's last click, and score the prediction of that click."""
    options = Options.parse(__doc__, 30, arguments)
    items = table("items", WIDTH)
    names = ("history", "next", "other")
    features = [Feature(name, items, pooling="none", last=LENGTH) for name in names]
    clicked = sessions()
    model = SASRec(options.embedding(FeatureSet(features)))
    options.fit(
        model, {"history": clicked[:, :LENGTH], "next": clicked[:, 1 : LENGTH + 1]}, model.loss
    )
    every = torch.arange(1, ITEMS + 1).reshape(-1, LENGTH)
    with torch.no_grad():
        vectors = model.embed(dict.fromkeys(names, every))["next"].reshape(ITEMS, WIDTH)

    def score_of(rows: NDArray[np.int64]) -> Tensor:
        history = torch.from_numpy(clicked[rows, 1 : LENGTH + 1])
        states = model.states(model.embed(dict.fromkeys(names, history)))
        item_scores: Tensor = states[:, -1] @ vectors.T
        return item_scores

    return print_retrieval(score_of, clicked, options.samples)


if __name__ == "__main__":
    main()

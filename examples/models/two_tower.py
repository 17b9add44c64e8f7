"""Two towers with in-batch negatives (Yi et al., RecSys 2019), which predict a user's next click.

python examples/models/two_tower.py         # embedded; --plain: in torch alone
psfleet-launch --servers 2 --workers 2 examples/models/two_tower.py
"""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from harness import ITEMS, Batch, Options, mlp, print_retrieval, sessions, table
from numpy.typing import NDArray
from torch import Tensor, nn

from psfleet.features import Feature, FeatureSet

WIDTH, TEMPERATURE = 16, 0.1


class TwoTower(nn.Module):
    """A tower for the user's last clicks, and one for the item. A score is the cosine of their vectors.

    Args:
        embed: Look-ups of the features.
        shares: Fraction of all clicks for each item, float32 [ITEMS + 1].
    """

    def __init__(self, embed: nn.Module, shares: NDArray[np.float32]) -> None:
        super().__init__()
        self.embed = embed
        self.log_shares = torch.from_numpy(shares).clamp(min=1e-9).log()
        self.query, self.candidate = mlp(3 * WIDTH, 64, 32), mlp(WIDTH, 64, 32)

    def users(self, values: Batch) -> Tensor:
        """Return unit vectors of users, float32 [n, 32]."""
        inputs = [values[name] for name in ("user", "recent", "last")]
        return nn.functional.normalize(self.query(torch.cat(inputs, 1)), dim=1)

    def items(self, values: Batch) -> Tensor:
        """Return unit vectors of items, float32 [n, 32]."""
        return nn.functional.normalize(self.candidate(values["item"]), dim=1)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross entropy of each user's item among all items of the batch.

        An item is a candidate as often as it is clicked, so its log share is subtracted from its score
        (logQ). If another sample has the same item as the user, it is not a negative.
        """
        values, items = self.embed(batch), batch["item"]
        logits = self.users(values) @ self.items(values).T / TEMPERATURE - self.log_shares[items]
        same = (items[:, None] == items) & ~torch.eye(len(items), dtype=torch.bool)
        return nn.functional.cross_entropy(
            logits.masked_fill(same, -torch.inf), torch.arange(len(items))
        )


def samples(clicked: NDArray[np.int64], at: int) -> dict[str, Any]:
    """Return for each session the clicks before position `at`, and the item at that position."""
    before = np.zeros((len(clicked), 10), np.int64)
    recent = clicked[:, max(at - 10, 0) : at]
    before[:, : recent.shape[1]] = recent
    users = np.arange(1, len(clicked) + 1)
    return {"user": users, "recent": before, "last": clicked[:, at - 1], "item": clicked[:, at]}


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train on all clicks except each session's last click, and score the prediction of that click."""
    options = Options.parse(__doc__, 4, arguments)
    users, items = table("users", WIDTH), table("items", WIDTH)
    features = [Feature("user", users), Feature("recent", items, pooling="mean", padding=0)]
    features += [Feature("last", items), Feature("item", items)]
    clicked = sessions()
    shares = np.bincount(clicked[:, :-1].reshape(-1), minlength=ITEMS + 1) / clicked[:, :-1].size
    model = TwoTower(options.embedding(FeatureSet(features)), shares.astype(np.float32))
    parts = [samples(clicked, at) for at in range(1, clicked.shape[1] - 1)]
    data = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    options.fit(model, data, model.loss)

    last = samples(clicked, clicked.shape[1] - 1)
    everything = {
        name: torch.from_numpy(values[:1].repeat(ITEMS, 0)) for name, values in last.items()
    }
    with torch.no_grad():
        vectors = model.items(model.embed({**everything, "item": torch.arange(1, ITEMS + 1)}))

    def score_of(rows: NDArray[np.int64]) -> Tensor:
        batch = {name: torch.from_numpy(values[rows]) for name, values in last.items()}
        return model.users(model.embed(batch)) @ vectors.T

    return print_retrieval(score_of, clicked, options.samples)


if __name__ == "__main__":
    main()

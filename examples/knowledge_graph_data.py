"""FB15k-237: 272,115 triples of 14,541 entities and 237 relations to train on (Toutanova and Chen, 2015).

The files are those of OpenKE, without a licence for others to pass on, so you download them.
"""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psfleet import UsageError

__all__ = ["CHECKSUMS", "Answers", "Graph", "load"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

SOURCE = "https://github.com/thunlp/OpenKE/tree/OpenKE-PyTorch/benchmarks/FB15K237"
CHECKSUMS = {
    "train2id.txt": "5f44223a02b39b8e398e77a787feb4f06e9ffccf1ae87047bbf38fcc8cc08bd2",
    "valid2id.txt": "7d21e778de4369d5348f5cff23a08dc847ab5fce4b5f07c80113297d2dc60a86",
    "test2id.txt": "6027e649c1716ac9c1ef2f24672a416aa277aff3e14850ef915ac5a21df70417",
}
"""SHA-256. Each file has a line with a number, then a line `head tail relation` for each triple."""


class Answers:
    """The entities that answer each query.

    Attributes:
        queries: int64 [n, 2], head and relation, in order and each once.
    """

    def __init__(self, triples: Ints) -> None:
        triples = triples[np.lexsort(triples.T[::-1])]
        self.queries, starts = np.unique(triples[:, :2], axis=0, return_index=True)
        self._tails = np.split(triples[:, 2], starts[1:])
        self._places = {tuple(query): at for at, query in enumerate(self.queries.tolist())}

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, at: int) -> Ints:
        return self._tails[at]

    def of(self, query: Ints) -> Ints:
        """The entities that answer a query, int64 [2]."""
        return self._tails[self._places[tuple(query.tolist())]]


class Graph:
    """Triples as queries (head, relation) with answers (tail).

    Each triple also asks for its head: with the inverse relation, which has a number of its own.

    Attributes:
        entities: How many there are.
        train: Answers to learn.
        known: Answers of all parts, which a filtered rank leaves out.
        triples: By part, int64 [n, 3] of head, relation and tail, both ways.
    """

    def __init__(self, parts: dict[str, Ints]) -> None:
        every = np.concatenate(list(parts.values()))
        relations = int(every[:, 2].max()) + 1
        self.entities = int(every[:, :2].max()) + 1
        self.triples = {name: _both_ways(part, relations) for name, part in parts.items()}
        self.train = Answers(self.triples["train"])
        self.known = Answers(np.concatenate(list(self.triples.values())))

    def candidates(self, replies: Ints, drawn: int, seed: Ints) -> tuple[Ints, Floats]:
        """The entities among which a step looks for these answers, each once and in order.

        Args:
            replies: These are among them.
            drawn: So many are drawn evenly of all entities; 0: all are candidates.
            seed: Of the draw.

        Returns:
            The entities, and for each the logarithm of the number that it stands for: an answer for
            itself, the drawn ones together for all that are no answers. Added to scores, it makes the sum
            of their exponentials an estimate of that over all entities, without a bias.
        """
        everything = np.arange(self.entities)
        if not 0 < drawn < self.entities:
            return everything, np.zeros(self.entities, np.float32)
        sample = np.random.default_rng(seed).choice(everything, drawn, replace=False)
        found = np.union1d(replies, sample)
        is_answer = np.isin(found, replies)
        answering = int(is_answer.sum())
        if answering == len(found):
            return found, np.zeros(len(found), np.float32)
        others = (self.entities - answering) / (len(found) - answering)
        return found, np.where(is_answer, 0, np.log(others)).astype(np.float32)


def _both_ways(found: Ints, relations: int) -> Ints:
    head, tail, relation = found.T
    forward, back = (head, relation, tail), (tail, relation + relations, head)
    return np.concatenate([np.stack(forward, axis=1), np.stack(back, axis=1)])


def load(folder: Path, is_checked: bool = True) -> Graph:
    """The graph of the three files in a folder.

    Args:
        folder: Where the files of `CHECKSUMS` are.
        is_checked: Refuse files whose SHA-256 is another one.

    Raises:
        UsageError: A file is missing or is another one; the text names it and where to get it.
    """
    paths = {name.removesuffix("2id.txt"): folder / name for name in CHECKSUMS}
    for path in paths.values():
        _check(path, is_checked)
    return Graph(
        {
            name: np.loadtxt(path, np.int64, skiprows=1, ndmin=2, usecols=(0, 1, 2))
            for name, path in paths.items()
        }
    )


def _check(path: Path, is_checked: bool) -> None:
    if not path.is_file():
        raise UsageError(f"{path} is missing; download it from {SOURCE}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if is_checked and found != CHECKSUMS[path.name]:
        raise UsageError(
            f"{path} has the SHA-256 {found}, not {CHECKSUMS[path.name]}; download it again from {SOURCE}"
        )

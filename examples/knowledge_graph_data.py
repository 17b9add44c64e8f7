"""FB15k-237: 272,115 training triples of 14,541 entities and 237 relations (Toutanova and Chen, 2015).

The files are those of OpenKE. They have no licence that allows redistribution, so you have to download them.
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
"""SHA-256 of each file.

A file has a line with the number of triples, then a line `head tail relation` for each triple.
"""


class Answers:
    """The entities that answer each query.

    Attributes:
        queries: int64 [n, 2], head and relation, sorted and distinct.
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
        """Return the entities that answer a query, int64 [n].

        Args:
            query: Head and relation, int64 [2].
        """
        return self._tails[self._places[tuple(query.tolist())]]


class Graph:
    """Triples as queries (head, relation) with answers (tail).

    Each triple also gives a query for its head, with the inverse relation. Inverse relations have separate
    numbers.

    Attributes:
        entities: Number of entities.
        train: Answers to learn.
        known: Answers of all parts, which a filtered rank leaves out.
        triples: For each part, int64 [n, 3] of head, relation and tail, in both directions.
    """

    def __init__(self, parts: dict[str, Ints]) -> None:
        every = np.concatenate(list(parts.values()))
        relations = int(every[:, 2].max()) + 1
        self.entities = int(every[:, :2].max()) + 1
        self.triples = {name: _both_ways(part, relations) for name, part in parts.items()}
        self.train = Answers(self.triples["train"])
        self.known = Answers(np.concatenate(list(self.triples.values())))

    def candidates(self, replies: Ints, drawn: int, seed: Ints) -> tuple[Ints, Floats]:
        """Return the entities that a step scores, sorted and distinct.

        Args:
            replies: Answers of the step's queries, which are always included.
            drawn: Number of entities drawn uniformly. 0 returns all entities.
            seed: Seed of the draw.

        Returns:
            The entities, and for each the logarithm of the number of entities that it represents. An answer
            represents only itself. The drawn entities together represent all entities that are no answers.
            Add the logarithm to a score: the sum of the exponentials is then an unbiased estimate of the sum
            over all entities.
        """
        everything = np.arange(self.entities)
        if not 0 < drawn < self.entities:
            return everything, np.zeros(self.entities, np.float32)
        sample = np.random.default_rng(seed).choice(everything, drawn, replace=False)
        entities = np.union1d(replies, sample)
        is_answer = np.isin(entities, replies)
        answering = int(is_answer.sum())
        if answering == len(entities):
            return entities, np.zeros(len(entities), np.float32)
        represented = (self.entities - answering) / (len(entities) - answering)
        return entities, np.where(is_answer, 0, np.log(represented)).astype(np.float32)


def _both_ways(triples: Ints, relations: int) -> Ints:
    head, tail, relation = triples.T
    forward, back = (head, relation, tail), (tail, relation + relations, head)
    return np.concatenate([np.stack(forward, axis=1), np.stack(back, axis=1)])


def load(folder: Path, is_checked: bool = True) -> Graph:
    """Return the graph of the three files in a folder.

    Args:
        folder: Folder with the files of `CHECKSUMS`.
        is_checked: If True, refuse files with another SHA-256.

    Raises:
        UsageError: A file is missing or has another SHA-256. The message names the file and its URL.
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
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if is_checked and digest != CHECKSUMS[path.name]:
        raise UsageError(
            f"{path} has the SHA-256 {digest}, not {CHECKSUMS[path.name]}; download it again from {SOURCE}"
        )

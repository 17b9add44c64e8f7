"""Predicts the missing entity of a triple: ComplEx and TransE on FB15k-237.

    python examples/knowledge_graph.py --model transe                                # embedded
    psfleet-launch --servers 2 --workers 2 --sync examples/knowledge_graph.py        # a cluster

docs/proofs.md compares the filtered MRR with the published one.
"""

import argparse
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import knowledge_graph_data
import numpy as np
from knowledge_graph_data import Graph
from numpy.typing import NDArray

import psfleet as ps
from psfleet import UsageError, fleet, initializer, layers, optimizer

Ints = NDArray[np.int64]
Variable = Any


@dataclass(frozen=True)
class Settings:
    """Settings of a model. The values in MODELS come from a few trials on the validation triples.

    Attributes:
        dim: Number of values of an entity and of a relation. ComplEx uses the second half as imaginary parts.
        epochs: Number of passes over the training queries.
        falls: Number of epochs after which the rate is divided by five.
        rate: Learning rate of Adagrad.
        spread: Standard deviation of the normal distribution that initializes entities and relations.
        penalty: Weight of the penalty on the cubed absolute values of the rows that a triple uses (N3;
            Lacroix et al., 2018).
        batch: Number of queries of a step of all workers together.
        candidates: Number of random entities that a step scores beside the answers of its queries. Each
            random entity gets a higher weight, so that together they represent all other entities. 0 scores
            all entities.
    """

    dim: int
    epochs: int
    falls: int
    rate: float
    spread: float
    penalty: float = 0.0
    batch: int = 500
    candidates: int = 2000


MODELS = {
    "complex": Settings(dim=256, epochs=12, falls=10, rate=0.1, spread=0.1, penalty=0.05),
    "transe": Settings(dim=128, epochs=15, falls=12, rate=0.2, spread=0.25),
}


def complex_scores(head: Variable, relation: Variable, entity: Variable) -> Variable:
    """Return Re(head * relation * conj(entity)) for all queries and entities (Trouillon et al., 2016)."""
    (a, b), (c, d) = layers.split(head, 2, dim=1), layers.split(relation, 2, dim=1)
    query = layers.concat([a * c - b * d, a * d + b * c], axis=1)
    return layers.matmul(query, entity, transpose_y=True)


def transe_scores(head: Variable, relation: Variable, entity: Variable) -> Variable:
    """Return -|head + relation - entity| for all queries and entities (Bordes et al., 2013)."""
    query = head + relation
    lengths = layers.reduce_sum(layers.square(query), dim=1, keep_dim=True)
    entity_lengths = layers.reduce_sum(layers.square(entity), dim=1)
    squares = lengths + entity_lengths - layers.matmul(query, entity, transpose_y=True, alpha=2.0)
    return layers.sqrt(layers.clip(squares, 1e-6, 1e9)) * -1.0


def cubes(rows: Variable) -> Variable:
    """Return the sum of the cubed absolute values of each row of complex numbers, [n]."""
    real, imaginary = layers.split(rows, 2, dim=1)
    absolute = layers.square(real) + layers.square(imaginary)
    return layers.reduce_sum(layers.pow(absolute, 1.5), dim=1)


class Model:
    """Model that scores all candidates of a step for all its queries, with one matrix product."""

    def __init__(self, graph: Graph, name: str, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.program = ps.Program(random_seed=1)
        with ps.program_guard(self.program):
            heads = layers.data("heads", [None], dtype="int64")
            relations = layers.data("relations", [None], dtype="int64")
            candidates = layers.data("candidates", [None], dtype="int64")
            truth = layers.data("truth", [None, None])
            shift = layers.data("shift", [None])
            head, self.entity = self._rows("entities", heads), self._rows("entities", candidates)
            relation = self._rows("relations", relations)
            scores = complex_scores if name == "complex" else transe_scores
            self.scores = scores(head, relation, self.entity)
            loss = layers.reduce_sum(truth * layers.log_softmax(self.scores + shift)) * -1.0
            if settings.penalty:
                of_query, of_entity = (layers.reduce_sum(truth, dim=axis) for axis in (1, 0))
                used = (cubes(head) + cubes(relation)) * of_query
                used = layers.reduce_sum(used) + layers.reduce_sum(cubes(self.entity) * of_entity)
                loss = loss + used * settings.penalty
            self.loss = loss
            self.test_program = self.program.clone(for_test=True)
            self.rates = optimizer.lr.MultiStepDecay(settings.rate, [settings.falls], gamma=0.2)
            fleet.distributed_optimizer(optimizer.Adagrad(self.rates)).minimize(loss)
        self.executor = ps.Executor()

    def _rows(self, name: str, ids: Variable) -> Variable:
        start = initializer.Normal(scale=self.settings.spread)
        size = [None, self.settings.dim]
        return layers.embedding(ids, size, is_distributed=True, name=name, param_attr=start)

    def step(self, chosen: Ints) -> float:
        """Train on the training queries with these numbers. Returns the mean loss of their triples."""
        queries = self.graph.train.queries[chosen]
        replies = [self.graph.train[at] for at in chosen]
        flat = np.concatenate(replies)
        # The seed is the batch, so that a restarted worker draws the same candidates for the same step.
        candidates, shift = self.graph.candidates(flat, self.settings.candidates, seed=chosen)
        truth = np.zeros((len(chosen), len(candidates)), np.float32)
        rows = np.repeat(np.arange(len(chosen)), [len(answers) for answers in replies])
        truth[rows, np.searchsorted(candidates, flat)] = 1 / len(flat)
        inputs = {**_named(queries), "candidates": candidates, "truth": truth, "shift": shift}
        return float(self.executor.run(self.program, inputs, [self.loss])[0])

    def train(self) -> float:
        """Train. The workers share each epoch. Returns the triples per second of all workers together."""
        size, seconds = self.settings.batch // fleet.worker_num(), 0.0
        for epoch in range(self.settings.epochs):
            began = time.perf_counter()
            batches = fleet.dataset(len(self.graph.train), size, shuffle_seed=epoch)
            loss = np.mean([self.step(chosen) for chosen in batches])
            seconds += time.perf_counter() - began
            mrr, hits = self.quality("valid")
            line = f"epoch {epoch + 1}   loss {loss:.4f}   MRR {mrr:.4f}   Hits@10 {hits:.4f}"
            fleet.util.print_on_rank(line, 0)
            self.rates.step()
        return self.settings.epochs * len(self.graph.triples["train"]) / (seconds or 1.0)

    def ranks(self, triples: Ints) -> NDArray[np.float64]:
        """Return the filtered rank of each tail, [n].

        Other known answers are left out, and ties count half.
        """
        inputs = {**_named(triples), "candidates": np.arange(self.graph.entities)}
        (all_scores,) = self.executor.run(self.test_program, inputs, [self.scores])
        true_scores = all_scores[np.arange(len(triples)), triples[:, 2], None].copy()
        for scores, query in zip(all_scores, triples[:, :2], strict=True):
            scores[self.graph.known.of(query)] = -np.inf
        below = (
            (all_scores < true_scores).sum(axis=1) + (all_scores <= true_scores).sum(axis=1)
        ) / 2
        ranks: NDArray[np.float64] = 1.0 + self.graph.entities - below  # of NaN the last
        return ranks

    def quality(self, part: str) -> tuple[float, float]:
        """Return filtered MRR and Hits@10 of a part's triples. The workers share the work."""
        triples, sums = self.graph.triples[part], np.zeros(2)
        for chosen in fleet.shard(np.array_split(np.arange(len(triples)), len(triples) // 500 + 1)):
            ranks = self.ranks(triples[chosen])
            sums += (1 / ranks).sum(), (ranks <= 10).sum()
        mrr, hits = fleet.util.all_reduce(sums) / len(triples)
        return float(mrr), float(hits)


def _named(queries: Ints) -> dict[str, Ints]:
    return {"heads": queries[:, 0], "relations": queries[:, 1]}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="complex")
    parser.add_argument(
        "--data", type=Path, default=Path(".data/fb15k237"), help="folder of the files"
    )
    parser.add_argument("--any-data", action="store_true", help="take files with another checksum")
    parser.add_argument("--epochs", type=int, help="passes over the training queries")
    parser.add_argument("--dim", type=int, help="values of an entity")
    parser.add_argument("--batch", type=int, help="queries of a step of all workers")
    parser.add_argument("--candidates", type=int, help="random entities of a step; 0: all entities")
    parser.add_argument("--out", type=Path, help="folder for the trained model")
    return parser.parse_args()


def main() -> None:
    """Train, and print the scores."""
    options = parse()
    try:
        graph = knowledge_graph_data.load(options.data, is_checked=not options.any_data)
    except UsageError as error:
        raise SystemExit(f"knowledge_graph.py: {error}") from None
    fleet.init()
    names = ("epochs", "dim", "batch", "candidates")
    changes = {name: value for name in names if (value := getattr(options, name)) is not None}
    model = Model(graph, options.model, dataclasses.replace(MODELS[options.model], **changes))
    pace = model.train()
    for part in ("valid", "test"):
        mrr, hits = model.quality(part)
        fleet.util.print_on_rank(f"{part} MRR {mrr:.4f}   Hits@10 {hits:.4f}", 0)
    fleet.util.print_on_rank(f"{pace:,.0f} triples/s", 0)
    if options.out:
        fleet.save_persistables(str(options.out))
    fleet.stop_worker()


if __name__ == "__main__":
    main()

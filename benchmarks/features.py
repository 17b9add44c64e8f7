"""A step of 40 features, 12 of them multi-hot, in one look-up, and of one table with as many ids.

28 features have one id a sample and 12 have 10 on the average, of 100,000 ids each, dim 16, Adagrad. One
worker. "40 tables": each feature has a table of its own. "shared": they share one, in which their ids differ
by a salt. "one table": pull and push of as many ids of one table, without features and pooling. "program" and
"PyTorch": 40 tables by `layers.features` and `psfleet.torch.FeatureEmbedding`, with the mean of all values as
loss. "torch": 40 EmbeddingBags with sparse gradients and torch's Adagrad, in one process with one thread. CPU
is that of servers and worker together.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from measuring import Summary, in_turn
from processes import obey, psfleet_crew
from reporting import Report, arguments, finish

SINGLE, MULTI, MEAN, DIM, ROWS = 28, 12, 10, 16, 100_000
BATCHES = 4
NAMES = [f"f{number}" for number in range(SINGLE + MULTI)]
Step = Callable[[int], None]


def batches(samples: int) -> list[list[tuple[Any, Any]]]:
    """Ids and lengths of each feature."""
    dice = np.random.default_rng(0)

    def feature(number: int) -> tuple[Any, Any]:
        multi = number >= SINGLE
        lengths = dice.integers(0, 2 * MEAN + 1, samples) if multi else np.ones(samples, np.int64)
        return dice.integers(0, ROWS, int(lengths.sum())), lengths

    return [[feature(number) for number in range(SINGLE + MULTI)] for _ in range(BATCHES)]


def feature_set(shared: bool) -> Any:
    """The features, each with a table of its own, or with ids of its own in one table."""
    from psfleet.features import Feature, FeatureSet, Table
    from psfleet.optimizer import Adagrad

    one = Table("shared", DIM, Adagrad(0.05))
    return FeatureSet(
        Feature(name, one, hashed=True, salt=name)
        if shared
        else Feature(name, Table(name, DIM, Adagrad(0.05)))
        for name in NAMES
    )


def jagged(samples: int) -> list[dict[str, Any]]:
    """The batches as a feature set takes them."""
    from psfleet.features import Jagged

    return [
        {name: Jagged(ids, lengths) for name, (ids, lengths) in zip(NAMES, batch, strict=True)}
        for batch in batches(samples)
    ]


def lookup_step(ps: Any, of: Any, given: list[dict[str, Any]], samples: int, dim: int) -> Step:
    """One look-up and one push of all features of a set."""
    features = ps.features(of)
    gradients = dict.fromkeys(given[0], np.full((samples, dim), 0.01, np.float32))

    def step(number: int) -> None:
        batch = features.batch(given[number % len(given)])
        batch.values(ps.pull(batch.pooled))
        ps.push(batch.pooled_gradients(gradients))

    return step


def program_step(samples: int) -> Step:
    """A program whose loss is the mean of all values."""
    import psfleet
    from psfleet import fleet, layers
    from psfleet.features import feed

    features = feature_set(shared=False)
    loss = layers.mean(layers.concat(list(layers.features(features).values()), axis=1))
    fleet.distributed_optimizer(psfleet.optimizer.SGD(0.1)).minimize(loss)
    executor, given = psfleet.Executor(), jagged(samples)

    def step(number: int) -> None:
        executor.run(feed=feed(features, given[number % BATCHES]), fetch_list=[loss])

    return step


def pytorch_step(samples: int) -> Step:
    """A module whose loss is the mean of all values."""
    import torch

    import psfleet.torch as pst

    torch.set_num_threads(1)
    embed, given = pst.FeatureEmbedding(feature_set(shared=False)), jagged(samples)
    opt = pst.DistributedOptimizer(embed)

    def step(number: int) -> None:
        values = embed(given[number % BATCHES])
        torch.cat(list(values.values()), 1).mean().backward()
        opt.step()
        opt.clear_grad()

    return step


def table_step(ps: Any, samples: int) -> Step:
    """As many ids of one table, row by row."""
    from psfleet.optimizer import Adagrad

    table = ps.sparse_table("all", DIM, Adagrad(0.05))
    given = [
        np.concatenate([ids + ROWS * number for number, (ids, _) in enumerate(batch)])
        for batch in batches(samples)
    ]
    gradients = np.full((max(map(len, given)), DIM), 0.01, np.float32)

    def step(number: int) -> None:
        ids = given[number % BATCHES]
        table.pull(ids)
        table.push(ids, gradients[: len(ids)])

    return step


def torch_step(samples: int) -> Step:
    """As many bags of torch."""
    import torch

    torch.set_num_threads(1)
    bags: Any = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(SINGLE + MULTI)
    )
    opt = torch.optim.Adagrad(bags.parameters(), 0.05)
    gradient = torch.full((samples, DIM), 0.01)
    given = [
        [
            (torch.from_numpy(ids), torch.from_numpy(np.cumsum(lengths) - lengths))
            for ids, lengths in batch
        ]
        for batch in batches(samples)
    ]

    def step(number: int) -> None:
        opt.zero_grad()
        out = [bag(*part) for bag, part in zip(bags, given[number % BATCHES], strict=True)]
        torch.autograd.backward(out, [gradient] * len(out))
        opt.step()

    return step


def work(mode: Any, what: str, samples: int) -> None:
    """A worker; mode: of the fleet, or embedded."""
    import psfleet
    from psfleet.core.base.settings.environment import Environment

    if what in ("program", "PyTorch"):
        work_in_fleet(mode, program_step if what == "program" else pytorch_step, samples)
        return
    alone = Environment(None, 0, (), 1) if mode == "embedded" else None
    with psfleet.connect(alone, mode="async" if mode == "embedded" else mode) as ps:
        if what == "torch":
            obey(torch_step(samples), ps.flush)
        elif what == "one table":
            obey(table_step(ps, samples), ps.flush)
        else:
            given, of = jagged(samples), feature_set(shared=what == "shared")
            obey(lookup_step(ps, of, given, samples, DIM), ps.flush)


def work_in_fleet(mode: str, make: Callable[[int], Step], samples: int) -> None:
    """A worker with a model."""
    from psfleet import fleet
    from psfleet.core.runtime.process_runtime import active

    if mode == "embedded":
        del os.environ["PSFLEET_SERVERS"], os.environ["PSFLEET_ROLE"]
    else:
        fleet.init(strategy=fleet.DistributedStrategy(a_sync=False))
    obey(make(samples), lambda: active().flush())


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--no-torch", action="store_true", help="leave torch out")
    options = parser.parse_args()
    title = f"40 features, {options.samples} samples a step, 1 worker"
    report = Report("features", title)
    modes = ("embedded", "sync")
    every = ("40 tables", "shared", "one table", "program", "PyTorch")
    contenders = [(mode, what) for mode in modes for what in every]
    contenders += [("embedded", "torch")]
    if options.no_torch:
        contenders = [(mode, what) for mode, what in contenders if "orch" not in what]
    with contextlib.ExitStack() as stack:
        crews = [
            stack.enter_context(
                psfleet_crew(
                    f"{mode}, {what}",
                    [__file__, "--worker", mode, what, str(options.samples)],
                    servers=1,
                )
            )
            for mode, what in contenders
        ]
        steps = options.steps or (10 if options.short else 30)
        found = in_turn(crews, warm=2 * BATCHES, steps=steps, runs=options.runs)
    report.rows += [row(name, steps, summary) for name, summary in found.items()]
    finish(report, options.json)


def row(name: str, steps: int, summary: Summary) -> dict[str, Any]:
    return {
        "contender": name,
        "CPU ms / step": summary.cpu / steps * 1e3,
        "ms / step": summary.wall / steps * 1e3,
        **summary.noise,
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(sys.argv[-3], sys.argv[-2], int(sys.argv[-1]))
    else:
        main()

"""A step of 40 features, 12 of them multi-hot, in one look-up, compared with one table with as many ids.

28 features have one id per sample and 12 have 10 on average, of 100,000 ids each, dim 16, Adagrad, one
worker.

- "40 tables": each feature has its own table.
- "shared": all features share one table, in which a salt keeps their ids apart.
- "one table": pull and push of as many ids of one table, without features and pooling.
- "program" and "PyTorch": 40 tables by `layers.features` and `psfleet.torch.FeatureEmbedding`, with the mean
  of all values as loss.
- "torch": 40 EmbeddingBags with sparse gradients and torch's Adagrad, in one process with one thread.

CPU is that of servers and worker together.
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
    """Return for each batch the ids and lengths of each feature."""
    dice = np.random.default_rng(0)

    def feature(number: int) -> tuple[Any, Any]:
        multi = number >= SINGLE
        lengths = dice.integers(0, 2 * MEAN + 1, samples) if multi else np.ones(samples, np.int64)
        return dice.integers(0, ROWS, int(lengths.sum())), lengths

    return [[feature(number) for number in range(SINGLE + MULTI)] for _ in range(BATCHES)]


def feature_set(shared: bool) -> Any:
    """Return the features, each with its own table, or all in one table with salted ids."""
    from psfleet.features import Feature, FeatureSet, Table
    from psfleet.optimizer import Adagrad

    shared_table = Table("shared", DIM, Adagrad(0.05))
    return FeatureSet(
        Feature(name, shared_table, hashed=True, salt=name)
        if shared
        else Feature(name, Table(name, DIM, Adagrad(0.05)))
        for name in NAMES
    )


def jagged(samples: int) -> list[dict[str, Any]]:
    """Return the batches in the form that a feature set takes."""
    from psfleet.features import Jagged

    return [
        {name: Jagged(ids, lengths) for name, (ids, lengths) in zip(NAMES, batch, strict=True)}
        for batch in batches(samples)
    ]


def lookup_step(ps: Any, of: Any, inputs: list[dict[str, Any]], samples: int, dim: int) -> Step:
    """Return a step with one look-up and one push of all features of a set."""
    features = ps.features(of)
    gradients = dict.fromkeys(inputs[0], np.full((samples, dim), 0.01, np.float32))

    def step(number: int) -> None:
        batch = features.batch(inputs[number % len(inputs)])
        batch.values(ps.pull(batch.pooled))
        ps.push(batch.pooled_gradients(gradients))

    return step


def program_step(samples: int) -> Step:
    """Return the step of a program whose loss is the mean of all values."""
    import psfleet
    from psfleet import fleet, layers
    from psfleet.features import feed

    features = feature_set(shared=False)
    loss = layers.mean(layers.concat(list(layers.features(features).values()), axis=1))
    fleet.distributed_optimizer(psfleet.optimizer.SGD(0.1)).minimize(loss)
    executor, inputs = psfleet.Executor(), jagged(samples)

    def step(number: int) -> None:
        executor.run(feed=feed(features, inputs[number % BATCHES]), fetch_list=[loss])

    return step


def pytorch_step(samples: int) -> Step:
    """Return the step of a module whose loss is the mean of all values."""
    import torch

    import psfleet.torch as pst

    torch.set_num_threads(1)
    embed, inputs = pst.FeatureEmbedding(feature_set(shared=False)), jagged(samples)
    opt = pst.DistributedOptimizer(embed)

    def step(number: int) -> None:
        values = embed(inputs[number % BATCHES])
        torch.cat(list(values.values()), 1).mean().backward()
        opt.step()
        opt.clear_grad()

    return step


def table_step(ps: Any, samples: int) -> Step:
    """Return a step with as many ids of one table, row by row."""
    from psfleet.optimizer import Adagrad

    table = ps.sparse_table("all", DIM, Adagrad(0.05))
    id_batches = [
        np.concatenate([ids + ROWS * number for number, (ids, _) in enumerate(batch)])
        for batch in batches(samples)
    ]
    gradients = np.full((max(map(len, id_batches)), DIM), 0.01, np.float32)

    def step(number: int) -> None:
        ids = id_batches[number % BATCHES]
        table.pull(ids)
        table.push(ids, gradients[: len(ids)])

    return step


def torch_step(samples: int) -> Step:
    """Return a step with as many EmbeddingBags of torch."""
    import torch

    torch.set_num_threads(1)
    bags: Any = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(SINGLE + MULTI)
    )
    opt = torch.optim.Adagrad(bags.parameters(), 0.05)
    gradient = torch.full((samples, DIM), 0.01)
    bag_batches = [
        [
            (torch.from_numpy(ids), torch.from_numpy(np.cumsum(lengths) - lengths))
            for ids, lengths in batch
        ]
        for batch in batches(samples)
    ]

    def step(number: int) -> None:
        opt.zero_grad()
        out = [bag(*part) for bag, part in zip(bags, bag_batches[number % BATCHES], strict=True)]
        torch.autograd.backward(out, [gradient] * len(out))
        opt.step()

    return step


def work(mode: Any, contender: str, samples: int) -> None:
    """Run a worker.

    Args:
        mode: Consistency mode of the fleet, or "embedded".
        contender: Name of the variant.
        samples: Number of samples of a step.
    """
    import psfleet
    from psfleet.core.base.settings.environment import Environment

    if contender in ("program", "PyTorch"):
        work_in_fleet(mode, program_step if contender == "program" else pytorch_step, samples)
        return
    alone = Environment(None, 0, (), 1) if mode == "embedded" else None
    with psfleet.connect(alone, mode="async" if mode == "embedded" else mode) as ps:
        if contender == "torch":
            obey(torch_step(samples), ps.flush)
        elif contender == "one table":
            obey(table_step(ps, samples), ps.flush)
        else:
            inputs, of = jagged(samples), feature_set(shared=contender == "shared")
            obey(lookup_step(ps, of, inputs, samples, DIM), ps.flush)


def work_in_fleet(mode: str, make: Callable[[int], Step], samples: int) -> None:
    """Run a worker with a model."""
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
    contenders = [(mode, contender) for mode in modes for contender in every]
    contenders += [("embedded", "torch")]
    if options.no_torch:
        contenders = [
            (mode, contender) for mode, contender in contenders if "orch" not in contender
        ]
    with contextlib.ExitStack() as stack:
        crews = [
            stack.enter_context(
                psfleet_crew(
                    f"{mode}, {contender}",
                    [__file__, "--worker", mode, contender, str(options.samples)],
                    servers=1,
                )
            )
            for mode, contender in contenders
        ]
        steps = options.steps or (10 if options.short else 30)
        summaries = in_turn(crews, warm=2 * BATCHES, steps=steps, runs=options.runs)
    report.rows += [row(name, steps, summary) for name, summary in summaries.items()]
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

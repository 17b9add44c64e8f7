"""Cost of bfloat16 products in model quality: AUC of W3's model and of the flights example, against float32.

One process each, no cluster. Gradients are rounded as `amp` rounds them. W3's model (26 fields x 16, MLP
400-400-1, batch 2048, Adam) learns clicks drawn from a hidden linear model. flights is examples/flights.py,
whose products are so small that amp keeps them in float32; here they are computed in bfloat16.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from data import FIELDS, W3_BATCH, W3_DENSE
from processes import environment
from reporting import Report, arguments, finish

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DIM, HIDDEN, IDS, STEPS, TESTS = 16, 400, 2_000, 300, 10


def w3(compute: str, seed: int, steps: int) -> float:
    """Return the AUC of W3's model on samples that it was not trained on."""
    import psfleet as ps
    from psfleet import fleet, layers, metrics, optimizer

    ids = layers.data("ids", [None, FIELDS], dtype="int64")
    wind, label = layers.data("wind", [None, W3_DENSE]), layers.data("label", [None, 1])
    rows = layers.embedding(ids, size=[IDS, DIM], is_distributed=True, name="rows")
    hidden = layers.concat([layers.reshape(rows, [-1, FIELDS * DIM]), wind], axis=1)
    for name in ("first", "second"):
        hidden = layers.fc(hidden, HIDDEN, act="relu", name=name)
    logit = layers.fc(hidden, 1, name="last")
    loss = layers.mean(layers.sigmoid_cross_entropy_with_logits(logit, label))
    program, executor = ps.default_main_program(), ps.Executor()
    test = program.clone(for_test=True)
    program.random_seed = seed
    fleet.distributed_optimizer(optimizer.Adam(1e-3)).minimize(loss)
    _multiply_in(compute, program)
    dice, truth = np.random.default_rng(seed), np.random.default_rng(0)
    weights, slope = truth.normal(size=IDS) / 3, truth.normal(size=W3_DENSE) / 3

    def batch() -> dict[str, Any]:
        sample_ids = dice.integers(0, IDS, (W3_BATCH, FIELDS))
        numbers = dice.normal(size=(W3_BATCH, W3_DENSE)).astype(np.float32)
        logits = weights[sample_ids].sum(axis=1) + numbers @ slope - 1
        clicks = dice.random(W3_BATCH) < 1 / (1 + np.exp(-logits))
        return {"ids": sample_ids, "wind": numbers, "label": clicks.astype(np.float32)[:, None]}

    for _ in range(steps or STEPS):
        executor.run(program, batch())
    feeds = [batch() for _ in range(TESTS)]
    predictions = [executor.run(test, feed, [logit])[0][:, 0] for feed in feeds]
    return float(
        metrics.auc(
            np.concatenate([feed["label"][:, 0] for feed in feeds]), np.concatenate(predictions)
        )
    )


def flights(compute: str, seed: int, steps: int) -> float:
    """Return the AUC of the flights example on November and December."""
    sys.path.insert(0, str(EXAMPLES))
    import flights as example
    import flights_data

    import psfleet as ps
    from psfleet import fleet, optimizer

    data = flights_data.load().ranked(range(1, 10))
    settings = example.Settings(seed=seed)
    rows = np.random.default_rng(0).permutation(data.rows(range(1, 10)))
    rows = rows[: steps * settings.batch if steps else None]
    model = example.Model(settings)
    rate = optimizer.lr.PolynomialDecay(
        settings.rate, example.steps_of(rows, settings), end_lr=settings.rate / 20
    )
    with ps.program_guard(model.program):
        fleet.distributed_optimizer(optimizer.Adam(rate)).minimize(model.loss)
    _multiply_in(compute, model.program)
    for batch in example.batches(rows, settings):
        model.executor.run(model.program, data.feed(batch), [model.loss])
        rate.step()
    auc, _ = example.score(data, example.TEST, example.predict(model, data, example.TEST))
    return float(auc)


JOBS = {"W3's model": w3, "flights": flights}


def _multiply_in(compute: str, program: Any) -> None:
    """Compute products of any size in bfloat16 if requested, including the small ones of flights."""
    from psfleet.core.graph.program.ops.matmul import Bfloat16Products

    if compute == "bfloat16":
        program.products = Bfloat16Products(worthwhile=0)


def work(job: str, compute: str, seed: int, steps: int) -> None:
    """Run one training process, and print its AUC."""
    from psfleet import fleet

    amp = {"amp": True, "amp_configs": {"compute": compute}} if compute == "bfloat16" else {}
    fleet.init(strategy=fleet.DistributedStrategy(**amp))
    print(json.dumps(JOBS[job](compute, seed, steps)))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    report = Report("precision", "AUC with products in float32 and in bfloat16")
    for job in JOBS:
        scores = {
            compute: [_auc(job, compute, seed, options.steps or 0) for seed in range(options.seeds)]
            for compute in ("float32", "bfloat16")
        }
        apart = [b - f for f, b in zip(scores["float32"], scores["bfloat16"], strict=True)]
        means = {compute: float(np.mean(values)) for compute, values in scores.items()}
        report.rows.append(
            {"model": job, **means, "difference": float(np.mean(apart)), "by seed": str(apart)}
        )
    finish(report, options.json)


def _auc(job: str, compute: str, seed: int, steps: int) -> float:
    command = [sys.executable, __file__, "--worker", job, compute, str(seed), str(steps)]
    process = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    return float(json.loads(process.stdout.splitlines()[-1]))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        job, compute, seed, steps = sys.argv[-4:]
        work(job, compute, int(seed), int(steps))
    else:
        main()

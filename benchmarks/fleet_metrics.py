"""Cost of a prediction that fleet metrics count: CPU of worker and servers together.

One worker, 2 servers, async. A step pushes 16 ids. The cost of the metrics is the difference between steps
that count 2,048 predictions, a batch of W3, and steps that count none.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from measuring import Summary, in_turn
from processes import obey, psfleet_crew
from reporting import Report, arguments, finish

BATCH, BATCHES, IDS = 2048, 40, 16
KINDS = ("nothing", "AUC", "AUC, weighted", "log loss, NE, calibration", "all four")


def work(kind: str) -> None:
    """Run a worker that counts batches of click probabilities around 5 %."""
    import psfleet
    from psfleet import metrics

    sums = [metrics.LogLoss(), metrics.NormalizedEntropy(), metrics.Calibration()]
    area = metrics.Auc(spacing="logit")
    metrics_by_kind = {
        "AUC": [area],
        "AUC, weighted": [area],
        "log loss, NE, calibration": sums,
        "all four": [area, *sums],
    }
    dice = np.random.default_rng(0)
    predictions = 1 / (1 + np.exp(-dice.normal(-3, 1.2, (BATCHES, BATCH)))).astype(np.float32)
    labels = dice.random((BATCHES, BATCH)) < predictions
    weights = dice.random((BATCHES, BATCH)) if "weighted" in kind else None
    rows = np.full((IDS, 16), 0.01, np.float32)
    with psfleet.connect() as ps:
        table = ps.sparse_table("rows", 16, psfleet.optimizer.SGD(0.1))
        scores = ps.metrics(metrics_by_kind[kind]) if kind in metrics_by_kind else None

        def step(number: int) -> None:
            batch = number % BATCHES
            if scores is not None:
                batch_weights = None if weights is None else weights[batch]
                scores.update(predictions[batch], labels[batch], batch_weights)
            table.push(np.arange(IDS), rows)

        stepping: Callable[[int], None] = step
        obey(stepping, ps.flush)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("fleet_metrics", f"Fleet metrics: CPU of a prediction, batches of {BATCH}")
    with contextlib.ExitStack() as stack:
        crews = [
            stack.enter_context(psfleet_crew(kind, [__file__, "--worker", kind])) for kind in KINDS
        ]
        steps = options.steps or (100 if options.short else 400)
        summaries = in_turn(crews, warm=BATCHES, steps=steps, runs=options.runs)
    base = summaries["nothing"]
    report.rows.extend(row(kind, summaries[kind], base, steps) for kind in KINDS[1:])
    finish(report, options.json)


def row(kind: str, summary: Summary, base: Summary, steps: int) -> dict[str, Any]:
    samples = steps * BATCH / 1e9
    return {
        "metrics": kind,
        "CPU ns / prediction": (summary.cpu - base.cpu) / samples,
        "of it server": (summary.parts["servers"] - base.parts["servers"]) / samples,
        "CPU spread": summary.cpu_spread,
        "others' cores": summary.others,
        "runs": summary.runs,
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(sys.argv[-1])
    else:
        main()

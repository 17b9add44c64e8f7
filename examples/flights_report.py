"""Shows the results of flights.py: a table beside other published figures, and a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["REFERENCES", "plot", "table"]

Score = tuple[float, float]  # AUC, log loss
Floats = NDArray[np.float32]

# Scores on November and December. flights_baselines.py measures the first two. The other three are given
# reference figures, with fewer columns and October in the training set.
REFERENCES: dict[str, tuple[float, float | None]] = {
    "same columns, logistic regression": (0.7112, 0.5116),
    "same columns, gradient boosting": (0.7164, 0.5011),
    "stated, one-hot logistic regression": (0.698, 0.517),
    "stated, gradient boosting": (0.662, None),
    "stated, factorization machine in torch": (0.699, 0.515),
}


def table(october: Score, test: Score, months: range, pace: float) -> str:
    """Return the table of scores as text, one line each."""
    rows: dict[str, tuple[float, float | None]] = {
        f"psfleet, October{' (trained on it)' if 10 in months else ''}": october,
        "psfleet, November and December": test,
        **REFERENCES,
    }
    lines = [
        f"trained on months 1 to {months[-1]} at {pace:,.0f} flights/s",
        f"{'':40}{'AUC':>7}{'log loss':>10}",
    ]
    lines += [
        f"{name:40}{auc:7.4f}" + (f"{loss:10.4f}" if loss else f"{'-':>10}")
        for name, (auc, loss) in rows.items()
    ]
    return "\n".join(lines)


def plot(path: Path, losses: Sequence[float], late: Floats, predictions: Floats) -> None:
    """Draw the training loss and the calibration of the predictions, if matplotlib is installed.

    Args:
        path: Path of the PNG file.
        losses: Losses of this worker's steps, in order. After a restart, only those since.
        late, predictions: For each flight, 1 if it was late, and its predicted probability.
    """
    try:
        import matplotlib
    except ImportError:
        print(f"{path} is not drawn: matplotlib is not installed (pip install '.[examples]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    if losses:
        width = max(1, len(losses) // 20)
        means = np.convolve(losses, np.ones(width) / width, "valid")
        left.plot(losses, color="tab:blue", alpha=0.2, linewidth=0.5)
        left.plot(np.arange(len(means)) + width - 1, means, color="tab:blue")
    left.set(title="Training loss of worker 0", xlabel="step", ylabel="log loss")
    predicted, happened = calibration(late, predictions)
    right.plot([0, 1], [0, 1], color="gray", linestyle=":", label="perfect")
    right.plot(
        predicted, happened, color="tab:orange", marker="o", label="20 equal groups of flights"
    )
    edge = 1.05 * max(predicted.max(), happened.max())
    right.set(
        title="November and December",
        xlabel="predicted share of late flights",
        ylabel="share that was late",
        xlim=(0, edge),
        ylim=(0, edge),
    )
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"saved {path}")


def calibration(late: Floats, predictions: Floats, groups: int = 20) -> tuple[Floats, Floats]:
    """Return mean prediction and true share of late flights, in equal groups by ascending prediction."""
    order = np.array_split(np.argsort(predictions.reshape(-1), kind="stable"), groups)
    return (
        np.array([predictions.reshape(-1)[group].mean() for group in order], np.float32),
        np.array([late.reshape(-1)[group].mean() for group in order], np.float32),
    )

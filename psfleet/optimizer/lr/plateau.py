"""A schedule that follows a measured value."""

from typing import Annotated, Any

import numpy as np

from psfleet.errors import ConfigError
from psfleet.optimizer.lr.scheduler import LRScheduler
from psfleet.validation.annotations import Must, NonNegative, NonNegativeInt, Range, checked

__all__ = ["ReduceOnPlateau"]


class ReduceOnPlateau(LRScheduler):
    """The rate is cut by `factor` when a metric has not improved for more than `patience` steps.

    Args:
        mode: `min`: smaller metrics are better; `max`: larger ones.
        threshold, threshold_mode: An improvement is larger than this, relative to the best (`rel`)
            or not (`abs`).
        cooldown: Steps after a reduction in which nothing counts as bad.
        min_lr: The rate does not fall below it.
        epsilon: A reduction by less than this is not made.
    """

    _kept = ("last_epoch", "last_lr", "best", "num_bad_epochs", "cooldown_counter")

    @checked
    def __init__(
        self,
        learning_rate: NonNegative,
        mode: Annotated[str, Must(lambda v: v.lower() in ("min", "max"), "min or max")] = "min",
        factor: Annotated[float, Range(0, 1, high_open=True)] = 0.1,
        patience: NonNegativeInt = 10,
        threshold: NonNegative = 1e-4,
        threshold_mode: Annotated[
            str, Must(lambda v: v.lower() in ("rel", "abs"), "rel or abs")
        ] = "rel",
        cooldown: NonNegativeInt = 0,
        min_lr: NonNegative = 0,
        epsilon: NonNegative = 1e-8,
        verbose: bool = False,
    ) -> None:
        self.mode = mode.lower()
        self.factor = factor
        self.patience = patience
        self.threshold = threshold
        self.relative = threshold_mode.lower() == "rel"
        self.cooldown = cooldown
        self.min_lr = float(min_lr)
        self.epsilon = epsilon
        self.verbose = verbose
        self.base_lr = self.last_lr = float(learning_rate)
        self.last_epoch = 0
        self.best: float | None = None
        self.num_bad_epochs = 0
        self.cooldown_counter = 0

    def get_lr(self) -> float:
        """The current rate."""
        return self.last_lr

    def step(self, metrics: Any = None, epoch: int | None = None) -> None:  # type: ignore[override]  # needs a metric
        """Go to the next epoch, or to `epoch`, with this value of the metric."""
        metric = np.asarray(metrics.numpy() if hasattr(metrics, "numpy") else metrics)
        if metric.size != 1 or metric.dtype.kind not in "iuf":
            raise ConfigError(f"ReduceOnPlateau: metrics is {metrics!r}, it must be one number")
        self._go_to(epoch)
        self._judge(float(metric.reshape(())))

    def _judge(self, metric: float) -> None:
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            return
        if self.best is None or self._better(metric, self.best):
            self.best, self.num_bad_epochs = metric, 0
        else:
            self.num_bad_epochs += 1
        if self.num_bad_epochs > self.patience:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
            self._reduce()

    def _better(self, metric: float, best: float) -> bool:
        # As the reference: the relative margin is a factor on the best value, whatever its sign.
        margin = best * self.threshold if self.relative else self.threshold
        return metric < best - margin if self.mode == "min" else metric > best + margin

    def _reduce(self) -> None:
        rate = max(self.last_lr * self.factor, self.min_lr)
        if self.last_lr - rate > self.epsilon:
            self.last_lr = rate
            if self.verbose:
                print(f"Epoch {self.last_epoch}: ReduceOnPlateau set learning rate to {rate}.")

"""How good predictions are."""

from psfleet.metrics.classification import Accuracy, Auc, accuracy, auc, log_loss

__all__ = ["Accuracy", "Auc", "accuracy", "auc", "log_loss"]

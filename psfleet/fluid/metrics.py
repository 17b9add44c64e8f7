"""Metrics under Paddle's names.

Here `Recall` is the recall of two classes (psfleet.metrics.BinaryRecall). psfleet.metrics.Recall, the
recall@k of a ranking, is not available under this module.
"""

from psfleet.metrics import (
    NDCG,
    RMSE,
    Accuracy,
    Auc,
    Calibration,
    GroupAuc,
    LogLoss,
    Metric,
    NormalizedEntropy,
    Precision,
    accuracy,
    auc,
    log_loss,
)
from psfleet.metrics import BinaryRecall as Recall

__all__ = [
    "NDCG",
    "RMSE",
    "Accuracy",
    "Auc",
    "Calibration",
    "GroupAuc",
    "LogLoss",
    "Metric",
    "NormalizedEntropy",
    "Precision",
    "Recall",
    "accuracy",
    "auc",
    "log_loss",
]

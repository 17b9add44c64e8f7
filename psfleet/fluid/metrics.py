"""Metrics under Paddle's names: here `Recall` is the recall of two classes.

psfleet.metrics.Recall, which looks at the highest predictions of each user, has no name here.
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

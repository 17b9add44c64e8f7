"""Metrics under their names of the older face: `Recall` is that of two classes.

psfleet.metrics.Recall, of the highest predictions of each user, is not here.
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

"""How good predictions are."""

from psfleet.metrics.area import Auc
from psfleet.metrics.classification import Accuracy, accuracy, auc, log_loss
from psfleet.metrics.probabilities import RMSE, Calibration, LogLoss, NormalizedEntropy
from psfleet.metrics.ranking import NDCG, GroupAuc, Recall
from psfleet.metrics.streaming_metric import Metric

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
    "Recall",
    "accuracy",
    "auc",
    "log_loss",
]

"""Metrics of predictions."""

from psfleet.metrics.classification import (
    RMSE,
    Accuracy,
    Auc,
    BinaryRecall,
    Calibration,
    LogLoss,
    NormalizedEntropy,
    Precision,
    accuracy,
    auc,
    log_loss,
)
from psfleet.metrics.fleet_metrics import FleetMetrics, MetricReading
from psfleet.metrics.ranking import MRR, NDCG, Coverage, GroupAuc, HitRate, Recall
from psfleet.metrics.streaming_metric import Metric

__all__ = [
    "MRR",
    "NDCG",
    "RMSE",
    "Accuracy",
    "Auc",
    "BinaryRecall",
    "Calibration",
    "Coverage",
    "FleetMetrics",
    "GroupAuc",
    "HitRate",
    "LogLoss",
    "Metric",
    "MetricReading",
    "NormalizedEntropy",
    "Precision",
    "Recall",
    "accuracy",
    "auc",
    "log_loss",
]

"""Metrics of predictions, which add up over batches and over the workers of a fleet.

Start with streaming_metric.py, which has the base class: a metric is a fixed number of sums. The metrics are
in classification.py and ranking.py, and readings over all workers in fleet_metrics.py.
"""

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

"""Metrics of predictions over many batches and all workers: AUC, log loss, recall@k, NDCG and others.

    auc = psfleet.metrics.Auc()
    auc.update(predictions, labels)  # for each batch
    print(auc.result())

A metric is a fixed number of sums, which can be added over batches and workers. Read streaming_metric.py
first: it has the base class. The metrics are in classification.py and ranking.py. fleet_metrics.py reads
them over all workers of a fleet.
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

"""Evaluation of a model over the whole fleet."""

from psfleet.evaluation.fleet_metrics import FleetMetrics
from psfleet.evaluation.metric_readings import MetricReading

__all__ = ["FleetMetrics", "MetricReading"]

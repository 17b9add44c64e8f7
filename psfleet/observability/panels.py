"""Panels for operators, in the order in which they ask: the one table of panels.

The page of a job, the Grafana dashboard, the alert rules and docs/watch.md are made from it
(tools/generate_panels.py), and a test asks a real Prometheus every question.
"""

from psfleet.observability.expressions import Alert, Panel
from psfleet.observability.fleet_panels import FLEET
from psfleet.observability.training_panels import TRAINING

__all__ = ["PANELS", "Alert", "Panel"]

PANELS: tuple[Panel, ...] = (*TRAINING, *FLEET)

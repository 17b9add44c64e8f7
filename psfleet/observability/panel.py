"""One figure of a job, as the tables of panels say it."""

from dataclasses import dataclass

from psfleet.observability.expressions import Expression

__all__ = ["Alert", "Panel"]


@dataclass(frozen=True)
class Alert:
    """When somebody is to be told about a panel.

    Attributes:
        name: Of the alert.
        when: Condition on the panel's query, as in `> 0.9`.
        lasts: How long it must hold.
        severity: `warning` or `critical`.
    """

    name: str
    when: str
    lasts: str = "1m"
    severity: str = "warning"


@dataclass(frozen=True)
class Panel:
    """One figure.

    Attributes:
        section: Question that it helps to answer.
        unit: Of Grafana: `s`, `bytes`, `short`, `percentunit`, `cps` (per second), `Bps`.
        query: What is asked.
        meaning: What the figure is.
        advice: What to do if it is bad.
        alert: When somebody is told.
    """

    section: str
    title: str
    unit: str
    query: Expression
    meaning: str
    advice: str
    alert: Alert | None = None

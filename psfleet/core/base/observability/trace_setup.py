"""Turns on the tracing of pushes, if the setting `trace` names a collector.

tracing.py records and sends the spans. It is imported only if this process traces, as it needs OpenTelemetry.
"""

import importlib.util
from typing import TYPE_CHECKING

from psfleet.core.base.errors import not_installed
from psfleet.core.base.settings.environment import Environment

if TYPE_CHECKING:
    from psfleet.core.base.observability.tracing import Tracing


_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


def check_tracing(url: str) -> None:
    """Check that OpenTelemetry is installed, without importing it.

    `url`: URL of the collector, for the error.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        is_missing = any(importlib.util.find_spec(name) is None for name in _NEEDED)
    except ModuleNotFoundError:  # a parent package is missing too
        is_missing = True
    if is_missing:
        raise not_installed(f"--trace {url} needs", "OpenTelemetry", "trace")


def open_tracing(environment: Environment) -> "Tracing | None":
    """Start the tracing of this process, or return None if the setting `trace` is empty.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if not environment.trace:
        return None
    check_tracing(environment.trace)
    from psfleet.core.base.observability.tracing import Tracing

    seat = environment.seat
    return Tracing(environment.trace, environment.job, environment.role or "worker", seat.rank)

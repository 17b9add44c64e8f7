"""Whether this process traces pushes. What does it is loaded only then."""

from typing import TYPE_CHECKING

from psfleet.errors import ConfigError
from psfleet.settings.environment import Environment

if TYPE_CHECKING:
    from psfleet.observability.spans import Tracing

__all__ = ["open_tracing"]


def open_tracing(environment: Environment) -> "Tracing | None":
    """What makes the spans of this process; None: it does not trace.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if not environment.trace:
        return None
    try:
        from psfleet.observability.spans import Tracing
    except ImportError:
        raise ConfigError(
            f"--trace is {environment.trace!r}, which needs OpenTelemetry; "
            "pip install 'psfleet[trace]'"
        ) from None
    seat = environment.seat
    return Tracing(environment.trace, environment.job, environment.role or "worker", seat.rank)

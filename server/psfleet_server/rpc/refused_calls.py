"""Errors of calls in a server's log: those that nobody expects, with the last events of what raised them."""

import contextlib
from collections.abc import Iterable, Iterator

from psfleet.errors import Fenced, LaneLost, Later, NotReady, ProtocolError, PsfleetError
from psfleet.shard.events import SendError
from psfleet.shard.recent_events import RecentEvents
from psfleet_server.rpc.rate_limited_log import RateLimitedLog

_EXPECTED = (Fenced, LaneLost, Later, NotReady)
_fences, _errors = RateLimitedLog(), RateLimitedLog()


def explain(error: Exception, recent: RecentEvents) -> None:
    """Let an unexpected error carry the last events of the state machine that raised it, as a note."""
    if _is_unexpected(error) and not getattr(error, "__notes__", ()):
        error.add_note("\n  ".join(["last events, the newest last:", *recent.lines()]))


def explain_refusals(outcomes: Iterable[object], recent: RecentEvents) -> None:
    """Explain the errors among the outcomes of a step of the coordinator."""
    for outcome in outcomes:
        if isinstance(outcome, SendError):
            explain(outcome.error, recent)


@contextlib.contextmanager
def explained(recent: RecentEvents) -> Iterator[None]:
    """Explain what is raised within."""
    try:
        yield
    except Exception as error:
        explain(error, recent)
        raise


def log_refusal(error: PsfleetError) -> None:
    """Log the error with which a call is refused, if it is a fence or nobody expects it."""
    if isinstance(error, Fenced):
        _fences.say(f"fenced: {error}")
    elif _is_unexpected(error):
        line = f"refused a call: {type(error).__name__}: {error}"
        _errors.say("\n".join([line, *getattr(error, "__notes__", ())]))


def _is_unexpected(error: Exception) -> bool:
    is_protocol = isinstance(error, ProtocolError) and not isinstance(error, _EXPECTED)
    return is_protocol or not isinstance(error, PsfleetError)

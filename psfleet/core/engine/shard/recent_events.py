"""RecentEvents: the last 32 events of a state machine, shown with an error to tell what led to it.

A server adds these lines to an error of a state machine as a note. Adding a push or a pull must cost next to
nothing, so `add` only appends a tuple; `lines` makes the text.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from psfleet.core.engine.shard.events import Pull, Push

_MOST = 32  # number of events that are kept
_LONGEST = 60  # characters that are kept of a text

T = TypeVar("T")


class RecentEvents:
    """Ring buffer of the last events: their types, numbers and short texts.

    The events themselves are not stored, since a push contains tensors, perhaps in memory shared with a
    worker.
    """

    def __init__(self) -> None:
        self._events: deque[str | tuple[str, int, int, int]] = deque(maxlen=_MOST)

    def add(self, event: object) -> None:
        """Add an event. For a push or a pull this only appends a tuple."""
        if type(event) is Push:
            self._events.append(
                (
                    "Push(worker=%d, incarnation=%d, sequence=%d)",
                    event.worker,
                    event.incarnation,
                    event.sequence,
                )
            )
        elif type(event) is Pull:
            self._events.append(
                (
                    "Pull(worker=%d, incarnation=%d, commit=%d)",
                    event.worker,
                    event.incarnation,
                    event.commit,
                )
            )
        else:
            self._events.append(_words(event))

    def add_call(self, name: str, arguments: tuple[object, ...]) -> None:
        """Add a call of a method, with its arguments that are numbers or short texts."""
        self._events.append(f"{name}({', '.join(filter(None, map(_words, arguments)))})")

    def lines(self) -> list[str]:
        """Return one line for each event, the newest last."""
        return [
            event if isinstance(event, str) else event[0] % event[1:] for event in [*self._events]
        ]


def remembers_calls(*names: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds each call of the named methods to the object's `recent`."""

    def change(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, _remembered(name, getattr(cls, name)))
        return cls

    return change


def _remembered(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        self.recent.add_call(name, (*arguments, *keywords.values()))
        return method(self, *arguments, **keywords)

    return call


def _words(value: object) -> str:
    """Return text for a number, a string, or a dataclass with its numbers and strings; else ""."""
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return repr(value[:_LONGEST])
    if not dataclasses.is_dataclass(value):
        return ""
    values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    short = {
        name: member for name, member in values.items() if isinstance(member, int | float | str)
    }
    fields = ", ".join(f"{name}={_words(member)}" for name, member in short.items())
    return f"{type(value).__name__}({fields})"

"""The last events of a state machine, which an error of it brings along: what happened just before."""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from psfleet.core.engine.shard.events import Pull, Push

_MOST = 32
_LONGEST = 60  # characters of a text

T = TypeVar("T")


class RecentEvents:
    """A ring of the last events: their types, numbers and short texts.

    Not the events: a push holds tensors, perhaps in memory that a worker shares.
    """

    def __init__(self) -> None:
        self._events: deque[str | tuple[str, int, int, int]] = deque(maxlen=_MOST)

    def add(self, event: object) -> None:
        """Add an event. A push or a pull costs no more than this call."""
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
        """Add a call of a method."""
        self._events.append(f"{name}({', '.join(filter(None, map(_words, arguments)))})")

    def lines(self) -> list[str]:
        """One line for each, the newest last."""
        return [one if isinstance(one, str) else one[0] % one[1:] for one in [*self._events]]


def remembers_calls(*names: str) -> Callable[[type[T]], type[T]]:
    """Let a class add each call of these methods to its `recent`."""

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
    """A number, a short text, or a value with those that it has; empty: it is something else."""
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return repr(value[:_LONGEST])
    if not dataclasses.is_dataclass(value):
        return ""
    values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    short = {name: one for name, one in values.items() if isinstance(one, int | float | str)}
    fields = ", ".join(f"{name}={_words(one)}" for name, one in short.items())
    return f"{type(value).__name__}({fields})"

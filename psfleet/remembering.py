"""What a worker's script keeps in snapshots beside its parameters: schedulers, random states, its place.

The states are taken between two steps, in the script's own thread, and kept for a few steps, until a
snapshot asks for those that belong to its cut.
"""

import json
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from psfleet.errors import UsageError

__all__ = ["PLACE", "Place", "Remembered", "redealt"]

PLACE = "psfleet.place"
"""The name under which a worker's place in its loops is remembered."""

_STEPS = 64  # whose states are at hand
_PATIENCE = 5.0  # seconds until the script is expected at the end of the step that a snapshot holds


class Place:
    """How far the script has come in the loops over its data.

    Attributes:
        loop: How many loops are behind it.
        item: How many items of the present loop are.
    """

    def __init__(self) -> None:
        self.loop = 0
        self.item = 0

    def state_dict(self) -> dict[str, int]:
        """Both, for a snapshot."""
        return {"loop": self.loop, "item": self.item}

    def set_state_dict(self, state: dict[str, int]) -> None:
        """The opposite."""
        self.loop, self.item = state["loop"], state["item"]


class Remembered:
    """Things by name, and what they were at the ends of the last steps. Any thread may ask."""

    def __init__(self) -> None:
        self._things: dict[str, Any] = {}
        self._states: deque[tuple[int, bytes]] = deque(maxlen=_STEPS)
        self._changed = threading.Condition()

    def add(self, name: str, thing: Any, restored: Any = None) -> None:
        """Remember a thing from now on; give it back the state that it had in a snapshot, if any.

        Args:
            name: Unique in the script.
            thing: Has state_dict and set_state_dict (or load_state_dict), or is a NumPy Generator.
            restored: Its state.

        Raises:
            UsageError: The name is taken, or the thing has no state that JSON can hold.
        """
        if name in self._things:
            raise UsageError(f"{name!r} is remembered already; choose another name")
        if restored is not None:
            _set_state(name, thing, restored)
        try:
            json.dumps(_state(name, thing))
        except (TypeError, ValueError) as error:
            raise UsageError(f"the state of {name!r} cannot be kept as JSON: {error}") from None
        self._things[name] = thing

    def capture(self, step: int) -> None:
        """The script is between step `step` and the next one."""
        if not self._things:
            return
        states = {name: _state(name, thing) for name, thing in self._things.items()}
        with self._changed:
            self._states.append((step, json.dumps(states).encode()))
            self._changed.notify_all()

    def state_at(self, step: int) -> bytes:
        """JSON of all states after that step; of one before it if the script does not get there.

        A step below 0: a list of [step, states] for all steps whose states are at hand.
        """
        with self._changed:
            if step < 0:
                every = (b"[%d,%s]" % found for found in self._states)
                return b"[%s]" % b",".join(every)
            self._changed.wait_for(
                lambda: bool(self._states) and self._states[-1][0] >= step, _PATIENCE
            )
            found = [state for at, state in self._states if at <= step]
            return found[-1] if found else b""


def redealt(states: Mapping[int, Mapping[str, Any]], workers: int, worker: int) -> dict[str, Any]:
    """What a worker of a job with another number of workers goes on with.

    Schedulers and the like are those of the worker with its index, or of another where it has none;
    random generators only its own, since two workers must not draw the same. The place in the loops of
    `fleet.shard` is before the first batch that not all have behind them: no batch is left out.

    Args:
        states: By worker of the earlier job what it has kept.
        workers: How many there were.
        worker: Index of the worker in this job.
    """
    own, other = states.get(worker), states.get(worker % workers)
    found = dict(own or other or {})
    if own is None:
        found = {
            name: state
            for name, state in found.items()
            if not (isinstance(state, Mapping) and "bit_generator" in state)
        }
    found.pop(PLACE, None)
    places = {seat: state[PLACE] for seat, state in states.items() if PLACE in state}
    if len(places) == workers:
        loop = min(place["loop"] for place in places.values())
        within = {seat: at["item"] for seat, at in places.items() if at["loop"] == loop}
        coming = (item + (seat - item) % workers for seat, item in within.items())
        found[PLACE] = {"loop": loop, "item": min(coming)}
    return found


def _state(name: str, thing: Any) -> Any:
    if isinstance(thing, np.random.Generator):
        return thing.bit_generator.state
    if not hasattr(thing, "state_dict"):
        raise UsageError(f"{name!r} is {thing!r}, which has no state_dict()")
    return thing.state_dict()


def _set_state(name: str, thing: Any, state: Any) -> None:
    if isinstance(thing, np.random.Generator):
        thing.bit_generator.state = state
        return
    setter = getattr(thing, "set_state_dict", None) or getattr(thing, "load_state_dict", None)
    if setter is None:
        raise UsageError(f"{name!r} is {thing!r}, which has no set_state_dict()")
    setter(state)

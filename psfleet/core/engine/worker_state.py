"""State of a worker's script besides its parameters: schedulers, random generators, position in its data.

It is needed for two purposes:

- **Snapshots.** WorkerState captures all states between two steps, in the script's own thread, and keeps the
  states of the last 64 steps. A snapshot later requests the states of one of these steps.
- **A worker that restarts.** It runs its script from the beginning, but its loops over data continue at the
  last *mark*. A mark is a point between two steps at which the earlier process has saved all its states,
  before a push that the servers accepted (psfleet.fleet.data_loops). The restarted script does not send
  pushes before the mark, nor pushes after the mark that the servers have already accepted. ScriptProgress
  decides this.

The servers get the progress as a text with each push, or in sync mode with the commit of the push, so that
push and progress take effect together.
"""

import itertools
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from psfleet.core.base.errors import UsageError
from psfleet.core.base.json_documents import Format, exact, natural, reading

_FORMAT = Format("worker state")
PLACE = "psfleet.place"
"""Name under which the states of a script contain its position in its loops."""

_STEPS = 64  # number of steps whose states are kept
_STEP_END_TIMEOUT = 5.0  # seconds that the script has to end the step of a snapshot
_STUCK_EVERY = 0.02  # seconds between two checks whether the script is stuck in its step


_PROGRESS_FORMAT = Format("worker progress")
_HEAD = json.dumps(_PROGRESS_FORMAT.document())[:-1]


class LoopPosition:
    """Position of the script in the loops over its data.

    Attributes:
        loop: Index of the present loop, or of the next loop if the script is in none.
        inside: True if the script is in a loop.
        item: Number of items of the present loop that the script has used.
        broken: Maps the index of a loop that was left before its end to the number of items used until then.
        collectives: Maps the index of a loop that contains collectives (such as barriers) to the pair (number
            of its collectives, number of mode switches among them).
    """

    def __init__(self) -> None:
        self.loop = 0
        self.inside = False
        self.item = 0
        self.broken: dict[int, int] = {}
        self.collectives: dict[int, tuple[int, int]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the position as values that can be stored as JSON."""
        return _place(
            self.loop,
            self.item,
            self.inside,
            {str(loop): items for loop, items in self.broken.items()},
            {str(loop): list(counts) for loop, counts in self.collectives.items()},
        )

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position to a value that `state_dict` has returned.

        Raises:
            Misfit: The value has other fields.
        """
        self.loop, self.item, self.inside, broken, collectives = _place_fields(state)
        self.broken = {int(loop): items for loop, items in broken.items()}
        self.collectives = {
            int(loop): (counts[0], counts[1]) for loop, counts in collectives.items()
        }

    def enter(self, loop: int) -> None:
        """Begin a loop."""
        self.loop, self.inside, self.item = loop, True, 0

    def at(self, loop: int, item: int) -> None:
        """Set the number of used items of a loop, if it is the present loop."""
        if self.is_in(loop):
            self.item = item

    def leave(self, loop: int) -> None:
        """End the loop."""
        self.loop, self.inside, self.item = loop + 1, False, 0

    def is_in(self, loop: int) -> bool:
        """Return whether the script is in this loop."""
        return self.inside and self.loop == loop

    def has_reached(self, other: "LoopPosition") -> bool:
        """Return whether this position is equal to or after `other`."""
        here, target = (self.loop, self.inside, self.item), (other.loop, other.inside, other.item)
        return here >= target

    def behind(self, loop: int) -> tuple[int, int | None]:
        """Return the number of used items of a loop, and the number after which it was left early, or None.

        The first number is sys.maxsize for a loop that has ended.
        """
        if self.is_in(loop):
            return self.item, None
        return (sys.maxsize if loop < self.loop else 0), self.broken.get(loop)


def _place(loop: int, item: int, inside: bool, broken: Any, collectives: Any) -> dict[str, Any]:
    return {
        "loop": loop,
        "item": item,
        "inside": inside,
        "broken": broken,
        "collectives": collectives,
    }


def _place_fields(document: Any) -> list[Any]:
    kinds = {"loop": int, "item": int, "inside": bool, "broken": dict, "collectives": dict}
    fields = loop, item, _, broken, collectives = exact(document, "place", **kinds)
    for number in (loop, item, *broken.values(), *itertools.chain(*collectives.values())):
        natural(number, "a number of its place")
    return fields


class WorkerState:
    """Objects of a script whose states are saved, and their states after each of the last steps.

    Only the script's thread may call `capture`; any thread may call `state_at`.
    """

    def __init__(self) -> None:
        self._things: dict[str, Any] = {}
        self._states: deque[tuple[int, bytes]] = deque(maxlen=_STEPS)
        self._changed = threading.Condition()

    def add(self, name: str, thing: Any, state: Any = None) -> None:
        """Save the states of an object from now on, and restore its state from a snapshot if there is one.

        Args:
            name: Name of the object, unique in the script.
            thing: The object. It has state_dict and set_state_dict (or load_state_dict), or is a NumPy
                Generator.
            state: State from a snapshot, or None.

        Raises:
            UsageError: The name is used already, or the object has no state that can be stored as JSON.
        """
        if name in self._things:
            raise UsageError(f"{name!r} is remembered already; choose another name")
        if state is not None:
            _set_state(name, thing, state)
        try:
            json.dumps(_state(name, thing))
        except (TypeError, ValueError) as error:
            raise UsageError(f"the state of {name!r} cannot be kept as JSON: {error}") from None
        self._things[name] = thing

    def capture(self, step: int) -> str:
        """Store the states of all objects after step `step`, and return them as JSON."""
        states = json.dumps(_document(self._things))
        with self._changed:
            self._states.append((step, states.encode()))
            self._changed.notify_all()
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the states of all objects except the position, at which the script arrives by running."""
        for name, thing in self._things.items():
            if name in states and name != PLACE:
                _set_state(name, thing, states[name])

    def state_at(self, step: int, is_stuck: Callable[[], bool] = bool) -> bytes:
        """Return all states after a step as JSON, after waiting up to 5 s for the script to end the step.

        If the script does not end the step in time, returns the states of an earlier step, or b"" if there
        are none.

        Args:
            step: Number of the step. A negative number returns a JSON list of [step, states] for every step
                whose states are kept.
            is_stuck: Returns True if the script cannot end its step, because it waits for this caller.
        """
        with self._changed:
            if step < 0:
                every = (b"[%d,%s]" % states for states in self._states)
                return b"[%s]" % b",".join(every)
            deadline = time.monotonic() + _STEP_END_TIMEOUT
            while not (self._states and self._states[-1][0] >= step):
                if is_stuck() or time.monotonic() > deadline:
                    break
                self._changed.wait(_STUCK_EVERY)
            states = [state for at, state in self._states if at <= step]
            return states[-1] if states else b""


def read_states(document: Any) -> dict[str, Any]:
    """Return the states in a document of `WorkerState.capture`, by name, with the position under PLACE.

    Raises:
        Misfit: The document is of another version, or has other fields.
    """
    position, states, generators = exact(
        _FORMAT.fields(document), "worker state", place=dict | None, states=dict, generators=dict
    )
    if position is not None:
        _place_fields(position)
        states = {**states, PLACE: position}
    return {**states, **generators}


def redealt(states: Mapping[int, Mapping[str, Any]], workers: int, worker: int) -> dict[str, Any]:
    """Return the initial state of a worker when a job continues with another number of workers.

    Schedulers and similar objects get the state of the earlier worker with the same index, or of another
    worker if there was none. Random generators get the state of the worker with the same index only, since
    two workers must not draw the same numbers. The position in the loops of `fleet.shard` is before the first
    batch that some worker has not processed, so that no batch is left out. The result is empty if there is no
    state.
    """
    earlier = states.get(worker) or states.get(worker % workers)
    if earlier is None:
        return {}
    positions = {seat: state["place"] for seat, state in states.items() if state["place"]}
    return _FORMAT.document(
        place=_joined(positions, workers) if len(positions) == workers else None,
        states=earlier["states"],
        generators=earlier["generators"] if worker in states else {},
    )


def _joined(positions: Mapping[int, Mapping[str, Any]], workers: int) -> dict[str, Any]:
    """Return the position before the first batch that some worker has not processed."""
    loop = min(position["loop"] for position in positions.values())
    within = {seat: at["item"] for seat, at in positions.items() if at["loop"] == loop}
    inside = [at["inside"] for at in positions.values() if at["loop"] == loop]
    # Worker i processes the batches b with b % workers == i. Find each worker's first unprocessed batch.
    next_ranges = (item + (seat - item) % workers for seat, item in within.items())
    return _place(loop, min(next_ranges), any(inside), {}, {})


def _document(things: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of all objects as the document that snapshots and servers store."""
    states = {name: _state(name, thing) for name, thing in things.items()}
    names = [name for name, thing in things.items() if isinstance(thing, np.random.Generator)]
    generators = {name: states.pop(name) for name in names}
    return _FORMAT.document(place=states.pop(PLACE, None), states=states, generators=generators)


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
    # A PyTorch scheduler restores its own counters, but not the learning rates, which the optimizer stores.
    groups = getattr(getattr(thing, "optimizer", None), "param_groups", ())
    for group, rate in zip(groups, state.get("_last_lr", ()), strict=False):
        group["lr"] = rate


class ScriptProgress:
    """Progress of one worker process through its script. It decides which pushes are sent.

    A restarted worker repeats its script; pushes that the servers have already accepted must not be sent
    again.

    Args:
        text: Progress text that came with the last accepted push of the worker's earlier process. Empty if
            there was none or the script was in no loop of the fleet; every step is then repeated.

    Attributes:
        behind: Number of the script's pushes that the servers have accepted.
        pushes: Number of pushes that the script has made so far, including those that were not sent.
        states: States at the mark, by name: the point between two steps at which the script continues.
    """

    def __init__(self, text: str = "") -> None:
        self.behind, self._at = 0, 0
        self.states: dict[str, Any] = {}
        if text:
            with reading("the progress of a worker's earlier life"):
                kinds = {"pushes": int, "at": int, "states": dict}
                self.behind, self._at, states = exact(
                    _PROGRESS_FORMAT.parse(text), "progress", **kinds
                )
                self.states = read_states(states)
        self.pushes = 0
        self._there = not text
        self._mark: tuple[int, str] | None = None

    def passes(self) -> bool:
        """Return whether the servers have already accepted the next push.

        If True, the push is counted here, and the caller must not send it.
        """
        if self._there and self.pushes >= self.behind:
            return False
        self.pushes += 1
        return True

    def arrive(self) -> None:
        """Record that the script has reached its mark, the point at which its data loops continue."""
        if not self._there:
            self._there, self.pushes = True, self._at

    def catch_up(self) -> None:
        """Treat every later push as new. For data that the fleet assigns: it assigns no sample twice."""
        self._there, self.pushes = True, max(self.pushes, self.behind)

    def made(self) -> None:
        """Count a push that was sent."""
        self.pushes += 1

    def mark(self, states: str, latest: bool = False) -> None:
        """Set the mark, where a restarted process continues, to this point between two steps.

        Of several calls between two pushes, only the first one sets the mark: the effects of steps without
        a push are only in this process's memory, so a restarted process has to repeat those steps.

        Args:
            states: States of the script there, the result of `WorkerState.capture`.
            latest: True to set the mark in any case. For data that the fleet assigns, because it assigns no
                sample twice.
        """
        if latest or self._mark is None or self._mark[0] != self.pushes:
            self._mark = self.pushes, states

    def text(self, more: int = 0, repeats: bool = True) -> str:
        """Return the script's progress as a text for the servers, or "" outside of the fleet's loops.

        Args:
            more: Number of pushes that are sent together with the text, and that `made` has not counted yet.
            repeats: True if a restarted process makes the same pushes after the mark. The servers' accepted
                pushes are then recognised by their number.
        """
        if self._mark is None:
            return ""
        (at, states), pushes = self._mark, self.pushes + more
        at = at if repeats else pushes
        return f'{_HEAD}, "pushes": {pushes}, "at": {at}, "states": {states}}}'

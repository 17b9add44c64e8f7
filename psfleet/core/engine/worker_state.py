"""State of a worker's script in snapshots beside its parameters: schedulers, random states, its place.

The states are taken between two steps, in the script's own thread, and kept for a few steps, until a
snapshot asks for those that belong to its cut.

A worker that starts again runs its script from the beginning. Its loops go on at the last *mark* that
its earlier incarnation has made before a push that counts: between two steps, with the states of all that is
remembered (psfleet.fleet.data_loops). Pushes that the script makes before it is there, and those after the
mark that count already, are passed over.

With a push (in sync mode with its commit, so that both count together) servers get the text of this.
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
"""The name under which a worker's place in its loops is remembered."""

_STEPS = 64  # whose states are at hand
_STEP_END_TIMEOUT = 5.0  # seconds for the script to end the step that a snapshot holds
_STUCK_EVERY = 0.02  # seconds between two looks whether it cannot


_PROGRESS_FORMAT = Format("worker progress")
_HEAD = json.dumps(_PROGRESS_FORMAT.document())[:-1]


class LoopPosition:
    """Position of the script in the loops over its data.

    Attributes:
        loop: Number of loops that are over, or were begun before the present one.
        inside: It is in a loop.
        item: Number of items of that loop that are used.
        broken: For each loop that it has left before its end, the number of items that it had
            taken.
        collectives: For each loop with collectives of all workers: how many, and how many changes
            of the mode among them.
    """

    def __init__(self) -> None:
        self.loop = 0
        self.inside = False
        self.item = 0
        self.broken: dict[int, int] = {}
        self.collectives: dict[int, tuple[int, int]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, as JSON can hold it."""
        return _place(
            self.loop,
            self.item,
            self.inside,
            {str(loop): items for loop, items in self.broken.items()},
            {str(loop): list(counts) for loop, counts in self.collectives.items()},
        )

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Take the position that `state_dict` has returned.

        Raises:
            Misfit: It has other fields.
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
        """Note the number of used items of a loop, if it is the present one."""
        if self.is_in(loop):
            self.item = item

    def leave(self, loop: int) -> None:
        """End the loop."""
        self.loop, self.inside, self.item = loop + 1, False, 0

    def is_in(self, loop: int) -> bool:
        """Return whether the script is in this loop."""
        return self.inside and self.loop == loop

    def has_reached(self, other: "LoopPosition") -> bool:
        """Return whether the script is at that position, or further."""
        here, target = (self.loop, self.inside, self.item), (other.loop, other.inside, other.item)
        return here >= target

    def behind(self, loop: int) -> tuple[int, int | None]:
        """Return the number of used items of a loop, and the number after which it was left early."""
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
    """Things by name, and what they were at the ends of the last steps. Any thread may ask."""

    def __init__(self) -> None:
        self._things: dict[str, Any] = {}
        self._states: deque[tuple[int, bytes]] = deque(maxlen=_STEPS)
        self._changed = threading.Condition()

    def add(self, name: str, thing: Any, state: Any = None) -> None:
        """Remember a thing from now on; give it back the state that it had in a snapshot, if any.

        Args:
            name: Unique in the script.
            thing: Has state_dict and set_state_dict (or load_state_dict), or is a NumPy Generator.
            state: Its state.

        Raises:
            UsageError: The name is taken, or the thing has no state that JSON can hold.
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
        """Keep all states after step `step`; return them as JSON."""
        states = json.dumps(_document(self._things))
        with self._changed:
            self._states.append((step, states.encode()))
            self._changed.notify_all()
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give all things back their states, but for the place: the script comes to that by itself."""
        for name, thing in self._things.items():
            if name in states and name != PLACE:
                _set_state(name, thing, states[name])

    def state_at(self, step: int, is_stuck: Callable[[], bool] = bool) -> bytes:
        """JSON of all states after that step; of one before it if the script does not get there.

        Args:
            step: Below 0: a list of [step, states] for all steps whose states are at hand.
            is_stuck: True if the script waits in the middle of a step for the caller of this.
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
    """Return by name the states that `WorkerState.capture` has written; that of the place under PLACE.

    Raises:
        Misfit: It is of another version, or has other fields.
    """
    position, states, generators = exact(
        _FORMAT.fields(document), "worker state", place=dict | None, states=dict, generators=dict
    )
    if position is not None:
        _place_fields(position)
        states = {**states, PLACE: position}
    return {**states, **generators}


def redealt(states: Mapping[int, Mapping[str, Any]], workers: int, worker: int) -> dict[str, Any]:
    """Return the state with which a worker of a job with another number of workers goes on; maybe empty.

    Schedulers and the like are those of the worker with its index, or of another where it has none;
    random generators only its own, since two workers must not draw the same. The place in the loops of
    `fleet.shard` is before the first batch that not all have behind them: no batch is left out.

    Args:
        states: By worker of the earlier job what it has kept.
        workers: Number of workers before.
        worker: Index of the worker in this job.
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
    """Return the place before the first batch that not all workers have behind them."""
    loop = min(position["loop"] for position in positions.values())
    within = {seat: at["item"] for seat, at in positions.items() if at["loop"] == loop}
    inside = [at["inside"] for at in positions.values() if at["loop"] == loop]
    next_ranges = (item + (seat - item) % workers for seat, item in within.items())
    return _place(loop, min(next_ranges), any(inside), {}, {})


def _document(things: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of all things, as snapshots and servers keep them."""
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
    # Schedulers of torch keep the rates themselves in their optimizer.
    groups = getattr(getattr(thing, "optimizer", None), "param_groups", ())
    for group, rate in zip(groups, state.get("_last_lr", ()), strict=False):
        group["lr"] = rate


class ScriptProgress:
    """Progress of one incarnation.

    Args:
        text: Progress text of the last incarnation's last push that counts; empty: there was none,
            or it was in no loop of the fleet, and every step is made anew.

    Attributes:
        behind: Pushes of the script that count.
        pushes: Pushes that the script has made so far, those that were passed over included.
        states: State remembered at the mark, by name.
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
        """Return whether the next push counts already; it is then counted as made, and must not be made."""
        if self._there and self.pushes >= self.behind:
            return False
        self.pushes += 1
        return True

    def arrive(self) -> None:
        """Note that the script is where the mark was made."""
        if not self._there:
            self._there, self.pushes = True, self._at

    def catch_up(self) -> None:
        """Count every later push as new: the fleet, which deals the data, knows which of it is used."""
        self._there, self.pushes = True, max(self.pushes, self.behind)

    def made(self) -> None:
        """Count a push."""
        self.pushes += 1

    def mark(self, states: str, latest: bool = False) -> None:
        """Keep the states between two steps.

        The first mark after a push stays until the next push: what a script does after it without a push
        lies in its memory, and a later incarnation has to do it again.

        Args:
            states: Result of `WorkerState.capture`.
            latest: Replace the mark in any case: the data is dealt by the fleet, which deals nothing again.
        """
        if latest or self._mark is None or self._mark[0] != self.pushes:
            self._mark = self.pushes, states

    def text(self, more: int = 0, repeats: bool = True) -> str:
        """Return the progress text of a push, or its commit; empty: the script is in no loop of the fleet.

        Args:
            more: Pushes that it goes with, not counted yet.
            repeats: A later incarnation makes the same pushes after the mark, so that those which count can
                be told by their number.
        """
        if self._mark is None:
            return ""
        (at, states), pushes = self._mark, self.pushes + more
        at = at if repeats else pushes
        return f'{_HEAD}, "pushes": {pushes}, "at": {at}, "states": {states}}}'

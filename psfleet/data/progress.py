"""How far a script is with its pushes, over all lives of its worker.

A worker that starts again runs its script from the beginning. Its loops go on at the last *mark* that
its earlier life has made before a push that counts: between two steps, with the states of all that is
remembered (psfleet.fleet.data_loops). Pushes that the script makes before it is there, and those after the
mark that count already, are passed over.

With a push (in sync mode with its commit, so that both count together) servers get the text of this.
"""

import json
from typing import Any

from psfleet.data.worker_state import read_states
from psfleet.formats.document import Format, exact, reading

__all__ = ["ScriptProgress"]

_FORMAT = Format("worker progress")
_HEAD = json.dumps(_FORMAT.document())[:-1]


class ScriptProgress:
    """Of one life.

    Args:
        said: What the last life has said with its last push that counts; empty: there was none, or it was
            in no loop of the fleet, and every step is made anew.

    Attributes:
        behind: Pushes of the script that count.
        pushes: Pushes that the script has made so far, those that were passed over included.
        states: What was remembered at the mark, by name.
    """

    def __init__(self, said: str = "") -> None:
        self.behind, self._at = 0, 0
        self.states: dict[str, Any] = {}
        if said:
            with reading("the progress of a worker's earlier life"):
                kinds = {"pushes": int, "at": int, "states": dict}
                self.behind, self._at, states = exact(_FORMAT.parse(said), "progress", **kinds)
                self.states = read_states(states)
        self.pushes = 0
        self._there = not said
        self._mark: tuple[int, str] | None = None

    # -- before the script is where it was -----------------------------------------------------

    def passes(self) -> bool:
        """Whether the next push counts already; then it is counted as made, and must not be made."""
        if self._there and self.pushes >= self.behind:
            return False
        self.pushes += 1
        return True

    def arrive(self) -> None:
        """The script is where the mark was made."""
        if not self._there:
            self._there, self.pushes = True, self._at

    def catch_up(self) -> None:
        """Every push to come is new: whoever deals the data knows which of it is used."""
        self._there, self.pushes = True, max(self.pushes, self.behind)

    # -- what the next life is told ------------------------------------------------------------

    def made(self) -> None:
        """The next push is made."""
        self.pushes += 1

    def mark(self, states: str, latest: bool = False) -> None:
        """The script is between two steps.

        The first mark after a push stays until the next push: what a script does after it without a push
        lies in its memory, and a later life has to do it again.

        Args:
            states: What `Remembered.capture` gave.
            latest: Replace the mark in any case: the data is dealt by the fleet, which deals nothing again.
        """
        if latest or self._mark is None or self._mark[0] != self.pushes:
            self._mark = self.pushes, states

    def text(self, more: int = 0, repeats: bool = True) -> str:
        """What to say with a push, or its commit; empty: the script is in no loop of the fleet.

        Args:
            more: Pushes that it goes with, not counted yet.
            repeats: A later life makes the same pushes after the mark, so that those which count can be
                told by their number.
        """
        if self._mark is None:
            return ""
        (at, states), pushes = self._mark, self.pushes + more
        at = at if repeats else pushes
        return f'{_HEAD}, "pushes": {pushes}, "at": {at}, "states": {states}}}'

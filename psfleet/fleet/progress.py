"""How far a script is with its pushes, over all lives of its worker.

A worker that starts again runs its script from the beginning. Its loops go on at the last *mark* that
its earlier life has made before a push that counts: between two steps, with the states of all that is
remembered (psfleet.fleet.data_loops). Pushes that the script makes before it is there, and those after the
mark that count already, are passed over.

With a push (in sync mode with its commit, so that both count together) servers get the text of this.
"""

import json
from typing import Any

__all__ = ["Progress"]


class Progress:
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
        known: dict[str, Any] = json.loads(said) if said else {}
        self.behind: int = known.get("pushes", 0)
        self.pushes = 0
        self.states: dict[str, Any] = known.get("states", {})
        self._at: int = known.get("at", 0)
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
            states: JSON, an object.
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
        return f'{{"pushes":{pushes},"at":{at if repeats else pushes},"states":{states}}}'

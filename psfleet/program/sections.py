"""Cutting a program into sections that stages of a pipeline run.

k cuts make k forward pieces. The last piece and its backward are one section, so with the backwards
of the others there are 2k - 1:

    F0 -> F1 -> ... -> F(k-1) + B(k-1) -> ... -> B1 -> B0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psfleet.errors import UsageError
from psfleet.program.backward import known_variable
from psfleet.program.gradient import ancestors
from psfleet.program.operation import Record
from psfleet.program.variable import Variable

__all__ = ["Section", "split"]


@dataclass(frozen=True)
class Section:
    """A part of one training step.

    Attributes:
        number: Its place among the 2k - 1.
        piece: The forward piece that it runs, or goes back through.
        records: Of that piece, in forward order.
        forward, backward: Which of the two it does; the middle section does both.
        takes: Variables of earlier pieces that the piece computes with. A backward section gives
            their gradients.
        gives: Variables of the piece that later ones compute with. A backward section takes their
            gradients.
    """

    number: int
    piece: int
    records: tuple[Record, ...]
    forward: bool
    backward: bool
    takes: tuple[Variable, ...]
    gives: tuple[Variable, ...]


def split(
    loss: Variable, cut_list: Sequence[Sequence[Variable | str] | Variable | str]
) -> list[Section]:
    """The sections of the step that computes a loss and goes back from it.

    Args:
        loss: What is minimized.
        cut_list: For each forward piece the variables that it ends with, or names of variables or
            layers; the last must be the loss.

    Raises:
        UsageError: A cut is empty, not part of the loss, or behind a later one.
    """
    cuts = [_variables(number, cut) for number, cut in enumerate(cut_list)]
    if not cuts or cuts[-1] != [loss]:
        raise UsageError(
            f"cut_list must end with the loss, [{loss.name!r}]; it ends with "
            f"{[v.name for v in cuts[-1]] if cuts else 'nothing'}"
        )
    pieces = _pieces(loss, cuts)
    count = len(pieces)
    ends = [(_taken(pieces, i), _given(pieces, i, loss)) for i in range(count)]
    order = [(i, True, i == count - 1) for i in range(count)]
    order += [(i, False, True) for i in reversed(range(count - 1))]
    return [
        Section(number, i, tuple(pieces[i]), forward, backward, *ends[i])
        for number, (i, forward, backward) in enumerate(order)
    ]


def _variables(number: int, cut: Any) -> list[Variable]:
    entries = list(cut) if isinstance(cut, list | tuple) else [cut]
    if not entries:
        raise UsageError(f"cut {number} is empty; it must have a variable")
    return [known_variable(entry, f"cut {number}:") for entry in entries]


def _pieces(loss: Variable, cuts: list[list[Variable]]) -> list[list[Record]]:
    whole = set(ancestors([loss]))
    done: set[Record] = set()
    pieces = []
    for number, cut in enumerate(cuts):
        strange = [v.name for v in cut if v.record not in whole]
        if strange:
            raise UsageError(
                f"cut {number} has {strange[0]!r}, which the loss {loss.name!r} is not computed by"
            )
        piece = [record for record in ancestors(cut) if record not in done]
        if not piece:
            raise UsageError(
                f"cut {number}, {[v.name for v in cut]}, is behind an earlier cut: "
                "between two cuts there must be an operation"
            )
        done.update(piece)
        pieces.append(piece)
    return pieces


def _taken(pieces: list[list[Record]], i: int) -> tuple[Variable, ...]:
    own = set(pieces[i])
    found: dict[Any, None] = {
        v: None
        for record in pieces[i]
        for v in record.inputs
        if v.record is not None and v.record not in own
    }
    return tuple(found)


def _given(pieces: list[list[Record]], i: int, loss: Variable) -> tuple[Variable, ...]:
    later = {v for piece in pieces[i + 1 :] for record in piece for v in record.inputs} | {loss}
    return tuple(record.output for record in pieces[i] if record.output in later)

"""How values are stored in a row of a sparse table: which in float32, which in 16 or 8 bits."""

from collections.abc import Iterator
from dataclasses import dataclass

from psfleet.rules.rule import Rule, SlotFormat
from psfleet.schema.table import RowPrecision

__all__ = ["RowColumn", "RowFormat"]

_FORMATS: tuple[SlotFormat, ...] = ("float32", "bfloat16", "int8")  # the larger ones first


@dataclass(frozen=True)
class RowColumn:
    """The weights of a row, or one slot of its state.

    Attributes:
        format: int8: a word with the scale as float32, then the codes.
        count: How many values it has.
        place: Of its first value in the row as float32.
        word: Of its first word in the stored row.
    """

    format: SlotFormat
    count: int
    place: int
    word: int

    @property
    def words(self) -> int:
        """How many words of 4 bytes it takes."""
        return _words(self.format, self.count)


class RowFormat:
    """Of the rows of one table, but for their scores.

    A format is used where it makes the row smaller: one weight in bfloat16 would take a word like one in
    float32. So either all columns are float32, or the weights are bfloat16.

    Attributes:
        columns: The weights, then each slot.
        words: Of a stored row.
        width: Of the row as float32.
    """

    def __init__(self, rule: Rule, dim: int, precision: RowPrecision) -> None:
        weights, _, state = precision.partition("/")
        wanted = [(dim, weights)]
        for slot in rule.slots:
            level = min(map(_FORMATS.index, (slot.smallest, state or "float32")))
            wanted.append((1, "float32") if slot.per_unit else (dim, _FORMATS[level]))
        self.columns = tuple(_columns(wanted))
        last = self.columns[-1]
        self.words, self.width = last.word + last.words, last.place + last.count

    @property
    def plain(self) -> bool:
        """Whether all of it is float32."""
        return self.words == self.width


def _columns(wanted: list[tuple[int, str]]) -> Iterator[RowColumn]:
    place = word = 0
    for count, largest in wanted:
        smaller = _FORMATS[: _FORMATS.index(largest) + 1]
        column = RowColumn(min(smaller, key=lambda form: _words(form, count)), count, place, word)
        yield column
        place, word = place + count, word + column.words


def _words(form: SlotFormat, count: int) -> int:
    return {"float32": count, "bfloat16": (count + 1) // 2, "int8": 1 + (count + 3) // 4}[form]

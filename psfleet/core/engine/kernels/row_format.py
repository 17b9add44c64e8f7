"""Row layouts: where weights and optimizer slots lie in a stored row, and at which precision.

A row is columns side by side: weights, then each slot, each from a new word of 4 bytes. Rows are all float32
("plain") or packed, with weights in bfloat16:

    plain    | weights: dim words     | slot: dim words            | ...
    packed   | weights: dim uint16    | scale | slot: dim int8     | ...       (a slot in int8)

A rule always computes in float32. For packed rows the generated kernel widens a row into scratch memory,
applies the rule, and narrows it again. The texts below are these steps for one column of each format;
`row_parts` puts them into the templates of sources/. row_rounding.py has the arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import indent

from psfleet.core.engine.kernels.rule_source import LANES, RuleSource, sum_count
from psfleet.core.engine.rules.rule import Rule, SlotFormat
from psfleet.core.engine.schema.table import RowPrecision

_FORMATS: tuple[SlotFormat, ...] = ("float32", "bfloat16", "int8")  # the larger ones first


# A rule's functions stand in the same module: the names here are those that psfleet.core.engine.rules.rule
# refuses.
_HEAD = """
from numba import uint32

from psfleet.core.engine.kernels import row_rounding as row_bits
from psfleet.core.engine.kernels.intrinsics import (load_packed_i8, load_packed_u16,
    load_packed_u32, load_wide, store_packed_i8, store_packed_u16, store_packed_u32, store_wide)
"""
# First values of the weights of a packed row, which are bfloat16.
_FIRST_ROW = """\
fill(d, wide, hash_, DIM, kind, low, span, stream)
for k in range(DIM):
    store_packed_u16(row, k, np.uint16(row_bits.nearest(load_wide(wide, k))))
"""
_FIRST_STATE = {
    "float32": """\
for k in range({count}):
    store_packed_u32(row, {word} + k, row_bits.bits_of({first}))""",
    "bfloat16": """\
for k in range({count}):
    store_packed_u16(row, {half} + k, np.uint16(row_bits.nearest(row_bits.bits_of({first}))))""",
    "int8": """\
scale = row_bits.scale_of(uint32(row_bits.bits_of({first}) & uint32(0x7FFFFFFF)))
store_packed_u32(row, {word}, row_bits.bits_of(scale))
for k in range({count}):
    store_packed_i8(row, {byte} + k, row_bits.code_of(row_bits.bits_of({first}), scale, uint32(1 << 31)))""",
}
_WIDEN = {
    "float32": """\
for k in range({count}):
    store_wide(wide, {place} + k, load_packed_u32(row, {word} + k))""",
    "bfloat16": """\
for k in range({count}):
    store_wide(wide, {place} + k, uint32(load_packed_u16(row, {half} + k)) << uint32(16))""",
    "int8": """\
scale = row_bits.float_of(load_packed_u32(row, {word}))
for k in range({count}):
    store_wide(wide, {place} + k, row_bits.bits_of(float32(load_packed_i8(row, {byte} + k)) * scale))""",
}
_NARROW = {
    "float32": """\
for k in range({count}):
    store_packed_u32(row, {word} + k, load_wide(wide, {place} + k))""",
    "bfloat16": """\
for k in range({count}):
    bits = row_bits.drawn(load_wide(wide, {place} + k), row_bits.noise(base, {place} + k))
    store_packed_u16(row, {half} + k, np.uint16(bits))""",
    "int8": """\
most = uint32(0)
for k in range({count}):
    most = max(most, uint32(load_wide(wide, {place} + k) & uint32(0x7FFFFFFF)))
scale = row_bits.scale_of(most)
store_packed_u32(row, {word}, row_bits.bits_of(scale))
for k in range({count}):
    code = row_bits.code_of(load_wide(wide, {place} + k), scale, row_bits.noise(base, {place} + k))
    store_packed_i8(row, {byte} + k, code)""",
}
_PLAIN_WEIGHTS = {
    "weight_bytes": "DIM * 4",
    "first_weights": "fill(d, to, load_u64(ring, j % RING), DIM, kind, low, span, stream)",
    "read_weights": """\
for k in range(DIM):
                    store_f32(to, k, read_f32(row, k))""",
}
_PACKED_WEIGHTS = {
    "weight_bytes": "DIM * 2",
    "first_weights": """\
fill(d, to, load_u64(ring, j % RING), DIM, kind, low, span, stream)
                for k in range(DIM):
                    store_wide(to, k, row_bits.nearest(load_wide(to, k)) << uint32(16))""",
    "read_weights": """\
for k in range(DIM):
                    store_wide(to, k, uint32(load_packed_u16(row, k)) << uint32(16))""",
}


@dataclass(frozen=True)
class RowColumn:
    """The weights of a row, or one slot of its state.

    Attributes:
        format: Format of the values. A column in int8 begins with a word for the scale, a float32.
        count: Number of values.
        place: Position of its first value in the row as float32.
        word: Position of its first word in the stored row.
    """

    format: SlotFormat
    count: int
    place: int
    word: int

    @property
    def words(self) -> int:
        """Number of words of 4 bytes that the column takes."""
        return _words(self.format, self.count)


class RowFormat:
    """Format of the rows of one table, without their scores.

    A smaller format is used only if it makes the column smaller: a single weight in bfloat16 takes a word, as
    one in float32 does. So either all columns are float32, or the weights are bfloat16.

    Attributes:
        columns: Column of the weights, then those of the slots.
        words: Number of words of a stored row.
        width: Number of values of a row, which is its width in float32.
    """

    def __init__(self, rule: Rule, dim: int, precision: RowPrecision) -> None:
        weights, _, state = precision.partition("/")
        largest = [(dim, weights)]
        for slot in rule.slots:
            level = min(map(_FORMATS.index, (slot.smallest, state or "float32")))
            largest.append((1, "float32") if slot.per_unit else (dim, _FORMATS[level]))
        self.columns = tuple(_columns(largest))
        last = self.columns[-1]
        self.words, self.width = last.word + last.words, last.place + last.count

    @property
    def plain(self) -> bool:
        """True if all columns are float32."""
        return self.words == self.width

    @property
    def has_codes(self) -> bool:
        """True if a column is int8."""
        return any(column.format == "int8" for column in self.columns)


def _columns(limits: list[tuple[int, str]]) -> Iterator[RowColumn]:
    place = word = 0
    for count, largest in limits:
        smaller = _FORMATS[: _FORMATS.index(largest) + 1]
        column = RowColumn(min(smaller, key=lambda form: _words(form, count)), count, place, word)
        yield column
        place, word = place + count, word + column.words


def _words(form: SlotFormat, count: int) -> int:
    return {"float32": count, "bfloat16": (count + 1) // 2, "int8": 1 + (count + 3) // 4}[form]


def weight_parts(is_plain: bool) -> dict[str, str]:
    """Return the parts to fill into `pull.txt`, for rows in float32 or packed ones."""
    return _PLAIN_WEIGHTS if is_plain else _PACKED_WEIGHTS


def row_parts(text: RuleSource, rule: Rule, form: RowFormat) -> dict[str, str]:
    """Return the parts to fill into `rows_head.txt` and the texts behind it.

    Args:
        text: Text of the rule.
        rule: Rule of the rows.
        form: Format of the rows.
    """
    return _plain_parts(text) if form.plain else _packed_parts(rule, form)


def _plain_parts(text: RuleSource) -> dict[str, str]:
    return {
        "row_helpers": "",
        "wide_at": "0",
        "first_row": "fill(d, row, hash_, DIM, kind, low, span, stream)\n" + text.fill_slots(),
        "update": "apply(DIM, gradient, lanes, row, turn, h)",
    }


def _packed_parts(rule: Rule, form: RowFormat) -> dict[str, str]:
    slots = zip(form.columns[1:], rule.slots, strict=True)
    first = "\n".join(_filled(_FIRST_STATE, column, slot.initial) for column, slot in slots)
    return {
        "row_helpers": _HEAD + _helpers(form),
        "wide_at": str(4 * LANES * sum_count(rule)),
        "first_row": indent(_FIRST_ROW + first, " " * 8).strip(),
        "update": """\
wide = lanes + WIDE
            widen_row(row, wide)
            apply(DIM, gradient, lanes, wide, turn, h)
            narrow_row(row, wide, row_bits.random_base(load_u64(ring, j % RING), stream, step))""",
    }


def _helpers(form: RowFormat) -> str:
    loads = "\n".join(_filled(_WIDEN, column) for column in form.columns)
    stores = "\n".join(_filled(_NARROW, column) for column in form.columns)
    return f'''

@helper
def widen_row(row, wide):
    """A stored row as float32."""
{indent(loads, "    ")}


@helper
def narrow_row(row, wide, base):
    """Store a row that `widen_row` gave and the rule has updated."""
{indent(stores, "    ")}
'''


def _filled(texts: dict[str, str], column: RowColumn, initial: float = 0.0) -> str:
    return texts[column.format].format(
        count=column.count,
        place=column.place,
        word=column.word,
        half=2 * column.word,
        byte=4 * column.word + 4,
        first=f"np.float32({initial!r})",
    )

"""Row layouts: positions and formats of weights and optimizer slots in a stored row.

A row consists of columns: the weights, then each slot. Each column begins at a word of 4 bytes. A row is
either plain, with every value in float32, or packed, with its weights in bfloat16. Rows of 5 weights with two
slots m and v, in words:

    plain     | w w w w w | m m m m m | v v v v v |                  15 words
    packed    | ww ww w.  | scale mmmm m... | vv vv v. |              9 words: m in int8, v in bfloat16

A rule always computes in float32. For a packed row the generated kernel widens the row into scratch memory,
applies the rule there, and narrows the result into the stored row (decision 4):

    stored row  -- widen -->  float32 [width]  -- the rule -->  float32 [width]  -- narrow -->  stored row

The texts in this module are these steps for one column in each format; `row_parts` inserts them into the
templates of sources/. row_rounding.py has the arithmetic of rounding, and number_formats.py packs and unpacks
rows outside push and pull.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import indent

from psfleet.core.engine.kernels.rule_source import LANES, RuleSource, sum_count
from psfleet.core.engine.rules.rule import Rule, SlotFormat
from psfleet.core.engine.schema.table import RowPrecision

_FORMATS: tuple[SlotFormat, ...] = ("float32", "bfloat16", "int8")  # the larger formats first

# The texts below share a module with the functions of a user's rule. They may only use names that no rule
# function can have, which are those that `_KERNELS_OWN` of psfleet.core.engine.rules.rule refuses.
#
# Braces contain the number of the column's values (`count`), its position in the row as float32 (`place`),
# the position of its values in the stored row in units of 4, 2 and 1 bytes (`word`, `half`, `byte`), and the
# initial value (`first`). `row` is the address of the stored row, `wide` that of the same row in float32.
_HEAD = """
from numba import uint32

from psfleet.core.engine.kernels import row_rounding as row_bits
from psfleet.core.engine.kernels.intrinsics import (load_packed_i8, load_packed_u16,
    load_packed_u32, load_wide, store_packed_i8, store_packed_u16, store_packed_u32, store_wide)
"""
# Weights of a new packed row. `fill` computes them in float32 as for a plain row, and each is rounded to the
# nearest bfloat16.
_FIRST_ROW = """\
fill(d, wide, hash_, DIM, kind, low, span, stream)
for k in range(DIM):
    store_packed_u16(row, k, np.uint16(row_bits.nearest(load_wide(wide, k))))
"""
# State of a new packed row, by format of the column. All values of a column are equal, so its scale is that
# of one value.
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
# From a column of the stored row to float32. A bfloat16 is the upper half of a float32's bits.
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
# From float32 back to a column of the stored row, rounded at random (row_rounding.py). `most` is the largest
# magnitude of the column, as bits, because the bits of positive float32 are ordered as the numbers are.
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
# Parts of pull.txt that write weights to the address `to`: the initial values of a row that the table lacks,
# or the weights of a stored row. The indentation is that of the template.
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
    """Part of a row: the weights, or one slot (state value) of the optimizer.

    Attributes:
        format: Format of the values. A column in int8 begins with a word for the scale, a float32.
        count: Number of values: `dim`, or 1 for a slot that the row shares.
        place: Position of the column's first value in the row as float32.
        word: Position of the column's first word in the stored row, in units of 4 bytes.
    """

    format: SlotFormat
    count: int
    place: int
    word: int

    @property
    def words(self) -> int:
        """Size of the column in words of 4 bytes."""
        return _words(self.format, self.count)


class RowFormat:
    """Layout of the rows of one table, without the scores that follow the state of each row.

    A column is the weights, or one slot (state value) of the optimizer. It has a smaller format than float32
    only if that takes fewer words. A single weight takes one word in float32
    and in bfloat16, so a table of width 1 stays in float32. So either all columns are float32, or the weights
    are bfloat16. The head of this module draws an example.

    Args:
        rule: Rule of the table. Its slots declare the smallest format that they tolerate (`Slot.smallest`).
        dim: Number of weights of a row.
        precision: Precision that the table requests: that of the weights, or "weights/state".

    Attributes:
        columns: Column of the weights, then the columns of the slots.
        words: Size of a stored row in words of 4 bytes.
        width: Number of values of a row, weights and state, and its size in words if it were plain.
    """

    def __init__(self, rule: Rule, dim: int, precision: RowPrecision) -> None:
        weights, _, state = precision.partition("/")
        limits = [(dim, weights)]
        for slot in rule.slots:
            level = min(map(_FORMATS.index, (slot.smallest, state or "float32")))
            limits.append((1, "float32") if slot.per_unit else (dim, _FORMATS[level]))
        self.columns = tuple(_columns(limits))
        last = self.columns[-1]
        self.words, self.width = last.word + last.words, last.place + last.count

    @property
    def plain(self) -> bool:
        """True if rows are stored as float32, weights and state."""
        return self.words == self.width

    @property
    def has_codes(self) -> bool:
        """True if some state value of the optimizer is stored in int8."""
        return any(column.format == "int8" for column in self.columns)


def _columns(limits: list[tuple[int, str]]) -> Iterator[RowColumn]:
    """Lay out columns one behind the other, given the number of values and the smallest format of each."""
    position = word = 0
    for count, smallest_allowed in limits:
        allowed = _FORMATS[: _FORMATS.index(smallest_allowed) + 1]
        column = RowColumn(
            min(allowed, key=lambda form: _words(form, count)), count, position, word
        )
        yield column
        position, word = position + count, word + column.words


def _words(form: SlotFormat, count: int) -> int:
    """Return the size in words of a column of `count` values; an int8 column has a word for its scale."""
    return {"float32": count, "bfloat16": (count + 1) // 2, "int8": 1 + (count + 3) // 4}[form]


def weight_parts(is_plain: bool) -> dict[str, str]:
    """Return the parts to insert into `pull.txt`, for rows in float32 (plain) or in 16 bits."""
    return _PLAIN_WEIGHTS if is_plain else _PACKED_WEIGHTS


def row_parts(text: RuleSource, rule: Rule, form: RowFormat) -> dict[str, str]:
    """Return the parts to insert into `rows_head.txt`, `push.txt` and `rest*.txt`.

    Args:
        text: Generator of the rule's text.
        rule: Rule of the rows.
        form: Layout of the rows. It decides whether the rule updates a row in place or a float32 copy.
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

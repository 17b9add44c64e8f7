"""The parts of a sparse kernel's text that say how a row is read and stored."""

from textwrap import indent

from psfleet.kernels.row_format import RowColumn, RowFormat
from psfleet.kernels.rule_text import LANES, RuleSource, sum_count
from psfleet.rules.rule import Rule

__all__ = ["row_parts", "weight_parts"]

# A rule's functions stand in the same module: the names here are those that psfleet.rules.functions refuses.
_HEAD = """
from numba import uint32

from psfleet.kernels import rounding as row_bits
from psfleet.kernels.intrinsics import (load_packed_i8, load_packed_u16, load_packed_u32, load_wide,
                                        store_packed_i8, store_packed_u16, store_packed_u32, store_wide)
"""

# The weights of a packed row are bfloat16.
_FIRST_ROW = """\
fill_row(wide, hashed, DIM, kind, low, span, stream)
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
    "first_weights": "fill_row(to, load_u64(ring, j % RING), DIM, kind, low, span, stream)",
    "read_weights": """\
for k in range(DIM):
                    store_f32(to, k, read_f32(row, k))""",
}
_PACKED_WEIGHTS = {
    "weight_bytes": "DIM * 2",
    "first_weights": """\
fill_row(to, load_u64(ring, j % RING), DIM, kind, low, span, stream)
                for k in range(DIM):
                    store_wide(to, k, row_bits.nearest(load_wide(to, k)) << uint32(16))""",
    "read_weights": """\
for k in range(DIM):
                    store_wide(to, k, uint32(load_packed_u16(row, k)) << uint32(16))""",
}


def weight_parts(is_plain: bool) -> dict[str, str]:
    """What `pull.txt` leaves open. is_plain: whether rows are float32."""
    return _PLAIN_WEIGHTS if is_plain else _PACKED_WEIGHTS


def row_parts(text: RuleSource, rule: Rule, form: RowFormat) -> dict[str, str]:
    """What `sparse.txt` and the texts behind it leave open. `text`: of the rule."""
    return _plain_parts(text) if form.plain else _packed_parts(rule, form)


def _plain_parts(text: RuleSource) -> dict[str, str]:
    return {
        "row_helpers": "",
        "wide_at": "0",
        "first_row": "fill_row(row, hashed, DIM, kind, low, span, stream)\n" + text.fill_slots(),
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
    read = "\n".join(_filled(_WIDEN, column) for column in form.columns)
    write = "\n".join(_filled(_NARROW, column) for column in form.columns)
    return f'''

@helper
def widen_row(row, wide):
    """A stored row as float32."""
{indent(read, "    ")}


@helper
def narrow_row(row, wide, base):
    """Store a row that `widen_row` gave and the rule has updated."""
{indent(write, "    ")}
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

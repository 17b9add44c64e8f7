"""Finding an id's row: the index of a sparse table, as code that kernels call.

The index is 256 segments, chosen by the top bits of the hash, each a power of two of 64-byte lines.
A line holds four entries: four hashes, four row slots (uint32), four stamps (uint32). An entry is free
while its slot is 0 and dead when it is DEAD; probing goes from line to line until a free entry.
A stamp is the low half of the step at which the row was last pushed: it costs a push nothing, for the
line is at hand, and a sweep over the lines finds rows of any age without a look at them.
Lines and rows never move, except that a segment which fills up is rehashed to another place in the
arena; thresholds are staggered so that segments grow one by one, never all in the same push.

`d`, the table's descriptor, is an array of int64; the names below are its places.
"""
# mypy: ignore-errors

from numba import int64, uint32, uint64

from psfleet.kernels.hashing import mix
from psfleet.kernels.intrinsics import (
    helper,
    load_i64,
    load_u32,
    load_u64,
    prefetch,
    store_i64,
    store_u32,
    store_u64,
    trailing_zeros,
)

__all__ = [
    "BASE",
    "DEAD",
    "DESCRIPTOR_SIZE",
    "FIRST_LINES",
    "FREE_LINES",
    "FREE_ROW",
    "LINES",
    "LIVE",
    "MARKS",
    "MASK",
    "NEXT_LINE",
    "NEXT_SLOT",
    "REMOVED",
    "ROWS",
    "SEGMENTS",
    "SEGMENT_COUNT",
    "SEGMENT_FIELDS",
    "STRIDE",
    "USED",
    "age_of",
    "find_fast",
    "find_slow",
    "first_line",
    "insert",
    "place_of",
    "prefetch_line",
    "remove",
    "touch_fast",
    "touch_slow",
]

LINES = 0  # address of the lines' arena
ROWS = 1  # address of the rows' arena
SEGMENTS = 2  # address of the segments' fields
NEXT_SLOT = 3  # the first slot that no row has had; slot 0 is none
NEXT_LINE = 4  # the first line that no segment has had
FREE_ROW = 5  # a slot whose row was removed (its first word names the next), or 0
STRIDE = 6  # bytes of a row
MARKS = 7  # address of an int64 per slot, or 0
FREE_LINES = 8  # + k: a run of 2**k lines given up by a segment (its first word is the next), or 0
DESCRIPTOR_SIZE = 64

SEGMENT_COUNT = 256
FIRST_LINES = 4  # lines of a new segment; line 0 is none
BASE, MASK, USED, LIVE = (
    0,
    1,
    2,
    3,
)  # fields of a segment: first line, lines - 1, entries, live ones
SEGMENT_FIELDS = 4

DEAD = 0xFFFFFFFF
REMOVED = -1  # in MARKS: no row has this slot
_U = uint64


@helper
def _segment(d, hashed):
    return load_i64(d, SEGMENTS) + int64(hashed >> _U(56)) * (8 * SEGMENT_FIELDS)


@helper
def first_line(d, hashed):
    """Address of the line where the search for a hash begins."""
    segment = _segment(d, hashed)
    return (
        load_i64(d, LINES)
        + (load_i64(segment, BASE) + (int64(hashed) & load_i64(segment, MASK))) * 64
    )


@helper
def prefetch_line(d, id_):
    """Hash an id and have its first line fetched."""
    hashed = mix(uint64(id_))
    prefetch(first_line(d, hashed))
    return hashed


@helper
def find_fast(line, hashed):
    """The slot if the hash stands in this line, else 0 (or a wrong 0 for a removed entry)."""
    hits = (
        _U(load_u64(line, 0) == hashed)
        | _U(load_u64(line, 1) == hashed) << _U(1)
        | _U(load_u64(line, 2) == hashed) << _U(2)
        | _U(load_u64(line, 3) == hashed) << _U(3)
    )
    slot = int64(0)
    if hits != _U(0):
        slot = int64(load_u32(line, 8 + trailing_zeros(hits)))
        if slot == DEAD:
            slot = int64(0)
    return slot


@helper
def touch_fast(line, hashed, step):
    """The same, for a row that is pushed at this step."""
    hits = (
        _U(load_u64(line, 0) == hashed)
        | _U(load_u64(line, 1) == hashed) << _U(1)
        | _U(load_u64(line, 2) == hashed) << _U(2)
        | _U(load_u64(line, 3) == hashed) << _U(3)
    )
    slot = int64(0)
    if hits != _U(0):
        entry = trailing_zeros(hits)
        slot = int64(load_u32(line, 8 + entry))
        if slot == DEAD:
            slot = int64(0)
        else:
            store_u32(line, 12 + entry, uint32(step))
    return slot


@helper
def age_of(step, stamp):
    """How many steps ago the stamp was given: exact below 2**31, see sources/index.py `restamp`."""
    age = int64(uint32(step) - stamp) & 0xFFFFFFFF
    return int64(0) if age >= 3 << 30 else age  # given in a future that was taken back


@helper
def place_of(d, hashed):
    """(line, entry) of the hash, or of the free entry that ends its chain."""
    segment = _segment(d, hashed)
    lines, mask = load_i64(d, LINES) + load_i64(segment, BASE) * 64, load_i64(segment, MASK)
    place = int64(hashed) & mask
    while True:
        line = lines + place * 64
        for entry in range(4):
            slot = int64(load_u32(line, 8 + entry))
            if slot == 0 or (slot != DEAD and load_u64(line, entry) == hashed):
                return line, entry
        place = (place + 1) & mask


@helper
def find_slow(d, hashed):
    """The slot of the hash, or 0."""
    line, entry = place_of(d, hashed)
    return int64(load_u32(line, 8 + entry))


@helper
def touch_slow(d, hashed, step):
    """The slot of the hash, whose row is pushed at this step, or 0."""
    line, entry = place_of(d, hashed)
    slot = int64(load_u32(line, 8 + entry))
    if slot != 0:
        store_u32(line, 12 + entry, uint32(step))
    return slot


@helper
def _mark(d, slot, value):
    marks = load_i64(d, MARKS)
    if marks != 0:
        store_i64(marks, slot, value)


@helper
def insert(d, hashed, step):
    """A slot for a hash that is not there, pushed at this step. Its row holds whatever was there."""
    segment = _segment(d, hashed)
    number = int64(hashed >> _U(56))
    capacity = (load_i64(segment, MASK) + 1) * 4
    if load_i64(segment, USED) * 256 > capacity * (115 + (number * 0x9E3779B1 >> 8) % 64):
        _rehash(d, segment)
    slot = load_i64(d, FREE_ROW)
    if slot != 0:
        store_i64(d, FREE_ROW, int64(load_u32(load_i64(d, ROWS) + slot * load_i64(d, STRIDE), 0)))
    else:
        slot = load_i64(d, NEXT_SLOT)
        store_i64(d, NEXT_SLOT, slot + 1)
    line, entry = place_of(d, hashed)
    store_u64(line, entry, hashed)
    store_u32(line, 8 + entry, uint32(slot))
    store_u32(line, 12 + entry, uint32(step))
    store_i64(segment, USED, load_i64(segment, USED) + 1)
    store_i64(segment, LIVE, load_i64(segment, LIVE) + 1)
    _mark(d, slot, 0)
    return slot


@helper
def remove(d, hashed):
    """Forget a hash. Returns 1 if it was there; its row becomes free."""
    line, entry = place_of(d, hashed)
    slot = int64(load_u32(line, 8 + entry))
    if slot == 0:
        return 0
    store_u32(line, 8 + entry, uint32(DEAD))
    segment = _segment(d, hashed)
    store_i64(segment, LIVE, load_i64(segment, LIVE) - 1)
    store_u32(load_i64(d, ROWS) + slot * load_i64(d, STRIDE), 0, uint32(load_i64(d, FREE_ROW)))
    store_i64(d, FREE_ROW, slot)
    _mark(d, slot, REMOVED)
    return 1


@helper
def _take_lines(d, order):
    """The first of 2**order lines that are all zero."""
    base = load_i64(d, FREE_LINES + order)
    if base == 0:
        base = load_i64(d, NEXT_LINE)
        store_i64(d, NEXT_LINE, base + (int64(1) << order))
        return base
    address = load_i64(d, LINES) + base * 64
    store_i64(d, FREE_LINES + order, load_i64(address, 0))
    for i in range(int64(8) << order):
        store_i64(address, i, 0)
    return base


@helper
def _rehash(d, segment):
    """Move a segment to another run of lines: twice as many, or as many where most entries are dead."""
    lines, old, size = (load_i64(d, LINES), load_i64(segment, BASE), load_i64(segment, MASK) + 1)
    order = int64(trailing_zeros(uint64(size)))
    live = load_i64(segment, LIVE)
    grown = order + 1 if live * 4 > load_i64(segment, USED) * 3 else order
    base = _take_lines(d, grown)
    mask = (int64(1) << grown) - 1
    for i in range(size):
        line = lines + (old + i) * 64
        for entry in range(4):
            slot = load_u32(line, 8 + entry)
            if int64(slot) != 0 and int64(slot) != DEAD:
                hashed = load_u64(line, entry)
                place = int64(hashed) & mask
                moved = False
                while not moved:
                    to = lines + (base + place) * 64
                    for free in range(4):
                        if load_u32(to, 8 + free) == uint32(0):
                            store_u64(to, free, hashed)
                            store_u32(to, 8 + free, slot)
                            store_u32(to, 12 + free, load_u32(line, 12 + entry))
                            moved = True
                            break
                    place = (place + 1) & mask
    store_i64(lines + old * 64, 0, load_i64(d, FREE_LINES + order))
    store_i64(d, FREE_LINES + order, old)
    store_i64(segment, BASE, base)
    store_i64(segment, MASK, mask)
    store_i64(segment, USED, live)

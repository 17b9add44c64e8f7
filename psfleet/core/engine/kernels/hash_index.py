"""Finding an id's row: the index of a sparse table, as code that kernels call.

The index is a hash table of chunks that grows one chunk at a time (extendible hashing). A chunk is 256
lines of 64 bytes. A line holds four entries: four hashes, four row slots (uint32), four stamps (uint32).
An entry is free while its slot is 0; within a chunk, probing goes from line to line until a free entry.
A stamp is the low half of the step at which the row was last pushed: it costs a push nothing, for the
line is at hand, and a sweep over the lines finds rows of any age without a look at them.

A directory maps a part of a hash to its chunk. The position of a hash in it is the quadratic function
h * (2 + h) of that part as a fraction h, whose slope doubles from one end to the other. So chunks at one
end hold twice as many rows as those at the other, some are about to be split at any time, and the index
takes much the same memory per row at any size. A full chunk is split in two in its place: nothing is
left behind, and no push waits for more than a few chunks. Rows never move.

`d`, the table's descriptor, is an array of int64; the names below are its places.
"""
# mypy: ignore-errors

from numba import float64, int64, uint32, uint64, void

from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import (
    called,
    helper,
    inlined,
    load_i64,
    load_u32,
    load_u64,
    prefetch,
    store_i64,
    store_u32,
    store_u64,
    trailing_zeros,
)

LINES = 0  # address of the lines of chunk 0
ROWS = 1  # address of the rows' arena
DIRECTORY = 2  # address of the directory: a chunk's number (uint32) for each part of all positions
SHIFT = 3  # the part of a position: position >> SHIFT
NEXT_SLOT = 4  # the first slot that no row has had; slot 0 is none
CHUNKS = 5  # the first chunk that is not in use
FREE_ROW = 6  # a slot whose row was removed (its first word names the next), or 0
STRIDE = 7  # bytes of a row
MARKS = 8  # address of an int64 per slot, or 0
RECORDS = 9  # address of the chunks' records
LIVE = 10  # address of how many rows each segment has, int64
SCRATCH = 11  # address of the memory of one chunk
EARLY_CHUNKS = 12  # chunks that may be split beyond those that the rows allow, see _make_room
EARLY_PARTS = 13  # parts of the directory that there may be, however few chunks there are
FULL = 14  # of 32 entries of a chunk: with more it is split
ADD, FILL = 15, 16  # addresses of `add` and `fill` of sources/index.py, which are compiled once
DESCRIPTOR_SIZE = 17

USED, LEVEL, MASK = 0, 1, 2  # uint32 of a record: entries in use, see below, lines - 1
RECORD_SIZE = 16  # bytes
# A chunk of level k has the positions of one value of position >> k.

CHUNK_LINES = 256
_CHUNK_BYTES = CHUNK_LINES * 64
FIRST_LEVEL = 62  # positions are below 3 << 62
FIRST_CHUNKS = 3
LARGEST_DIRECTORY = 8  # parts for each chunk
_LOW = 23  # bits of a hash below those of the home line; the virtual shard's are no use on a server
FULL_TO_CHANGE, FULL_TO_READ = 23, 28  # FULL of tables that grow, and of those that are only read
FEWEST_ROWS = (
    256  # for each chunk: with fewer, hashes are alike, and chunks are enlarged and not split
)

SEGMENT_COUNT = 256
"""Sweeps go by segments of all hashes: a segment is the top byte."""

REMOVED = -1  # in MARKS: no row has this slot
_U = uint64


_call_add = called(int64(int64, uint64, int64))
_call_fill = called(void(int64, uint64, int64, int64, float64, float64, uint64))


@helper
def position(hash_):
    """Return a hash's position in the directory: 0 to below 3 << FIRST_LEVEL, as uint64.

    It rises with the segment and, within one, with the lowest bits.
    """
    fraction = (hash_ >> _U(56)) << _U(_LOW) | hash_ & _U((1 << _LOW) - 1)  # of 2**31
    return fraction * (fraction + _U(1 << 32))


@helper
def _home(hash_, mask):
    """The line of a chunk where the search for a hash begins."""
    return int64(hash_ >> _U(_LOW)) & mask


@helper
def _chunk_of(d, hash_):
    part = position(hash_) >> _U(load_i64(d, SHIFT))
    return int64(load_u32(load_i64(d, DIRECTORY), int64(part)))


@helper
def first_line(d, hash_):
    """Address of the line where the search for a hash begins (of an enlarged chunk, may begin)."""
    line = _home(hash_, CHUNK_LINES - 1)
    return load_i64(d, LINES) + _chunk_of(d, hash_) * _CHUNK_BYTES + line * 64


@helper
def second_line(d, hash_):
    """Address of the line behind it."""
    line = (_home(hash_, CHUNK_LINES - 1) + 1) & (CHUNK_LINES - 1)
    return load_i64(d, LINES) + _chunk_of(d, hash_) * _CHUNK_BYTES + line * 64


@helper
def prefetch_line(d, id_):
    """Hash an id and have its first line fetched."""
    hash_ = mix(uint64(id_))
    prefetch(first_line(d, hash_))
    return hash_


@helper
def _hits(line, hash_):
    """Bit k: entry k of the line has this hash."""
    return (
        _U(load_u64(line, 0) == hash_)
        | _U(load_u64(line, 1) == hash_) << _U(1)
        | _U(load_u64(line, 2) == hash_) << _U(2)
        | _U(load_u64(line, 3) == hash_) << _U(3)
    )


@helper
def find_fast(line, hash_):
    """The slot if the hash stands in this line, else 0."""
    hits = _hits(line, hash_)
    slot = int64(0)
    if hits != _U(0):
        slot = int64(load_u32(line, 8 + trailing_zeros(hits)))
    return slot


@helper
def touch_fast(line, hash_, step):
    """The same, for a row that is pushed at this step."""
    hits = _hits(line, hash_)
    slot = int64(0)
    if hits != _U(0):
        entry = trailing_zeros(hits)
        slot = int64(load_u32(line, 8 + entry))
        store_u32(line, 12 + entry, uint32(step))  # of a free entry it means nothing
    return slot


@helper
def age_of(step, stamp):
    """Return the age of a stamp in steps: exact below 2**31, see sources/index.py `restamp`."""
    age = int64(uint32(step) - stamp) & 0xFFFFFFFF
    return int64(0) if age >= 3 << 30 else age  # given in a future that was taken back


@helper
def _record(d, chunk):
    return load_i64(d, RECORDS) + chunk * RECORD_SIZE


@helper
def lines_of(d, chunk):
    """(address, lines - 1) of a chunk."""
    lines = load_i64(d, LINES) + chunk * _CHUNK_BYTES
    return lines, int64(load_u32(_record(d, chunk), MASK))


@helper
def _search(lines, mask, hash_):
    """(line, entry) of the hash among these lines, or of the free entry that ends its chain."""
    place = _home(hash_, mask)
    while True:
        line = lines + place * 64
        for entry in range(4):
            slot = load_u32(line, 8 + entry)
            if slot == uint32(0) or load_u64(line, entry) == hash_:
                return line, entry
        place = (place + 1) & mask


@helper
def place_of(d, hash_):
    """(line, entry) of the hash, or of the free entry that ends its chain."""
    lines, mask = lines_of(d, _chunk_of(d, hash_))
    return _search(lines, mask, hash_)


@helper
def find_slow(d, hash_):
    """The slot of the hash, or 0."""
    line, entry = place_of(d, hash_)
    return int64(load_u32(line, 8 + entry))


@helper
def touch_slow(d, hash_, step):
    """The slot of the hash, whose row is pushed at this step, or 0."""
    line, entry = place_of(d, hash_)
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
def _add_live(d, hash_, more):
    live, segment = load_i64(d, LIVE), int64(hash_ >> _U(56))
    store_i64(live, segment, load_i64(live, segment) + more)


@helper
def _put(line, entry, hash_, slot, stamp):
    store_u64(line, entry, hash_)
    store_u32(line, 8 + entry, slot)
    store_u32(line, 12 + entry, stamp)


@inlined
def insert(d, hash_, step):
    """A slot for a hash that is not there, pushed at this step. Its row holds whatever was there."""
    record = _record(d, _chunk_of(d, hash_))
    full = load_i64(d, FULL)
    while int64(load_u32(record, USED)) * 8 >= (int64(load_u32(record, MASK)) + 1) * full:
        _make_room(d, hash_)
        record = _record(d, _chunk_of(d, hash_))
    slot = load_i64(d, FREE_ROW)
    if slot != 0:
        store_i64(d, FREE_ROW, int64(load_u32(load_i64(d, ROWS) + slot * load_i64(d, STRIDE), 0)))
    else:
        slot = load_i64(d, NEXT_SLOT)
        store_i64(d, NEXT_SLOT, slot + 1)
    line, entry = place_of(d, hash_)
    _put(line, entry, hash_, uint32(slot), uint32(step))
    store_u32(record, USED, uint32(load_u32(record, USED) + uint32(1)))
    _add_live(d, hash_, 1)
    _mark(d, slot, 0)
    return slot


@helper
def add(d, hash_, step):
    """The slot of the hash, whose row is pushed at this step; with a minus sign, if the row is new."""
    return _call_add(load_i64(d, ADD), (d, hash_, step))


@inlined
def fill(d, out, hash_, dim, kind, low, span, stream):
    """Write the first values of a row, as `fill_row` of hashing.py."""
    _call_fill(load_i64(d, FILL), (out, hash_, dim, kind, low, span, stream))


@helper
def remove(d, hash_):
    """Forget a hash. Returns 1 if it was there; its row becomes free."""
    chunk = _chunk_of(d, hash_)
    lines, mask = lines_of(d, chunk)
    line, entry = _search(lines, mask, hash_)
    slot = int64(load_u32(line, 8 + entry))
    if slot == 0:
        return 0
    _close_gap(lines, mask, (line - lines) // 64, entry)
    record = _record(d, chunk)
    store_u32(record, USED, uint32(load_u32(record, USED) - uint32(1)))
    _add_live(d, hash_, -1)
    store_u32(load_i64(d, ROWS) + slot * load_i64(d, STRIDE), 0, uint32(load_i64(d, FREE_ROW)))
    store_i64(d, FREE_ROW, slot)
    _mark(d, slot, REMOVED)
    return 1


@helper
def _close_gap(lines, mask, gap, entry):
    """Free an entry of line `gap`: each entry behind it whose search passes the gap moves there.

    Knuth, The Art of Computer Programming, volume 3, section 6.4, algorithm R.
    """
    place, other = gap, entry
    while True:
        other += 1
        if other == 4:
            place, other = (place + 1) & mask, 0
        line, to = lines + place * 64, lines + gap * 64
        if load_u32(line, 8 + other) == uint32(0):
            break
        hash_ = load_u64(line, other)
        if ((place - _home(hash_, mask)) & mask) >= ((place - gap) & mask):
            _put(to, entry, hash_, load_u32(line, 8 + other), load_u32(line, 12 + other))
            gap, entry = place, other
    store_u32(lines + gap * 64, 8 + entry, uint32(0))


@inlined
def _make_room(d, hash_):
    """Split the full chunk of a hash, or enlarge it where hashes are so alike that splits help little.

    A snapshot's rows come ordered by hash, so that those of its beginning are alike: a few more splits, and
    a larger directory, serve the rows that follow.
    """
    record = _record(d, _chunk_of(d, hash_))
    chunks = load_i64(d, CHUNKS) - load_i64(d, EARLY_CHUNKS)
    rows = load_i64(d, NEXT_SLOT)
    splits = load_u32(record, MASK) == uint32(CHUNK_LINES - 1) and chunks * FEWEST_ROWS <= rows
    if splits and int64(load_u32(record, LEVEL)) == load_i64(d, SHIFT):
        splits = _double_directory(d)
    if splits:
        _split(d, hash_)
    else:
        _enlarge(d, hash_)


@inlined
def _double_directory(d):
    """Give each part of the directory two places, in its place. Returns whether it may be so large."""
    shift, directory = load_i64(d, SHIFT), load_i64(d, DIRECTORY)
    parts = int64(FIRST_CHUNKS) << (FIRST_LEVEL - shift)
    if 2 * parts > max(LARGEST_DIRECTORY * load_i64(d, CHUNKS), load_i64(d, EARLY_PARTS)):
        return False
    for part in range(parts - 1, -1, -1):
        chunk = load_u32(directory, part)
        store_u32(directory, 2 * part, chunk)
        store_u32(directory, 2 * part + 1, chunk)
    store_i64(d, SHIFT, shift - 1)
    return True


@helper
def _point(d, prefix, level, chunk):
    """The positions with this value of position >> level belong to the chunk."""
    shift, directory = load_i64(d, SHIFT), load_i64(d, DIRECTORY)
    first = prefix << (level - shift)
    for part in range(first, first + (int64(1) << (level - shift))):
        store_u32(directory, part, uint32(chunk))


@helper
def _take(d, runs, level):
    """A new chunk as long as `runs` ordinary ones. Its lines are all zero."""
    chunk = load_i64(d, CHUNKS)
    store_i64(d, CHUNKS, chunk + runs)
    record = _record(d, chunk)
    store_u32(record, USED, uint32(0))
    store_u32(record, LEVEL, uint32(level))
    store_u32(record, MASK, uint32(runs * CHUNK_LINES - 1))
    return chunk


@helper
def begin(d):
    """The chunks of an empty index."""
    for part in range(FIRST_CHUNKS):
        _point(d, part, int64(FIRST_LEVEL), _take(d, int64(1), int64(FIRST_LEVEL)))


@inlined
def _split(d, hash_):
    """Move the upper half of the positions of a hash's chunk to a new chunk."""
    chunk, scratch = _chunk_of(d, hash_), load_i64(d, SCRATCH)
    lines, record = lines_of(d, chunk)[0], _record(d, chunk)
    level = int64(load_u32(record, LEVEL)) - 1
    for word in range(_CHUNK_BYTES // 8):
        store_u64(scratch, word, load_u64(lines, word))
        store_u64(lines, word, _U(0))
    new = _take(d, int64(1), level)
    store_u32(record, LEVEL, uint32(level))
    _point(d, int64(position(hash_) >> _U(level)) | 1, level, new)
    upper_count = _spread(
        scratch, int64(CHUNK_LINES), lines, lines_of(d, new)[0], level, int64(CHUNK_LINES - 1)
    )
    store_u32(record, USED, uint32(load_u32(record, USED) - uint32(upper_count)))
    store_u32(_record(d, new), USED, uint32(upper_count))


@inlined
def _enlarge(d, hash_):
    """Move a chunk to twice as many lines."""
    old = _chunk_of(d, hash_)
    lines, mask = lines_of(d, old)
    record = _record(d, old)
    level = int64(load_u32(record, LEVEL))
    chunk = _take(d, (mask + 1) * 2 // CHUNK_LINES, level)
    to, wide = lines_of(d, chunk)
    _point(d, int64(position(hash_) >> _U(level)), level, chunk)
    _spread(lines, mask + 1, to, to, level, wide)
    store_u32(_record(d, chunk), USED, load_u32(record, USED))
    for word in range((mask + 1) * 8):  # sweeps go over all lines
        store_u64(lines, word, _U(0))


@helper
def _spread(lines, count, lower, upper, level, mask):
    """Put all entries of these lines into one of two chunks, by a bit of their positions.

    Returns how many went into the upper one.
    """
    upper_count = 0
    for i in range(count):
        line = lines + i * 64
        for entry in range(4):
            slot = load_u32(line, 8 + entry)
            if slot != uint32(0):
                hash_ = load_u64(line, entry)
                bit = int64(position(hash_) >> _U(level)) & 1
                to, free = _search(lower + bit * (upper - lower), mask, hash_)
                _put(to, free, hash_, slot, load_u32(line, 12 + entry))
                upper_count += bit
    return upper_count

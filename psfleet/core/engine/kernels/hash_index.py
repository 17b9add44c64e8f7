"""Finding an id's row: the index of a sparse table, as code that kernels call.

The index is a hash table of chunks that grows one chunk at a time (extendible hashing). A chunk is 256
lines of 64 bytes, which are cache lines. A line holds four entries:

    byte 0    hash hash hash hash    uint64 each: words 0 to 3
    byte 32   slot slot slot slot    uint32 each: words 8 to 11; a slot numbers a row in the arena
    byte 48   step step step step    uint32 each: words 12 to 15, the stamps

An entry is free while its slot is 0; within a chunk, probing goes from line to line until a free entry.
A stamp is the low half of the step at which the row was last pushed. To write it costs a push nothing,
because the line is in the cache, and a sweep over the lines finds rows of any age without reading the rows.

A directory maps a part of a hash to its chunk. The position of a hash in it is the quadratic function
h * (2 + h) of that part as a fraction h, whose slope doubles from one end to the other. So chunks at one
end hold twice as many rows as those at the other, some are about to be split at any time, and the index
takes much the same memory per row at any size. A full chunk is split in two in its place: nothing is
left behind, and no push waits for more than a few chunks. A split moves entries and never rows, which
keep their slots. (Rows on disk do change slots: sources/disk_rows.py then stores the new slot in the entry.)

`d` is the address of the table's descriptor, an array of int64; the names below are positions in it. The
functions are compiled into the kernels of sources/. They take no lock: a table has one caller at a time.
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

LINES = 0  # address of the lines of chunk 0, which those of the other chunks follow
ROWS = 1  # address of the rows' arena
DIRECTORY = 2  # address of the directory: a chunk's number (uint32) for each part of all positions
SHIFT = 3  # position >> SHIFT is the part of the directory of a position
NEXT_SLOT = 4  # the first slot that no row has had; slot 0 stands for no row
CHUNKS = 5  # the first chunk that is not in use
FREE_ROW = 6  # a slot whose row was removed (its first word names the next), or 0
STRIDE = 7  # bytes of a row
MARKS = 8  # address of an int64 per slot, the step of its last push in a table that updates all rows, or 0
RECORDS = 9  # address of the chunks' records, RECORD_SIZE bytes each
LIVE = 10  # address of the number of rows of each segment, int64
SCRATCH = 11  # address of memory for the lines of one chunk, which a split reads from
EARLY_CHUNKS = 12  # chunks that may be split beyond those that the rows allow, see _make_room
EARLY_PARTS = 13  # parts that the directory may have even if there are few chunks
FULL = 14  # a chunk is split once FULL of each 32 entries are in use
ADD, FILL = 15, 16  # addresses of `add` and `fill` of sources/index.py, which are compiled once
DESCRIPTOR_SIZE = 17

# A record has three uint32: the entries in use, the level, and the number of lines - 1 (a power of two - 1).
# A chunk of level k has all hashes with one value of position >> k, so a split lowers the level by 1.
USED, LEVEL, MASK = 0, 1, 2
RECORD_SIZE = 16  # bytes

CHUNK_LINES = 256
_CHUNK_BYTES = CHUNK_LINES * 64
FIRST_LEVEL = 62  # positions are below 3 << 62
FIRST_CHUNKS = 3
LARGEST_DIRECTORY = 8  # parts for each chunk; beyond it chunks are enlarged, not split
# Bits of a hash below those of the home line. Bits 40 to 49 choose the virtual shard: on one server they are
# much alike and would not spread rows over lines.
_LOW = 23
FULL_TO_CHANGE, FULL_TO_READ = 23, 28  # FULL of tables that grow, and of tables that are only read
# Rows for each chunk: with fewer, hashes are too much alike for splits to help, and chunks are enlarged.
FEWEST_ROWS = 256

SEGMENT_COUNT = 256
"""Number of segments. The top byte of a hash is its segment; sweeps and snapshots go segment by segment."""

REMOVED = -1  # value in MARKS of a slot without a row
_U = uint64


_call_add = called(int64(int64, uint64, int64))
_call_fill = called(void(int64, uint64, int64, int64, float64, float64, uint64))


@helper
def position(hash_):
    """Return a hash's position in the directory: 0 to below 3 << FIRST_LEVEL, as uint64.

    It rises with the segment (the top byte) and, within a segment, with the lowest 23 bits.
    """
    # h * (2 + h) for the fraction h = (segment, low bits) / 2**31, scaled by 2**62: integers, so no rounding.
    fraction = (hash_ >> _U(56)) << _U(_LOW) | hash_ & _U((1 << _LOW) - 1)  # of 2**31
    return fraction * (fraction + _U(1 << 32))


@helper
def _home(hash_, mask):
    """Return the number of the line in its chunk where the search for a hash begins."""
    return int64(hash_ >> _U(_LOW)) & mask


@helper
def _chunk_of(d, hash_):
    """Return the number of the chunk that has a hash."""
    part = position(hash_) >> _U(load_i64(d, SHIFT))
    return int64(load_u32(load_i64(d, DIRECTORY), int64(part)))


@helper
def first_line(d, hash_):
    """Return the address of the line where the search for a hash most likely begins."""
    # Taken as if the chunk had CHUNK_LINES lines, which saves reading its record. In an enlarged chunk it may
    # be another line of the chunk; a hash that is not found here is then searched for by `find_slow`.
    line = _home(hash_, CHUNK_LINES - 1)
    return load_i64(d, LINES) + _chunk_of(d, hash_) * _CHUNK_BYTES + line * 64


@helper
def second_line(d, hash_):
    """Return the address of the line behind `first_line`."""
    line = (_home(hash_, CHUNK_LINES - 1) + 1) & (CHUNK_LINES - 1)
    return load_i64(d, LINES) + _chunk_of(d, hash_) * _CHUNK_BYTES + line * 64


@helper
def prefetch_line(d, id_):
    """Return the hash of an id, and prefetch its first line."""
    hash_ = mix(uint64(id_))
    prefetch(first_line(d, hash_))
    return hash_


@helper
def _hits(line, hash_):
    """Return a bit mask: bit k is 1 if entry k of the line has this hash. No branch for each entry."""
    return (
        _U(load_u64(line, 0) == hash_)
        | _U(load_u64(line, 1) == hash_) << _U(1)
        | _U(load_u64(line, 2) == hash_) << _U(2)
        | _U(load_u64(line, 3) == hash_) << _U(3)
    )


@helper
def find_fast(line, hash_):
    """Return the slot of a hash if it is in this line, else 0."""
    # A free entry may hold the hash of a row that has left it. At most one entry of a line in use has a hash,
    # but a free one may have it too, and comes behind: chains have no gaps. Its slot is 0, as for no hit.
    hits = _hits(line, hash_)
    slot = int64(0)
    if hits != _U(0):
        slot = int64(load_u32(line, 8 + trailing_zeros(hits)))
    return slot


@helper
def touch_fast(line, hash_, step):
    """Return what `find_fast` does, and stamp the row as pushed at this step."""
    hits = _hits(line, hash_)
    slot = int64(0)
    if hits != _U(0):
        entry = trailing_zeros(hits)
        slot = int64(load_u32(line, 8 + entry))
        store_u32(line, 12 + entry, uint32(step))  # the stamp of a free entry means nothing
    return slot


@helper
def age_of(step, stamp):
    """Return the age of a stamp in steps: exact below 2**31, see sources/index.py `restamp`."""
    age = int64(uint32(step) - stamp) & 0xFFFFFFFF
    # An age near 2**32 is a stamp from the future: the table has gone back to a snapshot. It counts as new.
    return int64(0) if age >= 3 << 30 else age


@helper
def _record(d, chunk):
    """Return the address of a chunk's record."""
    return load_i64(d, RECORDS) + chunk * RECORD_SIZE


@helper
def lines_of(d, chunk):
    """Return the address of a chunk's lines and their number - 1."""
    lines = load_i64(d, LINES) + chunk * _CHUNK_BYTES
    return lines, int64(load_u32(_record(d, chunk), MASK))


@helper
def _search(lines, mask, hash_):
    """Return the line's address and the entry of a hash, or those of the free entry that ends its chain."""
    # The chain ends, because a chunk is split or enlarged long before it is full.
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
    """Find the chunk of a hash and search it; return the line's address and the entry as `_search` does."""
    lines, mask = lines_of(d, _chunk_of(d, hash_))
    return _search(lines, mask, hash_)


@helper
def find_slow(d, hash_):
    """Return the slot of a hash, or 0 if it is unknown. Searches all of its chain."""
    line, entry = place_of(d, hash_)
    return int64(load_u32(line, 8 + entry))


@helper
def touch_slow(d, hash_, step):
    """Return what `find_slow` does, and stamp the row as pushed at this step."""
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
    """Add an unknown hash, stamped with this step; return its slot. The caller writes the row's values."""
    # Room first: a split moves entries, so the place for the hash is searched for afterwards. A loop, because
    # all entries may go into one half, which is still full. (FULL of 32 entries, FULL / 8 of a line.)
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
    """Return the slot of a hash that is pushed at this step; minus the slot if its row is new."""
    return _call_add(load_i64(d, ADD), (d, hash_, step))


@inlined
def fill(d, out, hash_, dim, kind, low, span, stream):
    """Write the first values of a row, as `fill_row` of hashing.py."""
    _call_fill(load_i64(d, FILL), (out, hash_, dim, kind, low, span, stream))


@helper
def remove(d, hash_):
    """Remove a hash; return 1, or 0 if it is unknown. Its slot becomes the first of the free slots."""
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
    """Free an entry of line `gap`, and move entries behind it so that no search ends at the gap too soon.

    An entry may move if its home line is not behind the gap. It leaves a gap in turn, and so on to the end of
    the chain. So there are no tombstones, and a table that removes rows never has to be rebuilt.

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
    # The rows are those of the whole table (NEXT_SLOT), so that a burst of like hashes may split only until
    # chunks have FEWEST_ROWS rows on average. A chunk that has only one part of the
    # directory can be split after the directory has doubled.
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
    """Halve each part of the directory, which so has twice as many; return False if it may not grow."""
    shift, directory = load_i64(d, SHIFT), load_i64(d, DIRECTORY)
    parts = int64(FIRST_CHUNKS) << (FIRST_LEVEL - shift)
    if 2 * parts > max(LARGEST_DIRECTORY * load_i64(d, CHUNKS), load_i64(d, EARLY_PARTS)):
        return False
    # In place, from the end: part k goes to 2k and 2k + 1, which have been read already.
    for part in range(parts - 1, -1, -1):
        chunk = load_u32(directory, part)
        store_u32(directory, 2 * part, chunk)
        store_u32(directory, 2 * part + 1, chunk)
    store_i64(d, SHIFT, shift - 1)
    return True


@helper
def _point(d, prefix, level, chunk):
    """Let the directory map all positions with position >> level == prefix to a chunk."""
    shift, directory = load_i64(d, SHIFT), load_i64(d, DIRECTORY)
    first = prefix << (level - shift)
    for part in range(first, first + (int64(1) << (level - shift))):
        store_u32(directory, part, uint32(chunk))


@helper
def _take(d, runs, level):
    """Return the number of a new chunk as long as `runs` ordinary ones. Its lines are all zero."""
    chunk = load_i64(d, CHUNKS)
    store_i64(d, CHUNKS, chunk + runs)
    record = _record(d, chunk)
    store_u32(record, USED, uint32(0))
    store_u32(record, LEVEL, uint32(level))
    store_u32(record, MASK, uint32(runs * CHUNK_LINES - 1))
    return chunk


@helper
def begin(d):
    """Set up the FIRST_CHUNKS chunks of an empty index."""
    for part in range(FIRST_CHUNKS):
        _point(d, part, int64(FIRST_LEVEL), _take(d, int64(1), int64(FIRST_LEVEL)))


@inlined
def _split(d, hash_):
    """Move the upper half of the positions of a hash's chunk to a new chunk."""
    # The lines are copied to SCRATCH and cleared; then all entries go from there to the lower or upper chunk.
    # To take the upper ones out in place would need a chain to be closed for each of them.
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
    """Move a chunk to a new one of twice as many lines. Its own lines stay behind, cleared and unused."""
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
    """Put all entries of `count` lines into one of two chunks, by bit `level` of their positions.

    Returns the number of entries in the upper chunk. `lower` may be `upper`, to move all to one chunk.
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

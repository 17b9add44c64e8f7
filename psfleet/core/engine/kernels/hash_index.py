"""Hash index of a sparse table: finds, adds and removes the row of an id. Kernels contain these functions.

A table's rows lie one behind the other in one block of memory, the *arena*. A *slot* is the number of a row's
place there, from 1. The index maps the hash of an id to the slot of the id's row, and keeps the step of the
row's last push. It does not store ids: no two ids have the same hash, and `unmix` computes an id from its
hash. No lock is taken: a table has one caller at a time.

The index is an extendible hash table: it consists of *chunks*, and grows by splitting one chunk at a time. A
chunk is 256 lines of 64 bytes, the size of a cache line. A line holds four entries:

    byte 0    hash hash hash hash    uint64 each: words 0 to 3
    byte 32   slot slot slot slot    uint32 each: words 8 to 11, or 0 in a free entry
    byte 48   step step step step    uint32 each: words 12 to 15, the stamps

Any order within a line costs one cache miss. With this one, the four hashes that a search compares are
neighbours.

A *stamp* is the lower 32 bits of the step at which the row was last pushed. A push writes it at no cost,
because the line is in the cache already, and a sweep over the lines finds rows of any age without reading the
rows.

A look-up goes from the hash to a chunk, and from the chunk's home line to the entry:

    hash --> position --> part of the directory --> chunk --> home line --> entry
                                                                  |
                                                                  +--> lines behind it, up to a free entry

The directory is an array that divides all positions into equal parts and has the number of a chunk for each
part. For the fraction h = (bits of the hash) / 2**31, the position is the quadratic function h * (2 + h). The
slope of this function doubles from one end to the other, so chunks at one end hold twice as many rows as
chunks at the other. As a result chunks fill up at different times, and the index needs about the same memory
for each row at any size.

A full chunk is split in two. A split moves entries and never rows, so a row keeps its slot, and no push waits
for more than a few chunks. (Rows on disk do change slots: sources/disk_rows.py then stores the new slot in
the entry.)

`d` is the address of the table's *descriptor*, an array of int64. The constants below are positions in the
descriptor.
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

LINES = 0  # address of the lines of all chunks, in the order of the chunks' numbers
ROWS = 1  # address of the rows' arena
DIRECTORY = 2  # address of the directory: uint32, the number of a chunk for each part
SHIFT = 3  # position >> SHIFT is the number of a position's part of the directory
NEXT_SLOT = 4  # the first slot (in memory) that has never had a row; slot 0 means no row
CHUNKS = 5  # number of chunks; also the number that the next new chunk gets
FREE_ROW = 6  # first free slot, or 0; the first word of a free row is the next free slot
STRIDE = 7  # bytes of a row
MARKS = 8  # address of int64 [slots], each row's last push step; 0 unless steps update all rows
RECORDS = 9  # address of the records of all chunks, RECORD_SIZE bytes each
LIVE = 10  # address of int64 [SEGMENT_COUNT], the number of rows of each segment
SCRATCH = 11  # address of scratch memory for the lines of one chunk, used by a split
EARLY_CHUNKS = 12  # number of chunks that splits may add before FEWEST_ROWS applies, see _make_room
EARLY_PARTS = 13  # parts that the directory may have even with few chunks
FULL = 14  # a chunk is split once FULL / 32 of its entries are in use
ADD, FILL = 15, 16  # addresses of `add` and `fill` of sources/index.py, which are compiled once
DESCRIPTOR_SIZE = 17

# A record has three uint32: the number of entries in use, the level, and the number of lines - 1. A chunk of
# level k has all hashes with one value of position >> k, so a split lowers the level by 1.
USED, LEVEL, MASK = 0, 1, 2
# Bytes, of which 12 are used: a divisor of 64, so that no record is in two cache lines.
RECORD_SIZE = 16

CHUNK_LINES = 256  # small enough that a push waits only microseconds for a split
_CHUNK_BYTES = CHUNK_LINES * 64
FIRST_LEVEL = 62  # positions are below 3 << 62
FIRST_CHUNKS = 3  # one for each value of position >> FIRST_LEVEL: 0, 1 or 2
# Most parts per chunk. Beyond this number chunks are enlarged, not split, so that ids with similar hashes
# cannot make the directory grow without limit. Random ids need little more than 2 parts for each chunk.
LARGEST_DIRECTORY = 8
# Number of bits of a hash below the bits that choose the home line. Bits 40 to 49 choose the virtual shard.
# All rows of one server have similar values there, so these bits would not spread rows over lines. The 23
# bits and the 8 of the segment make a fraction of 31 bits, the longest whose position fits into 64 bits.
_LOW = 23
# FULL of tables that grow, and of tables that are only read. At 23 / 32 = 72 %, 5 % of all entries are
# outside their home line (decision 3). A table that is only read saves memory at 28 / 32: its index takes 26
# bytes a row instead of 32. In return 8 to 9 % of its entries are outside their home line, and a look-up
# takes 14 ns instead of 12.
FULL_TO_CHANGE, FULL_TO_READ = 23, 28
# Rows for each chunk. With fewer rows, hashes are too similar for splits to help, and chunks are enlarged
# instead. Random ids stay above this number: their chunks have 460 rows or more on average.
FEWEST_ROWS = 256

SEGMENT_COUNT = 256
"""Number of segments. The top byte of a hash is its segment; sweeps and snapshots process a table by segment.
"""

REMOVED = -1  # value in MARKS of a slot without a row
_U = uint64


_call_add = called(int64(int64, uint64, int64))
_call_fill = called(void(int64, uint64, int64, int64, float64, float64, uint64))


@helper
def position(hash_):
    """Return the position of a hash in the directory, a uint64 from 0 to below 3 << FIRST_LEVEL.

    The position rises with the segment (the top byte of the hash) and, within a segment, with the lowest 23
    bits.
    """
    # h * (2 + h) for the fraction h = (segment, lowest bits) / 2**31, times 2**62. Integers, so nothing is
    # rounded.
    fraction = (hash_ >> _U(56)) << _U(_LOW) | hash_ & _U((1 << _LOW) - 1)  # of 2**31
    return fraction * (fraction + _U(1 << 32))


@helper
def _home(hash_, mask):
    """Return the number of a hash's home line: the line in its chunk where the search for the hash begins."""
    return int64(hash_ >> _U(_LOW)) & mask


@helper
def _chunk_of(d, hash_):
    """Return the number of the chunk (part of the index) that a hash belongs to."""
    part = position(hash_) >> _U(load_i64(d, SHIFT))
    return int64(load_u32(load_i64(d, DIRECTORY), int64(part)))


@helper
def first_line(d, hash_):
    """Return the address of a hash's home line in a chunk of ordinary size.

    The home line is the 64 bytes with four index entries where the search for the hash begins.
    """
    # This assumes that the chunk has CHUNK_LINES lines, which saves reading the chunk's record. In an
    # enlarged chunk the result may be another line of the chunk. The hash is then not found there, and
    # `find_slow` searches for it.
    line = _home(hash_, CHUNK_LINES - 1)
    return load_i64(d, LINES) + _chunk_of(d, hash_) * _CHUNK_BYTES + line * 64


@helper
def second_line(d, hash_):
    """Return the address of the second line (of four index entries) to search for a hash."""
    # Kernels look here before they search: three of four hashes outside their home line are in this one. Like
    # `first_line` this assumes CHUNK_LINES lines.
    line = (_home(hash_, CHUNK_LINES - 1) + 1) & (CHUNK_LINES - 1)
    return load_i64(d, LINES) + _chunk_of(d, hash_) * _CHUNK_BYTES + line * 64


@helper
def prefetch_line(d, id_):
    """Return the hash of an id, and prefetch the cache line where the search for the hash begins."""
    hash_ = mix(uint64(id_))
    prefetch(first_line(d, hash_))
    return hash_


@helper
def _hits(line, hash_):
    """Return a bit mask: bit k is 1 if entry k of a line (four index entries) has this hash."""
    # All four are compared, without a branch for each: the processor could not predict these branches.
    return (
        _U(load_u64(line, 0) == hash_)
        | _U(load_u64(line, 1) == hash_) << _U(1)
        | _U(load_u64(line, 2) == hash_) << _U(2)
        | _U(load_u64(line, 3) == hash_) << _U(3)
    )


@helper
def find_fast(line, hash_):
    """Return the slot (row number) of a hash, or 0 if this line does not have the hash.

    The search then goes on in other lines. A line is four index entries in 64 bytes.
    """
    # A free entry may still hold the hash of a removed row. Entries in use have no gaps between them, so the
    # free entry is behind the entry in use, and trailing_zeros finds the latter first. If only a free entry
    # matches, its slot is 0, the same as for no match.
    hits = _hits(line, hash_)
    slot = int64(0)
    if hits != _U(0):
        slot = int64(load_u32(line, 8 + trailing_zeros(hits)))
    return slot


@helper
def touch_fast(line, hash_, step):
    """Return the slot (row number) of a hash as `find_fast` does; stamp the row as pushed at this step."""
    hits = _hits(line, hash_)
    slot = int64(0)
    if hits != _U(0):
        entry = trailing_zeros(hits)
        slot = int64(load_u32(line, 8 + entry))
        store_u32(line, 12 + entry, uint32(step))  # the stamp of a free entry means nothing
    return slot


@helper
def age_of(step, stamp):
    """Return the number of steps since a stamp, the lower 32 bits of an earlier step.

    Exact below 2**31 steps; `restamp` of sources/index.py keeps stamps within this range.
    """
    age = int64(uint32(step) - stamp) & 0xFFFFFFFF
    # An age near 2**32 belongs to a stamp later than `step`: the table has been restored from a snapshot.
    # Such a row counts as new. `restamp` leaves ages up to 2**31 and comes before 2**30 further steps, so
    # a true age is below 3 << 30.
    return int64(0) if age >= 3 << 30 else age


@helper
def _record(d, chunk):
    """Return the address of the record of a chunk (part of the index): its entries in use, level and size."""
    return load_i64(d, RECORDS) + chunk * RECORD_SIZE


@helper
def lines_of(d, chunk):
    """Return the address of the lines of a chunk (part of the index), and their number - 1, a bit mask.

    A line is four index entries in 64 bytes.
    """
    lines = load_i64(d, LINES) + chunk * _CHUNK_BYTES
    return lines, int64(load_u32(_record(d, chunk), MASK))


@helper
def _search(lines, mask, hash_):
    """Find a hash in a chunk; return the address of the line that has it, and the number of its entry there.

    For an unknown hash the result is the free entry where the search ended, which is where the hash can be
    added.
    """
    # The search ends, because a chunk is split or enlarged long before all entries are in use. It goes entry
    # by entry, and not by `_hits`, because it also looks for the first free entry.
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
    """Find a hash in the index; return the address of the line that has it, and the number of its entry.

    A line is four index entries, numbered from 0. For an unknown hash, the result is the free entry where the
    hash can be added.
    """
    lines, mask = lines_of(d, _chunk_of(d, hash_))
    return _search(lines, mask, hash_)


@helper
def find_slow(d, hash_):
    """Return the slot (row number) of a hash, or 0 if the hash is unknown.

    Searches all lines of the index where the hash can be.
    """
    line, entry = place_of(d, hash_)
    return int64(load_u32(line, 8 + entry))


@helper
def touch_slow(d, hash_, step):
    """Return the slot (row number) of a hash as `find_slow` does; stamp the row as pushed at this step."""
    line, entry = place_of(d, hash_)
    slot = int64(load_u32(line, 8 + entry))
    if slot != 0:
        store_u32(line, 12 + entry, uint32(step))
    return slot


@helper
def _mark(d, slot, value):
    # 0 is the mark of a new row: no step has this number, so the next `rest` updates the row unless a push
    # does.
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


# Inlined, as are the helpers below that have one caller: numba makes machine code of every other helper,
# which takes time (decision 2).
@inlined
def insert(d, hash_, step):
    """Add an unknown hash, with this step as that of its last push, and return its slot (row number).

    The caller writes the row's values.
    """
    # Make room before the search for a free entry, because a split moves entries. It takes a loop, because a
    # split may leave all entries in the same half, which is then still full. The hash may belong to another
    # chunk after it, with another record. FULL is for 32 entries, so a line of 4 has FULL / 8.
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
    """Return the slot (row number) of a hash pushed at this step, or minus the slot of an added row."""
    return _call_add(load_i64(d, ADD), (d, hash_, step))


@inlined
def fill(d, out, hash_, dim, kind, low, span, stream):
    """Write the initial values of a row to the address `out`, as `fill_row` of hashing.py does."""
    _call_fill(load_i64(d, FILL), (out, hash_, dim, kind, low, span, stream))


@helper
def remove(d, hash_):
    """Remove a hash; return 1, or 0 if the hash is unknown. Its slot goes to the next row that is added."""
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
    """Free an entry of line `gap`, and close the gap so that searches still find the entries behind it.

    A search ends at a free entry. So an entry behind the gap moves into the gap, unless its home line is
    behind the gap. The moved entry leaves a gap in turn, and so on until a free entry. So removed rows leave
    no markers behind, and the index never has to be rebuilt.

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
    """Split the full chunk of a hash, or enlarge it if the hashes are too similar for a split to help.

    The rows of a snapshot are ordered by hash, so the first rows that are loaded have similar hashes.
    EARLY_CHUNKS and EARLY_PARTS then allow more splits and a larger directory, which the later rows need
    anyway.
    """
    # `rows` counts the whole table, so a burst of similar hashes may split chunks only until the table has
    # FEWEST_ROWS rows for each chunk. It is NEXT_SLOT, which removals do not lower: they remove no chunks
    # either. (It does not count rows in a file; for these DiskRowMemory raises EARLY_CHUNKS.) An enlarged
    # chunk is never split: SCRATCH has no space for its lines. A chunk with just one part of the directory
    # can be split after the directory has doubled.
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
    """Divide each part of the directory into two; return False if the directory may not grow."""
    shift, directory = load_i64(d, SHIFT), load_i64(d, DIRECTORY)
    parts = int64(FIRST_CHUNKS) << (FIRST_LEVEL - shift)
    if 2 * parts > max(LARGEST_DIRECTORY * load_i64(d, CHUNKS), load_i64(d, EARLY_PARTS)):
        return False
    # In place, from the end: part k goes to 2k and 2k + 1, whose old contents have been copied already.
    for part in range(parts - 1, -1, -1):
        chunk = load_u32(directory, part)
        store_u32(directory, 2 * part, chunk)
        store_u32(directory, 2 * part + 1, chunk)
    store_i64(d, SHIFT, shift - 1)
    return True


@helper
def _point(d, prefix, level, chunk):
    """Let the directory refer to a chunk for all positions with position >> level == prefix."""
    shift, directory = load_i64(d, SHIFT), load_i64(d, DIRECTORY)
    first = prefix << (level - shift)
    for part in range(first, first + (int64(1) << (level - shift))):
        store_u32(directory, part, uint32(chunk))


@helper
def _take(d, runs, level):
    """Return the number of a new, empty chunk with as many lines as `runs` ordinary chunks."""
    # There is no check for space: the table has reserved addresses for it (`HostRowMemory.has_lines`), and
    # new lines are zeros, that is, free entries. So the directory has space too: `HostRowMemory._most` has
    # reserved LARGEST_DIRECTORY parts for each chunk that it has reserved, which is more than EARLY_PARTS.
    chunk = load_i64(d, CHUNKS)
    store_i64(d, CHUNKS, chunk + runs)
    record = _record(d, chunk)
    store_u32(record, USED, uint32(0))
    store_u32(record, LEVEL, uint32(level))
    store_u32(record, MASK, uint32(runs * CHUNK_LINES - 1))
    return chunk


@helper
def begin(d):
    """Set up the first chunks (parts) of an empty index."""
    for part in range(FIRST_CHUNKS):
        _point(d, part, int64(FIRST_LEVEL), _take(d, int64(1), int64(FIRST_LEVEL)))


@inlined
def _split(d, hash_):
    """Split the chunk of a hash: move the upper half of its positions to a new chunk."""
    # Copy the lines to SCRATCH and clear them; then put each entry into the lower or the upper chunk. Taking
    # entries out of the old chunk one by one would need `_close_gap` for each entry.
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
    """Move the entries of a chunk to a new chunk with twice as many lines.

    The old lines stay, cleared and unused: a chunk's number gives the address of its lines, and there is no
    list of free numbers. This wastes little, because only ids with similar hashes lead here.
    """
    old = _chunk_of(d, hash_)
    lines, mask = lines_of(d, old)
    record = _record(d, old)
    level = int64(load_u32(record, LEVEL))
    chunk = _take(d, (mask + 1) * 2 // CHUNK_LINES, level)
    to, wide = lines_of(d, chunk)
    _point(d, int64(position(hash_) >> _U(level)), level, chunk)
    _spread(lines, mask + 1, to, to, level, wide)
    store_u32(_record(d, chunk), USED, load_u32(record, USED))
    # Sweeps go over all lines. And a kernel that still has the address of an old line (sources/push.txt) must
    # not find its hash there, or it would write the age of the row into a line that nothing reads.
    for word in range((mask + 1) * 8):
        store_u64(lines, word, _U(0))


@helper
def _spread(lines, count, lower, upper, level, mask):
    """Put all entries of `count` lines into the lower or the upper chunk, by bit `level` of their positions.

    Returns the number of entries in the upper chunk. With `lower` equal to `upper`, all entries go to one
    chunk.
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

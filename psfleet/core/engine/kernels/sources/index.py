"""Kernels on the index of a sparse table: look ids up, add them, list rows by age, copy rows.

`d` is the address of the index's descriptor. psfleet/core/engine/kernels/hash_index.py draws the index and
has the functions that these kernels call. A *slot* is the number of a row's place in the table's memory, or 0
for no row:

    id -- mix --> hash -- index --> slot        row = ROWS + slot * STRIDE

index_removal.py has the kernels that only tables that remove rows need, because compiling them takes seconds.
"""
from numba import float64, int64, uint32, uint64, void

from psfleet.core.engine.kernels.hashing import fill_row, mix, unmix
from psfleet.core.engine.kernels.intrinsics import (entry, helper, kernel, load_i64, load_u32, load_u64,
                                        prefetch, prefetch_write, read_i64, store_f32, read_f32,
                                        store_i64, store_u32)
from psfleet.core.engine.kernels.hash_index import (CHUNKS, CHUNK_LINES, DIRECTORY, FREE_ROW, LINES, ROWS,
                                        SHIFT, STRIDE, add as added, age_of, begin, find_fast,
                                        find_slow, first_line, insert, lines_of, position,
                                        prefetch_line, touch_fast, touch_slow)

# Ids between the prefetch of an index line, or of a row, and its use. 6 and 12 differed from 24 by no more
# than the noise (benchmarks/README.md).
AHEAD = 24
OLDEST = 1 << 31  # largest age in steps; older rows count as this old, which keeps `age_of` unambiguous
LOW_BITS = uint64((1 << 56) - 1)


@helper
def entry_at(lines, number):
    """Return the address of the line that has index entry `number`, and the entry's position in it, 0 to 3.

    lines: address of line 0. A line has four entries in 64 bytes.
    """
    return lines + (number >> 2) * 64, number & 3


@entry(int64(int64, uint64, int64))
def add(d, hash_, step):
    """Return the slot (row number) of a hash that is pushed at this step, or minus the slot of an added row.

    A kernel first looks into one or two lines by itself. If the hash is not there, the kernel calls this
    function by its address, so that the code that splits chunks is compiled once and not into each kernel.
    """
    # Only the slow search, because the caller's fast one has failed. The sign reports a new row, whose values
    # only the caller can write.
    slot = touch_slow(d, hash_, step)
    return -insert(d, hash_, step) if slot == 0 else slot


@entry(void(int64, uint64, int64, int64, float64, float64, uint64))
def fill(out, hash_, dim, kind, low, span, stream):
    """Write the initial values of a row, as `fill_row` does. Kernels call it by its address, as `add`."""
    fill_row(out, hash_, dim, kind, low, span, stream)


@kernel(void(int64))
def make(d):
    """Set up an empty index, given a descriptor whose memory is all zero."""
    begin(d)


@kernel(int64(int64, int64, int64, int64))
def locate(d, ids, n, slots):
    """Write the slot (row number) of each id, 0 for an unknown id; return the number of unknown ids.

    ids, slots: addresses of int64 [n].
    """
    # Each hash is computed twice, for the prefetch and again 24 ids later. `push` and `pull`, which run for
    # every batch, avoid that with a ring and save 3 ns (decision 3).
    unknown = 0
    for i in range(n):
        if i + AHEAD < n:
            prefetch_line(d, read_i64(ids, i + AHEAD))
        hash_ = mix(uint64(read_i64(ids, i)))
        slot = find_fast(first_line(d, hash_), hash_)
        if slot == 0:
            slot = find_slow(d, hash_)
        if slot == 0:
            unknown += 1
        store_i64(slots, i, slot)
    return unknown


@kernel(int64(int64, int64, int64, int64, int64))
def touch(d, ids, n, step, slots):
    """Write the slot (row number) of each id as `locate` does, and stamp the rows as pushed at this step.

    ids, slots: addresses of int64 [n]. Returns the number of unknown ids.
    """
    unknown = 0
    for i in range(n):
        if i + AHEAD < n:
            prefetch_line(d, read_i64(ids, i + AHEAD))
        hash_ = mix(uint64(read_i64(ids, i)))
        slot = touch_fast(first_line(d, hash_), hash_, step)
        if slot == 0:
            slot = touch_slow(d, hash_, step)
        if slot == 0:
            unknown += 1
        store_i64(slots, i, slot)
    return unknown


@kernel(void(int64, int64, int64, int64, int64))
def place(d, ids, n, steps, slots):
    """Write the slot (row number) of each id, after adding unknown ids. Stamp rows as pushed at steps[i].

    ids, steps, slots: addresses of int64 [n]. The caller writes the values of new rows.
    """
    # No `touch_fast` first: rows that are restored or loaded are mostly new, so it would mostly fail.
    for i in range(n):
        if i + AHEAD < n:
            prefetch_line(d, read_i64(ids, i + AHEAD))
        hash_ = mix(uint64(read_i64(ids, i)))
        step = read_i64(steps, i)
        store_i64(slots, i, abs(added(d, hash_, step)))


@kernel(int64(int64, int64, int64, int64, int64, int64, int64, int64, int64))
def collect(d, first, last, step, least, most, ids, slots, ages):
    """Write id, slot (row number) and age of the rows in segments `first` to `last` - 1; return their number.

    A segment is all hashes with one top byte. The age is the number of steps since the last push. Only rows
    with an age of `least` to `most` are written, in the order of the index. ids, slots, ages: addresses of
    int64, one for each row.
    """
    #     hashes of the segments     low ............................ high
    #     parts of the directory     | chunk 7 | chunk 7 | chunk 2 | ...
    #
    # Positions in the directory rise with the segment, so these segments occupy a range of the directory. A
    # chunk occupies consecutive parts, so comparing each part with the one before is enough to visit each
    # chunk once. The first and the last chunk may also have rows of other segments, which `low` and `high`
    # exclude.
    count, before = 0, int64(-1)
    if first == last:  # for 0 segments from 0 on, last - 1 would wrap around to the last segment
        return count
    shift, directory = load_i64(d, SHIFT), load_i64(d, DIRECTORY)
    low, high = uint64(first) << uint64(56), ((uint64(last) - uint64(1)) << uint64(56)) | LOW_BITS
    for part in range(
        int64(position(low) >> uint64(shift)), int64(position(high) >> uint64(shift)) + 1
    ):
        chunk = int64(load_u32(directory, part))
        if chunk == before:
            continue
        before = chunk
        lines, mask = lines_of(d, chunk)
        for number in range((mask + 1) * 4):
            line, entry = entry_at(lines, number)
            # The age first, as it excludes nearly all entries of a scan for changed or expired rows. A free
            # entry has an arbitrary stamp; its slot is 0.
            age = age_of(step, load_u32(line, 12 + entry))
            if age < least or age > most:
                continue
            slot, hash_ = int64(load_u32(line, 8 + entry)), load_u64(line, entry)
            if slot != 0 and hash_ >= low and hash_ <= high:
                store_i64(ids, count, int64(unmix(hash_)))
                store_i64(slots, count, slot)
                store_i64(ages, count, age)
                count += 1
    return count


@kernel(void(int64, int64))
def freed(d, slots):
    """Write the free slots, whose rows were removed and which no new row has taken yet, to int64 at `slots`.
    """
    #     FREE_ROW --> slot 9 --> slot 4 --> 0        each arrow is the first word of a free row
    count, slot = 0, load_i64(d, FREE_ROW)
    while slot != 0:
        store_i64(slots, count, slot)
        count += 1
        slot = int64(load_u32(load_i64(d, ROWS) + slot * load_i64(d, STRIDE), 0))


@kernel(void(int64, int64, int64))
def restamp(d, old, new):
    """Rewrite all stamps (low bits of the steps of last pushes) when the table's step becomes `new`.

    Each row keeps the step of its last push. A stamp has 32 bits, so this must be called before the step has
    grown by 2**30, if need be with old == new. A row that has not been pushed for more than 2**31 steps is
    stamped as pushed 2**31 steps ago.
    """
    # The lines of all chunks are one block, so no directory is needed. Free entries are rewritten too: their
    # stamps mean nothing. A push later than `new` is possible if the table's step is set back; the row counts
    # as pushed now, as in `age_of`.
    for number in range(load_i64(d, CHUNKS) * CHUNK_LINES * 4):
        line, entry = entry_at(load_i64(d, LINES), number)
        push_step = old - age_of(old, load_u32(line, 12 + entry))
        store_u32(line, 12 + entry, uint32(new - min(max(new - push_step, 0), OLDEST)))


@kernel(void(int64, int64, int64, int64, int64))
def gather(d, slots, n, width, out):
    """Copy from rows: out[i] = the first `width` float32 of row number slots[i].

    slots: int64 [n]. out: float32 [n, width].
    """
    # Only the first line of a row is prefetched: for rows of 48 values this took 35 ns a row, all lines took
    # 36, and none 42.
    rows, stride = load_i64(d, ROWS), load_i64(d, STRIDE)
    for i in range(n):
        if i + AHEAD < n:
            prefetch(rows + read_i64(slots, i + AHEAD) * stride)
        row = rows + read_i64(slots, i) * stride
        for k in range(width):
            store_f32(out, i * width + k, read_f32(row, k))


@kernel(void(int64, int64, int64, int64, int64))
def scatter(d, slots, n, width, values):
    """Copy to rows: the first `width` float32 of row number slots[i] = values[i].

    slots: int64 [n]. values: float32 [n, width].
    """
    rows, stride = load_i64(d, ROWS), load_i64(d, STRIDE)
    for i in range(n):
        if i + AHEAD < n:
            prefetch_write(rows + read_i64(slots, i + AHEAD) * stride)
        row = rows + read_i64(slots, i) * stride
        for k in range(width):
            store_f32(row, k, read_f32(values, i * width + k))

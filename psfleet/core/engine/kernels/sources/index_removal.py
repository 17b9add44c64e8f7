"""Kernels for tables that remove rows: count pushes before admission, remove, decay scores, count ages.

They work on the index of psfleet/core/engine/kernels/hash_index.py, whose descriptor is at address `d`. A
sweep visits all lines of all chunks in memory order; free entries have slot 0.
"""
from numba import float32, float64, int64, uint32, uint64, void

from psfleet.core.engine.kernels.hashing import mix, unmix
from psfleet.core.engine.kernels.intrinsics import (helper, kernel, load_f32, load_i64, load_u32, load_u64,
                                        read_i64, store_f32, store_i64, store_u32)
from psfleet.core.engine.kernels.hash_index import (CHUNKS, CHUNK_LINES, LINES, ROWS, STRIDE, add, age_of,
                                        prefetch_line, remove, touch_slow)

AHEAD = 24


@helper
def entry_at(lines, number):
    """Return the address of the line that has index entry `number`, and the entry's position in it, 0 to 3.

    lines: address of line 0. A line has four entries in 64 bytes.

    index.py has the same function: each file of sources/ is compiled as a module that no other one imports.
    """
    return lines + (number >> 2) * 64, number & 3


@kernel(int64(int64, int64, int64, int64, int64, int64))
def count(d, ids, n, step, threshold, outcomes):
    """Count a push of each id in an index of candidates, ids that get a row after `threshold` pushes.

    A row of this index is one uint32, the number of pushes so far. An id that reaches the threshold is
    removed from the index. Returns the number of these ids.

    outcomes: int64 [n], written: 1 if the id has reached the threshold, else 0.
    """
    total = 0
    for i in range(n):
        if i + AHEAD < n:
            prefetch_line(d, read_i64(ids, i + AHEAD))
        hash_ = mix(uint64(read_i64(ids, i)))
        slot = touch_slow(d, hash_, step)
        row = load_i64(d, ROWS) + slot * load_i64(d, STRIDE)
        pushes = int64(0) if slot == 0 else int64(load_u32(row, 0))
        if pushes + 1 >= threshold:
            if slot != 0:
                remove(d, hash_)
            total += 1
            store_i64(outcomes, i, 1)
            continue
        if slot == 0:
            row = load_i64(d, ROWS) + abs(add(d, hash_, step)) * load_i64(d, STRIDE)
        store_u32(row, 0, uint32(pushes + 1))
        store_i64(outcomes, i, 0)
    return total


@kernel(int64(int64, int64, int64))
def forget(d, ids, n):
    """Remove ids, int64 [n]; return the number of ids that the index had. Frees the slots of their rows."""
    count = 0
    for i in range(n):
        if i + AHEAD < n:
            prefetch_line(d, read_i64(ids, i + AHEAD))
        count += remove(d, mix(uint64(read_i64(ids, i))))
    return count


@kernel(int64(int64, int64, float64, float64, float64, float64, int64))
def decay(d, place, factor, worth, click_worth, least, ids):
    """Multiply the scores of every row by `factor`, and list the rows whose worth falls below `least`.

        row      [ weights, state | shows, clicks, ... ]        shows is float32 number `place` of the row
        worth    worth * (shows - clicks) + click_worth * clicks

    Writes the ids of the listed rows and returns their number. Removes nothing.
    """
    count = 0
    rows, stride = load_i64(d, ROWS), load_i64(d, STRIDE)
    for number in range(load_i64(d, CHUNKS) * CHUNK_LINES * 4):
        line, entry = entry_at(load_i64(d, LINES), number)
        slot = int64(load_u32(line, 8 + entry))
        if slot == 0:
            continue
        scores = rows + slot * stride + place * 4
        shows = float32(load_f32(scores, 0) * factor)
        clicks = float32(load_f32(scores, 1) * factor)
        store_f32(scores, 0, shows)
        store_f32(scores, 1, clicks)
        value = worth * (float64(shows) - float64(clicks)) + click_worth * float64(clicks)
        if value < least:
            store_i64(ids, count, int64(unmix(load_u64(line, entry))))
            count += 1
    return count


@kernel(void(int64, int64, int64, int64, int64))
def histogram(d, step, shift, bins, counts):
    """Count rows by age: counts[age >> shift], int64 [bins]. The last bin also counts all older rows.

    step: the table's step. Ages are in steps.
    """
    for number in range(load_i64(d, CHUNKS) * CHUNK_LINES * 4):
        line, entry = entry_at(load_i64(d, LINES), number)
        if load_u32(line, 8 + entry) != uint32(0):
            bin_ = min(age_of(step, load_u32(line, 12 + entry)) >> shift, bins - 1)
            store_i64(counts, bin_, load_i64(counts, bin_) + 1)

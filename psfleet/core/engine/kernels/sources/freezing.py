"""Kernels of a frozen view of a table, which a snapshot reads while training goes on
(tables/row_snapshot.py).

A view has one bit for each slot (`bits`), set while the row has still to be read. Before a row changes it is
claimed and copied, so that the view keeps the values of its beginning.
"""
from numba import int64, uint64, void

from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import kernel, load_u32, load_u64, read_i64, store_i64, store_u64
from psfleet.core.engine.kernels.hash_index import age_of, place_of, prefetch_line

AHEAD = 24


@kernel(void(int64, int64, int64, int64, int64, int64))
def recall(d, ids, n, step, slots, last_steps):
    """Write each id's slot and the step of its last push, or 0 and 0 for an unknown id."""
    for i in range(n):
        if i + AHEAD < n:
            prefetch_line(d, read_i64(ids, i + AHEAD))
        line, entry = place_of(d, mix(uint64(read_i64(ids, i))))
        slot = int64(load_u32(line, 8 + entry))
        store_i64(slots, i, slot)
        store_i64(
            last_steps, i, step - age_of(step, load_u32(line, 12 + entry)) if slot != 0 else 0
        )


@kernel(int64(int64, int64, int64))
def choose(bits, n, slots):
    """Set the bits of these slots; return the number of bits that were clear. Slot 0 (no row) is skipped."""
    count = 0
    for i in range(n):
        slot = read_i64(slots, i)
        word, bit = load_u64(bits, slot >> 6), uint64(1) << uint64(slot & 63)
        if slot != 0 and word & bit == uint64(0):
            store_u64(bits, slot >> 6, word | bit)
            count += 1
    return count


@kernel(int64(int64, int64, int64, int64, int64, int64, int64, int64, int64))
def claim(bits, size, n, ids, slots, last_steps, to_ids, to_slots, to_steps):
    """Claim rows: clear their bits, and write id, slot and step of each row whose bit was set.

    Returns the number of these rows. Slots from `size` on had no row when the view began, and have no bit.
    All arguments but size and n are addresses.
    """
    # To clear the bit is to claim the row: a row that changes and is copied first, and the reader that passes
    # over all rows, each come here, and only the first of both gets the row.
    count = 0
    for i in range(n):
        slot = read_i64(slots, i)
        if slot >= size:
            continue
        word, bit = load_u64(bits, slot >> 6), uint64(1) << uint64(slot & 63)
        if word & bit == uint64(0):
            continue
        store_u64(bits, slot >> 6, word ^ bit)
        store_i64(to_ids, count, read_i64(ids, i))
        store_i64(to_slots, count, slot)
        store_i64(to_steps, count, read_i64(last_steps, i))
        count += 1
    return count

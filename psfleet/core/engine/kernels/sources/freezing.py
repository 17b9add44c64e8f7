"""Kernels of a frozen view of a table: rows as they were at one step, read while training goes on.

Snapshots read such a view (tables/row_snapshot.py). The view has one bit for each slot, the number of a row's
place in the table. The bit is 1 until the view has the row's values:

    slot    0  1  2  3  4  5
    bits    0  1  1  0  1  0        rows 1, 2 and 4 have still to be read or copied

Before a push changes a row whose bit is 1, it *claims* the row, clearing the bit, and copies the old values.
So the view has the values of the step at which it began.
"""
from numba import int64, uint64, void

from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import kernel, load_u32, load_u64, read_i64, store_i64, store_u64
from psfleet.core.engine.kernels.hash_index import age_of, place_of, prefetch_line

AHEAD = 24


@kernel(void(int64, int64, int64, int64, int64, int64))
def recall(d, ids, n, step, slots, last_steps):
    """Write the slot (row number) of each id and the step of its last push, or 0 and 0 for an unknown id.

    step: the table's step. ids, slots, last_steps: int64 [n].
    """
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
    """Set the bits of these slots (row numbers) except slot 0; return the number of bits that were 0.

    The result counts a row once even if its id is repeated, so it is the number of rows that will be claimed.

    bits: uint64 words with a bit for each slot. slots: int64 [n].
    """
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
    """Claim rows for a copy: clear their bits, and write id, slot and last step of each row whose bit was 1.

    Returns the number of these rows. Slots (row numbers) from `size` on were unused when the snapshot began,
    and have no bit.
    ids, slots, last_steps: int64 [n], as `recall` writes them. to_ids, to_slots, to_steps: int64, written for
    the claimed rows.
    """
    # Two callers claim rows: a push that is about to change them, and the reader that goes over all rows.
    # Only the first of the two finds the bit set, so each row is copied once.
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

"""Index of a sparse table on a CUDA device: kernels that find, add and remove ids.

The index is a hash table with linear probing in three arrays. Entry p has

    keys[p]      uint64   hash of an id, or 0 if the entry is free
    slots[p]     uint32   slot, the number of the id's row; 0 if it has none yet, or DEAD if it was removed
    stamps[p]    uint32   stamp, the lower 32 bits of the step of the row's last push

A hash keeps its entry until the index is rebuilt. Entry 0 is reserved for the id whose hash is 0.

The entries are divided into segments by the top byte of the hash. The number of entries of a segment is a
power of two: bases[s] (int64) is the first entry of segment s, masks[s] (uint64) the number of entries less
one:

    keys   [ entry 0 | segment 0 . . . . | segment 1 . . | segment 2 . . . . | ... ]
                       ^ bases[0]          ^ bases[1]

A thread adds an id by claiming the first free entry where its search ends, with an atomic compare-and-swap.
No batch names an id twice, so two threads never claim an entry for the same id.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,misc"

from numba import cuda, float32, float64, int64, uint32, uint64

from psfleet.core.engine.kernels.device.cuda_arithmetic import (
    device_function,
    mix,
    rounded_double_product,
    unmix,
)

DEAD = 0xFFFFFFFF
OLDEST = 1 << 31  # largest age in steps; older rows count as this old
NONE = uint64(0)
SEGMENT = uint64(56)  # number of bits below the bits that choose the segment


@device_function
def entry_of(keys, bases, masks, hash_):
    """Return the index entry that has a hash, or the free entry where the search for an unknown hash ends."""
    entry = int64(0)
    if hash_ != NONE:
        segment = int64(hash_ >> SEGMENT)
        place = int64(hash_ & masks[segment])
        while keys[bases[segment] + place] != NONE and keys[bases[segment] + place] != hash_:
            place = int64(uint64(place + 1) & masks[segment])
        entry = bases[segment] + place
    return entry


@device_function
def claimed(keys, bases, masks, hash_):
    """Return the index entry that has a hash. If no entry has it, write the hash to a free entry first."""
    entry = int64(0)
    if hash_ != NONE:
        segment = int64(hash_ >> SEGMENT)
        place = int64(hash_ & masks[segment])
        there = cuda.atomic.cas(keys, bases[segment] + place, NONE, hash_)
        while there != NONE and there != hash_:
            place = int64(uint64(place + 1) & masks[segment])
            there = cuda.atomic.cas(keys, bases[segment] + place, NONE, hash_)
        entry = bases[segment] + place
    return entry


@device_function
def age_of(step, stamp):
    """Return the number of steps since a stamp (lower 32 bits of a step); see `age_of` of hash_index.py."""
    age = (int64(step) - int64(stamp)) & 0xFFFFFFFF
    return int64(0) if age >= 3 << 30 else age


@cuda.jit
def find(
    keys,
    slots,
    stamps,
    bases,
    masks,
    ids,
    n,
    now,
    step,
    steps,
    many,
    touches,
    row_slots,
    last_steps,
    new,
):
    """Write the slot (row number) of each id and the step of its last push, or 0 and 0 for an unknown id.

    ids: int64 [n]. row_slots, last_steps: int64 [n], written. now: the table's step. touches: True to stamp
    the rows as pushed: all rows at `step`, or row i at steps[i] if `many` is true. new: int64 [segments],
    added to: the number of unknown ids of each segment (class of ids with the same top byte of the hash).
    """
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        hash_ = mix(ids[i])
        entry = entry_of(keys, bases, masks, hash_)
        slot = int64(slots[entry])
        if slot == 0 or slot == DEAD:
            row_slots[i] = 0
            last_steps[i] = 0
            cuda.atomic.add(new, int64(hash_ >> SEGMENT), 1)
        else:
            row_slots[i] = slot
            last_steps[i] = now - age_of(now, stamps[entry])
            if touches:
                stamps[entry] = uint32((steps[i] if many else step) & 0xFFFFFFFF)


@cuda.jit
def add(
    keys,
    slots,
    stamps,
    bases,
    masks,
    ids,
    n,
    step,
    steps,
    many,
    free,
    free_count,
    unused,
    row_slots,
    fresh,
    counter,
):
    """Give a slot (row number) to each id that `find` has not found: first free slots, then unused ones.

        number k of the new ids    k < free_count:  free[free_count - 1 - k]
                                   otherwise:       unused + k - free_count

    row_slots: as `find` wrote them; the new slots are added. fresh: uint8 [n], written: 1 for the added ids.
    counter: int64 [1], 0 at first, written: the number of added ids.
    """
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        fresh[i] = 0
        if row_slots[i] == 0:
            entry = claimed(keys, bases, masks, mix(ids[i]))
            number = int64(cuda.atomic.add(counter, 0, 1))
            slot = unused + number - free_count
            if number < free_count:
                slot = int64(free[free_count - 1 - number])
            slots[entry] = uint32(slot)
            stamps[entry] = uint32((steps[i] if many else step) & 0xFFFFFFFF)
            row_slots[i] = slot
            fresh[i] = 1


@cuda.jit
def forget(keys, slots, stamps, bases, masks, ids, n, free, free_count, counter):
    """Remove ids, which may be repeated, and append their slots (row numbers) to the list `free`.

    free_count: number of slots in `free` before the call. counter: int64 [1], 0 at first, written: the
    number of removed rows.
    """
    # The atomic exchange returns the slot to one thread only, so a repeated id frees its row once.
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        hash_ = mix(ids[i])
        entry = entry_of(keys, bases, masks, hash_)
        if slots[entry] != 0:
            slot = cuda.atomic.exch(slots, entry, uint32(DEAD))
            if slot != 0 and slot != DEAD:
                free[free_count + int64(cuda.atomic.add(counter, 0, 1))] = slot


@cuda.jit
def rebuild(keys, slots, stamps, bases, masks, entries, new_keys, new_slots, new_stamps):
    """Insert all rows into a new, empty index.

    bases, masks: position and size of each segment (range of entries) of the new index. entries: number of
    entries of the old index, in keys, slots and stamps.
    """
    for old in range(cuda.grid(1), entries, cuda.gridsize(1)):
        if slots[old] != 0 and slots[old] != DEAD:
            entry = claimed(new_keys, bases, masks, keys[old])
            new_slots[entry] = slots[old]
            new_stamps[entry] = stamps[old]


@cuda.jit
def count_entries(keys, slots, entries, live):
    """Count the rows of each segment, a class of ids with the same top byte of the hash.

    live: int64 [segments], 0 at first, written: the counts.
    """
    for entry in range(cuda.grid(1), entries, cuda.gridsize(1)):
        if slots[entry] != 0 and slots[entry] != DEAD:
            cuda.atomic.add(live, int64(keys[entry] >> SEGMENT), 1)


@cuda.jit
def collect(keys, slots, stamps, first, last, step, least, most, hashes, out_slots, ages, count):
    """Write hash, slot (row number) and age of rows in the index entries `first` to `last` - 1.

    The age is the number of steps since the row's last push. Only rows with an age of `least` to `most` are
    written, in undefined order. count: int64 [1], 0 at first, written: the number of these rows.
    """
    for entry in range(first + cuda.grid(1), last, cuda.gridsize(1)):
        slot = int64(slots[entry])
        if slot != 0 and slot != DEAD:
            age = age_of(step, stamps[entry])
            if least <= age and age <= most:
                place = int64(cuda.atomic.add(count, 0, 1))
                hashes[place] = keys[entry]
                out_slots[place] = slot
                ages[place] = age


@cuda.jit
def histogram(slots, stamps, entries, step, shift, bins, counts):
    """Count rows by age, the steps since the last push: counts[age >> shift].

    The last bin also counts all older rows.
    """
    for entry in range(cuda.grid(1), entries, cuda.gridsize(1)):
        if slots[entry] != 0 and slots[entry] != DEAD:
            cuda.atomic.add(counts, min(age_of(step, stamps[entry]) >> shift, bins - 1), 1)


@cuda.jit
def restamp(stamps, entries, old, new):
    """Rewrite all stamps (low bits of the steps of last pushes) when the table's step becomes `new`.

    Each row keeps the step of its last push, as `restamp` of sources/index.py does.
    """
    for entry in range(cuda.grid(1), entries, cuda.gridsize(1)):
        push_step = old - age_of(old, stamps[entry])
        stamp = new - min(max(new - push_step, 0), OLDEST)
        stamps[entry] = uint32(stamp & 0xFFFFFFFF)


@cuda.jit
def decay(
    keys, slots, entries, rows, stride, place, factor, worth, click_worth, least, hashes, count
):
    """Decay the shows and clicks of all rows; write the hashes of rows whose worth is then below `least`.

    The formula is that of `decay` in sources/index_removal.py. place: position of the scores in a row. count:
    int64 [1], 0 at first, written: the number of hashes.
    """
    for entry in range(cuda.grid(1), entries, cuda.gridsize(1)):
        slot = int64(slots[entry])
        if slot != 0 and slot != DEAD:
            at = slot * stride + place
            shows = float32(rounded_double_product(float64(rows[at]), factor))
            clicks = float32(rounded_double_product(float64(rows[at + 1]), factor))
            rows[at] = shows
            rows[at + 1] = clicks
            show_worth = rounded_double_product(worth, float64(shows) - float64(clicks))
            value = show_worth + rounded_double_product(click_worth, float64(clicks))
            if value < least:
                hashes[int64(cuda.atomic.add(count, 0, 1))] = keys[entry]


@cuda.jit
def unmarked(keys, slots, entries, marks, out, ids, count):
    """Write slot (row number) and id of each row whose mark is 0.

    marks: uint8 for each slot. count: int64 [1], 0 at first, written: the number of rows.
    """
    for entry in range(cuda.grid(1), entries, cuda.gridsize(1)):
        slot = int64(slots[entry])
        if slot != 0 and slot != DEAD and marks[slot] == 0:
            place = int64(cuda.atomic.add(count, 0, 1))
            out[place] = slot
            ids[place] = unmix(keys[entry])

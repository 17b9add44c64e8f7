"""Kernels of the hash index of a served table: find, put and remove ids whose rows are numbered from 0.

`ServedTable` of psfleet/serving uses them. `keys` has the id of each row. `slots` is a hash table of uint32
with linear probing, where 0 is empty and any other value is a row number plus 1:

    slots   [ 0 | 3 | 1 | 0 | 2 ]        keys   [ 70, 9, 41 ]        rows   [ row 0 | row 1 | row 2 ]

With `direct` no hash is used: all ids are smaller than the number of slots, and id k uses slot k.
"""
import numpy as np
from numba import boolean, int64, types, uint32, uint64, void

from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import (helper, kernel, load_packed_i8, load_packed_u32, prefetch,
                                        prefetch_write, store_packed_i8, store_wide)

AHEAD = 16
I64 = types.Array(int64, 1, "C", readonly=True)


@helper
def home_of(key, slots, direct):
    """Return the home slot of a key, where the search for the key begins.

    direct: True if each key is the number of its own slot. A key that is too large, which the table cannot
    have, begins at slot 0, so that nothing outside `slots` is read.
    """
    #     home = (lower 32 bits of the hash) / 2**32 * number of slots
    #
    # Not the upper bits: servers and snapshots send rows ordered by them, so one page of rows would fill a
    # run of neighbouring slots.
    if direct:
        return int64(key) if uint64(key) < uint64(len(slots)) else int64(0)
    return int64((mix(uint64(key)) & uint64(0xFFFFFFFF)) * uint64(len(slots)) >> uint64(32))


@helper
def behind(slot, slots):
    """Return the next slot; slot 0 follows the last slot."""
    return slot + 1 if slot + 1 < len(slots) else int64(0)


@helper
def search(key, keys, slots, direct):
    """Return the slot that refers to a key, or the empty slot where the search for an unknown key ends."""
    slot = home_of(key, slots, direct)
    while slots[slot] != uint32(0) and keys[int64(slots[slot]) - 1] != key:
        slot = behind(slot, slots)
    return slot


@helper
def place_of(key, keys, slots, direct):
    """Return the row number of a key, or -1 if the table does not have the key."""
    if direct:  # each key is alone in its slot
        exists = uint64(key) < uint64(len(slots))
        return int64(slots[int64(key)]) - 1 if exists else int64(-1)
    return int64(slots[search(key, keys, slots, direct)]) - 1


@kernel(int64(I64, int64[::1], uint32[::1], boolean, int64[::1], int64, int64, int64, int64))
def find(ids, keys, slots, direct, places, rows, width, out, words):
    """Write the row number of each id to `places`, or -1 for an unknown id; return the unknown ids' number.

    ids, keys, slots, direct: ids to look up, and the index as drawn above. rows, width: address of the rows,
    and the bytes of one row; rows are prefetched.
    out, words: address that gets a copy of each row of `words` words of 4 bytes. With words 0 nothing is
    copied.
    """
    # A look-up reads three addresses, each of which depends on the one before: slot, key, row.
    #
    #     i + AHEAD         prefetch the home slot
    #     i + AHEAD // 2    read the home slot; prefetch the key and the row that it refers to
    #     i                 look the id up
    #
    # The home slot may refer to another key. Then the prefetch was useless, which does no harm.
    at, into, missing, count = keys.ctypes.data, slots.ctypes.data, 0, len(ids)
    if direct:
        for i in range(count):
            places[i] = place_of(ids[i], keys, slots, True)
    else:
        for i in range(-AHEAD, count):
            if i + AHEAD < count:
                prefetch(into + 4 * home_of(ids[i + AHEAD], slots, False))
            ahead = i + AHEAD // 2
            if 0 <= ahead < count:  # the row of the home slot, most likely that of the id
                place = int64(slots[home_of(ids[ahead], slots, False)]) - 1
                if place >= 0:
                    prefetch(at + 8 * place)
                    prefetch(rows + width * place)
            if i >= 0:
                places[i] = place_of(ids[i], keys, slots, False)
    for i in range(count):
        prefetch(rows + width * max(places[min(i + AHEAD, count - 1)], 0))
        source, target = rows + width * places[i], out + 4 * words * i
        if places[i] < 0:
            missing += 1
            continue
        for word in range(words):
            store_wide(target, word, load_packed_u32(source, word))
    return missing


@helper
def prefetch_place(ids, i, keys, slots, direct):
    """Prefetch the slot where the search for ids[i] begins, and the key that an earlier id's slot refers to.

    The earlier id is ids[i - AHEAD // 2], whose slot has been prefetched.
    """
    if i < len(ids):
        prefetch(slots.ctypes.data + 4 * home_of(ids[i], slots, direct))
    before = i - AHEAD // 2
    if 0 <= before < len(ids):
        place = int64(slots[home_of(ids[before], slots, direct)]) - 1  # most likely that of the id
        if place >= 0:
            prefetch(keys.ctypes.data + 8 * place)


@kernel(int64(I64, int64[::1], uint32[::1], boolean, int64, int64[::1], int64, int64, int64))
def put(ids, keys, slots, direct, count, places, rows, width, content):
    """Add or replace rows, and return the new count of rows. `places` gets the index of each id's row.

    keys, slots: the index (see the head of this module). direct: True if id k uses slot k. count: rows
    before the call; unknown ids get the next indices. rows, width: address of the table's rows, and the bytes
    of one row. content: address of the rows of these ids, which are copied into the table. The caller has made
    the arrays large enough.
    """
    for i in range(AHEAD):
        prefetch_place(ids, i, keys, slots, direct)
    for i in range(len(ids)):
        prefetch_place(ids, i + AHEAD, keys, slots, direct)
        slot = search(ids[i], keys, slots, direct)
        if slots[slot] == uint32(0):
            keys[count] = ids[i]
            count += 1
            slots[slot] = uint32(count)
        places[i] = int64(slots[slot]) - 1
    for i in range(len(ids)):
        if i + AHEAD < len(ids):
            prefetch_write(rows + width * places[i + AHEAD])
        source, target = content + width * i, rows + width * places[i]
        for word in range(width // 4):
            store_wide(target, word, load_packed_u32(source, word))
        for byte in range(width // 4 * 4, width):
            store_packed_i8(target, byte, load_packed_i8(source, byte))
    return count


@kernel(void(int64[::1], uint32[::1], boolean, int64))
def index(keys, slots, direct, count):
    """Fill empty slots with the row numbers of the first `count` keys. Used after the slots were enlarged."""
    for place in range(count):
        slots[search(keys[place], keys, slots, direct)] = uint32(place + 1)


@kernel(int64(I64, int64[::1], uint32[::1], boolean, int64, int64[::1]))
def remove(ids, keys, slots, direct, count, places):
    """Remove ids; return the new number of rows. The last row fills the gap, so that rows stay without gaps.

    places: written for each id: the number of its row, or -1 for an unknown id. The caller then moves the
    rows: in the same order, the row that is last at that moment goes to this number.
    """
    for i in range(len(ids)):
        place = place_of(ids[i], keys, slots, direct)
        places[i] = place
        if place < 0:
            continue
        slot = search(ids[i], keys, slots, direct)
        other = slot
        #     home . . gap . . other        `other` would no longer be found, because its search ends at the
        #     gap
        #
        # An entry behind the gap whose home slot is at the gap or before it moves into the gap, and leaves a
        # gap in turn (Knuth, volume 3, section 6.4, algorithm R). Distances are taken backwards from the
        # entry, modulo the number of slots.
        while not direct:
            other = behind(other, slots)
            if slots[other] == uint32(0):
                break
            home = home_of(keys[int64(slots[other]) - 1], slots, direct)
            if (other - home) % len(slots) >= (other - slot) % len(slots):
                slots[slot] = slots[other]
                slot = other
        slots[slot] = uint32(0)
        count -= 1
        if place != count:
            slots[search(keys[count], keys, slots, direct)] = uint32(place + 1)
            keys[place] = keys[count]
    return count

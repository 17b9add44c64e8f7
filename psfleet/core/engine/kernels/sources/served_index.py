import numpy as np
from numba import boolean, int64, types, uint32, uint64, void

from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import (helper, kernel, load_packed_i8, load_packed_u32, prefetch,
                                        prefetch_write, store_packed_i8, store_wide)

AHEAD = 16
I64 = types.Array(int64, 1, "C", readonly=True)


@helper
def home_of(key, slots, direct):
    """The slot at which the search for a key begins. direct: all keys are numbers of slots, and begin there.

    It follows from the low half of the key's hash: servers and snapshots give rows by the high bits, and a page
    of them would fill a few slots in a row.
    """
    if direct:
        return int64(key) if uint64(key) < uint64(len(slots)) else int64(0)
    return int64((mix(uint64(key)) & uint64(0xFFFFFFFF)) * uint64(len(slots)) >> uint64(32))


@helper
def behind(slot, slots):
    """The next slot."""
    return slot + 1 if slot + 1 < len(slots) else int64(0)


@helper
def search(key, keys, slots, direct):
    """The slot that has a key, or the empty one that ends its chain."""
    slot = home_of(key, slots, direct)
    while slots[slot] != uint32(0) and keys[int64(slots[slot]) - 1] != key:
        slot = behind(slot, slots)
    return slot


@helper
def place_of(key, keys, slots, direct):
    """The place of a key; -1: it has none."""
    if direct:  # each key is alone in its slot
        exists = uint64(key) < uint64(len(slots))
        return int64(slots[int64(key)]) - 1 if exists else int64(-1)
    return int64(slots[search(key, keys, slots, direct)]) - 1


@kernel(int64(I64, int64[::1], uint32[::1], boolean, int64[::1], int64, int64, int64, int64))
def find(ids, keys, slots, direct, places, rows, width, out, words):
    """The place of each id, -1 for one that is not there; returns how many are not.

    rows, width: address of the rows, of so many bytes, which are fetched too.
    out, words: address to which the words of 4 bytes of each row go; 0 words: nowhere.
    """
    at, into, missing, count = keys.ctypes.data, slots.ctypes.data, 0, len(ids)
    if direct:
        for i in range(count):
            places[i] = place_of(ids[i], keys, slots, True)
    else:
        for i in range(-AHEAD, count):
            if i + AHEAD < count:
                prefetch(into + 4 * home_of(ids[i + AHEAD], slots, False))
            ahead = i + AHEAD // 2
            if 0 <= ahead < count:  # what is likely its place
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
    """Have at hand what tells the place of ids[i]: first the slot, and AHEAD // 2 ids later the key."""
    if i < len(ids):
        prefetch(slots.ctypes.data + 4 * home_of(ids[i], slots, direct))
    before = i - AHEAD // 2
    if 0 <= before < len(ids):
        place = int64(slots[home_of(ids[before], slots, direct)]) - 1  # what is likely its place
        if place >= 0:
            prefetch(keys.ctypes.data + 8 * place)


@kernel(int64(I64, int64[::1], uint32[::1], boolean, int64, int64[::1], int64, int64, int64))
def put(ids, keys, slots, direct, count, places, rows, width, content):
    """The place of each id; a new one gets the next. Returns how many there are then.

    rows, width: address of the rows, of so many bytes; they get the `content`, an address.
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
    """Fill empty slots with the places of the first keys."""
    for place in range(count):
        slots[search(keys[place], keys, slots, direct)] = uint32(place + 1)


@kernel(int64(I64, int64[::1], uint32[::1], boolean, int64, int64[::1]))
def remove(ids, keys, slots, direct, count, places):
    """Remove ids; the last place moves to the one that becomes free. Returns how many there are then.

    places: for each id its place, to which the then last one has moved, or -1 if it was not there.
    """
    for i in range(len(ids)):
        place = place_of(ids[i], keys, slots, direct)
        places[i] = place
        if place < 0:
            continue
        slot = search(ids[i], keys, slots, direct)
        other = slot
        while not direct:  # Knuth, volume 3, section 6.4, algorithm R
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

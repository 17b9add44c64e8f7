import platform

from numba import int32, int64, types, uint32, uint64, void

from psfleet.core.engine.kernels.hash_index import (FREE_ROW, NEXT_SLOT, ROWS, STRIDE, find_fast, find_slow,
                                        first_line, place_of, prefetch_line)
from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import (helper, kernel, load_i64, load_u32, read_i64, store_i64,
                                        store_u32)

AHEAD = 24
PAGE = 4096
FREE, IDLE, MOST = 0, 1, 8  # of `uses`: no row, a row that is not in use, and the most that counts
FOUND, UNKNOWN, HAND = range(3)  # places of `counts`
READ, WRITE, AT_ONCE = 0, 1, 128  # operations of `transfer`, and how many there are at a time
REQUEST, EVENT = 64, 32  # bytes of the kernel's iocb and io_event
SETUP, SUBMIT, EVENTS = {"x86_64": (206, 209, 208), "aarch64": (0, 2, 4)}.get(
    platform.machine(), (-1, -1, -1)
)
INTERRUPTED = 4
BYTES, NUMBERS = types.Array(types.uint8, 1, "C"), types.Array(types.int64, 1, "C")

call_kernel = types.ExternalFunction("syscall", int64(int64, int64, int64, int64, int64, int64))
error_place = types.ExternalFunction("__errno_location", int64())
read_at = types.ExternalFunction("pread", int64(int32, int64, int64, int64))
write_at = types.ExternalFunction("pwrite", int64(int32, int64, int64, int64))


@kernel(int64(int64, int64, int64, int64, BYTES, NUMBERS, NUMBERS))
def look(d, ids, n, far, uses, cold, counts):
    """Count a use of the rows of these ids. Write the ids of those in slots from `far` on. -> how many."""
    away, there, unknown = 0, 0, 0
    for i in range(n):
        if i + AHEAD < n:
            prefetch_line(d, read_i64(ids, i + AHEAD))
        hash_ = mix(uint64(read_i64(ids, i)))
        slot = find_fast(first_line(d, hash_), hash_)
        if slot == 0:
            slot = find_slow(d, hash_)
        if slot >= far:
            cold[away] = read_i64(ids, i)
            away += 1
        elif slot != 0:
            there += 1
            uses[slot] = min(max(uses[slot], IDLE) + 1, MOST)
        else:
            unknown += 1
    counts[FOUND] += there
    counts[UNKNOWN] = unknown
    return away


@kernel(int64(int64, NUMBERS, int64, BYTES, BYTES, NUMBERS, NUMBERS, NUMBERS, NUMBERS))
def fetch(d, ids, far, uses, there, live, owners, slots, places):
    """Give rows that are in slots from `far` on slots before that. -> how many.

    Write from which slots they have to be read, and to which addresses.
    """
    rows, stride, n = load_i64(d, ROWS), load_i64(d, STRIDE), 0
    rows_of_block = len(there) // len(live)
    for i in range(len(ids)):
        if i + AHEAD < len(ids):
            prefetch_line(d, ids[i + AHEAD])
        line, entry = place_of(d, mix(uint64(ids[i])))
        slot = int64(load_u32(line, 8 + entry))
        if slot < far:  # named twice
            continue
        near = load_i64(d, FREE_ROW)
        if near != 0:
            store_i64(d, FREE_ROW, int64(load_u32(rows + near * stride, 0)))
        else:
            near = load_i64(d, NEXT_SLOT)
            store_i64(d, NEXT_SLOT, near + 1)
        store_u32(line, 8 + entry, uint32(near))
        owners[near], uses[near] = ids[i], IDLE
        there[slot - far] = 0
        live[(slot - far) // rows_of_block] -= 1
        slots[n], places[n] = slot - far, rows + near * stride
        n += 1
    return n


@kernel(void(int64, NUMBERS, NUMBERS, int64, BYTES, BYTES, NUMBERS, NUMBERS))
def settle(d, ids, slots, far, uses, there, live, owners):
    """Give the rows of these ids other slots, from `far` on; those that they had are free."""
    rows, stride = load_i64(d, ROWS), load_i64(d, STRIDE)
    rows_of_block = len(there) // len(live)
    for i in range(len(ids)):
        if i + AHEAD < len(ids):
            prefetch_line(d, ids[i + AHEAD])
        line, entry = place_of(d, mix(uint64(ids[i])))
        old = int64(load_u32(line, 8 + entry))
        store_u32(line, 8 + entry, uint32(slots[i]))
        if old < far:
            store_u32(rows + old * stride, 0, uint32(load_i64(d, FREE_ROW)))
            store_i64(d, FREE_ROW, old)
            uses[old] = FREE
        else:
            there[old - far] = 0
            live[(old - far) // rows_of_block] -= 1
        owners[slots[i]] = ids[i]
        there[slots[i] - far] = 1
        live[(slots[i] - far) // rows_of_block] += 1


@kernel(int64(int64, BYTES, int64, NUMBERS, NUMBERS))
def sweep(d, uses, most, slots, counts):
    """Write slots before NEXT_SLOT whose rows are not in use. -> how many.

    CLOCK: the hand takes a use of each row that it passes, and a row without one goes.
    """
    end, hand, n, steps = load_i64(d, NEXT_SLOT), counts[HAND], 0, 0
    while n < most and steps < (MOST + 1) * end:
        hand = hand + 1 if hand + 1 < end else 1
        steps += 1
        if uses[hand] == IDLE:
            uses[hand] = FREE
            slots[n] = hand
            n += 1
        elif uses[hand] != FREE:
            uses[hand] -= 1
    counts[HAND] = hand
    return n


@kernel(void(int64, NUMBERS, int64))
def chain(d, free, end):
    """Let `end` be the first slot that no row has had; of these slots those before it are free."""
    store_i64(d, FREE_ROW, 0)
    store_i64(d, NEXT_SLOT, end)
    for slot in free:
        if slot < end:
            store_u32(
                load_i64(d, ROWS) + slot * load_i64(d, STRIDE), 0, uint32(load_i64(d, FREE_ROW))
            )
            store_i64(d, FREE_ROW, slot)


@helper
def ask(context, request, file, operation, number, address, size, offset):
    """Order a request of the kernel, or make it now. -> 1, or 0 if it failed."""
    if context == 0:
        if operation == READ:
            return int64(read_at(file, address, size, offset) == size)
        return int64(write_at(file, address, size, offset) == size)
    store_i64(request, 0, number)
    store_i64(request, 1, 0)
    store_i64(request, 2, int64(operation) | int64(file) << 32)
    store_i64(request, 3, address)
    store_i64(request, 4, size)
    store_i64(request, 5, offset)
    store_i64(request, 6, 0)
    store_i64(request, 7, 0)
    return 1


@kernel(int64(int64, int32, int64, NUMBERS, NUMBERS, NUMBERS, int64, int64))
def transfer(context, file, operation, offsets, sizes, places, work, pages):
    """Read or write these ranges of a file. -> how many came through, all but if it failed.

    Pages are read to `pages`, with PAGE bytes more than the longest range for each of AT_ONCE requests, and
    copied from there. pages 0: the ranges are whole pages, and read and written where they are.
    """
    n, longest = len(offsets), 0
    for i in range(n):
        longest = max(longest, sizes[i])
    room = (longest + 2 * PAGE - 2) // PAGE * PAGE
    requests, request_addresses = work, work + AT_ONCE * REQUEST
    events, idle = request_addresses + AT_ONCE * 8, request_addresses + AT_ONCE * (8 + EVENT)
    for k in range(AT_ONCE):
        store_i64(idle, k, k)
    free, next_range, complete = AT_ONCE, 0, 0
    while complete < n:
        batch = 0
        while free > 0 and next_range < n:
            free -= 1
            k = load_i64(idle, free)
            first, last = offsets[next_range], offsets[next_range] + sizes[next_range]
            place = places[next_range]
            if pages != 0:
                first, last, place = first & -PAGE, last + PAGE - 1 & -PAGE, pages + k * room
            request = requests + k * REQUEST
            number = next_range * AT_ONCE + k
            if ask(context, request, file, operation, number, place, last - first, first) == 0:
                return complete
            store_i64(request_addresses, batch, request)
            store_i64(events, 4 * batch, number)
            store_i64(events, 4 * batch + 2, last - first)
            batch += 1
            next_range += 1
        count = batch
        if context != 0:
            at = 0
            while at < batch:
                entries = call_kernel(SUBMIT, context, batch - at, request_addresses + 8 * at, 0, 0)
                if entries <= 0:
                    return complete
                at += entries
            least = min(next_range - complete, AT_ONCE // 2)
            count = call_kernel(EVENTS, context, least, AT_ONCE, events, 0)
            if count < 0 and load_u32(error_place(), 0) == INTERRUPTED:
                continue
            if count <= 0:
                return complete
        for e in range(count):
            number = load_i64(events, 4 * e)
            i, k = number // AT_ONCE, number % AT_ONCE
            start = offsets[i] & (PAGE - 1) if pages != 0 else 0
            if load_i64(events, 4 * e + 2) < start + sizes[i]:
                return complete
            if pages != 0:
                source = pages + k * room + start
                for word in range(sizes[i] >> 2):
                    store_u32(places[i], word, load_u32(source, word))
            store_i64(idle, free, k)
            free += 1
            complete += 1
    return complete

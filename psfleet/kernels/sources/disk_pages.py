# ruff: noqa
# mypy: ignore-errors
from numba import int32, int64, types, void

from psfleet.kernels.hash_index import FREE_ROW, NEXT_SLOT, ROWS, STRIDE
from psfleet.kernels.intrinsics import helper, kernel, load_i64, load_u32

PAGE = 12  # bits of an offset within a page
COLD, IDLE, USED, LEAVING = 0, 1, 2, 3  # states of a page
RESIDENT, FOUND, READ, DROPPED, HAND, ORDERED, FAILED, SUM = range(8)  # places of `counts`
WILLNEED, DONTNEED = 3, 4  # advice, of both calls
WAIT, WRITE = 1, 2
BYTES, NUMBERS = types.Array(types.uint8, 1, "C"), types.Array(types.int64, 1, "C")

advise_memory = types.ExternalFunction("madvise", int32(int64, int64, int32))
advise_file = types.ExternalFunction("posix_fadvise", int32(int32, int64, int64, int32))
sync_range = types.ExternalFunction("sync_file_range", int32(int32, int64, int64, int32))


@helper
def use_row(d, slot, states, counts):
    """Mark the pages of a row that may be made, as far as there are any."""
    start = slot * load_i64(d, STRIDE)
    end = min((start + load_i64(d, STRIDE) - 1 >> PAGE) + 1, len(states))
    for page in range(start >> PAGE, end):
        counts[RESIDENT] += int64(states[page] == COLD)
        states[page] = USED


@kernel(int64(int64, NUMBERS, int32, BYTES, NUMBERS, NUMBERS))
def use(d, slots, file, states, counts, cold):
    """Have the pages of these rows in memory. -> how many were not; their numbers go to `cold`.

    All are ordered before the first is awaited, neighbours with one call.
    """
    base, stride, found, first = load_i64(d, ROWS), load_i64(d, STRIDE), 0, 0
    for slot in slots:
        for page in range(slot * stride >> PAGE, (slot * stride + stride - 1 >> PAGE) + 1):
            if states[page] == COLD:
                if found > first and page != cold[found - 1] + 1:
                    advise_file(file, cold[first] << PAGE, (found - first) << PAGE, WILLNEED)
                    first = found
                cold[found] = page
                found += 1
            else:
                counts[FOUND] += 1
            states[page] = USED
    if found > first:
        advise_file(file, cold[first] << PAGE, (found - first) << PAGE, WILLNEED)
    for number in range(found):
        counts[SUM] += load_u32(base + (cold[number] << PAGE), 0)  # it means nothing; this waits
    counts[RESIDENT] += found
    counts[READ] += found
    return found


@kernel(void(int64, int64, BYTES, NUMBERS))
def expect(d, more, states, counts):
    """Mark the pages of the next `more` new rows, if so many come."""
    slot = load_i64(d, FREE_ROW)
    while slot != 0 and more > 0:
        use_row(d, slot, states, counts)
        slot = int64(load_u32(load_i64(d, ROWS) + slot * load_i64(d, STRIDE), 0))
        more -= 1
    for slot in range(load_i64(d, NEXT_SLOT), load_i64(d, NEXT_SLOT) + more):
        use_row(d, slot, states, counts)


@helper
def drop(base, file, first, end, states, counts):
    """Let a run of pages go whose writing was ordered. -> 0, or that it has failed."""
    failed = sync_range(file, first << PAGE, (end - first) << PAGE, WAIT)
    if failed == 0:
        # A fault at a page may have mapped its neighbours, and a mapped page stays.
        advise_memory(base + (first << PAGE), (end - first) << PAGE, DONTNEED)
        advise_file(file, first << PAGE, (end - first) << PAGE, DONTNEED)
        states[first:end] = COLD
        counts[RESIDENT] -= end - first
        counts[DROPPED] += end - first
    return failed


@helper
def drop_all(base, leaving, file, states, counts):
    """Let those go that were not used since. -> 0, or that it has failed."""
    first = end = failed = int64(0)
    for number in range(counts[ORDERED]):
        page = leaving[number]
        if states[page] != LEAVING:
            continue
        if page != end:
            if end > first:
                failed |= drop(base, file, first, end, states, counts)
            first = page
        end = page + 1
    if end > first:
        failed |= drop(base, file, first, end, states, counts)
    return failed


@helper
def order(base, file, first, end):
    """Have a run of pages written; what changes them next maps them anew."""
    advise_memory(base + (first << PAGE), (end - first) << PAGE, DONTNEED)
    return sync_range(file, first << PAGE, (end - first) << PAGE, WRITE)


@kernel(void(int64, int32, int64, int64, BYTES, NUMBERS, NUMBERS))
def sweep(d, file, pages, most, states, counts, leaving):
    """Let pages go that were ordered to, and order others until at most `most` of the first `pages` stay.

    CLOCK: a page that the hand passes is idle, one that it finds idle goes.
    """
    base = load_i64(d, ROWS)
    failed = drop_all(base, leaving, file, states, counts)
    wanted = min(counts[RESIDENT] - most, len(leaving))
    number, first, passed = 0, 0, 0
    hand = counts[HAND] % pages
    while number < wanted and passed < 3 * pages:
        if states[hand] == USED:
            states[hand] = IDLE
        elif states[hand] == IDLE:
            if number > first and hand != leaving[number - 1] + 1:
                failed |= order(base, file, leaving[first], leaving[number - 1] + 1)
                first = number
            states[hand] = LEAVING
            leaving[number] = hand
            number += 1
        hand = hand + 1 if hand + 1 < pages else 0
        passed += 1
    if number > first:
        failed |= order(base, file, leaving[first], leaving[number - 1] + 1)
    counts[ORDERED], counts[HAND], counts[FAILED] = number, hand, failed

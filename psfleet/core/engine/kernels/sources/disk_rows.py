"""Kernels that move rows between memory and a file, for tables with device="disk".

`DiskRowMemory` of psfleet/core/engine/tables/disk_rows.py calls them (docs/decisions/0030-rows-on-disk.md).
One range of addresses has all rows, and a row's slot, the number of its place there, tells where the row is:

    slot    1 ... NEXT_SLOT ...   | far ...
    row     in memory             | in the file, mapped behind the memory

The index (descriptor `d`) has the slots of all rows. So to move a row is to copy the row and to store its new
slot in the index. Arrays of the table:

    uses     uint8 for each slot in memory: its recent uses, or FREE
    owners   int64 for each slot: the id of its row
    there    uint8 for each slot of the file: 1 if it has a row
    live     int64 for each block of the file: its number of rows
"""
import platform

from numba import int32, int64, types, uint32, uint64, void

from psfleet.core.engine.kernels.hash_index import (FREE_ROW, NEXT_SLOT, ROWS, STRIDE, find_fast, find_slow,
                                        first_line, place_of, prefetch_line)
from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import (helper, kernel, load_i64, load_u32, read_i64, store_i64,
                                        store_u32)

AHEAD = 24  # ids between the prefetch of an index line and its use, as in index.py
PAGE = 4096  # bytes; transfers past the page cache begin and end at multiples of it
# Values of `uses`: no row; a row without recent uses; up to 7 recent uses. The limit lets a row that was used
# very often leave after a few rounds of `sweep` without a use. No other limit has been compared with 7.
FREE, IDLE, MOST = 0, 1, 8
FOUND, UNKNOWN, HAND = range(3)  # positions in `counts`
# Operations of `transfer`, and the limit of requests in flight. With 128, reads ran at the speed of the disk,
# 63,000 a second (benchmarks/README.md).
READ, WRITE, AT_ONCE = 0, 1, 128
REQUEST, EVENT = 64, 32  # bytes of Linux's struct iocb and struct io_event
# Numbers of the system calls io_setup, io_submit and io_getevents, or -1 on another processor. libc has no
# functions for them. io_uring is as fast, but containers often forbid it (decision 30).
SETUP, SUBMIT, EVENTS = {"x86_64": (206, 209, 208), "aarch64": (0, 2, 4)}.get(
    platform.machine(), (-1, -1, -1)
)
INTERRUPTED, AGAIN = 4, 11  # the errnos EINTR and EAGAIN
# Types of array arguments. Other kernels take addresses, which are faster (intrinsics.py). Here the gain is
# small beside a read of the disk, and some kernels need the lengths of the arrays.
BYTES, NUMBERS = types.Array(types.uint8, 1, "C"), types.Array(types.int64, 1, "C")

call_kernel = types.ExternalFunction("syscall", int64(int64, int64, int64, int64, int64, int64))
# The address of errno, which is a macro in C. `syscall` returns only -1 for any error.
error_place = types.ExternalFunction("__errno_location", int64())
read_at = types.ExternalFunction("pread", int64(int32, int64, int64, int64))
write_at = types.ExternalFunction("pwrite", int64(int32, int64, int64, int64))
pause = types.ExternalFunction("usleep", int32(uint32))


@kernel(int64(int64, int64, int64, int64, BYTES, NUMBERS, NUMBERS))
def look(d, ids, n, far, uses, cold, counts):
    """Count a use of the rows of these ids that are in memory; list the ids whose rows are in the file.

    ids: address of int64 [n]. far: first slot of the file. uses: recent uses of each slot in memory. cold:
    written: the ids of rows in the file. Returns the number of these ids. counts: FOUND grows by the number
    of rows in memory, and UNKNOWN becomes the number of ids without a row.
    """
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
            # At least IDLE: FREE would say that the slot has no row.
            uses[slot] = min(max(uses[slot], IDLE) + 1, MOST)
        else:
            unknown += 1
    counts[FOUND] += there  # grows for as long as the table exists, as a metric; UNKNOWN is of this call
    counts[UNKNOWN] = unknown
    return away


@kernel(int64(int64, NUMBERS, int64, BYTES, BYTES, NUMBERS, NUMBERS, NUMBERS, NUMBERS))
def fetch(d, ids, far, uses, there, live, owners, slots, places):
    """Begin to move rows from the file to memory: assign slots in memory, and list the reads to make.

        file slot  --read by the caller-->  memory slot        slots[i] + far  -->  address places[i]

    ids: ids of rows in the file; a repeated id counts once. uses, there, live, owners: arrays of the table,
    kept up to date. slots, places: written: the old slot of each row, counted from `far`, and the address
    that the caller must read the row to. Returns the number of reads.
    """
    # The index refers to the new slot before the row is read. That is safe, because the caller has the table
    # to itself until `transfer` is done, and ends the process if the transfer fails. The caller gives no more
    # ids than slots in memory are left (`DiskRowMemory.near`), so NEXT_SLOT stays below `far`.
    rows, stride, n = load_i64(d, ROWS), load_i64(d, STRIDE), 0
    rows_of_block = len(there) // len(live)
    for i in range(len(ids)):
        if i + AHEAD < len(ids):
            prefetch_line(d, ids[i + AHEAD])
        # Not `find_fast`, which returns the slot but not the entry that has to be changed.
        line, entry = place_of(d, mix(uint64(ids[i])))
        slot = int64(load_u32(line, 8 + entry))
        if slot < far:  # the id occurred before, and its row has moved
            continue
        # As in `insert` of hash_index.py: the newest free slot, else one that no row has had.
        near = load_i64(d, FREE_ROW)
        if near != 0:
            store_i64(d, FREE_ROW, int64(load_u32(rows + near * stride, 0)))
        else:
            near = load_i64(d, NEXT_SLOT)
            store_i64(d, NEXT_SLOT, near + 1)
        store_u32(line, 8 + entry, uint32(near))
        # IDLE, and no use is counted: a row that is used once leaves before rows that are used again.
        owners[near], uses[near] = ids[i], IDLE
        there[slot - far] = 0
        live[(slot - far) // rows_of_block] -= 1
        slots[n], places[n] = slot - far, rows + near * stride
        n += 1
    return n


@kernel(void(int64, NUMBERS, NUMBERS, int64, BYTES, BYTES, NUMBERS, NUMBERS))
def settle(d, ids, slots, far, uses, there, live, owners):
    """Record that the rows of these ids have been written to the file, to the slots `slots`.

    Their old slots become free. An old slot is in memory, or in the file if a row was moved to another block.
    ids, slots: of the same length; the slots are those from `far` on.
    """
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
    """Choose up to `most` rows in memory that are to move to the file; return the number of rows.

        slots   1  2  3  4  5  6 ... NEXT_SLOT - 1
        uses    3  1  1  0  2  1        a hand goes round: a row with IDLE (1) is chosen, others lose a use
                      ^ hand

    slots: written: the slots (row positions) of the chosen rows. counts[HAND]: the slot where the last
    sweep ended, after which this sweep starts.
    """
    # This is the CLOCK algorithm, an approximation of "least recently used". `uses` is at most MOST, so every
    # row has been chosen after MOST rounds. The limit, one round more, only ends the loop if there are fewer
    # than `most` rows. The hand passes over slot 0, which never has a row.
    end, hand, n, steps = load_i64(d, NEXT_SLOT), counts[HAND], 0, 0
    while n < most and steps < (MOST + 1) * end:
        hand = hand + 1 if hand + 1 < end else 1
        steps += 1
        if uses[hand] == IDLE:
            # Already now, although the row is still there: the next round must not choose it again.
            uses[hand] = FREE
            slots[n] = hand
            n += 1
        elif uses[hand] != FREE:
            uses[hand] -= 1
    counts[HAND] = hand
    return n


@kernel(void(int64, NUMBERS, int64))
def chain(d, free, end):
    """Shrink the memory to the slots (row positions) before `end`, and rebuild the list of free slots.

    free: all free slots in memory; slots from `end` on are dropped. No row may be in a slot from `end` on.
    """
    store_i64(d, FREE_ROW, 0)
    store_i64(d, NEXT_SLOT, end)
    for slot in free:
        if slot < end:
            store_u32(
                load_i64(d, ROWS) + slot * load_i64(d, STRIDE), 0, uint32(load_i64(d, FREE_ROW))
            )
            store_i64(d, FREE_ROW, slot)


@helper
def may_repeat():
    """Return whether the system call that has just failed is worth repeating; waits a millisecond if so.

    It is after a signal, and while Linux is short of memory for requests.
    """
    error = load_u32(error_place(), 0)
    if error != INTERRUPTED and error != AGAIN:
        return False
    pause(1000)
    return True


@helper
def ask(context, request, file, operation, number, address, size, offset):
    """Prepare a request for io_submit, or, without a context, transfer at once. Return 0 if that failed.

    request: address of the iocb. number: comes back in the event. address, size, offset: memory, bytes, and
    position in the file.
    """
    if context == 0:  # io_setup failed, or the processor has no numbers above
        while True:
            if operation == READ:
                count = read_at(file, address, size, offset)
            else:
                count = write_at(file, address, size, offset)
            # Not compared with the needed part of the range, as `transfer` does with events: the files consist
            # of whole pages, so only an error makes a transfer short.
            if count >= 0 or not may_repeat():
                return int64(count == size)
    # struct iocb in words of 64 bits:
    #
    #     0  data, comes back in the event     3  buffer
    #     1  key and flags                     4  bytes
    #     2  opcode (0 pread, 1 pwrite),       5  offset in the file
    #        priority and file                 6, 7  unused
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
    """Read or write ranges of a file, up to AT_ONCE at a time; return the number of completed ranges.

    The result is smaller than the number of ranges if an operation failed.

    context: result of io_setup, or 0 to transfer the ranges one by one. offsets, sizes: position and length
    of each range, in bytes. places: address of each range in memory. work: scratch of AT_ONCE * (REQUEST +
    EVENT + 16) bytes.
    pages: address of page buffers, one for each of AT_ONCE requests, for a file that is open for direct
    transfers, which move whole pages. A range that does not consist of whole pages is then read into a buffer
    and copied from there. 0 if all ranges are whole pages; these are read and written in place. Always 0 for
    a write (`DiskArena.transfer`), which would send what a buffer holds from an earlier read.
    """
    #     work   [ AT_ONCE iocbs | addresses of a batch of iocbs | events | stack of idle iocbs ]
    #
    # The loop keeps the disk busy: fill all idle iocbs, submit them, wait for up to AT_ONCE / 2 events, and
    # fill again. An event's number is range * AT_ONCE + iocb, which tells both. A return after a failure
    # leaves requests in flight, which may still write to memory; the caller ends the process then.
    #
    # struct io_event in words of 64 bits: the request's data, its address, the result (bytes, or an error
    # below 0), and a second result.
    n, longest = len(offsets), 0
    for i in range(n):
        longest = max(longest, sizes[i])
    room = (longest + 2 * PAGE - 2) // PAGE * PAGE  # pages that a range can touch wherever it begins
    requests, request_addresses = work, work + AT_ONCE * REQUEST
    events, idle = request_addresses + AT_ONCE * 8, request_addresses + AT_ONCE * (8 + EVENT)
    for k in range(AT_ONCE):
        store_i64(idle, k, k)
    # at, batch: the requests at positions `at` to `batch` - 1 of the batch have not been submitted yet. No
    # request is added behind them once `at` has moved: `request_addresses` has space for AT_ONCE positions.
    free, next_range, complete, at, batch = AT_ONCE, 0, 0, 0, 0
    while complete < n:
        if at == batch:
            at, batch = 0, 0
        while at == 0 and free > 0 and next_range < n:
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
            # Without a context the range is done already, so write its event here, as Linux would. With one,
            # Linux overwrites the event later.
            store_i64(request_addresses, batch, request)
            store_i64(events, 4 * batch, number)
            store_i64(events, 4 * batch + 2, last - first)
            batch += 1
            next_range += 1
        if context == 0:
            at = count = batch
        else:
            # io_submit may take fewer requests than it is given. The others are submitted in the next turn,
            # after some of the events, which may be what Linux has no room for.
            entries = call_kernel(SUBMIT, context, batch - at, request_addresses + 8 * at, 0, 0)
            if entries >= 0:
                at += entries
            elif not may_repeat():
                return complete
            # Wait for many events, which saves system calls, but not for all: the disk works on other
            # requests while this loop copies rows and submits new requests.
            least = min(next_range - complete - (batch - at), AT_ONCE // 2)
            count = call_kernel(EVENTS, context, least, AT_ONCE, events, 0)
            if count < 0 and not may_repeat():
                return complete
        for e in range(count):
            number = load_i64(events, 4 * e)
            i, k = number // AT_ONCE, number % AT_ONCE
            start = offsets[i] & (PAGE - 1) if pages != 0 else 0
            # A read may return fewer bytes than whole pages if the file ends within a page. That is no error
            # as long as the range is complete. (The files of DiskArena consist of whole pages.)
            if load_i64(events, 4 * e + 2) < start + sizes[i]:
                return complete
            if pages != 0:
                source = pages + k * room + start
                # By words of 4 bytes: a row consists of them, and may begin at any of them.
                for word in range(sizes[i] >> 2):
                    store_u32(places[i], word, load_u32(source, word))
            store_i64(idle, free, k)
            free += 1
            complete += 1
    return complete

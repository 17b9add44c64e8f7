# ruff: noqa
# mypy: ignore-errors
from numba import int64, uint64, void

from psfleet.kernels.hashing import mix, unmix
from psfleet.kernels.memory import (
    kernel,
    load_i64,
    load_u32,
    load_u64,
    prefetch,
    prefetch_write,
    read_i64,
    store_f32,
    read_f32,
    store_i64,
)
from psfleet.kernels.probing import (
    BASE,
    DEAD,
    LINES,
    MASK,
    ROWS,
    SEGMENT_COUNT,
    SEGMENT_FIELDS,
    SEGMENTS,
    STRIDE,
    find_fast,
    find_slow,
    first_line,
    insert,
    prefetch_line,
    remove,
)

AHEAD = 24


@kernel(int64(int64, int64, int64, int64, int64))
def locate(d, ids, n, slots, add):
    """Write each id's slot, 0 for an unknown one, unless `add`: then it is inserted. -> unknown ids."""
    unknown = 0
    for i in range(n):
        if i + AHEAD < n:
            prefetch_line(d, read_i64(ids, i + AHEAD))
        hashed = mix(uint64(read_i64(ids, i)))
        slot = find_fast(first_line(d, hashed), hashed)
        if slot == 0:
            slot = find_slow(d, hashed)
        if slot == 0:
            unknown += 1
            if add:
                slot = insert(d, hashed)
        store_i64(slots, i, slot)
    return unknown


@kernel(int64(int64, int64, int64))
def forget(d, ids, n):
    """Remove ids. -> how many of them were there."""
    count = 0
    for i in range(n):
        count += remove(d, mix(uint64(read_i64(ids, i))))
    return count


@kernel(int64(int64, int64, int64))
def collect(d, ids, slots):
    """Write the id and the slot of every row, in the index's order. -> how many."""
    count = 0
    for s in range(SEGMENT_COUNT):
        segment = load_i64(d, SEGMENTS) + s * (8 * SEGMENT_FIELDS)
        lines = load_i64(d, LINES) + load_i64(segment, BASE) * 64
        for i in range(load_i64(segment, MASK) + 1):
            line = lines + i * 64
            for entry in range(4):
                slot = int64(load_u32(line, 8 + entry))
                if slot != 0 and slot != DEAD:
                    store_i64(ids, count, int64(unmix(load_u64(line, entry))))
                    store_i64(slots, count, slot)
                    count += 1
    return count


@kernel(void(int64, int64, int64, int64, int64))
def gather(d, slots, n, width, out):
    """out[i] = the first `width` values of row slots[i]."""
    rows, stride = load_i64(d, ROWS), load_i64(d, STRIDE)
    for i in range(n):
        if i + AHEAD < n:
            prefetch(rows + read_i64(slots, i + AHEAD) * stride)
        row = rows + read_i64(slots, i) * stride
        for k in range(width):
            store_f32(out, i * width + k, read_f32(row, k))


@kernel(void(int64, int64, int64, int64, int64))
def scatter(d, slots, n, width, values):
    """The first `width` values of row slots[i] = values[i]."""
    rows, stride = load_i64(d, ROWS), load_i64(d, STRIDE)
    for i in range(n):
        if i + AHEAD < n:
            prefetch_write(rows + read_i64(slots, i + AHEAD) * stride)
        row = rows + read_i64(slots, i) * stride
        for k in range(width):
            store_f32(row, k, read_f32(values, i * width + k))

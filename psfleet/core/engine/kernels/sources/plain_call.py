"""The header of a call, where it has no other fields than most have; ids, and calls of a table's own kernels. All
of it works for a microsecond or so, and keeps Python's lock."""

from llvmlite import ir
from numba import int64, njit, types, uint64, void
from numba.core import cgutils
from numba.extending import intrinsic

from psfleet.core.engine.kernels.hash_index import find_fast, find_slow, first_line
from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import (OPTIONS, helper, load_i64, load_packed_i8, read_i64,
                                        store_i64)

# fmt: off
# What `read` finds: the layout, fields of psfleet.v1.Header, and where the payload begins; 0: it is not there.
(LAYOUT, LAYOUT_END, WORKER, INCARNATION, SEQUENCE, SAMPLES, HAS_LOSS, LOSS, CLOCK, LEASES, LEASE_SAMPLES,
 SKIPPED, PROGRESS, PROGRESS_END, HAS_LANE, GENERATION, TURN, PAYLOAD, CUT, CUT_AFTER) = range(20)
FIELDS = 20
DAMAGED = -1  # in place of a position
# A block of a table: addresses of its kernels `push` and `pull` and of its index, and their last arguments.
PUSH, PULL, INDEX, KIND, LOW, SPAN, STREAM, RING, LANES = range(9)


def quick(signature):
    return njit(signature, cache=True, no_cfunc_wrapper=True, **{**OPTIONS, "nogil": False})


@helper
def byte_at(message, at):
    return int64(load_packed_i8(message, at)) & 255


@helper
def number_at(message, at, end):
    """(value, the position behind it) of a varint of up to 63 bits."""
    value = uint64(0)
    for shift in range(0, 63, 7):
        if at >= end:
            return int64(0), int64(DAMAGED)
        byte = byte_at(message, at)
        at += 1
        value |= uint64(byte & 127) << uint64(shift)
        if byte < 128:
            return int64(value), at
    return int64(0), int64(DAMAGED)


@helper
def bytes_at(message, at, end):
    """(start, end) of a field of bytes behind its key."""
    size, at = number_at(message, at, end)
    if at == DAMAGED or size > end - at:
        return int64(DAMAGED), int64(DAMAGED)
    return at, at + size


@helper
def place_of(key):
    """The place of a number, by field << 3."""
    if key <= 24:
        return WORKER + (key >> 3) - 1  # worker, incarnation, sequence
    if key == 6 << 3:
        return SAMPLES
    if key == 12 << 3:
        return CLOCK
    if key == 16 << 3 or key == 17 << 3:
        return LEASES + (key >> 3) - 16
    if key == 13 << 3 or key == 14 << 3:
        return CUT + (key >> 3) - 13
    if key == 23 << 3:
        return SKIPPED
    return DAMAGED


@helper
def read_header(message, at, end, fields):
    """-> whether it has none but these fields"""
    while at < end:
        key, at = number_at(message, at, end)
        if at == DAMAGED:
            return False
        if key == 7 << 3 | 1:  # loss
            if end - at < 8:
                return False
            store_i64(fields, HAS_LOSS, 1)
            store_i64(fields, LOSS, read_i64(message + at, 0))
            at += 8
        elif key == 18 << 3 | 2:  # progress
            start, at = bytes_at(message, at, end)
            store_i64(fields, PROGRESS, start)
            store_i64(fields, PROGRESS_END, at)
        elif key == 9 << 3 | 2:  # lane: generation, then turn
            start, stop = bytes_at(message, at, end)
            if (
                stop - start < 11
                or byte_at(message, start) != 9
                or byte_at(message, start + 9) != 16
            ):
                return False
            store_i64(fields, HAS_LANE, 1)
            store_i64(fields, GENERATION, read_i64(message + start + 1, 0))
            turn, at = number_at(message, start + 10, stop)
            store_i64(fields, TURN, turn)
            if at != stop:
                return False
        else:
            place = place_of(key) if key & 7 == 0 and key > 0 else DAMAGED
            value, at = number_at(message, at, end)
            if place == DAMAGED or (place == WORKER and value >= 1 << 32):
                return False
            store_i64(fields, place, value)
        if at == DAMAGED:
            return False
    return True


@quick(int64(int64, int64, int64))
def read(message, size, fields):
    """Read a message whose header is in two parts, first its layout. -> whether it is no other"""
    for place in range(FIELDS):
        store_i64(fields, place, 0)
    if size < 4 or byte_at(message, 0) != 10:
        return 0
    start, end = bytes_at(message, 1, size)
    store_i64(fields, LAYOUT, start)
    store_i64(fields, LAYOUT_END, end)
    if end == DAMAGED or end >= size or byte_at(message, end) != 10:
        return 0
    start, end = bytes_at(message, end + 1, size)
    if end == DAMAGED or not read_header(message, start, end, fields):
        return 0
    if end < size and byte_at(message, end) == 26:  # what fills up
        start, end = bytes_at(message, end + 1, size)
    if end == DAMAGED or end == size:
        return int64(end == size)
    if byte_at(message, end) != 18:
        return 0
    start, end = bytes_at(message, end + 1, size)
    store_i64(fields, PAYLOAD, start)
    return int64(end == size)


@quick(int64(int64, int64, int64))
def unknown(block, ids, count):
    """Count those of a few ids that have no row; -1: one of them is named twice."""
    d, missing = load_i64(block, INDEX), 0
    for i in range(count):
        id_ = read_i64(ids, i)
        for j in range(i):
            if read_i64(ids, j) == id_:
                return -1
        hash_ = mix(uint64(id_))
        if find_fast(first_line(d, hash_), hash_) == 0 and find_slow(d, hash_) == 0:
            missing += 1
    return missing


def _kernel_call(count, floats):
    """call(address, ...) of a kernel with so many arguments of 64 bits, of which those at `floats` are float64."""

    @intrinsic
    def call(context, address, *arguments):
        def generate(context, builder, signature, values):
            word, pointer = ir.IntType(64), ir.IntType(8).as_pointer()
            kinds = [ir.DoubleType() if place in floats else word for place in range(count)]
            kernel = ir.FunctionType(
                ir.IntType(32), [word.as_pointer(), pointer.as_pointer(), *kinds]
            )
            result, error = (
                cgutils.alloca_once(builder, word),
                cgutils.alloca_once(builder, pointer),
            )
            given = cgutils.unpack_tuple(builder, values[1])
            given = [builder.bitcast(value, kind) for value, kind in zip(given, kinds)]
            builder.call(builder.inttoptr(values[0], kernel.as_pointer()), [result, error, *given])
            return builder.load(result)

        return types.int64(types.int64, types.StarArgTuple([types.int64] * count)), generate

    return call


_push, _pull = _kernel_call(13, (8, 9)), _kernel_call(9, (5, 6))


@quick(void(int64, int64, int64, int64, int64, int64, int64))
def push(b, ids, count, gradients, scalars, turn, step):
    """Let the table's own kernel push; `b`: its block."""
    _push(load_i64(b, PUSH), load_i64(b, INDEX), ids, count, gradients, scalars, turn, step, load_i64(b, KIND),
          load_i64(b, LOW), load_i64(b, SPAN), load_i64(b, STREAM), load_i64(b, RING), load_i64(b, LANES))


@quick(int64(int64, int64, int64, int64))
def pull(b, ids, count, out):
    """Let it pull. -> unknown ids"""
    return _pull(load_i64(b, PULL), load_i64(b, INDEX), ids, count, out, load_i64(b, KIND), load_i64(b, LOW),
                 load_i64(b, SPAN), load_i64(b, STREAM), load_i64(b, RING))

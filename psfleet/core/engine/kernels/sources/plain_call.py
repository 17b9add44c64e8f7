"""Fast path of a server for small calls: parse a header of the usual fields, look ids up, push and pull.

`PlainCalls` of psfleet_server/services/shard_service.py uses it (docs/decisions/0033-plain-calls.md). A
message with anything unusual is no error here: a kernel reports it, and the call takes the ordinary path,
which also reports errors to the caller. So the parser rejects every field that it does not know, and writes
only `fields`.

Each function runs for about a microsecond and keeps the GIL. Releasing the GIL would take longer than the
function (a call of 4 connections took 37 us instead of 33).
"""

from llvmlite import ir
from numba import int64, njit, types, uint64, void
from numba.core import cgutils
from numba.extending import intrinsic

from psfleet.core.engine.kernels.hash_index import find_fast, find_slow, first_line
from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import (OPTIONS, helper, load_i64, load_packed_i8, read_i64,
                                        store_i64)

# Positions in `fields`, which `read` writes: the range of the layout in the message, fields of
# psfleet.v1.Header, and the offset of the payload. A field that the message does not have is 0.
(LAYOUT, LAYOUT_END, WORKER, INCARNATION, SEQUENCE, SAMPLES, HAS_LOSS, LOSS, CLOCK, LEASES, LEASE_SAMPLES,
 SKIPPED, PROGRESS, PROGRESS_END, HAS_LANE, GENERATION, TURN, PAYLOAD, CUT, CUT_AFTER, ADDRESSED,
 ADDRESSED_END) = range(22)
FIELDS = 22
# In place of an offset or position: the message ends too soon or has an unknown field. No offset is below 0,
# so the checks that follow fail too, and one check at the end of a field is enough.
DAMAGED = -1
# Positions in a table's block, an array of int64 with all that calls need: the addresses of the table's
# kernels `push` and `pull` and of its index's descriptor, then the last arguments of both kernels. Floats are
# stored as their bits. Kernels differ by rule and width; called by address, they need no wrapper compiled for
# each. The address is that of the machine code behind numba's entry for Python, which would release the GIL.
PUSH, PULL, INDEX, KIND, LOW, SPAN, STREAM, RING, LANES = range(9)


def quick(signature):
    """Return a decorator for a function that Python calls, as `kernel` does, but keeping the GIL."""
    # Compiled without an entry point for C, which would only take time.
    return njit(signature, cache=True, no_cfunc_wrapper=True, **{**OPTIONS, "nogil": False})


@helper
def byte_at(message, at):
    """Return the byte at offset `at` of the message, 0 to 255."""
    return int64(load_packed_i8(message, at)) & 255


@helper
def number_at(message, at, end):
    """Return the value of a protobuf varint of up to 63 bits and the offset behind it, or (0, DAMAGED)."""
    #     300 = 0b10_0101100    -->    1 0101100   0 0000010
    #
    # A byte has 7 bits of the number, the lowest first. Its top bit is 1 if another byte follows. A number of
    # 64 bits is left to the ordinary path: as int64 it would be negative, and as a length pass the check of
    # `bytes_at`.
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
    """Return start and end of a field of bytes whose length is stored at `at`, or (DAMAGED, DAMAGED)."""
    size, at = number_at(message, at, end)
    if at == DAMAGED or size > end - at:
        return int64(DAMAGED), int64(DAMAGED)
    return at, at + size


@helper
def place_of(key):
    """Return the position in `fields` of the header field with this protobuf key, or DAMAGED if unknown.

    The key is field << 3, that of a varint.
    """
    # A protobuf key is field << 3 | kind, where kind is 0 for a varint, 1 for 8 bytes and 2 for bytes. The
    # numbers of the fields are those of Header in protos/psfleet/v1/frame.proto. The other fields belong to
    # calls that are never plain: of rounds, of traces, of processes without a seat, and replies.
    if key <= 24:  # and at least 8, since the caller excludes 0 and the other kinds
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
    """Write the header's fields, from `at` to `end`; return False if it is damaged or has unknown fields."""
    while at < end:
        first = at
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
            # The positions are stored even if damaged. The check below then refuses the message, and its
            # fields are not used.
            store_i64(fields, PROGRESS, start)
            store_i64(fields, PROGRESS_END, at)
        elif key == 24 << 3 | 2 and load_i64(fields, ADDRESSED) == 0:  # with its key: protobuf parses it
            _, at = bytes_at(message, at, end)
            store_i64(fields, ADDRESSED, first)
            store_i64(fields, ADDRESSED_END, at)
        elif key == 9 << 3 | 2:  # lane: generation, then turn
            # A submessage of at least 11 bytes: key 9 and 8 bytes of the generation, key 16 and a varint.
            # protobuf allows other orders; the ordinary path reads those. A damaged field has the length 0
            # here, and a damaged turn ends at DAMAGED and not at `stop`.
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
            # The worker is a uint32 in the header; the other fields have 64 bits. After a damaged varint `at`
            # is DAMAGED, which is checked below.
            if place == DAMAGED or (place == WORKER and value >= 1 << 32):
                return False
            store_i64(fields, place, value)
        if at == DAMAGED:
            return False
    return True


@quick(int64(int64, int64, int64))
def read(message, size, fields):
    """Parse a message; return 1 if it has only the expected parts, in their order, else 0.

    message, size: address and bytes. fields: address of int64 [FIELDS], written at the positions defined
    above.
    """
    #     key 10   layout    bytes of the header that are equal in all calls of this shape
    #     key 10   header    fields that differ: a second part of the same protobuf field, which merges both
    #     key 26   filling   optional
    #     key 18   payload   optional, ends the message
    for place in range(FIELDS):  # all calls share the array, so it has the fields of the call before
        store_i64(fields, place, 0)
    # The shortest message has two keys and two lengths. This also allows `byte_at` to read the first byte.
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
    if end < size and byte_at(message, end) == 26:  # filling before the payload
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
    """Return the number of ids without a row, or -1 if an id is repeated.

    block: address of the table's block, the arguments that are the same in each call. ids: address of int64
    [count].
    """
    # All pairs are compared, which is faster than a hash table for the few ids of a small call: at most 64
    # (_FEW of tables/row_update.py).
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
    """Return call(address, ...), which calls the machine code of a kernel with `count` arguments of 64 bits.

    floats: Positions of the arguments that the kernel takes as float64. The caller passes their bits as
    int64.
    """

    # numba compiles a function to int32 status(result *, error **, arguments...). Kernels raise no errors, so
    # the status is ignored. Both pointers must be valid all the same, even for a kernel without a result.
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


# The only floats among the arguments of `push` and `pull` are `low` and `span`.
_push, _pull = _kernel_call(13, (8, 9)), _kernel_call(9, (5, 6))


@quick(void(int64, int64, int64, int64, int64, int64, int64))
def push(b, ids, count, gradients, scalars, turn, step):
    """Call the kernel `push` of sources/push.txt for a table.

    b: address of the table's block, the arguments that are the same in each call. ids: address of int64
    [count], without repeats. gradients, scalars, turn, step: as for that kernel.
    """
    _push(load_i64(b, PUSH), load_i64(b, INDEX), ids, count, gradients, scalars, turn, step, load_i64(b, KIND),
          load_i64(b, LOW), load_i64(b, SPAN), load_i64(b, STREAM), load_i64(b, RING), load_i64(b, LANES))


@quick(int64(int64, int64, int64, int64))
def pull(b, ids, count, out):
    """Call the kernel `pull` of sources/pull.txt for a table; return the number of ids without a row.

    b: address of the table's block, the arguments that are the same in each call. ids: address of int64
    [count]. out: address of float32 [count, dim].
    """
    return _pull(load_i64(b, PULL), load_i64(b, INDEX), ids, count, out, load_i64(b, KIND), load_i64(b, LOW),
                 load_i64(b, SPAN), load_i64(b, STREAM), load_i64(b, RING))

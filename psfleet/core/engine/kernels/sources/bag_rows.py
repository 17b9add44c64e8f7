from llvmlite import ir
from numba import float32, int64, types, uint32, void
from numba.core import cgutils
from numba.extending import intrinsic

from psfleet.core.engine.kernels.intrinsics import (helper, kernel, load_f32, load_i64, load_u32, prefetch,
                                        prefetch_write, read_f32, read_i64, read_u32, store_f32,
                                        store_i64, store_u32)

DIM = 4
AHEAD = 16
LINES = min((DIM * 4 + 63) // 64, 8)
IN_REGISTERS = DIM % 8 == 0 and DIM <= 128  # a sum of rows, while they are added to it


def adding(factor, ahead):
    """add(codes, start, end, n, shift, bases, factors, to, goes_on): write the sum of the rows that the
    codes start to end - 1, of n, name, in their order. bases: address of each group's rows.

    factor: "": none. "place", "code": each row is multiplied by that of its place among the codes, or of its
    code. ahead: so many rows before it is added, a row is fetched; 0: rows are near. goes_on: begin with
    what is there, and not with 0.
    """
    if IN_REGISTERS:
        return adding_in_registers(factor, ahead)

    @helper
    def add(codes, start, end, n, shift, bases, factors, to, goes_on):
        low = (int64(1) << shift) - 1
        if goes_on == 0:
            for k in range(DIM):
                store_f32(to, k, float32(0))
        for at in range(start, end):
            if ahead != 0 and at + ahead < n:
                code = int64(read_u32(codes, at + ahead))
                next_row = read_i64(bases, code >> shift) + (code & low) * (4 * DIM)
                for line in range(LINES):
                    prefetch(next_row + line * 64)
            code = int64(read_u32(codes, at))
            row = read_i64(bases, code >> shift) + (code & low) * (4 * DIM)
            if factor == "":
                for k in range(DIM):
                    store_f32(to, k, load_f32(to, k) + read_f32(row, k))
            else:
                by = read_f32(factors, at if factor == "place" else code)
                for k in range(DIM):
                    store_f32(to, k, load_f32(to, k) + by * read_f32(row, k))

    return add


def adding_in_registers(factor, ahead):
    """The same as one vector: the compiler would store the sum after each row, and load it for the next."""
    word, number, line = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
    vector = ir.VectorType(ir.FloatType(), DIM)

    @intrinsic
    def add(context, codes, start, end, n, shift, bases, factors, to, goes_on):
        def generate(context, builder, signature, arguments):
            codes, start, end, n, shift, bases, factors, to, goes_on = arguments
            low = builder.sub(builder.shl(word(1), shift), word(1))
            fetch = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), [line, *[number] * 3]),
                "llvm.prefetch.p0",
            )

            def load(kind, address, index):
                place = builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])
                value = builder.load(place)
                value.align = 1
                return value

            def row_of(code):
                base = load(word, bases, builder.lshr(code, shift))
                return builder.add(base, builder.mul(builder.and_(code, low), word(4 * DIM)))

            zeros = ir.Constant(vector, [0.0] * DIM)
            first = builder.select(
                builder.icmp_signed("!=", goes_on, word(0)), load(vector, to, word(0)), zeros
            )
            total = cgutils.alloca_once_value(builder, first)
            with cgutils.for_range_slice(builder, start, end, word(1), word) as (at, _):
                if ahead:
                    place = builder.add(at, word(ahead))
                    place = builder.select(builder.icmp_signed("<", place, n), place, at)
                    next_row = row_of(builder.zext(load(number, codes, place), word))
                    for k in range(LINES):
                        address = builder.inttoptr(builder.add(next_row, word(64 * k)), line)
                        builder.call(fetch, [address, number(0), number(3), number(1)])
                code = builder.zext(load(number, codes, at), word)
                values = load(vector, row_of(code), word(0))
                if factor:
                    by = load(ir.FloatType(), factors, at if factor == "place" else code)
                    one = builder.insert_element(ir.Constant(vector, ir.Undefined), by, number(0))
                    lanes = ir.Constant(ir.VectorType(number, DIM), [0] * DIM)
                    values = builder.fmul(builder.shuffle_vector(one, one, lanes), values)
                builder.store(builder.fadd(builder.load(total), values), total)
            store = builder.store(builder.load(total), builder.inttoptr(to, vector.as_pointer()))
            store.align = 1
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return add


add_rows, add_weighted = adding("", AHEAD), adding("place", AHEAD)
add_bags, add_scaled = adding("", 0), adding("code", 0)


@kernel(void(int64, int64, int64, int64, int64, int64, int64, int64, int64))
def pool(inverse, n, shift, rows, ends, bags, weights, scales, out):
    """`expand` and then `pool` of row_sums.py, with the same bits; `out` may hold anything."""
    at = int64(0)
    for b in range(bags):
        to = out + b * (4 * DIM)
        end = load_i64(ends, b)
        if weights == 0:
            add_rows(inverse, at, end, n, shift, rows, 0, to, 0)
        else:
            add_weighted(inverse, at, end, n, shift, rows, weights, to, 0)
        at = end
        if scales != 0:
            scale = read_f32(scales, b)
            for k in range(DIM):
                store_f32(to, k, load_f32(to, k) * scale)


@kernel(void(int64, int64, int64, int64, int64, int64, int64, int64, int64))
def merge(inverse, n, shift, gradients, ends, bags, weights, scales, sums):
    """`spread` and then `merge` of row_sums.py, with the same bits."""
    low = (int64(1) << shift) - 1
    at = int64(0)
    for b in range(bags):
        gradient = gradients + b * (4 * DIM)
        scale = float32(1) if scales == 0 else read_f32(scales, b)
        end = load_i64(ends, b)
        while at < end:
            if at + AHEAD < n:
                code = int64(read_u32(inverse, at + AHEAD))
                ahead = load_i64(sums, (code >> shift) * 2) + (code & low) * (4 * DIM)
                for line in range(LINES):
                    prefetch_write(ahead + line * 64)
            code = int64(read_u32(inverse, at))
            group, place = code >> shift, code & low
            row = load_i64(sums, group * 2) + place * (4 * DIM)
            weight = float32(1) if weights == 0 else read_f32(weights, at)
            if place == load_i64(sums, group * 2 + 1):
                store_i64(sums, group * 2 + 1, place + 1)
                for k in range(DIM):
                    store_f32(row, k, float32(0) + (read_f32(gradient, k) * scale) * weight)
            else:
                for k in range(DIM):
                    store_f32(row, k, load_f32(row, k) + (read_f32(gradient, k) * scale) * weight)
            at += 1


@kernel(void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64))
def merge_by_row(inverse, n, shift, gradients, ends, bags, scales, sums, groups, offsets, work):
    """`merge` without weights, one row after the other: of each the bags in order, with the same bits.

    Each sum is written once, and the gradients of the bags, of which there are fewer, are read again.

    offsets: int64 [groups + 2]: the number of each group's first row, then anything. work: uint32
    [rows + 2 + n].
    """
    low, count = (int64(1) << shift) - 1, load_i64(offsets, groups)
    order, base = work + 4 * (count + 2), offsets + 8 * (groups + 1)
    store_i64(base, 0, gradients)
    for number in range(count + 2):
        store_u32(work, number, uint32(0))
    for i in range(n):
        code = int64(read_u32(inverse, i))
        number = load_i64(offsets, code >> shift) + (code & low) + 2
        store_u32(work, number, uint32(load_u32(work, number) + uint32(1)))
    total = uint32(0)
    for number in range(count + 2):
        total = uint32(total + load_u32(work, number))
        store_u32(work, number, total)
    at = int64(0)
    for b in range(bags):
        end = load_i64(ends, b)
        while at < end:
            code = int64(read_u32(inverse, at))
            number = load_i64(offsets, code >> shift) + (code & low) + 1
            place = load_u32(work, number)
            store_u32(work, number, uint32(place + uint32(1)))
            store_u32(order, int64(place), uint32(b))
            at += 1
    for group in range(groups):
        first, rows = load_i64(offsets, group), load_i64(sums, group * 2)
        begun = load_i64(sums, group * 2 + 1)
        for place in range(load_i64(offsets, group + 1) - first):
            start, end = load_u32(work, first + place), load_u32(work, first + place + 1)
            if start < end:
                row, goes_on = rows + place * (4 * DIM), int64(place < begun)
                if scales == 0:
                    add_bags(order, int64(start), int64(end), n, 32, base, 0, row, goes_on)
                else:
                    add_scaled(order, int64(start), int64(end), n, 32, base, scales, row, goes_on)
                if place >= begun:
                    store_i64(sums, group * 2 + 1, place + 1)

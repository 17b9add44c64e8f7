"""Kernels that pool the rows of a batch's ids, and that sum the gradients of bags by id, in one pass each.

    distinct rows  -- pool -->    one row for each bag       (expand, then pool, of row_sums.py)
    sums           <-- merge --   gradients of the bags      (spread, then merge)

The two steps of row_sums.py write and read an array with a row for each id of the batch, and a batch has many
more ids than bags. One pass needs no such array, and its results are bit-identical. Codes are those of
sources/dedup.py: group << shift | position, where a group is the ids of one server.
"""
from llvmlite import ir
from numba import float32, int64, types, uint32, void
from numba.core import cgutils
from numba.extending import intrinsic

from psfleet.core.engine.kernels.intrinsics import (helper, kernel, load_f32, load_i64, load_u32, prefetch,
                                        prefetch_write, read_f32, read_i64, read_u32, store_f32,
                                        store_i64, store_u32)

DIM = 4  # `width_kernels` of generate.py replaces this line
# Codes between the prefetch of a row and its use. Distances from 2 to 32 differed by no more than the noise
# (benchmarks/README.md).
AHEAD = 16
# Cache lines of a row that are prefetched. More than 8 are slower: with all 64 lines of rows of 1,024 values
# `pool` took 490 ns a row, and 375 with 8.
LINES = min((DIM * 4 + 63) // 64, 8)
# Whether a sum fits vector registers while rows are added to it. AVX has 16 registers of 8 float32, together
# 128 values, and AVX-512 32 registers of 16. For other widths the plain loop is as fast or much faster: 11
# instead of 69 ns an id for rows of 136 values, and 1.8 instead of 6.1 for rows of 20.
IN_REGISTERS = DIM % 8 == 0 and DIM <= 128


def adding(factor, ahead):
    """Return the kernel add(codes, start, end, n, shift, bases, factors, to), which sums rows.

        float32 [DIM] at `to` = 0 + sum of factor * row(code) over codes[start:end]

    The rows are added in this order. n is the number of all codes, and bases, int64 [groups], the address of
    each group's rows.

    factor: Index into `factors` for a row's factor: "place" for the position of its code, "code" for the code
    itself, or "" if rows have no factor.
    ahead: Distance of the prefetched row in codes, or 0 for rows that are in the caches already.
    """
    if IN_REGISTERS:
        return adding_in_registers(factor, ahead)

    @helper
    def add(codes, start, end, n, shift, bases, factors, to):
        low = (int64(1) << shift) - 1
        for k in range(DIM):
            store_f32(to, k, float32(0))
        for at in range(start, end):
            # Up to n and not to `end`: a bag may have few ids, and the rows of the next bag follow.
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
    """Return the kernel of `adding` that keeps the sum in registers, as one vector of DIM values.

    The compiler would store the sum of a plain loop after each row and load it again for the next row.
    """
    # LLVM splits the vector over the registers of the machine. Each lane still adds its rows in order, so the
    # result is bit-identical to that of the plain loop. Products and sums carry no fastmath flag, so LLVM
    # does not fuse them, which would round once instead of twice (decision 1).
    word, number, line = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
    vector = ir.VectorType(ir.FloatType(), DIM)

    @intrinsic
    def add(context, codes, start, end, n, shift, bases, factors, to):
        def generate(context, builder, signature, arguments):
            codes, start, end, n, shift, bases, factors, to = arguments
            low = builder.sub(builder.shl(word(1), shift), word(1))
            # This writes LLVM's code directly, so it cannot use the helpers `prefetch` and `load_f32`.
            fetch = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), [line, *[number] * 3]),
                "llvm.prefetch.p0",
            )

            def load(kind, address, index):
                place = builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])
                value = builder.load(place)
                value.align = 1  # rows may lie at any address, for example inside a received message
                return value

            def row_of(code):
                base = load(word, bases, builder.lshr(code, shift))
                return builder.add(base, builder.mul(builder.and_(code, low), word(4 * DIM)))

            # LLVM's variables are memory at first. It turns this one into registers, because nothing takes
            # the variable's address.
            total = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * DIM))
            with cgutils.for_range_slice(builder, start, end, word(1), word) as (at, _):
                if ahead:
                    # Behind the last code, prefetch the present row once more: that needs no branch.
                    place = builder.add(at, word(ahead))
                    place = builder.select(builder.icmp_signed("<", place, n), place, at)
                    next_row = row_of(builder.zext(load(number, codes, place), word))
                    for k in range(LINES):
                        address = builder.inttoptr(builder.add(next_row, word(64 * k)), line)
                        # 0: to be read, 3: keep it in all caches, 1: data and not code
                        builder.call(fetch, [address, number(0), number(3), number(1)])
                code = builder.zext(load(number, codes, at), word)
                values = load(vector, row_of(code), word(0))
                if factor:
                    # LLVM multiplies only vectors by vectors, so the factor is copied to all lanes: it is put
                    # into lane 0, and a shuffle with a mask of zeros repeats lane 0.
                    by = load(ir.FloatType(), factors, at if factor == "place" else code)
                    one = builder.insert_element(ir.Constant(vector, ir.Undefined), by, number(0))
                    lanes = ir.Constant(ir.VectorType(number, DIM), [0] * DIM)
                    values = builder.fmul(builder.shuffle_vector(one, one, lanes), values)
                builder.store(builder.fadd(builder.load(total), values), total)
            store = builder.store(builder.load(total), builder.inttoptr(to, vector.as_pointer()))
            store.align = 1
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return add


add_rows, add_weighted = adding("", AHEAD), adding("place", AHEAD)
add_bags, add_scaled = adding("", 0), adding("code", 0)


@kernel(void(int64, int64, int64, int64, int64, int64, int64, int64, int64))
def pool(inverse, n, shift, rows, ends, bags, weights, scales, out):
    """Compute `expand` and then `pool` of row_sums.py in one pass, with bit-identical results.

    The arguments are those of the two kernels. `rows` has the addresses of the groups, and `out` need not be
    zeroed.
    """
    at = int64(0)
    for b in range(bags):
        to = out + b * (4 * DIM)
        end = load_i64(ends, b)
        if weights == 0:
            add_rows(inverse, at, end, n, shift, rows, 0, to)
        else:
            add_weighted(inverse, at, end, n, shift, rows, weights, to)
        at = end
        if scales != 0:
            scale = read_f32(scales, b)
            for k in range(DIM):
                store_f32(to, k, load_f32(to, k) * scale)


@kernel(void(int64, int64, int64, int64, int64, int64, int64, int64, int64))
def merge(inverse, n, shift, gradients, ends, bags, weights, scales, sums):
    """Compute `spread` and then `merge` of row_sums.py in one pass, with bit-identical sums.

    The arguments are those of the two kernels.
    """
    # As in `merge` of row_sums.py, the first gradient of an id begins its sum, and 0 is added so that -0
    # becomes 0. An id occurs for the first time if its position is the number of sums that have a value,
    # because positions are given in the order of first occurrence. A missing scale or weight is 1, since a
    # multiplication by 1 changes no bit, and one loop then serves all cases.
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


@kernel(void(int64, int64, int64, int64, int64, int64, int64, int64))
def sort_bags(inverse, n, shift, ends, bags, offsets, groups, work):
    """Sort the bags of a batch by row: a bag once for each occurrence of the row, in the order of the batch.

    inverse, n, shift, ends, bags: as for `merge`. offsets: int64 [groups + 1], the number of each group's
    first row, and the number of all rows. work: uint32 [rows + 2 + n], written.
    """
    # A counting sort of the batch by row, which turns "row of each occurrence" into "bags of each row":
    #
    #     work    [ start of each row's bags, rows + 2 words | order: n words, bags sorted by row ]
    #
    # 1. Count the occurrences of row r in work[r + 2].
    # 2. Sum up: now work[r + 1] is the position in `order` where the bags of row r start.
    # 3. Write the bag of each occurrence to order[work[r + 1]] and add 1 to work[r + 1]. In the end work[r]
    #    is the start of the bags of row r, and work[r + 1] their end.
    #
    # The sort is stable, so a row's bags keep the order of the batch, and sums stay bit-identical.
    low, count = (int64(1) << shift) - 1, load_i64(offsets, groups)
    order = work + 4 * (count + 2)
    for number in range(count + 2):
        store_u32(work, number, uint32(0))
    for i in range(n):
        code = int64(read_u32(inverse, i))
        number = load_i64(offsets, code >> shift) + (code & low) + 2
        # The cast back, here and below: in numba the sum of two uint32 is a uint64.
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


@kernel(void(int64, int64, int64, int64, int64, int64, int64, int64))
def sum_sorted(work, count, n, first, last, base, scales, sums):
    """Sum the gradients of the bags of rows `first` to `last` - 1, with the bits of `merge` without weights.

    `merge` visits the sums at random, once for each occurrence of an id. Here each sum is written once, while
    the gradients of the bags, a smaller array, are read again and again.

    work: as `sort_bags` wrote it for `count` rows and n ids. base: address of the address of the bags'
    gradients, float32 [bags, DIM]. scales: float32 [bags], or address 0. sums: float32 [last - first, DIM].
    """
    # The sorted bags serve as the codes of `add_bags`: with a shift of 32 each bag is in group 0, whose rows
    # are the gradients. `base` is the array of addresses that `add_bags` takes, with this one group.
    order = work + 4 * (count + 2)
    for number in range(first, last):
        start, end = int64(load_u32(work, number)), int64(load_u32(work, number + 1))
        to = sums + (number - first) * (4 * DIM)
        if scales == 0:
            add_bags(order, start, end, n, 32, base, 0, to)
        else:
            add_scaled(order, start, end, n, 32, base, scales, to)

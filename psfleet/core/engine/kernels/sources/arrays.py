"""Kernels on large arrays: a copy that does not go through the caches, and a sum of squares."""
from llvmlite import ir
from numba import float64, int64, types, void
from numba.core import cgutils
from numba.extending import intrinsic

from psfleet.core.engine.kernels.intrinsics import kernel, read_f32

LINE = 64  # bytes


@intrinsic
def stream_line(context, out, source):
    """Copy 64 bytes to an address that is a multiple of 64, past the caches (a non-temporal store).

    An ordinary store would read the line from memory before it writes it.
    """

    def generate(context, builder, signature, arguments):
        line = ir.VectorType(ir.IntType(64), LINE // 8).as_pointer()
        value = builder.load(builder.inttoptr(arguments[1], line))
        value.align = 1  # only the target must begin at a cache line
        store = builder.store(value, builder.inttoptr(arguments[0], line))
        store.align = LINE
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def finish_stores(context):
    """Make all lines that `stream_line` wrote visible to other threads before any later store (x86: sfence).

    Non-temporal stores are not ordered with ordinary stores. Without the fence another thread could see a
    flag that says "copied" before the copy. Other processors need other fences, so `copy_over` of
    initial_values.py, the only caller, uses this file's copy on x86 alone.
    """

    def generate(context, builder, signature, arguments):
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse.sfence"
        )
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@kernel(void(int64, int64, int64))
def copy_lines(out, source, lines):
    """Copy `lines` lines of 64 bytes past the caches; the address `out` is a multiple of 64."""
    for i in range(lines):
        stream_line(out + LINE * i, source + LINE * i)
    finish_stores()


@kernel(float64(int64, int64))
def summed(values, count):
    """Return the sum of the squares of float32 [count]. It is a float64, which finite values cannot overflow.
    """
    total = float64(0)
    for i in range(count):
        value = float64(read_f32(values, i))
        total += value * value
    return total

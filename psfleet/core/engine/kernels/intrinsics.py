"""Decorators for kernels, and the loads, stores and prefetches by address that kernels consist of.

Kernels take addresses (int64) instead of arrays. Array arguments leave reference counting in the inner loops
(twice the time of a table look-up), and cost more to dispatch. An address may have any alignment: gradients
are read where they lie, inside a received message.

    load_f32(address, k)            float32 number k behind the address; memory that the kernel may also write
    read_f32(address, k)            the same; memory that does not change while the kernel runs
    store_f32(address, k, value)    write float32 number k
    prefetch(address)               start to load the cache line; prefetch_write if it will be written

The same exist for u32, u64 and i64. The names with _lane, _wide and _packed also tell the compiler that these
memories do not overlap (see _SCOPES).
"""
# mypy: ignore-errors
# The bodies are code for numba: their types are those of the signatures given to it.

from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# error_model "numpy" leaves out the check of each divisor for 0, a branch that would prevent vectorising. No
# fastmath: float32 operations are rounded one by one (decision 1).
OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}


_KINDS = {
    "i8": (types.int8, ir.IntType(8)),
    "u16": (types.uint16, ir.IntType(16)),
    "f32": (types.float32, ir.FloatType()),
    "u32": (types.uint32, ir.IntType(32)),
    "u64": (types.uint64, ir.IntType(64)),
    "i64": (types.int64, ir.IntType(64)),
}
# For each memory: the scopes that an access belongs to, and the scopes that it is known not to overlap.
#
#     lanes     partial sums of a rule
#     packed    a row in 16 or 8 bits, as it is stored
#     wide      the same row as float32, in scratch memory
_SCOPES = {
    "": ((), ("lanes",)),
    "lanes": (("lanes",), ()),
    "packed": (("packed",), ("lanes",)),
    "wide": ((), ("lanes", "packed")),
}


def helper(function):
    """Compile a function that kernels call; its machine code becomes a part of theirs."""
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)


def inlined(function):
    """Compile a helper whose text replaces each call.

    Compiled as a function of its own, a helper with two similar results would compute both as one short
    vector, and LLVM would not vectorise the loop around the call.
    """
    return njit(inline="always", **OPTIONS)(function)


def kernel(signature):
    """Return a decorator for a function that Python calls, compiled at import or loaded from the cache."""
    return njit(signature, cache=True, no_cfunc_wrapper=True, **OPTIONS)


def entry(signature):
    """Return a decorator for a function that kernels call by its address, so that it is compiled once."""
    return cfunc(signature, cache=True, **OPTIONS)


def called(signature):
    """Return call(address, arguments), which calls an `entry` of this signature with a tuple of arguments."""
    given = types.Tuple(signature.args)

    @intrinsic
    def call(context, address, arguments):
        def generate(context, builder, _, values):
            kinds = [context.get_value_type(kind) for kind in signature.args]
            function = ir.FunctionType(context.get_value_type(signature.return_type), kinds)
            pointer = builder.inttoptr(values[0], function.as_pointer())
            return builder.call(pointer, cgutils.unpack_tuple(builder, values[1]))

        return signature.return_type(types.int64, given), generate

    return call


def _mark_apart(module, instruction, memory):
    """Tell the compiler which memories this load or store does not overlap."""
    domain = module.add_metadata([ir.MetaDataString(module, "psfleet")])
    for name, scopes in zip(("alias.scope", "noalias"), _SCOPES[memory], strict=True):
        if scopes:
            nodes = [
                module.add_metadata([ir.MetaDataString(module, scope), domain]) for scope in scopes
            ]
            instruction.set_metadata(name, module.add_metadata(nodes))


def _load(kind, invariant=False, memory=""):
    """Return load(address, index) -> value.

    invariant: True if nothing writes this memory while the kernel runs.
    """
    numba_type, llvm_type = _KINDS[kind]

    @intrinsic
    def load(context, address, index):
        def generate(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], llvm_type.as_pointer())
            value = builder.load(builder.gep(pointer, [arguments[1]]))
            value.align = 1
            if invariant:
                value.set_metadata("invariant.load", builder.module.add_metadata([]))
            _mark_apart(builder.module, value, memory)
            return value

        return numba_type(types.int64, types.int64), generate

    return load


def _store(kind, memory=""):
    """Return store(address, index, value)."""
    numba_type, llvm_type = _KINDS[kind]

    @intrinsic
    def store(context, address, index, value):
        def generate(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], llvm_type.as_pointer())
            store = builder.store(arguments[2], builder.gep(pointer, [arguments[1]]))
            store.align = 1
            _mark_apart(builder.module, store, memory)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), generate

    return store


def _prefetch(write):
    @intrinsic
    def fetch(context, address):
        def generate(context, builder, signature, arguments):
            word, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
            function = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), [pointer, word, word, word]),
                "llvm.prefetch.p0",
            )
            builder.call(
                function, [builder.inttoptr(arguments[0], pointer), word(write), word(3), word(1)]
            )
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return fetch


load_f32, load_u32, load_u64, load_i64 = _load("f32"), _load("u32"), _load("u64"), _load("i64")
read_f32, read_u32, read_i64 = _load("f32", True), _load("u32", True), _load("i64", True)
store_f32, store_u32, store_u64, store_i64 = (
    _store("f32"),
    _store("u32"),
    _store("u64"),
    _store("i64"),
)
load_lane, store_lane = _load("f32", memory="lanes"), _store("f32", memory="lanes")
load_wide, store_wide = _load("u32", memory="wide"), _store("u32", memory="wide")
load_packed_i8, store_packed_i8 = _load("i8", memory="packed"), _store("i8", memory="packed")
load_packed_u16, store_packed_u16 = _load("u16", memory="packed"), _store("u16", memory="packed")
load_packed_u32, store_packed_u32 = _load("u32", memory="packed"), _store("u32", memory="packed")
prefetch, prefetch_write = _prefetch(0), _prefetch(1)


def fold(count):
    """Return fold(lanes), which sums `count` float32 numbers at an address, a power of two, in a fixed order.

    The upper half is added to the lower half until one number is left. With 4 lanes: (a + c) + (b + d). It is
    written as vector operations, because the compiler would turn a loop into single additions.
    """

    @intrinsic
    def folded(context, lanes):
        def generate(context, builder, signature, arguments):
            kind = ir.VectorType(ir.FloatType(), count)
            value = builder.load(builder.inttoptr(arguments[0], kind.as_pointer()))
            value.align = 4
            _mark_apart(builder.module, value, "lanes")
            half = count
            while half > 1:
                half //= 2
                parts = [
                    builder.shuffle_vector(value, value, ir.Constant(_mask(half), list(places)))
                    for places in (range(half), range(half, 2 * half))
                ]
                value = builder.fadd(*parts)
            return builder.extract_element(value, ir.IntType(32)(0))

        return types.float32(types.int64), generate

    return folded


def _mask(count):
    return ir.VectorType(ir.IntType(32), count)


@intrinsic
def trailing_zeros(context, value):
    """Return the number of zero bits below the lowest set bit of a uint64 that is not 0, as int64."""

    def generate(context, builder, signature, arguments):
        word, bit = ir.IntType(64), ir.IntType(1)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(word, [word, bit]), "llvm.cttz.i64"
        )
        return builder.call(function, [arguments[0], bit(1)])

    return types.int64(types.uint64), generate

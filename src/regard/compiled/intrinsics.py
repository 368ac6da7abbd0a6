# mypy: ignore-errors
"""Intrinsics for functions that run on torch's threads, each given one address of its arguments and a shared counter."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from regard.compiled.kernel_choice import choose_prefetch_locality

LOCALITY = choose_prefetch_locality()
FAR = 2**40  # beyond the end of any array


@intrinsic
def atomic_increment(context, place):
    """Return the number at this address and increment it atomically: the index of the next piece of work."""

    def generate(context, builder, signature, arguments):
        at = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.voidptr), generate


@intrinsic
def cast_to_pointer(context, address):
    """Convert an address to a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def wait_at_barrier(context, address):
    """Wait for the other threads: call OpenMP's barrier, whose address is given."""

    def generate(context, builder, signature, arguments):
        wait = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), []).as_pointer())
        builder.call(wait, [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def emit_prefetch(builder, place):
    """Emit LLVM's prefetch of the cache line that a pointer points into."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.bitcast(place, byte), word(0), word(LOCALITY), word(1)])


@intrinsic
def prefetch(context, place):
    """Request the cache line at an address, which need not be one of an array."""

    def generate(context, builder, signature, arguments):
        emit_prefetch(builder, builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def view_array(context, address, shape, dtype):
    """Return an array of this shape and dtype at an address, in C order; without rows if the address is 0.

    Equals numba's carray, but needs no function per shape, which would have to be compiled first.
    """
    axes = shape.count if isinstance(shape, types.BaseTuple) else 1
    kind, sizes = types.Array(dtype.dtype, axes, "C"), types.UniTuple(types.intp, axes) if axes > 1 else types.intp

    def generate(context, builder, signature, arguments):
        address, shape, _ = arguments
        if isinstance(address.type, ir.PointerType):
            address = builder.ptrtoint(address, ir.IntType(64))
        sizes = [shape] if axes == 1 else cgutils.unpack_tuple(builder, shape)
        is_none = builder.icmp_unsigned("==", address, address.type(0))
        sizes[0] = builder.select(is_none, sizes[0].type(0), sizes[0])
        made = context.make_array(kind)(context, builder)
        strides = [context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(kind.dtype)))]
        for size in reversed(sizes[1:]):
            strides.insert(0, builder.mul(strides[0], size))
        data = builder.inttoptr(address, made.data.type)
        arrayobj.populate_array(made, data=data, shape=sizes, strides=strides, itemsize=strides[-1], meminfo=None)
        return made._getvalue()

    return kind(address if isinstance(address, types.RawPointer) else types.int64, sizes, dtype), generate

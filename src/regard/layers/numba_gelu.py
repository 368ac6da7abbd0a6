# mypy: ignore-errors
"""GELU in its tanh form and its derivative, compiled by numba; computed in float32, whatever the dtype in memory."""

import math
from functools import cache

import numpy as np

from regard.compiled.bfloat16 import convert_to_float32, store_number
from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import atomic_increment, view_array
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.threads import Arguments, integer_fields
from regard.compiled.vectors import LOWEST, ONE, REASSOCIATED, ZERO, exponential

CHUNK = 2**14  # numbers that a thread takes at a time
SLOPE, CUBE = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
THREE = np.float32(3)


class GeluArguments(Arguments):
    """The arguments of a loop: the number of chunks taken so far, that of numbers, and addresses of arrays."""

    _fields_ = integer_fields("taken count x grad out")


FIELDS = np.dtype(GeluArguments)


# each goes over whole arrays: numba vectorizes loops that start at 0, and not those that start elsewhere


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")  # which divides without checking for 0
def store_gelu(x, grad, out):
    """Store x sigmoid(2 √(2/π) (x + 0.044715 x³)) in out; grad is not read."""
    for j in range(len(x)):
        a = convert_to_float32(x[j])
        z = SLOPE * (a + CUBE * a * a * a)
        e = ZERO if abs(z) >= -LOWEST else exponential(max(-abs(z), LOWEST))
        s = (ONE if z > ZERO else e) / (ONE + e)
        store_number(out, j, a * s)


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")  # which divides without checking for 0
def store_gelu_gradient(x, grad, out):
    """Store grad times the derivative of GELU at x in out."""
    for j in range(len(x)):
        a = convert_to_float32(x[j])
        z = SLOPE * (a + CUBE * a * a * a)
        e = ZERO if abs(z) >= -LOWEST else exponential(max(-abs(z), LOWEST))
        s = (ONE if z > ZERO else e) / (ONE + e)
        bend = e / ((ONE + e) * (ONE + e))  # s (1 - s), without its cancellation
        rest = ZERO if e == ZERO else a * bend * SLOPE * (ONE + THREE * CUBE * a * a)  # a² may be infinite where bend is 0
        store_number(out, j, convert_to_float32(grad[j]) * (s + rest))


@cache
def make_gelu_callback(kind):
    """Make the loop that writes the GELU of the `count` numbers of x to `out`."""
    return make_callback(np.dtype(kind).type, store_gelu)


@cache
def make_gelu_gradient_callback(kind):
    """Make the loop that writes `grad` times the derivative of GELU at the `count` numbers of x to `out`."""
    return make_callback(np.dtype(kind).type, store_gelu_gradient)


def make_callback(dtype, store):
    """Make the loop that calls store(x, grad, out) for one chunk after another; a grad of address 0 is empty."""

    @callback_with_cache(GeluArguments)
    def compute_elements(place):
        arguments = view_array(place, 1, FIELDS)[0]
        count = arguments.count
        x, grad = view_array(arguments.x, count, dtype), view_array(arguments.grad, count, dtype)
        out = view_array(arguments.out, count, dtype)
        while True:
            first = atomic_increment(place) * CHUNK
            if first >= count:
                return
            last = min(first + CHUNK, count)
            store(x[first:last], grad[first:last], out[first:last])

    return compute_elements

# mypy: ignore-errors
"""A GPT-2 on a few vectors, compiled by numba: what one of torch's threads computes, from the tokens to the logits.

The threads share the rows of each matrix, and the heads, and wait at a barrier before a stage that needs all of the one before.
Vectors and norms are so short that each thread computes them itself. The stages are those of `GPT2` and `Block` in gpt2.py.
"""

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from regard.compiled.intrinsics import atomic_increment, cast_to_pointer, view_array, wait_at_barrier
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.matrix_formats import BLOCK, FIELDS, FORMAT, INT8
from regard.compiled.threads import BLOCKS_PER_THREAD, LEAST_ROWS, Arguments, integer_fields
from regard.compiled.vectors import (
    HALF,
    LEAST,
    ONE,
    REASSOCIATED,
    ZERO,
    add_bias,
    add_scaled_row,
    dot,
    exponentiate_with_sums,
    hyperbolic_tangent,
)
from regard.matmul.numba_quantized import multiply_matrix, quantize_for

# The model's parts by position: FIELDS numbers of a matrix, two addresses of a norm. All keys and values follow the layers.
HEAD, NORM, FIRST = 0, FIELDS, FIELDS + 2
NORM_ATTENTION, NORM_FEED, QUERY = 0, 2, 4  # in each layer
OUT, UP, DOWN, LAYER = (QUERY + n * FIELDS for n in (3, 4, 5, 6))
# The stages of a layer that threads share, each with a counter of the rows or heads taken; those of q, k and v are 0 to 2.
HEADS_STAGE, OUT_STAGE, UP_STAGE, DOWN_STAGE, STAGES = 3, 4, 5, 6, 7
A, B = np.float32(0.044715), np.float32(math.sqrt(2 / math.pi))  # constants of GELU's tanh approximation


class GPT2Arguments(Arguments):
    """The arguments of a thread.

    The numbers of threads and layers; of vectors, of new tokens in each sequence, and of vectors whose logits are wanted; the
    sizes of the model, of its cache and of the buffers of a thread; OpenMP's barrier. Then addresses: of the counters,
    positions and wanted vectors, of the model's parts, of the embedded tokens, the buffers and the logits. The norms' epsilon.
    """

    _fields_ = [  # noqa: RUF012  # as ctypes has it
        *integer_fields("threads layers count new output_count heads width inner capacity vocabulary padded size barrier"),
        *integer_fields("counters positions outputs parts x own shared logits"),
        ("epsilon", ctypes.c_float),
    ]


ARGUMENTS = np.dtype(GPT2Arguments)


class Buffers(NamedTuple):
    """The vectors of all tokens, which the threads share, and buffers of this thread."""

    x: Any  # (count, width), the residual stream
    projected: Any  # (3, count, width), queries, keys and values
    context: Any  # (count, width)
    added: Any  # (count, width), what a projection adds to x
    hidden: Any  # (count, inner)
    normed: Any  # (count, width), of this thread
    scores: Any  # (capacity,), of this thread
    factors: Any  # (count,), of this thread: the scales of quantized vectors
    integers: Any  # (count * padded,), of this thread: quantized vectors
    positions: Any  # (count,)


@njit
def arrange_buffers(a):
    """Return the buffers of a thread that starts."""
    count, width, inner = a.count, a.width, a.inner
    thread = atomic_increment(cast_to_pointer(a.counters))
    own = view_array(a.own + 4 * a.size * thread, a.size, np.float32)
    normed, own = own[: count * width].reshape(count, width), own[count * width :]
    scores, factors, rest = own[: a.capacity], own[a.capacity : a.capacity + count], own[a.capacity + count :]
    integers = view_array(rest.ctypes.data, count * a.padded, np.int16)
    x, shared = view_array(a.x, (count, width), np.float32), view_array(a.shared, (5, count, width), np.float32)
    hidden = view_array(a.shared + 4 * 5 * count * width, (count, inner), np.float32)
    positions = view_array(a.positions, count, np.int64)
    return Buffers(x, shared[:3], shared[3], shared[4], hidden, normed, scores, factors, integers, positions)


@njit
def locate_counter(a, layer, stage):
    """Return the address of the counter of a stage of a layer; the logits are stage 0 after the last layer."""
    return a.counters + 8 * (1 + STAGES * layer + stage)


@njit
def view_cache(a, layer):
    """Return the keys and values of a layer, (b, h, capacity, d)."""
    cache = view_array(a.parts + 8 * (FIRST + LAYER * a.layers + 2 * layer), 2, np.int64)
    shape = a.count // a.new, a.heads, a.capacity, a.width // a.heads
    return view_array(cache[0], shape, np.float32), view_array(cache[1], shape, np.float32)


@njit(fastmath=REASSOCIATED, error_model="numpy")
def apply_layer_norm(x, parts, epsilon, out):
    """Compute the layer norm of a vector, with the weight and the bias at two addresses."""
    weight, bias = view_array(parts[0], len(x), np.float32), view_array(parts[1], len(x), np.float32)
    mean = ZERO
    for c in range(len(x)):
        mean += x[c]
    mean /= np.float32(len(x))
    variance = ZERO
    for c in range(len(x)):
        variance += (x[c] - mean) * (x[c] - mean)
    factor = ONE / np.float32(math.sqrt(variance / np.float32(len(x)) + epsilon))
    for c in range(len(x)):
        out[c] = (x[c] - mean) * factor * weight[c] + bias[c]


@njit(fastmath=REASSOCIATED, error_model="numpy")
def apply_gelu(x):
    """Apply GELU, by tanh, in place."""
    for c in range(len(x)):
        x[c] = HALF * x[c] * (ONE + hyperbolic_tangent(B * (x[c] + A * x[c] * x[c] * x[c])))


@njit
def write_cache(x, first, last, positions, new, cache):
    """Copy some numbers of each vector to their head and position in the cache, (b, h, room, d)."""
    d = cache.shape[3]
    for one in range(len(x)):
        for c in range(first, last):
            cache[one // new, c // d, positions[one], c % d] = x[one, c]


@njit
def attend_query(q, keys, values, scores, out):
    """Compute the context of one query; keys and values are (n, d), scores is a buffer of n numbers."""
    top, scale = LEAST, ONE / np.float32(math.sqrt(len(q)))
    for j in range(len(keys)):
        scores[j] = dot(keys[j], q) * scale
        top = max(top, scores[j])
    total, _, _ = exponentiate_with_sums(scores, top)
    out[:] = ZERO
    for j in range(len(keys)):
        add_scaled_row(values[j], scores[j] / total, out)


@njit
def attend_heads(a, layer, buffers):
    """Compute the context of the heads that this thread takes, a head of one vector at a time."""
    (keys, values), d, q = view_cache(a, layer), a.width // a.heads, buffers.projected[0]
    while True:
        task = atomic_increment(cast_to_pointer(locate_counter(a, layer, HEADS_STAGE)))
        if task >= a.count * a.heads:
            return
        one, head = task // a.heads, task % a.heads
        n, row, c = buffers.positions[one] + 1, one // a.new, head * d
        scores, out = buffers.scores[:n], buffers.context[one, c : c + d]
        attend_query(q[one, c : c + d], keys[row, head, :n], values[row, head, :n], scores, out)


@njit
def quantize_vectors(x, matrix, buffers):
    """Quantize vectors for a matrix of integers: return them, (count, padded columns), and set their scales."""
    padded = (x.shape[1] + BLOCK - 1) // BLOCK * BLOCK
    integers = buffers.integers[: len(x) * padded].reshape(len(x), padded)
    if matrix[FORMAT] >= INT8:
        for one in range(len(x)):
            buffers.factors[one] = quantize_for(matrix, x[one], integers[one])
    return integers


@njit
def multiply_next_rows(a, counter, x, integers, parts, rows, buffers, out):
    """Multiply the vectors by the next untaken rows of a matrix; return the first row and one past the last."""
    run = max(LEAST_ROWS, rows // (BLOCKS_PER_THREAD * a.threads))
    first = atomic_increment(cast_to_pointer(counter)) * run
    last = min(first + run, rows)
    if first < rows:
        multiply_matrix(parts, x, integers, buffers.factors, first, last, out)
    return first, last


@njit
def normalize_vectors(a, norm, buffers):
    """Set `normed` to the layer norm of x."""
    for one in range(a.count):
        apply_layer_norm(buffers.x[one], norm, a.epsilon, buffers.normed[one])


@njit
def project_and_cache(a, layer, parts, buffers):
    """Compute queries, keys and values, and write keys and values to the cache."""
    keys, values = view_cache(a, layer)
    for which in range(3):
        matrix, out = parts[QUERY + FIELDS * which :], buffers.projected[which]
        integers = quantize_vectors(buffers.normed, matrix, buffers)
        first = 0
        while first < a.width:
            counter = locate_counter(a, layer, which)
            first, last = multiply_next_rows(a, counter, buffers.normed, integers, matrix, a.width, buffers, out)
            if which and first < a.width:
                write_cache(out, first, last, buffers.positions, a.new, keys if which == 1 else values)


@njit
def add_projection(a, counter, vectors, parts, buffers):
    """Add a projection of vectors to x."""
    integers = quantize_vectors(vectors, parts, buffers)
    first = 0
    while first < a.width:
        first, last = multiply_next_rows(a, counter, vectors, integers, parts, a.width, buffers, buffers.added)
        for one in range(a.count):
            add_bias(buffers.x[one, first:last], buffers.added[one, first:last])


@njit
def expand_vectors(a, counter, parts, buffers):
    """Set `hidden` to GELU of the up projection of `normed`."""
    integers = quantize_vectors(buffers.normed, parts, buffers)
    first = 0
    while first < a.inner:
        first, last = multiply_next_rows(a, counter, buffers.normed, integers, parts, a.inner, buffers, buffers.hidden)
        for one in range(a.count):
            apply_gelu(buffers.hidden[one, first:last])


@njit
def compute_logits(a, parts, buffers):
    """Compute the logits of the wanted vectors."""
    outputs, normed = view_array(a.outputs, a.output_count, np.int64), buffers.normed[: a.output_count]
    for place in range(a.output_count):
        apply_layer_norm(buffers.x[outputs[place]], parts[NORM:], a.epsilon, normed[place])
    integers = quantize_vectors(normed, parts[HEAD:], buffers)
    first, logits = 0, view_array(a.logits, (a.output_count, a.vocabulary), np.float32)
    while first < a.vocabulary:
        counter = locate_counter(a, a.layers, 0)
        first, _ = multiply_next_rows(a, counter, normed, integers, parts[HEAD:], a.vocabulary, buffers, logits)


@callback_with_cache(GPT2Arguments)
def run_worker(place):
    """Compute what one thread does: every layer, then the logits."""
    a = view_array(place, 1, ARGUMENTS)[0]
    parts, buffers = view_array(a.parts, FIRST, np.int64), arrange_buffers(a)
    for layer in range(a.layers):
        layer_parts = view_array(a.parts + 8 * (FIRST + LAYER * layer), LAYER, np.int64)
        normalize_vectors(a, layer_parts[NORM_ATTENTION:], buffers)
        project_and_cache(a, layer, layer_parts, buffers)
        wait_at_barrier(a.barrier)
        attend_heads(a, layer, buffers)
        wait_at_barrier(a.barrier)
        add_projection(a, locate_counter(a, layer, OUT_STAGE), buffers.context, layer_parts[OUT:], buffers)
        wait_at_barrier(a.barrier)
        normalize_vectors(a, layer_parts[NORM_FEED:], buffers)
        expand_vectors(a, locate_counter(a, layer, UP_STAGE), layer_parts[UP:], buffers)
        wait_at_barrier(a.barrier)
        add_projection(a, locate_counter(a, layer, DOWN_STAGE), buffers.hidden, layer_parts[DOWN:], buffers)
        wait_at_barrier(a.barrier)
    compute_logits(a, parts, buffers)

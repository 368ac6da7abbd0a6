# mypy: ignore-errors
"""A decoder on a few vectors, compiled by numba: what one of torch's threads computes, from the embedded tokens to the logits.

The threads share the rows of each matrix, and the heads, and wait at a barrier before a stage that needs all of the one before.
Vectors and norms are so short that each thread computes them itself. The stages are those of `GPT2` and `Block` in gpt2.py; a
model of Llama's kind has RMS norms, rotated queries and keys, fewer key heads, and a gate in its feed-forward layer.
"""

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np

from regard.compiled.bfloat16 import convert_to_float32, store_number
from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import atomic_increment, cast_to_pointer, view_array, wait_at_barrier
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.matrix_formats import BLOCK, FIELDS, NUMBERS, SHORTS
from regard.compiled.threads import Arguments, integer_fields
from regard.compiled.vectors import (
    HALF,
    LEAST,
    ONE,
    REASSOCIATED,
    ZERO,
    add_bias,
    exponentiate_with_sums,
    hyperbolic_tangent,
)
from regard.matmul.numba_quantized import is_rounded, multiply_matrix, prefetch_rows, quantize_for

# The model's parts by position: FIELDS numbers of a matrix, two addresses of a norm. All keys and values follow the layers.
HEAD, NORM, FIRST = 0, FIELDS, FIELDS + 2
NORM_ATTENTION, NORM_FEED, QUERY = 0, 2, 4  # in each layer
OUT, UP, DOWN, GATE, LAYER = (QUERY + n * FIELDS for n in (3, 4, 5, 6, 7))
# The stages of a layer that threads share, each with counters of the rows or heads taken; those of q, k and v are 0 to 2.
HEADS_STAGE, OUT_STAGE, UP_STAGE, DOWN_STAGE, STAGES = 3, 4, 5, 6, 7
RUN_ROWS, RUNS = 32, 8  # a thread takes a multiple of so many rows at a time, and takes some of its part so many times at most
KEYS_AHEAD = 12  # keys or values that are prefetched
A, B = np.float32(0.044715), np.float32(math.sqrt(2 / math.pi))  # constants of GELU's tanh approximation


class DecoderArguments(Arguments):
    """The arguments of a thread.

    The numbers of threads and layers; of vectors, of new tokens in each sequence, and of vectors whose logits are wanted; the
    sizes of the model, of its cache and of the buffers of a thread; whether its norms are RMS norms, and whether the cache is
    bfloat16; OpenMP's barrier. Then addresses: of the counters, positions and wanted vectors, of the model's parts, of the
    rotary table, or 0 without one, of the embedded tokens, the buffers and the logits. The norms' epsilon, and the scale of the
    scores.
    """

    _fields_ = [  # noqa: RUF012  # as ctypes has it
        *integer_fields("threads layers count new output_count heads key_heads head_width width inner capacity vocabulary"),
        *integer_fields("shorts size has_rms_norms has_bfloat16_cache barrier"),
        *integer_fields("counters positions outputs parts rotary x own shared logits"),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


ARGUMENTS = np.dtype(DecoderArguments)


class DecoderBuffers(NamedTuple):
    """The vectors of all tokens, which the threads share, and buffers of this thread."""

    x: Any  # (count, width), the residual stream
    queries: Any  # (count, heads * head_width)
    keys: Any  # (count, key_heads * head_width), and so the values
    values: Any
    context: Any  # as the queries
    added: Any  # (count, width), what a projection adds to x
    hidden: Any  # (count, inner)
    gates: Any  # (count, inner)
    normed: Any  # (count, width), of this thread
    scores: Any  # (capacity,), of this thread
    factors: Any  # (2, count), of this thread: the scales of quantized vectors, for a matrix and for the gate beside it
    integers: Any  # (2, count * shorts), of this thread: quantized vectors with the sums of their groups, or rounded ones
    positions: Any  # (count,)
    thread: Any  # the number of this thread


@njit_inlined()
def arrange_buffers(a):
    """Return the buffers of a thread that starts."""
    count, width, inner = a.count, a.width, a.inner
    query_width, key_width = a.heads * a.head_width, a.key_heads * a.head_width
    thread = atomic_increment(cast_to_pointer(a.counters))
    own = view_array(a.own + 4 * a.size * thread, a.size, np.float32)
    normed, own = own[: count * width].reshape(count, width), own[count * width :]
    scores, factors, rest = own[: a.capacity], own[a.capacity : a.capacity + 2 * count], own[a.capacity + 2 * count :]
    integers = view_array(rest.ctypes.data, (2, count * a.shorts), np.int16)
    x, place = view_array(a.x, (count, width), np.float32), a.shared
    queries, place = view_array(place, (count, query_width), np.float32), place + 4 * count * query_width
    keys, place = view_array(place, (count, key_width), np.float32), place + 4 * count * key_width
    values, place = view_array(place, (count, key_width), np.float32), place + 4 * count * key_width
    context, place = view_array(place, (count, query_width), np.float32), place + 4 * count * query_width
    added, place = view_array(place, (count, width), np.float32), place + 4 * count * width
    hidden, place = view_array(place, (count, inner), np.float32), place + 4 * count * inner
    gates, positions = view_array(place, (count, inner), np.float32), view_array(a.positions, count, np.int64)
    return DecoderBuffers(
        x,
        queries,
        keys,
        values,
        context,
        added,
        hidden,
        gates,
        normed,
        scores,
        factors.reshape(2, count),
        integers,
        positions,
        thread,
    )


@njit_inlined()
def locate_counter(a, layer, stage):
    """Return the address of the counters of a stage of a layer, one a thread; the logits are stage 0 after the last layer."""
    return a.counters + 8 * (1 + a.threads * (STAGES * layer + stage))


@njit_inlined()
def locate_cache(a, layer):
    """Return the addresses of the keys and of the values of a layer."""
    return view_array(a.parts + 8 * (FIRST + LAYER * a.layers + 2 * layer), 2, np.int64)


@njit_inlined()
def view_cache(a, address, dtype):
    """Return the keys or values of a layer, (b, h, capacity, d)."""
    return view_array(address, (a.count // a.new, a.key_heads, a.capacity, a.head_width), dtype)


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")
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


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")
def apply_rms_norm(x, parts, epsilon, out):
    """Compute the RMS norm of a vector, with the weight at an address."""
    weight, squares = view_array(parts[0], len(x), np.float32), ZERO
    for c in range(len(x)):
        squares += x[c] * x[c]
    factor = ONE / np.float32(math.sqrt(squares / np.float32(len(x)) + epsilon))
    for c in range(len(x)):
        out[c] = x[c] * factor * weight[c]


@njit_inlined()
def apply_norm(a, x, parts, out):
    """Compute the norm of a vector."""
    if a.has_rms_norms:
        apply_rms_norm(x, parts, a.epsilon, out)
    else:
        apply_layer_norm(x, parts, a.epsilon, out)


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")
def multiply_by_silu(x, gates):
    """Multiply x by SiLU of the gates in place: y / (1 + exp(-y)) = y (1 + tanh(y / 2)) / 2."""
    for c in range(len(x)):
        x[c] *= HALF * gates[c] * (ONE + hyperbolic_tangent(HALF * gates[c]))


@njit_inlined(fastmath=REASSOCIATED)
def rotate_heads(x, angles):
    """Rotate the heads of a vector in place: number c of a head with number c + d / 2, by the cosines and sines (2, d)."""
    cosines, sines, d = angles[0], angles[1], angles.shape[1]
    half = d // 2
    for head in range(len(x) // d):
        one = x[head * d : head * d + d]
        for c in range(half):
            first, second = one[c], one[c + half]
            one[c] = first * cosines[c] - second * sines[c]
            one[c + half] = second * cosines[c + half] + first * sines[c + half]


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")
def apply_gelu(x):
    """Apply GELU, by tanh, in place."""
    for c in range(len(x)):
        x[c] = HALF * x[c] * (ONE + hyperbolic_tangent(B * (x[c] + A * x[c] * x[c] * x[c])))


@njit_inlined()
def store_vectors(x, first, last, positions, new, cache):
    """Copy some numbers of each vector to their head and position in the cache, (b, h, room, d)."""
    d = cache.shape[3]
    for one in range(len(x)):
        for head in range(first // d, (last + d - 1) // d):
            start, end = max(first, head * d), min(last, head * d + d)
            numbers, row = x[one, start:end], cache[one // new, head, positions[one], start - head * d : end - head * d]
            for c in range(len(numbers)):
                store_number(row, c, numbers[c])


@njit_inlined()
def write_cache(a, x, first, last, positions, address):
    """Copy some numbers of each vector to the keys or values of a layer."""
    if a.has_bfloat16_cache:
        store_vectors(x, first, last, positions, a.new, view_cache(a, address, np.uint16))
    else:
        store_vectors(x, first, last, positions, a.new, view_cache(a, address, np.float32))


@njit_inlined()
def prefetch_row(x, j):
    """Request the cache lines of row j of an array, if it has such a row."""
    if 0 <= j < len(x):
        prefetch_rows(x.ctypes.data, x.strides[0], j, j + 1)


@njit_inlined(fastmath=REASSOCIATED)
def multiply_key(key, q):
    """Compute the dot product of a key in the cache and a query."""
    total = ZERO
    for c in range(len(key)):
        total += convert_to_float32(key[c]) * q[c]
    return total


@njit_inlined(fastmath=REASSOCIATED)
def add_value(value, weight, out):
    """Add weight · value, which is in the cache, to out."""
    for c in range(len(value)):
        out[c] += convert_to_float32(value[c]) * weight


@njit_inlined()
def attend_query(q, keys, values, scale, scores, out):
    """Compute the context of one query; keys and values are (n, d), scores is a buffer of n numbers.

    The processor itself requests rows to come only within a page of memory, which holds few of them.
    """
    top, n = LEAST, len(keys)
    for j in range(n):
        prefetch_row(keys, j + KEYS_AHEAD)
        prefetch_row(values, j + KEYS_AHEAD - n)
        scores[j] = multiply_key(keys[j], q) * scale
        top = max(top, scores[j])
    total, _, _ = exponentiate_with_sums(scores, top)
    out[:] = ZERO
    for j in range(n):
        prefetch_row(values, j + KEYS_AHEAD)
        add_value(values[j], scores[j] / total, out)


@njit_inlined()
def attend_heads(a, layer, buffers, keys, values):
    """Compute the context of the heads that this thread takes, a head of one vector at a time."""
    d, group = a.head_width, a.heads // a.key_heads
    while True:
        task = atomic_increment(cast_to_pointer(locate_counter(a, layer, HEADS_STAGE)))
        if task >= a.count * a.heads:
            return
        one, head = task // a.heads, task % a.heads
        n, row, c, key_head = buffers.positions[one] + 1, one // a.new, head * d, head // group
        q, scores, out = buffers.queries[one, c : c + d], buffers.scores[:n], buffers.context[one, c : c + d]
        attend_query(q, keys[row, key_head, :n], values[row, key_head, :n], a.scale, scores, out)


@njit_inlined()
def attend_cache(a, layer, buffers):
    """Compute the context of the heads that this thread takes, from the keys and values of a layer."""
    keys, values = locate_cache(a, layer)
    if a.has_bfloat16_cache:
        attend_heads(a, layer, buffers, view_cache(a, keys, np.uint16), view_cache(a, values, np.uint16))
    else:
        attend_heads(a, layer, buffers, view_cache(a, keys, np.float32), view_cache(a, values, np.float32))


@njit_inlined()
def quantize_vectors(x, matrix, buffers, place):
    """Round vectors for a matrix that reads them so: return them, (count, shorts), and set their scales."""
    shorts = (x.shape[1] + BLOCK - 1) // BLOCK * SHORTS
    integers = buffers.integers[place, : len(x) * shorts].reshape(len(x), shorts)
    if is_rounded(matrix, x.shape[1], len(x)):
        for one in range(len(x)):
            quantize_for(matrix, x, one, integers, buffers.factors[place])
    return integers


@njit_inlined()
def take_rows(a, thread, counter, rows, unit, taken):
    """Take the next rows of a matrix, a multiple of `unit`; return the first, one past the last, and the parts that are taken.

    Each thread has a part of its own, whose rows follow one another in memory, and takes rows of the others' parts after it.
    """
    units = ((rows + unit - 1) // unit + a.threads - 1) // a.threads
    part_rows, run = units * unit, (units + RUNS - 1) // RUNS * unit
    while taken < a.threads:
        part = (thread + taken) % a.threads
        stop = min((part + 1) * part_rows, rows)
        first = part * part_rows + atomic_increment(cast_to_pointer(counter + 8 * part)) * run
        if first < stop:
            return first, min(first + run, stop), taken
        taken += 1
    return rows, rows, taken


@njit_inlined()
def normalize_vectors(a, norm, buffers):
    """Set `normed` to the norm of x."""
    for one in range(a.count):
        apply_norm(a, buffers.x[one], norm, buffers.normed[one])


@njit_inlined()
def project_vectors(a, counter, parts, buffers, out, is_rotated, cache):
    """Project `normed` to queries, keys or values, rotate them, and write those to the cache whose address is given, not 0."""
    integers, unit = quantize_vectors(buffers.normed, parts, buffers, 0), a.head_width if is_rotated else RUN_ROWS
    table = view_array(a.rotary, (a.capacity, 2, a.head_width), np.float32)
    rows = out.shape[1]
    first, last, taken = take_rows(a, buffers.thread, counter, rows, unit, 0)
    while first < rows:
        multiply_matrix(parts, buffers.normed, integers, buffers.factors[0], first, last, out)
        if is_rotated:
            for one in range(a.count):
                rotate_heads(out[one, first:last], table[buffers.positions[one]])
        if cache:
            write_cache(a, out, first, last, buffers.positions, cache)
        first, last, taken = take_rows(a, buffers.thread, counter, rows, unit, taken)


@njit_inlined()
def project_and_cache(a, layer, parts, buffers):
    """Compute queries, keys and values, and write keys and values to the cache."""
    (keys, values), is_rotated = locate_cache(a, layer), a.rotary != 0
    project_vectors(a, locate_counter(a, layer, 0), parts[QUERY:], buffers, buffers.queries, is_rotated, 0)
    project_vectors(a, locate_counter(a, layer, 1), parts[QUERY + FIELDS :], buffers, buffers.keys, is_rotated, keys)
    project_vectors(a, locate_counter(a, layer, 2), parts[QUERY + 2 * FIELDS :], buffers, buffers.values, False, values)


@njit_inlined()
def add_projection(a, counter, vectors, parts, buffers):
    """Add a projection of vectors to x."""
    integers = quantize_vectors(vectors, parts, buffers, 0)
    first, last, taken = take_rows(a, buffers.thread, counter, a.width, RUN_ROWS, 0)
    while first < a.width:
        multiply_matrix(parts, vectors, integers, buffers.factors[0], first, last, buffers.added)
        for one in range(a.count):
            add_bias(buffers.x[one, first:last], buffers.added[one, first:last])
        first, last, taken = take_rows(a, buffers.thread, counter, a.width, RUN_ROWS, taken)


@njit_inlined()
def expand_vectors(a, counter, up, gate, buffers):
    """Set `hidden` to GELU of the up projection of `normed`, or to the up projection times SiLU of the gate's."""
    is_gated = gate[NUMBERS] != 0
    integers, of_gate = quantize_vectors(buffers.normed, up, buffers, 0), quantize_vectors(buffers.normed, gate, buffers, 1)
    first, last, taken = take_rows(a, buffers.thread, counter, a.inner, RUN_ROWS, 0)
    while first < a.inner:
        multiply_matrix(up, buffers.normed, integers, buffers.factors[0], first, last, buffers.hidden)
        if is_gated:
            multiply_matrix(gate, buffers.normed, of_gate, buffers.factors[1], first, last, buffers.gates)
        for one in range(a.count):
            if is_gated:
                multiply_by_silu(buffers.hidden[one, first:last], buffers.gates[one, first:last])
            else:
                apply_gelu(buffers.hidden[one, first:last])
        first, last, taken = take_rows(a, buffers.thread, counter, a.inner, RUN_ROWS, taken)


@njit_inlined()
def compute_logits(a, parts, buffers):
    """Compute the logits of the wanted vectors."""
    outputs, normed = view_array(a.outputs, a.output_count, np.int64), buffers.normed[: a.output_count]
    for place in range(a.output_count):
        apply_norm(a, buffers.x[outputs[place]], parts[NORM:], normed[place])
    head, logits = parts[HEAD:], view_array(a.logits, (a.output_count, a.vocabulary), np.float32)
    integers, counter = quantize_vectors(normed, head, buffers, 0), locate_counter(a, a.layers, 0)
    first, last, taken = take_rows(a, buffers.thread, counter, a.vocabulary, RUN_ROWS, 0)
    while first < a.vocabulary:
        multiply_matrix(head, normed, integers, buffers.factors[0], first, last, logits)
        first, last, taken = take_rows(a, buffers.thread, counter, a.vocabulary, RUN_ROWS, taken)


@callback_with_cache(DecoderArguments)
def run_worker(place):
    """Compute what one thread does: every layer, then the logits."""
    a = view_array(place, 1, ARGUMENTS)[0]
    parts, buffers = view_array(a.parts, FIRST, np.int64), arrange_buffers(a)
    for layer in range(a.layers):
        layer_parts = view_array(a.parts + 8 * (FIRST + LAYER * layer), LAYER, np.int64)
        normalize_vectors(a, layer_parts[NORM_ATTENTION:], buffers)
        project_and_cache(a, layer, layer_parts, buffers)
        wait_at_barrier(a.barrier)
        attend_cache(a, layer, buffers)
        wait_at_barrier(a.barrier)
        add_projection(a, locate_counter(a, layer, OUT_STAGE), buffers.context, layer_parts[OUT:], buffers)
        wait_at_barrier(a.barrier)
        normalize_vectors(a, layer_parts[NORM_FEED:], buffers)
        expand_vectors(a, locate_counter(a, layer, UP_STAGE), layer_parts[UP:], layer_parts[GATE:], buffers)
        wait_at_barrier(a.barrier)
        add_projection(a, locate_counter(a, layer, DOWN_STAGE), buffers.hidden, layer_parts[DOWN:], buffers)
        wait_at_barrier(a.barrier)
    compute_logits(a, parts, buffers)

# mypy: ignore-errors
"""A GPT-2 on a few vectors, compiled by numba: what one of torch's threads computes, from the tokens to the logits.

The threads share the rows of each matrix, and the heads, and wait at a barrier before a part that needs all of the one before.
Vectors and norms are so short that each thread computes them itself.
"""

import math

import numpy as np
from numba import njit, types

from regard.compiled.gemv import multiply_rows
from regard.compiled.int16_gemm import VECTORS, multiply_int8_rows, quantize_vector
from regard.compiled.intrinsics import atomic_increment, cast_to_pointer, view_array, wait_at_barrier
from regard.compiled.jit_cache import cfunc_with_cache
from regard.compiled.threads import BLOCKS_PER_THREAD, LEAST_ROWS, MOST_UNQUANTIZED
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

# The arguments of a thread by position: numbers, then addresses.
THREADS, LAYERS, COUNT, NEW, OUTPUT_COUNT, HEADS, WIDTH, INNER, CAPACITY, VOCABULARY, SIZE = range(11)
BARRIER, COUNTERS, EPSILON, TOKENS, POSITIONS, OUTPUT_VECTORS, PARTS, OWN, SHARED, LOGITS, ARGUMENT_COUNT = range(11, 22)
# The addresses of the model's tensors by position, 0 for none. All keys and values follow the layers.
NUMBERS, SCALES, BIAS, LARGEST, MATRIX = range(5)  # of a matrix; LARGEST is the largest integer its vectors may hold
EMBEDDING, HEAD, NORM, PLACES, FIRST = 0, MATRIX, 2 * MATRIX, 2 * MATRIX + 2, 2 * MATRIX + 3
NORM_ATTENTION, NORM_FEED, QUERY = 0, 2, 4  # in each layer
OUT, UP, DOWN, LAYER = (QUERY + n * MATRIX for n in (3, 4, 5, 6))
COUNTERS_PER_LAYER = 7  # parts of a layer that threads share, each with a counter of the rows or heads taken
A, B = np.float32(0.044715), np.float32(math.sqrt(2 / math.pi))  # constants of GELU's tanh approximation


@njit(fastmath=REASSOCIATED, error_model="numpy")
def apply_layer_norm(x, of, epsilon, out):
    """Compute the layer norm of a vector, with the weight and the bias at two addresses."""
    weight, bias = view_array(of[0], len(x), np.float32), view_array(of[1], len(x), np.float32)
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


@njit(fastmath=REASSOCIATED)
def embed_token(row, scale, place, out):
    """Compute the vector of a token: its embedding, scaled, plus that of its position."""
    for c in range(len(out)):
        out[c] = np.float32(row[c]) * scale + place[c]


@njit(fastmath=REASSOCIATED, error_model="numpy")
def apply_gelu(x):
    """Apply GELU, by tanh, in place."""
    for c in range(len(x)):
        x[c] = HALF * x[c] * (ONE + hyperbolic_tangent(B * (x[c] + A * x[c] * x[c] * x[c])))


@njit
def write_cache(x, first, last, positions, new, kept):
    """Copy some numbers of each vector to their head and position in the cache, (b, h, room, d)."""
    d = kept.shape[3]
    for one in range(len(x)):
        for c in range(first, last):
            kept[one // new, c // d, positions[one], c % d] = x[one, c]


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


def compile_worker(dtype):
    """Compile what one thread computes, for matrices of this dtype."""

    small = dtype == np.int8

    @njit
    def multiply_next_rows(place, x, short, of, rows, threads, out):
        """Multiply the vectors by the next untaken rows of a matrix; return the first row and one past the last."""
        run = max(LEAST_ROWS, rows // (BLOCKS_PER_THREAD * threads))
        first = atomic_increment(cast_to_pointer(place)) * run
        last = min(first + run, rows)
        if first < rows:
            matrix = view_array(of[NUMBERS], (rows, x.shape[1]), dtype)
            scales, bias = view_array(of[SCALES], rows, np.float32), view_array(of[BIAS], rows, np.float32)
            if small and len(x) > MOST_UNQUANTIZED:
                factors, numbers = short
                vectors = numbers[: len(factors) * x.shape[1]].reshape(len(factors), x.shape[1])
                multiply_int8_rows(vectors, factors, first, last, matrix, scales, bias, out)
            else:
                multiply_rows(x, first, last, matrix, scales, bias, out)
        return first, last

    @njit
    def quantize_vectors(x, of, short):
        """Quantize vectors for a matrix of bytes: their integers, one vector after the other, and their scales."""
        if small and len(x) > MOST_UNQUANTIZED:
            (factors, numbers), most = short, view_array(of[LARGEST], 1, np.int64)[0]
            for one in range(len(x)):
                factors[one] = quantize_vector(x[one], most, numbers[one * x.shape[1] : (one + 1) * x.shape[1]])

    @cfunc_with_cache(types.void(types.voidptr))
    def run_worker(place):
        said = view_array(place, ARGUMENT_COUNT, np.int64)
        threads, count, new, heads, width = said[THREADS], said[COUNT], said[NEW], said[HEADS], said[WIDTH]
        inner, room, vocabulary, asked, d = (
            said[INNER],
            said[CAPACITY],
            said[VOCABULARY],
            said[OUTPUT_COUNT],
            said[WIDTH] // said[HEADS],
        )
        epsilon, positions = view_array(said[EPSILON], 1, np.float32)[0], view_array(said[POSITIONS], count, np.int64)
        counter, parts = said[COUNTERS], view_array(said[PARTS], FIRST, np.int64)

        own = view_array(said[OWN] + 4 * said[SIZE] * atomic_increment(cast_to_pointer(counter)), said[SIZE], np.float32)
        normed, scores = own[: count * width].reshape(count, width), own[count * width : count * width + room]
        padded = (count + VECTORS - 1) // VECTORS * VECTORS
        factors, rest = own[count * width + room :][:padded], own[count * width + room + padded :]
        short = factors, view_array(rest.ctypes.data, padded * max(width, inner), np.int16)
        mixed = view_array(said[SHARED], (6, count, width), np.float32)
        x, q, context, more = mixed[0], mixed[1], mixed[4], mixed[5]
        hidden = view_array(said[SHARED] + 4 * 6 * count * width, (count, inner), np.float32)

        words = view_array(parts[EMBEDDING + NUMBERS], (vocabulary, width), dtype)
        scales = view_array(parts[EMBEDDING + SCALES], vocabulary, np.float32)
        places = view_array(parts[PLACES], (room, width), np.float32)
        for one in range(count):
            token = view_array(said[TOKENS], count, np.int64)[one]
            embed_token(words[token], scales[token] if len(scales) else ONE, places[positions[one]], x[one])

        for layer in range(said[LAYERS]):
            of = view_array(said[PARTS] + 8 * (FIRST + LAYER * layer), LAYER, np.int64)
            kept = view_array(said[PARTS] + 8 * (FIRST + LAYER * said[LAYERS] + 2 * layer), 2, np.int64)
            keys = view_array(kept[0], (count // new, heads, room, d), np.float32)
            values = view_array(kept[1], (count // new, heads, room, d), np.float32)
            for one in range(count):
                apply_layer_norm(x[one], of[NORM_ATTENTION:], epsilon, normed[one])
            for which in range(3):
                quantize_vectors(normed, of[QUERY + MATRIX * which :], short)
                counter += 8
                while True:
                    first, last = multiply_next_rows(
                        counter, normed, short, of[QUERY + MATRIX * which :], width, threads, mixed[1 + which]
                    )
                    if first >= width:
                        break
                    if which:
                        write_cache(mixed[1 + which], first, last, positions, new, keys if which == 1 else values)
            wait_at_barrier(said[BARRIER])
            counter += 8
            while True:
                task = atomic_increment(cast_to_pointer(counter))
                if task >= count * heads:
                    break
                one, head = task // heads, task % heads
                n, row, c = positions[one] + 1, one // new, head * d
                attend_query(q[one, c : c + d], keys[row, head, :n], values[row, head, :n], scores[:n], context[one, c : c + d])
            wait_at_barrier(said[BARRIER])
            counter += 8
            quantize_vectors(context, of[OUT:], short)
            first = 0
            while first < width:
                first, last = multiply_next_rows(counter, context, short, of[OUT:], width, threads, more)
                for one in range(count):
                    add_bias(x[one, first:last], more[one, first:last])
            wait_at_barrier(said[BARRIER])
            for one in range(count):
                apply_layer_norm(x[one], of[NORM_FEED:], epsilon, normed[one])
            quantize_vectors(normed, of[UP:], short)
            counter += 8
            while True:
                first, last = multiply_next_rows(counter, normed, short, of[UP:], inner, threads, hidden)
                if first >= inner:
                    break
                for one in range(count):
                    apply_gelu(hidden[one, first:last])
            wait_at_barrier(said[BARRIER])
            counter += 8
            quantize_vectors(hidden, of[DOWN:], short)
            first = 0
            while first < width:
                first, last = multiply_next_rows(counter, hidden, short, of[DOWN:], width, threads, more)
                for one in range(count):
                    add_bias(x[one, first:last], more[one, first:last])
            wait_at_barrier(said[BARRIER])

        for place in range(asked):
            apply_layer_norm(x[view_array(said[OUTPUT_VECTORS], asked, np.int64)[place]], parts[NORM:], epsilon, normed[place])
        quantize_vectors(normed[:asked], parts[HEAD:], short)
        counter += 8
        first, logits = 0, view_array(said[LOGITS], (asked, vocabulary), np.float32)
        while first < vocabulary:
            first, _ = multiply_next_rows(counter, normed[:asked], short, parts[HEAD:], vocabulary, threads, logits)

    return run_worker


FLOATS, BYTES = compile_worker(np.float32), compile_worker(np.int8)

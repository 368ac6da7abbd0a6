# mypy: ignore-errors
"""A GPT-2 on a few vectors, compiled by numba: what one of torch's threads computes, from the tokens to the logits.

The threads share the rows of each matrix, and the heads, and wait at a barrier before a part that needs all of the one before.
Vectors and norms are so short that each thread computes them itself.
"""

import math

import numpy as np
from numba import njit, types

from regard.compiled.kept import callback
from regard.compiled.pointers import at, meet, take, view
from regard.compiled.rows import multiply_rows
from regard.compiled.shorts import VECTORS, multiply_bytes, shorten
from regard.compiled.threads import FEW, RUN, RUNS
from regard.compiled.vectors import (
    HALF,
    LEAST,
    ONE,
    REASSOCIATED,
    ZERO,
    add,
    dot,
    exponentiate,
    fold_into,
    tangent,
)

# The arguments of a thread by position: numbers, then addresses.
THREADS, LAYERS, COUNT, NEW, ASKED, HEADS, WIDTH, INNER, ROOM, VOCABULARY, SIZE = range(11)
MEET, COUNTERS, EPSILON, TOKENS, POSITIONS, WANTED, PARTS, OWN, SHARED, LOGITS, SAID = range(11, 22)
# The addresses of the model's tensors by position, 0 for none. All keys and values follow the layers.
NUMBERS, SCALES, BIAS, LARGEST, MATRIX = range(5)  # of a matrix; LARGEST is the largest integer its vectors may hold
EMBEDDING, HEAD, NORM, PLACES, FIRST = 0, MATRIX, 2 * MATRIX, 2 * MATRIX + 2, 2 * MATRIX + 3
NORM_ATTENTION, NORM_FEED, QUERY = 0, 2, 4  # in each layer
OUT, UP, DOWN, LAYER = (QUERY + n * MATRIX for n in (3, 4, 5, 6))
COUNTED = 7  # parts of a layer that threads share, each with a counter of the rows or heads taken
A, B = np.float32(0.044715), np.float32(math.sqrt(2 / math.pi))  # constants of GELU's tanh approximation


@njit(fastmath=REASSOCIATED, error_model="numpy")
def normalise(x, of, epsilon, out):
    """Compute the layer norm of a vector, with the weight and the bias at two addresses."""
    weight, bias = view(of[0], len(x), np.float32), view(of[1], len(x), np.float32)
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
def embed(row, scale, place, out):
    """Compute the vector of a token: its embedding, scaled, plus that of its position."""
    for c in range(len(out)):
        out[c] = np.float32(row[c]) * scale + place[c]


@njit(fastmath=REASSOCIATED, error_model="numpy")
def activate(x):
    """Apply GELU, by tanh, in place."""
    for c in range(len(x)):
        x[c] = HALF * x[c] * (ONE + tangent(B * (x[c] + A * x[c] * x[c] * x[c])))


@njit
def put(x, first, last, positions, new, kept):
    """Copy some numbers of each vector to their head and position in the cache, (b, h, room, d)."""
    d = kept.shape[3]
    for one in range(len(x)):
        for c in range(first, last):
            kept[one // new, c // d, positions[one], c % d] = x[one, c]


@njit
def attend(q, keys, values, scores, out):
    """Compute the context of one query; keys and values are (n, d), scores is a buffer of n numbers."""
    top, scale = LEAST, ONE / np.float32(math.sqrt(len(q)))
    for j in range(len(keys)):
        scores[j] = dot(keys[j], q) * scale
        top = max(top, scores[j])
    total, _, _ = exponentiate(scores, top)
    out[:] = ZERO
    for j in range(len(keys)):
        fold_into(values[j], scores[j] / total, out)


def shared(dtype):
    """Compile what one thread computes, for matrices of this dtype."""

    small = dtype == np.int8

    @njit
    def linear(place, x, short, of, rows, threads, out):
        """Multiply the vectors by the next untaken rows of a matrix; return the first row and one past the last."""
        run = max(RUN, rows // (RUNS * threads))
        first = take(at(place)) * run
        last = min(first + run, rows)
        if first < rows:
            matrix = view(of[NUMBERS], (rows, x.shape[1]), dtype)
            scales, bias = view(of[SCALES], rows, np.float32), view(of[BIAS], rows, np.float32)
            if small and len(x) > FEW:
                factors, numbers = short
                vectors = numbers[: len(factors) * x.shape[1]].reshape(len(factors), x.shape[1])
                multiply_bytes(vectors, factors, first, last, matrix, scales, bias, out)
            else:
                multiply_rows(x, first, last, matrix, scales, bias, out)
        return first, last

    @njit
    def ready(x, of, short):
        """Quantize vectors for a matrix of bytes: their integers, one vector after the other, and their scales."""
        if small and len(x) > FEW:
            (factors, numbers), most = short, view(of[LARGEST], 1, np.int64)[0]
            for one in range(len(x)):
                factors[one] = shorten(x[one], most, numbers[one * x.shape[1] : (one + 1) * x.shape[1]])

    @callback(types.void(types.voidptr))
    def work(place):
        said = view(place, SAID, np.int64)
        threads, count, new, heads, width = said[THREADS], said[COUNT], said[NEW], said[HEADS], said[WIDTH]
        inner, room, vocabulary, asked, d = said[INNER], said[ROOM], said[VOCABULARY], said[ASKED], said[WIDTH] // said[HEADS]
        epsilon, positions = view(said[EPSILON], 1, np.float32)[0], view(said[POSITIONS], count, np.int64)
        counter, parts = said[COUNTERS], view(said[PARTS], FIRST, np.int64)

        own = view(said[OWN] + 4 * said[SIZE] * take(at(counter)), said[SIZE], np.float32)
        normed, scores = own[: count * width].reshape(count, width), own[count * width : count * width + room]
        padded = (count + VECTORS - 1) // VECTORS * VECTORS
        factors, rest = own[count * width + room :][:padded], own[count * width + room + padded :]
        short = factors, view(rest.ctypes.data, padded * max(width, inner), np.int16)
        mixed = view(said[SHARED], (6, count, width), np.float32)
        x, q, context, more = mixed[0], mixed[1], mixed[4], mixed[5]
        hidden = view(said[SHARED] + 4 * 6 * count * width, (count, inner), np.float32)

        words = view(parts[EMBEDDING + NUMBERS], (vocabulary, width), dtype)
        scales = view(parts[EMBEDDING + SCALES], vocabulary, np.float32)
        places = view(parts[PLACES], (room, width), np.float32)
        for one in range(count):
            token = view(said[TOKENS], count, np.int64)[one]
            embed(words[token], scales[token] if len(scales) else ONE, places[positions[one]], x[one])

        for layer in range(said[LAYERS]):
            of = view(said[PARTS] + 8 * (FIRST + LAYER * layer), LAYER, np.int64)
            kept = view(said[PARTS] + 8 * (FIRST + LAYER * said[LAYERS] + 2 * layer), 2, np.int64)
            keys = view(kept[0], (count // new, heads, room, d), np.float32)
            values = view(kept[1], (count // new, heads, room, d), np.float32)
            for one in range(count):
                normalise(x[one], of[NORM_ATTENTION:], epsilon, normed[one])
            for which in range(3):
                ready(normed, of[QUERY + MATRIX * which :], short)
                counter += 8
                while True:
                    first, last = linear(counter, normed, short, of[QUERY + MATRIX * which :], width, threads, mixed[1 + which])
                    if first >= width:
                        break
                    if which:
                        put(mixed[1 + which], first, last, positions, new, keys if which == 1 else values)
            meet(said[MEET])
            counter += 8
            while True:
                task = take(at(counter))
                if task >= count * heads:
                    break
                one, head = task // heads, task % heads
                n, row, c = positions[one] + 1, one // new, head * d
                attend(q[one, c : c + d], keys[row, head, :n], values[row, head, :n], scores[:n], context[one, c : c + d])
            meet(said[MEET])
            counter += 8
            ready(context, of[OUT:], short)
            first = 0
            while first < width:
                first, last = linear(counter, context, short, of[OUT:], width, threads, more)
                for one in range(count):
                    add(x[one, first:last], more[one, first:last])
            meet(said[MEET])
            for one in range(count):
                normalise(x[one], of[NORM_FEED:], epsilon, normed[one])
            ready(normed, of[UP:], short)
            counter += 8
            while True:
                first, last = linear(counter, normed, short, of[UP:], inner, threads, hidden)
                if first >= inner:
                    break
                for one in range(count):
                    activate(hidden[one, first:last])
            meet(said[MEET])
            counter += 8
            ready(hidden, of[DOWN:], short)
            first = 0
            while first < width:
                first, last = linear(counter, hidden, short, of[DOWN:], width, threads, more)
                for one in range(count):
                    add(x[one, first:last], more[one, first:last])
            meet(said[MEET])

        for place in range(asked):
            normalise(x[view(said[WANTED], asked, np.int64)[place]], parts[NORM:], epsilon, normed[place])
        ready(normed[:asked], parts[HEAD:], short)
        counter += 8
        first, logits = 0, view(said[LOGITS], (asked, vocabulary), np.float32)
        while first < vocabulary:
            first, _ = linear(counter, normed[:asked], short, parts[HEAD:], vocabulary, threads, logits)

    return work


FLOATS, BYTES = shared(np.float32), shared(np.int8)

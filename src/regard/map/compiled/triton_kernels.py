"""The traversal of a map on a GPU, as Triton kernels: row statistics, sums of columns, the bins of the picture.

The first two compute the scores of a block of rows with a tile of keys after the other, as fused kernels do; none is stored.
"""

import triton
import triton.language as tl

# numbers for whose values nothing is compiled anew
VARYING = ["table_unit", "range_b", "share", "first", "count", "units", "blocks"]


@triton.jit
def compute_tanh(x):  # type: ignore[no-untyped-def]
    """tanh(x) to a unit in the last place or two: Cephes' polynomial near 0, where 1 - 2 / (exp(2x) + 1) cancels."""
    square = x * x
    near = -5.70498872745e-3 * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    size = tl.abs(x)
    far = 1 - 2 / (tl.exp(2 * size) + 1)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit  # type: ignore[untyped-decorator]
def compute_scores(  # type: ignore[no-untyped-def]
    q, k, bias, table, rows, keys, low, high, k_j, k_d, bias_i, bias_j, k_count, width, scale, softcap,
    has_softcap: tl.constexpr, has_bias: tl.constexpr, has_table: tl.constexpr,
    padded_width: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Compute the scores that the softmax takes, (m, n), of queries (m, padded_width) and of keys by index; -inf if hidden."""
    axis = tl.arange(0, padded_width)
    places = keys[None, :].to(tl.int64) * k_j + axis[:, None].to(tl.int64) * k_d
    loaded = tl.load(k + places, mask=(keys[None, :] < k_count) & (axis[:, None] < width), other=0.0)
    scores = tl.dot(q, loaded, input_precision=precision) * scale
    if has_softcap:
        scores = softcap * compute_tanh(scores / softcap)
    is_visible = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
    if has_bias:
        places = rows[:, None].to(tl.int64) * bias_i + keys[None, :].to(tl.int64) * bias_j
        scores += tl.load(bias + places, mask=is_visible, other=0.0).to(tl.float32)
    if has_table:
        places = rows[:, None].to(tl.int64) * k_count + keys[None, :]
        is_visible = is_visible & (tl.load(table + places, mask=is_visible, other=0) != 0)
    return tl.where(is_visible, scores, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def load_queries(q, rows, is_row, q_i, q_d, width, padded_width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load queries by index, (m, padded_width); 0 past the width and for rows that are none."""
    axis = tl.arange(0, padded_width)
    places = rows[:, None].to(tl.int64) * q_i + axis[None, :].to(tl.int64) * q_d
    return tl.load(q + places, mask=is_row[:, None] & (axis[None, :] < width), other=0.0)


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def summarize_rows(  # type: ignore[no-untyped-def]
    q, k, bias, table, low, high, sinks, pairs, offsets, found,
    q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, bias_b, bias_h, bias_i, bias_j, table_unit, range_b,
    share, first, count, k_count, width, scale, softcap, units, blocks,
    has_softcap: tl.constexpr, has_bias: tl.constexpr, has_table: tl.constexpr, has_sinks: tl.constexpr,
    padded_width: tl.constexpr, precision: tl.constexpr, tile_rows: tl.constexpr, tile_keys: tl.constexpr,
):  # fmt: skip
    """Write the denominators and statistics of a block of rows of one matrix to found (9, units, count)."""
    unit, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, h = tl.load(pairs + 2 * unit), tl.load(pairs + 2 * unit + 1)  # int64
    q, k = q + b * q_b + h * q_h, k + b * k_b + h // share * k_h
    bias, table = bias + b * bias_b + h * bias_h, table + unit.to(tl.int64) * table_unit
    places = block * tile_rows + tl.arange(0, tile_rows)
    is_row = places < count
    rows = first + places
    lows = tl.load(low + b * range_b + rows, mask=is_row, other=k_count)
    highs = tl.load(high + b * range_b + rows, mask=is_row, other=0)
    positions = rows + tl.load(offsets + unit).to(tl.int32)
    queries = load_queries(q, rows, is_row, q_i, q_d, width, padded_width)
    top = tl.full((tile_rows,), float("-inf"), tl.float32)
    of_first, of_itself, of_previous = top, top, top
    total = tl.zeros((tile_rows,), tl.float32)
    weighted, distance = total, total
    nearest = tl.min(tl.where(is_row, positions, 2147483647)) - 1
    furthest = tl.max(tl.where(is_row, positions, -2147483647))
    for start in range(tl.min(lows) // tile_keys * tile_keys, tl.max(highs), tile_keys):
        keys = start + tl.arange(0, tile_keys)
        scores = compute_scores(
            queries, k, bias, table, rows, keys, lows, highs, k_j, k_d, bias_i, bias_j, k_count, width,
            scale, softcap, has_softcap, has_bias, has_table, padded_width, precision,
        )  # fmt: skip
        if start == 0:
            of_first = tl.max(tl.where(keys[None, :] == 0, scores, float("-inf")), 1)
        if (start <= furthest) & (start + tile_keys > nearest):
            back = positions[:, None] - keys[None, :]
            of_itself = tl.maximum(of_itself, tl.max(tl.where(back == 0, scores, float("-inf")), 1))
            of_previous = tl.maximum(of_previous, tl.max(tl.where(back == 1, scores, float("-inf")), 1))
        larger = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        shrink = tl.exp(top - shift)
        raised = scores - shift[:, None]
        exponentials = tl.exp(raised)
        lowered = tl.where(top == float("-inf"), 0.0, top - shift)
        weighted = tl.where(shrink > 0, shrink * (weighted + total * lowered), 0.0)  # lowered may be -inf where it is 0
        weighted += tl.sum(tl.where(exponentials > 0, exponentials * raised, 0.0), 1)
        total = shrink * total + tl.sum(exponentials, 1)
        back = (positions[:, None] - keys[None, :]).to(tl.float32)
        distance = shrink * distance + tl.sum(exponentials * back, 1)
        top = larger
    larger = top
    if has_sinks:
        sink = tl.load(sinks + unit)
        larger = tl.maximum(top, sink)
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    shrink = tl.exp(top - shift)
    lowered = tl.where(top == float("-inf"), 0.0, top - shift)
    weighted = tl.where(shrink > 0, shrink * (weighted + total * lowered), 0.0)
    total, distance = shrink * total, shrink * distance
    whole = total
    if has_sinks:
        whole += tl.exp(sink - shift)
    safe = tl.where(whole == 0, 1.0, whole)
    out = found + unit.to(tl.int64) * count + places
    step = units.to(tl.int64) * count
    tl.store(out, shift, mask=is_row)
    tl.store(out + step, whole, mask=is_row)
    tl.store(out + 2 * step, shift + tl.log(whole), mask=is_row)
    tl.store(out + 3 * step, (total * tl.log(safe) - weighted) / safe, mask=is_row)
    tl.store(out + 4 * step, shrink / safe, mask=is_row)
    tl.store(out + 5 * step, distance / safe, mask=is_row)
    tl.store(out + 6 * step, tl.exp(of_first - shift) / safe, mask=is_row)
    tl.store(out + 7 * step, tl.exp(of_itself - shift) / safe, mask=is_row)
    tl.store(out + 8 * step, tl.exp(of_previous - shift) / safe, mask=is_row)


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def sum_columns(  # type: ignore[no-untyped-def]
    q, k, bias, table, low, high, pairs, shifts, totals, starts, stops, sums, largest,
    q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, bias_b, bias_h, bias_i, bias_j, table_unit, range_b,
    share, first, count, k_count, width, scale, softcap, units, blocks,
    has_softcap: tl.constexpr, has_bias: tl.constexpr, has_table: tl.constexpr,
    padded_width: tl.constexpr, precision: tl.constexpr, tile_rows: tl.constexpr, tile_keys: tl.constexpr,
):  # fmt: skip
    """Write the sum and the largest of the weights of each key over a block of rows to sums, largest (blocks, units, k)."""
    unit, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, h = tl.load(pairs + 2 * unit), tl.load(pairs + 2 * unit + 1)
    q, k = q + b * q_b + h * q_h, k + b * k_b + h // share * k_h
    bias, table = bias + b * bias_b + h * bias_h, table + unit.to(tl.int64) * table_unit
    rows = tl.load(starts + block).to(tl.int32) + tl.arange(0, tile_rows)
    is_row = rows < tl.load(stops + block)
    lows = tl.load(low + b * range_b + rows, mask=is_row, other=k_count)
    highs = tl.load(high + b * range_b + rows, mask=is_row, other=0)
    places = unit.to(tl.int64) * count + rows - first
    shift = tl.load(shifts + places, mask=is_row, other=0.0)
    total = tl.load(totals + places, mask=is_row, other=1.0)
    factor = 1 / tl.where(total == 0, 1.0, total)
    queries = load_queries(q, rows, is_row, q_i, q_d, width, padded_width)
    out = (block.to(tl.int64) * units + unit) * k_count
    for start in range(tl.min(lows) // tile_keys * tile_keys, tl.max(highs), tile_keys):
        keys = start + tl.arange(0, tile_keys)
        scores = compute_scores(
            queries, k, bias, table, rows, keys, lows, highs, k_j, k_d, bias_i, bias_j, k_count, width,
            scale, softcap, has_softcap, has_bias, has_table, padded_width, precision,
        )  # fmt: skip
        weights = tl.exp(scores - shift[:, None]) * factor[:, None]
        tl.store(sums + out + keys, tl.sum(weights, 0), mask=keys < k_count)
        tl.store(largest + out + keys, tl.max(weights, 0), mask=keys < k_count)


@triton.jit(do_not_specialize=["bins", "widest"])  # type: ignore[untyped-decorator]
def pool_columns(sums, largest, edges, total, most, k_count, bins, widest, tile_bins: tl.constexpr, tile_keys: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the sum and the largest of the numbers of each bin of keys, of lines of k_count numbers, to (lines, bins)."""
    line = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * tile_bins + tl.arange(0, tile_bins)
    is_bin = places < bins
    first = tl.load(edges + places, mask=is_bin, other=0)
    stop = tl.load(edges + places + 1, mask=is_bin, other=0)
    summed = tl.zeros((tile_bins,), tl.float64)
    highest = tl.zeros((tile_bins,), tl.float32)
    for start in range(0, widest, tile_keys):
        keys = first[:, None] + start + tl.arange(0, tile_keys)[None, :]
        is_key = keys < stop[:, None]
        summed += tl.sum(tl.load(sums + line * k_count + keys, mask=is_key, other=0.0).to(tl.float64), 1)
        highest = tl.maximum(highest, tl.max(tl.load(largest + line * k_count + keys, mask=is_key, other=0.0), 1))
    tl.store(total + line * bins + places, summed, mask=is_bin)
    tl.store(most + line * bins + places, highest, mask=is_bin)

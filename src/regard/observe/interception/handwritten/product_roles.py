"""What a product of followed tensors is: weights times values, queries times keys, or another sum."""

import math
import weakref
from typing import Any

from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import has_tokens
from regard.observe.interception.handwritten.ancestors.query_axes import find_row_axes, list_axes
from regard.observe.interception.handwritten.products.labelled_product import (
    LabelledProduct,
    label_terms,
)
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import Trace, Traced, TraceKind, Traces
from regard.observe.interception.provenance import TOKEN, ModuleFrame


def is_value(traces: Traces, frame: ModuleFrame, v: Tensor, trace: Trace) -> bool:
    """Return whether a tensor holds tokens: no softmax of other pairs, and not made from the weights beside it.

    Nor is it one of several softmaxes in a row.
    """
    own = traces.find(v)
    if own is not None:
        is_softmax = own.kind is TraceKind.WEIGHTS and own.keys is not None
        is_softmax = is_softmax and (own.pairs or multiplies_softmaxes(traces, trace))
        if is_softmax or multiplies_softmaxes(traces, own) or own.roots & trace.roots:
            return False
    return v.is_floating_point() and has_tokens(frame, v)


def multiplies_features(traces: Traces, frames: list[ModuleFrame], product: LabelledProduct, traced: list[Traced]) -> bool:
    """Return whether a product is of queries and keys of which a softmax is a feature map, and of no weights with values.

    It sums over the features of both, or one is a softmax over these and the other over tokens, or keys of a layer.
    """
    if product.operands[0] is product.operands[1] or any(trace.kind is not TraceKind.WEIGHTS for _, trace in traced):
        return False
    sums = [sums_softmax(traces, x, trace, product) for x, trace in traced]
    if len(traced) == 2:
        return all(sums) or (any(sums) and not any(trace.pairs for _, trace in traced))
    if sums != [True] or traced[0][1].pairs:
        return False
    return sums_features(frames, product, product.operands[1 - product.find_place(traced[0][0])])


def sums_softmax(traces: Traces, x: Tensor, trace: Trace, product: LabelledProduct | None) -> bool | None:
    """Return whether a product sums weights x along the axes of the softmax that made them; None if these are not known."""
    if trace.keys is None or trace.dims is None or product is None:
        return None
    return find_summed_axes(traces, trace.dims, x, product) == set(traces.table.expand_axes(trace.keys))


def is_score_matrix(traces: Traces, frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether x is the scores of as many queries as keys: no values, though they are a product of tokens.

    Tokens times a product of weights are values, however many features they have.
    """
    trace = traces.find(x)
    if trace is None or trace.kind is not TraceKind.SCORES or trace.form is None or trace.dims is None:
        return False
    if any(frame.find_contents(weakref.ref(one)) < TOKEN for one in (trace.form.a, trace.form.b)):
        return False
    mine, theirs = (list_axes(traces.table, one) for one in (trace.form.a_dims, trace.form.b_dims))
    own = list_axes(traces.table, trace.dims)
    rows, columns = (math.prod(traces.table.get_sizes([*one & own])) for one in (mine - theirs, theirs - mine))
    return rows == columns > 1


def is_sum_of_scores(trace: Trace, x: Tensor, product: LabelledProduct | None) -> bool:
    """Return whether a product sums weights x with one number for each, as an indexer does that scores keys.

    They are activations of scores. The values of attention have several numbers for each key.
    """
    if product is None or trace.activated is None:
        return False
    place = product.find_place(x)
    own, other = product.labels[place], product.labels[1 - place]
    return all(size == 1 for label, size in zip(other, product.operands[1 - place].shape, strict=True) if label not in own)


def find_summed_axes(traces: Traces, dims: Dims, x: Tensor, product: LabelledProduct) -> set[int]:
    """Return the axes of x, an operand with these axes, that a product sums."""
    labels = product.labels[product.find_place(x)]
    own = zip(labels, traces.table.expand_dims(dims), strict=True)
    return {axis for label, axes in own if label not in product.result for axis in axes}


def is_sum_of_heads(traces: Traces, trace: Trace, x: Tensor, product: LabelledProduct | None) -> bool:
    """Return whether a product sums weights x over the heads alone, as where the norms of values rank the tokens."""
    if trace.form is None or trace.dims is None or product is None:
        return False
    summed = find_summed_axes(traces, trace.dims, x, product)
    mine, theirs = (list_axes(traces.table, one) for one in (trace.form.a_dims, trace.form.b_dims))
    return bool(summed) and summed <= mine & theirs & list_axes(traces.table, trace.form.dims)


def multiplies_softmaxes(traces: Traces, trace: Trace) -> bool:
    """Return whether scores are the product of two tensors that a softmax made."""
    operands = () if trace.form is None else (trace.form.a, trace.form.b)
    found = [traces.find(x) for x in operands]
    return bool(found) and all(one is not None and one.kind is TraceKind.WEIGHTS and one.keys for one in found)


def is_factor(name: str, args: Any, operands: list[Tensor], x: Tensor) -> bool:
    """Return whether an einsum of several tensors sums over no axis of x, which multiplies each entry or row by a number."""
    if len(operands) < 3 or strip_affixes(name) != "einsum" or not isinstance(args[0], str):
        return False
    labels, result = label_terms(args[0], operands)
    return any(y is x and set(one) <= set(result) for y, one in zip(operands, labels, strict=False))


def makes_features(product: LabelledProduct) -> bool:
    """Return whether a product's result is no scores: products of features with each other, or sums over keys."""
    is_square = product.operands[0] is product.operands[1] and not product.sums_several()
    return is_square or product.sums_rows()


def sums_tokens(traces: Traces, frames: list[ModuleFrame], trace: Trace) -> bool | None:
    """Return whether scores are sums over tokens, and so of features with features; None if no layer shows it."""
    form, found = trace.form, set[bool]()
    for x, dims in () if form is None else ((form.a, form.a_dims), (form.b, form.b_dims)):
        assert form is not None
        rows = find_row_axes(frames, traces.table, x, dims)
        summed = list_axes(traces.table, dims) - list_axes(traces.table, form.dims)
        if rows is not None and summed:
            found.add(summed <= rows.rows)
    return (True in found) if found else None


def sums_features(frames: list[ModuleFrame], product: LabelledProduct, x: Tensor) -> bool:
    """Return whether a product sums its operand x over features that a layer has made, as of keys, and not over tokens."""
    table, place = AxisTable(), product.find_place(x)
    dims = table.add_dims(x.shape)
    found = find_row_axes(frames, table, x, dims)
    own = dict(zip(product.labels[place], table.expand_dims(dims), strict=True))
    summed = {axis for label, axes in own.items() if label not in product.result for axis in axes}
    kept = {axis for label in product.list_rows(place) for axis in own[label]}
    return found is not None and bool(summed and kept) and summed.isdisjoint(found.rows) and kept <= found.rows

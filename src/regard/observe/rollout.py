"""Attention rollout: how much of each input token reaches a query through all layers, if attention alone carried it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map import AttentionMap
from regard.map.attention_map import LIMIT_BYTES, check_result_size
from regard.map.implicit_map import ImplicitMap
from regard.map.indexing import select_places
from regard.mechanism.arguments import check_choice, check_instance, check_number, check_sequence
from regard.observe.map_view import MapView
from regard.observe.recorded_runs.run import IMPLICIT, KINDS
from regard.observe.recorded_runs.token_mixers import list_token_mixers, resolve_mixers
from regard.observe.recording import Recording
from regard.observe.token_places.places import PatchGrid, Place

ROWS = 64  # per product
PRODUCT_NUMBERS = 2**22  # of the heads of a layer without a softmax that are multiplied together


def rollout(
    recording: Recording,
    queries: int | Sequence[int] | slice | Tensor = slice(None),
    *,
    layers: Sequence[int | str] | None = None,
    kind: str | None = None,
    part: str | None = None,
    residual: float = 0.5,
) -> Tensor:
    """Return rows of Â_L ... Â_2 Â_1 with Â = ½ A + ½ I, where A is the mean over the heads, (b, n, k).

    Row n states how much each input token counts for query n after the last of `layers`, by default all that were recorded: a
    recording made with layers= or heads= gives the rollout of these layers, with the mean over these heads. Rows are
    computed from the last layer down by products with Aᵀ, so no matrix is stored, and up to 64 queries cost one traversal of
    every head. `residual` is the weight of I, ½ by default.

    Layers with and without a softmax are multiplied in the order they ran, each by its own rule. Where a row of softmax weights
    sums to less than 1, because of a sink or because a query sees nothing, Â is divided by its sum, so that each row of the
    result sums to 1 if no other layers take part. Of a layer without a softmax A is the mean of its signed matrices, and Â is
    not divided: with residual=½ and no softmax the result is 2^-L times the product of I + A of Ali et al., who leave the skip
    and the gate out of A. kind="self" is of the layers with a softmax alone, "implicit" of those without; numbers in `layers`
    count the layers of that kind.
    Raises TooLargeError if the result would take more than a gigabyte: then pass fewer queries. Raises ShapeError if the layers
    have other tokens, as windows that are shifted. Raises ConfigError if a block has layers of both kinds, which may run beside
    each other, or if a layer without a softmax may be cross attention.
    Source: Abnar and Zuidema 2020, section 3; without a softmax Ali, Zimerman and Wolf 2024, The hidden attention of Mamba
    models, section 3.2, equations 21 and 22.
    """
    check_instance("recording", recording, Recording, "Record a model with regard.record(model).")
    if not 0 <= check_number("residual", residual) < 1:
        raise ConfigError(f"residual must be the share of the residual stream, at least 0 and below 1; got {residual}.")
    if kind is not None and check_choice("kind", kind, (*KINDS, IMPLICIT)) == "cross":
        raise ConfigError("rollout needs self attention: the queries of cross attention belong to another text than the keys.")
    chosen = resolve_mixers(recording.last, None if layers is None else check_sequence("layers", layers), kind, part)
    if not chosen:
        which = "'self' or 'implicit'" if kind is None else repr(kind)
        raise ConfigError(f"the recording has no layer of kind {which} to roll out.")
    check_same_places(recording, [number for one, number in chosen if one != IMPLICIT], part)
    relevance = make_one_hot(recording.map(chosen[-1][1], kind=chosen[-1][0], part=part), queries)
    for one, layer in reversed(chosen):
        m: AttentionMap | ImplicitMap = recording.map(layer, kind=one, part=part)
        if isinstance(m, ImplicitMap):
            check_square_implicit(m, layer, relevance)
            relevance = residual * relevance + (1 - residual) * multiply_mean(m, relevance)
        else:
            relevance = propagate_relevance(m, relevance, layer, residual)
    return relevance


def iterate_rollouts(recording: Recording, part: str | None = None, residual: float = 0.5) -> Iterator[Tensor]:
    """Yield the rollout of all queries after each layer of list_token_mixers, (b, t, t): Â_1, Â_2 Â_1, ...; see rollout.

    Each costs one product of a layer's map with the one before, which is a matrix: for texts and images that fit in memory.
    Raises ShapeError if a layer is no self attention on the same tokens.
    """
    found: Tensor | None = None
    layers = list_token_mixers(recording.last, None, part)
    check_same_places(recording, [number for kind, number in layers if kind != IMPLICIT], part)
    for kind, layer in layers:
        m: AttentionMap | ImplicitMap = recording.map(layer, kind=kind, part=part)
        b, h, _, k = m.shape
        sums = sum_rows(m, check_square(m, layer, found)) if isinstance(m, AttentionMap) else None
        if isinstance(m, ImplicitMap):
            check_square_implicit(m, layer, found)
        if found is None:
            found = torch.eye(k, dtype=m[0, 0, 0, 0].dtype, device=m.device).expand(b, k, k)
        mixed = (1 - residual) * (m @ found.unsqueeze(1).expand(b, h, k, k)).mean(1).to(found.dtype) + residual * found
        if sums is not None:
            whole = ((1 - residual) * sums.mean(1) + residual).unsqueeze(-1)
            mixed = mixed / whole.where(whole != 0, 1)
        found = mixed
        yield found


def roll_out_until(recording: Recording, query: int, layer: int, kind: str, part: str | None) -> Tensor:
    """Return the row (b, k) of the rollout of one query after a layer, given by its number among those of its kind."""
    mixers = list_token_mixers(recording.last, None if kind == "self" else kind, part)
    until = range(mixers.index((kind, layer)) + 1)
    return rollout(recording, [query], layers=until, kind=None if kind == "self" else kind, part=part)[:, 0]


def make_one_hot(m: AttentionMap | ImplicitMap, queries: int | Sequence[int] | slice | Tensor) -> Tensor:
    """Return one-hot rows (b, n, k) with a 1 at each query's own position. Raises TooLargeError past the limit."""
    b, _, q, k = m.shape
    rows = select_places("queries", queries, q).to(m.device)
    dtype = m[0, 0, 0, 0].dtype  # that of the weights, of which one costs a row
    check_result_size(b * len(rows) * k * dtype.itemsize, "fewer queries: rollout(recording, [-1])", LIMIT_BYTES)
    own = torch.zeros(b, len(rows), k, dtype=dtype, device=m.device)
    return own.scatter_(2, rows.view(1, -1, 1).expand(b, -1, 1), 1)


def propagate_relevance(m: AttentionMap, relevance: Tensor, layer: int | str, residual: float) -> Tensor:
    """Return r Â: the relevance (b, n, k) of a layer's inputs, given that of its outputs."""
    look = check_square(m, layer, relevance)
    product = None if look.has_sink else multiply_mean(m, relevance)  # which computes the sums, too, without a sink
    sums = sum_rows(m, look).to(relevance.dtype)
    whole = (1 - residual) * sums.mean(1) + residual  # (b, q)
    given = relevance / whole.where(whole != 0, 1).unsqueeze(1)
    if product is None or (sums != sums[:, :1]).any():  # else rows without weights are the only ones that are divided
        product = multiply_mean(m, given)
    return residual * given + (1 - residual) * product


def multiply_mean(m: AttentionMap | ImplicitMap, relevance: Tensor) -> Tensor:
    """Compute r A for the mean A of the heads: r (b, n, q) to (b, n, k), ROWS rows and some heads at a time."""
    found = relevance.new_zeros(*relevance.shape[:2], m.shape[3])
    b, h, _, k = m.shape
    together = max(1, PRODUCT_NUMBERS // max(1, b * k * min(ROWS, relevance.shape[1]))) if isinstance(m, ImplicitMap) else 1
    for heads in torch.arange(h).split(together):
        one = m.select(heads=heads)
        for rows in torch.arange(relevance.shape[1], device=m.device).split(ROWS):
            product = one.mT @ relevance[:, rows].mT.unsqueeze(1)
            found[:, rows] += product.sum(1).mT.to(found.dtype) / h
    return found


def find_moved_layer(recording: Recording, layers: Iterable[int | str], part: str | None) -> int | str | None:
    """Return the first of some layers whose keys are known to be other patches than those of a layer before; or None."""
    first: list[Place] | None = None
    for layer in layers if recording.places is not None else ():
        keys = recording.axis_places(layer, part=part)[1]
        own = [replace(one, names=(), has_queries=True, extent=None) if isinstance(one, PatchGrid) else one for one in keys]
        if own and first is not None and own != first:
            return layer
        first = own or first
    return None


def check_same_places(recording: Recording, layers: Iterable[int | str], part: str | None) -> None:
    """Raise ShapeError if the keys of a layer are known to be other patches than those of a layer before."""
    moved = find_moved_layer(recording, layers, part)
    if moved is not None:
        raise ShapeError(
            f"rollout needs the same tokens in every layer; those of layer {moved} are other patches of the image than those "
            "before it, as where windows are shifted or patches are merged. Pass layers= with the same."
        )


def check_square(m: AttentionMap, layer: int | str, relevance: Tensor | None) -> MapView:
    """Return the view of a map of self attention on the tokens of the relevance (b, n, t), if that is known.

    Raises ShapeError if it is of anything else.
    """
    b, _, q, k = m.shape
    look = MapView(m)
    if q != k or look.positions[:, :1].any() or (relevance is not None and relevance.shape[::2] != (b, q)):
        raise ShapeError(
            f"rollout needs maps (b, h, t, t) of self attention on the same tokens in every layer; layer {layer} is {m}, its "
            f"first query at position {look.positions[0, 0].item()}."
        )
    return look


def check_square_implicit(m: ImplicitMap, layer: int | str, relevance: Tensor | None) -> None:
    """Raise ShapeError unless a map without a softmax is of the tokens of the relevance (b, n, t) on themselves."""
    b, _, q, k = m.shape
    if q != k or (relevance is not None and relevance.shape[::2] != (b, q)):
        raise ShapeError(
            f"rollout needs maps (b, h, t, t) of self attention on the same tokens in every layer; layer {layer} is {m}."
        )


def sum_rows(m: AttentionMap, look: MapView) -> Tensor:
    """Return the sums (b, h, q) of a map's rows, which a sink or a mask makes less than 1."""
    logsumexp = m.logsumexp()
    return m.mass(slice(None)) if look.has_sink else (logsumexp != -torch.inf).to(logsumexp.dtype)

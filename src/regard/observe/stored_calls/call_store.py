"""What is stored of an attention call: copies of its tensors, of the selected heads, in the dtype and place to keep them."""

import math
import weakref
from dataclasses import replace

import torch
from torch import Tensor

from regard.map.compressed_bias import compress_bias
from regard.mechanism.masks import Given
from regard.mechanism.request import autocast_tensor, is_autocast_on
from regard.mechanism.scores import default_scale, score_dtype
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.handwritten.scores.score_parts import FILLED, UNDERFLOW, bound_products
from regard.observe.recorded_runs.data_flow import LayerLinks
from regard.observe.stored_calls.cache_match import CacheMatch
from regard.observe.stored_calls.call_graph import CallGraph
from regard.observe.stored_calls.kv_history import KVHistory, StoredCall
from regard.observe.stored_calls.mask_inference import find_visible_end
from regard.observe.stored_calls.selection import Selection
from regard.observe.stored_calls.tensor_store import Store

UNWRITTEN = (
    "no mask hides its last keys and values, which are 0, as unwritten slots of a cache or padding: the weight that they take "
    "in the model is that of a sink in the map, so that its rows sum to less than 1"
)


class CallStore:
    """Turns intercepted calls into stored calls and key histories."""

    def __init__(self, selection: Selection, store: Store) -> None:
        self.selection, self.store = selection, store
        self.weight: Tensor | None = None  # of the last call with additive scores
        self.bias: tuple[weakref.ref[Tensor], Tensor] | None = None  # that of the last call with one, and how it is stored

    @property
    def is_lossless(self) -> bool:
        """Whether all heads are stored, in the dtype of the call."""
        return self.selection.heads is None and self.store.dtype is None

    def create_history(
        self,
        call: AttentionCall,
        name: str,
        kind: str,
        step: int,
        parent_rows: dict[int, Tensor],
        graph: CallGraph | None,
        length: int | None,
        links: LayerLinks | None = None,
    ) -> tuple[KVHistory, StoredCall]:
        """Return a new history with the call's keys, without the unwritten slots of a cache, and the stored call.

        `length` is the number of tokens that the cache stated to hold before.
        """
        k, new, seen = call.k, call.q.shape[2], call.k.shape[2]
        is_cached = kind == "self" and call.can_use_cache and seen > new
        if is_cached:
            seen = max(find_visible_end(call.mask, new, seen, call.offset), new)
            k = k[:, :, :seen]
        heads = None if self.selection.heads is None else tuple(self.selection.find_heads(call.q.shape[1]))
        past = seen - new if is_cached else 0
        start = None if length is None and past else (length or 0) - past
        history = KVHistory(name, kind, parent_rows, past=past, start=start, selected_heads=heads, links=links)
        self.append_keys(history, call, k, step, graph)
        stored = self.copy_call(call, slice(0, seen), 0, step, graph)
        states_place = isinstance(stored.offset, Tensor) or stored.offset or stored.mask.is_query_dependent
        if past and not states_place and (length or (new == 1 and call.follows_cache())):
            stored.offset = past
        return history, stored

    def extend_history(
        self, history: KVHistory, call: AttentionCall, match: CacheMatch, step: int, graph: CallGraph | None
    ) -> tuple[KVHistory, StoredCall]:
        """Return the history with the call's new keys appended, and the stored call."""
        if history.kind == "cross":
            return history, self.copy_call(call, slice(match.first, match.known), match.slot, step, graph)
        if match.known < history.total:
            history = history.crop(match.known)
        new = call.q.shape[2]
        self.append_keys(history, call, call.k[:, :, match.slot : match.slot + new], step, graph)
        if match.places is not None:
            stored = self.copy_call(call, slice(match.slot + new), match.slot, step, graph)
            return history, spread_keys(stored, match.places, match.known)
        return history, self.copy_call(call, slice(match.first, match.known + new), match.slot, step, graph)

    def append_keys(self, history: KVHistory, call: AttentionCall, k: Tensor, step: int, graph: CallGraph | None) -> None:
        """Append keys of a call to a history."""
        history.keys.append(self.copy_or_share(call, k, graph))
        history.steps.append(step)

    def copy_call(self, call: AttentionCall, keys: slice, slot: int, step: int, graph: CallGraph | None) -> StoredCall:
        """Return what is stored of a call besides its keys, which are a slice of the keys of its history."""
        first, stop = keys.start or 0, keys.stop
        mask = call.mask if stop - first == call.k.shape[2] else call.mask.truncate(keys=stop - first)
        bias, sinks = None if call.bias is None else self.share_bias(call.bias)[..., : stop - first], call.sinks
        if self.selection.heads is not None:
            mask = mask.select_heads(self.selection.heads)
            bias = bias if bias is None or bias.shape[1] == 1 else bias[:, self.selection.heads]
            sinks = None if sinks is None else sinks[self.selection.heads]
        return StoredCall(
            q=self.copy_or_share(call, call.q, graph),
            v=self.copy_values(call, slice(slot, slot + call.q.shape[2]) if slot else slice(stop - first), graph),
            first=first,
            stop=stop,
            step=step,
            part=call.part,
            mask=mask,
            offset=call.offset.clone() if isinstance(call.offset, Tensor) else call.offset,
            scale=default_scale(call.q) if call.scale is None else call.scale,
            softcap=call.softcap,
            bias=None if bias is None else bias.detach(),
            sinks=None if sinks is None else sinks.detach().clone(),
            weight=None if call.weight is None else self.share_weight(call.weight.detach()),
            graph=graph,
        )

    def share_bias(self, bias: Tensor) -> Tensor:
        """Return a bias by its diagonals if they suffice; consecutive calls with the same one share them."""
        if self.bias is None or self.bias[0]() is not bias:
            self.bias = weakref.ref(bias), compress_bias(bias.detach())
        return self.bias[1]

    def share_weight(self, weight: Tensor) -> Tensor:
        """Return a copy of the weight of additive scores, shared by consecutive calls with the same weight."""
        if self.weight is None or not torch.equal(self.weight, weight):
            self.weight = weight.clone()
        return self.weight

    def copy_values(self, call: AttentionCall, new: slice, graph: CallGraph | None) -> Tensor | None:
        """Return a copy of the values of a call's new keys; None if values are not kept."""
        if call.v is None or not self.store.values:
            return None
        return self.copy_or_share(call, call.v[:, :, new], graph)

    def copy_residual(self, x: Tensor) -> Tensor:
        """Return a copy of a residual stream (b, t, c) in the store's dtype."""
        return self.store.copy_tensor(x.detach() if self.store.dtype is None else x.detach().to(self.store.dtype))

    def copy_or_share(self, call: AttentionCall, x: Tensor, graph: CallGraph | None) -> Tensor:
        """Return queries, keys or values of a call as they are stored, in the memory that its graph keeps anyway if it can."""
        found, is_in_memory = self.cast_and_select(call, x), self.store.folder is None
        return found if is_in_memory and graph is not None and graph.is_shareable else self.store.copy_tensor(found)

    def cast_and_select(self, call: AttentionCall, x: Tensor) -> Tensor:
        """Return queries, keys or values of a call as they are stored: of the selected heads, in the store's dtype.

        Raises ConfigError for a head that the call does not have.
        """
        x = cast_for_autocast(call, x)
        if self.selection.heads is not None:
            count = call.q.shape[1]
            x = x[:, [head // (count // x.shape[1]) for head in self.selection.find_heads(count)]]
        return x if self.store.dtype is None or not x.is_floating_point() else x.to(self.store.dtype)


def spread_keys(stored: StoredCall, places: Tensor, known: int) -> StoredCall:
    """Return the call of a cache that has dropped keys as one of all `known` keys before its own, the others hidden.

    places (b, g, n) has the index of each key that the cache held.
    """
    (b, h, q, _), n = stored.q.shape, stored.stop
    own = torch.arange(known, known + q, device=places.device).expand(*places.shape[:2], -1)
    columns = torch.cat([places, own], -1).repeat_interleave(h // places.shape[1], 1).unsqueeze(2).expand(b, h, q, n)
    queries, keys = (torch.arange(size, device=places.device) for size in (q, n))
    seen = stored.mask.block(queries, keys, stored.offset).expand(b, h, q, n)
    table = torch.zeros(b, h, q, known + q, dtype=torch.bool, device=places.device).scatter(3, columns, seen)
    if bool((table == table[:1, :1]).all()):
        table = table[:1, :1].clone()
    bias = stored.bias
    if bias is not None:
        bias = bias.new_zeros(b, h, q, known + q).scatter(3, columns, bias.expand(b, h, q, n))
    return replace(stored, stop=known + q, mask=Given.from_shared_table(table), offset=0, bias=bias)


def cast_for_autocast(call: AttentionCall, x: Tensor) -> Tensor:
    """Return queries, keys or values of a call as its kernel sees them under torch.autocast."""
    return autocast_tensor(x.detach()) if is_autocast_on(x.device) and call.weight is None else x.detach()


def fold_unwritten_slots(call: AttentionCall, filled: int) -> AttentionCall:
    """Return a call without the last slots of its cache whose keys and values are 0, where its queries see them.

    Each has the score 0 and adds nothing to the context, as a sink does. A sink is the same for all queries; their number of
    unwritten slots is not, so the bias of each row is lowered instead. The call itself if there are none, or if one query does
    not see them; without the slots, and without a sink, if a bias hides them. `filled` is the number of slots that are known to
    be written: a token's key and value may be 0 too.
    """
    new, n = call.q.shape[2], call.k.shape[2]
    can_be_cache = call.can_use_cache and call.weight is None and n > max(new, filled) and call.q.numel() > 0
    if not can_be_cache or call.k[0, 0, -1].any():
        return call
    queries, slots = (torch.arange(count, device=call.k.device) for count in (new, n))
    if not call.mask.block(queries[[0, -1]], slots[-1:], call.offset).all():
        return call
    nonzero = call.k.ne(0).any(-1).flatten(0, 1).any(0).nonzero()
    written = max(new, filled, int(nonzero.max()) + 1 if len(nonzero) else 0)
    if written == n or (call.v is not None and call.v[:, :, written:].any()):
        return call
    seen = call.mask.block(queries, slots[written:], call.offset)
    bias = call.q.new_zeros(1, 1, 1, n) if call.bias is None else call.bias
    bias = bias.detach().to(score_dtype(call.q.dtype))
    weight = bias[..., written:].masked_fill(~seen, -math.inf).logsumexp(-1, keepdim=True)  # (b or 1, h or 1, q, 1)
    k, v = call.k[:, :, :written], None if call.v is None else call.v[:, :, :written]
    mask, bias = call.mask.truncate(keys=written), bias[..., :written]
    is_hidden = hides_slots(call, weight, bias.masked_fill(~mask.block(queries, slots[:written], call.offset), -math.inf))
    if is_hidden.all():
        return replace(call, k=k, v=v, mask=mask, bias=bias)
    if is_hidden.any() or not weight.isfinite().all():
        return call
    if call.sinks is None:
        sinks, lowered = torch.zeros(call.q.shape[1], dtype=weight.dtype, device=seen.device), -weight
    else:
        sinks, lowered = call.sinks, call.sinks.view(-1, 1, 1) - weight.logaddexp(call.sinks.view(-1, 1, 1))
    note = "; ".join(filter(None, (call.note, UNWRITTEN)))
    return replace(call, k=k, v=v, mask=mask, bias=bias + lowered, sinks=sinks, note=note)


def hides_slots(call: AttentionCall, weight: Tensor, bias: Tensor) -> Tensor:
    """Return whether the bias of each row hides slots of this weight, the logarithm of a sum, beside the written ones.

    A row whose keys are all hidden is padding: its weights are those of the written keys alone.
    """
    largest = bias.amax(-1, keepdim=True)
    reach = bound_products(call.q, call.k, default_scale(call.q) if call.scale is None else call.scale) + UNDERFLOW
    return (weight < largest - reach) | (torch.maximum(weight, largest) <= FILLED)

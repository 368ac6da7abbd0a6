"""Patch: what a layer did in a recording, in place of what it does."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from regard.errors import ConfigError
from regard.mechanism.arguments import check_choice, check_instance
from regard.mechanism.heads import share
from regard.observe.attention_changes import Change, compute_recorded_context, find_recorded_layer
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.recorded_runs.token_positions import Places, TokenPositions, locate_tokens, mark_positions
from regard.observe.recording import Recording


@dataclass(frozen=True, eq=False)
class Patch(Change):
    """Replace what a layer does by what it did in a recording, in the layer with its path or else its number.

    of: "weights", the recorded weights, over the values of this forward; "output", the recorded contexts, weights times values,
    for which the recording must have kept the values; "residual", the residual stream after the layer's block, recorded with
    keep="residual". head None is the whole layer. queries are positions in the sequence, None for all: in each step of a
    generation those that the step computes are replaced, so that a recording is as long as the last of them. A recording of a
    clean input patched into a corrupted one is activation patching that denoises, the other way round it noises (Heimersheim
    and Nanda 2024).
    """

    can_change_parts = True
    recording: Recording
    of: str = "weights"
    queries: Places = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_instance("recording", self.recording, Recording, "Record a model with regard.record(model).")
        check_choice("of", self.of, ("weights", "output", "residual"))
        if self.of == "residual" and (self.head is not None or self.kind != "self"):
            raise ConfigError("of='residual' replaces what a block with self-attention returns: leave head and kind out.")

    def change_context(self, context: Tensor, call: AttentionCall, name: str, number: int) -> Tensor:
        heads, places = self.find_heads(call), locate_tokens(call, self.kind)
        rows = self.mark_queries(context.shape[2], places.past)
        if not heads or not rows.any():  # heads of other ranks, and queries of other steps
            return context
        compute = take_patched_contexts if self.of == "output" else weigh_patched_values
        last = int(rows.nonzero().max())
        theirs = compute(self, context, call, places, last, name, number)[:, heads]
        theirs = theirs[:, :, places.past : places.past + context.shape[2]]
        theirs = functional.pad(theirs, (0, 0, 0, context.shape[2] - theirs.shape[2]))  # no row that is chosen
        patched = context.clone()
        patched[:, heads] = torch.where(rows.to(context.device).view(-1, 1), theirs.to(context), patched[:, heads])
        return patched

    def change_weights(self, weights: Tensor, call: AttentionCall, name: str, number: int) -> Tensor:
        heads, places = self.find_heads(call), locate_tokens(call, self.kind)
        (q, k), run = weights.shape[2:], self.recording.last
        rows = self.mark_queries(q, places.past)
        if self.of != "weights" or not heads or not rows.any():
            return weights
        found = run.map(find_recorded_layer(run, name, number, self.kind, call.visit), kind=self.kind)
        theirs = found.dense()[:, heads, places.past : places.past + q, places.first : places.first + k].to(weights)
        theirs = functional.pad(theirs, (0, k - theirs.shape[3], 0, q - theirs.shape[2]))  # rows that are not chosen
        patched = weights.clone()
        patched[:, heads] = torch.where(rows.to(weights.device).view(-1, 1), theirs, patched[:, heads])
        return patched

    def mark_queries(self, q: int, past: int) -> Tensor:
        """Return which of a call's queries are replaced, (q,), where `past` tokens came before them."""
        return mark_positions(self.queries, past + q, "queries")[past:]

    def change_residual(self, stream: Tensor, name: str, number: int, visit: int | None, past: int) -> Tensor:
        """Return the residual stream (b, t, c) after the block of a layer with the recorded one at the chosen queries."""
        theirs = self.recording.residual(find_recorded_layer(self.recording.last, name, number, "self", visit))
        rows = self.mark_queries(stream.shape[1], past)
        if not rows.any():
            return stream
        if theirs.shape[::2] != stream.shape[::2] or theirs.shape[1] <= past + int(rows.nonzero().max()):
            raise ConfigError(
                f"Patch needs a recorded residual stream of the same shape: recorded {tuple(theirs.shape)}, now "
                f"{tuple(stream.shape)} after {past} tokens in {name}."
            )
        theirs = theirs[:, past : past + stream.shape[1]].to(stream)
        theirs = functional.pad(theirs, (0, 0, 0, stream.shape[1] - theirs.shape[1]))  # no row that is chosen
        return torch.where(rows.to(stream.device).view(-1, 1), theirs, stream)

    def find_block(self, name: str, number: int, visit: int | None) -> str | None:
        """Return the path of the block whose output was recorded as the residual stream after a layer, or None."""
        layer = find_recorded_layer(self.recording.last, name, number, "self", visit)
        return self.recording.last.find_histories(layer, "self", None)[0].block


def take_patched_contexts(
    patch: Patch, context: Tensor, call: AttentionCall, places: TokenPositions, last: int, name: str, number: int
) -> Tensor:
    """Return the recorded contexts (b, h, n, e) of a layer, with the last query of a call that is chosen among them."""
    theirs = compute_recorded_context(patch.recording.last, name, number, patch.kind, call.visit)
    came, (b, h, q, e) = tuple(theirs.shape), context.shape
    if (came[0], came[1], came[3]) != (b, h, e) or came[2] <= places.past + last:
        after = f" after {places.past} tokens" if places.past else ""
        raise ConfigError(
            f"Patch needs recorded contexts of the same shape: recorded {came}, now {(b, h, q, e)}{after} in {name}."
        )
    return theirs


def weigh_patched_values(
    patch: Patch, context: Tensor, call: AttentionCall, places: TokenPositions, last: int, name: str, number: int
) -> Tensor:
    """Return the recorded weights of a layer times the values of a call, as `take_patched_contexts` does.

    Raises ConfigError if the chosen queries have weights on keys that the call does not have.
    """
    run, v = patch.recording.last, call.v
    assert v is not None
    found = run.map(find_recorded_layer(run, name, number, patch.kind, call.visit), kind=patch.kind)
    (b, h, q, _), k = context.shape, v.shape[2]
    behind = found.shape[3] - places.first - k
    is_shorter = found.shape[2] <= places.past + last or behind < 0
    if found.shape[:2] != (b, h) or is_shorter or (patch.kind == "cross" and behind):
        after = f" after {places.past} tokens" if places.past else ""
        raise ConfigError(
            f"Patch needs a recorded map of the same shape: recorded {found.shape}, now {(b, h, q, k)}{after} in {name}."
        )
    values = share(functional.pad(v, (0, 0, places.first, behind)), h).to(found.device)
    if places.first or behind or not call.has_all_values:
        are_missing = functional.pad(find_missing_values(call), (0, 0, places.first, behind), value=1.0)
        chosen = slice(places.past, places.past + last + 1)
        weights = (found @ are_missing.to(values).expand(b, h, -1, -1))[:, patch.find_heads(call), chosen]
        if weights[:, :, patch.mark_queries(q, places.past)[: last + 1]].any():
            raise ConfigError(
                f"Patch has recorded weights on keys that {name} does not have now, or whose values it did not gather: "
                "choose other queries."
            )
    return found @ values


def find_missing_values(call: AttentionCall) -> Tensor:
    """Return 1 for each key (b, h, k, 1) whose value a call does not have, since no query picked it, else 0."""
    queries, keys = (torch.arange(x.shape[2], device=x.device) for x in (call.q, call.k))
    if call.has_all_values:
        return call.k.new_zeros(1, 1, len(keys), 1)
    return (~call.mask.block(queries, keys, call.offset).any(2)).unsqueeze(-1).to(call.k.dtype)

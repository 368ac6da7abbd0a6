"""Check that the order of tokens matters in a model that holds positions, by the context of its first attention call."""

import copy
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from regard.examination import evidence, position_tensors
from regard.examination.adapters import SubjectError
from regard.examination.inner_calls import InnerCall, record_inner_calls
from regard.examination.report import Finding, Unknown
from regard.examination.token_model import TokenModel, find_outputs

LEAST = 4  # tokens, of which all but the last are reordered
SAME = 1e-4  # of a context, below which a change is rounding
PLACES = "Give each token its position: positions = torch.arange(t), for an embedding, for angles or for a bias."


def check_positions(model: TokenModel, calls: Sequence[InnerCall]) -> Iterator[Finding | Unknown]:
    """Yield the result if no call sees the order of tokens, though the model holds positions that differ."""
    held = {name: one for name, one in position_tensors.find_position_tensors(model.module).items() if has_different_rows(one)}
    t = model.ids.shape[1]
    if not held or not calls or t < LEAST or any(one.has_positions for one in calls):
        return
    order = [*range(1, t - 1), 0, t - 1]
    first, other = (read_last_context(model, ids) for ids in (model.ids, model.ids[:, order]))
    if first is None or other is None or not is_same(first, other) or torch.equal(model.ids, model.ids[:, order]):
        return
    sentence = f"reordering tokens {evidence.format_numbers(list(range(t - 1)))} does not change the context of token {t - 1}"
    used = list_used_positions(model)
    if used:
        where = f"in {calls[0].name or 'the first layer'}, though {used[0]} is used: it acts the same on all tokens"
        yield Finding("wrong positions", f"{sentence} {where}", PLACES, 1.2, "positions")
    else:
        what = f"whether the order of tokens should matter: it does not, though there is {next(iter(held))}"
        yield Unknown(what, "a call in which the model uses it: lambda ids: model(ids, positions)")


def has_different_rows(positions: Tensor) -> bool:
    """Return whether the numbers of positions are not the same for all tokens, as zeros before training are."""
    return bool((positions != positions[:1]).any())


def read_last_context(model: TokenModel, ids: Tensor) -> Tensor | None:
    """Return the context (b, h, e) of the last token in the first attention call; None if it cannot be computed."""
    try:
        calls = record_inner_calls(model.module, partial(model.run, ids)).calls
    except SubjectError:
        return None
    call = calls[0].call if calls else None
    if call is None or call.v is None or call.q.shape[2] != ids.shape[1] or call.k.shape[2] != ids.shape[1]:
        return None
    weights = call.build_map(call.k).dense()[:, :, -1:].double()
    values = call.v.double().repeat_interleave(weights.shape[1] // call.v.shape[1], 1)
    return (weights @ values).squeeze(2)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two contexts are equal up to rounding."""
    return bool((one - other).abs().max() <= SAME * one.abs().max())


def list_used_positions(model: TokenModel) -> list[str]:
    """Return the names of the positions that the outputs depend on by a differentiable path; empty if that is not known."""
    if model.call is not model.module:
        return []
    try:
        module = position_tensors.require_position_gradients(copy.deepcopy(model.module))
        with torch.enable_grad():
            outputs = find_outputs(module(model.ids.clone()), model.ids)
            return [] if outputs is None else position_tensors.find_used_positions(module, outputs)
    except Exception:  # a user's model may raise anything, or not be copied
        return []

"""Check that the order of tokens matters in a model that holds positions, by the context of its first attention call."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.examination import evidence
from regard.examination.call_reading.inner_calls import CallCollector, InnerCall, record_inner_calls
from regard.examination.probes import order
from regard.examination.report import Finding, Unknown
from regard.examination.subject.adapters import SubjectError
from regard.examination.subject.token_model import TokenModel, record_lookups
from regard.observe import interception
from regard.observe.interception.attention_call import AttentionCall, CallAdapter

LEAST = 4  # tokens, of which all but the last are reordered
SAME = 1e-4  # of a context, below which a change is rounding
PLACES = "Give each token its position: positions = torch.arange(t), for an embedding, for angles or for a bias."


def check_positions(model: TokenModel, calls: Sequence[InnerCall]) -> Iterator[Finding | Unknown]:
    """Yield the result if no call sees the order of tokens, though the model holds positions that differ."""
    held = {name: one for name, one in order.find_position_tensors(model.module).items() if bool((one != one[:1]).any())}
    t = model.ids.shape[1]
    if not held or not calls or t < LEAST or any(one.has_positions for one in calls):
        return
    reordered = reorder_tokens(model.ids)
    first, other = (read_last_context(model, ids) for ids in (model.ids, reordered))
    if first is None or other is None or not is_same(first, other) or torch.equal(model.ids, reordered):
        return
    sentence = f"reordering tokens {evidence.format_numbers(list(range(t - 1)))} does not change the context of token {t - 1}"
    used = list_constant_positions(model, held)
    by_ids = None if used else find_table_of_ids(model, held)
    if by_ids is not None:
        where = f"in {calls[0].name or 'the first layer'}: {by_ids} is looked up with token ids, not with their places"
        yield Finding("wrong positions", f"{sentence} {where}", PLACES, 1.2, "positions")
    elif used:
        where = f"in {calls[0].name or 'the first layer'}, though {used[0]} is used: it acts the same on all tokens"
        yield Finding("wrong positions", f"{sentence} {where}", PLACES, 1.2, "positions")
    else:
        what = f"whether the order of tokens should matter: it does not, though there is {next(iter(held))}"
        yield Unknown(what, "a call in which the model uses it: lambda ids: model(ids, positions)")


def reorder_tokens(ids: Tensor) -> Tensor:
    """Return ids (b, t) whose first token is moved before the last."""
    t = ids.shape[1]
    return ids[:, [*range(1, t - 1), 0, t - 1]]


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


def list_constant_positions(model: TokenModel, held: Iterable[str]) -> list[str]:
    """Return those of the held positions that the first attention call uses, the same for all tokens; empty if not known.

    Of a table, all tokens have the gradient of one row. Frequencies have none at position 0, but none either behind a gate
    of 0, so they count if random gates do not change the result.
    """
    if model.call is not model.module:
        return []
    try:
        module = order.require_position_gradients(copy.deepcopy(model.module))
        found = order.find_position_tensors(module)
        tensors = {name: found[name] for name in held if found[name].requires_grad}
        parts = [x for x in read_first_parts(module, model.ids) if x.requires_grad]
        if not parts or not tensors:
            return []
        slopes = torch.autograd.grad([x.sum() for x in parts], list(tensors.values()), allow_unused=True)
        used = {name: slope for name, slope in zip(tensors, slopes, strict=True) if slope is not None}
        tables = [name for name, slope in used.items() if slope.dim() > 1 and int(slope.flatten(1).any(1).sum()) == 1]
        frequencies = [name for name, slope in used.items() if slope.dim() == 1 and not slope.any()]
        return tables or (frequencies if frequencies and not has_gated_order(model) else [])
    except Exception:  # a user's model may raise anything, or not be copied
        return []


def find_table_of_ids(model: TokenModel, held: Iterable[str]) -> str | None:
    """Return a table of positions that is looked up with the token ids themselves; None if there is none."""
    for name in held:
        part = model.module.get_submodule(name.rpartition(".")[0])
        if isinstance(part, nn.Embedding):
            with record_lookups(nn.ModuleList([part]), model.ids) as found, contextlib.suppress(SubjectError):
                model.run()
            if found:
                return name
    return None


def has_gated_order(model: TokenModel) -> bool:
    """Return whether the order of tokens matters once positions and parameters that are zero are random numbers."""
    module = order.randomize_positions(copy.deepcopy(model.module))
    random = replace(model, call=module, module=module)
    first, other = (read_last_context(random, ids) for ids in (model.ids, reorder_tokens(model.ids)))
    return first is None or other is None or not is_same(first, other)


class FirstCallWatcher(CallCollector):
    """A watcher that keeps the queries, keys and values of the first attention call, with their graph."""

    needs_graph = True

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__(modules)
        self.parts: list[Tensor] = []

    def handle_call(self, call: AttentionCall, adapter: CallAdapter, name: str, proceed: Callable[..., Any]) -> Any:
        """Run a call unchanged, and keep what the first is made of."""
        self.parts = self.parts or [x for x in (call.q, call.k, call.v) if x is not None]
        return proceed(call, adapter)


def read_first_parts(module: nn.Module, ids: Tensor) -> list[Tensor]:
    """Return the queries, keys and values of the first attention call that a module makes, with their graph."""
    modules = dict(module.named_modules())
    watcher = FirstCallWatcher(modules)
    with interception.watch_modules(watcher, modules), torch.enable_grad():
        module(ids.clone())
    return watcher.parts

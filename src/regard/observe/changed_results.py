"""The results of changed calls: their contexts, and the weights that the caller asked for."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard.observe.attention_changes import Change, compute_context, compute_weights
from regard.observe.interception.attention_call import AttentionCall, CallAdapter


def change_run(adapter: CallAdapter, changed: AttentionCall, compute: Callable[[], Tensor | None]) -> CallAdapter:
    """Return how a changed call runs: with a computed context in place of the kernel's own, and weights if they are asked for.

    `compute` returns the context (b, h, q, e), or None to compute it by `attention`.
    """
    run = partial(run_changed, adapter, changed, compute)
    if adapter.replace_weights is None or adapter.read_weights is None:
        return replace(adapter, run=run, read_weights=None)
    return replace(adapter, run=partial(return_weights, run, adapter, changed))


def run_changed(adapter: CallAdapter, changed: AttentionCall, compute: Callable[[], Tensor | None]) -> Any:
    """Run a kernel and return its result with a computed context in place of its own, of which the same weights are dropped."""
    assert adapter.result is not None
    with keep_random_state(changed):
        result = adapter.run()
    context = compute()
    return adapter.result(compute_context(changed) if context is None else context, result)


def return_weights(run: Callable[[], Any], adapter: CallAdapter, changed: AttentionCall) -> Any:
    """Run a changed call and return its result with the changed weights, of which those are dropped that its context lacks."""
    assert adapter.read_weights is not None
    assert adapter.replace_weights is not None
    weights = compute_weights(changed)
    with keep_random_state(changed):
        factors = functional.dropout(torch.ones_like(weights, dtype=changed.q.dtype), changed.dropout)
    result = run()
    own = adapter.read_weights(result)
    return result if own is None else adapter.replace_weights(result, weights.to(own.dtype) * factors.to(own.dtype))


def keep_random_state(call: AttentionCall) -> AbstractContextManager[None]:
    """Return a context after which the random numbers go on as before it, if the call drops weights."""
    return torch.random.fork_rng([call.q.device] if call.q.is_cuda else [], enabled=bool(call.dropout))


def change_returned_weights(
    result: Any, adapter: CallAdapter, changes: Sequence[Change], call: AttentionCall, name: str, number: int
) -> Any:
    """Return a result with the weights that the caller asked for as the changes make them, after the call has run."""
    if adapter.replace_weights is None or adapter.read_weights is None:
        return result
    own = adapter.read_weights(result)
    if not isinstance(own, Tensor):  # none, or the map of a recording in the block
        return result
    weights = own
    for change in changes:
        weights = change.change_weights(weights, call, name, number)
    return result if weights is own else adapter.replace_weights(result, weights)

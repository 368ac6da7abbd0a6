"""Changes of recurrences: which tokens they are about, and which an intervention cannot make, and why."""

from dataclasses import replace
from functools import partial

import torch

from regard.map.convolution import Convolution
from regard.observe.attention_changes import Change, KnockOut
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.recurrent.cut_entries import subtract_entries
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall
from regard.observe.patch import Patch
from regard.observe.recorded_runs.run_tracker import RunTracker
from regard.observe.stored_calls.tensor_store import Store

CONTINUED = (
    "it continues a state that no call in this block has left, so that only KnockOut without a source changes it: enter "
    "intervene before the prompt"
)
NO_SCORES = "it has no scores that a temperature divides"
OTHER_OUTPUT = "its output is not its weights times the values alone: it has a bias or a gate"


def needs_positions(change: Change) -> bool:
    """Return whether a change needs to know where in the sequence the tokens of a call stand."""
    return not (isinstance(change, KnockOut) and change.source is None)


def follow_tokens(
    tracker: RunTracker, call: RecurrenceCall, plain: AttentionCall, adapter: CallAdapter, name: str
) -> tuple[AttentionCall, CallAdapter]:
    """Return a plain call of a recurrence with all tokens so far as its keys, and how their entries are cut.

    Gradients flow to the tokens of earlier calls if the state that it continues has one.

    Raises UnreadableError if it continues a state that no call which the tracker followed has left.
    """
    recorded, found = tracker.append_recurrence(call, name, Store())
    *earlier, last = recorded.history.stored_calls
    if call.initial_state is None or not call.initial_state.requires_grad:
        for stored in earlier:
            stored.detach()
    if torch.is_grad_enabled():
        last.keep_gradients(found)
    if adapter.cut_entries is not None:  # a block inside this one followed the same tokens
        return plain, adapter
    (b, h, n, _), history = plain.q.shape, recorded.history
    keys = plain.k[:, :, :1].expand(b, h, history.total, 1)
    values = history.join_values()
    plain = replace(plain, k=keys, v=values, past=history.total - n)
    return plain, replace(adapter, plain_call=plain, cut_entries=partial(subtract_entries, recorded.map, values, found.gates))


def explain_impossible(change: Change, call: RecurrenceCall, plain: AttentionCall, changed: AttentionCall) -> str:
    """Return why a change that makes a plain call a changed one cannot be made of a recurrence; "" if it can."""
    if changed is not plain and changed.q is not plain.q:
        return NO_SCORES
    if isinstance(change, Patch) or (isinstance(change, KnockOut) and change.source is not None):
        found = call.read()
        if found.gates is not None or (isinstance(found.mechanism, Convolution) and found.mechanism.bias is not None):
            return OTHER_OUTPUT
    return ""

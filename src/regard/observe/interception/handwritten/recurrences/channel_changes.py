"""The states of a loop over vectors, which interventions change in the tensor that joins them."""

from functools import partial

import torch
from torch import Tensor

from regard.map.implicit_map import ImplicitMap
from regard.observe.interception.attention_call import CallAdapter, adapt_entries, build_plain_call
from regard.observe.interception.call_dispatch import change_recurrence, explain_error, report_unchangeable
from regard.observe.interception.handwritten.recurrences.channel_recurrence import read_loop_factors
from regard.observe.interception.handwritten.recurrences.channel_states import JoinedChannels
from regard.observe.interception.handwritten.recurrences.loop_recurrence import KERNEL
from regard.observe.interception.plain_tensors import UnreadableError, disable_modes
from regard.observe.interception.recurrent.cut_entries import subtract_entries
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, build_read_call

NO_GRADIENTS = "it is a loop over vectors, which is changed without gradients alone, and stays unchanged: use torch.no_grad()"
SHARED = "several batch rows or channels share the states of its loop, which stay unchanged"


def change_channels(found: JoinedChannels, y: Tensor) -> Tensor:
    """Return what interventions make of y, the joined states of a loop over vectors."""
    try:
        with disable_modes():
            call, adapter = read_channels(found, y)
    except Exception as error:  # must not stop the model
        report_unchangeable(KERNEL.format(found.loop.function), explain_error(error))
        return y
    new: Tensor = change_recurrence(call, adapter)[1].run()
    return new


def read_channels(found: JoinedChannels, y: Tensor) -> tuple[RecurrenceCall, CallAdapter]:
    """Return the call whose states y joins, and how y converts to its output (b, h, t, e) and back.

    Raises UnreadableError if the loop cannot be read, where gradients are computed, and if it has fewer states than y entries.
    """
    if torch.is_grad_enabled() and y.requires_grad:
        raise UnreadableError(NO_GRADIENTS)
    factors = read_loop_factors(found.loop)
    call = build_read_call(KERNEL.format(found.loop.function), factors)
    numbers = found.places
    if factors.outputs.shape[3] == numbers.shape[-2]:  # the channels are the width of the values
        numbers = (numbers.flatten(1, -3) if numbers.dim() > 3 else numbers.unsqueeze(1)).transpose(2, 3)
    else:
        numbers = numbers.flatten(1, -2).unsqueeze(3)
    if numbers.shape != factors.outputs.shape:
        raise UnreadableError(SHARED)
    adapter = adapt_entries(y, numbers.flatten().argsort().view(y.shape), numbers.shape)
    adapter.plain_call = build_plain_call(factors.outputs, factors.values, kernel=call.kernel, can_use_cache=False)
    adapter.cut_entries = partial(subtract_entries, ImplicitMap(factors.mechanism), factors.values, None)
    return call, adapter

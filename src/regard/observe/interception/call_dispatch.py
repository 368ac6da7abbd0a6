"""Dispatch of an attention call to the watchers of the running modules, and reports of what could not be read."""

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from regard.observe.interception.attention_call import AttentionCall, CallAdapter, MissedCall
from regard.observe.interception.plain_tensors import UnreadableError, disable_modes
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall
from regard.observe.interception.thread_state import (
    STATE,
    InterceptionPause,
    Watcher,
    find_name,
    is_inside_watched,
    list_owners,
)

MOST_CHARACTERS = 120  # of the error of another library


def dispatch_call(
    kernel: str, run: Callable[[], Any], read_call: Callable[[], tuple[AttentionCall | RecurrenceCall, CallAdapter]]
) -> Any:
    """Dispatch a call of a kernel to its watchers and return what the caller gets.

    If the arguments cannot be read, the kernel runs as it was called and is reported as missed.
    """
    if not STATE.is_active or not is_inside_watched(kernel):
        return run()
    try:
        with disable_modes():
            call, adapter = read_call()
    except Exception as error:  # an unreadable call must not stop the model
        result = run()
        report_missed(kernel, explain_error(error))
        return result
    with InterceptionPause():
        if isinstance(call, AttentionCall):
            result = call_next(STATE.watchers.copy(), call, adapter)
            if STATE.mode is not None and STATE.mode.positions.stored:
                STATE.mode.follow_positions(STATE.mode.positions.follow_call, call, adapter, result)
            return result
        call, adapter = change_recurrence(call, adapter)
        result = adapter.run()
        dispatch_recurrence(call)
        return result


def change_recurrence(call: RecurrenceCall, adapter: CallAdapter) -> tuple[RecurrenceCall, CallAdapter]:
    """Return a call without a softmax, and how it runs, with the changes of every intervention, the last first."""
    for watcher in reversed(STATE.watchers):
        name = find_name(watcher) if watcher.can_change_calls else None
        if name is not None:
            call, adapter = watcher.change_recurrence(call, adapter, name)
    read, write = adapter.context, adapter.result
    if not adapter.context_changes or read is None or write is None:
        return call, adapter
    result = adapter.run()
    context = read(result)
    for change in reversed(adapter.context_changes):
        context = change(context)
    return call, replace(adapter, run=lambda: write(context, result), context_changes=())


def dispatch_recurrence(call: RecurrenceCall) -> None:
    """Pass a call without a softmax to every watcher of a running module, the last first."""
    for watcher, name in reversed(list_owners()):
        watcher.handle_recurrence(call, name)


def call_next(watchers: list[Watcher], call: AttentionCall, adapter: CallAdapter) -> Any:
    """Pass a call to the watchers of the module that made it, the last first, and return what the caller gets.

    Each watcher calls the next one; after the last of them the call runs as the adapter defines.
    """
    while watchers:
        watcher = watchers.pop()
        name = find_name(watcher, call.module)
        if name is not None:
            return watcher.handle_call(call, adapter, name, partial(call_next, watchers))
    return adapter.run()


def explain_error(error: Exception) -> str:
    """Return the reason why a call could not be read; of an error of another library the beginning of its first line."""
    if isinstance(error, UnreadableError):
        return str(error)
    said = f"{type(error).__name__}: {error}".split("\n")[0]
    return f"its arguments could not be read ({textwrap.shorten(said, MOST_CHARACTERS, placeholder=' ...')})"


def report_missed(kernel: str, reason: str, watchers: Iterable[Watcher] | None = None, module: nn.Module | None = None) -> None:
    """Report a call that could not be read to every watcher of a module or a running one, or to those of some watchers."""
    for watcher, name in list_owners(watchers, module):
        watcher.report_missed(MissedCall(kernel, name, reason))

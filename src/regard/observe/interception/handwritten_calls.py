"""Interception of attention written out by hand, once the product that completes it has been computed."""

from contextlib import suppress
from functools import partial

from torch import Tensor

from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import (
    dispatch_call,
    explain_error,
    report_missed,
)
from regard.observe.interception.handwritten.detection import HandwrittenTracker
from regard.observe.interception.handwritten.handwritten_call import HandwrittenCall
from regard.observe.interception.handwritten.handwritten_call import read_call as read_handwritten_call
from regard.observe.interception.handwritten.scores.weight_steps import WeightSteps
from regard.observe.interception.handwritten.softmax.key_blocks import KeyBlock
from regard.observe.interception.handwritten.softmax.undivided_contexts import UndividedContexts
from regard.observe.interception.plain_tensors import disable_modes
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall
from regard.observe.interception.thread_state import STATE, list_owners


class HandwrittenCalls:
    """Dispatches the calls that the operations of a torch function mode amount to, as wrappers of functions do."""

    tracker: HandwrittenTracker
    undivided: UndividedContexts
    weight_steps: WeightSteps

    def intercept_handwritten(self, call: HandwrittenCall, result: Tensor) -> Tensor:
        """Intercept attention that is written out by hand, whose last product has just been computed."""
        if call.may_be_block:
            return self.intercept_block(call, result)
        kernel, undivided = f"by hand: {call.steps}", []
        postponed: list[AttentionCall | RecurrenceCall] = []

        def read_call() -> tuple[AttentionCall | RecurrenceCall, CallAdapter]:
            found, adapter = read_handwritten_call(call, self.tracker.table, result)
            layer = STATE.frames[-1].layer
            if adapter.block is not None:
                adapter.postpone = partial(self.postpone_block, adapter.block)
                postponed.append(found)
                return found, adapter
            if layer is not None:
                layer.add_call(STATE.frames[-1], call.trace, found, adapter, result, (self.tracker, self.tracker.used))
            if isinstance(found, AttentionCall) and adapter.divisor is not None:
                undivided.append((found, adapter.divisor))
            elif isinstance(found, RecurrenceCall) and adapter.places is not None:
                adapter.postpone = partial(self.postpone_call, adapter.places, call.trace.roots)
                postponed.append(found)
            return found, adapter

        context: Tensor = dispatch_call(kernel, lambda: result, read_call)
        owners = list_owners()
        for found, divisor in undivided:
            self.undivided.add(context, found, divisor, owners)
        if call.trace.extent:
            self.tracker.merged_blocks.calls.append((call.trace.roots, owners))
            if not call.trace.pairs:
                self.tracker.add_summary(context, owners, call.product, call.place)
        if not postponed:
            self.tracker.used.add_call(call.trace.roots, owners, STATE.frames)
        self.weight_steps.forget(call.tensor)
        return context

    def intercept_block(self, call: HandwrittenCall, result: Tensor) -> Tensor:
        """Intercept exponentials that are multiplied with values entry by entry, if they are of one key of a loop."""
        with disable_modes(), suppress(Exception):  # of products that are no such block, and may be summed later
            found, adapter = read_handwritten_call(call, self.tracker.table, result)
            if adapter.block is not None:
                adapter.postpone = partial(self.postpone_block, adapter.block)
                dispatch_call(f"by hand: {call.steps}", lambda: result, lambda: (found, adapter))
        return result

    def postpone_block(self, block: KeyBlock, call: AttentionCall, result: Tensor) -> None:
        """Keep a block of keys until its module ends. A failure must not stop the model: the block is then missed."""
        try:
            with disable_modes():
                self.tracker.blocks.add(STATE.frames[-1], block, result)
        except Exception as error:
            report_missed(call.kernel, explain_error(error))

    def postpone_call(self, places: Tensor, roots: int, call: RecurrenceCall, result: Tensor) -> None:
        """Keep a call of activated scores, whose result may be divided, until its module ends. A failure is reported."""
        try:
            with disable_modes():
                self.tracker.linear.add_activated_call(STATE.frames, call, places, result, roots)
        except Exception as error:  # must not stop the model
            report_missed(call.kernel, explain_error(error))

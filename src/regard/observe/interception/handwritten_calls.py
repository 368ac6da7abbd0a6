"""Interception of attention written out by hand, once the product that completes it has been computed."""

from torch import Tensor

from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import dispatch_call
from regard.observe.interception.handwritten.detection import HandwrittenTracker
from regard.observe.interception.handwritten.handwritten_call import HandwrittenCall
from regard.observe.interception.handwritten.handwritten_call import read_call as read_handwritten_call
from regard.observe.interception.handwritten.scores.weight_steps import WeightSteps
from regard.observe.interception.handwritten.softmax.undivided_contexts import UndividedContexts
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall
from regard.observe.interception.thread_state import STATE, list_owners


class HandwrittenCalls:
    """Dispatches the calls that the operations of a torch function mode amount to, as wrappers of functions do."""

    tracker: HandwrittenTracker
    undivided: UndividedContexts
    weight_steps: WeightSteps

    def intercept_handwritten(self, call: HandwrittenCall, result: Tensor) -> Tensor:
        """Intercept attention that is written out by hand, whose last product has just been computed."""
        if not call.tensor.numel():
            for watcher, name in list_owners():
                watcher.handle_empty_call(name)
            return result
        kernel, undivided = f"by hand: {call.steps}", []

        def read_call() -> tuple[AttentionCall | RecurrenceCall, CallAdapter]:
            found, adapter = read_handwritten_call(call, self.tracker.table, result)
            if isinstance(found, AttentionCall) and adapter.divisor is not None:
                undivided.append((found, adapter.divisor))
            return found, adapter

        context: Tensor = dispatch_call(kernel, lambda: result, read_call)
        owners = list_owners()
        for found, divisor in undivided:
            self.undivided.add(context, found, divisor, owners)
        self.tracker.used.add_call(call.trace.roots, owners, STATE.frames)
        self.weight_steps.forget(call.tensor)
        return context

    def report_undivided(self) -> None:
        """Report each call whose context was not divided by the sums of its weights, as its map is."""
        for call, note, owners in self.undivided.list_notes():
            for watcher, name in owners:
                watcher.handle_division(call, note, name)
        self.undivided.clear()

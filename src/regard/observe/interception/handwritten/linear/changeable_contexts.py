"""The outputs of linear attention that interventions change: at the product, and anew wherever their rows are multiplied.

Beside a changed output stands what it is without the intervention. What a layer divides its rows by is applied to that, and the
result is changed, so that heads are replaced by what they are after the division, and sums of weights are those that are left.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from regard.map.stored_matrix import StoredMatrix
from regard.observe.interception.call_dispatch import change_recurrence, report_missed
from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.linear.linear_call import LinearCall
from regard.observe.interception.handwritten.linear.linear_contexts import LinearContexts
from regard.observe.interception.handwritten.linear.linear_outputs import SUMS, PlacedEntries
from regard.observe.interception.handwritten.linear.running_chunks import UNCHANGED
from regard.observe.interception.handwritten.linear.unnormalized_call import ActivatedCall
from regard.observe.interception.handwritten.products.score_form import (
    COPIES,
    FUSED,
    PERMUTES,
    PRODUCTS,
    QUOTIENTS,
    SLICES,
    VIEWS,
)
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.provenance import ModuleFrame, is_in_place
from regard.observe.interception.thread_state import STATE

BOUNDS = {"clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "max", "min", "where", "abs", "relu", "threshold"}
DIVISIONS = QUOTIENTS | {"reciprocal", "rsqrt"}
TOTALS = {"sum", "mean", "cumsum", "einsum", "matmul", "mm", "bmm", "baddbmm", "mv"}
MOST_MAKERS = 8  # of a divisor, from the sums to it


class ChangeableContexts(LinearContexts):
    """The linear attention of the modules that run, with what interventions make of it."""

    def __init__(self, table: AxisTable) -> None:
        super().__init__(table)
        self.divided: PlacedEntries | None = None  # what the function that ran last made of a changed output, of all rows

    def clear(self) -> None:
        """Forget all calls."""
        super().clear()
        self.divided = None

    def change_output(self, y: Tensor) -> Tensor:
        """Return what an intervention makes of y, the output of the call that was added last, and follow it in place of y."""
        last = self.found[-1]
        context = self.contexts.get(y)
        if not isinstance(last.call, LinearCall) or context is None or context.call is not last.call:
            return y
        if last.chunk is not None:
            report_missed(last.kernel, UNCHANGED, [one for one in STATE.watchers if one.can_change_calls])
            return y
        with suppress(UnreadableError):  # the call stays as it is, which is reported when its module ends
            new: Tensor = change_recurrence(last.call.read(), last.call.adapt(y, context.places))[1].run()
            if new is not y:
                self.contexts[new] = context._replace(unchanged=y)
                self.found[-1] = last._replace(output=weakref.ref(new))
            return new
        return y

    def change_divided(self, y: Tensor) -> Tensor:
        """Return what interventions make of a changed output whose rows were multiplied to y: of the unchanged one, anew."""
        context, self.divided = self.divided, None
        assert context is not None
        new: Tensor
        call, unchanged = context.call, context.unchanged
        if context.by is not None:
            assert isinstance(call, ActivatedCall)
            new = y * context.by.flatten()[context.places // call.v.shape[3]].to(y.dtype)
            call.divide_again(context.by)
            self.contexts[new] = context._replace(by=None)
            return new
        assert isinstance(call, LinearCall)
        assert unchanged is not None
        try:
            new = change_recurrence(call.read(), call.adapt(unchanged, context.places))[1].run()
        except UnreadableError:  # must not stop the model, which goes on with the changed output, multiplied
            call.keeps_scale = True
            return y
        self.contexts[new] = context
        return new

    def follow_context(
        self, func: Callable[..., Any], name: str, core: str, args: Any, kwargs: Any, place: int, result: Any
    ) -> None:
        """Follow an output through a function, beside what it is without interventions if these have changed it."""
        context = self.contexts[args[place]]
        if context.unchanged is not None:
            self.follow_changed(func, name, core, args, kwargs, place, result)
            return
        before = context.call.row_scale
        super().follow_context(func, name, core, args, kwargs, place, result)
        is_multiplied = context.call.row_scale is not before and not is_in_place(name)
        if isinstance(context.call, ActivatedCall) and is_multiplied and core in PRODUCTS | QUOTIENTS:
            self.follow_sums(context, context.call, args[1 - place], result)

    def follow_sums(self, context: PlacedEntries, call: ActivatedCall, divisor: Any, result: Tensor) -> None:
        """Follow rows of changed weights that a layer has divided by the sums of the unchanged ones, plus a number or not."""
        sums, scale = call.call.sums, call.row_scale
        if sums is None or bool((scale == scale.flatten()[0]).all()) or call.follows_sums:
            return
        before, after = (x.to(scale.dtype) for x in sums)
        left = after + (1 / scale - before).detach()
        assert isinstance(call.factors.mechanism, StoredMatrix)
        makers = {*name_makers(STATE.frames, divisor)} if isinstance(divisor, Tensor) else set[str]()
        if not makers.isdisjoint(BOUNDS) and bool((left < (1 / scale).amin()).any()):
            return  # a bound may apply now
        is_blind = ~call.factors.mechanism.entries.any(-1)
        by = 1 / (scale * left.masked_fill(is_blind, 1))
        self.divided = context._replace(by=by.masked_fill(is_blind | (before == after), 1))

    def follow_changed(
        self, func: Callable[..., Any], name: str, core: str, args: Any, kwargs: Any, place: int, result: Any
    ) -> None:
        """Follow what an intervention has changed, beside what it is without that.

        Where all rows are multiplied by factors, it is changed anew. What is made of the output, as a norm of it, is no factor.
        """
        context = self.contexts[args[place]]
        if core in COPIES | VIEWS | PERMUTES | SLICES and place == 0:
            parts = context.places if core in COPIES else func(context.places, *args[1:], **kwargs)
            unchanged = func(context.unchanged, *args[1:], **kwargs)
            every = [(result, parts, unchanged)] if isinstance(result, Tensor) else zip(result, parts, unchanged, strict=True)
            for y, places, own in every:
                self.contexts[y] = context._replace(places=places, unchanged=own)
            return
        if core in SUMS - FUSED and isinstance(result, Tensor):
            self.follow_addition(context, core, args, place, result)
            if is_in_place(name) and not place:
                del self.contexts[result]
            return
        is_quotient = core in QUOTIENTS
        if core not in PRODUCTS | QUOTIENTS or len(args) != 2 or (is_quotient and (place or kwargs)) or is_in_place(name):
            if (core in FUSED | {"einsum"} or is_in_place(name)) and isinstance(context.call, LinearCall):
                context.call.keeps_scale = True
            if is_in_place(name):
                del self.contexts[args[place]]
            return
        other = args[1 - place]
        known = self.contexts.get(other) if isinstance(other, Tensor) else None
        factor = other if known is None or known.unchanged is None else known.unchanged
        outputs = [*map(id, filter(None, (one.output for one in self.found if one.call is context.call)))]
        if factor is other and isinstance(other, Tensor) and not self.list_ancestors(STATE.frames, [other]).isdisjoint(outputs):
            return
        assert context.unchanged is not None
        unchanged = func(*([context.unchanged, factor] if not place else [factor, context.unchanged]), **kwargs)
        by = torch.as_tensor(factor, device=result.device).to(context.call.row_scale.dtype)
        by = by.reciprocal() if is_quotient else by
        if self.divide_rows(context, unchanged, by, other, is_quotient):
            self.divided = self.contexts[result] = context._replace(unchanged=unchanged)

    def divide_rows(self, context: PlacedEntries, y: Tensor, by: Tensor, made: Any, is_quotient: bool) -> bool:
        """Multiply the rows of a call as `multiply_rows` does; note whether what made the factors divides by their sums."""
        call = context.call
        if not isinstance(call, LinearCall) or not any(watcher.can_change_calls for watcher in STATE.watchers):
            return self.multiply_rows(context, y, by)
        before, call.row_scale = call.row_scale, torch.ones_like(call.row_scale)
        is_factor = self.multiply_rows(context, y, by)
        factor, call.row_scale = call.row_scale, before
        if is_factor:
            makers = {*name_makers(STATE.frames, made)} if isinstance(made, Tensor) else set[str]()
            call.divide_rows(factor, is_quotient or not makers.isdisjoint(DIVISIONS), not makers.isdisjoint(BOUNDS))
            call.row_scale = before * factor
        return is_factor


def name_makers(frames: list[ModuleFrame], x: Tensor) -> list[str]:
    """Return the names of the functions, the last first, by which a module has made a tensor of a sum."""
    found, one = list[str](), weakref.ref(x)
    for _ in range(MOST_MAKERS):
        makers = frames[-1].find_makers(one)
        if not makers or not makers[-1].given or strip_affixes(makers[-1].name) in TOTALS:
            break
        found.append(strip_affixes(makers[-1].name))
        one = makers[-1].given[0]
    return found

"""What was found in a layer by the numbers of its tensors: its call of attention, and what is followed of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import dispatch_call
from regard.observe.interception.forward_cache import have_same_bits
from regard.observe.interception.handwritten.products.score_form import ScoreForm
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.handwritten.scores.row_comparison import RowLayout, build_row_layout, compare_rows, sample_rows
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.repeated.step_description import StepDescription

MOST_FORMS = 4  # of layers of the same class and shapes


class View(NamedTuple):
    """A view of one of the tensors of a layer."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from that of the tensor

    def read(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the view of the tensor with this number; the tensor itself, where it is that."""
        x = tensors[self.number]
        assert x is not None
        if not self.offset and x.shape == self.shape and x.stride() == self.stride:
            return x
        return x.detach().as_strided(self.shape, self.stride, x.storage_offset() + self.offset)


def find_view(x: Tensor, tensors: Sequence[Tensor | None]) -> View | None:
    """Return which view of one of the tensors x is, of itself if it is one of them; None if it has a memory of its own."""
    memory, found = x.untyped_storage().data_ptr(), None
    for number, one in enumerate(tensors if memory else ()):
        if one is x:
            return View(number, tuple(x.shape), x.stride(), 0)
        if found is None and one is not None and one.dtype == x.dtype and one.untyped_storage().data_ptr() == memory:
            found = View(number, tuple(x.shape), x.stride(), int(x.storage_offset() - one.storage_offset()))
    return found


class FormViews(NamedTuple):
    """Where the tensors of a form of scores are: its operands, and those of its steps, None for one that is no tensor."""

    a: View
    b: View
    steps: tuple[View | None, ...]

    def fill(self, form: ScoreForm, tensors: Sequence[Tensor | None]) -> ScoreForm:
        """Return the form with the tensors of a layer."""
        steps = (
            step if view is None else step._replace(operand=view.read(tensors))
            for step, view in zip(form.steps, self.steps, strict=True)
        )
        return form._replace(a=self.a.read(tensors), b=self.b.read(tensors), steps=tuple(steps))

    def list_numbers(self) -> list[int]:
        """Return the numbers of the tensors that these are views of."""
        return [view.number for view in (self.a, self.b, *self.steps) if view is not None]


@dataclass(eq=False)
class CallForm:
    """A call of attention by the numbers of a layer's tensors: its arguments, and where its tensors are."""

    call: AttentionCall  # with the first layer's mask and bias
    views: tuple[View, ...]  # of queries, keys, values, weights and context
    result: int
    masks: tuple[tuple[View, Tensor], ...]  # the operands of its scores' steps, with their bits
    given: tuple[int, int] | None  # what was multiplied, where the modules around show whether it is cross attention
    roots: int
    eps: float
    compares_all: bool  # whether every row of the weights is compared, not a sample
    layout: RowLayout | None = None  # of the sampled rows, for a compiled loop, once there is one

    def dispatch(self, tensors: Sequence[Tensor], find_sources: Callable[[Tensor, Tensor], bool | None]) -> bool:
        """Dispatch the call of a layer with these tensors; return whether its masks and its weights allow it.

        find_sources returns whether two of them were made from different tensors, if that was observed.
        """
        if not all(have_same_bits(view.read(tensors), bits) for view, bits in self.masks):
            return False
        q, k, v, weights = (view.read(tensors).detach() for view in self.views[:4])
        call, result = self.call.copy_with(q, k, v), tensors[self.result]
        if not self.gives_weights(call, weights):
            return False
        if self.given is not None:
            one, other = self.given
            call.has_separate_sources = find_sources(tensors[one], tensors[other])
        context = self.views[4].read(tensors).detach()  # so that what keeps the adapter does not keep the other tensors
        adapter = CallAdapter(lambda: result, lambda _: context)
        dispatch_call(call.kernel, lambda: result, lambda: (call, adapter))
        return True

    def gives_weights(self, call: AttentionCall, weights: Tensor) -> bool:
        """Return whether the weights of a call in this form are the model's own, in a sample of the rows or in all."""
        if self.layout is None and not self.compares_all:
            self.layout = build_row_layout(call, weights, sample_rows(weights), self.eps)
        if self.layout is not None and self.layout.are_rows_near(call.q, call.k, weights):
            return True
        with torch.no_grad():
            return compare_rows(call, weights, self.eps, self.compares_all) is None


class FollowedTensor(NamedTuple):
    """A tensor of a layer that is followed: its number, its trace, and where the tensors of that are."""

    number: int
    is_used: bool  # as used weights
    trace: Trace
    views: FormViews

    def build_trace(self, roots: int, tensors: Sequence[Tensor | None]) -> Trace:
        """Return the trace in a layer with these tensors."""
        assert self.trace.form is not None
        return self.trace._replace(form=self.views.fill(self.trace.form, tensors), roots=roots)


class LayerForm(NamedTuple):
    """What was found in a layer: what ran in it, its call of attention, and what is followed of it."""

    description: StepDescription
    call: CallForm | None
    followed: tuple[FollowedTensor, ...]


def find_form(form: ScoreForm | None, tensors: Sequence[Tensor | None]) -> FormViews | None:
    """Return where the tensors of a form are; None if one of them is not among those of the layer."""
    if form is None or form.distances is not None:
        return None
    if any(step.source is not None or isinstance(step.operand, ScoreForm) for step in form.steps):
        return None
    a, b = (find_view(x, tensors) for x in (form.a, form.b))
    operands = [step.operand for step in form.steps]
    steps = [find_view(x, tensors) if isinstance(x, Tensor) else None for x in operands]
    is_known = all(view is not None or not isinstance(x, Tensor) for view, x in zip(steps, operands, strict=True))
    return FormViews(a, b, tuple(steps)) if a is not None and b is not None and is_known else None


def build_call_form(
    frame: ModuleFrame, tensors: Sequence[Tensor | None], trace: Trace, call: Any, adapter: CallAdapter, number: int | None
) -> CallForm | None:
    """Return a call by the numbers of its layer's tensors, with that of its result.

    None if it is no plain softmax of a product of these.
    """
    if not isinstance(call, AttentionCall) or call.v is None or trace.form is None or trace.undropped is not None:
        return None
    if call.rank_part is not None or call.mask_depends_on_scores or adapter.divisor is not None:
        return None
    form = find_form(trace.form, tensors)
    result = None if number is None else tensors[number]
    if form is None or result is None or number is None or adapter.weights is None or adapter.context is None:
        return None
    one, other = (frame.find_sources(x) for x in (trace.form.a, trace.form.b))
    given: tuple[int, int] | None = form.a.number, form.b.number
    if one is not None and other is not None and one.sources & other.sources:
        given = None
    elif tensors[form.a.number] is not trace.form.a or tensors[form.b.number] is not trace.form.b:
        return None
    views = [find_view(x, tensors) for x in (call.q, call.k, call.v, adapter.weights, adapter.context(result))]
    known = tuple(view for view in views if view is not None)
    if len(known) < len(views):
        return None
    operands = [step.operand for step in trace.form.steps if isinstance(step.operand, Tensor)]
    masks = zip((view for view in form.steps if view is not None), (x.detach().clone() for x in operands), strict=True)
    empty = call.q.new_empty(0)
    call = replace(call, q=empty, k=empty, v=empty, follows_cache=partial(bool, call.follows_cache()))
    return CallForm(call, known, number, tuple(masks), given, trace.roots, trace.eps, trace.may_differ_by_row)


def find_followed(number: int, is_used: bool, trace: Trace, tensors: Sequence[Tensor | None]) -> FollowedTensor | None:
    """Return a followed tensor of a layer; None if its trace has other tensors than those of its form, or others than these."""
    others = (trace.unmixed, trace.undropped, trace.factors, trace.moved, trace.activated, *trace.parts)
    views = None if any(one is not None for one in others) else find_form(trace.form, tensors)
    return None if views is None else FollowedTensor(number, is_used, trace, views)

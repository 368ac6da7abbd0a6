"""Layers that repeat an earlier one of the same forward: what was found in that holds in them, at the same places.

Most layers of a model run the same functions on tensors of the same shapes, and following them finds the same attention again.
The operations of a module are held until it ends. If they are those of an earlier layer, its queries, keys, values and weights
are at the same places among its tensors. Its masks must have the same bits, and rows of its weights are compared with the
formula, as in any layer. What differs in anything is followed then, in order. Only small layers are held, in which Python takes
the time.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.handwritten.handwritten_call import compare_rows
from regard.observe.interception.handwritten.score_form import ScoreForm
from regard.observe.interception.handwritten.traces import Trace, Traces
from regard.observe.interception.provenance import PLAIN, ModuleFrame, is_weight
from regard.observe.interception.thread_state import dispatch_call, have_same_bits

MOST_ENTRIES = 2**22  # of the results that are held until a module ends
MOST_STEPS = 256
MOST_FORMS = 4  # of layers of the same class and shapes
NUMBERS = (int, float, bool, complex)
NAMES = (str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.memory_format, torch.layout)


class LayerStep(NamedTuple):
    """A function or a child module that ran in a layer, with its arguments and its result."""

    run: Any
    args: Any
    kwargs: Any
    result: Any


class UnknownArgumentError(Exception):
    """An argument is of a type that is not compared."""


class LayerSteps:
    """What ran in a module so far, with its tensors by number, in the order in which the steps name them.

    Steps are deferred, not followed, as long as they are those of an earlier layer (`forms`): until the module ends, or until
    one of them differs.
    """

    def __init__(
        self, frame: ModuleFrame, key: Hashable, forms: "list[LayerForm]", effects: int, follow_step: Callable[[LayerStep], Any]
    ) -> None:
        self.key, self.forms, self.effects, self.follow_step = key, forms, effects, follow_step
        self.module, self.inputs, self.is_deferred = frame.module, frame.input_tensors, bool(forms)
        self.description: list[Hashable] = []
        self.tensors: list[weakref.ref[Tensor]] = []
        self.numbers: dict[int, int] = {}
        self.given: list[int] = []  # the numbers of tensors that the layer did not make
        self.deferred: list[LayerStep] = []
        self.calls: list[CallForm | None] = []  # that were followed, None for one that cannot be repeated
        self.followed: dict[tuple[int, bool], FollowedTensor | None] = {}  # by number, and whether it is used; None likewise
        self.size = 0

    def add(self, step: LayerStep) -> bool:
        """Add a step; return whether it could be, since its arguments can be compared and there is room.

        Steps that were deferred are followed if it differs from that of each earlier layer.
        """
        if self.is_deferred:
            self.deferred.append(step)
        try:
            description = self.describe_step(step)
        except Exception:  # of unusual tensors too, which must not stop the model
            return False
        if self.is_deferred:
            place = len(self.description)
            self.forms = [one for one in self.forms if one.description[place : place + 1] == (description,)]
        self.description.append(description)
        if self.is_deferred and not self.forms:
            self.follow()
        return self.size <= MOST_ENTRIES and len(self.description) <= MOST_STEPS

    def follow(self) -> None:
        """Follow what was deferred, in order."""
        steps, self.deferred, self.is_deferred = self.deferred, [], False
        for step in steps:
            self.follow_step(step)

    def describe_step(self, step: LayerStep) -> Hashable:
        """Return what a step is, with tensors by their numbers. Raises UnknownArgumentError for other types of arguments."""
        run, args, kwargs, result = step
        if isinstance(run, nn.Module):
            run = type(run), run.training, getattr(run, "p", None)
        given = tuple(map(self.describe, args)), self.describe(kwargs) if kwargs else None
        return (
            run,
            given,
            self.describe_result(result) if isinstance(result, Tensor) else tuple(map(self.describe_result, result)),
        )

    def describe(self, x: Any) -> Hashable:
        """Return an argument in a form that can be compared."""
        kind = type(x)
        if kind in PLAIN:
            number = self.find_number(x)
            return self.describe_given(x) if number is None else number
        if kind in NUMBERS:
            return kind, x
        if kind is slice:
            return slice, self.describe(x.start), self.describe(x.stop), self.describe(x.step)
        if isinstance(x, tuple | list):
            return kind, *map(self.describe, x)
        if kind is dict:
            return kind, *((key, self.describe(value)) for key, value in x.items())
        if isinstance(x, NAMES):
            name: Hashable = x
            return name
        raise UnknownArgumentError

    def describe_given(self, x: Tensor) -> Hashable:
        """Return what a tensor is that the layer was given or holds, which gets a number."""
        if x.layout is not torch.strided or x.is_nested:
            raise UnknownArgumentError
        place = next((n for n, one in enumerate(self.inputs) if one is x), -1)
        holds = isinstance(x, nn.Parameter), is_weight(self.module, x), place
        self.given.append(self.add_tensor(x))
        return holds, x.shape, x.stride(), x.dtype, x.device

    def describe_result(self, x: Any) -> Hashable:
        """Return the number of a result, a new one if it is not known, and what the arguments need not determine of it."""
        number = self.find_number(x)
        if number is None:
            if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested:
                raise UnknownArgumentError
            number = self.add_tensor(x)
            self.size += x.numel()
        return number, x.shape, x.dtype

    def find_number(self, x: Tensor) -> int | None:
        """Return the number of a tensor; None if it has none yet."""
        number = self.numbers.get(id(x))
        return number if number is not None and self.tensors[number]() is x else None

    def add_tensor(self, x: Tensor) -> int:
        """Return the number that a tensor gets."""
        self.numbers[id(x)] = number = len(self.tensors)
        self.tensors.append(weakref.ref(x))
        return number

    def add_followed(self, tables: Sequence[Traces]) -> None:
        """Add the tensors that are followed as scores or weights, and those that are followed as used weights."""
        tensors = self.list_tensors()
        for is_used, table in enumerate(tables):
            for x, trace in table.find_all([one for one in tensors if one is not None]):
                number = self.numbers[id(x)]
                self.followed[number, bool(is_used)] = find_followed(number, bool(is_used), trace, tensors)

    def list_tensors(self) -> list[Tensor | None]:
        """Return the tensors by number, None for those that were freed."""
        return [one() for one in self.tensors]


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
    """Return which view of one of the tensors x is; None if it has a memory of its own."""
    memory = x.untyped_storage().data_ptr()
    for number, one in enumerate(tensors if memory else ()):
        if one is not None and one.dtype == x.dtype and one.untyped_storage().data_ptr() == memory:
            return View(number, tuple(x.shape), x.stride(), int(x.storage_offset() - one.storage_offset()))
    return None


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


class CallForm(NamedTuple):
    """A call of attention by the numbers of a layer's tensors: its arguments, and where its tensors are."""

    call: AttentionCall  # with the first layer's mask and bias
    views: tuple[View, ...]  # of queries, keys, values, weights and context
    result: int
    masks: tuple[tuple[View, Tensor], ...]  # the operands of its scores' steps, with their bits
    eps: float
    compares_all: bool  # whether every row of the weights is compared, not a sample

    def dispatch(self, tensors: Sequence[Tensor]) -> bool:
        """Dispatch the call of a layer with these tensors; return whether its masks and its weights allow it."""
        if not all(have_same_bits(view.read(tensors), bits) for view, bits in self.masks):
            return False
        q, k, v, weights, context = (view.read(tensors).detach() for view in self.views)
        call, result = replace(self.call, q=q, k=k, v=v), tensors[self.result]
        with torch.no_grad():
            if compare_rows(call, weights, self.eps, self.compares_all) is not None:
                return False
        adapter = CallAdapter(lambda: result, lambda _: context)
        dispatch_call(call.kernel, lambda: result, lambda: (call, adapter))
        return True


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

    description: tuple[Hashable, ...]
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
    frame: ModuleFrame, layer: LayerSteps, trace: Trace, call: Any, adapter: CallAdapter, result: Tensor
) -> CallForm | None:
    """Return a call by the numbers of its layer's tensors; None if it is no plain softmax of a product of these."""
    if not isinstance(call, AttentionCall) or call.v is None or trace.form is None or trace.undropped is not None:
        return None
    if call.rank_part is not None or call.mask_depends_on_scores or adapter.divisor is not None:
        return None
    tensors, number = layer.list_tensors(), layer.find_number(result)
    form = find_form(trace.form, tensors)
    if form is None or number is None or adapter.weights is None or adapter.context is None:
        return None
    one, other = (frame.find_sources(x) for x in (trace.form.a, trace.form.b))
    if one is None or other is None or not one.sources & other.sources:
        return None  # the modules around it show whether it is cross attention
    views = [find_view(x, tensors) for x in (call.q, call.k, call.v, adapter.weights, adapter.context(result))]
    known = tuple(view for view in views if view is not None)
    if len(known) < len(views):
        return None
    operands = [step.operand for step in trace.form.steps if isinstance(step.operand, Tensor)]
    masks = zip((view for view in form.steps if view is not None), (x.detach().clone() for x in operands), strict=True)
    empty = call.q.new_empty(0)
    call = replace(call, q=empty, k=empty, v=empty, follows_cache=partial(bool, call.follows_cache()))
    return CallForm(call, known, number, tuple(masks), trace.eps, trace.may_differ_by_row)


def find_followed(number: int, is_used: bool, trace: Trace, tensors: Sequence[Tensor | None]) -> FollowedTensor | None:
    """Return a followed tensor of a layer; None if its trace has other tensors than those of its form, or others than these."""
    others = (trace.unmixed, trace.undropped, trace.factors, trace.moved, trace.activated, trace.picked, *trace.parts)
    views = None if any(one is not None for one in others) else find_form(trace.form, tensors)
    return None if views is None else FollowedTensor(number, is_used, trace, views)

"""Forms of layers that outlive a forward: the first layer of the next one is compared with what was found in it before.

What is kept holds no tensor of a layer, only the bits of masks, and is freed with the module that it was found in. As in one
forward, a form holds where the same functions run on tensors of the same shapes, its masks have the same bits, and rows of the
weights are those of its formula.
"""

import threading
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.observe.interception.handwritten.products.score_form import ScoreForm
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.repeated.layer_forms import MOST_FORMS, FollowedTensor, FormViews, LayerForm

MOST_KEYS = 4  # of a module: classes of the modules around it, and shapes; each length of a text has its own
MOST_BYTES = 2**20  # of masks and biases of a form


class KeptForm(NamedTuple):
    """A form, and the sizes of the axes of what is followed in it."""

    form: LayerForm
    sizes: dict[int, int]

    def load(self, table: AxisTable) -> LayerForm:
        """Return the form with new axes of a table."""
        new = {axis: table.add_axis(size) for axis, size in self.sizes.items()}

        def renumber(axes: Axes) -> Axes:
            return tuple(one for axis in axes for one in new[axis])

        return self.form._replace(followed=tuple(renumber_axes(one, renumber) for one in self.form.followed))


class KeptForms(threading.local):
    """The forms of modules, which one thread has found."""

    def __init__(self) -> None:
        self.modules: dict[int, tuple[weakref.ref[nn.Module], dict[Hashable, list[KeptForm]]]] = {}  # by id

    def keep(self, module: nn.Module, key: Hashable, form: LayerForm, table: AxisTable) -> None:
        """Keep a form that was found in a module, if it can be kept."""
        if not can_keep(form):
            return
        if id(module) not in self.modules:
            self.modules[id(module)] = weakref.ref(module, partial(drop_entry, self.modules, id(module))), {}
        by_key, key = self.modules[id(module)][1], (key, torch.is_inference_mode_enabled())
        forms = by_key[key] = by_key.pop(key, [])
        forms.append(strip_form(form, table))
        del forms[:-MOST_FORMS]
        if len(by_key) > MOST_KEYS:
            del by_key[next(iter(by_key))]

    def load(self, module: nn.Module, key: Hashable, table: AxisTable) -> list[LayerForm]:
        """Return the forms that were found in a module in earlier forwards, with axes of this one."""
        _, by_key = self.modules.get(id(module), (None, {}))
        key = key, torch.is_inference_mode_enabled()
        if key not in by_key:
            return []
        by_key[key] = by_key.pop(key)  # the last that is dropped
        return [one.load(table) for one in by_key[key]]


KEPT_FORMS = KeptForms()


def drop_entry(entries: dict[int, Any], number: int, _: object) -> None:
    """Drop an entry of a module that was freed."""
    entries.pop(number, None)


def can_keep(form: LayerForm) -> bool:
    """Return whether a form can be kept: it has steps, is small, and holds nothing that the model may change later."""
    if not form.description or any(one.trace.relative is not None for one in form.followed):
        return False
    if form.call is None:
        return True
    call, bias = form.call.call, form.call.call.bias
    if bias is not None and (type(bias) is not Tensor or bias.requires_grad):
        return False
    others = call.sinks, call.weight, call.parent_rows, call.module
    if any(one is not None for one in others) or isinstance(call.offset, Tensor) or call.has_stored_weights:
        return False
    return sum(bits.nbytes for _, bits in form.call.masks) + (0 if bias is None else bias.nbytes) <= MOST_BYTES


def strip_form(form: LayerForm, table: AxisTable) -> KeptForm:
    """Return a form without tensors of its layer, with the axes of what is followed as they are split so far."""
    followed = [renumber_axes(one, table.expand_axes) for one in form.followed]
    sizes = {axis: table.sizes[axis] for one in followed for axis in list_axes(one.trace)}
    stripped = (one._replace(trace=one.trace._replace(form=strip_scores(one.trace.form, one.views))) for one in followed)
    return KeptForm(form._replace(followed=tuple(stripped)), sizes)


def strip_scores(form: ScoreForm | None, views: FormViews) -> ScoreForm:
    """Return a form of scores without the tensors that its views stand for."""
    assert form is not None
    none = torch.empty(0)
    steps = (one if view is None else one._replace(operand=None) for one, view in zip(form.steps, views.steps, strict=True))
    return form._replace(a=none, b=none, steps=tuple(steps))


def list_axes(trace: Trace) -> set[int]:
    """Return the axes of a followed tensor."""
    form = trace.form
    assert form is not None
    every = trace.dims or (), form.a_dims, form.b_dims, form.dims, *(step.dims for step in form.steps)
    return {axis for dims in every for axes in dims for axis in axes} | {*form.shared, *(trace.keys or ())}


def renumber_axes(followed: FollowedTensor, renumber: Callable[[Axes], Axes]) -> FollowedTensor:
    """Return a followed tensor with other axes."""

    def renumber_dims(dims: Dims) -> Dims:
        return tuple(map(renumber, dims))

    trace, form = followed.trace, followed.trace.form
    assert form is not None
    form = form._replace(
        a_dims=renumber_dims(form.a_dims),
        b_dims=renumber_dims(form.b_dims),
        dims=renumber_dims(form.dims),
        shared=renumber(form.shared),
        steps=tuple(step._replace(dims=renumber_dims(step.dims)) for step in form.steps),
    )
    dims = None if trace.dims is None else renumber_dims(trace.dims)
    keys = None if trace.keys is None else renumber(trace.keys)
    return followed._replace(trace=trace._replace(dims=dims, keys=keys, form=form))

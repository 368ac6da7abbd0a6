"""Layers that repeat an earlier one: what was found in that holds in them, at the same places.

Most layers of a model run the same functions on tensors of the same shapes, and following them finds the same attention again.
The operations of a module are held until it ends. If they are those of an earlier layer, its queries, keys, values and weights
are at the same places among its tensors. Its masks must have the same bits, and rows of its weights are compared with the
formula, as in any layer. What differs in anything is followed then, in order. Only small layers are held, in which Python takes
the time.
"""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.observe.interception.head_counts import list_head_counts
from regard.observe.interception.module_weights import is_part_of_parameter
from regard.observe.interception.plain_tensors import disable_modes
from regard.observe.interception.provenance import ModuleFrame, has_separate_sources
from regard.observe.interception.repeated.kept_forms import KEPT_FORMS
from regard.observe.interception.repeated.layer_forms import MOST_FORMS, LayerForm
from regard.observe.interception.repeated.layer_steps import MOST_ENTRIES, LayerSteps, runs_transformed
from regard.observe.interception.skippable import describe_values
from regard.observe.interception.tensor_arguments import PLAIN
from regard.observe.interception.thread_state import STATE, list_owners


class RepeatedLayers:
    """What was found in the layers of one forward, for a torch function mode."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.forms: dict[Hashable, list[LayerForm]] = {}
        self.unrepeated: set[type[nn.Module]] = set()  # classes in which more ran than can be repeated
        self.loaded: set[int] = set()  # ids of modules whose forms of earlier forwards were looked up
        self.scoreless: set[Hashable] = set()  # calls of skippable modules of several tensors that were followed for nothing

    def clear(self) -> None:
        """Forget all layers."""
        self.forms.clear()
        self.unrepeated.clear()
        self.loaded.clear()
        self.scoreless.clear()

    def start(self, frame: ModuleFrame) -> LayerSteps | None:
        """Start to hold what runs in a module that starts; None if nothing of it may be left out."""
        if type(frame.module) in self.unrepeated or self.mode.positions.stored or STATE.is_in_fast_path:
            return None
        is_tracked = torch.is_grad_enabled()
        if any(one.can_change_calls or (one.needs_graph and is_tracked) for one in STATE.watchers):
            return None
        if frame.module._forward_hooks or runs_transformed():  # hooks may read the recording
            return None
        try:
            with torch._C.DisableTorchFunction():
                key = describe_frames(STATE.frames)
                return LayerSteps(frame, key, self.find_forms(frame.module, key), STATE.effects, self.mode.follow)
        except Exception:  # of arguments that are no plain tensors
            return None

    def find_forms(self, module: nn.Module, key: Hashable) -> list[LayerForm]:
        """Return the forms that a module may repeat: those of this forward, and its own of earlier ones."""
        if id(module) in KEPT_FORMS.modules and id(module) not in self.loaded:
            self.loaded.add(id(module))
            kept = KEPT_FORMS.load(module, key, self.mode.tracker.table)
            if kept:
                self.forms.setdefault(key, []).extend(kept)
        return self.forms.get(key, [])

    def repeat(self, frame: ModuleFrame, layer: LayerSteps) -> bool:
        """Dispatch the call of a module that ends, if it repeats an earlier one; return whether it does.

        One that does not is followed.
        """
        if not layer.is_deferred:
            return False
        with suppress(Exception), disable_modes():
            layer.describe_deferred()
            if self.dispatch_repeated(layer):
                frame.layer = None
                return True
        layer.follow()
        return False

    def dispatch_repeated(self, layer: LayerSteps) -> bool:
        """Dispatch the call of a module that ends, if what ran in it is what ran in an earlier one; return whether it is."""
        layer.is_deferred = False  # what reads the calls of its module finds none of its steps
        form = self.dispatch_by_form(layer)
        if form is None:
            return False
        self.follow_further(layer, form)
        return True

    def dispatch_by_form(self, layer: LayerSteps) -> LayerForm | None:
        """Return the form of an earlier layer by which the call of a module was dispatched; None if what ran in it differs."""
        tensors = [x for x in layer.list_tensors() if x is not None]
        if len(tensors) < len(layer.tensors) or self.has_open_state():
            return None
        if self.is_any_followed([tensors[number] for number in layer.given]):
            return None
        forms = (one for one in layer.forms if one.description == layer.description)
        find_sources = partial(self.find_sources, layer)
        return next((one for one in forms if one.call is None or one.call.dispatch(tensors, find_sources)), None)

    def find_sources(self, layer: LayerSteps, q: Tensor, k: Tensor) -> bool | None:
        """Return whether queries and keys were made from different tensors, by the operations of a module, which are logged."""
        for step in layer.deferred:
            self.mode.log_step(step)
        return has_separate_sources(STATE.frames, q, k)

    def follow_further(self, layer: LayerSteps, form: LayerForm) -> None:
        """Follow those tensors of a repeated layer that outlive it, as they were followed in the earlier one."""
        numbers = {one.number for one in form.followed}
        others = [None if number in numbers else x for number, x in enumerate(layer.list_tensors())]
        layer.deferred.clear()
        outlive = [(one, x) for one in form.followed if (x := layer.tensors[one.number]()) is not None]
        if outlive:
            tracker, tables = self.mode.tracker, (self.mode.tracker, self.mode.tracker.used)
            shift = tracker.count
            tracker.count += max(one.trace.roots.bit_length() for one, _ in outlive)
            for one, x in outlive:
                tables[one.is_used].put(x, one.build_trace(one.trace.roots << shift, others))
            if form.call is not None:
                tracker.used.add_call(form.call.roots << shift, list_owners(), STATE.frames)

    def makes_no_scores(self, module: nn.Module, args: Sequence[Any]) -> bool:
        """Return whether a skippable module is called as an earlier one of which nothing was followed, with no scores."""
        if not self.scoreless or not PLAIN.issuperset(map(type, args)):
            return False
        with suppress(Exception), torch._C.DisableTorchFunction():  # of arguments that are no plain tensors
            is_known = describe_call(module, args) in self.scoreless
            return is_known and not self.mode.tracker.may_follow_any(args, {}) and not self.has_open_state()
        return False

    def learn(self, frame: ModuleFrame, layer: LayerSteps) -> None:
        """Keep what was found in a module that ends, for others that run the same functions."""
        if len(frame.args) > 1 and id(frame.module) in STATE.skippable_modules:
            with suppress(Exception), disable_modes():
                self.learn_scoreless(frame, layer)
        form = None
        if frame.layer is layer:
            frame.layer = None
            with suppress(Exception), disable_modes():
                form = self.build_form(frame, layer)
        known = self.forms.setdefault(layer.key, [])
        if form is None or len(known) >= MOST_FORMS:
            self.unrepeated.add(type(frame.module))
            return
        known.append(form)
        with suppress(Exception), disable_modes():
            KEPT_FORMS.keep(frame.module, layer.key, form, self.mode.tracker.table)

    def learn_scoreless(self, frame: ModuleFrame, layer: LayerSteps) -> None:
        """Keep the call of a skippable module that ends if nothing was found in it and none of its tensors is followed."""
        has_effects = STATE.effects > layer.effects or frame.multiplies_scores or self.has_open_state()
        if frame.kwargs or has_effects or not PLAIN.issuperset(map(type, frame.args)):
            return
        made = [y for one in frame.list_operations() for ref in one.results if (y := ref()) is not None]
        if not self.is_any_followed([*frame.args, *made]):
            self.scoreless.add(describe_call(frame.module, frame.args))

    def build_form(self, frame: ModuleFrame, layer: LayerSteps) -> LayerForm | None:
        """Return what was found in a module that ends; None if that was more than one call, or something of it is followed."""
        calls = layer.calls
        is_all = len(calls) < 2 and STATE.effects - layer.effects == len(calls) and not frame.multiplies_scores
        if not is_all or None in calls or len(frame.list_operations()) != len(layer.description) or self.has_open_state():
            return None
        if layer.size > MOST_ENTRIES:  # of one that was deferred
            return None
        tensors = layer.list_tensors()
        layer.add_followed((self.mode.tracker, self.mode.tracker.used))
        followed = tuple(one for one in layer.followed.values() if one is not None)
        numbers, operands = {one.number for one in followed}, {n for one in followed for n in one.views.list_numbers()}
        if len(followed) < len(layer.followed) or numbers & operands:
            return None
        if self.is_any_followed([x for n in layer.given if (x := tensors[n]) is not None]):
            return None
        return LayerForm(layer.description, calls[0] if calls else None, followed)

    def is_any_followed(self, tensors: list[Tensor]) -> bool:
        """Return whether any of some tensors is followed."""
        tables = self.mode.tracker, self.mode.tracker.used
        return any(one.find(x) is not None for one in tables for x in tensors)

    def has_open_state(self) -> bool:
        """Return whether anything but scores and weights is followed."""
        tracker, undivided = self.mode.tracker, self.mode.undivided
        by_tensor = tracker.entry_products.products, undivided.contexts  # their length is slow
        return bool(tracker.used.sums.traces or undivided.notes) or any(one.data for one in by_tensor)


def describe_frames(frames: list[ModuleFrame]) -> Hashable:
    """Return the classes of the running modules, the shapes of their arguments, and the numbers of heads that they state."""
    for frame in frames:
        if frame.description is None:
            inputs = tuple((x.shape, x.dtype) for x in frame.input_tensors)
            frame.description = type(frame.module), frame.module.training, inputs, tuple(list_head_counts(frame.module))
    return tuple([frame.description for frame in frames])


def describe_call(module: nn.Module, args: Sequence[Tensor]) -> Hashable:
    """Return what decides which functions run in a skippable module and are followed, except for the numbers of tensors."""
    ids = [*map(id, args)]
    places = (*map(ids.index, ids),)  # the same tensor may be given twice
    return describe_values(module), places, tuple((x.shape, x.dtype, is_part_of_parameter(x)) for x in args)

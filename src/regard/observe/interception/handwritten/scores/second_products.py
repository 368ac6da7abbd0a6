"""Weights that a model multiplies with more than the values that are recorded, as with relative values.

A call has one product with values. Another product of the same weights, before it or after it in the same module, is neither
recorded nor changed by an intervention, so it is noted.
"""

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from regard.observe.interception.function_roles import Role, strip_affixes
from regard.observe.interception.handwritten.products.labelled_product import find_operands
from regard.observe.interception.handwritten.products.score_form import MOVERS
from regard.observe.interception.handwritten.products.traces import TraceKind, Traces
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.tensor_arguments import find_tensors

MULTIPLIED = "its weights are multiplied with other values too ({}), which are neither recorded nor changed by an intervention"
Owners = list[tuple[Any, str]]  # watchers and their names for the module of a call


class FramesOfUse(NamedTuple):
    """The module that multiplied weights and its caller, by weak references."""

    module: "weakref.ref[ModuleFrame]"
    caller: "weakref.ref[ModuleFrame] | None"


class UsedWeights(Traces):
    """The weights of one forward that were multiplied with values, what is made of them alone, and what else they multiply.

    Weights are known by their roots, so that a copy or a slice that was made before the product counts too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums = Traces()  # of rows of weights, which divide a context
        self.calls: dict[int, tuple[Owners, FramesOfUse]] = {}  # by the roots of the weights
        self.other_products: dict[int, tuple[str, FramesOfUse]] = {}  # that came before the call, by the same

    @property
    def has_any(self) -> bool:
        """Whether used weights or their sums are followed."""
        return bool(self.traces or self.sums.traces)

    def clear(self) -> None:
        """Forget all weights."""
        super().clear()
        self.sums.clear()
        self.calls.clear()
        self.other_products.clear()

    def add_call(self, roots: int, owners: Owners, frames: list[ModuleFrame]) -> None:
        """Add the call of weights with these roots; report a product of theirs that came before it."""
        self.calls[roots] = owners, describe_frames(frames)
        if roots in self.other_products:
            self.report_product(roots, *self.other_products[roots])

    def follow_function(
        self,
        tracker: Traces,
        frames: list[ModuleFrame],
        name: str,
        role: Role | None,
        args: Any,
        kwargs: Any,
        results: list[Tensor],
    ) -> None:
        """Follow a function that completes no call: a further product of weights, or what is made of used weights alone."""
        tensors = [x for x in find_tensors(args, kwargs) if x.is_floating_point() and x.numel() > 1]
        used = self.find_all(tensors)
        weights = used + [one for one in tracker.find_all(tensors) if one[1].kind is TraceKind.WEIGHTS]
        if not weights:
            return
        if role is Role.SUM or len(self.sums.find_all(tensors)) == len(weights):
            for y in results:
                self.sums.put(y, weights[0][1])
            return
        x, trace = weights[0]
        grows = role is Role.MULTIPLY and results[0].numel() > max(one.numel() for one, _ in weights)
        if role is Role.PRODUCT or grows:
            others = [v for v in (find_operands(name, args, kwargs) if role is Role.PRODUCT else tensors) if v is not x]
            made = tracker.find(results[0])
            is_weighing = made is None or made.kind is TraceKind.SCORES  # neither mixed weights nor a part of a call
            if len(weights) == 1 and is_weighing and not all(map(is_constant, others)):
                self.report_product(trace.roots, strip_affixes(name), describe_frames(frames))
        elif used and (len(used) == len(tensors) or keeps_entries(role, name, x, results[0])):
            for y in results:
                self.put(y, trace)

    def report_product(self, roots: int, name: str, frames: FramesOfUse) -> None:
        """Report a product of weights to the watchers of their call, if it ran in its module; keep it if no call is known."""
        if roots not in self.calls:
            self.other_products[roots] = name, frames
            return
        owners, frames_of_call = self.calls[roots]
        if frames.module in frames_of_call or frames_of_call.module in frames:
            for watcher, path in owners:
                watcher.handle_unread_part(MULTIPLIED.format(name), path)


def describe_frames(frames: list[ModuleFrame]) -> FramesOfUse:
    """Return the module that runs, and its caller if the module has no parameters, as a helper.

    Weights that a module with parameters returns may be used for anything.
    """
    module = frames[-1].module
    has_caller = len(frames) > 1 and not any(x is not None for one in module.modules() for x in one._parameters.values())
    return FramesOfUse(weakref.ref(frames[-1]), weakref.ref(frames[-2]) if has_caller else None)


def keeps_entries(role: Role | None, name: str, x: Tensor, y: Tensor) -> bool:
    """Return whether a function with other tensors moves weights x among them, or multiplies each by a number."""
    return strip_affixes(name) in MOVERS or (role is Role.MULTIPLY and x.shape == y.shape)


def is_constant(x: Tensor) -> bool:
    """Return whether all entries of a tensor are the same, so that a product with it is a sum."""
    return not x.numel() or bool((x.detach() == x.detach().flatten()[0]).all())

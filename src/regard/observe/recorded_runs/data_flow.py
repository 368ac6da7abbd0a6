"""Which layers of a forward read the same tensor, and which of them read what others wrote, as the modules' operations show."""

import weakref
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.observe.interception.plain_tensors import INTEGERS, is_comparable, sum_bits
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.stored_calls.packed_calls import Memory


class LayerLinks(NamedTuple):
    """The forward and the number of a layer, and the numbers of the layers before it that it is known not to depend on.

    Modules of one parent that read the same tensor are one layer.
    """

    forward: int
    number: int
    beside: frozenset[int] = frozenset()


class FramePlace(NamedTuple):
    """A running module, and the number of operations that have run in it."""

    frame: weakref.ref[ModuleFrame]
    operations: int


class LayerPlaces(NamedTuple):
    """The links of a layer, what identifies its parent and its input, and where each of its modules runs."""

    links: LayerLinks
    source: tuple[Any, ...]
    places: list[list[FramePlace]]


class DataFlow:
    """The layers of one forward by their kind, and of each forward its number."""

    def __init__(self) -> None:
        self.forwards, self.numbers = 0, count()
        self.layers: dict[str, list[LayerPlaces]] = {}
        self.links: dict[tuple[str, str, int], LayerLinks] = {}  # by kind, module and visit

    def start_forward(self) -> None:
        """Start a forward."""
        self.forwards += 1
        self.layers, self.links = {}, {}

    def find_links(self, kind: str, name: str, visit: int, frames: list[ModuleFrame]) -> LayerLinks:
        """Return the links of the layer of a kind whose module runs in the last of these frames."""
        key = kind, name, visit
        if key not in self.links:
            self.links[key] = self.add_layer(kind, frames)
        return self.links[key]

    def add_layer(self, kind: str, frames: list[ModuleFrame]) -> LayerLinks:
        """Return the links of a module that runs for the first time in this forward."""
        layers, source = self.layers.setdefault(kind, []), identify_source(frames)
        places = [FramePlace(weakref.ref(frame), frame.operation_count) for frame in frames]
        same = next((layer for layer in layers if source and layer.source == source), None)
        if same is not None:
            same.places.append(places)
            return same.links
        beside, implied = set[int](), set[int]()
        for layer in reversed(layers):
            if layer.links.number in implied:
                continue
            if all(is_independent(place, frames) for place in layer.places):
                beside.add(layer.links.number)
            else:
                implied |= {one.links.number for one in layers} - layer.links.beside
        links = LayerLinks(self.forwards, next(self.numbers), frozenset(beside))
        layers.append(LayerPlaces(links, source, [places]))
        return links


def identify_source(frames: list[ModuleFrame]) -> tuple[Any, ...]:
    """Return what modules of one running parent that read the same tensors have in common; nothing if it is not known.

    A module that hands its input on as it is belongs to the one that it calls.
    """
    inputs, depth = list_inputs(frames[-1]), len(frames) - 1
    views = [view for view, _ in inputs]
    while depth and [view for view, _ in list_inputs(frames[depth - 1])] == views:
        depth -= 1
    parent = [weakref.ref(frames[depth - 1])] if depth else []
    return (*parent, *views, *(sum_numbers(x) for _, x in inputs)) if views else ()


def list_inputs(frame: ModuleFrame) -> list[tuple[tuple[Any, ...], Tensor]]:
    """Return the tensors that a module was given with as many axes as the first floating-point one, each once, and their views.

    Weights or a mask may be those of each module.
    """
    given = [x for x in frame.input_tensors if is_comparable(x) and x.is_floating_point()]
    inputs: list[tuple[tuple[Any, ...], Tensor]] = []
    for x in given:
        if given[0].dim() == x.dim() > 1 and all(view != identify_view(x) for view, _ in inputs):
            inputs.append((identify_view(x), x))
    return inputs


def identify_view(x: Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common that are views of the same memory."""
    return Memory(x), x.storage_offset(), x.shape, x.stride(), 0 if x.is_inference() else x._version


def sum_numbers(x: Tensor) -> int:
    """Return a sum of the numbers of a tensor, which tells what was written where no version counts it, as by numpy."""
    bits = x.detach().view(INTEGERS[x.element_size()]).sum(-1)
    return int(sum_bits(bits.view(-1)))


def is_independent(places: list[FramePlace], frames: list[ModuleFrame]) -> bool:
    """Return whether what runs in these frames is known to read nothing that a module at some places wrote before.

    The operations of the innermost module that both run in are followed, from the result of the part that the first ran in.
    """
    depth = 0
    while depth < min(len(places), len(frames)) and places[depth].frame() is frames[depth]:
        depth += 1
    if depth in (0, len(places), len(frames)):
        return False
    frame, start = frames[depth - 1], places[depth - 1].operations
    operations = frame.list_operations()
    if len(operations) <= start or not operations[start].results:
        return False
    known = {id(weakref.ref(x)) for x in frame.given_tensors}
    for operation in operations[:start]:
        known.update(map(id, (*operation.given, *operation.results)))
    first, *later = operations[start:]
    known.update(map(id, first.given))
    known.difference_update(map(id, first.results))
    for operation in later:
        is_new = not all(id(x) in known or isinstance(x(), nn.Parameter) for x in operation.given)
        (known.difference_update if is_new else known.update)(map(id, operation.results))
    return all(id(weakref.ref(x)) in known for x in frames[depth].given_tensors)

"""The kind of attention of a call, self or cross, and the number of its layer, as `recording.map` counts them."""

import re
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.thread_state import STATE
from regard.observe.recorded_runs.data_flow import DataFlow, LayerLinks
from regard.observe.recorded_runs.part_names import find_default_part, is_in_part, is_inside, join_names, list_part_names
from regard.observe.recorded_runs.run import IMPLICIT

PATHS = 4096  # paths cached
CROSSES = re.compile("cross|encoder_attn|encdec|enc_attn|src_attn|multihead_attn")  # in the last components of a path
TORCH_CROSS = ".multihead_attn"  # cross attention in torch's decoder layers, which state it; any attention in other models
INNER = ".attention.self"  # BERT's path of the module that attends, in one of either kind


@lru_cache(PATHS)
def infer_kind_from_path(name: str) -> str | None:
    """Return the kind that a module's path states in its last two components: self, cross, or None.

    In BERT's own path the component before counts as well, and the last one does not: it is "self" in cross attention too.
    """
    path = name.lower()
    path = ".".join(path.rsplit(".", 2 + path.endswith(INNER))[-2 - path.endswith(INNER) :])
    return "cross" if CROSSES.search(path) else "self" if "self" in path.removesuffix(INNER) else None


class LayerPlace(NamedTuple):
    """A layer: its module, which of the module's visits in a forward it is, and its numbers among the layers of its kind.

    number is that of `recording.map`, None in another part of the model than the one which that counts; number_in_part is the
    number with the part named.
    """

    name: str
    visit: int
    number: int | None
    number_in_part: int

    @property
    def numbers(self) -> set[int | None]:
        """Both numbers."""
        return {self.number, self.number_in_part}

    def describe(self) -> str:
        """Return the layer in words."""
        return f"{self.name}, visit {self.visit}" if self.visit else self.name


class ModuleVisits:
    """Which visit of its module in a forward a call belongs to."""

    def __init__(self) -> None:
        self.frames: dict[str, list[weakref.ref[ModuleFrame]]] = {}
        self.calls: dict[tuple[str, str, int], int] = {}  # by module, kind and visit: the number of calls

    def restart(self) -> None:
        """Start a forward."""
        self.frames, self.calls = {}, {}

    def find_visit(self, name: str, names: Mapping[int, str]) -> int:
        """Return the visit of the module of this name that runs, given the names of all modules by id."""
        frame, known = list_frames(name, names)[-1], self.frames.setdefault(name, [])
        if not known or known[-1]() is not frame:
            known.append(weakref.ref(frame))
        return len(known) - 1

    def count_call(self, name: str, kind: str, visit: int) -> int:
        """Return how many calls of a kind a visit has made before this one."""
        key = name, kind, visit
        self.calls[key] = self.calls.get(key, -1) + 1
        return self.calls[key]


def list_frames(name: str, names: Mapping[int, str]) -> list[ModuleFrame]:
    """Return the running modules up to the one of this name, given the names of all modules by id; all if it does not run."""
    depths = range(len(STATE.frames), 0, -1)
    return STATE.frames[: next((n for n in depths if names.get(id(STATE.frames[n - 1].module)) == name), len(depths))]


class LayerNumbers:
    """The layers of the calls so far, with their kinds and numbers. `names` are the paths of the modules by id."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        self.kinds: dict[str, str] = {}  # by module: the last kind that was determined
        self.visits, self.flow = ModuleVisits(), DataFlow()
        self.first_modules: dict[LayerLinks, tuple[str, int]] = {}  # of layers of several modules, with the visit
        self.roots: list[str] = []  # modules called from outside since the layers were numbered anew
        self.order: dict[str, list[tuple[str, int]]] = {}  # by kind: module and visit, in the order they first ran
        self.paths: dict[bool, dict[str, None]] = {False: {}, True: {}}  # of modules of all forwards, with a softmax or without
        self.parts: list[str] = []
        self.first_numbers: dict[tuple[str, str, int], set[int | None]] = {}  # by kind, module and visit

    def start_forward(self, root: str) -> None:
        """Start a forward of a module; layers are numbered anew where it ran before, as itself or in another one."""
        self.visits.restart()
        self.flow.start_forward()
        if any(not root or not one or is_inside(root, one) or is_inside(one, root) for one in self.roots):
            self.roots.clear()
            self.order.clear()
        self.roots.append(root)

    def infer_kind(self, call: AttentionCall, name: str) -> str:
        """Return self or cross: as the kernel determines it, else the module's path, else the provenance of q and k."""
        if call.is_cross is not None:
            return "cross" if call.is_cross else "self"
        kind = infer_kind_from_path(name)
        if f".{name}".endswith(TORCH_CROSS) and (call.has_separate_sources is not None or name in self.kinds):
            kind = None
        if kind == "cross":
            return kind
        if call.has_separate_sources is not None and kind is None:
            self.kinds[name] = "cross" if call.has_separate_sources else "self"
        return self.kinds.get(name, "self")

    def find_links(self, name: str, kind: str, visit: int) -> LayerLinks:
        """Return the links of the layer that calls attention of a kind in the module of this name, which runs."""
        return self.flow.find_links(kind, name, visit, list_frames(name, self.names))

    def find_place(self, name: str, kind: str, is_stepwise: bool = False) -> LayerPlace:
        """Return the place of the layer that calls attention of a kind in the module of this name, which runs."""
        visit = 0 if is_stepwise else self.visits.find_visit(name, self.names)
        layer, paths = (name, visit), self.paths[kind != IMPLICIT]
        if name not in paths:
            paths[name] = None
            self.parts = list_part_names([*(self.paths[True] or self.paths[False])])
        if kind != IMPLICIT and not is_stepwise:
            layer = self.first_modules.setdefault(self.find_links(name, kind, visit), layer)
        order = self.order.setdefault(kind, [])
        if layer not in order:
            order.append(layer)
        default = self.default_part
        parts = [default] if default is not None and self.is_numbered(name) else self.parts
        own = next((part for part in parts if is_in_part(name, part, self.known_paths)), None)
        in_part = [one for one in order if own is None or is_in_part(one[0], own, self.known_paths)].index(layer)
        number = order.index(layer) if default is None else in_part if own == default else None
        return LayerPlace(name, visit, number, in_part)

    def find_first_numbers(self, name: str, kind: str, is_stepwise: bool) -> set[int | None]:
        """Return both numbers of the layer that calls attention, as they were when it first ran.

        In the steps of a generation a model may leave out its first layers, as those of an image.
        """
        place = self.find_place(name, kind, is_stepwise)
        return self.first_numbers.setdefault((kind, name, place.visit), place.numbers)

    def describe_layers(self, kind: str) -> str:
        """Return which layers of a kind ran, in words."""
        names = [name for name, _ in self.order.get(kind, ()) if self.is_numbered(name)]
        which = f"layers 0 to {len(names) - 1} are" if len(names) > 1 else "layer 0 is"
        numbers = f": {which} {join_names(names)}" if names else ""
        return f"no {kind} attention ran there{numbers}"

    @property
    def default_part(self) -> str | None:
        """The part of the model whose layers are numbered; None for all."""
        return find_default_part(self.parts)

    def is_numbered(self, name: str) -> bool:
        """Return whether the layers of a module are numbered, as far as is known so far."""
        return self.default_part is None or is_in_part(name, self.default_part, self.known_paths)

    @property
    def known_paths(self) -> tuple[str, ...]:
        """The paths of all modules that attended, from which those of the parts follow."""
        return tuple(self.paths[True] or self.paths[False])

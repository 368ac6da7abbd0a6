"""Run: one forward of a model, or a prompt and the steps that continued it, with one map for each layer; its calls."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, overload

import torch
from torch import Tensor

from regard.errors import ConfigError, MissingNameError, OutOfRangeError
from regard.map import AttentionMap, DifferentiableMap
from regard.map.implicit_map import ImplicitMap
from regard.mechanism.arguments import check_choice, check_flag, check_instance, check_integer, describe_value
from regard.observe.implicit_history import ImplicitCall, ImplicitHistory, RecordedCall, join_head_maps
from regard.observe.recorded_runs.data_flow import LayerLinks
from regard.observe.recorded_runs.part_names import (
    count_calls,
    describe_module,
    find_common_path,
    find_default_part,
    is_in_part,
    is_inside,
    join_names,
    list_components,
    list_part_names,
)
from regard.observe.recorded_runs.token_ids import ENCODER, IdParts, find_side, list_ids
from regard.observe.recorded_runs.words import (
    TextPair,
    Words,
    check_lengths,
    find_decoder,
    fit_words,
    place_words,
    select_axis_words,
    select_last_words,
)
from regard.observe.stored_calls.joined_heads import can_join_heads, join_head_histories
from regard.observe.stored_calls.joined_maps import (
    compute_shape,
    find_joining,
    join_differentiable_maps,
    join_maps,
    join_values,
)
from regard.observe.stored_calls.kv_history import KVHistory, StoredCall
from regard.observe.token_places.media import Media

KINDS = ("self", "cross")  # of attention with a softmax
IMPLICIT = "implicit"  # the kind of attention without one


@dataclass(frozen=True, eq=False)
class Call(RecordedCall):
    """One attention call: the path of the innermost module that made it, its kind (self or cross), its step in the run."""

    history: KVHistory = field(repr=False)
    stored: StoredCall = field(repr=False)

    @property
    def map(self) -> AttentionMap:
        """The map (b, h, q, k) of this call's queries on all keys that they could see."""
        return self.history.build_call_map(self.stored)

    def __repr__(self) -> str:
        q, k = self.stored.q, self.stored.stop - self.stored.first
        return f"Call({self.name!r}, {self.kind}, step {self.step}, (b, h, q, k) = {(*q.shape[:3], k)})"


Positions = tuple[Tensor | None, Tensor | None]  # of queries (b, q) and keys (b, k) in images, as pixel_positions.py has them
HistoryKey = tuple[str, str, int, int]  # name, kind, visit of the module in a forward, call in the visit


class LayerReader(ABC):
    """What can be read of the layers of a run: its own methods, and for its last run those of a recording."""

    @abstractmethod
    def _get_run(self) -> "Run":
        """Return the run whose layers are read."""

    def layers(self, kind: str = "self", part: str | None = None) -> list[str]:
        """Return the modules of a kind and a part in the order they first ran; one that a forward visits n times, n times."""
        return [name for name, _ in self._get_run().list_visits(kind, part)]

    @overload
    def map(  # type: ignore[overload-overlap]
        self, layer: int | str, head: int | None = None, *, kind: Literal["implicit"], part: str | None = None
    ) -> ImplicitMap: ...

    @overload
    def map(
        self, layer: int | str, head: int | None = ..., kind: str = ..., part: str | None = ..., grad: Literal[False] = ...
    ) -> AttentionMap: ...

    @overload
    def map(
        self, layer: int | str, head: int | None = ..., kind: str = ..., part: str | None = ..., *, grad: Literal[True]
    ) -> DifferentiableMap: ...

    def map(
        self, layer: int | str, head: int | None = None, kind: str = "self", part: str | None = None, grad: bool = False
    ) -> AttentionMap | DifferentiableMap | ImplicitMap:
        """Return the map of a layer, (b, h, q, k), or of one of its heads, (b, 1, q, k), with all steps of the run joined.

        layer is a module's name, or a number among the modules of that kind in the order they first ran. head is its number in
        the model, whichever heads were recorded. part is "encoder", "decoder" or another component of the modules' paths; by
        default the decoder, if the model has one. kind is "self" or "cross", or "implicit" for the ImplicitMap of a layer
        without a softmax, whose heads are its channels where it has no heads. With grad=True it is a DifferentiableMap, through
        which a loss on the weights reaches the model: of one forward that was recorded with keep="values" and with gradients.
        Raises ConfigError for a layer, a head or a part that was not recorded, or if there is no graph.
        """
        run = self._get_run()
        if check_choice("kind", kind, (*KINDS, IMPLICIT)) == IMPLICIT:
            if check_flag("grad", grad):
                raise ConfigError("the map of a layer without a softmax has no graph: its factors are stored as they are.")
            implicit = join_head_maps([one.build_map() for one in run.find_implicit_histories(layer, part)])
            return implicit if head is None else implicit.select(heads=[check_integer("head", head, ", or None for all")])
        histories = run.find_histories(layer, kind, part)
        found = join_differentiable_maps(histories) if check_flag("grad", grad) else join_maps(histories)
        heads = histories[0].heads
        if head is None:
            return found
        head = check_integer("head", head, ", or None for all")
        if head in heads:
            return found.select(heads=[heads.index(head)])
        if histories[0].selected_heads is None and -len(heads) <= head < 0:
            return found.select(heads=[head])
        kept = f"0 to {len(heads) - 1}" if histories[0].selected_heads is None else join_names(list(map(str, heads)))
        raise OutOfRangeError(f"head must be one of the recorded heads, {kept}; got {describe_value(head)}.")

    def heads(self, layer: int | str, kind: str = "self", part: str | None = None) -> tuple[int, ...]:
        """Return the numbers in the model of a layer's recorded heads, in the order of its map."""
        run = self._get_run()
        if check_choice("kind", kind, (*KINDS, IMPLICIT)) == IMPLICIT:
            return tuple(range(sum(len(one.heads) for one in run.find_implicit_histories(layer, part))))
        return run.find_histories(layer, kind, part)[0].heads

    def values(self, layer: int | str, kind: str = "self", part: str | None = None) -> Tensor | None:
        """Return the values (b, g, k, e) of a layer; None if the recording did not keep them, as it does of implicit ones."""
        run = self._get_run()
        if check_choice("kind", kind, (*KINDS, IMPLICIT)) == IMPLICIT:
            return torch.cat([one.join_values() for one in run.find_implicit_histories(layer, part)], 1)
        return join_values(run.find_histories(layer, kind, part))

    def residual(self, layer: int | str, part: str | None = None) -> Tensor:
        """Return the residual stream after the block of a layer with self-attention, (b, t, c).

        Raises ConfigError if it was not kept, or if the layer is in no block of its own.
        """
        run = self._get_run()
        if not run.list_visits("self", part) and run.list_visits(IMPLICIT, part):
            raise ConfigError("the residual stream is kept after self-attention with a softmax, and this model has none.")
        histories = run.find_histories(layer, "self", part)
        found = histories[0].join_residuals() if len(histories) == 1 else None
        if found is None:
            raise ConfigError(
                f"the residual stream after {describe_module(histories[0].name)} was not kept: record with keep='residual', a "
                "layer that is the only self-attention of a module that stands in a list of modules and hands on the stream."
            )
        return found

    def words(self, layer: int | str, kind: str = "self", part: str | None = None) -> tuple[Words | None, Words | None]:
        """Return the words of the rows and of the columns of the map of a layer: as many as there are, or None.

        Words of another number are not of this layer. The rows of self-attention are the last of its columns.
        """
        run = self._get_run()
        name = run.find_path(layer, kind, part)
        asking, answering = select_axis_words(run.tokens, kind, name)
        if answering is None:
            return None, None
        b, _, q, k = run.compute_shape(layer, kind, part)
        columns, rows = (fit_words(one, b, n, bool(run.rows)) for one, n in ((answering, k), (asking, q)))
        if kind == "cross":
            return rows if columns is None or isinstance(run.tokens, TextPair) else None, columns
        return (rows if columns is None or q >= k else select_last_words(columns, q)), columns


@dataclass(eq=False)
class Run(LayerReader):
    """One forward of the model, or a prompt and the steps that continued it."""

    histories: dict[HistoryKey, KVHistory] = field(default_factory=dict)
    calls: list[Call | ImplicitCall] = field(default_factory=list)
    parent_rows: dict[int, Tensor] = field(default_factory=dict)
    rows: list[int | None] = field(default_factory=list)  # by sequence that generate returned: the row of the maps, or None
    implicit_histories: dict[HistoryKey, ImplicitHistory] = field(default_factory=dict)
    tokens: Any = None  # the words of this run, in the batch rows of its maps, or of two texts a TextPair
    media: Media | None = None  # the sizes of the images or the sound that the model was given; not saved
    positions: dict[tuple[str, str], Positions] = field(default_factory=dict)  # of layers, by path and kind; not saved
    read_ids: dict[str, IdParts] = field(default_factory=dict)  # by outermost module, of its source by "encoder"

    def _get_run(self) -> "Run":
        return self

    def list_lengths(self) -> set[int]:
        """Return the numbers of tokens along the axes of all layers, and of the ids that the model read."""
        found = {ids.shape[1] for ids in self.select_ids() if ids is not None}
        visits: dict[tuple[str, str, int], list[Sequence[int]]] = {}
        for key, history in self.histories.items():
            visits.setdefault(key[:3], []).append(compute_shape([history])[2:])
        for sizes in visits.values():  # several calls of a visit may be one map
            found.update(*sizes, map(sum, zip(*sizes, strict=True)))
        return found.union(one.total for one in self.implicit_histories.values())

    def place_tokens(self, tokens: Any, may_be_of_part: bool = False) -> None:
        """Set the words of this run: given words, or those that a tokenizer, or a function, has for the ids that it read.

        Raises ConfigError for words of a number that no layer has, unless they may be those of a part of its tokens, and for a
        tokenizer where the model read no ids.
        """
        decode = find_decoder(tokens)
        if decode is not None:
            own, source = (x if x is None else [decode(row) for row in x.tolist()] for x in self.select_ids())
            if own is None:
                raise ConfigError("this run read no token ids that a tokenizer has words for: set recording.tokens to words.")
            tokens = (own[0] if len(own) == 1 else own) if source is None else {"rows": own, "columns": source}
        words = TextPair.from_tokens(tokens)
        calls = self.softmax_calls  # the last is of the decoder: a tower of images may have more batch rows, of tiles
        rows, b = (self.rows, len(calls[-1].stored.q)) if calls else ([], 0)
        is_generated, lengths = bool(rows) or any(call.step for call in self.calls), self.list_lengths()
        words = place_words(words, rows, b, lengths, is_generated)
        if not may_be_of_part:
            check_lengths(words, lengths)
        self.tokens = words

    @property
    def ids(self) -> Tensor | None:
        """The token ids that the model read, (b, t) in int64, a decoder's in an encoder-decoder model; None if it read none.

        Those of a generation are the prompt's and then those of all steps, in the batch rows of the maps: row p chose token
        p + 1, so that the last token of a returned sequence, which nothing read, is not among them.
        """
        return self.select_ids()[0]

    @property
    def source_ids(self) -> Tensor | None:
        """The token ids (b, t) that the encoder of an encoder-decoder model read, before beams repeat its rows; else None."""
        return self.select_ids()[1]

    def compute_shape(self, layer: int | str, kind: str, part: str | None) -> tuple[int, int, int, int]:
        """Return the axes (b, h, q, k) of the map of a layer."""
        if kind != IMPLICIT:
            return compute_shape(self.find_histories(layer, kind, part))
        return self.find_implicit_histories(layer, part)[0].build_map().shape

    def select_ids(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the ids and those of the source; those of an encoder are a source if a decoder ran too."""
        own = (calls.stored_calls for calls in self.histories.values() if calls.kind == "self")
        shapes = {(len(calls[-1].q), sum(call.q.shape[2] for call in calls)) for calls in own}
        sides: dict[bool, Tensor | None] = {}
        for path, ids in list_ids(self.read_ids, self.parent_rows).items():
            is_transposed = ids.shape not in shapes and ids.mT.shape in shapes  # (t, b): the model has its tokens first
            sides[find_side(path) == ENCODER] = ids.mT if is_transposed else ids
        has_decoder = any(find_side(path) != ENCODER for path in self.read_ids)
        return sides.get(not has_decoder), sides.get(True) if has_decoder else None

    def add_positions(self, layer: tuple[str, str], positions: Positions) -> None:
        """Add the positions of a call of a layer; those of several calls that differ are not known."""
        before = self.positions.setdefault(layer, positions)
        if before is not positions and not all(
            x is not None and y is not None and torch.equal(x, y) for x, y in zip(before, positions, strict=True)
        ):
            self.positions[layer] = None, None

    def remove_calls(self, name: str, step: int) -> bool:
        """Remove the calls with a softmax of a module in a step; return whether there were any."""
        removed = [call for call in self.softmax_calls if call.name == name and call.step == step]
        for call in removed:
            self.calls.remove(call)
            call.history.stored_calls.remove(call.stored)
        self.histories = {key: one for key, one in self.histories.items() if one.stored_calls}
        return bool(removed)

    def keep_layers(self, is_selected: Callable[[str, set[int]], bool]) -> None:
        """Remove the layers that are not selected by their module and their numbers, from either end, as `map` counts them."""
        kept = set()
        for kind, part in itertools.product((*KINDS, IMPLICIT), (None, *self.parts)):
            visits, layers = self.list_visits(kind, part), self.name_layers(kind)
            numbers = {visit: {n, n - len(visits)} for n, visit in enumerate(visits)}
            known = ((key, layer[0], numbers[layer]) for key, layer in layers.items() if layer in numbers)
            kept |= {key for key, name, own in known if is_selected(name, own) or is_selected(key[0], own)}
        self.histories = {key: one for key, one in self.histories.items() if key in kept}
        self.implicit_histories = {key: one for key, one in self.implicit_histories.items() if key in kept}
        left = {id(one) for one in (*self.histories.values(), *self.implicit_histories.values())}
        self.calls = [call for call in self.calls if id(call.history) in left]

    @property
    def softmax_calls(self) -> list[Call]:
        """The calls of attention with a softmax, in order."""
        return [call for call in self.calls if isinstance(call, Call)]

    @property
    def names(self) -> list[str]:
        """The recorded modules, in the order they first ran."""
        return list(dict.fromkeys(call.name for call in self.calls))

    @property
    def parts(self) -> list[str]:
        """The parts of a model that has several (encoder and decoder, or towers); empty for any other."""
        return list_part_names(self.known_paths)

    @property
    def known_paths(self) -> tuple[str, ...]:
        """The paths of all modules with a softmax, or without if there are none, from which those of the parts follow."""
        return tuple(dict.fromkeys(call.name for call in self.softmax_calls)) or tuple(self.names)

    def list_visits(self, kind: str, part: str | None) -> list[tuple[str, int]]:
        """Return the modules of a kind and a part with the number of each visit, in the order they first ran.

        Raises MissingNameError if no recorded module belongs to the part.
        """
        layers = self.name_layers(check_choice("kind", kind, (*KINDS, IMPLICIT)))
        paths = self.known_paths
        if part is None:
            part = find_default_part(list_part_names(paths))
        elif not any(is_in_part(name, check_instance("part", part, str), paths) for name in self.names):
            raise MissingNameError(
                f"part {describe_value(part)} is neither where the paths of the recorded modules differ nor the beginning of "
                f"one. The parts are: {', '.join(self.parts) or 'none'}."
            )
        own = [layer for key, layer in layers.items() if part is None or is_in_part(key[0], part, paths)]
        return list(dict.fromkeys(own))

    def list_all_visits(self, kind: str) -> list[tuple[str, int]]:
        """Return the layers of a kind, of all parts, with the number of each visit."""
        return list(dict.fromkeys(self.name_layers(kind).values()))

    def name_layers(self, kind: str) -> dict[HistoryKey, tuple[str, int]]:
        """Return the name and the visit of the layer of each history of a kind, in the order they first ran.

        They are those of its module. Modules of one parent that read the same input, and have the same tokens, are one layer
        with the name of what their paths begin with.
        """
        histories: Mapping[HistoryKey, Any] = self.implicit_histories if kind == IMPLICIT else self.histories
        found = {key: (key[0], key[2]) for key in histories if key[1] == kind}
        together: dict[LayerLinks, list[HistoryKey]] = {}
        for key in found if kind != IMPLICIT else ():
            if (links := self.histories[key].links) is not None:
                together.setdefault(links, []).append(key)
        for keys in [own for own in together.values() if len(own) > 1]:
            names = {key[0] for key in keys}
            name = find_common_path([*names])
            depth = len(name.split(".")) + 1 if name else 1
            heads = {".".join(path.split(".")[:depth]) for path in names}
            others = {key[0] for key in found} - names
            is_alone = not any(path == name or is_inside(path, head) for path in others for head in heads)
            has_single_calls = len({found[key] for key in keys}) == len(keys)
            if has_single_calls and is_alone and can_join_heads([self.histories[key] for key in keys]):
                found |= dict.fromkeys(keys, (name, keys[0][2]))
        return found

    def describe_joined_layers(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each layer that joins several calls, and in words how."""
        groups = [(name, own) for kind in KINDS for (name, _), own in self.group_histories(kind).items() if len(own) > 1]
        for name, own in groups:
            if are_of_several_modules(own):
                yield name, f"{join_names([key[0] for key in own])} read the same input and are one layer"
                continue
            joining = find_joining([*own.values()], [history.build_map().planes.request for history in own.values()])
            if joining is not None:
                yield name, f"{len(own)} {joining.value}"

    def merge_modules(self) -> "Run":
        """Return the run with one history for each layer that several modules are; itself if there is none."""
        histories: dict[HistoryKey, KVHistory] = {}
        for kind in KINDS:
            for (name, visit), own in self.group_histories(kind).items():
                joined = join_modules(name, own)
                histories |= own if joined is None else {(name, kind, visit, 0): joined}
        return self if histories.keys() == self.histories.keys() else replace(self, histories=histories)

    def list_ordered_layers(self, kinds: Sequence[str], part: str | None) -> list[tuple[str, int]]:
        """Return kind and number, among the layers of that kind, of the layers of some kinds, in the order they first ran."""
        places: dict[tuple[str, str], list[int]] = {}
        for place, call in enumerate(self.calls):
            places.setdefault((call.name, call.kind), []).append(place)
        visits = {kind: self.list_visits(kind, part) for kind in kinds}
        layers = {kind: self.name_layers(kind) for kind in kinds}
        first: dict[tuple[str, int], int] = {}
        for key in (*self.histories, *self.implicit_histories):
            name, kind, *_ = key
            own = places.get((name, kind))  # the calls of a module come in the order of its visits
            place = own.pop(0) if own else len(self.calls)
            layer = layers.get(kind, {}).get(key)
            if layer is not None and layer in visits[kind]:
                first.setdefault((kind, visits[kind].index(layer)), place)
        return sorted(first, key=lambda layer: first[layer])

    def find_gap(self, layers: Sequence[tuple[str, int | str]], part: str | None) -> tuple[str, str] | None:
        """Return two modules of successive layers, by kind and number or name, of which the later does not read the earlier.

        Layers of different forwards may, unless they are in different parts of the model. None if each reads the one before.
        """
        components = dict(zip(self.known_paths, list_components(self.known_paths), strict=False))
        visits = [(self.find_visit(layer, kind, part), kind) for kind, layer in layers]
        modules = [next(iter(self.find_module_histories(*visit).values())) for visit in visits]
        for before, after in pairwise(modules):
            theirs, own = before.links, after.links
            if theirs is None or own is None or theirs.forward != own.forward:
                is_apart = part is None and components.get(before.name) != components.get(after.name)
            else:
                is_apart = theirs.number in (own.number, *own.beside)
            if is_apart:
                return before.name, after.name
        return None

    def list_named_visits(self, layer: str, kind: str, part: str | None) -> list[tuple[str, int]]:
        """Return a module with the number of each of its visits of a kind; none if it is not in the part."""
        layers = self.name_layers(kind)
        own = [key for key in layers if part is None or is_in_part(key[0], part, self.known_paths)]
        joined = [layers[key] for key in own if layers[key][0] == layer]
        return list(dict.fromkeys(joined or [(key[0], key[2]) for key in own if key[0] == layer]))

    def find_histories(self, layer: int | str, kind: str, part: str | None) -> list[KVHistory]:
        """Return the histories of a layer: one for each call that one visit of its module makes, or one of all its modules."""
        visit = self.find_visit(layer, check_choice("kind", kind, KINDS), part)
        own = self.find_module_histories(visit, kind)
        joined = join_modules(visit[0], own)
        return [*own.values()] if joined is None else [joined]

    def find_module_histories(self, visit: tuple[str, int], kind: str) -> dict[HistoryKey, KVHistory]:
        """Return the histories of a layer, or of a module of one, by its name and visit: of each of its modules."""
        own = {key: one for key, one in self.histories.items() if key[1] == kind and (key[0], key[2]) == visit}
        return self.group_histories(kind).get(visit) or order_by_memory(own)

    def group_histories(self, kind: str) -> dict[tuple[str, int], dict[HistoryKey, KVHistory]]:
        """Return the histories of each layer with a softmax, by its name and visit."""
        groups: dict[tuple[str, int], dict[HistoryKey, KVHistory]] = {}
        for key, layer in self.name_layers(kind).items():
            groups.setdefault(layer, {})[key] = self.histories[key]
        return {layer: order_by_memory(own) for layer, own in groups.items()}

    def find_path(self, layer: int | str, kind: str, part: str | None) -> str:
        """Return the path of a layer's module, or of the first of several."""
        visit = self.find_visit(layer, kind, part)
        return next((key[0] for key, own in self.name_layers(kind).items() if own == visit), visit[0])

    def find_implicit_histories(self, layer: int | str, part: str | None) -> list[ImplicitHistory]:
        """Return the histories of a layer without a softmax: one for each call that one visit of its module makes."""
        visit = self.find_visit(layer, IMPLICIT, part)
        return [history for (name, _, turn, _), history in self.implicit_histories.items() if (name, turn) == visit]

    def find_visit(self, layer: int | str, kind: str, part: str | None) -> tuple[str, int]:
        """Return the module of a layer and the number of its visit. Raises ConfigError if it was not recorded."""
        visits = self.list_visits(kind, part)
        if isinstance(layer, str):
            named = self.list_named_visits(layer, kind, part)
            if not named:
                kinds = [one for one in (*KINDS, IMPLICIT) if self.list_named_visits(layer, one, part)]
                if kinds:
                    raise MissingNameError(
                        f"no {kind} attention of {describe_value(layer)} was recorded: it has {join_names(kinds)} attention. "
                        f"Pass kind={kinds[0]!r}."
                    )
                others = [one for one in self.names if one != layer]
                raise MissingNameError(
                    f"no {kind} attention of {describe_value(layer)} was recorded. Recorded: {join_names(others)}."
                )
            if len(named) > 1:
                raise ConfigError(
                    f"{describe_module(layer)} ran {len(named)} times in one forward: pass the number of a run, layer=0 to "
                    f"{len(visits) - 1}, or use recording[{layer!r}]."
                )
            return named[0]
        number = check_integer("layer", layer, " or a module's name")
        if not visits:
            other = [one for one in (*KINDS, IMPLICIT) if one != kind and self.list_visits(one, part)]
            hint = f", but {join_names(other)} attention: pass kind={other[0]!r}" if other else ""
            raise OutOfRangeError(f"no {kind} attention was recorded{hint}.")
        if not -len(visits) <= number < len(visits):
            raise OutOfRangeError(
                f"layer must be below {len(visits)}, the recorded {kind} attentions; got {describe_value(number)}."
            )
        return visits[number]

    def __repr__(self) -> str:
        return f"Run({count_calls(len(self.calls), len(self.names))})"


def are_of_several_modules(own: Mapping[HistoryKey, KVHistory]) -> bool:
    """Return whether the histories of a layer are of several modules, or of several visits of one."""
    return len({(key[0], key[2]) for key in own}) > 1


def join_modules(name: str, own: Mapping[HistoryKey, KVHistory]) -> KVHistory | None:
    """Return one history of the histories of a layer of this name, if they are of several modules."""
    return join_head_histories(name, [*own.values()]) if are_of_several_modules(own) else None


def order_by_memory(own: dict[HistoryKey, KVHistory]) -> dict[HistoryKey, KVHistory]:
    """Return the histories of one module in the order in which their queries lie in one memory, if they do."""
    places = {key: history.stored_calls[0].part.row_range for key, history in own.items()}
    ranges = {key: place for key, place in places.items() if place is not None}
    if len(own) < 2 or len(ranges) < len(own) or are_of_several_modules(own):
        return own
    return {key: own[key] for key in sorted(own, key=ranges.__getitem__)}

"""Recording: what a model attended to, call by call, and as one map for each layer."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, MissingNameError, OutOfRangeError
from regard.map import AttentionMap
from regard.mechanism.arguments import check_choice, check_instance, check_path, check_whole, describe
from regard.mechanism.masks import Documents
from regard.mechanism.rule import EVERYTHING
from regard.observe import files
from regard.observe.doors.passage import Missed
from regard.observe.packing import pack
from regard.observe.strand import Piece, Strand
from regard.observe.words import TwoTexts, Words, sides
from regard.printable import escape_controls
from regard.shown import Shown

DECODERS = ("decoder", "language_model", "text_decoder")  # of several parts of a model, the one meant where none is said
KINDS = ("self", "cross")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention: the path of the innermost module it came from, self or cross, and the step of its run."""

    strand: Strand = field(repr=False)
    piece: Piece = field(repr=False)

    @property
    def name(self) -> str:
        """The path of the module in the model."""
        return self.strand.name

    @property
    def kind(self) -> str:
        """Whether keys come from where queries come from: self or cross."""
        return self.strand.kind

    @property
    def step(self) -> int:
        """Which forward of its run: 0 is the prompt, and every one after it continues through a cache."""
        return self.piece.step

    @property
    def map(self) -> AttentionMap:
        """Its map (b, h, q, k): the queries of this call on all keys it could see."""
        return self.strand.map_of(self.piece)

    def __repr__(self) -> str:
        q, k = self.piece.q, self.piece.stop - self.piece.first
        return f"Call({self.name!r}, {self.kind}, step {self.step}, (b, h, q, k) = {(*q.shape[:3], k)})"


Key = tuple[str, str, int, int]  # name, kind, which visit of the module in a forward, which call in the visit


@dataclass(eq=False)
class Run:
    """One forward of the model, or a prompt and the steps that continued it."""

    strands: dict[Key, Strand] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    turns: dict[int, Tensor] = field(default_factory=dict)
    rows: list[int | None] = field(default_factory=list)  # of its maps, of each sequence that generate returned; None: of none

    @property
    def names(self) -> list[str]:
        """The modules that were recorded, in the order they first ran."""
        return list(dict.fromkeys(call.name for call in self.calls))

    @property
    def parts(self) -> list[str]:
        """The parts of a model that has several: encoder and decoder, or towers; empty for any other."""
        paths = [re.sub(r"\d+", "*", name).split(".") for name in self.names]
        for components in zip(*paths, strict=False):
            if len(set(components)) > 1:
                lengths = {len(path) for path in paths}
                last = len(lengths) == 1 and components == tuple(path[-1] for path in paths)
                return [] if last else list(dict.fromkeys(components))
        return []

    def layers(self, kind: str = "self", part: str | None = None) -> list[str]:
        """The modules of a kind and a part, in the order they first ran; one that a forward visits n times, n times."""
        return [name for name, _ in self.visits(kind, part)]

    def visits(self, kind: str, part: str | None) -> list[tuple[str, int]]:
        """The same, with the visit."""
        check_choice("kind", kind, KINDS)
        if part is None:
            part = next((one for one in self.parts if one in DECODERS), None)
        elif not any(inside(name, check_instance("part", part, str)) for name in self.names):
            raise MissingNameError(
                f"part {describe(part)} is in no recorded module's path. The parts are: {', '.join(self.parts) or 'none'}."
            )
        return [(name, visit) for name, visit in self.visited(kind) if part is None or inside(name, part)]

    def visited(self, kind: str) -> list[tuple[str, int]]:
        """The same of all parts."""
        return list(dict.fromkeys((name, visit) for name, one, visit, _ in self.strands if one == kind))

    def map(self, layer: int | str, head: int | None = None, kind: str = "self", part: str | None = None) -> AttentionMap:
        """The map of a layer, (b, h, q, k), or of one head of it, (b, 1, q, k); all steps of the run in one.

        layer is a module's name, or counts the modules of that kind in the order they first ran; head is its number in the
        model, whichever were recorded; part is "encoder",
        "decoder" or another component of their path, the decoder where a model has one. Raises ConfigError for a layer,
        a head or a part that was not recorded.
        """
        strands = self.of(layer, kind, part)
        found, heads = joined(strands), strands[0].heads
        if head is None:
            return found
        head = check_whole("head", head, ", or None for all")
        if head in heads:
            return found.select(heads=[heads.index(head)])
        if strands[0].chosen is None and -len(heads) <= head < 0:
            return found.select(heads=[head])
        kept = f"below {len(heads)}" if strands[0].chosen is None else f"one of {listed(list(map(str, heads)))}"
        raise OutOfRangeError(f"head must be {kept}, the heads that were recorded; got {describe(head)}.")

    def heads(self, layer: int | str, kind: str = "self", part: str | None = None) -> tuple[int, ...]:
        """The numbers in the model of the heads that were recorded of a layer, in the order in which its map has them."""
        return self.of(layer, kind, part)[0].heads

    def values(self, layer: int | str, kind: str = "self", part: str | None = None) -> Tensor | None:
        """The values (b, g, k, e) of a layer; None where record was not asked to keep them."""
        strands = self.of(layer, kind, part)
        found = [strand.values() for strand in strands]
        kept = [x for x in found if x is not None]
        return torch.cat(kept, 2) if kept and len(kept) == len(found) else None

    def of(self, layer: int | str, kind: str, part: str | None) -> list[Strand]:
        """What is kept of a layer: a strand for each call that one visit of its module makes."""
        visits = self.visits(kind, part)
        if isinstance(layer, str):
            named = [
                (name, visit) for name, visit in self.visited(kind) if name == layer and (part is None or inside(name, part))
            ]
            if not named:
                others = [one for one in self.names if one != layer]
                raise MissingNameError(f"no {kind} attention of {describe(layer)} was recorded. Recorded: {listed(others)}.")
            if len(named) > 1:
                raise ConfigError(
                    f"{layer} ran {len(named)} times in one forward: count its runs by a number, layer=0 to {len(visits) - 1}, "
                    f"or take them from recording[{layer!r}]."
                )
            visit = named[0]
        elif not -len(visits) <= check_whole("layer", layer, " or a module's name") < len(visits):
            other = [one for one in KINDS if one != kind and self.visits(one, part)]
            hint = f" There is {' and '.join(other)} attention: kind=." if other and not visits else ""
            raise OutOfRangeError(
                f"layer must be below {len(visits)}, the {kind} attentions recorded; got {describe(layer)}.{hint}"
            )
        else:
            visit = visits[layer]
        return [strand for (name, one, turn, _), strand in self.strands.items() if (name, turn) == visit and one == kind]

    def __repr__(self) -> str:
        return f"Run({len(self.calls)} calls of {len(self.names)} modules)"


@dataclass(eq=False)
class Recording(Shown):
    """What was recorded: every call, every run, and one map for each layer of the last run."""

    model: str = ""
    runs: list[Run] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    tokens: Words | None = None  # for both axes, or {"rows": of the queries, "columns": of the keys}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, TwoTexts.of(value) if name == "tokens" else value)

    @property
    def calls(self) -> list[Call]:
        """All calls of all runs, in order."""
        return [call for run in self.runs for call in run.calls]

    @property
    def names(self) -> list[str]:
        """The modules that were recorded, in the order they first ran."""
        return list(dict.fromkeys(call.name for call in self.calls))

    def __getitem__(self, name: str) -> list[Call]:
        """The calls of a module, by its path."""
        check_instance("a name in a recording", name, str, "recording.calls[n] is a call by number.")
        found = [call for call in self.calls if call.name == name]
        if not found:
            raise MissingNameError(f"no call of {describe(name)} was recorded. Recorded: {listed(self.names)}.")
        return found

    def __iter__(self) -> Iterator[str]:
        """The names of the modules that were recorded, as those of a dictionary of their calls."""
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        """Whether a module of this name was recorded."""
        return name in self.names

    @property
    def last(self) -> Run:
        """The last run."""
        if not self.runs:
            why = f" {self.missed[0].module}: {self.missed[0].reason}." if self.missed else " The model was not called."
            raise ConfigError(f"nothing was recorded.{why}")
        return self.runs[-1]

    def layers(self, kind: str = "self", part: str | None = None) -> list[str]:
        """The modules of the last run, as `map` counts them."""
        return self.last.layers(kind, part)

    def map(self, layer: int | str, head: int | None = None, kind: str = "self", part: str | None = None) -> AttentionMap:
        """The map of a layer of the last run, or of one head of it; see Run.map."""
        return self.last.map(layer, head, kind, part)

    def heads(self, layer: int | str, kind: str = "self", part: str | None = None) -> tuple[int, ...]:
        """The numbers of the heads that were recorded of a layer of the last run, in the order in which its map has them."""
        return self.last.heads(layer, kind, part)

    def values(self, layer: int | str, kind: str = "self", part: str | None = None) -> Tensor | None:
        """The values (b, g, k, e) of a layer of the last run; None where record was not asked to keep them."""
        return self.last.values(layer, kind, part)

    def words(self, layer: int | str, kind: str = "self", part: str | None = None) -> tuple[Words | None, Words | None]:
        """The words of the queries and of the keys of a layer of the last run, where `tokens` has them."""
        return sides(self.tokens, kind, self.last.of(layer, kind, part)[0].name)

    def save(self, path: str | Path) -> None:
        """Writes the recording to one file, which is whole or not there; regard.load reads it, to the bit."""
        files.write(Path(check_path("path", path)), *pack(self))

    def __repr__(self) -> str:
        missed = f", {len(self.missed)} missed" if self.missed else ""
        model = escape_controls(self.model)
        return f"Recording({model}, {len(self.runs)} runs, {len(self.calls)} calls of {len(self.names)} modules{missed})"


def joined(strands: list[Strand]) -> AttentionMap:
    """One map of the calls of one visit: of several, which pack sequences side by side, one below and beside the other."""
    maps = [strand.map() for strand in strands]
    if len(maps) == 1:
        return maps[0]
    asked = [one._request for one in maps]
    alike = {(one.q.shape[:2], one.q.shape[3], one.k.shape[1], one.scale, one.softcap) for one in asked}
    plain = all(one.mask == EVERYTHING and one.offset == 0 for one in asked)
    plain = plain and all(x is None for one in asked for x in (one.bias, one.sinks, one.weight))
    if len(alike) > 1 or not plain:
        raise ConfigError(
            f"{strands[0].name} calls attention {len(maps)} times in one forward: recording[name] has each of them."
        )
    lengths = torch.tensor([one.shape[2:] for one in maps]).T  # of queries, of keys
    ids = [torch.repeat_interleave(torch.arange(len(maps)), each) for each in lengths]
    q, k = torch.cat([one.q for one in asked], 2), torch.cat([one.k for one in asked], 2)
    return AttentionMap(q, k, Documents(*ids), scale=asked[0].scale, softcap=asked[0].softcap)


def inside(name: str, part: str) -> bool:
    """Whether a module's path has a part as a component, or as the beginning of one."""
    return any(component == part or component.startswith(f"{part}_") for component in name.split("."))


def listed(names: list[str], most: int = 6) -> str:
    """Names for a sentence, the first ones of many."""
    if not names:
        return "nothing"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

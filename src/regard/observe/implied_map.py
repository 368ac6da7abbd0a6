"""implied_map: the matrix of a layer that is linear in its values, found by running the layer with other values."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, ShapeError
from regard.map.implicit_map import ImplicitMap
from regard.mechanism.arguments import check_instance
from regard.observe.linear_response import NotLinearError, Response
from regard.observe.module_places import Name, Place, RepeatedModule, TokenLayout, Tokens, find_tokens

PROJECTIONS = (nn.Linear, nn.Conv1d)  # whose outputs may be values
WHOLE = ((1, 0),)
PARTS = (*WHOLE, (3, 2), (3, 1), (3, 0), (2, 1), (2, 0))  # of the channels of an output that are searched: thirds and halves
MOST_REASONS = 2  # of a message


def implied_map(module: nn.Module, *inputs: Any, values: Name | None = None, output: Name | None = None) -> ImplicitMap:
    """Return the matrix M (b, h, t, t) of a layer whose output is M v + c for values v, by running it with other values.

    values is where v passes: "part", the output of a submodule; "function:argument", an argument of a function, or of a
    method or part of the module; or a pair of this and a function that selects a view of the tensor. output is where M v + c
    passes: "part" or "function", its result; "part:argument"; "" is the module itself. The output of a function that is given
    the values is its result by default. What is not named is searched: among the outputs of linear layers and convolutions,
    whole or a third or half of their channels, from the last; and the output of the module and the inputs of its parts, from
    the last. c is the output for v = 0. -2 v must give M (-2 v) to the bit (within rounding if c is not 0), random values and
    their sum must agree within rounding, and each channel of the output must be made of one channel of v. Each column of M
    takes a run, and channels with the same matrix are a head. inputs are (b, t, ...), or (t, c), as the module takes them,
    and their t must be the length of one axis of v and of the output. The state of the module is as before afterwards.
    Raises ConfigError, with numbers, for what is not linear.
    """
    runner = RepeatedModule(check_instance("module", module, nn.Module), inputs)
    source = None if values is None else Place.parse("values", values)
    sources = runner.list_outputs(PROJECTIONS) if source is None else [source]
    if output is not None:
        reads = [Place.parse("output", output)]
    elif source is not None and source.argument is not None:
        reads = [Place(source.name)]
    else:
        reads = [Place(""), *runner.list_inputs()]
    search = Search(runner, sources, reads, find_tokens(inputs), PARTS if source is None else WHOLE)
    return search.find_map(is_named=source is not None and len(reads) == 1)


@dataclass(eq=False)
class Search:
    """A search for values and an output of a module that is a matrix times these, among some places and parts of channels."""

    runner: RepeatedModule
    sources: Sequence[Place]
    reads: Sequence[Place]
    tokens: Tokens
    parts: Sequence[tuple[int, int]]
    reasons: list[str] = field(default_factory=list)  # why outputs are none
    unread: list[str] = field(default_factory=list)  # why places have no tokens

    def find_map(self, is_named: bool) -> ImplicitMap:
        """Return the map of the first that is found; one that is not named has to mix tokens. Raises ConfigError if none is."""
        for response in self.iterate_responses():
            try:
                response.check_scale()
                response.check_sum()
                if is_named or response.mixes_tokens():
                    return response.build_map()
                self.reasons.append(f"{response.label}: each token is made of its own value alone.")
            except NotLinearError as error:
                self.reasons.append(str(error))
        told = [one for one in self.reasons if "does not depend" not in one] or self.reasons or self.unread
        name = type(self.runner.module).__name__
        beginning = "" if is_named else f"No output of {name} was found to be a matrix times values. "
        raise ConfigError(beginning + " ".join(dict.fromkeys(told[:MOST_REASONS] or ["It has no linear layers."])))

    def iterate_responses(self) -> Iterator[Response]:
        """Yield what the module makes of values at each place, from the last that it passes; note why of others it cannot."""
        own = self.runner.run([*self.sources, *self.reads])
        order = {place: -number for number, place in enumerate(own)}
        sources, reads = (sorted(places, key=lambda one: order.get(one, 1)) for places in (self.sources, self.reads))
        outputs = {read: rows for read in reads if (rows := self.find_rows(read, own)) is not None}
        found = [(source, rows) for source in sources if outputs and (rows := self.find_rows(source, own)) is not None]
        for source, rows in found:
            for count, part in self.parts:
                if not rows.shape[2] % count:
                    yield from self.build_responses(source, rows, count, part, outputs)

    def build_responses(
        self, source: Place, rows: Tensor, count: int, part: int, outputs: Mapping[Place, Tensor]
    ) -> Iterator[Response]:
        """Yield what the module makes of one of `count` parts of the channels of values (b, t, c), at each output."""
        name, values = f"{source} (part {part + 1} of {count})" if count > 1 else str(source), rows.chunk(count, 2)[part]

        def run(places: Iterable[Place], new: Tensor) -> dict[Place, Tensor]:
            chunks = [*rows.chunk(count, 2)]
            chunks[part] = new
            found = self.runner.run([*places], source, partial(replace_rows, source, self.tokens, torch.cat(chunks, 2)))
            return {place: read_rows(place, found, self.tokens) for place in places}

        same, zero, doubled = (run(outputs, new) for new in (values, torch.zeros_like(values), -2 * values))
        for read, output in outputs.items():
            if not torch.equal(same[read].nan_to_num(), output.nan_to_num()):
                self.reasons.append(f"{name} -> {read}: the same values give another output in a second run.")
                continue
            respond = partial(lambda read, new: run([read], new)[read], read)
            yield Response(f"{name} -> {read}", respond, values, output, zero[read], doubled[read])

    def find_rows(self, place: Place, found: Mapping[Place, Sequence[Tensor]]) -> Tensor | None:
        """Return the tensor that has passed a place as (b, t, c); None, with a note why, if there is none of tokens."""
        try:
            return read_rows(place, found, self.tokens)
        except ShapeError as error:
            self.unread.append(f"{place}: {error}.")
            return None


def read_rows(place: Place, found: Mapping[Place, Sequence[Tensor]], tokens: Tokens) -> Tensor:
    """Return the tensor that has passed a place as (b, t, c). Raises ShapeError unless it is one, of tokens."""
    calls = found.get(place, ())
    if len(calls) != 1 or not calls[0].is_floating_point():
        raise ShapeError(f"{len(calls)} tensors of numbers passed it in a run, not one")
    x = place.find(calls[0])
    return TokenLayout.from_tensor(x, tokens).read(x)


def replace_rows(place: Place, tokens: Tokens, rows: Tensor, x: Tensor) -> Tensor:
    """Return a copy of a tensor that passes a place with other rows (b, t, c)."""
    new = x.clone()
    view = place.find(new)
    view.copy_(TokenLayout.from_tensor(view, tokens).write(rows))
    return new

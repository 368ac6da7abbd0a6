"""The stored attention of one module in one run: the queries of every step, the keys once, and the rules."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.errors import ConfigError, TooLargeError
from regard.map import AttentionMap, DifferentiableMap
from regard.map.compressed_bias import compress_bias
from regard.mechanism.mask_algebra import EVERYTHING, Mask
from regard.mechanism.masks import Causal, Documents, Given, Window
from regard.mechanism.scores import default_scale, score_dtype
from regard.observe.interception.attention_call import ALONE, CallArguments, CallPart
from regard.observe.recorded_runs.data_flow import LayerLinks
from regard.observe.recorded_runs.part_names import describe_module
from regard.observe.stored_calls.call_graph import CallGraph
from regard.observe.stored_calls.mask_inference import ROWS, find_first_visible, fit_rule
from regard.observe.stored_calls.parent_rows import (
    compose_parent_rows,
    reorder_rows,
)

LIMIT = 2**30  # entries of the table of a whole run


@dataclass(eq=False, kw_only=True)
class StoredCall(CallArguments):
    """The arguments of one call as they are stored, v of its new keys only, and the range of the history's keys that it saw."""

    first: int  # index in the history of its first key
    stop: int  # end of its keys in the history, exclusive
    step: int
    part: CallPart = ALONE  # where its queries lie beside those of the calls before it in the same visit
    residual: Tensor | None = None  # (b, t, c), the output of the block that the call is in
    graph: CallGraph | None = None  # of the call, if it ran with gradients and values are kept; not saved


@dataclass(eq=False)
class KVHistory:
    """The calls of one module in one run, in order; later ones continue the first through a cache."""

    name: str
    kind: str
    parent_rows: "dict[int, Tensor]"  # of the run: step to each row's parent row in the previous step
    stored_calls: list[StoredCall] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)  # (b, g, n, d), new at some step
    steps: list[int] = field(default_factory=list)  # of each entry of `keys`
    past: int = 0  # number of keys before the first query
    longest: int = 0  # number of keys before tokens were cut, whose slots may still hold them
    start: int | None = None  # number of tokens of the text before its first key, as the length of its cache states it
    selected_heads: tuple[int, ...] | None = None  # the numbers in the model of the stored heads; None for all
    block: str | None = None  # the path of the module whose outputs are kept as the residual stream
    modules: "tuple[KVHistory, ...]" = ()  # whose heads it joins, if they are those of several
    links: LayerLinks | None = None  # which layers of its forward it may depend on; None where that is not known

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers in the model of the heads that are stored."""
        return tuple(range(self.stored_calls[0].q.shape[1])) if self.selected_heads is None else self.selected_heads

    @property
    def total(self) -> int:
        """The number of keys."""
        return self.stored_calls[-1].stop if self.stored_calls else sum(x.shape[2] for x in self.keys)

    def join_newest_keys(self, known: int, step: int) -> Tensor:
        """Return the first `known` keys, (b, g, k, d), in the row order of a step; a view if they are of one step."""
        parts = [keys for _, keys in self.iterate_newest_keys(max(known, 1), step)][::-1]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 2))[:, :, :known]

    def iterate_newest_keys(self, known: int, wanted: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the entries of the first `known` keys and their starts, the newest first, in the row order of a step."""
        rows: Tensor | None = None
        start = sum(keys.shape[2] for keys in self.keys)
        for step, keys in zip(reversed(self.steps), reversed(self.keys), strict=True):
            rows = compose_parent_rows(self.parent_rows, rows, step, wanted)
            wanted, start = min(wanted, step), start - keys.shape[2]
            if start < known:
                yield start, (keys if rows is None else keys[rows.to(keys.device)])[:, :, : known - start]

    def get_key(self, index: int) -> Tensor:
        """Return one key of all rows and heads, (b, g, d), in the row order of the last step. IndexError past the end."""
        if self.keys and index < self.keys[0].shape[2]:
            return self.reorder_rows(self.keys[0][:, :, index], self.steps[0], self.stored_calls[-1].step)
        start = self.total
        for step, keys in zip(reversed(self.steps), reversed(self.keys), strict=True):
            start -= keys.shape[2]
            if index >= start:
                return self.reorder_rows(keys[:, :, index - start], step, self.stored_calls[-1].step)
        raise IndexError(index)

    def reorder_rows(self, x: Tensor, made: int, wanted: int) -> Tensor:
        """Reorder the batch rows of x, made at one step, to those of a later step."""
        return reorder_rows(self.parent_rows, x, made, wanted)

    def fork(self, parent_rows: "dict[int, Tensor]") -> "KVHistory":
        """Return a history with the same calls, which another run continues."""
        return replace(self, parent_rows=parent_rows, stored_calls=[*self.stored_calls], keys=[*self.keys], steps=[*self.steps])

    def crop(self, known: int) -> "KVHistory":
        """Return the history of a cache that was cut to its first `known` keys."""
        shorter = replace(self, stored_calls=[], keys=[], steps=[], longest=max(self.longest, self.total))
        start = 0
        for keys, step in zip(self.keys, self.steps, strict=True):
            if start < known:
                shorter.keys.append(keys[:, :, : known - start])
                shorter.steps.append(step)
            start += keys.shape[2]
        left = known - self.past
        for stored in self.stored_calls:
            rows = min(stored.q.shape[2], left)
            if rows > 0:
                shorter.stored_calls.append(truncate_call(stored, rows, known))
            left -= rows
        return shorter

    def drop_queries(self, count: int) -> "KVHistory":
        """Return the history of cross attention without its last `count` queries, whose tokens were cut from the decoder."""
        left, stored_calls = sum(stored.q.shape[2] for stored in self.stored_calls) - count, list[StoredCall]()
        for stored in self.stored_calls:
            rows = min(stored.q.shape[2], left)
            if rows > 0:
                stored_calls.append(replace(truncate_call(stored, rows, stored.stop), v=stored.v))
            left -= rows
        return replace(self, stored_calls=stored_calls) if stored_calls else self

    def check_unchanged(self) -> None:
        """Raise ConfigError if the stored tensors share memory with a graph and the model has written to it."""
        for stored in self.stored_calls:
            if stored.graph is not None:
                stored.graph.check_unchanged()

    def join_keys(self, stop: int, step: int, first: int = 0) -> Tensor:
        """Return the keys from first to stop, (b, g, k, d), in the row order of a step."""
        self.check_unchanged()
        return self.join_newest_keys(stop, step)[:, :, first:]

    def build_call_map(self, stored: StoredCall) -> AttentionMap:
        """Return the map of one call."""
        keys = self.join_keys(stored.stop, stored.step, stored.first)
        return stored.build_map(keys)

    def build_map(self) -> AttentionMap:
        """Return the map of all calls, as if they had been one."""
        if len(self.stored_calls) == 1:
            return self.build_call_map(self.stored_calls[0])
        self.require_one_formula()
        last = self.stored_calls[-1]
        stop, step, scale = last.stop, last.step, last.scale
        k, parts = self.join_keys(stop, step), [self.reorder_rows(stored.q, stored.step, step) for stored in self.stored_calls]
        scales = [default_scale(stored.q) if stored.scale is None else stored.scale for stored in self.stored_calls]
        if len(set(scales)) > 1:  # as of a temperature that depends on the length
            k, scale = k.to(score_dtype(k.dtype)), 1.0
            parts = [q.to(k.dtype) * own for q, own in zip(parts, scales, strict=True)]
        q = torch.cat(parts, 2)
        mask, bias = self.infer_rule(stop), self.join_biases(q, stop)
        return last.build_map(k, q=q, mask=mask, bias=bias, offset=self.past, scale=scale)

    def require_one_formula(self) -> None:
        """Raise ConfigError if calls differ in what a map has once for all of its rows, other than the scale."""
        last = self.stored_calls[-1]
        for stored in self.stored_calls:
            pairs = (stored.sinks, last.sinks), (stored.weight, last.weight)
            same = all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)
            if not same or stored.softcap != last.softcap:
                raise ConfigError(
                    f"the steps of {describe_module(self.name)} differ in their sinks or softcap, so they are no single map: "
                    f"recording[{self.name!r}] has the map of each."
                )

    def build_differentiable_map(self) -> DifferentiableMap:
        """Return the map of the only call, with the graph of its queries and keys. Raises ConfigError where there is none."""
        stored, graph = self.stored_calls[0], self.stored_calls[0].graph
        found = self.build_map()
        has_graph = graph is not None and (graph.q.requires_grad or graph.k.requires_grad)
        if graph is None or not has_graph or len(self.stored_calls) > 1 or stored.q.dtype != graph.dtype:
            why = "it was recorded without values or without gradients"
            if len(self.stored_calls) > 1:
                why = "it made several calls, the steps of a cache"
            elif graph is not None:
                why = f"its queries and keys are stored in {stored.q.dtype}, not in {graph.dtype}"
                if not has_graph:
                    why = "its queries and keys need no gradient, as those of weights that are stored as they are"
            raise ConfigError(
                f"the map of {describe_module(self.name)} has no graph to its queries and keys: {why}. Record one "
                "forward with keep='values' alone, outside torch.no_grad()."
            )
        heads, share = list(self.heads), graph.q.shape[1] // graph.k.shape[1]
        q, k = graph.q.to(graph.dtype), graph.k.to(graph.dtype)[:, :, stored.first : stored.stop]
        if self.selected_heads is not None:
            q, k = q[:, heads], k[:, [head // share for head in heads]]
        return DifferentiableMap(found, q, k)

    def join_values(self) -> Tensor | None:
        """Return the values of all keys, (b, g, k, e); None if they were not kept."""
        self.check_unchanged()
        step = self.stored_calls[-1].step
        parts = [self.reorder_rows(stored.v, stored.step, step) for stored in self.stored_calls if stored.v is not None]
        if len(parts) < len(self.stored_calls):
            return None
        return parts[0] if self.kind == "cross" else torch.cat(parts, 2)

    def join_residuals(self) -> Tensor | None:
        """Return the residual stream after the block at all queries, (b, t, c); None if it was not kept."""
        last = self.stored_calls[-1].step
        parts = [
            self.reorder_rows(stored.residual, stored.step, last) for stored in self.stored_calls if stored.residual is not None
        ]
        return torch.cat(parts, 1) if len(parts) == len(self.stored_calls) else None

    def infer_rule(self, stop: int) -> Mask:
        """Return the rule of all calls on all keys: the simplest one that fits every call, else its table.

        Raises TooLargeError if the table would have more than LIMIT entries.
        """
        for rule in self.propose_rules(stop):
            found = fit_rule(rule, self.past, self.iterate_tables(stop))
            if found is not None:
                return found
        tables = [table for _, table in self.iterate_tables(stop)]
        rows = sum(table.shape[2] for table in tables)
        if math.prod(find_table_size(tables)) * rows * stop > LIMIT:
            raise TooLargeError(
                f"the mask of {rows:,} queries of many calls on {stop:,} keys has no known form, and its table is too large."
            )
        return Given.from_shared_table(stack_tables(tables))

    def propose_rules(self, stop: int) -> Iterator[Mask]:
        """Yield rules that all calls may follow, apart from keys hidden from all queries."""
        last = self.compute_table(self.stored_calls[-1], torch.tensor([self.stored_calls[-1].q.shape[2] - 1]), stop)
        furthest = int((stop - 1 - last.to(torch.uint8).argmax(-1)).max())
        yield from (EVERYTHING, Causal(), Causal() & Window(furthest))
        if not self.past:  # chunks: each query sees from the start of its chunk
            ids = [find_first_visible(table, queries) for queries, table in self.iterate_tables(stop)]
            yield Causal() & Documents(torch.cat([x.expand(max(map(len, ids)), -1) for x in ids], 1))

    def iterate_tables(self, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all queries in blocks, each with the table of the keys they see among all keys."""
        start = 0
        for stored in self.stored_calls:
            count = stored.q.shape[2]
            for part in torch.arange(count, device=stored.q.device).split(ROWS):
                yield part + start, self.compute_table(stored, part, stop)
            start += count

    def compute_table(self, stored: StoredCall, queries: Tensor, stop: int) -> Tensor:
        """Return which of all keys some queries of a call see, (b or 1, h or 1, n, k), in the row order of the last step."""
        queries = queries.to(stored.q.device)
        keys = torch.arange(stored.stop - stored.first, device=queries.device)
        seen = stored.mask.block(queries, keys, stored.offset)
        whole = torch.zeros(*seen.shape[:2], len(queries), stop, dtype=torch.bool, device=queries.device)
        whole[..., stored.first : stored.stop] = seen
        return self.reorder_rows(whole, stored.step, self.stored_calls[-1].step) if len(whole) > 1 else whole

    def join_biases(self, q: Tensor, stop: int) -> Tensor | None:
        """Return the biases of the calls, concatenated along the queries; None if there are none."""
        if all(stored.bias is None for stored in self.stored_calls):
            return None
        rows = []
        for stored in self.stored_calls:
            whole = q.new_zeros(*((1, 1) if stored.bias is None else stored.bias.shape[:2]), stored.q.shape[2], stop)
            if stored.bias is not None:
                whole[..., stored.first : stored.stop] = stored.bias
            rows.append(self.reorder_rows(whole, stored.step, self.stored_calls[-1].step) if len(whole) > 1 else whole)
        return compress_bias(stack_tables(rows))


def find_table_size(parts: list[Tensor]) -> list[int]:
    """Return the largest numbers of batch rows and of heads among tables (b or 1, h or 1, n, k)."""
    return [max(part.shape[axis] for part in parts) for axis in (0, 1)]


def stack_tables(parts: list[Tensor]) -> Tensor:
    """Expand tables (b or 1, h or 1, n, k) to the same batch and heads and concatenate them along the queries."""
    return torch.cat([part.expand(*find_table_size(parts), -1, -1) for part in parts], 2)


def truncate_call(stored: StoredCall, rows: int, known: int) -> StoredCall:
    """Return a stored call reduced to its first queries and the history's first keys."""
    keys = min(stored.stop, known) - stored.first
    bias = stored.bias if stored.bias is None else stored.bias[:, :, :rows, :keys]
    mask = stored.mask.truncate(rows, keys)
    v = stored.v if stored.v is None else stored.v[:, :, : stored.v.shape[2] - stored.q.shape[2] + rows]
    residual = None if stored.residual is None else stored.residual[:, :rows]
    shorter = replace(stored, q=stored.q[:, :, :rows], v=v, stop=stored.first + keys, mask=mask, bias=bias)
    return replace(shorter, residual=residual, graph=None)

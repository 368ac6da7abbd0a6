"""The recorded attention without a softmax of one module in one run: the factors of every step, joined to those of one call."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map import factors
from regard.map.compressed_bias import compress_bias
from regard.map.convolution import Convolution
from regard.map.implicit_map import ImplicitMap, Mechanism, SampledOutputs
from regard.map.linear_recurrence import LinearRecurrence
from regard.map.scored_matrix import ScoredMatrix
from regard.map.stored_matrix import JoinedMatrices, StoredMatrix
from regard.observe.interception.recurrent.recurrence_call import RecurrenceFactors
from regard.observe.stored_calls.call_graph import OutputGraph
from regard.observe.stored_calls.parent_rows import RowMatch, match_rows, reorder_rows
from regard.observe.stored_calls.tensor_store import Store

SAMPLED_ROWS = 64  # outputs of a call that are stored, for the certificate of its map
STATE_TOLERANCE = 1e-2  # relative to a state's norm: a cache in bfloat16 rounds by 4e-3


@dataclass(eq=False)
class StoredRecurrence:
    """One stored call: its factors, its values (b, h, t, e), some of its outputs (b, h, n, e), and the state that it left."""

    mechanism: Mechanism
    values: Tensor
    queries: Tensor  # (n,), of the outputs
    outputs: Tensor
    gates: Tensor | None  # (b, h, n, e), of the outputs; None if the function did not gate them
    state: Tensor | None  # (b, n), a sample
    step: int
    graph: OutputGraph | None = None  # of the call, if it ran with gradients and values are kept; not saved

    @classmethod
    def copy_factors(
        cls, found: RecurrenceFactors, store: Store, step: int, graph: OutputGraph | None = None
    ) -> "StoredRecurrence":
        """Return a stored call with copies of what a call computed; numbers with two names are stored once."""
        length = found.outputs.shape[2]
        queries = torch.arange(min(SAMPLED_ROWS, length)) * length // max(min(SAMPLED_ROWS, length), 1)
        outputs, gates = (
            None if x is None else x.detach()[:, :, queries.to(x.device)].contiguous() for x in (found.outputs, found.gates)
        )
        assert outputs is not None
        copies: dict[Any, Tensor] = {}
        tensors = found.mechanism.tensors
        if isinstance(found.mechanism, ScoredMatrix) and found.mechanism.bias is not None:
            tensors["bias"] = compress_bias(found.mechanism.bias)
        for x in tensors.values():
            if identify_numbers(x) not in copies:
                copies[identify_numbers(x)] = store.copy_tensor(x.detach())
        given = {name: (copies[identify_numbers(x)], x.shape) for name, x in tensors.items()}
        stored: dict[str, Any] = {name: x if x.shape == shape else x.view(shape) for name, (x, shape) in given.items()}
        return cls(
            replace(found.mechanism, **stored),
            store.copy_tensor(found.values.detach()),
            queries,
            outputs,
            gates,
            None if found.state is None else found.state.detach(),
            step,
            graph,
        )

    def keep_gradients(self, found: RecurrenceFactors) -> None:
        """Replace the factors and the values by copies with the gradients of what a call computed."""
        self.mechanism, self.values = found.copy_mechanism(), found.values.clone()

    def detach(self) -> None:
        """Replace the factors and the values by what they are without gradients."""
        detached: dict[str, Any] = {name: x.detach() for name, x in self.mechanism.tensors.items()}
        self.mechanism, self.values = replace(self.mechanism, **detached), self.values.detach()

    def truncate(self, tokens: int) -> "StoredRecurrence":
        """Return the call of a convolution reduced to its first tokens; the state that it left after them is not known."""
        assert isinstance(self.mechanism, Convolution)
        count = int((self.queries < tokens).sum())
        return replace(
            self,
            mechanism=replace(self.mechanism, length=tokens),
            values=self.values[:, :, :tokens],
            queries=self.queries[:count],
            outputs=self.outputs[:, :, :count],
            gates=None if self.gates is None else self.gates[:, :, :count],
            state=None,
            graph=None,
        )


def identify_numbers(x: Tensor) -> tuple[Any, ...]:
    """Return what two tensors with the same numbers in the same memory have in common, whatever their axes of 1."""
    axes = tuple((size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    return x.data_ptr(), x.dtype, axes


@dataclass(eq=False)
class ImplicitHistory:
    """The recurrences of one module in one run, in order; each later one continues the state that the one before left."""

    name: str
    parent_rows: dict[int, Tensor] = field(default_factory=dict)  # step to each row's parent row in the previous step
    stored_calls: list[StoredRecurrence] = field(default_factory=list)
    kind: str = "implicit"
    selected_heads: None = None  # all heads are stored

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers in the model of the heads that are stored: all, or the channels of a recurrence without heads."""
        return tuple(range(self.stored_calls[0].mechanism.shape[1]))

    @property
    def tensors(self) -> list[Tensor]:
        """Every stored tensor."""
        found = [
            x
            for one in self.stored_calls
            for x in (*one.mechanism.tensors.values(), one.values, one.outputs, one.gates, one.state)
        ]
        return [x for x in found if x is not None]

    @property
    def total(self) -> int:
        """The number of tokens."""
        return sum(one.mechanism.rows for one in self.stored_calls)

    @property
    def can_be_cropped(self) -> bool:
        """Whether a cache can cut its last tokens: those of a convolution, but not of a state that sums all tokens up."""
        return all(isinstance(one.mechanism, Convolution) for one in self.stored_calls)

    def crop(self, known: int) -> "ImplicitHistory":
        """Return a history of the first `known` tokens of a convolution."""
        shorter = replace(self, stored_calls=[])
        for stored in self.stored_calls:
            left = known - shorter.total
            if left >= stored.mechanism.rows:
                shorter.stored_calls.append(stored)
            elif left > 0:
                shorter.stored_calls.append(stored.truncate(left))
        return shorter

    def match_state(self, initial: Tensor | None) -> RowMatch | None:
        """Return the row of the state that this history's last call left for each row of an initial state (b, n), if it did."""
        left = self.stored_calls[-1].state
        if initial is None or left is None or left.shape[1:] != initial.shape[1:]:
            return None
        found = match_rows(left.unsqueeze(1), initial.detach().unsqueeze(1))
        return None if found is None or found.distance > STATE_TOLERANCE else found

    def append_call(self, stored: StoredRecurrence) -> None:
        """Append a call; the state that the one before left is dropped, since nothing else can continue it."""
        if self.stored_calls:
            self.stored_calls[-1].state = None
        self.stored_calls.append(stored)

    def fork(self) -> "ImplicitHistory":
        """Return a history with the same calls, which another run continues."""
        return replace(self, parent_rows={**self.parent_rows}, stored_calls=[*self.stored_calls])

    def build_call_map(self, stored: StoredRecurrence) -> ImplicitMap:
        """Return the map of one call: its tokens on all tokens up to its last."""
        until = next(n for n, one in enumerate(self.stored_calls) if one is stored) + 1
        before = sum(one.mechanism.rows for one in self.stored_calls[: until - 1])
        return self.build_joined_map(self.stored_calls[:until], stored.step, before)

    def build_map(self) -> ImplicitMap:
        """Return the map of all calls, as if they had been one."""
        return self.build_joined_map(self.stored_calls, self.stored_calls[-1].step, 0)

    def build_joined_map(self, calls: Sequence[StoredRecurrence], step: int, first: int) -> ImplicitMap:
        """Return the map of some calls joined, in the row order of a step, for the queries from `first` on."""
        ordered = [self.reorder_call(one, step) for one in calls]
        starts = [sum(one.mechanism.rows for one in calls[:n]) for n in range(len(calls))]
        queries = torch.cat([one.queries + start for one, start in zip(ordered, starts, strict=True)])
        outputs = factors.concatenate([one.outputs for one in ordered], 2)
        gates = [torch.ones_like(one.outputs) if one.gates is None else one.gates for one in ordered]
        is_gated = any(one.gates is not None for one in ordered)
        sampled = SampledOutputs(queries, outputs, factors.concatenate(gates, 2) if is_gated else None)
        values = factors.concatenate([one.values for one in ordered], 2)
        return ImplicitMap(
            join_mechanism_tokens([one.mechanism for one in ordered]), first=first, values=values, outputs=sampled
        )

    def reorder_call(self, stored: StoredRecurrence, step: int) -> StoredRecurrence:
        """Return a stored call whose batch rows are in the order of a later step."""
        rows = reorder_rows(self.parent_rows, torch.arange(len(stored.values)), stored.step, step)
        if len(rows) == len(stored.values) and torch.equal(rows, torch.arange(len(rows))):
            return stored
        values, outputs = (x[rows.to(x.device)] for x in (stored.values, stored.outputs))
        gates = None if stored.gates is None else stored.gates[rows.to(stored.gates.device)]
        return replace(stored, mechanism=stored.mechanism.select_rows(rows), values=values, outputs=outputs, gates=gates)

    def join_values(self) -> Tensor:
        """Return the values of all tokens, (b, h, t, e)."""
        step = self.stored_calls[-1].step
        return factors.concatenate([self.reorder_call(one, step).values for one in self.stored_calls], 2)


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of a module: the path of the innermost module that made it, its kind, and its step in the run."""

    history: Any = field(repr=False)
    stored: Any = field(repr=False)

    @property
    def name(self) -> str:
        """The path of the module in the model."""
        return str(self.history.name)

    @property
    def kind(self) -> str:
        """The kind of attention: self, cross, or implicit."""
        return str(self.history.kind)

    @property
    def step(self) -> int:
        """The number of the forward in its run: 0 is the prompt, later ones continue it through a cache."""
        return int(self.stored.step)


@dataclass(frozen=True, eq=False)
class ImplicitCall(RecordedCall):
    """One call of a recurrence, or of another formula without a softmax."""

    history: ImplicitHistory = field(repr=False)
    stored: StoredRecurrence = field(repr=False)

    @property
    def map(self) -> ImplicitMap:
        """The map (b, h, q, k) of this call's tokens on all tokens up to its last."""
        return self.history.build_call_map(self.stored)

    def __repr__(self) -> str:
        return f"ImplicitCall({self.name!r}, step {self.step}, {self.map})"


def join_mechanism_tokens(parts: Sequence[Mechanism]) -> Mechanism | JoinedMatrices:
    """Return the mechanism of consecutive calls. Raises ConfigError if they are of different kinds."""
    recurrences = [one for one in parts if isinstance(one, LinearRecurrence)]
    convolutions = [one for one in parts if isinstance(one, Convolution)]
    matrices = [one for one in parts if isinstance(one, ScoredMatrix | StoredMatrix)]
    if len(recurrences) == 1 and parts[0] is recurrences[0] and matrices and not convolutions:
        return JoinedMatrices([recurrences[0], *matrices])  # scores that decay, of a prompt, and of steps with a cache
    if sum(map(bool, (recurrences, convolutions, matrices))) > 1:
        raise ConfigError(
            "the calls of one layer are of different kinds, so they do not form one map: recording[name] has each of them."
        )
    if matrices:
        return matrices[0] if len(matrices) == 1 else JoinedMatrices(matrices)
    return LinearRecurrence.join_tokens(recurrences) if recurrences else Convolution.join_tokens(convolutions)


def join_head_maps(maps: Sequence[ImplicitMap]) -> ImplicitMap:
    """Return the map of several calls of one visit of a module as one, whose heads are those of the calls in order.

    Raises ConfigError if the calls do not have the same tokens.
    """
    if len(maps) == 1:
        return maps[0]
    kinds = {type(one.mechanism) for one in maps}
    if len(kinds) > 1 or len({one.shape[2:] for one in maps}) > 1 or len({one.mechanism.shape for one in maps}) > 1:
        raise ConfigError("the calls of one layer have different shapes: recording[name] has each of them.")
    recurrences = [one.mechanism for one in maps if isinstance(one.mechanism, LinearRecurrence)]
    convolutions = [one.mechanism for one in maps if isinstance(one.mechanism, Convolution)]
    matrices = [one.mechanism for one in maps if isinstance(one.mechanism, ScoredMatrix | StoredMatrix)]
    mechanism: Mechanism | JoinedMatrices
    if matrices:
        mechanism = JoinedMatrices(matrices, "heads")
    elif recurrences:
        mechanism = LinearRecurrence.join_heads(recurrences)
    elif convolutions:
        mechanism = Convolution.join_heads(convolutions)
    else:
        raise ConfigError("the calls of one layer have several steps each: recording[name] has each of them.")
    values = [one.values for one in maps if one.values is not None]
    outputs = [one.outputs for one in maps if one.outputs is not None]
    return ImplicitMap(
        mechanism,
        first=maps[0].first,
        values=torch.cat(values, 1) if len(values) == len(maps) else None,
        outputs=join_head_outputs(outputs) if outputs else None,
    )


def join_head_outputs(parts: Sequence[SampledOutputs]) -> SampledOutputs:
    """Return the sampled outputs of several calls with the same tokens, joined along the heads."""
    gates = [torch.ones_like(one.outputs) if one.gates is None else one.gates for one in parts]
    is_gated = any(one.gates is not None for one in parts)
    outputs = torch.cat([one.outputs for one in parts], 1)
    return SampledOutputs(parts[0].queries, outputs, torch.cat(gates, 1) if is_gated else None)

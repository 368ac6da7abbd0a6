"""Attribution: the gradient of a number with respect to each head's context, and the maps that follow from it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, overload

import torch
from torch import Tensor

from regard.errors import ConfigError, MissingNameError, OutOfRangeError
from regard.map import AttentionMap
from regard.map.attribution_map import AttributionMap
from regard.map.implicit_attribution_map import ImplicitAttributionMap
from regard.map.indexing import is_single, select_places
from regard.mechanism.arguments import check_choice, check_sequence, describe_value
from regard.observe.implicit_history import ImplicitCall, StoredRecurrence
from regard.observe.recorded_runs.part_names import describe_module
from regard.observe.recorded_runs.run import IMPLICIT, Run
from regard.observe.recorded_runs.token_mixers import list_token_mixers
from regard.observe.relevance import compute_cross_relevance, compute_self_relevance
from regard.observe.stored_calls.call_graph import OutputGraph
from regard.observe.stored_calls.joined_maps import have_equal_weights
from regard.observe.stored_calls.kv_history import KVHistory, StoredCall
from regard.observe.stored_calls.parent_rows import reorder_rows

FACTORS = {"gradient": "one", "pull": "weights", "cut": "cut"}  # of an AttributionMap, by the kind of map
KINDS = (*FACTORS, "scores")
IMPLICIT_KINDS = ("gradient", "pull")
ADVICE = (
    "Compiled code is recorded without gradients. Record the model uncompiled with keep='values', outside torch.no_grad() and "
    "torch.inference_mode(), and pass a number of that forward."
)


@dataclass(frozen=True, eq=False)
class Attribution:
    """What the weights of a run did to a number that it computed: maps of gradients, and relevance.

    The gradients are those with respect to the context of each head, (b, h, q, e): O(T) numbers, from which each entry follows.
    """

    run: Run
    gradients: Mapping[Any, Tensor] = field(repr=False)

    @overload
    def map(  # type: ignore[overload-overlap]
        self,
        layer: int | str,
        head: int | None = ...,
        kind: str = ...,
        *,
        attention: Literal["implicit"],
        part: str | None = ...,
    ) -> ImplicitAttributionMap: ...

    @overload
    def map(
        self, layer: int | str, head: int | None = ..., kind: str = ..., *, attention: str = ..., part: str | None = ...
    ) -> AttributionMap: ...

    def map(
        self,
        layer: int | str,
        head: int | None = None,
        kind: str = "pull",
        *,
        attention: str = "self",
        part: str | None = None,
    ) -> AttributionMap | ImplicitAttributionMap:
        """Return the map of a layer, (b, h, q, k), or of one of its heads; layer, head and part as recording.map takes them.

        kind "gradient" is ∂y/∂A_ij = g_i · v_j, with y the number, g_i its gradient with respect to the head's context at query
        i and v_j the value of key j; "pull" is A_ij ∂y/∂A_ij; "cut" is -A_ij / (1 - A_ij) g_i · (v_j - o_i), with o_i the
        context: by how much y changes, to first order in the context, if key j is hidden from query i and its other weights
        grow, as regard.CutEdges does it; "scores" is A_ij g_i · (v_j - o_i), the gradient with respect to the scores that the
        softmax takes. attention is "self" or "cross", or "implicit" for a layer without a softmax, of kind "gradient" or
        "pull", with its signed entries in place of A, and the output of its recurrence in place of the context.
        Raises ConfigError for a layer whose values were not kept or which the number does not depend on by a gradient.
        Source: gradient times attention, Chefer et al. 2021.
        """
        check_choice("kind", kind, KINDS)
        if attention == IMPLICIT:
            return self.build_implicit_map(layer, head, kind, part)
        weights: AttentionMap = self.run.map(layer, kind=attention, part=part)
        values: Tensor | None = self.run.values(layer, kind=attention, part=part)
        if values is None:
            raise ConfigError(f"the values of layer {layer} were not kept: record with keep='values'.")
        left = self.join_layer(self.gradients, layer, attention, part)
        if kind == "scores":
            found = AttributionMap.differentiate_scores(weights, left, values)
        else:
            found = AttributionMap(weights, left, values, factor=FACTORS[kind])
        if head is None:
            return found
        wanted = self.run.map(layer, head, kind=attention, part=part).planes.pairs[0][0][1]
        return found.select(heads=[wanted])

    def build_implicit_map(self, layer: int | str, head: int | None, kind: str, part: str | None) -> ImplicitAttributionMap:
        """Return the map of a layer without a softmax, or of one of its heads."""
        if kind not in IMPLICIT_KINDS:
            raise ConfigError(
                f"kind {kind!r} is of a softmax, whose other weights grow where one is hidden; without one, a hidden key takes "
                "its entry alone, so that the change is minus the pull. Pass kind='pull' or 'gradient'."
            )
        weights, found = self.run.map(layer, kind="implicit", part=part), []
        for history in self.run.find_implicit_histories(layer, part):
            last, parts = history.stored_calls[-1].step, []
            for stored in history.stored_calls:
                if stored not in self.gradients:
                    raise ConfigError(
                        f"the output of {describe_module(history.name)} has no graph to the number: {explain_no_graph(stored)}."
                    )
                gradient = self.gradients[stored]
                rows = reorder_rows(history.parent_rows, torch.arange(len(gradient)), stored.step, last)
                parts.append(gradient[rows.to(gradient.device)])
            found.append(join_queries(parts))
        assert weights.values is not None
        pull = ImplicitAttributionMap(weights, torch.cat(found, 1), weights.values, factor=FACTORS[kind])
        return pull if head is None else pull.select(heads=[head])

    def gradients_and_contexts(
        self, layer: int | str, *, attention: str = "self", part: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to the contexts of a layer, and the contexts, both (b, h, q, e)."""
        calls = [stored for stored in self.gradients if isinstance(stored, StoredCall)]
        contexts = {stored: stored.graph.context.detach() for stored in calls if stored.graph is not None}
        gradients = self.join_layer(self.gradients, layer, attention, part)
        return gradients, self.join_layer(contexts, layer, attention, part)

    def join_layer(self, tensors: Mapping[Any, Tensor], layer: int | str, attention: str, part: str | None) -> Tensor:
        """Return the tensors (b, h, q, e) of all calls of a layer along queries, or along e if these have equal weights."""
        histories = self.run.find_histories(layer, attention, part)
        if modules := histories[0].modules:
            return torch.cat([self.join_calls(history, tensors) for history in modules], 1)
        found = [self.join_calls(history, tensors) for history in histories]
        if len(found) > 1 and have_equal_weights([history.build_map().planes.request for history in histories]):
            return torch.cat(found, 3)
        return join_queries(found)

    def join_calls(self, history: KVHistory, tensors: Mapping[Any, Tensor]) -> Tensor:
        """Return the tensors (b, h, q, e) of all calls of a history along their queries, of the heads that were recorded."""
        last, found = history.stored_calls[-1].step, []
        for stored in history.stored_calls:
            tensor = tensors.get(stored)
            if tensor is None and stored.graph is not None:
                raise ConfigError(
                    f"{describe_module(history.name)} is not among the layers of this attribution: leave out "
                    "layers=, or add it."
                )
            if tensor is None:
                raise ConfigError(f"the context of {describe_module(history.name)} was not kept with its graph. {ADVICE}")
            if history.selected_heads is not None:
                tensor = tensor[:, list(history.selected_heads)]
            found.append(history.reorder_rows(tensor, stored.step, last))
        return join_queries(found)

    def relevance(
        self,
        queries: int | slice | list[int] | Tensor = -1,
        *,
        attention: Literal["self", "cross"] = "self",
        part: str | None = None,
    ) -> Tensor:
        """Return the relevance of each token for some queries, (b, n, t), or (b, t) for a single query.

        attention "self" is of the tokens of the queries' own text: R = (I + M_L) ... (I + M_1), of whose rows these are, where
        M_l is the mean over the heads of layer l of the positive part of the pull, max(0, A_ij ∂y/∂A_ij). It is computed from
        the last layer to the first, block by block. Layers without a softmax take part in the order they ran, with the entries
        of their signed matrices in place of A. "cross" is of the source tokens of an encoder-decoder model, through all
        layers of both. The layers and heads are those that were recorded: a recording made with layers= or heads= leaves the
        others out of the product and of the mean.
        Raises ConfigError if there is no such attention, ShapeError if queries and keys of a layer differ in number,
        OutOfRangeError for a query that is not there.
        Source: Chefer et al. 2021, "Generic attention-model explainability", equations 5 and 6, and 7 to 10 for "cross".
        """
        check_choice("attention", attention, ("self", "cross"))
        layers = list_token_mixers(self.run, None if attention == "self" else attention, part)
        places = self.run.map(layers[0][1], kind=layers[0][0], part=part).shape[2] if layers else 0
        chosen = select_places("queries", queries, places) if places else torch.zeros(1, dtype=torch.long)
        compute = compute_self_relevance if attention == "self" else compute_cross_relevance
        find_pull = cache(lambda layer, kind, one: self.map(layer, attention=kind, part=one))  # with what it has computed
        rows = compute(self.run, find_pull, chosen, part)
        return rows[:, 0] if is_single(queries) else rows


def join_queries(parts: list[Tensor]) -> Tensor:
    """Join tensors (b, h, q, e) along their queries; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def attribute(recording: Any, number: Tensor, layers: Sequence[int | str] | None = None) -> Attribution:
    """Return what the weights of a recording did to a number that a recorded forward computed, by one backward.

    number is a tensor of one element: a logit, a difference of two, a loss. Of several runs the maps are those of the last one
    that the number depends on. layers of self-attention, by their numbers in that run or by name, limit the backward to what
    comes after them; None for all. Parameters get no gradients, and the graph stays.
    Raises ConfigError if the number does not depend on the recorded contexts by a gradient.
    """
    if not isinstance(number, Tensor) or number.numel() != 1 or not number.is_floating_point():
        raise ConfigError(f"attribute takes a tensor of one number, e.g. logits[0, -1, token]; got {describe_value(number)}.")
    named = None if layers is None else check_sequence("layers", layers)
    for layer in named or ():
        if not any(find_calls(run, [layer]) for run in recording.runs):
            recording.last.find_visit(layer, "self", None)  # raises an error that says which layers there are
    chosen = [(run, None if named is None else find_calls(run, named)) for run in recording.runs]
    calls = [(run, stored, stored.graph) for run, own in chosen for stored in list_calls(run, own)]
    pairs: list[tuple[Run, StoredCall | StoredRecurrence, Tensor]] = []
    pairs += [(run, stored, graph.context) for run, stored, graph in calls if graph is not None]
    recurrences = [(run, stored, stored.graph) for run, own in chosen if own is None for stored in list_recurrences(run)]
    pairs += [(run, stored, graph.result) for run, stored, graph in recurrences if graph is not None and graph.is_unchanged]
    without = next((stored for run in recording.runs for stored in list_recurrences(run)), None)
    if number.requires_grad and not pairs and not calls and without is not None:
        raise ConfigError(
            f"no layer has a softmax, and their outputs have no graph to the number: {explain_no_graph(without)}."
        )
    if not number.requires_grad or not pairs:
        raise ConfigError(f"the number has no gradient with respect to the recorded attention. {ADVICE}")
    contexts = [context for _, _, context in pairs]
    with torch.enable_grad():
        found = torch.autograd.grad(number.reshape(()), contexts, retain_graph=True, allow_unused=True)
    own = [run for (run, *_), gradient in zip(pairs, found, strict=True) if gradient is not None]
    if not own:
        raise ConfigError(f"the number does not depend on the recorded attention. {ADVICE}")
    gradients = {}
    for (_, stored, context), gradient in zip(pairs, found, strict=True):
        given = torch.zeros_like(context) if gradient is None else gradient.detach()
        gradients[stored] = stored.graph.arrange(given) if isinstance(stored.graph, OutputGraph) else given
    return Attribution(own[-1], gradients)


def list_recurrences(run: Run) -> list[StoredRecurrence]:
    """Return the calls of layers without a softmax that a run made."""
    return [call.stored for call in run.calls if isinstance(call, ImplicitCall)]


def explain_no_graph(stored: StoredRecurrence) -> str:
    """Return why a call of a layer without a softmax has no gradient of its output."""
    if stored.graph is not None:
        return "the model has changed it in place" if not stored.graph.is_unchanged else "it is not among the layers"
    return f"it ran without gradients or keep='values', or no function of transformers returned its outputs. {ADVICE[:-1]}"


def find_calls(run: Run, layers: Sequence[int | str]) -> set[StoredCall]:
    """Return the calls of those layers of self-attention that a run has; each run numbers its own."""
    found = set[StoredCall]()
    for layer in layers:
        with suppress(MissingNameError, OutOfRangeError):
            own = run.find_module_histories(run.find_visit(layer, "self", None), "self")
            found.update(stored for history in own.values() for stored in history.stored_calls)
    return found


def list_calls(run: Run, chosen: set[StoredCall] | None) -> list[StoredCall]:
    """Return the calls that a run made, or those among some."""
    return [call.stored for call in run.softmax_calls if chosen is None or call.stored in chosen]

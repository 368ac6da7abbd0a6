"""path_effects: what heads do to a number by the direct path, into other heads or to the output (path patching)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attribution.head_effects import Measure, Watch, call_model, check_numbers, select_heads
from regard.errors import ConfigError
from regard.evaluation_mode import evaluate_mode
from regard.mechanism.arguments import check_choice, check_instance, describe_value
from regard.mechanism.heads import share
from regard.observe.attention_changes import Change
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.intervene import intervene
from regard.observe.record import record
from regard.observe.score_interval import Score, estimate_score

INPUTS = ("qkv", "q", "k", "v")
Pair = tuple[int, int]  # layer, head


def path_effects(
    model: nn.Module,
    inputs: Any,
    source: Any,
    measure: Measure,
    *,
    receivers: str | Sequence[Pair] | None = None,
    into: str = "qkv",
    senders: str | Sequence[Pair] = "all",
    watch: Watch = lambda heads, count: heads,
) -> dict[Pair, Score]:
    """Measure by how much a number rises when one head reaches others, by the direct path only, as it does on other inputs.

    inputs is a tensor for the model, or a dict of its arguments, source other inputs of the same shape; measure is that of
    regard.effects, and so is the interval. senders and receivers are "all" or pairs (layer, head). For each sender:

    1. the model runs on the inputs with the contexts of all heads as they are there, but the sender's as on the source. Norms
       and feed-forward layers are computed anew, so the direct path leads through them, but through no other head;
    2. it runs on the inputs, with the queries "q", keys "k", values "v" or all three "qkv" of the receivers taken from step 1.

    Without receivers the number is that of step 1: the direct path to the output. "all" senders are the heads of the layers
    before the last receiver. watch is called with the senders and their number, for a progress bar. Raises ConfigError for a
    model whose attention could not all be intercepted, and for inputs of different shapes.
    Source: Wang et al. 2022, "Interpretability in the Wild"; Goldowsky-Dill et al. 2023, "Localizing Model Behavior with Path
    Patching".
    """
    check_instance("model", model, nn.Module)
    check_choice("into", into, INPUTS)
    if not callable(measure) or not callable(watch):
        raise ConfigError(
            f"measure and watch must be functions, got {describe_value(watch if callable(measure) else measure)}."
        )
    with evaluate_mode(model), torch.no_grad():
        with record(model) as recording:
            clean = trace_calls(model, inputs)
        if recording.missed:
            raise ConfigError(f"not all attention was intercepted: {recording.missed[0].module}: {recording.missed[0].reason}.")
        other = trace_calls(model, source)
        if [x.shape for x in clean.contexts] != [x.shape for x in other.contexts]:
            raise ConfigError(
                "inputs and source must have the same shape, so that each head can be replaced position by position."
            )
        targets = None if receivers is None else select_heads(recording, receivers)
        if targets is not None and not targets:
            raise ConfigError("receivers must be 'all', pairs (layer, head), or None for the output; got no pair.")
        chosen = select_heads(recording, senders)
        if isinstance(senders, str) and targets is not None:
            chosen = [pair for pair in chosen if pair[0] < max(targets)[0]]
        places = {layer: clean.find_call(recording.layers()[layer]) for layer, _ in [*chosen, *(targets or [])]}
        heads: dict[int, list[int]] = {}
        for layer, head in targets or []:
            heads.setdefault(places[layer], []).append(head)
        before = measure_paths(model, inputs, measure, clean.contexts, heads, into)
        found = {}
        for layer, head in watch(chosen, len(chosen)):
            contexts, place = list(clean.contexts), places[layer]
            contexts[place] = contexts[place].clone()
            contexts[place][:, head] = other.contexts[place][:, head]
            rise = measure_paths(model, inputs, measure, contexts, heads, into) - before
            found[layer, head] = estimate_score(rise.tolist(), [], len(rise))
    return found


def measure_paths(
    model: nn.Module, inputs: Any, measure: Measure, contexts: Sequence[Tensor], heads: Mapping[int, Sequence[int]], into: str
) -> Tensor:
    """Return the numbers where these contexts directly reach heads, given by the place of their call, or the output if none."""
    direct = CallTrace(replacements=contexts)
    with intervene(model, direct):
        output = call_model(model, inputs)
    if heads:
        with intervene(model, InputReplacement(source=direct, heads=heads, into=into)):
            output = call_model(model, inputs)
    return check_numbers(measure(output)).double().cpu()


def trace_calls(model: nn.Module, inputs: Any) -> "CallTrace":
    """Run a model and return its calls of attention."""
    trace = CallTrace()
    with intervene(model, trace):
        call_model(model, inputs)
    return trace


@dataclass(frozen=True, eq=False, kw_only=True)
class CallTrace(Change):
    """Keep all calls of attention and their contexts, in order; if there are replacements, the model gets them as contexts."""

    replacements: Sequence[Tensor] = ()
    names: list[str] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)
    contexts: list[Tensor] = field(default_factory=list)

    def is_target(self, name: str, number: int | None, kind: str) -> bool:
        return True

    def change_call(self, call: AttentionCall, name: str, number: int) -> AttentionCall:
        self.names.append(name)
        self.calls.append(call)
        return call

    def change_context(self, context: Tensor, call: AttentionCall, name: str, number: int) -> Tensor:
        found = self.replacements[len(self.contexts)] if self.replacements else context.clone()
        self.contexts.append(found)
        return found

    def find_call(self, name: str) -> int:
        """Return the place of a module's call. Raises ConfigError if it called attention several times."""
        if self.names.count(name) != 1:
            raise ConfigError(
                f"{name} calls attention {self.names.count(name)} times in one forward, so a path has no one end. "
                "Choose heads of other layers."
            )
        return self.names.index(name)


@dataclass(frozen=True, eq=False, kw_only=True)
class InputReplacement(Change):
    """Give heads the queries, keys or values that they have in the calls of a source; `heads` are by the place of the call."""

    source: CallTrace
    heads: Mapping[int, Sequence[int]]
    into: str
    places: list[int] = field(default_factory=list)  # of the calls so far

    def is_target(self, name: str, number: int | None, kind: str) -> bool:
        return True

    def change_call(self, call: AttentionCall, name: str, number: int) -> AttentionCall:
        place = len(self.places)
        self.places.append(place)
        if place not in self.heads:
            return call
        h, heads = call.q.shape[1], list(self.heads[place])
        changed: dict[str, Any] = {"q": call.q.clone()} | {one: share(getattr(call, one), h).clone() for one in ("k", "v")}
        for one in self.into:
            changed[one][:, heads] = share(getattr(self.source.calls[place], one), h)[:, heads]
        return replace(call, **changed)

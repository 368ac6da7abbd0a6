"""Examine the attention layers of a model in the calls that they really get: their arguments, masks, positions and caches."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.examination.case import Case
from regard.examination.identify import match
from regard.examination.layer_rules import LayerRules
from regard.examination.probe_runner import READ, prefix_result, run_named_probes
from regard.examination.probes import dropout
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject.adapters import SubjectAdapter, SubjectError
from regard.examination.subject.attention_output import list_parts
from regard.examination.subject.inputs import InputShapes
from regard.examination.subject.localize import hook_parts
from regard.examination.subject.token_model import TokenModel
from regard.examination.whole_models.inner_attention import PartCall, make_part_call
from regard.mechanism import Mask

WEIGHTS = 2**21  # numbers of a layer at most: each is read in float64, in many layouts
TRIED = 3  # layers whose formula is read, each of another kind
MEASURED = 16  # layers in which who sees whom is measured


class ReplayedLayers(NamedTuple):
    """What was found and checked in layers whose outputs a formula gives, and the names of those that leave nothing unknown."""

    results: list[Finding | Checked]
    names: set[str]


def examine_layers(
    module: nn.Module, run: Callable[[], object], names: Iterable[str], rules: LayerRules, stated: float | None
) -> ReplayedLayers:
    """Examine the layers of these names, one of each kind, by the formula that gives their outputs.

    A layer whose outputs no known formula gives has no results: rotary positions, norms and biases are seen in its calls.
    """
    small = select_small_parts(module, names)
    replayed = ReplayedLayers([], set())
    for given in list(choose_kinds(record_parts(module, run, small)))[:TRIED]:
        case = make_case(given, rules.get_rule(given.name), stated)
        if case is None or not is_identified(case):
            continue
        read = list(run_named_probes(case, READ))
        if not any(isinstance(one, Unknown) and one.is_required for one in read):  # as with a single token
            replayed.names.update(name for name, part in small.items() if get_kind(part) == get_kind(given.part))
        replayed.results.extend(named for one in read if not isinstance(named := add_layer(one, given.name), Unknown))
    return replayed


def examine_masks(
    module: nn.Module, run: Callable[[], object], names: Iterable[str], rules: LayerRules
) -> dict[str, list[Finding | Checked | Unknown]]:
    """Return who sees whom in the layers of these names, as measured in their own calls, of those that can be called."""
    measured: dict[str, list[Finding | Checked | Unknown]] = {}
    for given in record_parts(module, run, select_small_parts(module, names))[:MEASURED]:
        case = make_case(given, rules.get_rule(given.name), None)
        if case is not None:
            case = Case(case.subject, case.expects, case.shapes)  # without a search for its formula
            results = [add_layer(one, given.name) for one in run_named_probes(case, ("future", "pattern"))]
            measured |= {given.name: results} if any(not isinstance(one, Unknown) for one in results) else {}
    return measured


def select_small_parts(module: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return the parts of these names whose weights are few enough to be read."""
    parts = {name: module.get_submodule(name) for name in names if name}
    return {name: part for name, part in parts.items() if sum(one.numel() for one in part.parameters()) <= WEIGHTS}


def add_layer(one: Finding | Checked | Unknown, name: str) -> Finding | Checked | Unknown:
    """Return a result with the name of its layer."""
    named = prefix_result(one, name)
    return replace(named, layer=name) if isinstance(named, Finding) else named


def record_parts(module: nn.Module, run: Callable[[], object], wanted: dict[str, nn.Module]) -> list[PartCall]:
    """Return the calls of these parts of a module, of those that are called once."""
    found: list[PartCall] = []

    def keep_call(name: str, part: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if name in wanted:
            found.append(PartCall(name, part, inputs, named, output))

    with hook_parts(module, keep_call):
        run()
    return [one for one in found if sum(other.name == one.name for other in found) == 1]


def choose_kinds(calls: Iterable[PartCall]) -> Iterator[PartCall]:
    """Yield the first call of each kind of layer: of a class, with weights of the same shapes."""
    known: set[object] = set()
    for one in calls:
        kind = get_kind(one.part)
        if kind not in known:
            known.add(kind)
            yield one


def get_kind(part: nn.Module) -> tuple[object, ...]:
    """Return the class of a layer and the shapes of its weights."""
    return type(part), *(weight.shape for weight in part.parameters())


def make_case(given: PartCall, expects: Mask, stated: float | None) -> Case | None:
    """Return the case of a layer in its own call; None unless it takes one sequence (b, t, c) and returns one as long."""
    tensors = [one for one in (*given.inputs, *given.named.values()) if isinstance(one, Tensor) and one.is_floating_point()]
    if not tensors or tensors[0].dim() != 3 or expects.is_batch_specific:
        return None
    x = tensors[0]
    output = next((one for one in list_parts(given.output) if isinstance(one, Tensor)), None)
    if output is None or output.shape[:2] != x.shape[:2] or any(one is not x and one.shape == x.shape for one in tensors):
        return None  # another sequence as long is a source of its own
    call = make_part_call(given, given.part)
    subject = SubjectAdapter(
        given.name, given.part, "x", x.dtype, x.device, call, lambda part: make_part_call(given, part), note=given.name
    )
    b, t, width = x.shape
    shapes = InputShapes("x", width, t, b, bound=True)
    return Case(subject, expects, shapes, stated, 0, match.identify_formula)


def is_identified(case: Case) -> bool:
    """Return whether a formula gives the layer's outputs."""
    try:
        return case.match is not None
    except Exception:  # whatever a user's layer raises for other inputs
        return False


def check_dropout(model: TokenModel, names: Iterable[str], rules: LayerRules) -> Iterator[Finding | Checked | Unknown]:
    """Yield the result for one layer of each kind, of those that draw random numbers in training.

    A layer gets the tokens that it gets in the model, but more sequences: first one token, whose weight is 1, and then all of
    the first sequence if nothing is dropped of one. A layer that is not affine in a single token yields nothing.
    """
    wanted = {name: model.module.get_submodule(name) for name in names if name}
    known: set[object] = set()
    for ids in (model.ids[:1, :1], model.ids[:1]):
        try:
            calls = record_parts(model.module, partial(model.run, ids), wanted)
        except SubjectError:  # refusing another length is allowed
            continue
        for given in list(choose_kinds(calls))[:TRIED]:
            case = None if get_kind(given.part) in known else make_dropout_case(given, rules.get_rule(given.name))
            results = [] if case is None else list(check_mean(case))
            known |= {get_kind(given.part)} if results else set()
            yield from (add_layer(one, given.name) for one in results)


def make_dropout_case(given: PartCall, expects: Mask) -> Case | None:
    """Return the case of a layer that may get any number of sequences in its own call; None for a layer of other inputs."""
    given = given._replace(
        inputs=tuple(map(drop_cache, given.inputs)), named={name: drop_cache(one) for name, one in given.named.items()}
    )
    case = make_case(given, expects, None)
    return None if case is None else Case(case.subject, expects, replace(case.shapes, batch=dropout.MANY, bound=False))


def drop_cache(value: Any) -> Any:
    """Return a value of a call, None in place of a cache that a call would add to."""
    return None if hasattr(value, "update") and not isinstance(value, (Tensor, dict)) else value


def check_mean(case: Case) -> Iterator[Finding | Checked]:
    """Yield how the mean in training differs from evaluation, or that it does not; nothing if that cannot be determined."""
    try:
        call = dropout.make_training_call(case)
        if (
            call is None
            or not dropout.has_fixed_buffers(case)
            or dropout.measure_spread(call, case.make_usual_inputs(), case) == 0
        ):
            return
        if case.shapes.tokens == 1:
            results = list(dropout.check_single_token(case, call))
        else:
            dropped = dropout.describe_score_dropout(case, call)
            results = [] if dropped is None else [Finding("dropout not rescaled", dropped, dropout.AFTER, 1.0, "dropout")]
    except Exception:  # a layer may refuse other numbers of sequences, or numbers in training
        return
    yield from (one for one in results if isinstance(one, (Finding, Checked)))

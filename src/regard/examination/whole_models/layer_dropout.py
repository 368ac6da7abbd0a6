"""Check the mean of dropout in the attention layers of a model: in training, it is what evaluation gives."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from regard.examination.case import Case
from regard.examination.layer_rules import LayerRules
from regard.examination.probes import dropout
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject.adapters import SubjectError
from regard.examination.subject.token_model import TokenModel
from regard.examination.whole_models import replay
from regard.examination.whole_models.inner_attention import PartCall
from regard.mechanism import Mask


def check_layers(model: TokenModel, names: Iterable[str], rules: LayerRules) -> Iterator[Finding | Checked | Unknown]:
    """Yield the result for one layer of each kind, of those that draw random numbers in training.

    A layer gets the tokens that it gets in the model, but more sequences: first one token, whose weight is 1, and then all of
    the first sequence if nothing is dropped of one. A layer that is not affine in a single token yields nothing.
    """
    wanted = {name: model.module.get_submodule(name) for name in names if name}
    known: set[object] = set()
    for ids in (model.ids[:1, :1], model.ids[:1]):
        try:
            calls = replay.record_parts(model.module, partial(model.run, ids), wanted)
        except SubjectError:  # refusing another length is allowed
            continue
        for given in list(replay.choose_kinds(calls))[: replay.TRIED]:
            case = None if replay.get_kind(given.part) in known else make_case(given, rules.get_rule(given.name))
            results = [] if case is None else list(check_case(case))
            known |= {replay.get_kind(given.part)} if results else set()
            yield from (replay.add_layer(one, given.name) for one in results)


def make_case(given: PartCall, expects: Mask) -> Case | None:
    """Return the case of a layer that may get any number of sequences in its own call; None for a layer of other inputs."""
    given = given._replace(
        inputs=tuple(map(drop_cache, given.inputs)), named={name: drop_cache(one) for name, one in given.named.items()}
    )
    case = replay.make_case(given, expects, None)
    return None if case is None else Case(case.subject, expects, replace(case.shapes, batch=dropout.MANY, bound=False))


def drop_cache(value: Any) -> Any:
    """Return a value of a call, None in place of a cache that a call would add to."""
    return None if hasattr(value, "update") and not isinstance(value, (Tensor, dict)) else value


def check_case(case: Case) -> Iterator[Finding | Checked]:
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

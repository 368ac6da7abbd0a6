"""Classification of the heads of a recording: the scores of every detector, and the kind that they decide."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from regard.errors import ConfigError, MissingNameError
from regard.mechanism.arguments import check_choice, check_index, check_instance, check_sequence, describe_value
from regard.observe import detectors
from regard.observe.classification.head_kinds import STRIPE, infer_kind
from regard.observe.classification.head_scores import PUNCTUATION, HeadOptions, UserScore, define_user_scores, estimate_heads
from regard.observe.classification.implicit_heads import check_implicit_options, estimate_absolute_shares
from regard.observe.classification.repeated_calls import split_calls
from regard.observe.detectors import NEAR, Queries
from regard.observe.head_table import Head, Heads
from regard.observe.map_view import MapView
from regard.observe.recorded_runs import words
from regard.observe.recorded_runs.part_names import describe_module, join_names
from regard.observe.recorded_runs.run import IMPLICIT, KINDS
from regard.observe.recorded_runs.words import Class, Tokens
from regard.observe.recording import Recording
from regard.observe.token_places.places import describe_wordless_tokens

STRIPE_WORDS = 3  # that its sentence names


def heads(
    recording: Recording,
    *,
    kind: str = "self",
    part: str | None = None,
    layers: Sequence[int | str] | None = None,
    tokens: Tokens | None = None,
    offsets: Sequence[int] = (),
    window: int = NEAR,
    classes: Mapping[str, Class] = PUNCTUATION,
    needle: slice | None = None,
    questions: Queries | None = None,
    projections: Sequence[Tensor] | None = None,
    scores: Sequence[UserScore] = (),
) -> Heads:
    """Classify each head of a recording: return a table with its kind and the score of every detector, with its 95 % interval.

    kind, part and layers select modules, as in recording.map. tokens, words or ids (k,) or (b, k), replace recording.tokens.
    offsets are further distances back, scored like the previous token; window is what counts as local; classes are sets of
    keys, bool (k,) or a function of a word; needle (keys) and questions (queries) are those of a needle prompt; projections are
    W_output (h, e, c) of each selected layer, for the norms of values if the recording kept them. scores are functions of an
    AttentionMap (b, h, q, k) that return a number for each head (b, h) or query (b, h, q); each has a docstring.

    The interval is over documents, the rows of the batch; of a single one over eight segments of its queries. The kind says
    what is seen on this text, not what the head is: regard.probe_heads tests that. A head has the kind previous token, itself,
    duplicate or, by the score "induction", prefix matching if the interval of that score is above 0.4, or first token if it is
    above 0.3 (Gu et al. 2024). Early queries see few keys: corrected for chance, by Cohen's kappa, the interval must be above
    0.2 too. A kind is claimed only of a score to which at least 8 queries count, and of two such scores only if their
    intervals do not overlap. Otherwise it is "stripe" if the interval of the weight on the same few tokens is above 0.4, under
    the same conditions, "broad" if that of e^entropy / keys is above 0.5, "local" if that of the local weight is more than half
    way from that of equal weights to 1, and else "unclear": its sentence lists the largest scores.

    Calls of a module that attends several times in one forward, and has no map for all of them, are layers of their own, named
    `module, call 1`, which a note names: numbers in layers, and projections, count each of them, so that those of the layers
    behind are larger than in recording.map.

    kind="implicit" is of recurrences, convolutions and other formulas whose mask hides later keys, as of differential
    attention. Their entries are signed: the scores are shares of the absolute values of a row, ``|M_ij| / Σ |M_in|``, and the
    kinds follow the same rule with these, without "broad" and "stripe". There are no scores that need weights, as entropy, and
    no classes; needle, projections and scores are refused.
    """
    check_instance("recording", recording, Recording, "Record a model with regard.record(model).")
    tokens = recording.tokens if tokens is None else words.check_tokens(tokens)
    wanted = HeadOptions(tokens, offsets, window, classes, needle, questions, projections, scores)
    wanted.check()
    if check_choice("kind", kind, (*KINDS, IMPLICIT)) == IMPLICIT:
        check_implicit_options(wanted)
        notes = replace(wanted, classes={}).describe_missing_scores()
        return Heads(tuple(classify_implicit_heads(recording, wanted, part, layers)), notes)
    recording, split = split_calls(recording)
    rows = tuple(classify_heads(recording, wanted, kind=kind, part=part, layers=layers))
    other = "cross" if kind == "self" else "self"
    if not rows and recording.layers(other, part):
        return Heads(rows, (f"the recording has no {kind} attention, but {other} attention: pass kind={other!r}.",))
    implicit = len(recording.layers(IMPLICIT, part)) if layers is None else 0
    if not rows and implicit:
        return Heads(rows, ("no layer has a softmax; kind='implicit' scores those without by the sizes of their entries.",))
    notes = (*split, *wanted.describe_missing_scores(kind, describe_wordless_keys(recording, kind, part)))
    if implicit:
        count = "one layer has" if implicit == 1 else f"{implicit} layers have"
        notes = (*notes, f"{count} no softmax, and so no row here: kind='implicit' has them.")
    return Heads(rows, notes, define_user_scores(scores))


def describe_wordless_keys(recording: Recording, kind: str = "self", part: str | None = None) -> str | None:
    """Return what the keys of the first layer are where they have no text, such as patches of an image; else None."""
    if not recording.places or not recording.layers(kind, part):
        return None
    _, places = recording.axis_places(0, kind, part)
    return describe_wordless_tokens(places, recording.map(0, kind=kind, part=part).shape[-1])


def classify_heads(
    recording: Recording,
    wanted: HeadOptions,
    *,
    kind: str = "self",
    part: str | None = None,
    layers: Sequence[int | str] | None = None,
    some: Sequence[int] | None = None,
) -> Iterator[Head]:
    """Yield the rows of `heads` as each layer is done; `some` restricts them to these heads of each layer."""
    names = recording.layers(kind=kind, part=part)
    chosen = range(len(names)) if layers is None else resolve_layers(layers, names)
    if wanted.projections is not None and len(wanted.projections) != len(chosen):
        raise ConfigError(
            f"projections must be one W_output (h, e, c) for each layer, {len(chosen)}; got {len(wanted.projections)}."
        )
    for n, number in enumerate(chosen):
        m = recording.map(number, kind=kind, part=part)
        b, h, _, k = m.shape
        numbers = recording.heads(number, kind=kind, part=part)
        asked = range(len(numbers)) if some is None else some
        theirs = replace(wanted, tokens=select_key_words(recording, wanted.tokens, number, kind, part))
        tokens = None if theirs.tokens is None else words.convert_to_ids(theirs.tokens, b, k, m.device)
        look = MapView(m if some is None else m.select(heads=some), tokens, kind == "self", wanted.queries)
        values = recording.values(number, kind=kind, part=part)
        if values is not None and some is not None:
            values = values[:, [head * values.shape[1] // h for head in some]]
        projection = None if wanted.projections is None else wanted.projections[n][list(asked)]
        found = estimate_heads(look, theirs, values, projection)
        halfway = compute_halfway_weights(look, wanted.window)
        for place, head in enumerate(asked):
            head_kind = infer_kind(found[place], halfway[place])
            stripes = list_stripe_words(look, place, theirs.tokens) if head_kind == STRIPE else ()
            yield Head(number, names[number], numbers[head], head_kind, found[place], stripes)


def classify_implicit_heads(
    recording: Recording, wanted: HeadOptions, part: str | None, layers: Sequence[int | str] | None
) -> Iterator[Head]:
    """Yield the rows of `heads` for layers without a softmax, by the absolute values of their entries."""
    names = recording.layers(kind=IMPLICIT, part=part)
    for number in range(len(names)) if layers is None else resolve_layers(layers, names):
        m = recording.map(number, kind="implicit", part=part)
        theirs = select_key_words(recording, wanted.tokens, number, IMPLICIT, part)
        tokens = None if theirs is None else words.convert_to_ids(theirs, m.shape[0], m.shape[3], m.device)
        for head, scores in enumerate(estimate_absolute_shares(m, names[number], wanted, tokens)):
            local = scores["local"].chance
            yield Head(number, names[number], head, infer_kind(scores, (1 + local) / 2), scores)


def select_key_words(recording: Recording, tokens: Tokens | None, layer: int, kind: str, part: str | None) -> Tokens | None:
    """Return the words or ids of a layer's keys: those of the recording if it has the layer's number, others as they are."""
    if tokens is recording.tokens:
        return recording.words(layer, kind, part)[1]
    chosen: Tokens | None = words.select_axis_words(tokens, kind, recording.layers(kind, part)[layer])[1]
    return chosen


def list_stripe_words(look: MapView, head: int, tokens: Tokens | None) -> tuple[str, ...]:
    """Return the tokens of a head's stripe in the first document, or their positions, with the most attention first."""
    marked = detectors.mark_stripes(look)[0, head].nonzero().flatten()
    keys = marked[look.statistics.received[0, head, marked].argsort(descending=True)].tolist()
    if tokens is None or isinstance(tokens, Tensor):
        return tuple(f"token {key}" for key in keys[:STRIPE_WORDS])
    row: Any = tokens if isinstance(tokens[0], str) else tokens[0]
    return tuple(dict.fromkeys(str(row[key]) for key in keys))[:STRIPE_WORDS]


def resolve_layers(layers: Sequence[int | str], names: Sequence[str]) -> list[int]:
    """Convert layers by number or by name to numbers.

    Raises MissingNameError or OutOfRangeError, and ConfigError for the name of a module that several layers share.
    """
    found = []
    for layer in check_sequence("layers", layers):
        if isinstance(layer, str) and layer not in names:
            recorded = join_names([repr(one) if one else one for one in names])
            raise MissingNameError(f"no attention of {describe_value(layer)} was recorded. Recorded: {recorded}.")
        if isinstance(layer, str) and names.count(layer) > 1:
            raise ConfigError(
                f"{describe_module(layer)} ran {names.count(layer)} times in one forward: pass the numbers of its layers."
            )
        found.append(names.index(layer) if isinstance(layer, str) else check_index("layer", layer, len(names), "the recording"))
    return found


def compute_halfway_weights(look: MapView, window: int) -> list[float]:
    """Return the local weight of each head half way between equal weights and 1; NaN where keys are of another text."""
    if not look.own:
        return [math.nan] * look.map.shape[1]
    known = look.uniform_local_weight
    uniform = detectors.uniform_local_weight(look, window) if known is None else known
    return [(1 + share) / 2 for share in uniform.nanmean(0).tolist()]

"""Check recorded attention calls against the projections' outputs: scale, rows of weights, heads and roles.

The norms of queries and keys are compared, so that rotary positions and other rotations are seen through.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from regard.examination import (
    frequency_reading,
    late_norms,
    latent_rotation,
    norm_reading,
    slope_checks,
    terms,
    token_shift,
    value_scale,
)
from regard.examination.bias_reading import find_viewed_table
from regard.examination.call_conventions import ROLE_NAMES, parse_role
from regard.examination.identify.mistakes import ROLE, SOFTMAX, SPLIT, describe_mixed_heads
from regard.examination.inner_calls import InnerCall
from regard.examination.norm_roles import find_other_norm
from regard.examination.projection_source import BY_HEAD, BY_WIDTH, ProjectionSource, read_source
from regard.examination.repeated_bias import find_repeated_bias
from regard.examination.report import UNUSED_HEADS, Checked, Finding, Unknown
from regard.examination.rotary_reading import (
    Rotary,
    describe_no_rotation,
    find_mistakes,
    find_other_axis,
    is_rotated_before_split,
)
from regard.examination.shared_sources import find_shared_source
from regard.examination.stated_heads import describe_exchanged_axes
from regard.observe.interception.handwritten.undivided_contexts import BY_MORE, DIVIDED

LEAST_FACTOR = 2.0  # of cosines: with less, a weight is at most exp(4) times another
OFF = 0.02  # of the expected scale
MOST_FACTOR = 1.5  # of YaRN on queries and keys: beyond, any number is one
SCALE = "the scale of the scores"
ROWS = "rows of weights sum to one, over the keys"
EACH_ROW = "rows of each softmax sum to one, over the keys"
DIVIDE = f"Divide by their own sum and nothing else: {SOFTMAX}."
HEADS = "heads are independent"
OWN_HEADS = "heads of queries and keys are independent"  # where values come from, or contexts go, is not known
ROLES = "queries and keys come from their own projections"
POSITIONS = "rotary positions"
FREQUENCIES = "the frequencies of rotary positions"
TURN = (
    "Rotate queries and keys alike: pair (a, b) becomes (a cos - b sin, b cos + a sin), angle = position * base ** (-2 i / d)."
)
VALUES = "Rotate queries and keys only: outputs depend on absolute positions if values are rotated."
PERMUTE = "View the rows as (queries, keys, heads) and permute them: table[index].view(q, k, heads).permute(2, 0, 1)."
ORDER = "Split queries, keys and values into heads in the same way, and leave the heads in their order."
PLACES = "Rotate along the axis of tokens: after the transpose, q (b, h, t, d) times cos and sin (t, d); before it, (t, 1, d)."
CROSSING = "the two columns of a pair lie in different heads, so that scores depend on absolute positions"
SPLIT_FIRST = "Split first: q.view(b, t, heads, d).transpose(1, 2), and then rotate each head by angles (t, d / 2)."
FILLED = (
    "Set the scores of keys that only fill up a block to -inf before the softmax: a score of 0 gives a weight of exp(0) = 1."
)
STRIDED = ", whose columns are not neighbors"
MOST_KEYS = 2048  # of a call whose weights are computed
REQUIRED = (SCALE, ROWS)  # by a verdict
NEAR = "a factor that differs by 2 % would be detected"
LINE = "scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1]), with k split into heads"


def iterate_checks(
    calls: Sequence[InnerCall], stated: float | None, in_model: bool = False
) -> Iterator[tuple[str, Finding | Checked | Unknown | None]]:
    """Yield each property with its result, None if it is not known."""
    yield SCALE, check_scale(calls, stated, in_model)
    yield ROWS, check_rows(calls)
    yield HEADS, check_heads(calls)
    yield ROLES, check_roles(calls)
    for what, check in (
        (POSITIONS, check_positions),
        (FREQUENCIES, frequency_reading.check_frequencies),
        (slope_checks.WHAT, slope_checks.check_slopes),
        (value_scale.WHAT, value_scale.check_values),
        (norm_reading.WHAT, norm_reading.check_norms),
        (late_norms.WHAT, check_norm_order),
        (token_shift.WHAT, check_token_places),
        (terms.WHAT, terms.check_terms),
    ):
        result = check(calls)
        if result is not None:
            yield what, result


def check_scale(calls: Sequence[InnerCall], stated: float | None, in_model: bool = False) -> Finding | Checked | Unknown | None:
    """Check that each call multiplies scores by the stated scale, or else by 1 / √d; None if a scale is not known.

    Models whose weights are trained or initialized for a scale of 1 or 1 / d, in every layer, cannot be told from mistakes.
    """
    scored = [one for one in calls if one.call.weight is None]  # additive scores have no scale
    cosines = [one.cosine_factor for one in scored if one.scale is None]
    if not calls or any(factor is None for factor in cosines):
        return None
    scored = [one for one in scored if one.scale is not None]
    if cosines and not scored:
        return check_cosines([factor for factor in cosines if factor is not None])
    if not scored:
        return Checked(f"{SCALE}: additive scores have none", f"in {count_calls(calls)}")
    others = [one for one in scored if not is_near(get_scale(one), get_expected_scale(one, stated))]
    wrong = next((one for one in others if stated is not None or not is_stated(one)), None)
    if wrong is None:
        what = f"{SCALE}, {get_scale(scored[0]):.4g}"
        if times := read_context_factor(scored[0]):
            what += f", with the attention factor of YaRN for a context {times} times as long"
        if is_passed_for_cosines(scored[0]):
            what += f", of normalized queries and keys: cosines are multiplied by {scored[0].cosine_factor:.4g}"
        return Checked(what, f"in {count_calls(scored)}, through rotations; {NEAR}")
    found = get_scale(wrong)
    alike = all(is_near(get_scale(one), found) for one in scored)
    design = in_model and (not is_mistake(wrong) or (alike and any(is_near(found, one) for one in (1.0, 1 / wrong.width))))
    has_bias = wrong.call.bias is not None and not is_scaled_by_all_heads(wrong)
    return report_scale(wrong, stated, design or has_bias or has_norm(wrong))


def check_cosines(factors: Sequence[float]) -> Checked | Unknown:
    """Check that cosines of normalized queries and keys are multiplied by a factor that lets weights differ."""
    least = min(factors)
    if least < LEAST_FACTOR:
        sentence = f"{SCALE}: cosines of queries and keys are multiplied by {least:.3g}, so that weights can hardly differ"
        return Unknown(sentence, f"scale={least:.4g}, if it is intended", is_required=True)
    what = f"{SCALE}: queries and keys are normalized, and their cosines multiplied by {least:.4g}"
    return Checked(what, f"in {len(factors)} recorded call{'s' * (len(factors) > 1)}")


def list_wrong_scales(d: int) -> tuple[float, ...]:
    """List the scales of heads of width d that are easily written by mistake: none, twice, inverted, the root twice."""
    return 1.0, 1 / d, d**0.5, d**-0.25


def is_mistake(one: InnerCall) -> bool:
    """Return whether a scale is one that is easily written by mistake: none, twice, by the width of all heads."""
    found, d = get_scale(one), one.width
    inside = one.call.q.shape[1] * d
    widths = () if one.absorbed is None else (one.call.q.shape[-1], one.absorbed.columns)
    wrong = (*list_wrong_scales(d), inside**-0.5, 1 / inside, *(n**-0.5 for n in (*widths, get_input_width(one)) if n))
    return any(is_near(found, known) for known in wrong)


def get_input_width(one: InnerCall) -> int:
    """Return the width of what the projection of the queries is given; 0 if it is not known."""
    if one.q_source is None or one.module is None:
        return 0
    name = one.q_source.name.removeprefix(f"{one.name}." if one.name else "")
    width = getattr(dict(one.module.named_modules()).get(name), "in_features", 0)
    return width if isinstance(width, int) else 0


def is_scaled_by_all_heads(one: InnerCall) -> bool:
    """Return whether a scale is 1 / √(h d), of all heads together, and no scale of a design beside it."""
    h, d = one.call.q.shape[1], one.width
    found = get_scale(one)
    return h > 1 and is_near(found, (h * d) ** -0.5) and not is_near(found, 1 / d)


def is_stated(one: InnerCall) -> bool:
    """Return whether a scale that is no known mistake is what the module states, or what a scaled rotation makes of it."""
    if is_passed_for_cosines(one) or is_learned(one):
        return True
    if is_mistake(one):
        return False
    found = get_scale(one)
    own = one.call.q.shape[-1] ** -0.5 if one.call.scale is None else one.call.scale
    rotated = one.q_source is not None and one.k_source is not None and is_near(one.q_source.factor, one.k_source.factor)
    if read_context_factor(one):
        return True
    return one.stated is not None and (is_near(found, one.stated) or (rotated and is_near(own, one.stated)))


def is_learned(one: InnerCall) -> bool:
    """Return whether 1 / √d times a scale that a parameter of the module holds, one for all or for each head, is the scale."""
    own = (
        [] if one.module is None else [x for x in one.module.parameters(recurse=False) if x.numel() in (1, one.call.q.shape[1])]
    )
    factor = get_scale(one) * one.width**0.5
    return any(is_near(float(x.min()), factor) and is_near(float(x.max()), factor) for x in own)


def read_context_factor(one: InnerCall) -> int:
    """Return s if rotated queries and keys are each multiplied by 0.1 ln(s) + 1, for a context s times as long, else 0.

    Source: Peng et al. 2023, YaRN, section 3.4.
    """
    q, k = one.q_source, one.k_source
    own = one.call.q.shape[-1] ** -0.5 if one.call.scale is None else one.call.scale
    if q is None or k is None or not is_near(own, one.width**-0.5) or abs(q.factor / k.factor - 1) > 1e-4:
        return 0
    if read_source(one.call.q, q) is None or not 1 < q.factor < MOST_FACTOR:
        return 0
    times = math.exp(10 * (q.factor - 1))
    return round(times) if times > 1.5 and abs(times / round(times) - 1) < 1e-3 else 0


def is_passed_for_cosines(one: InnerCall) -> bool:
    """Return whether a kernel was given a scale for normalized queries and keys, with which weights can differ."""
    is_passed = one.call.scale is not None and not one.call.kernel.startswith("by hand")
    factor = one.cosine_factor if is_passed and has_norm(one) else None
    return factor is not None and factor >= LEAST_FACTOR


def get_scale(one: InnerCall) -> float:
    """Return the scale of a call of which it is known."""
    assert one.scale is not None
    return one.scale


def get_expected_scale(one: InnerCall, stated: float | None) -> float:
    """Return the stated scale, or else 1 / √d."""
    return one.width**-0.5 if stated is None else stated


def is_near(scale: float, expected: float) -> bool:
    """Return whether two scales are equal up to OFF."""
    return abs(scale - expected) <= OFF * abs(expected)


def report_scale(one: InnerCall, stated: float | None, may_be_intended: bool) -> Finding | Unknown:
    """Return the finding of another scale, or that it may be intended, as in some designs with norms or a bias."""
    found, expected = get_scale(one), get_expected_scale(one, stated)
    meant = f"1 / √{one.width} =" if stated is None else "the stated"
    sentence = f"in {one.name or 'the layer'} the products of queries and keys are multiplied by {found:.4g}, not by {meant} "
    sentence += f"{expected:.4g}"
    if is_scaled_by_all_heads(one):
        sentence += f": {one.call.q.shape[1] * one.width} is the width of all heads, not of one"
    elif get_input_width(one) and is_near(found, get_input_width(one) ** -0.5):
        sentence += f": {get_input_width(one)} is the width of the input, not of a head"
    if stated is None and may_be_intended:
        return Unknown(f"{SCALE}: {sentence}, as in some designs", f"scale={found:.4g}, if it is intended", is_required=True)
    return Finding(
        "wrong scale", sentence, f"Multiply them by {expected:.4g}: {LINE}. Or pass scale={found:.4g}.", 1.5, "scale", one.name
    )


def has_norm(one: InnerCall) -> bool:
    """Return whether queries or keys come from a norm."""
    sources = (one.q_source, one.k_source) if one.absorbed is None else ()  # a latent's norm is none of queries and keys
    return any(source is not None and "norm" in source.name.lower() for source in sources)


def check_rows(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check that rows of weights sum to one over tokens, as recorded calls are softmaxes; None if that is not seen of one."""
    for one in calls:
        filled = count_filled_keys(one)
        if filled > 1:  # one alone is a sink, as of nn.MultiheadAttention's add_zero_attn
            sentence = f"{filled} keys of zeros, beyond the {one.call.q.shape[2]} tokens, have weight"
            return Finding("not normalised", f"in {one.name or 'the layer'} {sentence}", FILLED, 1.5, "softmax", one.name)
        if one.call.note == DIVIDED:
            sentence = "exponentials of scores are divided by something else than their sum over the keys, or by nothing"
            return Finding("not normalised", f"in {one.name or 'the layer'} {sentence}", DIVIDE, 1.5, "softmax", one.name)
    if not calls or any("gate" in one.call.note or one.call.note == BY_MORE for one in calls):  # after the softmax
        return None
    mixed = next((one.mixed for one in calls if one.mixed), "")
    if mixed:
        return Checked(f"{EACH_ROW}; the heads are mixed after it: {mixed}", f"in {count_calls(calls)}")
    kernels = ", ".join(dict.fromkeys(one.call.kernel for one in calls))
    sink = " and a sink" if any(one.call.sinks is not None for one in calls) else ""
    return Checked(ROWS, f"in {count_calls(calls)}: a softmax over the keys{sink} ({kernels})")


def count_filled_keys(one: InnerCall) -> int:
    """Return how many keys of zeros after the tokens have weight."""
    q, k = one.call.q, one.call.k
    more = k.shape[2] - q.shape[2]
    if more < 1 or one.is_stored_as_weights:
        return 0
    last = k[:, :, -more:]
    zeros = int((~last.any(-1)).all(0).all(0).sum())
    if not zeros or k.shape[2] > MOST_KEYS:
        return 0
    weights = one.call.build_map(k).dense()[..., -more:]
    return int(((weights > 0).any(2).any(0).any(0) & (~last.any(-1)).all(0).all(0)).sum())


def check_heads(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check that each head has its own part of the projections, and that key heads serve neighbors; None if not known."""
    for one in calls:
        wrong = next((reading for reading in (one.absorbed, one.output) if reading is not None and reading.wrong), None)
        if wrong is not None:
            return Finding(wrong.kind, f"in {one.name or 'the layer'} {wrong.wrong}", wrong.cure, 1.6, "heads", one.name)
        table = find_viewed_table(one)
        if table:
            does = f"the rows of {table} are viewed as (heads, queries, keys): heads and tokens are mixed in the bias"
            return Finding("mixed heads", f"in {one.name or 'the layer'} {does}", PERMUTE, 1.6, "heads", one.name)
        exchanged = describe_exchanged_axes(one.module, one.call.q.shape[1], one.width)
        if exchanged:
            return Finding("mixed heads", f"in {one.name or 'the layer'} {exchanged}", SPLIT, 1.6, "heads", one.name)
    if calls and all(one.absorbed is not None and one.output is not None for one in calls):
        what = f"{HEADS}: {calls[0].call.q.shape[1]}, of latents"
        return Checked(what, f"in {count_calls(calls)}, by the products that absorb the weights of keys and values")
    sources = [source for one in calls for source in (one.q_source, one.k_source)]
    if not sources or not all(source is not None and source.slices for source in sources):
        return None
    for one in calls:
        mixed = find_mixed_heads(one) or find_unused_heads(one, calls)
        if mixed is not None:
            return mixed
    if any(source is not None and source.is_ambiguous for source in sources):
        return None
    heads = calls[0].call.q.shape[1]
    of = HEADS if all(one.output is not None and one.v_source is not None for one in calls) else OWN_HEADS
    strided = STRIDED if any(source is not None and source.order not in ("", BY_HEAD) for source in sources) else ""
    what = f"{of}: {heads} of width {calls[0].width}{strided}"
    return Checked(what, f"in {count_calls(calls)}, by the norms of queries and keys")


def find_mixed_heads(one: InnerCall) -> Finding | None:
    """Return the finding of heads that are views of tokens and heads, or of key heads in another order."""
    q, k = one.q_source, one.k_source
    assert q is not None
    assert k is not None
    sources = {"q": q, "k": k} | ({} if one.v_source is None else {"v": one.v_source})
    viewed = "".join(letter for letter, source in sources.items() if source.is_viewed)
    if viewed:
        wrong = describe_mixed_heads("split", viewed)
        return Finding(wrong.kind, f"in {one.name or 'the layer'} {wrong.does}", wrong.cure, 1.6, "heads", one.name)
    unlike = describe_other_order(sources)
    if unlike:
        return Finding("mixed heads", f"in {one.name or 'the layer'} {unlike}", ORDER, 1.6, "heads", one.name)
    for letter, source in list(sources.items())[1:]:
        heads, groups = len(source.slices), len(set(source.slices))
        is_tiled = 1 < groups < heads == len(q.slices) and source.slices == source.slices[:groups] * (heads // groups)
        if is_tiled and source.slice_count:
            wrong = describe_mixed_heads("share", "tiled")
            does = wrong.does if letter == "k" else wrong.does.replace("key heads", "heads of values, not of keys,")
            return Finding(wrong.kind, f"in {one.name or 'the layer'} {does}", wrong.cure, 1.6, "heads", one.name)
    crossed = find_crossed_heads(q, k)
    if crossed:
        return Finding("mixed heads", f"in {one.name or 'the layer'} {crossed}", ORDER, 1.6, "heads", one.name)
    other = None if one.v_source is None else find_other_place(k, one.v_source)
    if other is not None:
        does = "head {} of the keys is part {} of {}, but head {} of the values is part {} of {}".format(*other)
        return Finding("mixed heads", f"in {one.name or 'the layer'} {does}", ORDER, 1.6, "heads", one.name)
    return None


def describe_other_order(sources: Mapping[str, ProjectionSource]) -> str:
    """Describe that queries, keys and values are not all split into heads in the same order; "" if they are."""
    split = {letter: source.order for letter, source in sources.items() if source.order and len(set(source.slices)) > 1}
    orders = {letter: order if order == BY_WIDTH else BY_HEAD for letter, order in split.items()}
    for one, other in itertools.pairwise(orders):
        if orders[one] != orders[other]:
            return f"{ROLE_NAMES[one]} are split into heads as {orders[one]}, but {ROLE_NAMES[other]} as {orders[other]}"
    return ""


def find_unused_heads(one: InnerCall, calls: Sequence[InnerCall]) -> Finding | None:
    """Return the finding of heads that the projections of queries and keys, or of keys, make and that no call of them uses.

    A projection of queries may make a gate beside them, and one whose name does not state keys may make values too.
    """
    q, k = one.q_source, one.k_source
    if q is None or k is None or q.name == k.name or not (read_role(k) == "k" or one.widths[1]):
        return None
    names, count = [k.name] if q.slice_count != k.slice_count else [q.name, k.name], k.slice_count
    used = len({part for name in names for part in list_used_slices(name, calls)})
    if used >= count:
        return None
    makes = f"{' and '.join(names)} make{'s' * (len(names) == 1)} {'are' if used > 1 else 'is'} used"
    does = f"in {one.name or 'the layer'} only {used} of the {count} heads that {makes}"
    return Finding("mixed heads", does, ORDER, 1.6, UNUSED_HEADS, one.name)


def list_used_slices(name: str, calls: Sequence[InnerCall]) -> Iterator[int]:
    """Yield the slices of the output of this name that queries or keys of a call come from."""
    for source in (source for one in calls for source in (one.q_source, one.k_source)):
        if source is not None and source.name == name:
            yield from source.slices


def find_crossed_heads(q: ProjectionSource, k: ProjectionSource) -> str:
    """Return the first head of queries that meets the keys of another head, or of another group of heads, in words, else ""."""
    heads, rest = divmod(len(q.slices), len(k.slices))
    group, more = divmod(len(set(q.slices)), len(set(k.slices)))
    if rest or more or not (q.slice_count and k.slice_count):
        return ""
    queries, keys = list_places(q), [place for place in list_places(k) for _ in range(heads)]
    for i, (own, met) in enumerate(zip(queries, keys, strict=True)):
        if own // group != met:
            return f"head {i} of the queries is part {own} of {q.name}, but the keys that it meets are part {met} of {k.name}"
    return ""


def list_places(source: ProjectionSource) -> list[int]:
    """Return the place of each head among the parts of its projection that are used."""
    used = sorted(set(source.slices))
    return [used.index(part) for part in source.slices]


def find_other_place(k: ProjectionSource, v: ProjectionSource) -> tuple[object, ...] | None:
    """Return the first head whose values have another place among the parts of their projection than its keys, in words."""
    places = [list_places(source) for source in (k, v)]
    if not (k.slice_count and v.slice_count) or len(places[0]) != len(places[1]) or places[0] == places[1]:
        return None
    i = next(i for i, (one, other) in enumerate(zip(*places, strict=True)) if one != other)
    return i, places[0][i], k.name, i, places[1][i], v.name


def check_roles(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check that queries and keys come from the projections of their names; None if names do not tell."""
    for find_mistake in (find_exchanged_values, find_other_norm, find_shared_source, find_repeated_bias):
        wrong = next((found for one in calls if (found := find_mistake(one)) is not None), None)
        if wrong is not None:
            return wrong
    named = [(one, read_role(one.q_source), read_role(one.k_source)) for one in calls]
    if not named or any((q, k) not in (("q", "k"), ("k", "q")) for _, q, k in named):
        return None
    for one, q, _ in named:
        if q == "k":
            assert one.q_source is not None
            assert one.k_source is not None
            sentence = f"queries come from {one.q_source.name}, and keys from {one.k_source.name}: they are exchanged"
            return Finding("wrong roles", sentence, ROLE, 1.5, "roles", one.name)
    return Checked(ROLES, f"in {count_calls(calls)}, by their names and norms")


def find_exchanged_values(one: InnerCall) -> Finding | None:
    """Return the finding of values and of queries or keys that come from the projections of one another, by their names."""
    sources = {"queries": one.q_source, "keys": one.k_source, "values": one.v_source}
    roles = [read_role(source) for source in sources.values()]
    if sorted(roles) != ["k", "q", "v"] or roles[2] == "v":
        return None
    parts = [f"{who} from {source.name}" for who, source in sources.items() if source is not None]
    sentence = f"in {one.name or 'the layer'} {parts[0]}, {parts[1]} and {parts[2]}: they are exchanged"
    return Finding("wrong roles", sentence.replace(" queries from", " queries come from", 1), ROLE, 1.5, "roles", one.name)


def read_role(source: ProjectionSource | None) -> str:
    """Return the role that the name of a source states: q, k, v or ""."""
    return "" if source is None else parse_role(source.name.rpartition(".")[2])


def count_calls(calls: Sequence[InnerCall]) -> str:
    """Format the number of calls."""
    return f"{len(calls)} recorded call{'s' * (len(calls) > 1)}"


def check_positions(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check how queries and keys are rotated, and a bias by distance; None if neither is there."""
    read: list[Rotary] = []
    for one in calls:
        wrong = find_wrong_rotation(one) or slope_checks.find_wrong_slopes(one)
        if wrong is not None:
            sentence, cure = wrong
            return Finding("wrong positions", f"in {one.name or 'the layer'} {sentence}", cure, 1.4, "positions", one.name)
        rotary = read_source(one.call.q, one.q_source)
        read += [] if rotary is None or read_source(one.call.k, one.k_source) is None else [rotary]
    if not read:
        return None
    how = f"{read[0].width} columns in pairs of {read[0].columns}, queries and keys alike"
    base = frequency_reading.read_base(read[0])
    of_base = "" if base is None else f", of base {frequency_reading.format_base(base)}"
    return Checked(f"{POSITIONS}: {how}", f"in {len(read)} recorded call{'s' * (len(read) > 1)}; each angle is read{of_base}")


def check_norm_order(calls: Sequence[InnerCall]) -> Finding | Unknown | None:
    """Check that norms of queries and keys come before their rotation, or commute with it; None if they do."""
    return late_norms.check_order([(one.name, late) for one in calls for late in one.late_norms])


def check_token_places(calls: Sequence[InnerCall]) -> Finding | None:
    """Check that queries, keys and values are those of the same tokens; None if none of them are seen to be shifted."""
    return token_shift.check_shifts([(one.name, one.shifts) for one in calls])


def find_wrong_rotation(one: InnerCall) -> tuple[str, str] | None:
    """Return what is wrong with the rotation of queries and keys, and the cure; None if nothing is, or there is none."""
    v = one.v_source
    is_own = v is not None and one.k_source is not None and (v.name, v.slices) != (one.k_source.name, one.k_source.slices)
    if is_own and one.output is not None and one.call.v is not None and read_source(one.call.v, v) is not None:
        return "values are rotated by their positions, and the context is not rotated back", VALUES
    sources = (("queries", one.q_named, one.call.q, one.q_source), ("keys", one.k_named, one.call.k, one.k_source))
    for who, named, x, source in sources:
        is_unknown = source is None and named is not None and named.shape == x.shape
        mixed = describe_no_rotation(named.double(), x.double()) if is_unknown and named is not None else ""
        if mixed:
            return mixed.format(who), TURN
        other = "" if source is None else find_other_axis(source.projected, x.double())
        if other:
            return f"{who} are rotated by angles of their {other}, the same for all tokens", PLACES
        if source is not None and is_rotated_before_split(source.projected, x.double()):
            return f"{who} are rotated before they are split into heads: {CROSSING}", SPLIT_FIRST
    wrong = latent_rotation.find_wrong_rotation(one)
    if wrong:
        return wrong, TURN
    q, k = read_source(one.call.q, one.q_source), read_source(one.call.k, one.k_source)
    plain = [list_plain_heads(x, source) for _, _, x, source in sources]
    for (who, other), heads in zip((("queries", "keys"), ("keys", "queries")), plain, strict=True):
        if (q is None) != (k is None) and heads and one.call.q.shape[1] == one.call.k.shape[1] and plain[0] != plain[1]:
            return f"heads {', '.join(map(str, heads))} of the {who} are not rotated, but those of the {other} are", TURN
    if q is not None and k is not None:
        columns = max(q.phasors.shape[1], k.phasors.shape[1])
        found = next(find_mistakes(q.repeat_heads(columns), k.repeat_heads(columns)), None)
        found = found or frequency_reading.find_wrong_frequencies(q)
        return (found, TURN) if found else None
    for who, rotary, x, source in (("keys", q, one.call.k, one.k_source), ("queries", k, one.call.q, one.q_source)):
        if rotary is not None and source is not None and source.projected.shape == x.shape and source.is_equal_to(x):
            return f"only {'queries' if who == 'keys' else 'keys'} are rotated by their positions", TURN
    return None


def list_plain_heads(x: Tensor, source: ProjectionSource | None) -> list[int]:
    """Return the heads of x (b, h, t, d) that are the projection itself if others have its norms only; empty if none or all."""
    if source is None or source.projected.shape != x.shape:
        return []
    near = (x - source.projected).abs().amax((0, 2, 3)) < 1e-3 * x.abs().max()
    heads: list[int] = near.nonzero().flatten().tolist()
    return heads if len(heads) < x.shape[1] else []

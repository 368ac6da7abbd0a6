"""Check the scale of recorded attention calls by the norms of queries and keys, so that rotations are seen through."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.projection_source import read_source
from regard.examination.report import Checked, Finding, Unknown, count_calls

LEAST_FACTOR = 2.0  # of cosines: with less, a weight is at most exp(4) times another
OFF = 0.02  # of the expected scale
MOST_FACTOR = 1.5  # of YaRN on queries and keys: beyond, any number is one
SCALE = "the scale of the scores"
NEAR = "a factor that differs by 2 % would be detected"
LINE = "scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1]), with k split into heads"
VALUES = "the scale of values"
NEAR_ONE = 1e-3  # of a factor
OFTEN_MEANT = (0.5, 2.0)  # factors of a branch, even if √d is the same number
SCORES_ALONE = "Multiply the scores alone by 1 / √d, before the softmax: context = weights @ v."
MEANT_VALUES = "nothing, if it is intended: weights of other layers expect a context of weights @ v"
LEAST_BASE = 1.9  # of logarithms: a larger factor has no 1 / √d


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
    others = [one for one in scored if not is_near(get_scale(one), stated or one.width**-0.5)]
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
    return Checked(what, f"in {count_calls(factors)}")


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
    if is_passed_for_cosines(one) or is_learned(one, get_scale(one) * one.width**0.5):
        return True
    if is_mistake(one):
        return False
    found = get_scale(one)
    own = one.call.q.shape[-1] ** -0.5 if one.call.scale is None else one.call.scale
    rotated = one.q_source is not None and one.k_source is not None and is_near(one.q_source.factor, one.k_source.factor)
    if read_context_factor(one):
        return True
    return one.stated is not None and (is_near(found, one.stated) or (rotated and is_near(own, one.stated)))


def is_learned(one: InnerCall, factor: float) -> bool:
    """Return whether a parameter of the module, one number for all or for each head, is this factor."""
    own = [] if one.module is None else [x for x in one.module.parameters() if x.numel() in (1, one.call.q.shape[1])]
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


def is_near(scale: float, expected: float) -> bool:
    """Return whether two scales are equal up to OFF."""
    return abs(scale - expected) <= OFF * abs(expected)


def report_scale(one: InnerCall, stated: float | None, may_be_intended: bool) -> Finding | Unknown:
    """Return the finding of another scale, or that it may be intended, as in some designs with norms or a bias."""
    found, expected = get_scale(one), stated or one.width**-0.5
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


def check_values(calls: Sequence[InnerCall]) -> Finding | Unknown | None:
    """Return that values or contexts are multiplied by a number: a mistake if it is one of scales, else possibly meant."""
    unknown = None
    for one in calls:
        factors = read_factors(one)
        factor = 1.0 if factors is None else factors[0] * factors[1]
        if factors is None or math.isclose(factor, 1.0, rel_tol=NEAR_ONE):
            continue
        who = describe_product(*factors)
        where, name = one.name or "the layer", next(iterate_names(one, factor), "")
        if name and not is_learned(one, factor):
            return one.report("wrong scale", f"{who} multiplied by {factor:.4g}, {name}", SCORES_ALONE, 1.4, "values")
        what = f"whether it is intended that in {where} {who} multiplied by {factor:.4g}"
        unknown = unknown or Unknown(what, MEANT_VALUES)
    return unknown


def read_factors(one: InnerCall) -> tuple[float, float] | None:
    """Return the factors on the outputs of the projection of values and on the context; None if one is not known."""
    v, output = one.v_source, one.output
    is_known = v is not None and bool(v.slices) and not v.is_ambiguous and not v.is_joined
    if v is None or not is_known or output is None or output.wrong or one.absorbed is not None:
        return None
    return v.factor, output.factor


def describe_product(values: float, context: float) -> str:
    """Return which of values and context have a factor other than 1, in words."""
    if math.isclose(context, 1.0, rel_tol=NEAR_ONE):
        return "values are"
    return "the context is" if math.isclose(values, 1.0, rel_tol=NEAR_ONE) else "values and their context are"


def iterate_names(one: InnerCall, factor: float) -> Iterator[str]:
    """Yield what a factor is in terms of widths and the number of tokens, in words."""
    d, (_, h, t, _) = one.width, one.call.q.shape
    if any(math.isclose(factor, other, rel_tol=NEAR_ONE) for other in OFTEN_MEANT):
        return
    for n, what in ((d, "the width of a head"), (h * d, "the width of all heads"), (t, "the number of tokens")):
        for number, words in ((n**0.5, f"√{n}"), (n**-0.5, f"1 / √{n}"), (float(n), f"{n}"), (1 / n, f"1 / {n}")):
            if math.isclose(factor, number, rel_tol=NEAR_ONE):
                yield f"{words}, where {n} is {what}"


def read_log_factor(few: Sequence[InnerCall], many: Sequence[InnerCall]) -> float | None:
    """Return the number c if the scale of each call is c log t for t tokens, few or many; None if it is not.

    c is at most that of 1 / √d times a logarithm in base 2.
    """
    factors: set[float] = set()
    for one, other in zip(few, many, strict=False):
        t, longer = one.call.q.shape[2], other.call.q.shape[2]
        if not one.scale or not other.scale or min(t, longer) < 2 or t == longer:
            return None
        factor = one.scale / math.log(t)
        most = one.width**-0.5 / math.log(LEAST_BASE)
        if factor > most or abs(other.scale / (factor * math.log(longer)) - 1) > NEAR_ONE:
            return None
        factors.add(round(factor, 6))
    return factors.pop() if len(few) == len(many) and len(factors) == 1 else None


def report_log_scale(factor: float, few: Sequence[InnerCall], many: Sequence[InnerCall]) -> Checked:
    """Return that the scale is by a published definition, with the number of tokens of both calls."""
    base = math.exp(few[0].width ** -0.5 / factor)
    own = f"log t / √{few[0].width}" if abs(base / math.e - 1) < NEAR_ONE else f"log t / (log {base:.4g} √{few[0].width})"
    what = f"the scale grows with the logarithm of the number of tokens t, {factor:.4g} log t = {own}, as in log-length scaled "
    lengths = f"{few[0].call.q.shape[2]} and {many[0].call.q.shape[2]} tokens"
    return Checked(f"{what}attention", f"with {lengths}; a factor that differs by {NEAR_ONE:.1%} would be detected")


def find_log_base(factors: Tensor) -> float | None:
    """Return the number n if factors of queries (q,) are 1 up to position n, counted from 1, and log position / log n after."""
    positions = torch.arange(1, len(factors) + 1, dtype=torch.float64)
    beyond = factors != 1
    if int(beyond.sum()) < 2:
        return None
    ratios = factors[beyond] / positions[beyond].log()
    base = math.exp(1 / float(ratios.mean()))
    is_steady = bool(((ratios / ratios.mean() - 1).abs() < NEAR_ONE).all())
    return base if is_steady and bool((beyond == (positions > base * (1 + NEAR_ONE))).all()) else None

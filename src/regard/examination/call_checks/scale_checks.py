"""Check the scale of recorded attention calls by the norms of queries and keys, so that rotations are seen through."""

import math
from collections.abc import Sequence

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.projection_source import read_source
from regard.examination.report import Checked, Finding, Unknown, count_calls

LEAST_FACTOR = 2.0  # of cosines: with less, a weight is at most exp(4) times another
OFF = 0.02  # of the expected scale
MOST_FACTOR = 1.5  # of YaRN on queries and keys: beyond, any number is one
SCALE = "the scale of the scores"
NEAR = "a factor that differs by 2 % would be detected"
LINE = "scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1]), with k split into heads"


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

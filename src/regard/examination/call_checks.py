"""Check recorded attention calls against the projections' outputs: scale, rows of weights, heads and roles.

The norms of queries and keys are compared, so that rotary positions and other rotations are seen through.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from regard.examination.call_conventions import parse_role
from regard.examination.identify.mistakes import ROLE, describe_mixed_heads
from regard.examination.inner_calls import InnerCall
from regard.examination.projection_source import ProjectionSource
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.rotary_reading import Rotary, describe_style, find_mistakes, fit_without_minus, read_rotary
from regard.mechanism import Causal

OFF = 0.02  # of the expected scale
SCALE = "the scale of the scores"
ROWS = "rows of weights sum to one, over the keys"
HEADS = "heads are independent"
ROLES = "queries and keys come from their own projections"
POSITIONS = "rotary positions"
TURN = (
    "Rotate queries and keys alike: pair (a, b) becomes (a cos - b sin, b cos + a sin), angle = position * base ** (-2 i / d)."
)
NEARER = "Subtract more from farther keys: bias = -slope * (i - j) for query i and key j."
HIDDEN = -1e4  # a bias below it hides a key
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
    positions = check_positions(calls)
    if positions is not None:
        yield POSITIONS, positions


def check_scale(calls: Sequence[InnerCall], stated: float | None, in_model: bool = False) -> Finding | Checked | Unknown | None:
    """Check that each call multiplies scores by the stated scale, or else by 1 / √d; None if a scale is not known.

    Models whose weights are trained or initialized for a scale of 1 or 1 / d, in every layer, cannot be told from mistakes.
    """
    scored = [one for one in calls if one.call.weight is None]  # additive scores have no scale
    if not calls or any(one.scale is None for one in scored):
        return None
    if not scored:
        return Checked(f"{SCALE}: additive scores have none", f"in {count_calls(calls)}")
    others = [one for one in scored if not is_near(get_scale(one), get_expected_scale(one, stated))]
    wrong = next((one for one in others if stated is not None or not is_stated(one)), None)
    if wrong is None:
        return Checked(f"{SCALE}, {get_scale(scored[0]):.4g}", f"in {count_calls(scored)}, through rotations; {NEAR}")
    found = get_scale(wrong)
    alike = all(is_near(get_scale(one), found) for one in scored)
    design = in_model and (not is_mistake(wrong) or (alike and any(is_near(found, one) for one in (1.0, 1 / wrong.width))))
    return report_scale(wrong, stated, design or wrong.call.bias is not None or has_norm(wrong))


def is_mistake(one: InnerCall) -> bool:
    """Return whether a scale is one that is easily written by mistake: none, twice, by the width of all heads."""
    found, d = get_scale(one), one.width
    inside = one.call.q.shape[1] * d
    return any(is_near(found, known) for known in (1.0, 1 / d, d**0.5, inside**-0.5, 1 / inside, d**-0.25))


def is_stated(one: InnerCall) -> bool:
    """Return whether a scale that is no known mistake is what the module states, or what a scaled rotation makes of it."""
    if is_mistake(one):
        return False
    found = get_scale(one)
    own = one.width**-0.5 if one.call.scale is None else one.call.scale
    rotated = one.q_source is not None and one.k_source is not None and is_near(one.q_source.factor, one.k_source.factor)
    return one.stated is not None and (is_near(found, one.stated) or (rotated and is_near(own, one.stated)))


def get_scale(one: InnerCall) -> float:
    """Return the scale of a call of which it is known."""
    assert one.scale is not None
    return one.scale


def get_expected_scale(one: InnerCall, stated: float | None) -> float:
    """Return the stated scale, or else 1 / √d."""
    return one.width**-0.5 if stated is None else stated


def is_near(scale: float, expected: float) -> bool:
    """Return whether two scales are equal up to OFF."""
    return abs(scale / expected - 1) < OFF


def report_scale(one: InnerCall, stated: float | None, may_be_intended: bool) -> Finding | Unknown:
    """Return the finding of another scale, or that it may be intended, as in some designs with norms or a bias."""
    found, expected = get_scale(one), get_expected_scale(one, stated)
    meant = f"1 / √{one.width} =" if stated is None else "the stated"
    sentence = f"in {one.name or 'the layer'} the products of queries and keys are multiplied by {found:.4g}, not by {meant} "
    sentence += f"{expected:.4g}"
    if stated is None and may_be_intended:
        return Unknown(f"{SCALE}: {sentence}, as in some designs", f"scale={found:.4g}, if it is intended", is_required=True)
    return Finding(
        "wrong scale", sentence, f"Multiply them by {expected:.4g}: {LINE}. Or pass scale={found:.4g}.", 1.5, "scale", one.name
    )


def has_norm(one: InnerCall) -> bool:
    """Return whether queries or keys come from a norm."""
    return any(source is not None and "norm" in source.name.lower() for source in (one.q_source, one.k_source))


def check_rows(calls: Sequence[InnerCall]) -> Checked | None:
    """Return the result that rows of weights sum to one, as recorded calls are softmaxes; None if one is gated."""
    if not calls or any("gate" in one.call.note for one in calls):  # weights that a gate multiplies after the softmax
        return None
    kernels = ", ".join(dict.fromkeys(one.call.kernel for one in calls))
    return Checked(ROWS, f"in {count_calls(calls)}: a softmax over the keys ({kernels})")


def check_heads(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check that each head has its own part of the projections, and that key heads serve neighbors; None if not known."""
    if not calls or any(one.q_source is None or one.k_source is None for one in calls):
        return None
    for one in calls:
        wrong = find_mixed_heads(one)
        if wrong is not None:
            return wrong
    heads = calls[0].call.q.shape[1]
    return Checked(f"{HEADS}: {heads} of width {calls[0].width}", f"in {count_calls(calls)}, by the norms of queries and keys")


def find_mixed_heads(one: InnerCall) -> Finding | None:
    """Return the finding of heads that are views of tokens and heads, or of key heads in another order."""
    q, k = one.q_source, one.k_source
    assert q is not None
    assert k is not None
    viewed = "".join(letter for letter, source in (("q", q), ("k", k)) if source.is_viewed)
    if viewed:
        wrong = describe_mixed_heads("split", viewed)
        return Finding(wrong.kind, f"in {one.name or 'the layer'} {wrong.does}", wrong.cure, 1.6, "heads", one.name)
    heads, groups = len(k.slices), len(set(k.slices))
    if (
        heads == len(q.slices)
        and 1 < groups < heads
        and heads % groups == 0
        and k.slices == k.slices[:groups] * (heads // groups)
    ):
        wrong = describe_mixed_heads("share", "tiled")
        return Finding(wrong.kind, f"in {one.name or 'the layer'} {wrong.does}", wrong.cure, 1.6, "heads", one.name)
    return None


def check_roles(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check that queries and keys come from the projections of their names; None if names do not tell."""
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


def read_role(source: ProjectionSource | None) -> str:
    """Return the role that the name of a source states: q, k, v or ""."""
    return "" if source is None else parse_role(source.name.rpartition(".")[2])


def count_calls(calls: Sequence[InnerCall]) -> str:
    """Format the number of calls."""
    return f"{len(calls)} recorded call{'s' * (len(calls) > 1)}"


def check_positions(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check how queries and keys are rotated, and the sign of a bias by distance; None if neither is there."""
    read: list[Rotary] = []
    for one in calls:
        wrong = find_wrong_rotation(one) or find_wrong_slope(one)
        if wrong is not None:
            sentence, cure = wrong
            return Finding("wrong positions", f"in {one.name or 'the layer'} {sentence}", cure, 1.4, "positions", one.name)
        rotary = read_source(one.call.q, one.q_source)
        read += [] if rotary is None or read_source(one.call.k, one.k_source) is None else [rotary]
    if not read:
        return None
    how = f"{read[0].width} columns in pairs of {describe_style(read[0].style)}, queries and keys alike"
    return Checked(f"{POSITIONS}: {how}", f"in {len(read)} recorded call{'s' * (len(read) > 1)}; each angle is read")


def find_wrong_rotation(one: InnerCall) -> tuple[str, str] | None:
    """Return what is wrong with the rotation of queries and keys, and the cure; None if nothing is, or there is none."""
    for who, named, x in (("queries", one.q_named, one.call.q), ("keys", one.k_named, one.call.k)):
        if named is not None and named.shape == x.shape and fit_without_minus(named.double(), x.double()):
            return f"a minus is missing in the rotation of {who}: a pair (a, b) becomes (a cos + b sin, b cos + a sin)", TURN
    q, k = read_source(one.call.q, one.q_source), read_source(one.call.k, one.k_source)
    if q is not None and k is not None:
        found = next(find_mistakes(q, k), None)
        return None if found is None else (found, TURN)
    for who, rotary, x, source in (("keys", q, one.call.k, one.k_source), ("queries", k, one.call.q, one.q_source)):
        if rotary is not None and source is not None and source.projected.shape == x.shape and source.is_equal_to(x):
            return f"only {'queries' if who == 'keys' else 'keys'} are rotated by their positions", TURN
    return None


def read_source(x: Tensor, source: ProjectionSource | None) -> Rotary | None:
    """Return the rotation from a source's output to queries or keys; None if there is none."""
    return None if source is None or source.projected.shape != x.shape else read_rotary(source.projected, x.double())


def find_wrong_slope(one: InnerCall) -> tuple[str, str] | None:
    """Return that a causal bias grows with the distance in every head, and the cure; None if not."""
    bias = one.call.bias
    if bias is None or one.is_stored_as_weights or bias.shape[-1] < 3:
        return None
    later = bias[..., 0, 1:]
    if one.call.mask != Causal() and not (bias.shape[-2] == bias.shape[-1] and bool((later < HIDDEN).all())):
        return None  # keys on both sides
    steps = bias[..., -1, :].double().diff(dim=-1)  # of the last query, over its keys
    steep = steps.isfinite().all() and (steps - steps[..., :1]).abs().max() < 1e-4 * steps.abs().max()
    return ("the bias of every head grows with the distance of a key", NEARER) if steep and bool((steps < 0).all()) else None

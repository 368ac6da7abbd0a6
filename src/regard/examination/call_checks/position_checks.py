"""Check how queries and keys of recorded attention calls are rotated by their positions, and biases by distance."""

from collections.abc import Sequence

from torch import Tensor, nn

from regard.examination.call_reading import frequency_reading, rotary_reading
from regard.examination.call_reading.bias_reading import list_alibi_slopes, read_linear_slopes, read_slopes
from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.projection_source import ProjectionSource, read_source
from regard.examination.call_reading.rotary_reading import (
    Rotary,
    describe_no_rotation,
    find_mistakes,
    find_other_axis,
    is_rotated_before_split,
    read_rotary,
)
from regard.examination.report import Checked, Finding, Unknown, count_calls

POSITIONS = "rotary positions"
TURN = (
    "Rotate queries and keys alike: pair (a, b) becomes (a cos - b sin, b cos + a sin), angle = position * base ** (-2 i / d)."
)
VALUES = "Rotate queries and keys only: outputs depend on absolute positions if values are rotated."
PLACES = "Rotate along the axis of tokens: after the transpose, q (b, h, t, d) times cos and sin (t, d); before it, (t, 1, d)."
CROSSING = "the two columns of a pair lie in different heads, so that scores depend on absolute positions"
SPLIT_FIRST = "Split first: q.view(b, t, heads, d).transpose(1, 2), and then rotate each head by angles (t, d / 2)."
SLOPES_FALL = "a bias by distance"
NEAR_SLOPES = 1e-3  # of a slope
SHOWN = 6  # slopes
MAX_HEADS = 1024  # of a buffer that is read as slopes
NEARER = "Subtract more from farther keys: bias = -slope * (i - j) for query i and key j."
SCALE_FIRST = "Scale first, and then add the bias: q @ k.transpose(-2, -1) / math.sqrt(d) + bias."
BOTH_SIDES = "Take the absolute value: bias = -slope * (i - j).abs() for query i and key j."
SLOPES = (
    "Give head i of h the slope 2 ** (-8 (i + 1) / h), as published weights expect. A layer trained from scratch in its own "
    "order works as well."
)


def check_positions(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check how queries and keys are rotated, and a bias by distance; None if neither is there."""
    read: list[Rotary] = []
    for one in calls:
        wrong = find_wrong_rotation(one) or find_wrong_slopes(one)
        if wrong is not None:
            sentence, cure = wrong
            return one.report("wrong positions", sentence, cure, 1.4, "positions")
        q, k = find_rotations(one)
        read += [] if q is None or k is None else [q]
    if not read:
        return None
    how = f"{read[0].width} columns in pairs of {read[0].columns}, queries and keys alike"
    base = frequency_reading.read_base(read[0])
    of_base = "" if base is None else f", of base {frequency_reading.format_base(base)}"
    return Checked(f"{POSITIONS}: {how}", f"in {count_calls(read)}; each angle is read{of_base}")


def find_rotations(one: InnerCall) -> tuple[Rotary | None, Rotary | None]:
    """Return the rotations of queries and of keys by their positions, also before a norm; None for each that has none."""
    late = {norm.who: norm.rotary for norm in one.late_norms}
    q, k = read_source(one.call.q, one.q_source), read_source(one.call.k, one.k_source)
    return q or late.get("queries"), k or late.get("keys")


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
    wrong = find_wrong_latent_rotation(one)
    if wrong:
        return wrong, TURN
    q, k = find_rotations(one)
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


def find_wrong_latent_rotation(one: InnerCall) -> str:
    """Return what is wrong with the rotation of the last columns, which the keys of all heads share; "" if nothing is.

    Source: DeepSeek-V2, section 2.1.3.
    """
    shared, source = None if one.k_source is None else one.k_source.shared, one.q_source
    if shared is None or source is None or source.is_joined or source.projected.shape != one.call.q.shape:
        return ""
    n = shared.shape[-1]
    pairs = ((source.projected[..., -n:], one.call.q[..., -n:].double()), (shared, one.call.k[:, :1, :, -n:].double()))
    q, k = (read_rotary(*pair) for pair in pairs)
    if q is not None and k is not None:
        return next(find_mistakes(q, k), "")
    plain = [before.shape == after.shape and rotary_reading.is_near(before, after, before) for before, after in pairs]
    if (q is None) == (k is None) or not plain[q is not None]:
        return ""
    rotated, other = ("queries", "keys") if k is None else ("keys", "queries")
    return f"the last {n} columns of {rotated} are rotated by their positions, but those of {other}, which they meet, are not"


def find_wrong_slopes(one: InnerCall) -> tuple[str, str] | None:
    """Return what is wrong with a bias by distance in every head, and the cure; None if nothing is.

    Slopes are compared with those of ALiBi where they are the same numbers in another order, or, of a layer that holds ALiBi's,
    times the scale. Falcon, whose layers are given the bias, was trained with it before the scale.
    """
    slopes = read_slopes(one)
    if slopes is not None and bool((slopes < 0).all()):
        return "the bias of every head grows with the distance of a key", NEARER
    if slopes is None:
        one_sided = read_linear_slopes(one)
        is_alibi = one_sided is not None and has_alibi_slopes(one_sided.abs())
        return (describe_both_sides(one), BOTH_SIDES) if is_alibi else None
    right = list_alibi_slopes(len(slopes))
    scale = one.call.q.shape[-1] ** -0.5 if one.call.scale is None else one.call.scale
    if are_slopes_near(slopes, right) or are_slopes_learned(one.module, slopes):
        return None
    if abs(scale - 1) > NEAR_SLOPES and are_slopes_near(slopes, right * scale) and holds_alibi_slopes(one.module):
        return f"the slopes of its heads are {scale:.4g} times those of ALiBi: the bias is added before the scale", SCALE_FIRST
    does = f"the slopes of its heads are {format_slopes(slopes)}, those of ALiBi in another order: {format_slopes(right)}"
    return (does, SLOPES) if has_alibi_slopes(slopes) else None


def check_slopes(calls: Sequence[InnerCall]) -> Checked | Unknown | None:
    """Check that a bias that is linear in the distance falls in every head; None if there is none."""
    found = [(one, slopes) for one in calls if (slopes := read_slopes(one)) is not None]
    for one, slopes in found:
        growing = (slopes < 0).nonzero().flatten().tolist()
        if growing:
            heads = f"head{'s' * (len(growing) > 1)} {', '.join(map(str, growing))}"
            sentence = f"whether the bias of {heads} is meant to grow with the distance of a key"
            others = f"in {one.name or 'the layer'} that of the others falls: {describe_range(slopes)}"
            return Unknown(f"{sentence}: {others}", "slopes of one sign, unless they are learned")
    linear = next((one for one in calls if read_linear_slopes(one) is not None), None)
    if linear is not None:
        sentence = f"whether it is intended that in {linear.name or 'the layer'} {describe_both_sides(linear)}"
        return Unknown(sentence, "nothing, if later keys are meant to have more or less weight than earlier ones")
    if not found:
        return None
    one, slopes = found[0]
    is_alibi = are_slopes_near(slopes, list_alibi_slopes(len(slopes)))
    where = f"in {count_calls(found)}; each head's slope is read{', and is that of ALiBi' * is_alibi}"
    return Checked(f"a bias falls with the distance of a key, {describe_range(slopes)}", where)


def describe_both_sides(one: InnerCall) -> str:
    """Describe a bias that is linear in the position of a key, on both sides of a query."""
    assert one.call.bias is not None
    favored = "last" if bool((one.call.bias[..., -1, -1] > one.call.bias[..., -1, 0]).all()) else "first"
    where = "the bias of every head is linear in the position of a key, on both sides of a query"
    return f"{where}: the {favored} key has the largest, whatever the query"


def has_alibi_slopes(slopes: Tensor) -> bool:
    """Return whether several slopes are those of ALiBi in any order."""
    return len(slopes) > 1 and are_slopes_near(slopes.sort().values, list_alibi_slopes(len(slopes)).sort().values)


def holds_alibi_slopes(module: nn.Module | None) -> bool:
    """Return whether a buffer of a module holds the slopes of ALiBi."""
    own = () if module is None else module.buffers()
    return any(has_alibi_slopes(one.double().cpu().abs().flatten()) for one in own if 1 < one.numel() <= MAX_HEADS)


def are_slopes_learned(module: nn.Module | None, slopes: Tensor) -> bool:
    """Return whether a parameter of a module holds these slopes."""
    own = [] if module is None else [one.detach().flatten() for one in module.parameters() if one.numel() == len(slopes)]
    return any(are_slopes_near(slopes, one.double().cpu().abs()) for one in own)


def are_slopes_near(slopes: Tensor, others: Tensor) -> bool:
    """Return whether slopes are equal up to rounding."""
    return bool(((slopes.cpu() - others).abs() <= NEAR_SLOPES * others.abs()).all())


def format_slopes(slopes: Tensor) -> str:
    """Format the first slopes, one for each head."""
    shown = ", ".join(f"{slope:.3g}" for slope in slopes[:SHOWN].tolist())
    return shown + ", ..." * (len(slopes) > SHOWN)


def describe_range(slopes: Tensor) -> str:
    """Describe the least and the largest slope."""
    least, most = float(slopes.min()), float(slopes.max())
    return f"slope {least:.3g}" if least == most else f"slopes from {least:.3g} to {most:.3g}"

"""Check how queries and keys of recorded attention calls are rotated by their positions, and biases by distance."""

from collections.abc import Sequence

from torch import Tensor

from regard.examination.call_checks import slope_checks
from regard.examination.call_reading import frequency_reading, rotary_reading
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
from regard.examination.report import Checked, Finding, count_calls

POSITIONS = "rotary positions"
TURN = (
    "Rotate queries and keys alike: pair (a, b) becomes (a cos - b sin, b cos + a sin), angle = position * base ** (-2 i / d)."
)
VALUES = "Rotate queries and keys only: outputs depend on absolute positions if values are rotated."
PLACES = "Rotate along the axis of tokens: after the transpose, q (b, h, t, d) times cos and sin (t, d); before it, (t, 1, d)."
CROSSING = "the two columns of a pair lie in different heads, so that scores depend on absolute positions"
SPLIT_FIRST = "Split first: q.view(b, t, heads, d).transpose(1, 2), and then rotate each head by angles (t, d / 2)."


def check_positions(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check how queries and keys are rotated, and a bias by distance; None if neither is there."""
    read: list[Rotary] = []
    for one in calls:
        wrong = find_wrong_rotation(one) or slope_checks.find_wrong_slopes(one)
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

"""Check a bias that is linear in the distance of a key: its sign, and its slopes where they are meant to be those of ALiBi."""

from collections.abc import Sequence

from torch import Tensor, nn

from regard.examination.call_reading.bias_reading import list_alibi_slopes, read_linear_slopes, read_slopes
from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.report import Checked, Unknown, count_calls

WHAT = "a bias by distance"
NEAR = 1e-3  # of a slope
SHOWN = 6  # slopes
NEARER = "Subtract more from farther keys: bias = -slope * (i - j) for query i and key j."
AFTER = "Scale first, and then add the bias: q @ k.transpose(-2, -1) / math.sqrt(d) + bias."
BOTH_SIDES = "Take the absolute value: bias = -slope * (i - j).abs() for query i and key j."
SLOPES = (
    "Give head i of h the slope 2 ** (-8 (i + 1) / h), as published weights expect. A layer trained from scratch in its own "
)
SLOPES += "order works as well."
MEANT = "nothing, if they are meant so: published weights expect those of ALiBi"


def find_wrong_slopes(one: InnerCall) -> tuple[str, str] | None:
    """Return what is wrong with a bias by distance in every head, and the cure; None if nothing is.

    Slopes are compared with those of ALiBi where they are the same numbers, in another order or times the scale.
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
    if is_near(slopes, right) or is_learned(one.module, slopes):
        return None
    if abs(scale - 1) > NEAR and is_near(slopes, right * scale):
        return f"the slopes of its heads are {scale:.4g} times those of ALiBi: the bias is added before the scale", AFTER
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
    is_alibi = is_near(slopes, list_alibi_slopes(len(slopes)))
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
    return len(slopes) > 1 and is_near(slopes.sort().values, list_alibi_slopes(len(slopes)).sort().values)


def is_learned(module: nn.Module | None, slopes: Tensor) -> bool:
    """Return whether a parameter of a module holds these slopes."""
    own = [] if module is None else [one.detach().flatten() for one in module.parameters() if one.numel() == len(slopes)]
    return any(is_near(slopes, one.double().cpu().abs()) for one in own)


def is_near(slopes: Tensor, others: Tensor) -> bool:
    """Return whether slopes are equal up to rounding."""
    return bool(((slopes.cpu() - others).abs() <= NEAR * others.abs()).all())


def format_slopes(slopes: Tensor) -> str:
    """Format the first slopes, one for each head."""
    shown = ", ".join(f"{slope:.3g}" for slope in slopes[:SHOWN].tolist())
    return shown + ", ..." * (len(slopes) > SHOWN)


def describe_range(slopes: Tensor) -> str:
    """Describe the least and the largest slope."""
    least, most = float(slopes.min()), float(slopes.max())
    return f"slope {least:.3g}" if least == most else f"slopes from {least:.3g} to {most:.3g}"

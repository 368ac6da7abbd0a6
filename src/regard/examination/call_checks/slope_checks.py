"""Check a bias that is linear in the distance of a key: its sign, and its slopes where they are meant to be those of ALiBi."""

from collections.abc import Sequence

from torch import Tensor, nn

from regard.examination.call_reading.bias_reading import has_linear_bias, list_alibi_slopes, read_slopes
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
    """Return what is wrong with a bias by distance in every head, and the cure; None if nothing is."""
    slopes = read_slopes(one)
    if slopes is not None and bool((slopes < 0).all()):
        return "the bias of every head grows with the distance of a key", NEARER
    if has_linear_bias(one) and is_named_alibi(one.module):
        return describe_both_sides(one), BOTH_SIDES
    if slopes is None or not is_named_alibi(one.module) or is_learned(one.module, slopes):
        return None
    right = list_alibi_slopes(len(slopes))
    scale = one.call.q.shape[-1] ** -0.5 if one.call.scale is None else one.call.scale
    if is_near(slopes, right * scale) and abs(scale - 1) > NEAR:
        return f"the slopes of its heads are {scale:.4g} times those of ALiBi: the bias is added before the scale", AFTER
    if is_near(slopes, right) or not is_near(slopes.sort().values, right.sort().values):
        return None
    does = f"the slopes of its heads are {format_slopes(slopes)}, those of ALiBi in another order: {format_slopes(right)}"
    return does, SLOPES


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
    linear = next((one for one in calls if has_linear_bias(one)), None)
    if linear is not None:
        sentence = f"whether it is intended that in {linear.name or 'the layer'} {describe_both_sides(linear)}"
        return Unknown(sentence, "nothing, if later keys are meant to have more or less weight than earlier ones")
    if not found:
        return None
    one, slopes = found[0]
    right = list_alibi_slopes(len(slopes))
    what = f"a bias falls with the distance of a key, {describe_range(slopes)}"
    where = f"in {count_calls(found)}; each head's slope is read"
    if is_near(slopes, right):
        where += ", and is that of ALiBi"
    elif is_named_alibi(one.module) and not is_learned(one.module, slopes):
        where += f"; ALiBi's are {format_slopes(right)}"
    return Checked(what, where)


def describe_both_sides(one: InnerCall) -> str:
    """Describe a bias that is linear in the position of a key, on both sides of a query."""
    assert one.call.bias is not None
    favored = "last" if bool((one.call.bias[..., -1, -1] > one.call.bias[..., -1, 0]).all()) else "first"
    where = "the bias of every head is linear in the position of a key, on both sides of a query"
    return f"{where}: the {favored} key has the largest, whatever the query"


def is_named_alibi(module: nn.Module | None) -> bool:
    """Return whether a module, or a part or a tensor of it, has ALiBi in its name, or holds tensors named slopes."""
    if module is None:
        return False
    tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    names = [type(module).__name__, *vars(module), *(name for name, _ in module.named_modules()), *tensors]
    return any("alibi" in name.lower() or name.rpartition(".")[2] == "slopes" for name in names)


def is_learned(module: nn.Module | None, slopes: Tensor) -> bool:
    """Return whether a module has a parameter of slopes."""
    own = [] if module is None else list(module.named_parameters())
    return any(one.numel() == len(slopes) and ("slope" in name or "alibi" in name) for name, one in own)


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

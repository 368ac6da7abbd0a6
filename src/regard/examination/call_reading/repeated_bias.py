"""Find queries, keys or values to which the bias of their projection is added again."""

from torch import Tensor, nn

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.rounding import is_near
from regard.examination.report import Finding
from regard.examination.subject.call_conventions import parse_qkv

CURE = "The projection adds its bias itself: leave out the second one."


def find_repeated_bias(one: InnerCall) -> Finding | None:
    """Return the finding of a bias that is added once more than its projection does; None without one."""
    parts = {} if one.module is None else dict(one.module.named_modules(prefix=one.name))
    sides = {"q": (one.call.q, one.q_named), "k": (one.call.k, one.k_named), "v": (one.call.v, one.v_named)}
    for name, part in parts.items():
        x, named = sides.get(parse_qkv(name.rpartition(".")[2]), (None, None))
        bias = part.bias if isinstance(part, nn.Linear) else None
        if bias is not None and x is not None and named is not None and is_added(bias, named, x):
            sentence = f"in {one.name or 'the layer'} the bias of {name} is added twice"
            return Finding("wrong output", sentence, CURE, 1.4, "bias", one.name)
    return None


def is_added(bias: Tensor, named: Tensor, x: Tensor) -> bool:
    """Return whether x (b, h, t, d) is a projection's output `named` plus its bias (h d,), which is not 0."""
    if named.shape != x.shape or bias.numel() != x.shape[1] * x.shape[3] or not bool(bias.any()):
        return False
    own = bias.detach().double().view(x.shape[1], 1, x.shape[3])
    return is_near(x.double() - named, own.expand_as(named))

"""Describe each deviation: its kind of finding, what it does, and the line that fixes it."""

from dataclasses import dataclass

from regard.examination.identify.match import Match
from regard.examination.identify.variants import WHOLE_VIEWS

CAUSES = {
    "mask": "mask",
    "scale": "scale",
    "axis": "axis",
    "norm": "softmax",
    "split": "heads",
    "merge": "heads",
    "share": "heads",
    "roles": "roles",
    "output": "roles",
}


@dataclass(frozen=True)
class Mistake:
    """A deviation in common terms: the `kind` of finding, what it does, and the cure."""

    kind: str
    does: str
    cure: str


TURN = "Invert it: scores.masked_fill(~mask, -torch.inf), where True means may see."
SOFTMAX = "weights = torch.softmax(scores, dim=-1)"
MASK = "Write -inf before the softmax: scores = scores.masked_fill(~mask, -torch.inf), where True means may see."
ROLE = "Write scores = q @ k.transpose(-2, -1) and context = weights @ v, each from the projection of its name."
SPLIT = "Split by a view and then a transpose: x.view(b, t, heads, d).transpose(1, 2)."
MERGE = "Join by a transpose before the view: context.transpose(1, 2).contiguous().view(b, t, heads * d)."

MASKS = {
    "zero": ("future leak", "0 is written where -inf belongs, and exp(0) = 1 is a weight", MASK),
    "zeroed weights": (
        *("not normalised", "weights are zeroed after the softmax, and no longer add to one"),
        f"{MASK} Or divide by the sum again: weights = weights / weights.sum(-1, keepdim=True).",
    ),
    "none": ("future leak", "no mask is applied", MASK),
    "inverted": (
        "inverted mask",
        "what the mask hides is what may be seen",
        "Invert it: scores.masked_fill(~mask, -torch.inf).",
    ),
    "transposed": (
        *("inverted mask", "queries and keys are exchanged in the mask"),
        "Rows are queries, columns are keys: tril() is causal, and padding is mask[:, None, None, :].",
    ),
    "strict": ("wrong mask", "a query does not see its own token", "Hide with triu(diagonal=1), not triu(diagonal=0)."),
    "beyond": ("future leak", "a query sees one token too many", "Hide with triu(diagonal=1), not triu(diagonal=2)."),
    "one added": (
        "future leak",
        "1 is added where a key may be seen, or taken away where not, and nothing is hidden",
        MASK,
    ),
    "one added to hidden": ("future leak", "1 is added where a key is hidden", MASK),
    "minus one": ("future leak", "-1 is written where -inf belongs", MASK),
}
NORMS = {
    "none": "there is no softmax: the scores themselves are the weights",
    "sum": "scores are divided by their sum, without exp",
    "sigmoid": "a sigmoid of each score stands where the softmax belongs",
    "twice": "the softmax is taken twice",
    "twice, masked again": "the softmax is taken twice",
    "exp": "exp(scores) is not divided by its sum",
    "exp less its maximum": "exp(scores - max) is not divided by its sum",
    "logarithm": "log_softmax stands where the softmax belongs",
}
AXES = {
    "queries": "the softmax runs over the queries: columns add to one, not rows",
    "heads": "the softmax runs over the heads",
    "heads and keys": "the softmax runs over heads and keys together: the rows of all heads add to one",
    "batch": "the softmax runs over the batch",
    "everything": "one softmax runs over all queries and keys together",
}
ROLES = {
    "kqv": "queries and keys are exchanged",
    "qkk": "the key stands where the value belongs",
    "qkq": "the query stands where the value belongs",
    "kkv": "the key stands where the query belongs",
    "qqv": "the query stands where the key belongs",
    "turned": "the weights are turned: weightsᵀ v",
    "qkx": "the input stands where the value belongs, and the value's projection is not used",
}


def find_mistake(match: Match, field: str) -> Mistake | None:
    """Return the mistake in a field of a match; None if the field is right, or is only who sees whom."""
    value = match.variant.deviations.get(field)
    if value is None or value == "measured":
        return None
    if field == "scale":
        return Mistake("wrong scale", describe_scaling(match), make_scale_cure(match))
    if field in ("split", "merge", "share"):
        return describe_mixed_heads(field, str(value))
    match field:
        case "mask":
            return Mistake(*MASKS[str(value)])
        case "axis":
            return Mistake("wrong axis", AXES[str(value)], f"Each query's row adds to one: {SOFTMAX}.")
        case "norm":
            return Mistake("not normalised", NORMS[str(value)], f"Take the softmax once, over the keys: {SOFTMAX}.")
        case "output":
            return Mistake("not trainable", "the output projection is left out", "Return self.out_proj(context).")
    return Mistake("wrong roles", ROLES.get(str(value)) or describe_roles(str(value)), ROLE)


def describe_roles(roles: str) -> str:
    """Describe exchanged roles: `the key stands where the query belongs, and the input stands where the value belongs`."""
    names = {"q": "the query", "k": "the key", "v": "the value", "x": "the input"}
    wrong = [f"{names[one]} stands where {names[own]} belongs" for one, own in zip(roles, "qkv", strict=True) if one != own]
    return ", and ".join(wrong)


def describe_mixed_heads(field: str, value: str) -> Mistake:
    """Return the mistake of heads and tokens, or heads of keys, in the wrong places."""
    if field == "share":
        cure = "Repeat each key head beside itself: k.repeat_interleave(heads // groups, dim=1), as enable_gqa and published "
        cure += "weights have it."
        cure += " A layer trained in its own order from the first weight on is no worse for it." * (value == "tiled")
        first = "every head reads the first head of keys"
        does = first if value == "first" else "key heads are repeated in the wrong order, all of them over and over"
        return Mistake("mixed heads", does, cure)
    if field == "merge":
        return Mistake(
            "mixed heads", "heads are joined by a view without a transpose: tokens and heads are mixed on the way out", MERGE
        )
    if value == "tokens":
        cure = "Move the heads before the tokens: q.view(b, t, heads, d).transpose(1, 2), and so for k and v."
        return Mistake("mixed heads", "the heads of each token attend to one another, and no token to another", cure)
    if value in WHOLE_VIEWS:
        cure = "q, k, v = self.qkv(x).view(b, t, 3, heads, d).permute(2, 0, 3, 1, 4)."
        return Mistake(
            "mixed heads",
            "q, k and v are viewed in axes that their product does not have: tokens and heads are mixed",
            cure,
        )
    which = " and ".join(value) if len(value) < 3 else "q, k and v"
    return Mistake("mixed heads", f"{which} become heads by a view without a transpose: tokens and heads are mixed", SPLIT)


def describe_scaling(match: Match) -> str:
    """Describe what is done to the scores."""
    d, c = match.width, match.width * match.heads
    said = {
        "none": "the scores are not scaled",
        "head": f"the scores are divided by √{d}",
        "twice": f"the scores are divided by {d}: by √{d} twice, or by d where √d belongs",
        "multiplied": f"the scores are multiplied by √{d}",
        "model": f"the scores are divided by √{c}, of the whole width, not of one head's",
        "by model": f"the scores are divided by the whole width {c}",
        "input": "the scores are divided by √d_in, the width of the input, not of one head",
        "fourth root": f"the scores are divided by {d}^¼",
        "heads": f"the scores are divided by √{match.heads}, the number of heads",
        "tokens": "the scores are divided by √t, the number of tokens",
        "after": f"it is the weights that are divided by √{d}, after the softmax",
    }
    measured = f"the scores are multiplied by {match.scale:.4g}, where {match.expected_scale:.4g} is expected"
    return said.get(str(match.variant.scale)) or measured


def make_scale_cure(match: Match) -> str:
    """Return the cure with the expected scale."""
    own = match.width**-0.5
    if abs(match.expected_scale - own) > 1e-9:
        return f"Multiply the scores by {match.expected_scale:.4g} as is stated, or state scale={match.scale:.4g}."
    line = "scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1]), with k of one head"
    stated = "" if match.variant.scale == "after" else f" Where {match.scale:.4g} is meant, pass scale={match.scale:.4g}."
    return f"Divide the scores by √{match.width} before the softmax: {line}.{stated}"

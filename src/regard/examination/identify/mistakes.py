"""Describe each deviation: its kind of finding, what it does, and the line that fixes it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from regard.examination.identify.match import Match
from regard.examination.identify.variants import WHOLE_VIEWS, Variant
from regard.examination.report import Finding

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
SUMS = {
    "sum": "Σ",
    "absolute sum": "Σ|·|",
    "length": "√Σ(·)²",
    "squares": "Σ",
    "absolute": "Σ",
    "softmax by its length": "√Σ(·)²",
}
PLAIN = {"none": "scores", **dict.fromkeys(("sum", "absolute sum", "length"), "scores"), "sigmoid": "sigmoid"}
PLAIN |= {"logarithm": "log_softmax", "squares": "square", "absolute": "abs", "plus one": "softmax1"}


@dataclass(frozen=True)
class Mistake:
    """A deviation in common terms: the `kind` of finding, what it does, and the cure."""

    kind: str
    does: str
    cure: str


DESIGNS = ("measured", "plus one")  # values of fields that are no mistakes
SOFTMAX = "weights = torch.softmax(scores, dim=-1)"
MASK = "Hide keys with -inf before the softmax: scores = scores.masked_fill(~mask, -torch.inf), where True means visible."
ROLE = "Write scores = q @ k.transpose(-2, -1) and context = weights @ v, with q, k and v each from its own projection."
SPLIT = "Split into heads with a view and then a transpose: x.view(b, t, heads, d).transpose(1, 2)."
MERGE = "Join the heads with a transpose before the view: context.transpose(1, 2).contiguous().view(b, t, heads * d)."

MASKS = {
    "zero": ("future leak", "hidden scores are set to 0 instead of -inf, and exp(0) = 1 is a weight", MASK),
    "zeroed weights": (
        *("not normalised", "weights are zeroed after the softmax, and no longer sum to one"),
        f"{MASK} Or divide by the sum again: weights = weights / weights.sum(-1, keepdim=True).",
    ),
    "none": ("future leak", "no mask is applied", MASK),
    "inverted": (
        "inverted mask",
        "the mask hides the keys that should be visible",
        "Invert it: scores.masked_fill(~mask, -torch.inf).",
    ),
    "transposed": (
        *("inverted mask", "queries and keys are exchanged in the mask"),
        "Rows are queries and columns are keys: tril() is causal, and padding is mask[:, None, None, :].",
    ),
    "strict": ("wrong mask", "a query does not see its own token", "Hide with triu(diagonal=1), not triu(diagonal=0)."),
    "beyond": ("future leak", "a query sees one token too many", "Hide with triu(diagonal=1), not triu(diagonal=2)."),
    "one added": ("future leak", "1 is added to visible scores, or subtracted from hidden ones, and nothing is hidden", MASK),
    "one added to hidden": ("future leak", "1 is added to hidden scores", MASK),
    "minus one": ("future leak", "hidden scores are set to -1 instead of -inf", MASK),
}
NORMS = {
    "none": "there is no softmax: the scores themselves are the weights",
    "sum": "scores are divided by their sum, without exp",
    "absolute sum": "scores are divided by the sum of their absolute values, without exp",
    "length": "scores are divided by the length of their row, the root of the sum of their squares, without exp",
    "squares": "squares of scores are divided by their sum, without exp",
    "absolute": "absolute values of scores are divided by their sum, without exp",
    "softmax by its length": "a softmax is divided by its length, the root of the sum of its squares",
    "sigmoid": "a sigmoid of each score is used instead of the softmax",
    "twice": "the softmax is applied twice",
    "twice, masked again": "the softmax is applied twice",
    "exp": "exp(scores) is not divided by its sum",
    "exp less its maximum": "exp(scores - max) is not divided by its sum",
    "logarithm": "log_softmax is used instead of softmax",
}
AXES = {
    "queries": "the softmax runs over the queries: columns sum to one, not rows",
    "heads": "the softmax runs over the heads",
    "heads and keys": "the softmax runs over heads and keys together: the rows of all heads sum to one",
    "batch": "the softmax runs over the batch",
    "everything": "one softmax runs over all queries and keys together",
}
ROLES = {
    "kqv": "queries and keys are exchanged",
    "qkk": "the key is used as the value",
    "qkq": "the query is used as the value",
    "kkv": "the key is used as the query",
    "qqv": "the query is used as the key",
    "turned": "the weights are transposed: weightsᵀ v",
    "qkx": "the input is used as the value, and the value projection is unused",
}
SHARE = "Repeat each key head in place: k.repeat_interleave(heads // groups, dim=1), as enable_gqa does and published weights "
SHARE += "expect."
MIXED = {  # what mixes heads, by the value of its field
    "tiled": (
        "key heads are repeated in the wrong order, 0, 1, 0, 1 instead of 0, 0, 1, 1",
        f"{SHARE} A layer trained from scratch in its own order works as well.",
    ),
    "first": ("every head uses the first key head", SHARE),
    "viewed": ("heads are joined by a view without a transpose: tokens and heads are mixed in the output", MERGE),
    "tokens": (
        "the heads of each token attend to one another, and no token to another",
        "Move the heads before the tokens: q.view(b, t, heads, d).transpose(1, 2), and the same for k and v.",
    ),
    **dict.fromkeys(
        WHOLE_VIEWS,
        (
            "the output of the projection of q, k and v is viewed with axes in another order: tokens and heads are mixed",
            "q, k, v = self.qkv(x).view(b, t, 3, heads, d).permute(2, 0, 3, 1, 4).",
        ),
    ),
}


def find_mistake(match: Match, field: str) -> Mistake | None:
    """Return the mistake in a field of a match; None if the field is right, a design, or only who sees whom."""
    value = match.variant.deviations.get(field)
    if value is None or value in DESIGNS:
        return None
    if field == "scale":
        return Mistake("wrong scale", describe_scaling(match), make_scale_cure(match))
    if field in ("split", "merge", "share"):
        return describe_mixed_heads(str(value))
    match field:
        case "mask":
            return Mistake(*MASKS[str(value)])
        case "axis":
            return Mistake("wrong axis", AXES[str(value)], f"Let each query's row sum to one: {SOFTMAX}.")
        case "norm":
            return Mistake("not normalised", NORMS[str(value)], f"Apply the softmax once, over the keys: {SOFTMAX}.")
        case "output":
            return Mistake("not trainable", "the output projection is left out", "Return self.out_proj(context).")
    return Mistake("wrong roles", ROLES.get(str(value)) or describe_roles(str(value)), ROLE)


def describe_roles(roles: str) -> str:
    """Describe exchanged roles: `the key is used as the query, and the input is used as the value`."""
    names = {"q": "the query", "k": "the key", "v": "the value", "x": "the input"}
    wrong = [f"{names[one]} is used as {names[own]}" for one, own in zip(roles, "qkv", strict=True) if one != own]
    return ", and ".join(wrong)


def describe_mixed_heads(value: str) -> Mistake:
    """Return the mistake of heads and tokens, or heads of keys, in the wrong places; `value` may be letters of q, k and v."""
    which = " and ".join(value) if len(value) < 3 else "q, k and v"
    viewed = f"{which} are split into heads by a view without a transpose: tokens and heads are mixed"
    return Mistake("mixed heads", *MIXED.get(value, (viewed, SPLIT)))


def describe_scaling(match: Match) -> str:
    """Describe what is done to the scores."""
    d, c = match.width, match.width * match.heads
    sentences = {
        "none": "the scores are not scaled",
        "head": f"the scores are divided by √{d}",
        "twice": f"the scores are divided by {d}: by √{d} twice, or by d instead of √d",
        "multiplied": f"the scores are multiplied by √{d}",
        "model": f"the scores are divided by √{c}, where {c} is the width of all heads, not of one",
        "by model": f"the scores are divided by {c}, the width of all heads",
        "input": "the scores are divided by √d_in, where d_in is the width of the input, not of one head",
        "fourth root": f"the scores are divided by {d}^¼",
        "heads": f"the scores are divided by √{match.heads}, the number of heads",
        "tokens": "the scores are divided by √t, the number of tokens",
        "doubled": f"the scores are multiplied by {match.scale:.4g}, twice the expected {match.expected_scale:.4g}, as where "
        "weights are squared and divided by their sum",
        "after": f"the weights are divided by √{d} after the softmax, not the scores before it",
    }
    measured = f"the scores are multiplied by {match.scale:.4g}, but {match.expected_scale:.4g} is expected"
    return sentences.get(str(match.variant.scale)) or measured


def make_scale_cure(match: Match) -> str:
    """Return the cure with the expected scale."""
    own = match.width**-0.5
    if abs(match.expected_scale - own) > 1e-9:
        return f"Multiply the scores by {match.expected_scale:.4g}, the stated scale, or pass scale={match.scale:.4g}."
    line = "scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1]), with k split into heads"
    stated = "" if match.variant.scale == "after" else f" If {match.scale:.4g} is intended, pass scale={match.scale:.4g}."
    return f"Divide the scores by √{match.width} before the softmax: {line}.{stated}"


def format_formula(match: Match) -> str:
    """Format the formula: `softmax(q kᵀ / √8) v with 4 heads`."""
    variant = match.variant
    q, k, v = ("k", "q", "v") if variant.roles == "kqv" else tuple("qkv" if variant.roles == "turned" else variant.roles)
    inner = f"{q} {k}ᵀ{format_factor(match)}"
    outer = PLAIN.get(variant.norm, "exp" if variant.norm.startswith("exp") else "softmax")
    whole = f"{outer}({inner})" if outer != "scores" else f"({inner})"
    whole = f"softmax({whole})" if variant.norm.startswith("twice") else whole
    whole += f" / {SUMS[variant.norm]}" if variant.norm in SUMS else ""
    whole += "ᵀ" if variant.roles == "turned" else ""
    whole += f" / √{match.width}" if variant.scale == "after" else ""
    return f"{whole} {v} with {format_heads(match)}"


def format_factor(match: Match) -> str:
    """Format the factor on the scores."""
    if match.variant.scale == "after" or match.scale == 1:
        return ""
    square = match.scale**-2
    if match.scale > 0 and abs(square - round(square)) < 1e-9 * square and square >= 1:
        return f" / √{round(square)}"
    return f" · {match.scale:.4g}"


def format_heads(match: Match) -> str:
    """Format the numbers of heads: `1 head`, `8 heads and 2 key heads`."""
    number = f"{match.heads} head{'s' * (match.heads != 1)}"
    return number if match.groups == match.heads else f"{number} and {match.groups} key head{'s' * (match.groups != 1)}"


def describe_equality(match: Match) -> str:
    """Describe how exactly the formula is known."""
    mistakes = "" if match.is_right else " (with the reported mistake)"
    return f"equals {format_formula(match)}{mistakes} to within {max(match.error, 1e-16):.0e}"


def describe_evidence(match: Match, field: str) -> str:
    """Describe what is computed instead, how exactly it is known, and how far it is from the right formula."""
    wrong = find_mistake(match, field)
    does = "" if wrong is None else wrong.does
    others = len(match.variant.deviations) - 1
    beside = " (together with another mistake)" if others and match.variant.mask != "measured" else ""
    doubt = describe_rivals(match)
    return (
        f"{does}. The outputs equal {format_formula(match)} computed this way to within {max(match.error, 1e-16):.0e}{beside}; "
        f"the correct formula differs by {match.right_error:.2g}{doubt}"
    )


def list_mistakes(match: Match, fields: Iterable[str], strength: float) -> Iterator[Finding]:
    """Yield the findings of the mistakes in fields of a match."""
    for field in fields:
        wrong = find_mistake(match, field)
        if wrong is not None:
            yield Finding(wrong.kind, describe_evidence(match, field), wrong.cure, strength, CAUSES[field])


def describe_rivals(match: Match) -> str:
    """Describe the variants that give the same outputs, and so may be meant as well."""
    others = [format_variant(one) for one in match.alike if one.mask != "measured"]
    return f"; on these inputs it is indistinguishable from {', '.join(others[:3])}" if others else ""


def format_variant(variant: Variant) -> str:
    """Format a variant by its deviations."""
    return " and ".join(f"{name}: {value}" for name, value in variant.deviations.items()) or "the correct formula"

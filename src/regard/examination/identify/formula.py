"""Format a match: the formula that a subject computes, and how exactly."""

from regard.examination.identify.match import Match
from regard.examination.identify.mistakes import find_mistake
from regard.examination.identify.variants import Variant

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


def describe_rivals(match: Match) -> str:
    """Describe the variants that give the same outputs, and so may be meant as well."""
    others = [format_variant(one) for one in match.alike if one.mask != "measured"]
    return f"; on these inputs it is indistinguishable from {', '.join(others[:3])}" if others else ""


def format_variant(variant: Variant) -> str:
    """Format a variant by its deviations."""
    return " and ".join(f"{name}: {value}" for name, value in variant.deviations.items()) or "the correct formula"

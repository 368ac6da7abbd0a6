"""What a layer may compute instead of attention: right and wrong formulas of q, k and v, and those worth trying."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

HIDDEN = -1e9  # finite, so that blind rows stay numbers; find_blind_queries excludes them


@dataclass(frozen=True)
class Variant:
    """One computation, with a field for each thing that can be wrong; the defaults are right."""

    mask: str = "hidden"
    scale: str | float = "expected"
    axis: str = "keys"
    norm: str = "softmax"
    split: str = ""  # which of q, k and v become heads by a view alone; "tokens": attention runs over heads
    merge: str = "joined"
    roles: str = "qkv"  # the tensors used as q, k and v; x is the input itself
    share: str = "interleaved"
    output: str = "projected"

    @property
    def deviations(self) -> dict[str, str | float]:
        """The fields that are not as they should be."""
        return {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) != field.default}


@dataclass(frozen=True, eq=False)
class ProjectedInputs:
    """What a variant is computed from: q (b, t, h d), k (b, t, g d), v (b, t, g e), x (b, t, c), heads side by side.

    `seen` is the rule, bool, (b or 1, h or 1, q, k); `measured`, of the same shape, who was found to see whom; `scale` the
    expected factor on the scores; `whole` the product of a fused projection, (b, t, ...), before it is split. `joined` is the
    order of heads and width in the columns of the context.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor
    heads: int
    groups: int
    seen: Tensor
    scale: float
    offset: int = 0
    measured: Tensor | None = None
    whole: Tensor | None = None
    joined: str = "hd"

    @property
    def width(self) -> int:
        """The width d of each head."""
        return self.q.shape[-1] // self.heads


def compute_context(variant: Variant, given: ProjectedInputs) -> Tensor:
    """Compute the contexts of all heads side by side, (b, t, h e), by this variant."""
    q, k, v = split_roles(variant, given)
    if variant.split == "tokens":  # (b, t, h, d): each token's heads attend to one another
        weights = normalize_scores(variant, q @ k.mT * get_scale(variant, given), torch.ones((), dtype=torch.bool))
        return (weights @ v).flatten(-2)
    q, k, v = (expand_key_heads(each, given.heads, variant.share) for each in (q, k, v))
    weights = compute_weights(variant, q @ k.mT, given)
    mixed = (weights.mT if variant.roles == "turned" else weights) @ v  # (b, h, t, e)
    if variant.merge == "viewed":
        return mixed.reshape(mixed.shape[0], mixed.shape[2], -1)
    return (mixed.permute(0, 2, 3, 1) if given.joined == "dh" else mixed.transpose(1, 2)).flatten(-2)


def compute_weights(variant: Variant, scores: Tensor, given: ProjectedInputs) -> Tensor:
    """Compute weights from scores (b, h, q, k)."""
    seen = get_visibility(variant, given)
    scaled = scores * get_scale(variant, given)
    weights = normalize_scores(variant, mask_scores(variant, scaled, seen), seen)
    if variant.mask == "zeroed weights":
        weights = weights * seen
    return weights / math.sqrt(given.width) if variant.scale == "after" else weights


def mask_scores(variant: Variant, scaled: Tensor, seen: Tensor) -> Tensor:
    """Return the scores with hidden keys marked in the variant's way."""
    match variant.mask:
        case "none" | "zeroed weights":
            return scaled
        case "zero":
            return scaled * seen
        case "one added":
            return scaled + seen.to(scaled.dtype)
        case "one added to hidden":
            return scaled + (~seen).to(scaled.dtype)
        case "minus one":
            return scaled.masked_fill(~seen, -1.0)
        case _:
            return scaled.masked_fill(~seen, HIDDEN)


def get_visibility(variant: Variant, given: ProjectedInputs) -> Tensor:
    """Return who sees whom in this variant, (b or 1, h or 1, q, k)."""
    seen = given.seen
    match variant.mask:
        case "measured" if given.measured is not None:
            return given.measured
        case "inverted":
            return ~seen
        case "strict":
            return seen & ~torch.ones(seen.shape[-2:], dtype=torch.bool).tril(given.offset).triu(given.offset)
        case "beyond":
            return seen | torch.nn.functional.pad(seen, (1, 0))[..., :-1]
        case "transposed":
            return seen.mT
        case _:
            return seen


def find_blind_queries(variant: Variant, given: ProjectedInputs) -> Tensor:
    """Return the queries, (b or 1, q), that see nothing in some head, whose outputs are not compared."""
    if variant.mask not in MASKS_THAT_HIDE or variant.split == "tokens":
        return torch.zeros(1, given.q.shape[1], dtype=torch.bool)
    return (~get_visibility(variant, given).any(-1)).any(1)


MASKS_THAT_HIDE = ("hidden", "inverted", "strict", "beyond", "transposed", "measured")


def get_scale(variant: Variant, given: ProjectedInputs) -> float:
    """Return the factor on the scores in this variant."""
    return variant.scale if isinstance(variant.scale, float) else list_scales(given)[variant.scale]


def list_scales(given: ProjectedInputs) -> dict[str, float]:
    """Return every scale that has a name, the most common ones first."""
    d, tokens = given.width, given.k.shape[1]
    return {
        "expected": given.scale,
        "head": d**-0.5,
        "none": 1.0,
        "twice": 1 / d,
        "multiplied": d**0.5,
        "model": given.q.shape[-1] ** -0.5,
        "input": given.x.shape[-1] ** -0.5,
        "fourth root": d**-0.25,
        "heads": given.heads**-0.5,
        "tokens": tokens**-0.5,
        "by model": 1 / given.q.shape[-1],
        "doubled": 2 * given.scale,
        "after": 1.0,
    }


def normalize_scores(variant: Variant, scores: Tensor, seen: Tensor) -> Tensor:
    """Normalize scores to weights along the variant's axis."""
    if variant.axis == "everything":
        return scores.flatten(-2).softmax(-1).reshape(scores.shape)
    if variant.axis == "heads and keys":
        return scores.transpose(1, 2).flatten(-2).softmax(-1).reshape(scores.transpose(1, 2).shape).transpose(1, 2)
    axis = {"keys": -1, "queries": -2, "heads": -3, "batch": 0}[variant.axis]
    hides = variant.mask in MASKS_THAT_HIDE
    match variant.norm:
        case "none":
            return scores * seen if hides else scores
        case "sum" | "absolute sum" | "length":
            kept = scores * seen if hides else scores
            sums = {"sum": kept, "absolute sum": kept.abs(), "length": kept.square()}[variant.norm].sum(axis, keepdim=True)
            return kept / (sums.sqrt() if variant.norm == "length" else sums)
        case "squares" | "absolute":
            kept = scores * seen if hides else scores
            kept = kept.square() if variant.norm == "squares" else kept.abs()
            return kept / kept.sum(axis, keepdim=True)
        case "plus one":  # softmax1: Miller 2023, Attention Is Off By One
            none = scores.new_zeros(()).expand_as(scores.narrow(axis, 0, 1))
            return torch.cat((scores, none), axis).softmax(axis).narrow(axis, 0, scores.shape[axis])
        case "softmax by its length":
            weights = scores.softmax(axis)
            return weights / weights.square().sum(axis, keepdim=True).sqrt()
        case "sigmoid":
            return scores.sigmoid()
        case "exp":
            return scores.exp()
        case "exp less its maximum":
            return (scores - scores.amax(axis, keepdim=True)).exp()
        case "twice":
            return scores.softmax(axis).softmax(axis)
        case "twice, masked again":
            return (scores.softmax(axis).masked_fill(~seen, HIDDEN) if hides else scores.softmax(axis)).softmax(axis)
        case "logarithm":
            return scores.log_softmax(axis)
        case _:
            return scores.softmax(axis)


def split_roles(variant: Variant, given: ProjectedInputs) -> list[Tensor]:
    """Return the tensors in the roles of q, k and v, split into heads: (b, h, t, d)."""
    if variant.split in WHOLE_VIEWS and given.whole is not None:
        return split_fused_wrongly(variant.split, given.whole, given.heads)
    named = {"q": given.q, "k": given.k, "v": given.v, "x": given.x}
    roles = "qkv" if variant.roles == "turned" else variant.roles
    counts = {"q": given.heads, "k": given.groups, "v": given.groups, "x": given.heads}
    return [
        split_into_heads(named[letter], counts[letter], viewed=place in variant.split, is_transposed=variant.split != "tokens")
        for letter, place in zip(roles, "qkv", strict=True)
    ]


def split_into_heads(x: Tensor, heads: int, viewed: bool, is_transposed: bool) -> Tensor:
    """Split (b, t, h d) to (b, h, t, d), by a view and a transpose, or by a view alone; else to (b, t, h, d)."""
    b, t, _ = x.shape
    if viewed and is_transposed:
        return x.reshape(b, heads, t, -1)  # mixes tokens and heads on purpose
    split = x.reshape(b, t, heads, -1)
    return split.transpose(1, 2) if is_transposed else split


WHOLE_VIEWS = {  # axes of a fused product as viewed, and their order as (3, b, h, t, d)
    "whole, heads before tokens": ("bht3d", "3bhtd"),
    "whole, thirds first": ("3bhtd", "3bhtd"),
    "whole, thirds after the batch": ("b3htd", "3bhtd"),
    "whole, thirds after the batch, tokens first": ("b3thd", "3bhtd"),
    "whole, thirds first, tokens first": ("3bthd", "3bhtd"),
}


def split_fused_wrongly(name: str, whole: Tensor, heads: int) -> list[Tensor]:
    """Return q, k and v of a fused product (b, t, 3 h d) that is viewed with axes other than its own."""
    b, t, columns = whole.shape
    sizes = {"b": b, "t": t, "3": 3, "h": heads, "d": columns // 3 // heads}
    came, meant = WHOLE_VIEWS[name]
    return list(whole.reshape([sizes[axis] for axis in came]).permute([came.index(axis) for axis in meant]))


def expand_key_heads(k: Tensor, heads: int, how: str) -> Tensor:
    """Expand (b, g, t, d) to (b, h, t, d): each key head repeated beside itself, all of them tiled, or the first alone."""
    times = heads // k.shape[1]
    if times <= 1:
        return k
    if how == "first":
        return k[:, :1].expand(-1, heads, -1, -1)
    return k.repeat(1, times, 1, 1) if how == "tiled" else k.repeat_interleave(times, 1)


RIGHT = Variant()
MASKS = ("zero", "zeroed weights", "none", "inverted", "transposed", "strict", "beyond")
SIGNS = ("one added", "one added to hidden", "minus one")
DIVISORS = ("sum", "absolute sum", "length")
NORMS = ("none", *DIVISORS, "sigmoid", "twice", "twice, masked again", "exp", "exp less its maximum", "logarithm")
ALONE = ("plus one", "squares", "absolute", "softmax by its length")  # norms that are not combined with other deviations
SPLITS = ("qkv", "q", "k", "v", "qk", "kv", "qv", "tokens")
ROLES = ("kqv", "qkk", "qkq", "kkv", "qqv", "turned", "qkx", "vkv", "qvv", "xkv", "qxv", "xxv", "kqk", "kqq", "qqq", "kkk")


OFTEN = (
    replace(RIGHT, split="qkv", merge="viewed"),
    *(replace(RIGHT, axis=axis, mask="none") for axis in ("queries", "heads", "heads and keys", "batch")),
    replace(RIGHT, scale="none", mask="none"),
)


def iterate_single_deviations(choices: dict[str, list[str]]) -> Iterator[Variant]:
    """Yield variants with one deviation each, of those that are possible in each field, and pairs that often occur together."""
    for name, values in (*choices.items(), ("norm", ALONE)):
        yield from (replace(RIGHT, **{name: value}) for value in values)
    for often in OFTEN:
        if all(value in choices[name] for name, value in often.deviations.items()):
            yield often


def iterate_deviation_pairs(choices: dict[str, list[str]]) -> Iterator[Variant]:
    """Yield variants with two deviations each, in two fields."""
    for (one, firsts), (other, seconds) in itertools.combinations(choices.items(), 2):
        yield from (replace(RIGHT, **{one: a, other: b}) for a in firsts for b in seconds)


def list_choices(given: ProjectedInputs, has_known_roles: bool, output: bool, has_separate_heads: bool) -> dict[str, list[str]]:
    """Return the values of each field that differ from the right one for these shapes.

    `has_known_roles` is whether names tell q from k, `output` whether there is an output projection.
    """
    can_mix_heads = given.heads > 1 and not has_separate_heads  # separate heads cannot be mixed up
    return {
        "scale": list_wrong_scales(given),
        "mask": list_wrong_masks(given),
        "axis": list_wrong_axes(given),
        "norm": list(NORMS),
        "split": [*SPLITS, *(WHOLE_VIEWS if given.whole is not None else ())] if can_mix_heads else [],
        "merge": ["viewed"] if can_mix_heads else [],
        "share": ["tiled", "first"] if 1 < given.groups < given.heads else [],
        "roles": list_wrong_roles(given, has_known_roles),
        "output": ["left out"] if output else [],
    }


def list_wrong_axes(given: ProjectedInputs) -> list[str]:
    """Return the axes other than that of the keys along which there is more than one score."""
    heads = ["heads", "heads and keys"] if given.heads > 1 else []
    return ["queries", *heads, *(["batch"] if len(given.q) > 1 else []), "everything"]


def list_wrong_scales(given: ProjectedInputs) -> list[str]:
    """Return the scales that differ from those before them; √t always, since it differs at another length."""
    kept: dict[str, float] = {}
    for name, scale in list_scales(given).items():
        if name in ("after", "tokens") or all(abs(scale - other) > 1e-9 * other for other in kept.values()):
            kept[name] = scale
    return [name for name in kept if name != "expected"]


def list_wrong_masks(given: ProjectedInputs) -> list[str]:
    """Return the ways of marking hidden keys, none if nothing is hidden, and "measured" if the measurement is not the rule."""
    other = given.measured is not None and not torch.equal(
        given.measured.expand_as(broadcast_rule(given)), broadcast_rule(given)
    )
    square = given.seen.shape[-2] == given.seen.shape[-1]
    hidden = [one for one in (*MASKS, *SIGNS) if square or one != "transposed"] if not given.seen.all() else []
    return [*hidden, *(["measured"] if other else [])]


def broadcast_rule(given: ProjectedInputs) -> torch.Tensor:
    """Return the rule in the shape of the measurement."""
    assert given.measured is not None
    return given.seen.expand(torch.broadcast_shapes(given.seen.shape, given.measured.shape))


def list_wrong_roles(given: ProjectedInputs, has_known_roles: bool) -> list[str]:
    """Return the exchanges of roles that are possible with these widths and make a difference."""
    named = {"q": given.q, "k": given.k, "v": given.v, "x": given.x}
    counts = {"q": given.heads, "k": given.groups, "v": given.groups, "x": given.heads}

    def is_possible(roles: str) -> bool:
        q, k, v = (roles[place] for place in range(3))
        if any(named[one].shape[-1] % counts[one] for one in roles) or (
            not has_known_roles and sorted(roles) == ["k", "q", "v"]
        ):
            return False
        if any(named[one].shape[-2] != named[own].shape[-2] for one, own in zip(roles, "qkv", strict=True)):
            return False
        if named[q].shape[-1] // counts[q] != named[k].shape[-1] // counts[k] or given.heads % counts[k]:
            return False
        same = all(one == own or named[one] is named[own] for one, own in zip(roles, "qkv", strict=True))
        return not same and (counts[q] == given.heads) and counts[v] in (counts[k], given.heads)

    square = given.q.shape[-2] == given.k.shape[-2]
    possible = [roles for roles in ROLES if (square if roles == "turned" else is_possible(roles))]
    made = {roles: roles if roles == "turned" else tuple(id(named[one]) for one in roles) for roles in possible}
    return [roles for n, roles in enumerate(possible) if made[roles] not in [made[other] for other in possible[:n]]]

"""The variants worth trying: every single deviation that makes a difference here, the most common ones first."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from regard.examination.identify.variants import WHOLE_VIEWS, ProjectedInputs, Variant, list_scales

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


def iterate_single_deviations(
    given: ProjectedInputs, has_known_roles: bool, output: bool, has_separate_heads: bool = False
) -> Iterator[Variant]:
    """Yield variants with one deviation each, and pairs that often occur together.

    `has_known_roles` is whether names tell q from k, `output` whether there is an output projection.
    """
    every = list_choices(given, has_known_roles, output, has_separate_heads)
    for name, values in (*every.items(), ("norm", ALONE)):
        yield from (replace(RIGHT, **{name: value}) for value in values)
    for often in OFTEN:
        if all(value in every[name] for name, value in often.deviations.items()):
            yield often


def iterate_deviation_pairs(
    given: ProjectedInputs, has_known_roles: bool, output: bool, has_separate_heads: bool = False
) -> Iterator[Variant]:
    """Yield variants with two deviations each, in two fields."""
    every = list_choices(given, has_known_roles, output, has_separate_heads)
    for (one, firsts), (other, seconds) in itertools.combinations(every.items(), 2):
        yield from (replace(RIGHT, **{one: a, other: b}) for a in firsts for b in seconds)


def list_choices(given: ProjectedInputs, has_known_roles: bool, output: bool, has_separate_heads: bool) -> dict[str, list[str]]:
    """Return the values of each field that differ from the right one for these shapes."""
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

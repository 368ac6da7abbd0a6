"""Check what a kernel returns beside the context: log-sum-exp, largest scores, weights, and monitors of entropy and sinks."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.examination.kernel_checks.formula import AttentionFormula, get_allowed_error, measure_error
from regard.examination.report import Finding
from regard.examination.subject.attention_output import get_fields

LN2 = math.log(2)
NEAR = 3e-3  # of the largest number: how closely a variant fits
WORDS = {
    "lse2": "base-2 log-sum-exp",
    "lse": "log-sum-exp",
    "max": "largest score of each row",
    "weights": "weights",
    "entropy": "entropy of each row",
    "sink": "weight on the first key",
}
MONITORS = ("entropy", "sink")  # which may also be means over the queries, (b, h), or over sequences too, (h,)
CURES = {
    "lse2": 'Return (max + log(sum)) / ln 2 of the scaled and masked scores, (b, h, q); or pass outputs=("lse",) for base e.',
    "lse": 'Return max + log(sum) of the scaled and masked scores, (b, h, q); or pass outputs=("lse2",) for base 2.',
    "max": "Return the maximum of the scaled and masked scores, (b, h, q).",
    "weights": "Return softmax(scores) over the keys, of each head and after the mask, (b, h, q, k): exp(s - lse).",
    "entropy": "Return torch.special.entr(weights).sum(-1), of each head's weights: a weight of 0 adds 0.",
    "sink": "Return weights[..., 0], of each head's weights.",
}
IN_BASE_2 = "it is in base 2: 1.4427 times that in base e"
BASES = {  # what a logarithm of the other base is multiplied by
    "lse2": ("it is in base e: 0.6931 times that in base 2", LN2),
    "lse": (IN_BASE_2, 1 / LN2),
    "max": (IN_BASE_2, 1 / LN2),
    "entropy": ("it is in bits: 1.4427 times that in nats", 1 / LN2),
}
PATTERNS = {
    "entropy": ("entropy",),
    "sink": ("sink",),
    "lse2": ("lse2", "log2"),
    "lse": ("lse", "logsumexp", "log_sum_exp"),
    "max": ("max",),
    "weights": ("weight", "prob"),
}


class Auxiliary(NamedTuple):
    """A tensor that a kernel returns beside the context, and its role: a key of WORDS, "" if that is not known."""

    role: str
    tensor: Tensor


def split_output(returned: Any, outputs: Sequence[str]) -> tuple[Tensor, list[Auxiliary]]:
    """Return the context and the other floating tensors in what a kernel returned, with their roles.

    The roles are those of `outputs`, in order, or by the names of fields. Raises ConfigError if there is no context.
    """
    named = get_fields(returned)
    if isinstance(returned, Tensor):
        parts: list[tuple[str, Any]] = [("", returned)]
    elif named is not None:
        parts = list(named.items())
    else:
        parts = [("", one) for one in returned] if isinstance(returned, (tuple, list)) else []
    flat: list[tuple[str, Tensor]] = []
    for name, one in parts:
        inner = None if isinstance(one, Tensor) else get_fields(one)
        flat += [
            (key, value) for key, value in ([(name, one)] if inner is None else inner.items()) if isinstance(value, Tensor)
        ]
    if not flat:
        raise ConfigError(f"a kernel returns a context, or a tuple that begins with it; got {type(returned).__name__}.")
    rest = [(name, one) for name, one in flat[1:] if one.is_floating_point()]
    roles = list(outputs) if outputs else [parse_output_name(name) for name, _ in rest]
    if len(roles) > len(rest):
        raise ConfigError(f"outputs names {len(roles)} tensors beside the context, but the kernel returned {len(rest)}.")
    return flat[0][1], [Auxiliary(role, one) for role, (_, one) in zip(roles, rest, strict=False)]


def parse_output_name(name: str) -> str:
    """Return the role that a field's name states, "" if none."""
    return next((role for role, words in PATTERNS.items() if any(word in name.lower() for word in words)), "")


def check_auxiliary(given: Auxiliary, exact: AttentionFormula, plain: AttentionFormula, where: str) -> Finding | str | None:
    """Return the finding of a wrong tensor, the role of a right one, or None if its role is not known."""
    roles = [given.role] if given.role else ["lse", "max", "weights", *MONITORS]
    if not given.role:
        roles = [role for role in roles if arrange_rows(given.tensor, compute_role(role, exact)) is not None]
    for role in roles:
        expected, rounded = (take_mean(compute_role(role, one), given.tensor, role) for one in (exact, plain))
        found = arrange_rows(given.tensor, expected)
        largest = float(exact.scaled[exact.seen].abs().max()) if role == "entropy" and exact.seen.any() else 0.0
        if found is not None and is_right(found, expected, rounded, largest):  # scores cancel in an entropy of the log-sum-exp
            return role
    for role in roles:
        wrong = name_mistake(given.tensor, role, exact)
        near = "" if not wrong or given.role else find_nearest_role(given.tensor, roles, exact)
        if near not in ("", role):  # nobody said that it is another one
            given = given._replace(role=near)
            break
        if wrong:
            return Finding(f"wrong {WORDS[role]}", f"with {where} {wrong}", CURES[role], 1.5, f"auxiliary {role}")
    if not given.role:
        return None
    expected = take_mean(compute_role(given.role, exact), given.tensor, given.role)
    found = arrange_rows(given.tensor, expected)
    sentence = f"with {where} it has the shape {tuple(given.tensor.shape)}, not {tuple(expected.shape)}"
    if found is not None:
        rows = expected.isfinite()
        nan = int(found[rows].isnan().sum())
        does = f"is NaN {nan} times" if nan else f"differs by {measure_error(found[rows], expected[rows]):.2g} from the formula"
        sentence = f"with {where} it {does}"
    return Finding(f"wrong {WORDS[given.role]}", sentence, CURES[given.role], 1.4, f"auxiliary {given.role}")


def compute_role(role: str, formula: AttentionFormula) -> Tensor:
    """Return what a tensor of this role should hold."""
    if role == "weights":
        return formula.weights
    if role == "max":
        return formula.masked.amax(-1)
    if role == "entropy":
        entropy: Tensor = torch.special.entr(formula.weights).sum(-1)
        return entropy
    if role == "sink":
        return formula.weights[..., 0]
    return formula.logsumexp / LN2 if role == "lse2" else formula.logsumexp


def take_mean(rows: Tensor, x: Tensor, role: str) -> Tensor:
    """Return rows (b, h, q) of a monitor as their means (b, h) or (h,) if x has two axes or one."""
    if role not in MONITORS or x.dim() not in (1, 2):
        return rows
    return rows.mean(-1) if x.dim() == 2 else rows.mean((0, 2))


def arrange_rows(x: Tensor, expected: Tensor) -> Tensor | None:
    """Return a tensor in the expected axes: (b, q, h) and a last axis of 1 are turned, and rows that fill up a block are cut.

    None if its shape does not fit.
    """
    x = x.squeeze(-1) if x.dim() == expected.dim() + 1 and x.shape[-1] == 1 else x
    if x.shape == expected.shape:
        return x
    if x.dim() == expected.dim() == 3:
        if x.mT.shape == expected.shape:
            return x.mT
        if x.shape[:2] == expected.shape[:2] and x.shape[2] > expected.shape[2]:
            return x[..., : expected.shape[2]]
    return None


def is_right(found: Tensor, expected: Tensor, plain: Tensor, largest: float) -> bool:
    """Return whether a tensor is what is expected, where that is finite, and holds no NaN."""
    return not bool(found.isnan().any()) and measure_error(found, expected) <= get_allowed_error(expected, plain, largest)


def name_mistake(x: Tensor, role: str, exact: AttentionFormula) -> str:
    """Return the known mistake that gives a tensor, in words; "" if there is none."""
    limit = measure_role_error(x, role, exact)  # a mistake that changes nothing here explains nothing
    for does, rows in list_mistakes(role, exact):
        expected = take_mean(rows, x, role)
        found, known = arrange_rows(x, expected), expected.isfinite()
        if found is None or not known.any() or bool(found[known].isnan().any()):
            continue
        error = measure_error(found, expected)
        if error < limit and error < NEAR * max(float(expected[known].abs().max()), 1e-3):
            return does
    return ""


def measure_role_error(x: Tensor, role: str, exact: AttentionFormula) -> float:
    """Return the largest difference of a tensor from what its role should hold; infinite for another shape."""
    right = take_mean(compute_role(role, exact), x, role)
    found = arrange_rows(x, right)
    return math.inf if found is None else measure_error(found, right)


def find_nearest_role(x: Tensor, roles: Sequence[str], exact: AttentionFormula) -> str:
    """Return the role whose tensor comes nearest to x, "" if none comes near."""
    errors = {role: measure_role_error(x, role, exact) for role in roles}
    best = min(errors, key=errors.__getitem__)
    right = compute_role(best, exact)
    known = right[right.isfinite()]
    return best if known.numel() and errors[best] < NEAR * max(float(known.abs().max()), 1e-3) else ""


def list_mistakes(role: str, exact: AttentionFormula) -> Iterator[tuple[str, Tensor]]:
    """Yield what mistakes give for a role, in words and numbers: those of any role, and then those of its own."""
    right = compute_role(role, exact)
    yield "it is that of scores that are not scaled", compute_role(role, replace(exact, scale=1.0))
    yield "it includes hidden keys", compute_role(role, replace(exact, seen=torch.ones_like(exact.seen)))
    if role in BASES:
        does, factor = BASES[role]
        yield does, right * factor
    yield "its sign is turned", -right
    yield from LISTS[role](exact)
    for other in WORDS.keys() - {role}:
        yield f"it is the {WORDS[other]}, not the {WORDS[role]}", compute_role(other, exact)


def list_sum_mistakes(exact: AttentionFormula) -> Iterator[tuple[str, Tensor]]:
    """Yield what mistakes give for the log-sum-exp or the largest score, (b, h, q)."""
    most, lse = exact.masked.amax(-1), exact.logsumexp
    yield "the largest score is not added: it is log(Σ exp(s - max))", lse - most
    yield "the largest score is in base e and the logarithm of the sum in base 2", most + (lse - most) / LN2
    yield "it is the sum of exponentials, not its logarithm", (lse - most).exp()
    yield "it is the sum of exponentials, not its logarithm", lse.exp()


def list_weight_mistakes(exact: AttentionFormula) -> Iterator[tuple[str, Tensor]]:
    """Yield what mistakes give for weights, (b, h, q, k)."""
    yield "the weights are scores before the softmax", exact.scaled
    numbers = (exact.masked - exact.masked.amax(-1, keepdim=True)).exp()
    yield "the weights are exponentials that are not divided by their sum", numbers
    yield "the weights are those of exp2 and a natural log-sum-exp", 2 ** (exact.masked - exact.logsumexp[..., None])
    yield "the weights are the mean of all heads", exact.weights.mean(1)


def list_entropy_mistakes(exact: AttentionFormula) -> Iterator[tuple[str, Tensor]]:
    """Yield what mistakes give for the entropy in nats, (b, h, q)."""
    entropy, keys = compute_role("entropy", exact), exact.k.shape[2]
    yield "it is divided by the logarithm of the number of keys", entropy / math.log(max(keys, 2))
    mean = torch.special.entr(exact.weights.mean(1, keepdim=True)).sum(-1)
    yield "it is the entropy of the mean of all heads", mean.expand_as(entropy)
    for eps in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8):
        added = -(exact.weights * (exact.weights + eps).log()).sum(-1)
        yield f"{eps:g} is added to the weights before the logarithm", added


def list_sink_mistakes(exact: AttentionFormula) -> Iterator[tuple[str, Tensor]]:
    """Yield what mistakes give for the weight on the first key, (b, h, q)."""
    weights = exact.weights
    yield "it is the weight on the last key", weights[..., -1]
    yield "it is the largest weight of each row", weights.amax(-1)
    yield "it is the score of the first key, before the softmax", exact.scaled[..., 0]
    yield "it is the mean of all heads", weights[..., 0].mean(1, keepdim=True).expand(weights.shape[:-1])
    if exact.q.shape[2] == exact.k.shape[2]:
        yield "it is the weight of the first query on each key: rows and columns are exchanged", weights[..., 0, :]


LISTS: dict[str, Callable[[AttentionFormula], Iterator[tuple[str, Tensor]]]] = {
    **dict.fromkeys(("lse2", "lse", "max"), list_sum_mistakes),
    "weights": list_weight_mistakes,
    "entropy": list_entropy_mistakes,
    "sink": list_sink_mistakes,
}

"""Check what a kernel returns beside the context: log-sum-exp, largest scores, weights, and monitors of entropy and sinks."""

import math
from collections.abc import Iterator, Sequence
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
ENTROPY = "Return torch.special.entr(weights).sum(-1), of each head's weights: a weight of 0 adds 0."
SINK = "Return weights[..., 0], of each head's weights."
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


class WrongAuxiliary(NamedTuple):
    """What a mistake gives, in words, with the cure."""

    does: str
    cure: str
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
        near = "" if wrong is None or given.role else find_nearest_role(given.tensor, roles, exact)
        if near not in ("", role):  # nobody said that it is another one
            given = given._replace(role=near)
            break
        if wrong is not None:
            return Finding(f"wrong {WORDS[role]}", f"with {where} {wrong.does}", wrong.cure, 1.5, f"auxiliary {role}")
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
    cure = f"Return the {WORDS[given.role]} of the scaled and masked scores, (b, h, q{', k' * (given.role == 'weights')})."
    if given.role == "entropy":
        cure = ENTROPY
    return Finding(f"wrong {WORDS[given.role]}", sentence, cure, 1.4, f"auxiliary {given.role}")


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


def name_mistake(x: Tensor, role: str, exact: AttentionFormula) -> WrongAuxiliary | None:
    """Return the known mistake that gives a tensor, None if there is none."""
    limit = measure_role_error(x, role, exact)  # a mistake that changes nothing here explains nothing
    lists = {"weights": list_weight_mistakes, "entropy": list_entropy_mistakes, "sink": list_sink_mistakes}
    for wrong in lists[role](exact) if role in lists else list_row_mistakes(role, exact):
        expected = take_mean(wrong.tensor, x, role)
        found = arrange_rows(x, expected)
        known = expected.isfinite()
        if found is None or not known.any() or bool(found[known].isnan().any()):
            continue
        if limit <= measure_error(found, expected):
            continue
        if measure_error(found, expected) < NEAR * max(float(expected[known].abs().max()), 1e-3):
            return wrong
    return None


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


def list_row_mistakes(role: str, exact: AttentionFormula) -> Iterator[WrongAuxiliary]:
    """Yield what mistakes give for the log-sum-exp or the largest score, (b, h, q)."""
    most, lse = exact.masked.amax(-1), exact.logsumexp
    raw, hidden = exact.raw.masked_fill(~exact.seen, -torch.inf), exact.scaled
    again = f"Multiply the scores by {exact.scale:.4g} before it is taken."
    mask = "Hide keys with -inf before it is taken."
    if role == "max":
        yield WrongAuxiliary("the largest score is that of scores that are not scaled", again, raw.amax(-1))
        yield WrongAuxiliary("the largest score is multiplied by log2(e)", "Divide it by log2(e) = 1.4427.", most / LN2)
        yield WrongAuxiliary("the largest score includes hidden keys", mask, hidden.amax(-1))
        yield WrongAuxiliary("it is the log-sum-exp, not the largest score", "Return the maximum.", lse)
        return
    if role == "lse":
        base = 'Multiply it by ln 2 = 0.6931; or pass outputs=("lse2",), if base 2 is intended.'
        yield WrongAuxiliary("the log-sum-exp is in base 2: 1.4427 times that in base e", base, lse / LN2)
    else:
        base = 'Divide it by ln 2 = 0.6931; or pass outputs=("lse",), if base e is intended.'
        yield WrongAuxiliary("the log-sum-exp is in base e: 0.6931 times that in base 2", base, lse)
    add = "Return max + log(sum)."
    yield WrongAuxiliary("the log-sum-exp is that of scores that are not scaled", again, raw.logsumexp(-1))
    yield WrongAuxiliary("the log-sum-exp includes hidden keys", mask, hidden.logsumexp(-1))
    yield WrongAuxiliary("the largest score is not added: it is log(Σ exp(s - max))", add, lse - most)
    mixed = "the largest score is in base e and the logarithm of the sum in base 2"
    yield WrongAuxiliary(mixed, "Use one base in both: max + log(sum).", most + (lse - most) / LN2)
    yield WrongAuxiliary("it is the sum of exponentials, not its logarithm", add, (lse - most).exp())
    yield WrongAuxiliary("it is the sum of exponentials, not its logarithm", add, lse.exp())
    yield WrongAuxiliary("its sign is turned", "Return max + log(sum), not its negative.", -lse)
    yield WrongAuxiliary("it is the largest score, not the log-sum-exp", add, most)


def list_weight_mistakes(exact: AttentionFormula) -> Iterator[WrongAuxiliary]:
    """Yield what mistakes give for weights, (b, h, q, k)."""
    softmax = "Return softmax(scores) over the keys, after the mask: exp(s - lse)."
    numbers = (exact.masked - exact.masked.amax(-1, keepdim=True)).exp()
    yield WrongAuxiliary("the weights are scores before the softmax", softmax, exact.scaled)
    yield WrongAuxiliary("the weights are exponentials that are not divided by their sum", softmax, numbers)
    yield WrongAuxiliary("the weights include hidden keys", softmax, exact.scaled.softmax(-1))
    raw = exact.raw.masked_fill(~exact.seen, -torch.inf)
    yield WrongAuxiliary("the weights are those of scores that are not scaled", softmax, raw.softmax(-1))
    yield WrongAuxiliary(
        "the weights are those of exp2 and a natural log-sum-exp", softmax, 2 ** (exact.masked - exact.logsumexp[..., None])
    )
    yield WrongAuxiliary(
        "the weights are the mean of all heads", "Return the weights of each head, (b, h, q, k).", exact.weights.mean(1)
    )


def list_entropy_mistakes(exact: AttentionFormula) -> Iterator[WrongAuxiliary]:
    """Yield what mistakes give for the entropy in nats, (b, h, q)."""
    weights, line = exact.weights, ENTROPY
    entropy = torch.special.entr(weights).sum(-1)
    raw = exact.raw.masked_fill(~exact.seen, -torch.inf).masked_fill(exact.blind, 0).softmax(-1) * exact.seen
    yield WrongAuxiliary("the entropy is in bits: 1.4427 times that in nats", "Multiply it by ln 2 = 0.6931.", entropy / LN2)
    yield WrongAuxiliary("its sign is turned", line, -entropy)
    yield WrongAuxiliary(
        "it is divided by the logarithm of the number of keys", line, entropy / math.log(max(exact.k.shape[2], 2))
    )
    yield WrongAuxiliary("it is divided by the number of keys", line, entropy / exact.k.shape[2])
    yield WrongAuxiliary("the entropy includes hidden keys", line, torch.special.entr(exact.scaled.softmax(-1)).sum(-1))
    yield WrongAuxiliary("the entropy is that of scores that are not scaled", line, torch.special.entr(raw).sum(-1))
    mean = torch.special.entr(weights.mean(1, keepdim=True)).sum(-1).expand_as(entropy)
    yield WrongAuxiliary("it is the entropy of the mean of all heads", line, mean)
    for eps in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8):
        added = -(weights * (weights + eps).log()).sum(-1)
        yield WrongAuxiliary(f"{eps:g} is added to the weights before the logarithm", line, added)
    yield WrongAuxiliary("it is the exponential of the entropy", line, entropy.exp())


def list_sink_mistakes(exact: AttentionFormula) -> Iterator[WrongAuxiliary]:
    """Yield what mistakes give for the weight on the first key, (b, h, q)."""
    weights, line = exact.weights, SINK
    raw = exact.raw.masked_fill(~exact.seen, -torch.inf).masked_fill(exact.blind, 0).softmax(-1) * exact.seen
    yield WrongAuxiliary("it is the weight on the last key", line, weights[..., -1])
    yield WrongAuxiliary("it is the weight on the second key", line, weights[..., min(1, weights.shape[-1] - 1)])
    yield WrongAuxiliary("it is the largest weight of each row", line, weights.amax(-1))
    yield WrongAuxiliary("it is the score of the first key, before the softmax", line, exact.scaled[..., 0])
    yield WrongAuxiliary("the weights include hidden keys", line, exact.scaled.softmax(-1)[..., 0])
    yield WrongAuxiliary("the weights are those of scores that are not scaled", line, raw[..., 0])
    yield WrongAuxiliary("it is the mean of all heads", line, weights.mean(1, keepdim=True).expand_as(weights)[..., 0])
    if exact.q.shape[2] == exact.k.shape[2]:
        own = "it is the weight on the query's own key"
        yield WrongAuxiliary(own, line, weights.diagonal(dim1=-2, dim2=-1))
        given = weights[..., :1, :].transpose(-2, -1).squeeze(-1)
        yield WrongAuxiliary("it is the weight of the first query on each key: rows and columns are exchanged", line, given)

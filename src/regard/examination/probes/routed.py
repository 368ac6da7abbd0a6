"""Check that hard routing lets no query see a later token: over many inputs, and where two scores change order.

The choice of a top-k has no gradient, and only some inputs change it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.examination import dependency
from regard.examination.case import Case
from regard.examination.probes.lengths import replace_tokens
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject.adapters import SubjectError

LENGTHS, SEEDS, SIZES = (40, 129), 12, (0.25, 1.0, 4.0)  # tokens; inputs of each length; sizes of the tokens put in
STEPS = 20  # bisections towards the input at which a choice changes
WHAT = "the choices of {} let no query see a later token"
CURE = (
    "A top-k, argmax or sort over the tokens of a sequence lets every token compete with later ones: choose for each token "
    "alone, by a threshold, or among the tokens before it."
)
ROUTERS = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "msort", "multinomial")


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check for outputs that move with later tokens through the choices of a top-k, an argmax or a sort."""
    usual = case.make_usual_inputs()
    names = record_routing(lambda: case.compute_seeded_context(*usual)).names
    if not names or not find_early_rows(case, usual, case.shapes.tokens - 1).any():
        return
    tried, turned = 0, 0
    for t in choose_lengths(case):
        for seed in range(SEEDS):
            try:
                leak, found = find_routed_leak(case, t, seed)
            except SubjectError:  # it rejects this length
                break
            if leak is not None:
                yield leak
                return
            tried, turned = tried + 1, turned + found
    sentence = f"{tried} inputs, {turned} of them on both sides of a change of order, would show a leak in one of them"
    yield Checked(WHAT.format(" and ".join(dict.fromkeys(names))), sentence)


def choose_lengths(case: Case) -> list[int]:
    """Return the numbers of tokens to try."""
    longer = [t for t in LENGTHS if t <= (case.shapes.most or t)] if case.can_resize and not case.shapes.gap else []
    return [case.shapes.tokens, *longer]


def find_routed_leak(case: Case, t: int, seed: int) -> tuple[Finding | None, bool]:
    """Return the finding of outputs that move when the tokens after them are replaced, and whether a choice changed.

    The tokens are replaced in part too, up to either side of the point where a choice changes.
    """
    first = (t // 2, 7 * t // 8, t - 1)[seed % 3]
    inputs = case.make_inputs(t, 1, 300 + seed)
    other = case.make_inputs(t, 1, 400 + seed, SIZES[seed % len(SIZES)])

    def blend(share: float) -> tuple[Tensor, ...]:
        mixed = tuple(torch.lerp(x, y, share) for x, y in zip(inputs, other, strict=True))
        return replace_tokens(inputs, mixed, (first, t))

    before, chosen = run_routed(case, blend(0.0))
    early = find_early_rows(case, inputs, first)[0]
    low, high = 0.0, 1.0
    turned = not has_equal_choices(chosen, run_routed(case, blend(high))[1])
    for _ in range(STEPS if turned else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if has_equal_choices(chosen, run_routed(case, blend(middle))[1]) else (low, middle)
    for share in {low, high, 1.0}:
        moved = (run_routed(case, blend(share))[0] - before)[0].double().abs().amax(-1)
        leaking = early & (moved > dependency.estimate_rounding(before.dtype) * before.double().abs().amax(-1)[0])
        if leaking.any():
            i = int(leaking.int().argmax())
            sentence = f"with {t} tokens replacing tokens {first} to {t - 1} moves output {i} by {float(moved[i]):.2g}"
            names = " and ".join(dict.fromkeys(chosen.names))
            return Finding("future leak", f"{sentence}: {names} chooses among all tokens", CURE, 1.6, "mask"), turned
    return None, turned


def run_routed(case: Case, inputs: tuple[Tensor, ...]) -> tuple[Tensor, "RoutingRecorder"]:
    """Return the context (b, t, c) of inputs, and the choices that were made."""
    found: list[Tensor] = []
    recorder = record_routing(lambda: found.append(case.compute_seeded_context(*inputs).cpu()))
    return found[0], recorder


def find_early_rows(case: Case, inputs: tuple[Tensor, ...], first: int) -> Tensor:
    """Return the queries (b, q) before token `first` that may see none of the tokens from it on."""
    expected = case.get_expected_visibility(*inputs).cpu()
    rows = ~expected[..., first:].any(-1) & expected.any(-1)
    return rows & (torch.arange(rows.shape[-1]) + case.shapes.gap < first)


class RoutingRecorder(TorchFunctionMode):
    """A torch function mode that keeps the names of routing functions that run, and the indices that they choose."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.choices: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(getattr(func, "__name__", ""))
        if name in ROUTERS and args and isinstance(args[0], Tensor) and args[0].is_floating_point():  # not of a table of a mask
            self.names.append(name)
            parts = result if isinstance(result, tuple) else (result,)
            self.choices += [one.clone() for one in parts if isinstance(one, Tensor) and not one.is_floating_point()]
        return result


def record_routing(run: Callable[[], object]) -> RoutingRecorder:
    """Return what routing functions chose while `run` ran."""
    recorder = RoutingRecorder()
    with recorder, torch.no_grad():
        run()
    return recorder


def has_equal_choices(one: RoutingRecorder, other: RoutingRecorder) -> bool:
    """Return whether two forwards made the same choices."""
    return len(one.choices) == len(other.choices) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(one.choices, other.choices, strict=True)
    )

"""Check a whole model at several lengths: no output may move when tokens that it may not see are replaced."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.examination import evidence
from regard.examination.report import Checked, Finding
from regard.examination.subject import localize
from regard.examination.subject.adapters import SubjectError
from regard.examination.subject.routing import record_routing
from regard.examination.subject.token_model import TokenModel
from regard.mechanism import Mask
from regard.mechanism.mask_algebra import Offset

LENGTHS = (40, 129, 300)  # tokens: within blocks of usual sizes, one more than a block, and over several
WORK = 3e10  # parameters times tokens that are run for each length, beyond the first two replacements
MOST = 9  # replacements of each length
SEEDS, EACH = 8, 3  # inputs of a model with hard routing, and replacements of each
NUMBERS = 2**23  # outputs at most: two of a length are kept
ROWS = 32  # outputs that are compared at once: those of a large vocabulary take memory
CURE = (
    "Make the mask for the current number of tokens, and in a kernel mask every block that the diagonal crosses; keep tokens "
    "separate in other modules."
)
ROUTE = "Choose for each token alone, or among the tokens before it: a top-k over a sequence lets later tokens displace it."
DRAW = "Use no random numbers in evaluation, at any length: F.dropout(x, p, training=self.training)."


class Replacement(NamedTuple):
    """Ids (1, t), those with the tokens from `first` on replaced, and the outputs (t,) that may not move."""

    ids: Tensor
    changed: Tensor
    first: int
    fixed: Tensor


def check_lengths(model: TokenModel, expects: Mask, offset: Offset) -> Iterator[Finding | Checked]:
    """Yield a leak at the shortest length that has one, or the lengths that were tried."""
    if expects.is_batch_specific or expects.key_count is not None:
        return
    taken: list[int] = []
    refused: list[int] = []
    outputs: list[Tensor | None] = []
    names = dict.fromkeys(record_routing(lambda: outputs.append(model.run())).names)
    width = 1 if outputs[0] is None else outputs[0].shape[-1]
    for t in LENGTHS:
        if (model.is_sampled and t > model.sample_length) or t * width > NUMBERS:
            continue
        try:
            found = next(find_leaks(model, t, find_hidden_tokens(expects, t, offset), list(names)), None)
        except SubjectError:  # refusing another length is allowed
            refused.append(t)
            continue
        if found is not None:
            yield found
            return
        taken.append(t)
    if taken:
        sentence = f"with {evidence.format_numbers(taken)} tokens, whose last ones were replaced from several places on"
        sentence += f"; it rejects {evidence.format_numbers(refused)}" if refused else ""
        sentence += f"; with several inputs of each length, as {' and '.join(names)} chooses tokens" if names else ""
        yield Checked("at longer lengths no output depends on a hidden token", sentence)


def find_hidden_tokens(expects: Mask, t: int, offset: Offset) -> Tensor:
    """Return which tokens an output may not depend on through any number of layers, bool (t, t)."""
    table = expects.table(t, t, offset)
    reach = table[(None,) * (4 - table.dim())][0].any(0).expand(t, t) | torch.eye(t, dtype=torch.bool)
    while True:
        further = (reach.float() @ reach.float()) > 0
        if torch.equal(further, reach):
            return ~reach
        reach = further


def find_leaks(model: TokenModel, t: int, hidden: Tensor, names: list[str]) -> Iterator[Finding]:
    """Yield findings of outputs that move with tokens that they may not depend on."""
    size = sum(one.numel() for one in model.module.parameters())
    count = max(2, min(MOST, int(WORK / max(size * t, 1))))
    seeds, count = ((SEEDS if count == MOST else 2), min(count, EACH)) if names else (1, count)
    for seed in range(seeds):
        ids = draw_ids(model, t, seed)
        before = model.run(ids)
        if before is None:
            return
        for first in choose_starts(t)[:count]:
            fixed = hidden[:, first:].all(-1)
            if fixed.any():
                finding = find_leak(model, Replacement(ids, replace_last(model, ids, first, seed), first, fixed), before, names)
                if finding is not None:
                    yield finding


def find_leak(model: TokenModel, tried: Replacement, before: Tensor, names: list[str]) -> Finding | None:
    """Return the finding of an output that moved and may not, or of outputs that are random; None if none moved."""
    moved = measure_move(model, tried.changed, before)
    least = model.estimate_noise(before)
    leaking = tried.fixed & (moved > least)
    if not leaking.any():
        return None
    t, i = len(moved), int(leaking.int().argmax())
    again = measure_move(model, tried.ids, before)
    if (again > least).any():
        sentence = f"with {t} tokens two calls in evaluation with the same tokens differ by {float(again.max()):.2g}"
        return Finding("dropout in evaluation", sentence, DRAW, 3.0, "dropout")
    where = localize.find_moving_module(replace(model, ids=tried.ids), tried.changed, 0, i)
    sentence = (
        f"with {t} tokens replacing tokens {tried.first} to {t - 1} moves output {i} of the model by {float(moved[i]):.2g}"
    )
    sentence += f"; the first module whose output changes there is {where}" if where else ""
    kind = "future leak" if tried.first > i else "wrong mask"
    return Finding(kind, sentence, ROUTE if names else CURE, 1.5, "mask", where)


def measure_move(model: TokenModel, ids: Tensor, before: Tensor) -> Tensor:
    """Return how far each output of other ids is from `before`, (t,)."""
    after = model.run(ids)
    assert after is not None
    rows = [(one - other).abs().amax(-1) for one, other in zip(after[0].split(ROWS), before[0].split(ROWS), strict=True)]
    return torch.cat(rows)


def draw_ids(model: TokenModel, t: int, seed: int) -> Tensor:
    """Draw ids (1, t) from those that the model takes."""
    known = model.ids.flatten()
    places = torch.randint(len(known), (1, t), generator=torch.Generator().manual_seed(seed))
    return known[places.to(known.device)]


def replace_last(model: TokenModel, ids: Tensor, first: int, seed: int) -> Tensor:
    """Return ids with every token from `first` on replaced by another."""
    known = model.ids.unique()
    places = torch.searchsorted(known, ids[:, first:])
    steps = torch.randint(1, max(len(known), 2), places.shape, generator=torch.Generator().manual_seed(500 + seed))
    changed = ids.clone()
    changed[:, first:] = known[(places + steps.to(known.device)) % len(known)]
    return changed


def choose_starts(t: int) -> list[int]:
    """Return where replaced tokens begin, the most telling first: within blocks of any size, and where blocks end."""
    edge = 1 << ((t - 1).bit_length() - 1)
    return list(dict.fromkeys(n for n in (7 * t // 8 | 1, edge, 16, 17, 33, edge // 2, t // 4 | 1, 64, t - 1) if 0 < n < t))

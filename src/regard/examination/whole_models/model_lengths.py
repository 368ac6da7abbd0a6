"""Check a whole model at several lengths: each layer follows its rule, and no output moves with tokens that it may not see."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.examination import evidence, mask_requirements
from regard.examination.layer_rules import LayerRules
from regard.examination.probes.lengths import DRAW
from regard.examination.probes.routed import record_routing
from regard.examination.report import Checked, Finding
from regard.examination.subject import localize
from regard.examination.subject.adapters import SubjectError
from regard.examination.subject.token_model import TokenModel
from regard.examination.whole_models.layer_masks import compare_layers, report_layers
from regard.examination.whole_models.output_moves import compute_closure, compute_lasting_closure
from regard.examination.whole_models.recorded_layers import record_sights
from regard.mechanism.mask_algebra import Offset

LENGTHS = (40, 129, 300)  # tokens: within blocks of usual sizes, one more than a block, and over several
WORK = 3e10  # parameters times tokens that are run for each length, beyond the first two replacements
MOST = 9  # replacements of each length
SEEDS, EACH = 8, 3  # inputs of a model with hard routing, and replacements of each
MOST_WORK = 3e11  # the same for one longer length that shows a rule
NUMBERS = 2**23  # outputs at most: two of a length are kept
ROWS = 32  # outputs that are compared at once: those of a large vocabulary take memory
CURE = (
    "Make the mask for the current number of tokens, and in a kernel mask every block that the diagonal crosses; keep tokens "
    "separate in other modules."
)
ROUTE = "Choose for each token alone, or among the tokens before it: a top-k over a sequence lets later tokens displace it."


class Replacement(NamedTuple):
    """Ids (1, t), those with the tokens from `first` on replaced, the outputs (t,) that may not move, and those
    that `first` comes after, (t,), where later tokens are hidden."""

    ids: Tensor
    changed: Tensor
    first: int
    fixed: Tensor
    future: Tensor


class CheckedLengths(NamedTuple):
    """The result of other lengths, and the most tokens with which each layer was compared with its rule."""

    results: list[Finding | Checked]
    most: int


def choose_lengths(model: TokenModel, rules: LayerRules) -> list[int]:
    """Return the lengths to try, with one that shows each rule; none if the rules or the sample fit one length alone."""
    if rules.is_batch_specific or rules.key_count is not None or model.is_fixed:
        return []
    needed = rules.required_tokens
    is_affordable = needed <= LENGTHS[-1] or needed * model.size <= MOST_WORK or model.is_sampled
    every = {*LENGTHS, *([needed] if needed > model.ids.shape[1] and is_affordable else [])}
    return sorted(t for t in every if not model.is_sampled or t <= model.sample_length)


def check_lengths(model: TokenModel, rules: LayerRules, offset: Offset, names: Sequence[str]) -> CheckedLengths:
    """Return a mistake at the shortest length that has one, or the lengths that were tried.

    `names` are all layers, in order, if each was recorded; empty if some were not.
    """
    taken: list[int] = []
    refused: list[int] = []
    seen = model.ids.shape[1] if names else 0
    outputs: list[Tensor | None] = []
    routing = dict.fromkeys(record_routing(lambda: outputs.append(model.run())).names)
    width = 1 if outputs[0] is None else outputs[0].shape[-1]
    for t in choose_lengths(model, rules):
        try:
            layers = record_sights(model, draw_ids(model, t, 0), rules)[0] if names else []
            differences = compare_layers(layers, rules, offset)
            found = None if routing else next(report_layers(differences, [], offset), None)
            found = found and replace(found, evidence=f"with {t} tokens {found.evidence}")
            if found is None and t <= LENGTHS[-1] and t * width <= NUMBERS:
                found = next(find_leaks(model, t, find_hidden_tokens(rules, t, offset, names), list(routing)), None)
        except SubjectError:  # refusing another length is allowed
            refused.append(t)
            continue
        if found is not None:
            return CheckedLengths([found], t)
        taken.append(t)
        seen = t if layers else seen
    if not taken:
        return CheckedLengths([], seen)
    sentence = f"with {evidence.format_numbers(taken)} tokens, whose last ones were replaced from several places on"
    sentence += f"; it rejects {evidence.format_numbers(refused)}" if refused else ""
    sentence += f"; with several inputs of each length, as {' and '.join(routing)} chooses tokens" if routing else ""
    what = "at longer lengths no output depends on a hidden token"
    what += ", and each layer sees what its rule allows" if names and not routing else ""
    return CheckedLengths([Checked(what, sentence)], seen)


def find_hidden_tokens(rules: LayerRules, t: int, offset: Offset, names: Sequence[str]) -> Tensor:
    """Return which tokens an output may not depend on through these layers, or any number of them, bool (t, t)."""
    if names:
        return ~compute_closure([mask_requirements.expand_mask(rules.get_rule(name), 1, t, t, offset)[0] for name in names])
    tables = [mask_requirements.expand_mask(rule, 1, t, t, offset)[0] for rule in rules.masks]
    return ~compute_lasting_closure(torch.stack(tables).any(0))


def find_leaks(model: TokenModel, t: int, hidden: Tensor, names: list[str]) -> Iterator[Finding]:
    """Yield findings of outputs that move with tokens that they may not depend on."""
    count = max(2, min(MOST, int(WORK / max(model.size * t, 1))))
    future = mask_requirements.find_future_pairs(~hidden, mask_requirements.make_later_table(t, t))
    seeds, count = ((SEEDS if count == MOST else 2), min(count, EACH)) if names else (1, count)
    for seed in range(seeds):
        ids = draw_ids(model, t, seed)
        before = model.run(ids)
        if before is None:
            return
        for first in choose_starts(t)[:count]:
            fixed = hidden[:, first:].all(-1)
            if fixed.any():
                replacement = Replacement(ids, replace_last(model, ids, first, seed), first, fixed, future[:, first])
                finding = find_leak(model, replacement, before, names)
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
    kind = "future leak" if tried.future[i] else "wrong mask"
    return Finding(kind, sentence, ROUTE if names else CURE, 1.5, "mask", where)


def measure_move(model: TokenModel, ids: Tensor, before: Tensor) -> Tensor:
    """Return how far each output of other ids is from `before`, (t,)."""
    after = model.run(ids)
    assert after is not None
    rows = [(one - other).abs().amax(-1) for one, other in zip(after[0].split(ROWS), before[0].split(ROWS), strict=True)]
    return torch.cat(rows)


def draw_ids(model: TokenModel, t: int, seed: int) -> Tensor:
    """Draw ids (1, t) from those that the model takes."""
    known = model.ids.flatten(0, 1)
    places = torch.randint(len(known), (1, t), generator=torch.Generator().manual_seed(seed))
    return known[places.to(known.device)]


def replace_last(model: TokenModel, ids: Tensor, first: int, seed: int) -> Tensor:
    """Return ids with every token from `first` on replaced by another."""
    known = model.ids.flatten(0, 1).unique(dim=0)
    draw = torch.Generator().manual_seed(500 + seed)
    places = torch.randint(len(known), ids[:, first:].shape[:2], generator=draw).to(known.device)
    drawn, following = known[places], known[(places + 1) % len(known)]
    is_same = (drawn == ids[:, first:]).flatten(2).all(-1) if drawn.dim() > 2 else drawn == ids[:, first:]
    changed = ids.clone()
    changed[:, first:] = torch.where(is_same[..., None] if drawn.dim() > 2 else is_same, following, drawn)
    return changed


def choose_starts(t: int) -> list[int]:
    """Return where replaced tokens begin, the most telling first: within blocks of any size, and where blocks end."""
    edge = 1 << ((t - 1).bit_length() - 1)
    return list(dict.fromkeys(n for n in (7 * t // 8 | 1, edge, 16, 17, 33, edge // 2, t // 4 | 1, 64, t - 1) if 0 < n < t))

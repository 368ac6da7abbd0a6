"""Compare who sees whom in each layer with its rule, and put what differs in words of rules."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.examination import mask_requirements
from regard.examination.layer_rules import ALL, LayerRules
from regard.examination.report import Finding
from regard.examination.whole_models.recorded_layers import LayerSight
from regard.mechanism import Documents, Mask
from regard.mechanism.mask_algebra import And, Not, Offset, Or
from regard.observe import text_table

HIDE = "Apply the expected mask in that layer, before its softmax: scores.masked_fill(~mask, -torch.inf), or is_causal=True."
NEXT = "In that layer the diagonal is off by one: triu(diagonal=1) hides the later tokens. "
SHOW = "Hide no more than the expected mask does: in that layer set only the scores of keys that it hides to -inf."
MOST_GROUPS, MOST_NAMES = 3, 4  # that a sentence has
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


@dataclass(frozen=True, eq=False)
class LayerDifference:
    """A layer next to its rule: who may see whom, and what it sees too much and too little, bool (b, q, k)."""

    place: int  # among the layers
    sight: LayerSight
    rule: Mask
    allowed: Tensor
    judged: Tensor

    @property
    def extra(self) -> Tensor:
        """What is seen and may not be."""
        return self.sight.seen & ~self.allowed & self.judged

    @property
    def missing(self) -> Tensor:
        """What may be seen and is not."""
        return ~self.sight.seen & self.allowed & self.judged

    def infer_mask(self, offset: Offset) -> Mask | None:
        """Return the rule that the layer follows; None if it is none of those that are known."""
        return mask_requirements.infer_mask(self.sight.seen, self.judged, self.rule, offset)


def compare_layers(layers: Sequence[LayerSight], rules: LayerRules, offset: Offset) -> list[LayerDifference]:
    """Return each layer next to its rule. Queries that may see nothing, or are padding, are not judged."""
    found = []
    for place, sight in enumerate(layers):
        b, q, k = sight.seen.shape
        rule = rules.get_rule(sight.name)
        allowed = mask_requirements.expand_mask(rule, b, q, k, offset)
        judged = allowed.any(-1, keepdim=True) & mask_requirements.find_real_queries(rule, b, q, k)
        found.append(LayerDifference(place, sight, rule, allowed, judged.expand(b, q, k)))
    return found


def report_layers(
    every: Sequence[LayerDifference],
    longer: Sequence[LayerDifference],
    offset: Offset,
    describe_move: Callable[[int, int, int], str] = lambda b, i, j: "",
) -> Iterator[Finding]:
    """Yield the findings of layers that see too much, and of others that see too little.

    `longer` are the same layers with more tokens, which show what rule they follow; `describe_move` returns how far a token
    moves an output of the model, as a part of the evidence.
    """
    more = [one for one in every if one.extra.any()]
    less = [one for one in every if one not in more and one.missing.any()]
    told = longer if len(longer) == len(every) else every
    masks = [one.infer_mask(offset) if one.extra.any() or one.missing.any() else one.rule for one in told]
    if more:
        yield report_extra(more, every, masks, offset, describe_move)
    if less:
        b, i, j = (int(n) for n in less[0].missing.nonzero()[0])
        evidence = f"{format_row(less[0], b, i)} may see token {j}, but puts no weight on it{describe_rules(less, masks)}"
        names = tuple(dict.fromkeys(one.sight.name for one in less))
        yield Finding("wrong mask", evidence, f"{SHOW}{describe_intent(every, masks)}", 1.8, "mask", names[0], names)


def report_extra(
    more: Sequence[LayerDifference],
    every: Sequence[LayerDifference],
    masks: Sequence[Mask | None],
    offset: Offset,
    describe_move: Callable[[int, int, int], str],
) -> Finding:
    """Return the finding of layers that see too much: the first layer, its first such row, and the key of most weight."""
    first = more[0]
    extra, future = first.extra, mask_requirements.find_future(first.rule, first.extra.shape, offset)
    told = extra & future if (extra & future).any() else extra
    b, i = (int(n) for n in told.any(-1).nonzero()[0])
    j = max((int(n) for n in told[b, i].nonzero()), key=lambda key: first.sight.get_weight(b, i, key))
    weight = first.sight.get_weight(b, i, j)
    evidence = f"{format_row(first, b, i)} puts {weight:.2g} on token {j}, which "
    evidence += "comes later" if future[b, i, j] else "it may not see"
    evidence += describe_move(b, i, j)
    next_one = future & (future.cumsum(-1) == 1)
    is_one_off = extra.shape[-1] > 2 and torch.equal(extra, next_one & first.judged)
    evidence += " (each row sees one token too many)" if is_one_off else ""
    names = tuple(dict.fromkeys(one.sight.name for one in more))
    cure = (NEXT if is_one_off else "") + HIDE + describe_intent(every, masks)
    kind = "future leak" if future[b, i, j] else "wrong mask"
    return Finding(kind, evidence + describe_rules(more, masks), cure, 2.0, "mask", names[0], names)


def format_row(one: LayerDifference, b: int, i: int) -> str:
    """Format a query of a layer: `blocks.0.attention: row 3 of sequence 1`."""
    return f"{one.sight.name or 'the module'}: row {i}{f' of sequence {b}' * (b > 0)}"


def describe_rules(wrong: Sequence[LayerDifference], masks: Sequence[Mask | None]) -> str:
    """Describe expected and found rules: `; expected Causal(), found Everything(), in layers 0 and 1`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in wrong:
        rule = masks[one.place]
        found = "another mask" if rule is None else format_mask(rule)
        groups.setdefault((format_mask(one.rule), found), []).append(one.sight.name)
    is_single = len({one.sight.name for one in wrong}) == 1  # it is named before
    parts = [
        f"; expected {rule}, found {found}{'' if is_single else format_layers(names)}"
        for (rule, found), names in groups.items()
    ]
    return "".join(parts[:MOST_GROUPS]) + ("; and others" if len(parts) > MOST_GROUPS else "")


def describe_intent(every: Sequence[LayerDifference], masks: Sequence[Mask | None]) -> str:
    """Return what to pass if what the layers do is meant; "" if a rule is not known."""
    if None in masks:
        return ""
    names = {one.sight.name: format_mask(mask) for one, mask in zip(every, masks, strict=True) if mask is not None}
    usual = Counter(names.values()).most_common(1)[0][0]
    others = [f'"{name}": {mask}' for name, mask in names.items() if mask != usual]
    rules = "{" + ", ".join([*others, f'"{ALL}": {usual}']) + "}" if others else usual
    return f" If it is meant: expects={rules}."


def format_mask(mask: Mask) -> str:
    """Format a rule as the code that makes it, chunks of one size as documents by a formula."""
    if mask.parts and not isinstance(mask, Not):
        sign = " & " if isinstance(mask, And) else " | "
        return sign.join(f"({text})" if isinstance(part, Or) else text for part in mask.parts for text in [format_mask(part)])
    if not isinstance(mask, Documents):
        return str(mask)
    ids, t = mask.keys[0], mask.keys.shape[-1]
    chunks = torch.arange(t) // max(int((ids == ids[0]).sum()), 1)
    is_chunked = torch.equal(ids[:, None] == ids, chunks[:, None] == chunks)
    return f"Documents(torch.arange({t}) // {int((ids == ids[0]).sum())})" if is_chunked else str(mask)


def format_layers(names: Sequence[str]) -> str:
    """Format which layers of several: `, in layers 0 and 2`, or by name if more than a number distinguishes them."""
    names = list(dict.fromkeys(names))
    pieces = [NUMBER.split(name) for name in names]
    numbers = [[int(number) for number in NUMBER.findall(name)] for name in names]
    differing = [place for place in range(len(numbers[0])) if len({tuple(one)[place:][:1] for one in numbers}) > 1]
    if len(names) == 1:
        return f", in {names[0]}"
    if any(one != pieces[0] for one in pieces) or len(differing) != 1:
        rest = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        return f", in {', '.join(names[:MOST_NAMES])}{rest}"
    return f", in layers {text_table.format_ranges([one[differing[0]] for one in numbers])}"

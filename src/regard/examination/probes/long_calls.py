"""Check norms and terms of recorded calls, and the scale, positions and mask of a longer input without a formula."""

from collections.abc import Iterator, Sequence

import torch

from regard.examination import mask_requirements
from regard.examination.call_checks import all_checks, scale_checks
from regard.examination.call_reading import bias_reading, norm_reading, terms
from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.projection_source import read_source
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown, count_calls

WHAT = "calls of longer inputs have the scale, the positions and the mask of shorter ones"
SAME = "Multiply the scores by 1 / √d, d the width of a head, whatever the number of tokens."
ROW = "Give each token a position of its own, and its row of cos and sin: torch.arange(t), in float32 or as integers."
WHOLE = "Let each query see all keys that the expected mask allows, in each block, or pass expects= as it is meant."
SAME_ANGLE = 2e-3  # between phasors


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check norms, places of tokens, softcap and sinks; that longer inputs have one scale, no position twice, no hidden key."""
    for check in (norm_reading.check_norms, all_checks.check_norm_order, all_checks.check_token_places, terms.check_terms):
        result = check(case.inner_calls)
        yield from [] if result is None else [result]
    if case.subject.form != "x" or case.match is not None or not case.long_calls:
        return
    t = max(one.call.q.shape[2] for one in case.long_calls)
    hidden = find_hidden_key(case, case.inner_calls) or find_hidden_key(case, case.long_calls)
    found = [one for one in (find_other_scale(case), find_repeated_position(case.long_calls), hidden) if one]
    yield from found
    if not found:
        yield Checked(WHAT, f"with {t} tokens, in {count_calls(case.long_calls)}")


def find_other_scale(case: Case) -> Finding | None:
    """Return the finding of a scale that differs between few tokens and many, unless it is by their logarithm."""
    if scale_checks.read_log_factor(case.inner_calls, case.long_calls) is not None:
        return None
    for short, long in zip(case.inner_calls, case.long_calls, strict=True):
        few, many = short.call.q.shape[2], long.call.q.shape[2]
        if few != many and short.scale and long.scale and abs(long.scale / short.scale - 1) > scale_checks.OFF:
            sentence = f"scores are multiplied by {short.scale:.4g} for {few} tokens, but by {long.scale:.4g} for {many}"
            return Finding("wrong scale", sentence, SAME, 2.05, "scale")
    return None


def find_repeated_position(calls: Sequence[InnerCall]) -> Finding | None:
    """Return the finding of two tokens of a causal call that rotary positions turn by the same angles."""
    for one in calls:
        rotary = read_source(one.call.q, one.q_source)
        if rotary is None or not is_causal(one):
            continue
        phasors = torch.view_as_real(rotary.phasors).flatten(1).float()
        distance = torch.cdist(phasors, phasors, p=torch.inf)
        same = (distance < SAME_ANGLE).triu(1)
        if same.any() and not same[0, 1]:  # angles may be too small to tell neighbors apart
            i, j = same.nonzero()[0].tolist()
            sentence = f"of {len(phasors)} tokens, tokens {i} and {j} are rotated by the same angles: they have one position"
            return Finding("wrong positions", sentence, ROW, 1.9, "positions")
    return None


def is_causal(one: InnerCall) -> bool:
    """Return whether each query sees the tokens up to its own, and no other."""
    seen = bias_reading.read_seen(one)
    return seen is not None and seen.shape[1] == seen.shape[2] and bool((seen == torch.ones_like(seen).tril()).all())


def find_hidden_key(case: Case, calls: Sequence[InnerCall]) -> Finding | None:
    """Return the finding of a key that the expected mask allows and that every call hides."""
    t = max(one.call.q.shape[2] for one in calls)
    tables = [bias_reading.read_seen(one) for one in calls]
    seen = [one for one in tables if one is not None and one.shape[1:] == (t, t)]
    if len(seen) < len(tables):
        return None
    allowed = mask_requirements.expand_mask(case.expects, len(seen[0]), t, t, case.offset)
    missing = allowed & ~torch.stack(seen).any(0)
    if not missing.any():
        return None
    b, i, j = missing.nonzero()[0].tolist()
    where = f"with {t} tokens query {i}" + f" of sequence {b}" * (b > 0)
    is_all = not (torch.stack(seen).any(0) & ~allowed).any()  # other probes name a mask that also shows too much
    sentence = f"{where} may see token {j}, which is hidden from it"
    return Finding("wrong mask", sentence, WHOLE, 2.0 if is_all else 0.8, "mask")

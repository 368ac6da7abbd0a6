"""Explain why decoding with a cache differs from the full forward, by the attention calls of both."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.examination.call_reading.inner_calls import InnerCall, record_inner_calls
from regard.examination.call_reading.projection_source import read_source
from regard.examination.call_reading.rotary_reading import find_phasors, pair_columns
from regard.examination.call_reading.rounding import is_near

NEAR = 1e-2  # of phasors
OTHER = "other numbers than in the full forward"
MASK = "the mask of a step counts from another token"
WHO = {"q": "its query", "k": "its key"}


def explain_difference(
    module: nn.Module,
    run_whole: Callable[[], object],
    run_steps: Callable[[], object],
    steps: Sequence[int],
    format_token: Callable[[int], str],
) -> str:
    """Return what differs first between the calls of a full forward and of steps of these numbers of tokens; "" if unknown."""
    try:
        whole, decoded = (record_inner_calls(module, run).calls for run in (run_whole, run_steps))
    except Exception:  # whatever a user's layer raises, or calls that cannot be recorded
        return ""
    names = [one.name for one in whole]
    if not names or len(set(names)) < len(names) or len(decoded) != len(names) * len(steps):
        return ""
    for n, size in enumerate(steps):
        before = sum(steps[:n])
        for full, step in zip(whole, decoded[n * len(names) : (n + 1) * len(names)], strict=True):
            if full.name != step.name:
                return ""
            found = next(list_differences(full, step, before, size), "")
            if found:
                return f"{format_token(before)}{f' in {full.name}' if full.name else ''} {found}"
    return ""


def list_differences(full: InnerCall, step: InnerCall, before: int, size: int) -> Iterator[str]:
    """Yield what differs between a step and the full forward, in words: keys, positions, values and who sees whom."""
    count = before + size
    if step.call.k.shape[2] < count:
        yield f"has {step.call.k.shape[2]} of {count} keys: earlier ones are overwritten or left out"
        return
    if any(one.is_stored_as_weights for one in (full, step)) or full.call.k.shape[1] != step.call.k.shape[1]:
        return
    if not is_near(step.call.k[:, :, :before], full.call.k[:, :, :before]):
        yield f"gets cached keys that are not those of the full forward{describe_norms(full.call.k, step.call.k, before)}"
    rows = {
        "q": (full.call.q[:, :, before:count], step.call.q),
        "k": (full.call.k[:, :, before:count], step.call.k[:, :, before:count]),
    }
    moved = {who: find_position(full, one, other, before, who) for who, (one, other) in rows.items() if not is_near(other, one)}
    for where in dict.fromkeys(moved.values()):
        what = OTHER if where < 0 else f"the position of token {where}"
        yield f"has {what} for {' and '.join(WHO[who] for who in moved if moved[who] == where)}"
    if not has_equal_values(full.call.v, step.call.v, count):
        yield "gets values that are not those of the full forward"
    seen, expected = find_weighted_keys(step)[..., :count], find_weighted_keys(full)[:, before:count, :count]
    if seen.shape == expected.shape and bool((seen != expected).any()):
        b, i, j = (int(n) for n in (seen != expected).nonzero()[0])
        yield f"{'sees' if seen[b, i, j] else 'does not see'} key {j}, unlike in the full forward: {MASK}"


def has_equal_values(one: Tensor | None, other: Tensor | None, count: int) -> bool:
    """Return whether the first values of two calls are equal up to rounding; True if they are not known, or in other heads."""
    if one is None or other is None or one.shape[1] != other.shape[1]:
        return True
    return is_near(other[:, :, :count], one[:, :, :count])


def describe_norms(one: Tensor, other: Tensor, count: int) -> str:
    """Describe that cached keys have the right norms, so that they were rotated by other positions; "" if they have not."""
    norms = [x[:, :, :count].norm(dim=-1) for x in (other, one)]
    return ", but have their norms: they are rotated by other positions, or twice" if is_near(*norms) else ""


def find_position(full: InnerCall, one: Tensor, other: Tensor, before: int, who: str) -> int:
    """Return the token whose position a row `other` has, in place of that of row `one` of the full forward; -1 if unknown."""
    x, source = (full.call.q, full.q_source) if who == "q" else (full.call.k, full.k_source)
    rotary = read_source(x, source)
    if rotary is None or rotary.is_by_head or rotary.written != rotary.style:
        return -1
    pairs = [pair_columns(rows[:, :, :1, : rotary.width].double(), rotary.style) for rows in (one, other)]
    phasors = find_phasors(pairs[0], pairs[1])
    if phasors is None:
        return -1
    turned = rotary.phasors / rotary.phasors[before]  # (t, pairs)
    near = ((turned - phasors).abs() < NEAR).all(-1).nonzero().flatten().tolist()
    return near[0] if len(near) == 1 else -1


def find_weighted_keys(one: InnerCall) -> Tensor:
    """Return which keys have a weight in any head, bool (b, q, k); of no queries if they are too many."""
    try:
        return (one.call.build_map(one.call.k).dense() > 0).any(1)
    except RegardError:
        return torch.zeros(0, 0, 0, dtype=torch.bool)

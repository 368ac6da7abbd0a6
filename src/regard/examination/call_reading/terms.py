"""Read what is added to scores in recorded calls, a softcap, sinks and cached keys, and compare it with what modules state."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.examination.call_reading.inner_calls import FEW, InnerCall
from regard.examination.report import Checked, Finding, count_calls

WHAT = "softcap, sinks and cached keys"
SOFTCAPS = ("softcap", "logit_softcapping", "attn_logit_softcapping", "attn_logit_softcap", "logit_cap", "attn_softcap")
NEAR = 1e-3  # of a softcap, and of sinks


def check_terms(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check that each call has the softcap and the sinks that its module states; None if there are none, and no cache."""
    for one in calls:
        wrong = find_wrong_softcap(one) or find_wrong_sinks(one)
        if wrong is not None:
            kind, sentence, cure = wrong
            return one.report(kind, sentence, cure, 1.4, kind)
    said = [term for one in calls[:1] for term in list_terms(one)]
    return Checked(", ".join(said), f"in {count_calls(calls)}") if said else None


def list_terms(one: InnerCall) -> list[str]:
    """Return the softcap, the sinks and the cached keys of a call, in words."""
    call, said = one.call, []
    if call.softcap is not None:
        said.append(f"a softcap of {call.softcap:.4g} before the mask")
    if call.sinks is not None:
        said.append(f"{call.sinks.numel()} sinks, one for each head, in the denominators")
    before = call.k.shape[2] - call.q.shape[2]
    if before > 0 and not call.is_cross and call.can_use_cache and has_last_queries(one):
        said.append(f"{before} keys before the first query, as of a cache")
    return said


def has_last_queries(one: InnerCall) -> bool:
    """Return whether the last key is seen by the last query and not by the first: cross attention has no such order."""
    seen = one.call.build_map(one.call.k)[:, :, :, -1] > 0  # (b, h, q)
    return bool(seen[..., -1].any()) and (seen.shape[-1] == 1 or not bool(seen[..., 0].any()))


def find_wrong_softcap(one: InnerCall) -> tuple[str, str, str] | None:
    """Return that a softcap differs from the one that the module states, and the cure; None if it does not."""
    if one.module is None or one.is_stored_as_weights:
        return None
    stated = next((value for name in SOFTCAPS if is_number(value := getattr(one.module, name, None))), None)
    if stated is None or (one.call.softcap is not None and abs(one.call.softcap / stated - 1) < NEAR):
        return None
    cure = f"Bound the scaled scores before the mask: {stated:g} * torch.tanh(scores / {stated:g})."
    found = "no softcap" if one.call.softcap is None else f"a softcap of {one.call.softcap:.4g}"
    return "wrong softcap", f"the scores have {found}, but the module states {stated:g}", cure


def is_number(value: object) -> bool:
    """Return whether a value is a number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def find_wrong_sinks(one: InnerCall) -> tuple[str, str, str] | None:
    """Return that sinks are not those that the module holds, and the cure; None if they are, or there are none."""
    held = None if one.module is None else find_sinks(one.module, one.call.q.shape[1])
    if held is None or one.is_stored_as_weights:
        return None
    cure = "Put each head's sink beside its scores before the softmax, and leave its weight out after it."
    if one.call.sinks is None:
        is_left_out = has_plain_output(one) and bool(held.isfinite().all())
        does = "the module holds sinks, but no softmax has them, and the output is that of its weights and values alone"
        return ("wrong sinks", does, cure) if is_left_out else None
    held, used = held.detach().double().flatten().cpu(), one.call.sinks.detach().double().flatten().cpu()
    if used.shape == held.shape and torch.allclose(used, held, rtol=NEAR, atol=NEAR):
        return None
    turned = used.shape == held.shape and torch.allclose(used, -held, rtol=NEAR, atol=NEAR)
    return "wrong sinks", f"the sinks of the softmax are not those of the module{': their sign is turned' * turned}", cure


def has_plain_output(one: InnerCall) -> bool:
    """Return whether an output is that of weights and values alone, without a bias or a key that may hold sinks.

    A sink may also be a factor on the context, which makes the output another one.
    """
    bias, is_read = one.call.bias, one.output is not None and not one.output.wrong
    has_few_numbers = bias is None or bias.unique().numel() <= FEW
    return is_read and has_few_numbers and one.call.k.shape[2] == one.call.q.shape[2]


def find_sinks(module: nn.Module, heads: int) -> Tensor | None:
    """Return the parameter of a module that is named as sinks and has a number for each head; None without one."""
    own = dict(module.named_parameters(recurse=False))
    return next((one for name, one in own.items() if "sink" in name and one.numel() == heads), None)

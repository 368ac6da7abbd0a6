"""The torch function mode: intercepts F.scaled_dot_product_attention and regard.attention, reports other attention.

A torch function mode sees every call of a torch function in its thread, including functions whose names were bound at import.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.mechanism.fused import attention
from regard.mechanism.request import ask
from regard.mechanism.rule import EVERYTHING
from regard.observe.doors import additive, torch_modules
from regard.observe.doors.by_hand import STARTS, Followed
from regard.observe.doors.lineage import apart
from regard.observe.doors.passage import Crossing, Passage
from regard.observe.doors.plain import plain
from regard.observe.doors.roles import Role, infer_role
from regard.observe.doors.scene import SCENE, meet, missed, once
from regard.observe.doors.sdpa import SDPA, of_sdpa
from regard.observe.doors.states import turned

KERNEL = re.compile("attention|attn|flash|sdpa|mha")
MADE = (Tensor, tuple, list)
BY_ITSELF = "this kernel was called by itself, not by F.scaled_dot_product_attention"
BY_HAND = (
    "attention is written out by hand here, with no kernel to record: call torch.nn.functional.scaled_dot_product_attention "
    "or regard.attention instead"
)


class Functions(TorchFunctionMode):
    """A torch function mode that dispatches the attention functions of a thread to their wrappers."""

    def __init__(self) -> None:
        self.followed = Followed()

    def forget(self) -> None:
        """Clear the followed tensors when a forward starts."""
        self.followed.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not SCENE.live:
            return func(*args, **kwargs)
        door, name, kernel, role = known(func)
        result = func(*args, **kwargs) if door is None else door(func, *args, **kwargs)
        frames = SCENE.frames
        if frames and type(result) is not torch.Size and (isinstance(result, MADE) or func is Tensor.__setitem__):
            with torch._C.DisableTorchFunction():
                made = args[0] if result is None else result
                if kernel:
                    missed(name, BY_ITSELF)
                elif door is None and (role in STARTS or self.followed.traces):
                    self.follow(name, role, args, kwargs, made)
                frames[-1].note(args, kwargs, made, name)
        return result

    def follow(self, name: str, role: Role | None, args: Any, kwargs: Any, made: Any) -> None:
        """Follow the scores and weights that a function makes; report attention that is written out by hand."""
        found = self.followed.note(SCENE.frames, name, role, args, kwargs, made)
        if found is not None:
            missed(found, BY_HAND)


@cache
def known(func: Any) -> tuple[Callable[..., Any] | None, str, bool, Role | None]:
    """Return the wrapper, name, kernel flag and role of a torch function.

    The wrapper is None if there is none; the flag says whether the function is an attention kernel without a wrapper.
    """
    named = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
    name = str(getattr(named, "__name__", ""))
    return DOORS.get(func), name, func not in DOORS and KERNEL.search(name) is not None, infer_role(name)


def of_regard(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Intercept a call of regard.attention, whose arguments state the whole call."""

    def run() -> Tensor:
        return func(*args, **kwargs)

    def asked() -> tuple[Passage, Crossing]:
        given = {"mask": EVERYTHING, **dict(zip(("q", "k", "v", "mask"), args, strict=False)), **kwargs}
        made_apart = apart(SCENE.frames, given["q"], given["k"])
        given = {name: plain(x) if isinstance(x, Tensor) else x for name, x in given.items()}
        q, k, v, mask, scale, softcap, bias, sinks, offset, dropout, *_ = ask(**given)
        bias = None if bias is None else copy_bias(bias, q, k)
        passage = Passage("regard", q, k, v, mask, scale, softcap, bias, sinks, offset, dropout, apart=made_apart)
        passage.turned = turned(SCENE.frames[-1].args)
        four = (*q.shape[:3], v.shape[3])
        return passage, Crossing(run, lambda out: plain(out).view(four), lambda new, out: new.view(out.shape))

    result: Tensor = meet("regard.attention", run, asked)
    return result


def copy_bias(bias: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a copy of a bias, one per forward for all layers that share it."""
    return once((bias,), q, k, lambda: (EVERYTHING, 0, bias.detach().clone()), "bias")[2]


DOORS: dict[Any, Callable[..., Any]] = {
    SDPA: of_sdpa,
    torch.ops.aten.scaled_dot_product_attention: of_sdpa,
    torch.ops.aten.scaled_dot_product_attention.default: of_sdpa,
    attention: of_regard,
    **additive.DOORS,
    torch_modules.FORWARD: torch_modules.of_multi_head,
    torch_modules.multi_head_attention_forward: lambda func, *args, **kwargs: func(*args, **kwargs),
    torch_modules.ENCODER_LAYER: torch_modules.of_encoder_layer,
    torch_modules.NATIVE: torch_modules.of_native,
}

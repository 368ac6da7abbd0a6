"""The door of functions: F.scaled_dot_product_attention wherever it is called, regard.attention, and what has no door.

A mode of torch functions sees every call of them in its thread, by names bound at import too.
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
from regard.observe.doors.by_hand import FOLLOWED, SCORES, Followed
from regard.observe.doors.lineage import apart
from regard.observe.doors.passage import Crossing, Passage
from regard.observe.doors.plain import plain
from regard.observe.doors.scene import SCENE, meet, missed
from regard.observe.doors.sdpa import SDPA, of_sdpa
from regard.observe.doors.states import turned

KERNEL = re.compile("attention|attn|flash|sdpa|mha")
MADE = (Tensor, tuple, list)
BY_ITSELF = "this kernel was called by itself, not by F.scaled_dot_product_attention"
BY_HAND = "attention is written out by hand here, with no kernel to meet"


class Functions(TorchFunctionMode):
    """Sees the torch functions of a thread and sends those of attention through their door."""

    def __init__(self) -> None:
        self.followed = Followed()

    def forget(self) -> None:
        """A forward begins."""
        self.followed.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not SCENE.live:
            return func(*args, **kwargs)
        door, name, kernel = known(func)
        result = func(*args, **kwargs) if door is None else door(func, *args, **kwargs)
        frames = SCENE.frames
        if frames and type(result) is not torch.Size and (isinstance(result, MADE) or func is Tensor.__setitem__):
            with torch._C.DisableTorchFunction():
                made = args[0] if result is None else result
                frames[-1].note(args, kwargs, made, name)
                if kernel:
                    missed(name, BY_ITSELF)
                elif (name in SCORES or (self.followed.scores and name in FOLLOWED)) and self.followed.note(
                    frames[-1], name, args, kwargs, made
                ):
                    missed("softmax and matmul", BY_HAND)
        return result


@cache
def known(func: Any) -> tuple[Callable[..., Any] | None, str, bool]:
    """The door of a function, if it has one, its name, and whether it is a kernel of attention that has none."""
    named = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
    name = str(getattr(named, "__name__", ""))
    return DOORS.get(func), name, func not in DOORS and KERNEL.search(name) is not None


def of_regard(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """regard.attention, which says everything itself."""

    def run() -> Tensor:
        return func(*args, **kwargs)

    def asked() -> tuple[Passage, Crossing]:
        given = {"mask": EVERYTHING, **dict(zip(("q", "k", "v", "mask"), args, strict=False)), **kwargs}
        made_apart = apart(SCENE.frames, given["q"], given["k"])
        given = {name: plain(x) if isinstance(x, Tensor) else x for name, x in given.items()}
        q, k, v, mask, scale, softcap, bias, sinks, offset, dropout, *_ = ask(**given)
        passage = Passage("regard", q, k, v, mask, scale, softcap, bias, sinks, offset, dropout, apart=made_apart)
        passage.turned = turned(SCENE.frames[-1].args)
        four = (*q.shape[:3], v.shape[3])
        return passage, Crossing(run, lambda out: plain(out).view(four), lambda new, out: new.view(out.shape))

    result: Tensor = meet("regard.attention", run, asked)
    return result


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

"""The torch functions that compute attention, each with the wrapper that intercepts it."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from regard.mechanism.fused import attention
from regard.observe.attends import attends, intercept_attends
from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.functions import additive, torch_modules
from regard.observe.interception.functions.fused import intercept_attention
from regard.observe.interception.functions.sdpa import SDPA, intercept_sdpa

KERNEL = re.compile("attention|attn|flash|sdpa|mha")
WRAPPERS: dict[Any, Callable[..., Any]] = {
    SDPA: intercept_sdpa,
    torch.ops.aten.scaled_dot_product_attention: intercept_sdpa,
    torch.ops.aten.scaled_dot_product_attention.default: intercept_sdpa,
    attention: intercept_attention,
    attends: intercept_attends,
    **additive.WRAPPERS,
    torch_modules.FORWARD: torch_modules.intercept_multi_head,
    torch_modules.multi_head_attention_forward: lambda func, *args, **kwargs: func(*args, **kwargs),
    torch_modules.ENCODER_LAYER: torch_modules.intercept_encoder_layer,
    torch_modules.NATIVE: torch_modules.intercept_native,
}


@cache
def classify_function(func: Any) -> tuple[Callable[..., Any] | None, str, bool, Role | None]:
    """Return the wrapper, name, kernel flag and role of a torch function.

    The wrapper is None if there is none; the flag says whether the function is an attention kernel without a wrapper.
    """
    packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
    name = str(getattr(packet, "__name__", ""))
    if name == "__get__":
        name = str(packet.__self__.__name__)  # a property, as mT
    return WRAPPERS.get(func), name, func not in WRAPPERS and KERNEL.search(name) is not None, infer_role(name)

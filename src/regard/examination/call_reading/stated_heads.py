"""Compare the number and the width of heads that a layer computes with those that its attributes state."""

import re
from collections.abc import Iterator

from torch import nn

NUMBER = re.compile(r"(?:n|num|number|nr)?_?(?:of_)?(?:attention_|attn_|query_)?heads?|h")
WIDTH = re.compile(r"heads?_(?:dim|size|width|d)|d_?(?:head|k)|dim_(?:per_)?head|d_per_head")


def describe_exchanged_axes(module: nn.Module | None, heads: int, width: int) -> str:
    """Describe that a layer has the width of a head as its number of heads, and the reverse; "" if it does not state both."""
    if module is None or heads == width:
        return ""
    number, wide = (next(list_attributes(module, name, size), "") for name, size in ((NUMBER, width), (WIDTH, heads)))
    if not number or not wide:
        return ""
    return f"there are {heads} heads of width {width}, though {number} is {width} and {wide} is {heads}"


def list_attributes(module: nn.Module, pattern: re.Pattern[str], size: int) -> Iterator[str]:
    """Yield the attributes of a module whose names match and whose number is this one."""
    for name, one in vars(module).items():
        if isinstance(one, int) and not isinstance(one, bool) and one == size and pattern.fullmatch(name.strip("_").lower()):
            yield name

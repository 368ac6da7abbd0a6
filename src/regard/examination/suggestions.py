"""Suggest a part of a module to examine alone, after it was tried."""

from collections.abc import Iterable

from torch import nn

from regard.examination.case import Case
from regard.examination.identify import match
from regard.examination.subject import inputs
from regard.examination.subject.adapters import format_module_path, iterate_adapters
from regard.examination.subject.restore_state import preserve_state
from regard.mechanism import Mask
from regard.mechanism.mask_algebra import Offset

TRIED = 2  # parts
WEIGHTS = 2**22  # numbers of a part that is tried, at most
FUNCTION = "a layer in a function that passes all that it needs: examine(lambda x: layer(x, ...), sample=x)"


def suggest_part(module: nn.Module | None, names: Iterable[str], expects: Mask, offset: Offset, owner: str) -> str:
    """Return a call of examine on the first of these parts that shows its scale alone, "" if none of the first few does.

    `owner` is the name of the module in the suggestion: `examine(model.blocks[0].attention)`.
    """
    for name in list(dict.fromkeys(name for name in names if name))[:TRIED]:
        if module is not None and shows_scale(module.get_submodule(name), expects, offset):
            return f"examine({format_module_path(f'{owner}.{name}')})"
    return ""


def shows_scale(part: nn.Module, expects: Mask, offset: Offset) -> bool:
    """Return whether a part can be called alone, and a formula or its calls give the scale."""
    if not isinstance(offset, int) or sum(one.numel() for one in part.parameters()) > WEIGHTS:
        return False
    try:
        ways = list(iterate_adapters(part, expects, offset))
        with preserve_state(part):
            chosen, shapes = inputs.find_working_inputs(ways, expects, None, offset)
            case = Case(chosen, expects, shapes, None, offset, match.identify_formula)
            return case.match is not None or (bool(case.inner_calls) and all(one.scale for one in case.inner_calls))
    except Exception:  # whatever a user's layer raises
        return False

"""Whether the keys of a call are those of a cache with the new ones behind them, where no cache states its length."""

import weakref

from torch import Tensor

from regard.observe.interception.handwritten.ancestors.layouts import skip_layouts
from regard.observe.interception.lookups import JOINS_PARTS
from regard.observe.interception.provenance import ModuleFrame


def follows_cached_keys(frame: ModuleFrame, query: Tensor, key: Tensor) -> bool:
    """Return whether keys were joined from others and, behind them, from those of what the queries were made from.

    A class token that looks at all tokens is joined with these before the keys are made.
    """
    join, own = skip_layouts(frame, weakref.ref(key)), frame.find_sources(query)
    if join is None or own is None or join.name not in JOINS_PARTS - {"stack"} or len(join.given) < 2:
        return False
    *before, last = (bool(found and found.sources & own.sources) for found in map(frame.find_sources, join.given))
    return last and not any(before)

"""Operations that keep the numbers of a tensor, as views, permutations and copies, skipped in a search back."""

import weakref

from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef, walk_back
from regard.observe.interception.handwritten.products.score_form import COPIES, PERMUTES, SAME, VIEWS
from regard.observe.interception.provenance import JOINS, ModuleFrame, Operation

KEEPS_NUMBERS = VIEWS | PERMUTES | COPIES | {"expand", "expand_as", "broadcast_to"}
LAYOUTS = KEEPS_NUMBERS | SAME  # or bound them


def skip_layouts(frame: ModuleFrame, x: TensorRef) -> Operation | None:
    """Return the operation that computed the numbers of a tensor in the frame; None for an argument of the module."""
    visited = set[int]()  # x.contiguous() may be x, and what is written into a view was made by its base
    while id(x) not in visited:
        visited.add(id(x))
        makers = frame.find_makers(x)
        computed = [maker for maker in makers if not is_layout(maker)]
        if computed:
            return computed[-1]
        before = [maker.given[0] for maker in makers if maker.given[0] is not x]
        x = before[-1] if before else x
    return None


def is_layout(maker: Operation) -> bool:
    """Return whether an operation keeps the numbers of its first argument, as x[:, None] does, or bounds them."""
    if maker.name == "__getitem__" and maker.lookup is None and len(maker.given) == 1:
        return any((y := one()) is not None and y.numel() == maker.sizes[0] for one in maker.results)
    return bool(maker.given and LAYOUTS & {maker.name, strip_affixes(maker.name)})


def are_sampled(frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether a tensor holds samples of tokens at places, of each query its own, as of deformable attention."""

    def goes_on(maker: Operation, *_: int) -> bool:
        return is_layout(maker) or maker.name in JOINS

    makers = (maker for *_, found in walk_back([frame], (weakref.ref(x), x.numel()), goes_on) for maker in found)
    return any(strip_affixes(maker.name) == "grid_sample" for maker in makers)

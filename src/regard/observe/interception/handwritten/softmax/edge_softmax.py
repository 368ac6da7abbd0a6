"""Softmaxes over the edges of a graph, or its nodes: exponentials of scores, summed by an index for each node or graph."""

import math
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef, walk_back
from regard.observe.interception.handwritten.ancestors.layouts import LAYOUTS, skip_layouts
from regard.observe.interception.handwritten.ancestors.token_pairs import are_all_tokens, find_meeting
from regard.observe.interception.handwritten.products.score_form import PRODUCTS
from regard.observe.interception.handwritten.softmax.index_matrices import is_one_hot
from regard.observe.interception.provenance import TOKEN, ModuleFrame

EDGES = "its keys are the neighbors of each node of a graph, over which values are summed by an index, which is not followed"
EDGE_SUMS = {"index_add", "scatter_add", "index_reduce", "scatter_reduce", "segment_reduce", "index_put"}


class EdgeExponentials:
    """The exponentials that were multiplied with values and summed by an index before they were summed themselves."""

    def __init__(self) -> None:
        self.weighted = WeakTensorKeyDictionary()

    def find(self, frame: ModuleFrame, tensors: list[Tensor], is_softmax: Callable[[Tensor], bool]) -> Tensor | None:
        """Return the exponentials of scores of edges or of tokens that a sum by an index has among its arguments, or None.

        Those that are multiplied with values count where they have been summed, or are a softmax already.
        """
        for x in tensors:
            if not x.is_floating_point():
                continue
            e = find_exponentials(frame, weakref.ref(x))
            if e is not None:
                return e if frame.find_contents(weakref.ref(e)) == TOKEN else None
            for factor in list_factors(frame, weakref.ref(x)):
                e = find_exponentials(frame, factor)
                if e is not None:
                    self.weighted[e] = True
                    if is_softmax(e) and frame.find_contents(weakref.ref(e)) == TOKEN:
                        return e
        return None


def find_exponentials(frame: ModuleFrame, x: TensorRef) -> Tensor | None:
    """Return the result of an exponential that x is, in another layout or not; None if it is something else or was freed."""
    maker = skip_layouts(frame, x)
    if maker is None or not strip_affixes(maker.name).startswith("exp") or strip_affixes(maker.name) in LAYOUTS:
        return None
    return next((y for one in maker.results if (y := one()) is not None), None)


def list_factors(frame: ModuleFrame, x: TensorRef) -> list[TensorRef]:
    """Return the factors of an entrywise product, in another layout or not; none if x is something else."""
    maker = skip_layouts(frame, x)
    return maker.given if maker is not None and strip_affixes(maker.name) in PRODUCTS else []


def scores_edges(frame: ModuleFrame, x: TensorRef) -> bool:
    """Return whether a tensor was computed from tokens that two indices picked, senders and receivers, or one more than once.

    An index that picks each token once at most leaves out padding, for one.
    """
    makers = [maker for *_, one in walk_back([frame], (x, 0), lambda *_: True) for maker in one]
    lookups = [one.lookup for one in makers if one.lookup is not None and is_token(frame, one.given[0])]
    keys = {one.key for one in lookups}
    keys |= {(id(x),) for one in makers if infer_role(one.name) is Role.PRODUCT for x in one.given if is_one_hot(frame, x)}
    return len(keys) > 1 or any(one.has_repeats() for one in lookups)


def scores_neighbors(frame: ModuleFrame, x: TensorRef, shape: Sequence[int], axis: int) -> bool:
    """Return whether scores x of a shape, which a softmax over an axis normalizes, are of the neighbors of a node in a loop.

    They are then a nonlinear function of a score of each plus that of the node, which alone would change no softmax: (n,) or
    (n, heads). Those of another shape may be of a router, for each token, plus a number of the token, or pool each of a batch.
    """
    maker, extent, entries = skip_layouts(frame, x), shape[axis], math.prod(shape)
    if extent < 2 or maker is None or not (maker.child or infer_role(maker.name) is Role.NONLINEAR):
        return False
    meeting = find_meeting(frame, x, entries)
    if meeting is None:
        return False
    addition, tokens, size = meeting
    least, most = min(n for _, n in tokens), max(n for _, n in tokens)
    is_broadcast = entries == most == size == least * extent and len(shape) < 3 and axis % len(shape) == 0
    return infer_role(addition.name) is Role.ADD and is_broadcast and are_all_tokens(frame, tokens)


def sums_edges(frame: ModuleFrame, x: TensorRef, others: Sequence[TensorRef]) -> bool:
    """Return whether a product with an index as F.one_hot writes it sums numbers x of the edges of a graph for each node."""
    return any(is_one_hot(frame, one) for one in others) and scores_edges(frame, x)


def is_token(frame: ModuleFrame, x: TensorRef) -> bool:
    """Return whether a tensor holds tokens, and not the largest or the sum for each node."""
    maker = skip_layouts(frame, x)
    name = "" if maker is None else strip_affixes(maker.name)
    return name not in EDGE_SUMS | {"max", "amax"} and frame.find_contents(x) == TOKEN

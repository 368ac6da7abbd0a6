"""Matrices that a layer generates for each token, as a hypernetwork its weights: their rows are features, not tokens."""

import weakref
from collections.abc import Hashable

from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.handwritten.ancestors.ancestor_search import is_end, walk_back
from regard.observe.interception.handwritten.ancestors.projections import Projection, has_features_last, is_activation
from regard.observe.interception.handwritten.ancestors.row_provenance import RowSearch
from regard.observe.interception.handwritten.ancestors.token_pairs import find_token_inputs
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct
from regard.observe.interception.handwritten.products.score_form import is_broadcast
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.provenance import ModuleFrame, Operation


def multiplies_generated_matrix(frames: list[ModuleFrame], product: LabelledProduct) -> bool:
    """Return whether one operand of a product is a matrix that a layer made for each token, and the other is none.

    Keys (b, h, t, d) of inputs (b, t, c) look alike where there are as many heads as tokens, which does not count.
    """
    batch = [label for label in product.result if all(label in one for one in product.labels)]
    sizes = [product.get_size(label) for label in batch]
    if len(sizes) < 2 or not product.sums_several():
        return False
    are_made = [
        is_stored_by_row(product, n, batch) and is_made_for_each_row(frames, product.operands[n], sizes) for n in (0, 1)
    ]
    if are_made[0] == are_made[1]:
        return False
    place = are_made.index(True)
    others = [product.get_size(label) for label in product.labels[place] if label not in batch]
    has_rows = any(product.get_size(label) > 1 for label in product.list_rows(place))
    is_of_token = not is_broadcast(product, batch[-1])  # else all queries share it, as the keys of all heads
    return has_rows and is_of_token and sizes[-1] not in others and has_rows_of_layer(frames, product, place, batch[-1])


def has_rows_of_layer(frames: list[ModuleFrame], product: LabelledProduct, place: int, label: Hashable) -> bool:
    """Return whether a dimension of an operand with a label is of rows of what a layer projected, not of heads, or may be."""
    table, x = AxisTable(), product.operands[place]
    dims = table.add_dims(x.shape)
    found = RowSearch(table).find(frames, x, dims)
    return found is None or found.rows >= {*table.expand_axes(dims[product.labels[place].index(label)])}


def is_stored_by_row(product: LabelledProduct, place: int, batch: list[Hashable]) -> bool:
    """Return whether the matrix of each batch row of an operand is one block of memory; of heads that were split it is not."""
    own = [*zip(product.labels[place], product.operands[place].stride(), product.operands[place].shape, strict=True)]
    between = [stride for label, stride, size in own if label in batch and size > 1]
    within = [stride for label, stride, size in own if label not in batch and size > 1]
    return min(between, default=1) > max(within, default=0)


def is_made_for_each_row(frames: list[ModuleFrame], x: Tensor, sizes: list[int]) -> bool:
    """Return whether a layer made x of an input (*sizes, features), up to factors: a part of x for each row of features."""

    def goes_on(maker: Operation, n: int, size: int) -> bool:
        return (n >= size or infer_role(maker.name) is Role.MULTIPLY) and (not is_end(maker) or is_activation(maker))

    for frame, (one, _), makers in walk_back(frames, (weakref.ref(x), x.numel()), goes_on):
        for maker in makers:
            if is_end(maker) and not is_activation(maker) and has_features_last(Projection(one, maker, frame)) is not False:
                inputs = [ref() for ref, _ in find_token_inputs(frame, maker)]
                if any(y is not None and [*y.shape[:-1]] == sizes for y in inputs):
                    return True
    return False

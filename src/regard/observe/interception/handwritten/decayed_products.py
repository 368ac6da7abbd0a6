"""Einsums that multiply scores by a table of decays for each pair of tokens, and the products of two that they amount to.

The quadratic form of Mamba-2 is one, ``einsum("bin,bjn,bij,bjd->bid", q, k, decays, v)``. https://arxiv.org/abs/2405.21060
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from regard.observe.interception.handwritten.labelled_product import Labels, label_terms
from regard.observe.interception.handwritten.linear_scores import is_outside_of_band


class DecayedProduct(NamedTuple):
    """The operands of an einsum with their labels: queries and keys, or scores; then tables, and values if there are any.

    order is that of the labels of scores, with queries and keys last.
    """

    operands: list[Tensor]
    labels: list[Labels]
    result: Labels
    order: Labels
    has_values: bool

    def list_products(self) -> Iterator[tuple[str, Tensor]]:
        """Generate the einsum of two operands that each operand after the first is multiplied by, with this operand."""
        own = self.labels[0]
        for n in range(1, len(self.operands)):
            later = {label for one in self.labels[n + 1 :] for label in one}
            kept = [label for label in dict.fromkeys((*own, *self.labels[n])) if label in {*later, *self.result}]
            kept.sort(key=lambda label: self.order.index(label) if label in self.order else -1)
            kept = kept if later else self.result
            yield f"{''.join(map(str, own))},{''.join(map(str, self.labels[n]))}->{''.join(map(str, kept))}", self.operands[n]
            own = kept


def split_einsum(args: Any, is_followed: Callable[[Tensor], bool]) -> DecayedProduct | None:
    """Return the operands of an einsum in the order in which attention multiplies them; None if it has no table of decays.

    Values have labels of their own in the result; queries and keys have features that nothing else has. If nothing has any, one
    operand is scores that are followed.
    """
    equation, *operands = args
    labels, result = label_terms(equation, operands) if isinstance(equation, str) else ([], [])
    if not labels or not all(isinstance(label, str) for one in labels for label in one):
        return None
    counts = Counter(label for one in labels for label in one)
    values = [n for n, one in enumerate(labels) if any(counts[label] == 1 and label in result for label in one)]
    of_values = {label for n in values for label in labels[n]}
    places = [n for n in range(len(labels)) if n not in values]
    features = {label for n in places for label in labels[n] if counts[label] == 2 and label not in {*result, *of_values}}
    first = [n for n in places if features & {*labels[n]}]
    if not features and values:
        first = [n for n in places if is_followed(operands[n])][:1]
    tables = [n for n in places if n not in first]
    scores = {label for n in first for label in labels[n]} - features
    is_known = len(values) < 2 and len(first) == 1 + bool(features) and all(features <= {*labels[n]} for n in first)
    if not is_known or any(not scores.issuperset(labels[n]) for n in tables):
        return None
    if values:
        rows, columns = scores & {*result} - of_values, scores & of_values - {*result}
    else:
        rows, columns = ({*labels[n]} - {*labels[m]} for n, m in (first, first[::-1]))
    decays = [n for n in tables if has_band(operands[n], labels[n], rows, columns)]
    if not decays:
        return None
    chosen = [*first, *tables, *values]
    order = labels[decays[0]] if values else result
    return DecayedProduct([operands[n] for n in chosen], [labels[n] for n in chosen], result, order, bool(values))


def has_band(x: Tensor, labels: Labels, rows: set[Any], columns: set[Any]) -> bool:
    """Return whether a table is 0 outside of a band along one of the rows and one of the columns: causal, or on a side."""
    for pair in product(rows, columns):
        if x.numel() and {*labels}.issuperset(pair):
            one = x.detach()[tuple(slice(None) if label in pair else 0 for label in labels)]
            if is_outside_of_band(one == 0):
                return True
    return False

"""Einsums of more than two operands that are attention, and the products of two that they amount to.

The quadratic form of Mamba-2 multiplies scores by a table of decays for each pair of tokens,
``einsum("bin,bjn,bij,bjd->bid", q, k, decays, v)``. https://arxiv.org/abs/2405.21060 Linear attention has no such table.
Bilinear scores have a matrix of weights between the tokens, ``einsum("bid,hde,bje->bhij", x, weights, y)``, with values or not.
"""

import string
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any, NamedTuple

from torch import Tensor

from regard.observe.interception.handwritten.linear.linear_scores import is_outside_of_band
from regard.observe.interception.handwritten.products.labelled_product import Labels, label_terms


class EinsumProducts(NamedTuple):
    """The operands of an einsum with their labels: queries and keys, or scores; then tables, and values if there are any.

    Without tables they are keys, values and queries, so that no product is a matrix of scores. order is that of the labels of
    scores, with queries and keys last.
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


def split_einsum(
    args: Any, is_followed: Callable[[Tensor], bool], is_weight: Callable[[Tensor], bool]
) -> EinsumProducts | None:
    """Return the operands of an einsum in the order in which attention multiplies them; None if it is no attention.

    It has a table of decays, or is a product of three matrices in a row. Values have labels of their own in the result; queries
    and keys have features that nothing else has. If nothing has any, one operand is scores that are followed.
    """
    equation, *operands = args
    labels, result = name_labels(equation, operands) if isinstance(equation, str) else ([], [])
    if not labels:
        return None
    counts = Counter(label for one in labels for label in one)
    of_three = find_bilinear_scores(labels, result)
    for bilinear in [of_three] if of_three is not None else generate_bilinear_sums(labels, result):
        chosen, own = [operands[n] for n in bilinear], [labels[n] for n in bilinear]
        if [is_weight(x) for x in chosen] == [False, True, False, False][: len(chosen)]:
            order = list(dict.fromkeys((*own[0], *own[1], *own[2])))
            return EinsumProducts(chosen, own, result, order, has_values=len(chosen) > 3)
    chain = find_chain(labels, result)
    if chain is not None and not is_followed(operands[chain[0]]):  # else the first product completes a call, too
        return EinsumProducts([operands[n] for n in chain], [labels[n] for n in chain], result, result, has_values=True)
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
    return EinsumProducts([operands[n] for n in chosen], [labels[n] for n in chosen], result, order, bool(values))


def name_labels(equation: str, operands: list[Tensor]) -> tuple[list[Labels], Labels]:
    """Return the labels of each operand of an einsum and of the result, with letters for the axes of an ellipsis."""
    labels, result = label_terms(equation, operands)
    letters = (letter for letter in string.ascii_letters if letter not in equation)
    of_ellipsis = {label for one in labels for label in one if isinstance(label, int)}
    names: dict[Any, Any] = {label: next(letters) for label in of_ellipsis}
    return [[names.get(label, label) for label in one] for one in labels], [names.get(label, label) for label in result]


def find_chain(labels: list[Labels], result: Labels) -> tuple[int, int, int] | None:
    """Return the places of keys, values and queries, three operands of which keys share a summed label with each other one.

    Queries and values have labels of their own in the result, those of queries first. None if the operands are no such ones.
    """
    for q, k, v in permutations(range(3)) if len(labels) == 3 else ():
        of_q, of_k, of_v, kept = ({*one} for one in (labels[q], labels[k], labels[v], result))
        are_summed = bool((of_q & of_k) - of_v - kept) and bool((of_k & of_v) - of_q - kept)
        rows, width = (
            [label for label in result if label in own - of_k - other] for own, other in ((of_q, of_v), (of_v, of_q))
        )
        is_whole = of_k <= of_q | of_v and (of_q & of_v) <= of_k & kept
        if are_summed and is_whole and rows and width and result.index(rows[0]) < result.index(width[0]):
            return k, v, q
    return None


def find_bilinear_scores(labels: list[Labels], result: Labels) -> tuple[int, int, int] | None:
    """Return the places of tokens, a matrix and tokens, three operands whose product is scores of the tokens; None for others.

    The matrix is multiplied with the features of both; queries have the label that stands first in the result.
    """
    for x, matrix, y in permutations(range(3)) if len(labels) == 3 else ():
        one, other, between = ({*labels[n]} for n in (x, y, matrix))
        rows, columns = ([label for label in result if label in a - b - between] for a, b in ((one, other), (other, one)))
        has_features = all(len(between & a) == len(between & a - b - {*result}) == 1 for a, b in ((one, other), (other, one)))
        are_scores = (
            len(rows) == len(columns) == 1 and one | other <= {*result} | between and between - one - other <= {*result}
        )
        if has_features and are_scores and result.index(rows[0]) < result.index(columns[0]):
            return x, matrix, y
    return None


def generate_bilinear_sums(labels: list[Labels], result: Labels) -> Iterator[tuple[int, ...]]:
    """Generate places of tokens, a matrix, tokens and values, four operands whose scores may be multiplied with the values.

    Values share a summed label with the second tokens, and have one of their own in the result.
    """
    for n, own in enumerate(labels if len(labels) == 4 else []):
        places = [m for m in range(4) if m != n]
        others = {label for m in places for label in labels[m]}
        kept = [label for label in dict.fromkeys((*result, *own)) if label in others]
        scores = find_bilinear_scores([labels[m] for m in places], kept)
        if scores is not None and {*own} & {*result} - others:
            x, matrix, y = (places[m] for m in scores)
            if {*labels[y]} & {*own} - {*result} and not {*labels[x]} & {*own} - {*result}:
                yield x, matrix, y, n


def has_band(x: Tensor, labels: Labels, rows: set[Any], columns: set[Any]) -> bool:
    """Return whether a table is 0 outside of a band along one of the rows and one of the columns: causal, or on a side."""
    for pair in product(rows, columns):
        if x.numel() and {*labels}.issuperset(pair):
            one = x.detach()[tuple(slice(None) if label in pair else 0 for label in labels)]
            if is_outside_of_band(one == 0):
                return True
    return False

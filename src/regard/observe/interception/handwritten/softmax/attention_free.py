"""Attention whose scores are a number for two positions plus one for each channel of a key, as Attention Free Transformers.

``exp(w) (exp(k) v) / exp(w) exp(k)``, with w (q, k) and k, v (k, c), is for each channel the softmax over the keys of
``w_ij + k_jc``: a call with a head for each channel, queries of 1 and the bias w. https://arxiv.org/abs/2105.14103
"""

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.layouts import skip_layouts
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct
from regard.observe.interception.handwritten.products.score_form import PRODUCTS
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.handwritten.scores.score_parts import ScoreParts, infer_rule_of_parts
from regard.observe.interception.handwritten.softmax.divided_exponentials import find_scores, is_exponential
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.provenance import TOKEN, ModuleFrame

NEAR = 1e-3  # of a context, relative to the largest of all: an epsilon beside the sums is no mistake


class TableProduct(NamedTuple):
    """A product of exponentials of a table, its operand at a place, with those of tokens, times values or not."""

    product: LabelledProduct
    place: int
    has_values: bool

    @property
    def table(self) -> Tensor:
        """The exponentials of the table."""
        return self.product.operands[self.place]

    @property
    def tokens(self) -> Tensor:
        """The exponentials of tokens, times values or not."""
        return self.product.operands[1 - self.place]


class TableProducts:
    """The products of exponentials of tables with those of tokens in one forward, by their results."""

    def __init__(self) -> None:
        self.products = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """Forget all products."""
        self.products.clear()

    def add(self, frame: ModuleFrame, product: LabelledProduct, y: Tensor) -> bool:
        """Store the product that y is if it is one of exponentials of a table with those of tokens; return whether it is."""
        refs = [*map(weakref.ref, product.operands)]
        are_tokens = [frame.find_contents(one) == TOKEN for one in refs]
        if are_tokens[0] == are_tokens[1] or any(find_scores(frame, one) is None for one in refs):
            return False
        place = are_tokens.index(False)
        maker = skip_layouts(frame, refs[1 - place])
        self.products[y] = TableProduct(product, place, maker is not None and not is_exponential(maker))
        return True

    def find_quotient(self, frame: ModuleFrame, x: Tensor, by: Tensor) -> "TableQuotient | None":
        """Return what x / by is if it is a product of values over that of their exponentials; a gate may multiply it."""
        if not len(self.products):
            return None
        numerator, denominator = (self.find_product(frame, one) for one in (x, by))
        if numerator is None or denominator is None:
            return None
        (context, of_values), (_, of_sums) = numerator, denominator
        is_same = of_values.product.labels == of_sums.product.labels and of_values.tokens.shape == of_sums.tokens.shape
        if not (is_same and of_values.has_values and not of_sums.has_values and torch.equal(of_values.table, of_sums.table)):
            return None
        return TableQuotient(of_values, of_sums.tokens, context, by, context is x)

    def find_product(self, frame: ModuleFrame, x: Tensor) -> tuple[Tensor, TableProduct] | None:
        """Return the product that a tensor is, times a gate or plus a number or not, with its result."""
        if x in self.products:
            return x, self.products[x]
        maker = skip_layouts(frame, weakref.ref(x))
        if maker is None:
            return None
        is_shifted = infer_role(maker.name) is Role.ADD and len(maker.given) == 1
        givens = maker.given if is_shifted or strip_affixes(maker.name) in PRODUCTS else []
        found = (one for ref in givens if (one := ref()) is not None and one in self.products)
        return next(((one, self.products[one]) for one in found), None)


@dataclass(eq=False)
class TableQuotient:
    """A product of exponentials of a table with those of keys times values, over that with the exponentials of the keys."""

    weighted: TableProduct
    keys: Tensor  # their exponentials
    context: Tensor  # not yet divided
    divisor: Tensor
    is_plain: bool  # whether the result is the context alone, and no gate multiplies it

    def read(self, table: AxisTable, result: Tensor, kernel: str) -> tuple[AttentionCall, CallAdapter]:
        """Return the call. Raises UnreadableError if it does not give the layer's own context."""
        product, place = self.weighted.product, self.weighted.place
        dims = product.build_dims(table, {})
        of_table, of_keys, of_result = dims[place], dims[1 - place], dims[2]
        rows = {*product.list_rows(place)}
        outer = [axes for label, axes in zip(product.result, of_result, strict=True) if label not in rows]
        batch = outer.pop(0) if len(outer) > 1 else ()
        heads = tuple(axis for axes in outer for axis in axes)
        queries = tuple(axis for label, axes in zip(product.result, of_result, strict=True) if label in rows for axis in axes)
        keys = tuple(axis for axes in of_keys for axis in axes if axis not in {*batch, *heads})
        matrix, groups = (batch, heads, queries, keys), (batch, heads, queries)

        exponentials = table.arrange(self.keys.detach(), of_keys, (batch, heads, keys)).unsqueeze(-1)
        values = table.arrange(self.weighted.tokens.detach(), of_keys, (batch, heads, keys)).unsqueeze(-1)
        values = (values / exponentials).masked_fill(exponentials == 0, 0)
        k, source = take_logarithm(exponentials), self.weighted.table
        bias = take_logarithm(table.arrange(source.detach(), of_table, matrix))
        q = k.new_ones(1, 1, 1, 1).expand(*k.shape[:2], bias.shape[2], 1)
        (mask, offset, bias_of_seen), _ = infer_rule_of_parts(ScoreParts(biases=[bias], raw=[source]), q, k)
        call = AttentionCall(
            kernel=kernel,
            q=q,
            k=k,
            v=values,
            mask=mask,
            offset=offset,
            bias=bias_of_seen,
            scale=1.0,
            can_use_cache=False,
            can_be_packed=False,
        )
        own = result if self.is_plain else self.context / self.divisor
        compare_context(call, bias, table.arrange(own.detach(), of_result, groups).unsqueeze(-1))
        if not self.is_plain:
            return call, CallAdapter(lambda: result)

        def read_context(out: Tensor) -> Tensor:
            return table.arrange(out, of_result, groups).unsqueeze(-1)

        def write_context(new: Tensor, out: Tensor) -> Tensor:
            return table.restore(new, groups, of_result, out.shape)

        return call, CallAdapter(lambda: result, read_context, write_context)


def take_logarithm(x: Tensor) -> Tensor:
    """Return the logarithms of exponentials, in float32 or better."""
    return x.to(score_dtype(x.dtype)).log()


def compare_context(call: AttentionCall, bias: Tensor, own: Tensor) -> None:
    """Compare the contexts of a few queries with the layer's own. Raises UnreadableError if they differ."""
    assert call.v is not None
    n = own.shape[2]
    rows = torch.linspace(0, n - 1, min(n, 4), device=own.device).long()
    scores = bias[:, :, rows] + call.k.mT
    ours, theirs = scores.softmax(-1).nan_to_num() @ call.v.to(scores.dtype), own[:, :, rows].to(scores.dtype)
    size = float(call.v.abs().amax()) if call.v.numel() else 0.0
    if not bool(((ours - theirs).abs() <= NEAR * size).logical_or(theirs.isnan()).all()):
        raise UnreadableError("its formula, a softmax for each channel, differs from its context")

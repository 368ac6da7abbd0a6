"""The start of following: scores of pairs of tokens, and the weights that a softmax or another function makes of scores."""

from typing import Any

from torch import Tensor

from regard.observe.interception.function_roles import Role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.ancestors.query_axes import share_keys
from regard.observe.interception.handwritten.ancestors.token_pairs import (
    Pair,
    find_pair,
    is_broadcast_pair,
)
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct
from regard.observe.interception.handwritten.products.score_form import StepKind, start_form
from regard.observe.interception.handwritten.products.traces import Traced, TraceKind, Traces, join_roots
from regard.observe.interception.handwritten.scores.entry_sources import add_sink
from regard.observe.interception.provenance import ModuleFrame, has_separate_sources

NO_PRODUCT = "another function than a product"
INHERITED = (  # by weights, from scores
    *("dims", "form", "unmixed", "changes", "eps", "moved", "has_edits", "has_separate_sources"),
)


class ScoreTracker(Traces):
    """The scores and weights of one forward, by where following starts."""

    def start_scores(
        self,
        frames: list[ModuleFrame],
        y: Tensor,
        pair: Pair | None,
        product: LabelledProduct | None = None,
        roots: int = 0,
    ) -> None:
        """Start following scores of a pair of tensors, with their formula if they are a product of the two."""
        form = None if product is None else start_form(self.table, product)
        if form is not None and len(form.dims) != y.dim():
            form = None
        if form is not None and product is not None:
            form = share_keys(frames, self.table, form)
        dims = self.table.add_dims(y.shape) if form is None else form.dims
        properties: dict[str, Any] = {"dims": dims, "form": form, "changes": () if form is not None else (NO_PRODUCT,)}
        sources = None if pair is None else has_separate_sources(frames, *pair)
        self.start(y, TraceKind.SCORES, pairs=True, roots=roots, has_separate_sources=sources, **properties)

    def follow_features(
        self,
        frames: list[ModuleFrame],
        role: Role | None,
        x: Tensor,
        y: Tensor,
    ) -> None:
        """Follow y as scores if it is x, features of pairs of tokens, summed over the features."""
        sums = role is Role.SUM or y.shape in (x.shape[:-1], (*x.shape[:-1], 1))
        pair = find_pair(frames[-1], x, x.numel() // max(y.numel(), 1) if sums else 0)
        if pair is not None:
            self.start_scores(frames, y, pair)

    def follow_softmax(
        self,
        frame: ModuleFrame,
        role: Role,
        name: str,
        x: TensorRef | None,
        axis: Any,
        traced: list[Traced],
        y: Tensor,
    ) -> None:
        """Follow the result y of a softmax or log-softmax of x over an axis."""
        extent = y.shape[axis] if type(axis) is int and -y.dim() <= axis < y.dim() else 0
        scores = [one for one in traced if one[1].pairs and "logsumexp" not in one[1].changes]  # those are of rows, not pairs
        kind = TraceKind.SCORES if role is Role.LOG_SOFTMAX else TraceKind.WEIGHTS
        if scores or extent != 1:
            properties: dict[str, Any] = {"dims": self.table.add_dims(y.shape)}
            if len(scores) == 1:
                properties = {one: getattr(scores[0][1], one) for one in INHERITED}
                properties["moved"] = add_sink(self.table, scores[0][0], properties["moved"], axis)
                if "softmin" in name and properties["form"] is not None:
                    properties["form"] = properties["form"].add_step(StepKind.MULTIPLY, -1.0)
            dims = properties["dims"]
            if dims is not None and type(axis) is int and extent:
                properties["keys"] = dims[axis]
            pairs, function = bool(scores), strip_affixes(name)
            if not traced and x is not None and extent > 1:
                pairs = pairs or is_broadcast_pair(frame, x, y.numel())  # a number for each token
            self.start(y, kind, pairs, join_roots(scores), extent=extent, function=function, **properties)

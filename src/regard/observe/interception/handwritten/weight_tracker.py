"""Scores, weights and weighted values, followed from one operation to the next, up to the call of attention they complete."""

from typing import Any

from torch import Tensor

from regard.observe.interception.attention_call import OtherWeights
from regard.observe.interception.function_roles import Role, guards_norm, has_number_bounds, is_nonlinear, strip_affixes
from regard.observe.interception.handwritten.ancestors.layouts import are_sampled
from regard.observe.interception.handwritten.handwritten_call import HandwrittenCall
from regard.observe.interception.handwritten.product_roles import is_value, sums_tokens
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct, label_entries, label_sum
from regard.observe.interception.handwritten.products.score_form import COPIES, PERMUTES, VIEWS, is_view_index
from regard.observe.interception.handwritten.products.traces import ActivatedScores, Trace, TraceKind
from regard.observe.interception.handwritten.score_tracker import ScoreTracker
from regard.observe.interception.handwritten.scores.row_edits import keeps_numbers
from regard.observe.interception.handwritten.scores.second_products import UsedWeights
from regard.observe.interception.lookups import read_version
from regard.observe.interception.provenance import FRESH, ModuleFrame
from regard.observe.interception.thread_state import list_owners

DECOMPOSES = {  # whose results are no scores: those of a covariance are vectors of channels
    *("linalg_eigh", "linalg_eig", "linalg_svd", "svd", "linalg_qr", "qr"),
    *("linalg_eigvalsh", "linalg_eigvals", "linalg_svdvals"),
}


class WeightTracker(ScoreTracker):
    """The scores, weights and weighted values of one forward, by what entrywise functions and sums make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.used = UsedWeights()

    def clear(self) -> None:
        """Forget all followed tensors."""
        super().clear()
        self.used.clear()

    def follow_weighting(
        self, frames: list[ModuleFrame], name: str, tensors: list[Tensor], x: Tensor, trace: Trace, y: Tensor
    ) -> bool:
        """Follow the entrywise product of weights x with values; return whether there are any values."""
        if trace.kind is not TraceKind.WEIGHTS or strip_affixes(name) not in ("mul", "multiply", "addcmul"):
            return False
        if y.numel() <= trace.size:
            return False  # a factor without an axis beyond those of the weights is a mask
        values = [v for v in tensors if v is not x and is_value(self, frames[-1], v, trace)]
        if values and not trace.pairs and are_sampled(frames[-1], values[0]):
            trace, own = trace._replace(pairs=True), self.find(x)
            self.put(x, (own or trace)._replace(pairs=True, has_separate_sources=True))
        if values:
            is_broadcast = y.numel() > min(trace.size, values[0].numel())
            factors = (x, values[0]) if len(tensors) == 2 and is_broadcast else None  # else they may be a mask too
            writes = count_writes(factors) - any(y is one for one in factors or ())
            self.follow(y, trace._replace(kind=TraceKind.WEIGHTED, factors=factors, writes=writes), name)
        return bool(values)

    def follow_other(
        self,
        frames: list[ModuleFrame],
        role: Role | None,
        name: str,
        args: Any,
        kwargs: Any,
        x: Tensor,
        trace: Trace,
        others: list[Tensor],
        results: list[Tensor],
    ) -> None:
        """Follow the results that any other function computes from scores or weights."""
        scales = role is Role.MULTIPLY and others and results[0].numel() > x.numel()
        gates = role is Role.ADD and others and trace.kind is TraceKind.WEIGHTS and not trace.pairs
        is_square = role is Role.MULTIPLY and len(args) == 2 and args[0] is args[1]
        is_activation = trace.kind is TraceKind.SCORES and (is_square or is_nonlinear(role, args))
        is_activation = is_activation and not guards_norm(name, args, kwargs, trace.changes)
        is_activation = is_activation and not (has_number_bounds(name, args, kwargs) and keeps_numbers(name, x, results[0]))
        is_of_features = is_activation and sums_tokens(self, frames, self.find(x) or trace)
        if scales or gates or is_of_features or (is_activation and not (trace.pairs or strip_affixes(name).startswith("exp"))):
            self.drop(results[0])
            return
        if trace.kind is TraceKind.SCORES and strip_affixes(name) in DECOMPOSES:
            return
        if is_activation:
            before = self.find(x)
            scored = trace if before is None else activate(before, "square" if is_square else strip_affixes(name))
            trace = trace._replace(
                kind=TraceKind.WEIGHTS,
                function=strip_affixes(name),
                size=results[0].numel(),
                activated=scored.activated,
            )
        elif role is Role.LOG:
            trace = trace._replace(kind=TraceKind.SCORES)
        elif trace.kind is TraceKind.WEIGHTS and trace.activated is not None and (is_square or is_nonlinear(role, args)):
            trace = activate(trace, "square" if is_square else strip_affixes(name))
        for y in results:
            if y.dim() or x.numel() == 1 or role is None:
                self.follow(y, trace if trace.size <= y.numel() else trace._replace(size=y.numel()), name)
            else:
                self.drop(y)  # a loss, or a mean of all

    def follow_sum(
        self,
        role: Role | None,
        name: str,
        args: Any,
        kwargs: Any,
        x: Tensor,
        trace: Trace,
        several: bool,
        others: list[Tensor],
        results: list[Tensor],
    ) -> HandwrittenCall | None:
        """Follow weighted values; return the call of attention where they are summed over the keys, or None.

        A sum with other tokens, or a convolution, ends the following. What is not all entries is no product of the weights.
        """
        y = results[0]
        if role is Role.SUM:
            sums_keys = y.numel() < x.numel() or trace.extent == 1  # or the value of a single key
            if trace.pairs and (sums_keys or strip_affixes(name) not in ("sum", "mean")):
                product = None if trace.factors is None else label_sum(label_entries(*trace.factors), name, args, kwargs)
                call = self.complete_call(trace, x if trace.factors is None else trace.factors[0], product, "mul", name)
                if trace.factors is not None and count_writes(trace.factors) != trace.writes:
                    return call._replace(product=None)
                return call
            if trace.extent and not trace.pairs and trace.factors is not None and x.numel() == trace.extent * y.numel():
                self.report_other_weights(trace.factors[0], trace, "mul", name)
        if role is Role.ADD and several and trace.pairs:
            return self.complete_call(trace, x, None, "mul", name)
        for one in results:
            if role in (Role.SUM, Role.CONVOLUTION) or (role is Role.ADD and others) or name in FRESH:
                self.drop(one)
            else:
                self.follow(one, trace if keeps_entries(name, args, x, one) else trace._replace(factors=None), name)
        return None

    def report_other_weights(self, x: Tensor, trace: Trace, *names: str) -> None:
        """Report weights x that functions of these names multiplied with something and summed, of no known pair of tokens."""
        kernel = " and ".join((trace.function, *map(strip_affixes, names)))
        for watcher, name in list_owners():
            watcher.handle_other_weights(OtherWeights(kernel, name, x.detach().clone()))

    def complete_call(self, trace: Trace, x: Tensor, product: LabelledProduct | None, *names: str) -> HandwrittenCall:
        """Return the call that a product of weights x with values completes, and stop following the weights."""
        trace_of_weights = None if trace.factors is None else self.find(x)
        trace = trace if trace_of_weights is None else trace_of_weights._replace(function=trace.function)
        self.drop(x)
        if trace.kind is TraceKind.WEIGHTS:
            self.used.put(x, trace)
        steps = [trace.function, *map(strip_affixes, names)]
        place = 0 if product is None else product.find_place(x)
        return HandwrittenCall(f"{', '.join(steps[:-1])} and {steps[-1]}", trace, x, product, place)


def count_writes(factors: tuple[Tensor, Tensor] | None) -> int:
    """Return how often factors were written into."""
    return sum(map(read_version, factors or ()))


def keeps_entries(name: str, args: Any, x: Tensor, y: Tensor) -> bool:
    """Return whether the result y of a function of x has the numbers of x in another layout: all of them, in the same order."""
    core = strip_affixes(name)
    is_view = core in VIEWS | COPIES or name in PERMUTES or (core == "getitem" and is_view_index(args[1]))
    return is_view and x.numel() == y.numel()


def activate(trace: Trace, name: str) -> Trace:
    """Return the trace of scores or weights with one more function that turned each score into a weight."""
    if trace.activated is not None:
        return trace._replace(activated=trace.activated._replace(functions=(*trace.activated.functions, name)))
    return trace._replace(activated=None if trace.form is None else ActivatedScores(trace.form, (name,)))

"""A trial: the parameters read in one layout with one number of heads, and how far each variant is from the outputs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from regard.examination.case import Case, join_context_heads
from regard.examination.identify.affine import Affine
from regard.examination.identify.projection_layouts import ProjectionLayout, find_layouts, list_head_counts, split_columns
from regard.examination.identify.variants import ProjectedInputs, Variant, compute_context, find_blind_queries, list_choices
from regard.mechanism.heads import join

SKETCH = 24  # number of mixed columns in which outputs are compared
FAINT = 1e-6  # of the largest output: smaller ones of a row are no measure


@dataclass(frozen=True, eq=False)
class TrialTarget:
    """Inputs in float64, the subject's outputs y (b, t, c), and who may see whom, (b or 1, h or 1, q, k).

    `sketch`, (c, n), mixes the columns of outputs to a few; `products` caches the products of the inputs with each matrix.
    """

    inputs: tuple[Tensor, ...]
    y: Tensor
    seen: Tensor
    sketch: Tensor
    scale: float | None
    offset: int
    measured: Tensor | None
    products: dict[str, Tensor]

    @cached_property
    def sketched_outputs(self) -> Tensor:
        """The outputs times the sketch."""
        return self.y @ self.sketch

    @cached_property
    def finite_rows(self) -> Tensor:
        """Which rows are finite, bool (b, q)."""
        return self.y.isfinite().all(-1)

    def project_input(self, matrix: Affine | None) -> Tensor:
        """Return the input times a matrix, or the input itself for None."""
        if matrix is None:
            return self.inputs[0]
        if matrix.name not in self.products:
            self.products[matrix.name] = matrix(self.inputs[0])
        return self.products[matrix.name]


@dataclass(frozen=True, eq=False)
class Trial:
    """A layout with its number of heads, and the q, k and v of the target in it."""

    layout: ProjectionLayout
    given: ProjectedInputs
    target: TrialTarget

    @cached_property
    def choices(self) -> dict[str, list[str]]:
        """The deviations of each field that are possible."""
        layout = self.layout
        return list_choices(self.given, layout.has_known_roles, layout.output is not None, layout.has_separate_heads)

    @property
    def sketched_projection(self) -> tuple[Tensor, Tensor]:
        """The output projection times the sketch, weight and bias: one product for each variant."""
        output, sketch = self.layout.output, self.target.sketch
        if output is None:
            return sketch, sketch.new_zeros(sketch.shape[1])
        bias = sketch.new_zeros(sketch.shape[1]) if output.bias is None else output.bias @ sketch
        key = f"{output.name} mixed"
        if key not in self.target.products:
            self.target.products[key] = output.weight @ sketch
        return self.target.products[key], bias

    def compute_error(self, variant: Variant) -> float:
        """Return how far the variant is from the outputs, relative to the largest of each row; infinite for other shapes.

        Of a row with numbers in place of -inf, such as -1e9, nothing else would show: other rows have to be equal too.
        """
        try:
            made = compute_context(variant, self.given)
        except RuntimeError:  # two deviations with incompatible shapes
            return math.inf
        weight, bias = (self.target.sketch, 0.0) if variant.output == "left out" else self.sketched_projection
        if made.shape[-1] != weight.shape[0] or made.shape[1] != self.target.y.shape[1]:
            return math.inf
        rows = self.select_rows(variant)
        y = self.target.sketched_outputs[rows]
        difference, largest = ((made @ weight + bias)[rows] - y).abs().amax(-1), y.abs().amax(-1)
        if not bool(largest.any()):
            return math.inf
        return float((difference / largest.clamp_min(FAINT * float(largest.max()))).max().nan_to_num(math.inf))

    def compute_difference(self, variant: Variant) -> float:
        """Return the largest difference of the variant from the full outputs, without the sketch, not relative."""
        made = compute_context(variant, self.given)
        if variant.output != "left out" and self.layout.output is not None:
            made = self.layout.output(made)
        rows = self.select_rows(variant)
        if made.shape != self.target.y.shape or not rows.any():
            return math.inf
        return float((made - self.target.y)[rows].abs().max().nan_to_num(math.inf))

    def select_rows(self, variant: Variant) -> Tensor:
        """Return which rows are finite and see something, bool (b, q); none if they are too few to compare."""
        rows = self.target.finite_rows & ~find_blind_queries(variant, self.given)
        return rows if rows.sum() >= min(2, rows.numel()) else torch.zeros_like(rows)


def make_seeded_target(
    case: Case, seed: int, size: float, shorter: bool = False, measured: Tensor | None = None
) -> TrialTarget:
    """Return the target of seeded inputs of this size; with `shorter`, of one token less if that may be tried and works."""
    if shorter and case.can_resize and case.shapes.tokens > 3 and measured is None:
        try:
            return make_target(case, case.make_inputs(case.shapes.tokens - 1, case.shapes.batch, seed, size), measured)
        except Exception:  # a user's layer may raise anything: it refuses another length
            pass
    return make_target(case, case.make_usual_inputs(seed, size), measured)


def make_target(case: Case, inputs: tuple[Tensor, ...], measured: Tensor | None, context: Tensor | None = None) -> TrialTarget:
    """Return the target of these inputs, whose context (b, t, c) is computed unless it is given."""
    if context is None:
        context = join_context_heads(case.run_subject(*inputs).context, case.subject.form)
    y = context.to("cpu", torch.float64)
    q, k = inputs[0].shape[-2], inputs[-1].shape[-2]
    seen = case.get_mask_table(q, k).cpu()
    draw = torch.Generator().manual_seed(q)
    sketch = torch.randn(y.shape[-1], min(SKETCH, y.shape[-1]), generator=draw, dtype=torch.float64)
    wide = tuple(x.to("cpu", torch.float64) for x in inputs)
    offset = case.offset if isinstance(case.offset, int) else 0
    return TrialTarget(wide, y, seen, sketch, case.scale, offset, measured, {})


def iterate_trials(case: Case, target: TrialTarget, plain: bool) -> Iterator[Trial]:
    """Yield every layout, or with `plain` every usual one, with every number of heads that its widths allow."""
    if case.subject.form == "qkv":
        yield make_function_trial(target)
        return
    module, width = case.subject.module, target.inputs[0].shape[-1]
    for layout in find_layouts(module, width, target.y.shape[-1]):
        if layout.plain or not plain:
            yield from try_head_counts(module, layout, target)


def try_head_counts(module: nn.Module | None, layout: ProjectionLayout, target: TrialTarget) -> Iterator[Trial]:
    """Yield a layout with every number of heads that its widths allow."""
    whole = layout.whole
    wide = layout.q.out_features if layout.q is not None else target.inputs[0].shape[-1]
    if whole is not None:
        wide = layout.output.in_features if layout.output is not None else target.y.shape[-1]
    for heads in [layout.heads] if layout.heads else list_head_counts(module, wide):
        trial = make_trial(layout, heads, target)
        if trial is not None:
            yield trial


def make_trial(layout: ProjectionLayout, heads: int, target: TrialTarget) -> Trial | None:
    """Return the trial of a layout with this many heads; None if its widths do not allow it."""
    whole = None
    if layout.whole is not None:
        index, product = split_columns(layout, heads), target.project_input(layout.whole)
        if index is None:
            return None
        q, k, v = (product[..., index[letter]] for letter in "qkv")
        whole = product if layout.order == "3hd" and layout.roles == "qkv" else None
    else:
        q, k, v = (target.project_input(matrix) for matrix in (layout.q, layout.k, layout.v))
    d, rest = divmod(q.shape[-1], heads)
    if rest or k.shape[-1] % d:
        return None
    groups = k.shape[-1] // d
    if heads % groups or v.shape[-1] % groups:
        return None
    return Trial(layout, make_projected_inputs(q, k, v, heads, groups, target, whole, layout.joined), target)


def make_function_trial(target: TrialTarget) -> Trial:
    """Return the trial of a function's own q, k and v, (b, h, t, d), with heads side by side."""
    q, k, v = target.inputs
    layout = ProjectionLayout("q, k and v as given", heads=q.shape[1], has_separate_heads=True)
    return Trial(layout, make_projected_inputs(join(q), join(k), join(v), q.shape[1], k.shape[1], target, None), target)


def make_projected_inputs(
    q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int, target: TrialTarget, whole: Tensor | None, joined: str = "hd"
) -> ProjectedInputs:
    """Return the tensors that variants are computed from, with the scale."""
    scale = (q.shape[-1] // heads) ** -0.5 if target.scale is None else target.scale
    x = target.inputs[0] if len(target.inputs) == 1 else q
    return ProjectedInputs(q, k, v, x, heads, groups, target.seen, scale, target.offset, target.measured, whole, joined)

"""The attention call behind weights that a model computed by hand: q, k, v, and the rule that turns their scores into weights.

The formula comes from the operations that were followed. Its weights are compared with the model's own on sampled rows. Where
they differ, or the formula is not known, the weights themselves are recorded: their logarithms are the bias of a call without
queries and keys, which keeps q x k numbers and is exact.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.mechanism import attend
from regard.mechanism.mask_algebra import EVERYTHING
from regard.mechanism.masks import Given
from regard.mechanism.request import autocast_tensor, is_autocast_on
from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.labelled_product import LabelledProduct
from regard.observe.interception.plain_tensors import UnreadableError, unwrap_tensor
from regard.observe.interception.provenance import has_separate_sources
from regard.observe.interception.score_form import CHOOSES_BY_VALUE, ScoreForm, ScoreStep, StepKind
from regard.observe.interception.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.thread_state import STATE, infer_once
from regard.observe.interception.traces import Trace
from regard.observe.mask_inference import infer_rule, infer_rule_with_bias

HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "nheads", "num_head")
SAMPLED_ROWS = 4  # of each matrix, compared with the model's own weights
FILLED = -1e3  # a larger number that is filled in or added does not hide a key
UNDERFLOW = 120.0  # below the largest score, a weight is 0 in float32
GATED = "its weights are multiplied by a gate after the softmax, which the map leaves out"
LIMIT_BYTES = 2**30  # of weights that are recorded as they are


class HandwrittenCall(NamedTuple):
    """A product of followed weights with values, as it was seen."""

    steps: str  # "softmax and matmul"
    trace: Trace  # of the weights
    tensor: Tensor  # the weights
    product: LabelledProduct | None
    place: int  # of the weights among the product's operands


class Groups(NamedTuple):
    """The axes of batch, heads, queries, keys and the width of values."""

    batch: Axes
    heads: Axes
    queries: Axes
    keys: Axes
    width: Axes

    @property
    def matrix(self) -> Dims:
        """The axes of a matrix of weights."""
        return self.batch, self.heads, self.queries, self.keys


def read_call(found: HandwrittenCall, table: AxisTable, result: Tensor) -> tuple[AttentionCall, CallAdapter]:
    """Read a call whose result has been computed. Raises UnreadableError if its parts are not known."""
    weights, product, place = found.trace, found.product, found.place
    if weights.dims is None:
        raise UnreadableError(f"its weights or scores are rearranged by {describe(weights.changes)}, so its keys are not known")
    if product is None or (product.added is not None and bool(product.added[0].any())):
        raise UnreadableError(
            "its weights are multiplied with the values in a way that is not followed, such as a loop over keys"
        )
    dims = product.build_dims(table, {place: weights.dims})
    groups = find_groups(found, table, dims)
    value, own = product.operands[1 - place], dims[1 - place]
    v = table.arrange(unwrap_tensor(value), own, (groups.batch, groups.heads, groups.keys, groups.width), shared=1)
    tensor, axes = weights.undropped or (found.tensor.detach(), weights.dims)
    seen = table.arrange(unwrap_tensor(tensor), axes or weights.dims, groups.matrix)
    call, total = build_call(found, table, groups, seen, v)
    four = (groups.batch, groups.heads, groups.queries, groups.width)

    def read_context(out: Tensor) -> Tensor:
        context = table.arrange(unwrap_tensor(out), dims[2], four)
        return context if total is None else context / total

    def write_context(new: Tensor, out: Tensor) -> Tensor:
        return table.restore(new if total is None else new * total, four, dims[2], out.shape)

    return call, CallAdapter(lambda: result, read_context, write_context, is_reversible=total is None)


def describe(changes: tuple[str, ...]) -> str:
    """Return the names of functions in words."""
    return " and ".join(dict.fromkeys(changes)) or "an unknown function"


def find_groups(found: HandwrittenCall, table: AxisTable, dims: tuple[Dims, Dims, Dims]) -> Groups:
    """Return the groups of axes of a product of weights with values.

    Raises UnreadableError if they are not those of attention.
    """
    product, place, weights = found.product, found.place, found.trace
    assert product is not None
    own = table.expand_dims(dims[place])
    other = {axis for axes in table.expand_dims(dims[1 - place]) for axis in axes}
    labels = product.labels[place]
    keys = tuple(axis for label, axes in zip(labels, own, strict=True) if label not in product.result for axis in axes)
    kept = [axes for label, axes in zip(labels, own, strict=True) if label in product.result and axes]
    queries = find_queries(weights.form, table, keys)
    if queries is None:
        queries = next((axes for axes in reversed(kept) if not set(axes) & other), ())
    choice = describe_choice(weights.changes)
    if other & set(queries) or (choice and not queries and kept):
        raise UnreadableError(f"its values differ from query to query{f': it is {choice} attention' if choice else ''}")
    if weights.keys is not None and set(table.expand_axes(weights.keys)) != set(keys):
        raise UnreadableError("its softmax is not over the keys that the values are summed over")
    batch = [tuple(axis for axis in axes if axis not in queries) for axes in kept]
    before, heads = split_heads(table, [axes for axes in batch if axes])
    width = tuple(axis for axes in table.expand_dims(dims[1 - place]) for axis in axes if axis not in {*keys, *before, *heads})
    return Groups(before, heads, queries, keys, width)


def find_queries(form: ScoreForm | None, table: AxisTable, keys: Axes) -> Axes | None:
    """Return the axes that only the operand of a score product without the keys has; None if the product is not known."""
    if form is None:
        return None
    a, b, scores = (
        [axis for axes in table.expand_dims(dims) for axis in axes] for dims in (form.a_dims, form.b_dims, form.dims)
    )
    mine, theirs = (a, b) if not set(keys) & set(a) else (b, a)
    if set(keys) & set(mine):
        raise UnreadableError("its keys differ from query to query")
    shared = table.expand_axes(form.shared)
    return tuple(axis for axis in scores if axis in mine and axis not in theirs and axis not in shared)


def split_heads(table: AxisTable, batch: list[Axes]) -> tuple[Axes, Axes]:
    """Return the axes of batch and of heads among the dimensions that are neither queries nor keys."""
    sizes = [math.prod(table.get_sizes(axes)) for axes in batch]
    known = find_head_counts()
    if len(batch) == 1:
        return split_single(table, batch[0], known)
    fits = [n for n, size in enumerate(sizes) if size in known and n]
    heads = fits[0] if len(fits) == 1 else len(batch) - 1
    return tuple(axis for n, axes in enumerate(batch) if n != heads for axis in axes), batch[heads] if batch else ()


def split_single(table: AxisTable, axes: Axes, known: list[int]) -> tuple[Axes, Axes]:
    """Return the axes of batch and of heads in a dimension that may hold both, as that of bmm.

    The number of heads is one that a module states and that leaves a batch of its input, or what the batch of the input leaves.
    """
    size = math.prod(table.get_sizes(axes))
    inputs = [x.shape for frame in reversed(STATE.frames) for x in frame.input_tensors if x.dim() > 1]
    shape = next((one for one in inputs if len(one) > 2), None)
    if shape is None:
        return ((), axes) if inputs else (axes, ())
    heads = next((n for n in known if size % n == 0 and size // n in shape[:2]), 0)
    heads = heads or (size // shape[0] if shape[0] and size % shape[0] == 0 else 1)
    for n in range(len(axes) + 1):
        if math.prod(table.get_sizes(axes[n:])) == heads:
            return axes[:n], axes[n:]
    if len(axes) > 1:
        return axes, ()
    outer, inner = table.split_axis(axes[0], size // heads)
    return (outer,), (inner,)


def find_head_counts() -> list[int]:
    """Return the numbers of heads that the running modules state, of the innermost first."""
    found = []
    for frame in reversed(STATE.frames[-3:]):
        own = vars(frame.module)
        for known in (own, getattr(own.get("config"), "__dict__", {})):
            found += [n for name in HEADS if type(n := known.get(name)) is int and n > 1]
    return found


def build_call(
    found: HandwrittenCall, table: AxisTable, groups: Groups, seen: Tensor, v: Tensor
) -> tuple[AttentionCall, Tensor | None]:
    """Return the call of which `seen` (b, h, q, k) are the weights, and what its rows sum to where that is not 1.

    The call has the formula of its scores if that is known and gives these weights, else the weights as they are. Rows that do
    not sum to 1 are those of exponentials that are divided after the product, or of weights times a gate.
    """
    trace, kernel, reason = found.trace, f"by hand: {found.steps}", ""
    total = seen.sum(-1, keepdim=True)
    divided = total if trace.function.startswith("exp") else None
    if trace.form is not None:
        try:
            call = resolve_form(trace.form, table, groups, kernel, v)
            difference = compare_rows(call, seen if divided is None else seen / divided, trace.eps, trace.moved is not None)
            if difference is None:
                return call, divided
            if call.sinks is None and compare_rows(call, seen / total, trace.eps, trace.moved is not None) is None:
                return replace(
                    call, note="its weights are multiplied by a gate after the softmax, which the map leaves out"
                ), total
            reason = f"its formula differs from its weights by {difference:.2g}"
        except UnreadableError as error:
            reason = str(error)
    return store_weights(seen, v, kernel, trace.eps, reason or describe_unknown(found)), None


def describe_unknown(found: HandwrittenCall) -> str:
    """Return why there is no formula of the weights."""
    choice, changes = describe_choice(found.trace.changes), found.trace.changes
    if choice:
        return f"it is {choice} attention"
    return f"its scores are made by {describe(changes)}" if changes else "its scores are no product of two tensors"


def describe_choice(changes: tuple[str, ...]) -> str:
    """Return what attention is called whose scores were put in an order of their values; nothing for any other."""
    return "top-k" if "topk" in changes else "sorted" if CHOOSES_BY_VALUE & set(changes) else ""


def store_weights(seen: Tensor, v: Tensor, kernel: str, eps: float, reason: str) -> AttentionCall:
    """Return a call whose bias is the logarithm of its weights. Raises UnreadableError if their rows do not sum to 1."""
    b, h, t, n = seen.shape
    size = seen.numel() * seen.element_size()
    if size > LIMIT_BYTES:
        raise UnreadableError(f"{reason}, and its weights as they are would take {size:,} bytes")
    total = seen.sum(-1, dtype=score_dtype(seen.dtype))
    allowed = 8 * n**0.5 * max(eps, torch.finfo(seen.dtype).eps)
    if not bool(((seen >= 0).all(-1) & (((total - 1).abs() < allowed) | (total == 0)) | total.isnan()).all()):
        raise UnreadableError(f"its weights are no softmax of scores: {reason}")
    width = seen.new_zeros(b, h, 1, 1)
    q, k = width.expand(b, h, t, 1), width.expand(b, h, n, 1)
    bias = seen.to(score_dtype(seen.dtype)).log()
    note = f"{reason}, so its weights are stored as they are: {bias.nbytes:,} bytes"
    return AttentionCall(
        kernel=kernel, q=q, k=k, v=v, bias=bias, scale=1.0, can_use_cache=False, can_be_packed=False, note=note
    )


@dataclass
class ScoreParts:
    """What a form amounts to, on four axes: factors of scores, queries and keys, a softcap, what is added and hidden."""

    scale: float = 1.0
    query_factor: Tensor | None = None
    key_factor: Tensor | None = None
    softcap: float | None = None
    biases: list[Tensor] = field(default_factory=list)
    hidden: list[tuple[Tensor, float]] = field(default_factory=list)
    sinks: Tensor | None = None
    more: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # queries and keys of further products
    raw: list[Tensor] = field(default_factory=list)  # tensors that biases and masks were made from


def resolve_form(form: ScoreForm, table: AxisTable, groups: Groups, kernel: str, v: Tensor) -> AttentionCall:
    """Return the call of a form. Raises UnreadableError if AttentionMap cannot express it."""
    q, k, parts = collect_parts(form, table, groups)
    frames = STATE.frames
    sources = has_separate_sources(frames, *((form.a, form.b) if is_query_first(form, table, groups) else (form.b, form.a)))
    if parts.query_factor is not None:
        q = q * parts.query_factor
    if parts.key_factor is not None:
        k = k * parts.key_factor
    if parts.more:
        q, k = join_products(q * parts.scale, k, parts.more)
        parts.scale = 1.0
    if k.shape[1] != v.shape[1]:
        v = v if v.shape[1] == q.shape[1] else v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        k = k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    b = max(len(q), len(k), len(v))
    q, k, v = (x if len(x) == b else x.expand(b, -1, -1, -1) for x in (q, k, v))
    rule = infer_rule_of_parts(parts, q, k)
    return AttentionCall(
        kernel=kernel,
        q=q,
        k=k,
        v=v,
        mask=rule[0],
        offset=rule[1],
        bias=rule[2],
        scale=parts.scale,
        softcap=parts.softcap,
        sinks=None if parts.sinks is None else read_sinks(parts.sinks, q.shape[1]),
        has_separate_sources=sources,
        can_be_packed=False,
    )


def is_query_first(form: ScoreForm, table: AxisTable, groups: Groups) -> bool:
    """Return whether the queries are the first operand of a form's product."""
    return not set(groups.keys) & {axis for axes in table.expand_dims(form.a_dims) for axis in axes}


def collect_parts(form: ScoreForm, table: AxisTable, groups: Groups) -> tuple[Tensor, Tensor, ScoreParts]:
    """Return the queries (b, h, q, d) and keys (b, g, k, d) of a form, and what its steps amount to."""
    a, b = table.expand_dims(form.a_dims), table.expand_dims(form.b_dims)
    first = is_query_first(form, table, groups)
    query, own = (form.a, a) if first else (form.b, b)
    key, other = (form.b, b) if first else (form.a, a)
    scored = {axis for axes in table.expand_dims(form.dims) for axis in axes}
    summed = tuple(axis for axes in own for axis in axes if axis not in scored)
    q = table.arrange(unwrap_tensor(query), own, (groups.batch, groups.heads, groups.queries, summed))
    k = table.arrange(unwrap_tensor(key), other, (groups.batch, groups.heads, groups.keys, summed), shared=1)
    heads = math.prod(table.get_sizes(table.expand_axes(groups.heads)))
    q = q.expand(-1, heads, -1, -1)
    parts = ScoreParts()
    for step in form.steps:
        apply_step(parts, step, table, groups)
    return q, k, parts


def apply_step(parts: ScoreParts, step: ScoreStep, table: AxisTable, groups: Groups) -> None:
    """Apply a step to the parts. Raises UnreadableError if they cannot express it."""
    if isinstance(step.operand, ScoreForm):
        q, k, others = collect_parts(step.operand, table, groups)
        if others.biases or others.hidden or others.more or others.softcap or parts.softcap:
            raise UnreadableError("it adds scores that have steps of their own")
        q = q if others.query_factor is None else q * others.query_factor
        k = k if others.key_factor is None else k * others.key_factor
        parts.more.append((q * (others.scale * step.amount), k))
        return
    x = step.operand
    if isinstance(x, Tensor):
        parts.raw.append(x)
        x = table.arrange(unwrap_tensor(x), step.dims, groups.matrix)
    if step.kind is StepKind.SINK and isinstance(x, Tensor):
        parts.sinks = x
    elif step.kind is StepKind.TANH:
        if parts.softcap or parts.biases or parts.hidden or parts.more:
            raise UnreadableError("its tanh is not of the scores alone")
        parts.softcap = 1.0
    elif step.kind is StepKind.FILL and isinstance(x, Tensor):
        if step.amount > FILLED:
            raise UnreadableError(f"it fills scores with {step.amount:g} where a mask would hide keys")
        parts.hidden.append((x, step.amount))
    elif step.kind is StepKind.MULTIPLY:
        multiply_parts(parts, x)
    elif isinstance(x, Tensor) and x.shape[-1] > 1:
        parts.biases.append(x if step.amount == 1 else x * step.amount)


def read_sinks(x: Tensor, heads: int) -> Tensor:
    """Return sinks (b, h, q, 1) as one number a head.

    Raises UnreadableError if they differ from query to query by more than the rounding of a shift.
    """
    found = x.mean((0, 2), keepdim=True)
    if not torch.allclose(x, found.expand(x.shape), rtol=0, atol=1e3 * torch.finfo(x.dtype).eps):
        raise UnreadableError("its softmax has a column beside those of the keys that differs from query to query")
    return found.flatten().expand(heads).clone()


def multiply_parts(parts: ScoreParts, x: Any) -> None:
    """Multiply scores by a number, or by a tensor that is the same for all keys or for all queries."""
    if isinstance(x, Tensor) and x.numel() == 1:
        x = float(x)
    if isinstance(x, float):
        parts.scale *= x
        parts.softcap = None if parts.softcap is None else parts.softcap * x
        parts.biases = [bias * x for bias in parts.biases]
        parts.more = [(q * x, k) for q, k in parts.more]
        parts.hidden = [(table, amount * x) for table, amount in parts.hidden]
        if x <= 0 and (parts.hidden or parts.softcap is not None):
            raise UnreadableError("it multiplies masked scores by a negative number")
        return
    if parts.softcap is not None or parts.hidden or (x.shape[-1] > 1 and x.shape[-2] > 1):
        raise UnreadableError("it multiplies scores by a tensor of queries and keys")
    parts.biases = [bias * x for bias in parts.biases]
    if x.shape[-1] > 1:
        turned = x.mT
        parts.key_factor = turned if parts.key_factor is None else parts.key_factor * turned
        parts.more = [(q, k * turned) for q, k in parts.more]
    else:
        parts.query_factor = x if parts.query_factor is None else parts.query_factor * x
        parts.more = [(q * x, k) for q, k in parts.more]


def join_products(q: Tensor, k: Tensor, more: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose product is the sum of several products: their widths are concatenated."""
    queries, keys = [q, *(one for one, _ in more)], [k, *(one for _, one in more)]
    g = max(x.shape[1] for x in keys)
    b = max(len(x) for x in (*queries, *keys))
    queries = [x.expand(b, q.shape[1], -1, -1) for x in queries]
    keys = [(x.repeat_interleave(g // x.shape[1], 1) if x.shape[1] != g else x).expand(b, -1, -1, -1) for x in keys]
    return torch.cat(queries, -1), torch.cat(keys, -1)


def infer_rule_of_parts(parts: ScoreParts, q: Tensor, k: Tensor) -> Any:
    """Return the mask, offset and bias of what is added to the scores and hidden from them."""
    if not parts.biases and not parts.hidden:
        return EVERYTHING, 0, None
    reach = 10.0 ** math.ceil(math.log10(2 * bound_scores(parts, q, k) + UNDERFLOW))  # rounded, so that layers share a rule
    shallow = [amount for _, amount in parts.hidden if amount > -reach]
    if shallow:
        raise UnreadableError(
            f"it fills scores with {shallow[0]:g}, which does not hide a key beside scores up to {reach / 2:g}"
        )
    amounts = [amount for _, amount in parts.hidden]
    return infer_once(tuple(parts.raw), q, k, lambda: join_rules(parts, min(FILLED, -reach), q, k), "by hand", reach, *amounts)


def join_rules(parts: ScoreParts, low: float, q: Tensor, k: Tensor) -> Any:
    """Return the mask, offset and bias of all that is added and hidden; what is added hides a key if it is at most `low`.

    A row of which every key would be hidden keeps what is added as a bias, since its softmax is of the shifted scores.
    """
    bias: Tensor | None = None
    hidden: Tensor | None = None
    for x in parts.biases:
        below = x <= low
        if below.any() and not below.all(-1).any():
            hidden = below if hidden is None else hidden | below
            x = x.masked_fill(below, 0)
        if x.any():
            bias = x if bias is None else bias + x
    for table, _ in parts.hidden:
        hidden = table if hidden is None else hidden | table
    mask = None if hidden is None else build_additive_mask(hidden, all(amount == -math.inf for _, amount in parts.hidden))
    if bias is None:
        return (EVERYTHING, 0, None) if mask is None else infer_rule(mask, q, k)
    return infer_rule_with_bias(mask, False, reduce_to_keys(bias.to(score_dtype(bias.dtype))).clone(), q, k)


def bound_scores(parts: ScoreParts, q: Tensor, k: Tensor) -> float:
    """Return a bound of the size of the scores before they are shifted: the product of the largest norms."""
    if parts.softcap is not None:
        return abs(parts.softcap)
    kind = score_dtype(q.dtype)
    size = q.detach().to(kind).norm(dim=-1).amax() * k.detach().to(kind).norm(dim=-1).amax() * abs(parts.scale)
    return float(size.nan_to_num(0.0, 0.0)) if q.numel() and k.numel() else 0.0


def build_additive_mask(hidden: Tensor, is_infinite: bool) -> Tensor:
    """Return what is added to scores where a table hides: -inf, or the smallest number, after which a blind row is uniform."""
    low = -math.inf if is_infinite else torch.finfo(torch.float32).min
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, low)


def reduce_to_keys(bias: Tensor) -> Tensor:
    """Return a bias (..., q, k) that is the same for all queries up to a shift of each row as (..., 1, k), else as it is."""
    if bias.shape[-2] == 1 or not bool(bias.isfinite().all()):
        return bias
    last = bias[..., -1:, :]
    rest = bias - last
    return last if bool((rest == rest[..., :1]).all()) else bias


def compare_rows(call: AttentionCall, seen: Tensor, rounding: float, has_moved: bool) -> float | None:
    """Return how far the weights of a call are from the model's own; None if within rounding.

    Rows are sampled, unless entries were moved, which may leave single rows as they were.

    Rows that hold NaN are left out: there the model has none of its own.
    """
    t = seen.shape[2]
    step = 1 if has_moved else max(1, t // SAMPLED_ROWS)
    rows = torch.tensor(sorted({*range(0, t, step), t - 1}), device=seen.device)
    q, k = call.q.detach()[:, :, rows], call.k.detach()
    if is_autocast_on(q.device):
        q, k = autocast_tensor(q), autocast_tensor(k)
    table = call.mask.block(rows, torch.arange(k.shape[2], device=q.device), call.offset)
    bias = call.bias if call.bias is None or call.bias.shape[2] == 1 else call.bias[:, :, rows]
    steps = attend(q, k, k, Given.from_shared_table(table), scale=call.scale, softcap=call.softcap, bias=bias, sinks=call.sinks)
    kind = score_dtype(seen.dtype)
    ours, theirs = steps.weights.to(kind), seen[:, :, rows].to(kind)
    known = ~theirs.isnan().any(-1, keepdim=True)
    apart = ((ours - theirs).abs() * known).nan_to_num()
    eps = max(rounding, torch.finfo(q.dtype).eps)
    size = bound_rows(q, k, call) + (
        0.0 if bias is None else float(bias.masked_fill(bias.isinf(), 0).abs().amax().clamp(max=1e6))
    )
    allowed = 4 * eps * (1 + theirs * (size + q.shape[-1]))
    return None if bool((apart <= allowed).all()) else float(apart.amax())


def bound_rows(q: Tensor, k: Tensor, call: AttentionCall) -> float:
    """Return the largest product of the norms of a query and a key, times the scale."""
    kind = score_dtype(q.dtype)
    scale = 1.0 if call.scale is None else abs(call.scale)
    return float(q.to(kind).norm(dim=-1).amax() * k.to(kind).norm(dim=-1).amax() * scale) if q.numel() else 0.0

"""Interception of attention of transformers and timm that weighs values without pairs of queries and keys.

Autoformer weighs delays: each query sees the value that lies a delay after it, around the end, and all queries share the
weights. MobileViTV2 weighs tokens, once for all queries; SwiftFormer adds all tokens up, with weights of one norm in timm. The
weights are those of the function that ran, and the product with the values is compared with what the module computed.
Neither package is imported here.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.map.stored_matrix import StoredMatrix
from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.functions.method_wrapper import wrap_method
from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import (
    RecurrenceCall,
    RecurrenceFactors,
    build_read_call,
    sample_state,
)

# functions whose arguments and results are read
KEPT = ("softmax", "normalize", "topk", "gather", "roll", "split", "sum", "linear")
Run = tuple[tuple[Any, ...], dict[str, Any], Any]  # arguments and result of a function that ran
Runs = dict[str, list[Run]]


class FunctionLog(TorchFunctionMode):
    """Keeps the arguments and the results of the functions of some names, in order."""

    def __init__(self) -> None:
        self.runs: Runs = {name: [] for name in KEPT}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in self.runs:
            self.runs[name].append((args, kwargs, result))
        return result


@contextmanager
def log_functions() -> Iterator[Runs]:
    """Keep the arguments and the results of functions that run while the context is active."""
    with FunctionLog() as log:
        yield log.runs


def build_patches() -> list[AttributePatch]:
    """Return the attribute patches for those of the modules that the program has imported."""
    patches: list[AttributePatch] = []
    for (module, name), reader in READERS.items():
        owner = getattr(sys.modules.get(module), name, None)
        if owner is not None and "forward" in vars(owner):
            kernel = f"{module.split('.')[2]}: one row of weights"
            patches.append((owner, "forward", wrap_method(vars(owner)["forward"], reader, kernel, log_functions)))
    return patches


def read_delays(
    kernel: str, module: Any, arguments: dict[str, Any], runs: Runs, result: Any
) -> tuple[AttentionCall, CallAdapter]:
    """Read a call of Autoformer's attention, whose weights (b, n) are those of n delays (b, n) or, in training, (n,)."""
    weights = runs["softmax"][0][2].detach()
    delays = runs["topk"][0][2][1].expand(weights.shape)
    (args, *_), *_ = runs["roll"] or runs["gather"]
    context = runs["linear"][-1][0][0].detach().unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    b, h, t, _ = context.shape
    v = args[0].detach()[:, :t].unflatten(0, (b, h))
    rows = torch.arange(b * h, device=v.device).view(b, h) % b  # heads have the weights of other sequences too, by its code
    places = (torch.arange(t, device=v.device)[:, None] + delays[rows][..., None, :]) % t  # (b, h, q, n)
    matrix = v.new_zeros(b, h, t, t, dtype=weights.dtype)
    matrix.scatter_add_(3, places, weights[rows][..., None, :].expand(places.shape))
    call = build_call(kernel, module, matrix, v, t)
    call.is_cross = arguments.get("key_value_states") is not None
    call.note = "each query sees the values at delays that all queries share, with the weights of the delays"
    check_context(matrix, v, context)
    return call, CallAdapter(lambda: result)


def read_tokens(
    kernel: str, module: Any, arguments: dict[str, Any], runs: Runs, result: Any
) -> tuple[AttentionCall, CallAdapter]:
    """Read a call of MobileViTV2's attention: weights (b, 1, p, n) of n patches, for each of p pixels in a patch."""
    if arguments.get("x_prev") is not None:
        raise UnreadableError("its queries are tokens of another feature map than its keys")
    dropout = module.attn_dropout if hasattr(module, "attn_dropout") else module.attn_drop
    weights, v = (move_channels(x) for x in (runs["softmax"][0][2].detach(), runs["split"][0][2][1].detach()))
    matrix = weights.mT  # (b p, 1, 1, n): one row for all queries
    call = build_call(kernel, module, matrix, v, v.shape[2])
    call.is_cross = False
    call.note = "all queries share one row of weights, and each multiplies what it gets by a gate, which the map leaves out"
    if not (module.training and dropout.p):
        check_context(matrix, v, move_channels(runs["sum"][0][2].detach()))
    return call, CallAdapter(lambda: result)


def move_channels(x: Tensor) -> Tensor:
    """Return x (b, c, p, n) as (b p, 1, n, c)."""
    return x.permute(0, 2, 3, 1).flatten(0, 1).unsqueeze(1)


def read_sum(
    kernel: str, module: Any, arguments: dict[str, Any], runs: Runs, result: Any
) -> tuple[RecurrenceCall, CallAdapter]:
    """Read a call of SwiftFormer's attention: a softmax over one entry, so that its weights (b, n, 1) of n tokens are all 1.

    In timm they are numbers with a norm of 1 over the tokens.
    """
    has_softmax = bool(runs["softmax"])
    found, queries = runs["softmax"][0][2] if has_softmax else runs["normalize"][2][2], runs["normalize"][0][2]
    weights, product, total = (x.detach() for x in (found, runs["sum"][0][0][0], runs["sum"][0][2]))
    v, row = (product / weights if has_softmax else queries.detach())[:, None], weights.mT[:, None]
    t = v.shape[2]
    outputs = total.view(len(v), 1, 1, -1).expand(-1, -1, t, -1)
    matrix = StoredMatrix(entries=row.expand(-1, -1, t, -1), title="a sum of all tokens")
    why = "since its softmax is over one entry" if has_softmax else "with weights of one norm"
    note = f"it is a sum of all tokens, {why}: {matrix.entries.numel() * row.element_size():,} bytes"
    check_context(row, v, outputs[:, :, :1])
    factors = RecurrenceFactors(matrix, v, outputs, sample_state(v), note=note)
    return build_read_call(kernel, factors), CallAdapter(lambda: result)


def build_call(kernel: str, module: Any, matrix: Tensor, v: Tensor, queries: int) -> AttentionCall:
    """Return the call of weights (b, h or 1, q or 1, k), with values (b, h, k, e)."""
    zeros = v.new_zeros(*v.shape[:2], 1, 1)
    q, k = (zeros.expand(-1, -1, n, -1) for n in (queries, matrix.shape[3]))
    call = AttentionCall(kernel=kernel, q=q, k=k, v=v, bias=matrix.log(), scale=1.0, module=module)
    call.can_use_cache = False
    return call


def check_context(matrix: Tensor, v: Tensor, context: Tensor) -> None:
    """Raise UnreadableError if weights (b, h or 1, q or 1, k) times values (b, h, k, e) are not what the module computed."""
    kind = score_dtype(v.dtype)
    difference = float((matrix.to(kind) @ v.to(kind) - context.to(kind)).abs().amax())
    eps = max(torch.finfo(x.dtype).eps for x in (matrix, v, context))
    tolerance = 4 * eps * v.shape[2] * float(matrix.amax()) * float(v.abs().amax())
    if not difference <= tolerance:
        raise UnreadableError(f"its context differs from that of its weights by {difference:.2g}")


READERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("transformers.models.autoformer.modeling_autoformer", "AutoformerAttention"): read_delays,
    ("transformers.models.mobilevitv2.modeling_mobilevitv2", "MobileViTV2LinearSelfAttention"): read_tokens,
    ("transformers.models.swiftformer.modeling_swiftformer", "SwiftFormerEfficientAdditiveAttention"): read_sum,
    ("timm.models.mobilevit", "LinearSelfAttention"): read_tokens,
    ("timm.models.swiftformer", "EfficientAdditiveAttention"): read_sum,
}

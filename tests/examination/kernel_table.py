"""Kernels for examine_kernel: right ones, and wrong ones with one mistake each and the kind that names it."""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from regard import Everything

LN2 = math.log(2)


def see(q, k, is_causal=True):
    """Which keys a query sees, the last query at the last key."""
    t, n = q.shape[-2], k.shape[-2]
    rows = torch.arange(t)[:, None] + n - t
    return (rows >= torch.arange(n)) | (not is_causal)


def share(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def blockwise(q, k, v, block=16, is_causal=True, scale=None, stop=None):
    """Attention in blocks of keys, with the log-sum-exp and the largest score; rows that see nothing are 0."""
    k, v = share(k, q), share(v, q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seen, top = see(q, k, is_causal), q.new_full(q.shape[:-1], -torch.inf).unsqueeze(-1)
    total, context = torch.zeros_like(top), torch.zeros_like(q)
    for first in range(0, k.shape[-2] if stop is None else stop, block):
        keys = slice(first, first + block)
        scores = (q @ k[..., keys, :].mT * scale).masked_fill(~seen[:, keys], -torch.inf)
        above = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = above.masked_fill(above == -torch.inf, 0)
        numbers, shrunk = (scores - base).exp(), (top - base).exp()
        total = total * shrunk + numbers.sum(-1, keepdim=True)
        context = context * shrunk + numbers @ v[..., keys, :]
        top = above
    context = context / total.masked_fill(total == 0, 1)
    return context, (top + total.log()).squeeze(-1), top.squeeze(-1)


def with_lse(q, k, v):
    return blockwise(q, k, v)[:2]


def with_lse_and_max(q, k, v):
    context, lse, top = blockwise(q, k, v)
    return {"context": context, "logsumexp": lse.unsqueeze(-1), "max_scores": top}


class Weighted(NamedTuple):
    out: torch.Tensor
    attn_weights: torch.Tensor


def compute_weights(q, k):
    seen = see(q, k)
    return (q @ share(k, q).mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()


def with_weights(q, k, v):
    weights = compute_weights(q, k)
    return Weighted(weights @ share(v, q), weights)


def base_two(q, k, v):
    """Powers of 2, and a log-sum-exp in base 2, as many kernels keep it."""
    scores = (q @ share(k, q).mT * (q.shape[-1] ** -0.5 / LN2)).masked_fill(~see(q, k), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    numbers = 2 ** (scores - top)
    total = numbers.sum(-1, keepdim=True)
    return numbers / total @ share(v, q), (top + total.log2()).squeeze(-1)


def powers_of_whole_blocks(q, k, v):
    """It takes lengths that are multiples of 16 alone."""
    assert q.shape[-2] % 16 == 0, "multiples of 16"
    return blockwise(q, k, v)[0]


class Flash(torch.autograd.Function):
    """A forward and a backward written out; `mistake` names what is wrong."""

    @staticmethod
    def forward(ctx, q, k, v, mistake):
        scale = q.shape[-1] ** -0.5
        context, lse, _ = blockwise(q, k, v)
        ctx.save_for_backward(q, k, v, lse)
        ctx.scale, ctx.mistake = scale, mistake
        return context

    @staticmethod
    def backward(ctx, slope):
        q, k, v, lse = ctx.saved_tensors
        group = q.shape[1] // k.shape[1]
        scores = (q @ share(k, q).mT * ctx.scale).masked_fill(~see(q, k), -torch.inf)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
        if ctx.mistake == "unmasked":
            weights = (q @ share(k, q).mT * ctx.scale - lse.unsqueeze(-1)).exp()
        dp = slope @ share(v, q).mT
        delta = 0 if ctx.mistake == "without delta" else (dp * weights).sum(-1, keepdim=True)
        ds = weights * (dp - delta) * ctx.scale
        if ctx.mistake == "base two":
            ds = ds * LN2
        dq, dk, dv = ds @ share(k, q), ds.mT @ q, weights.mT @ slope
        if ctx.mistake == "k unscaled":
            dk = dk / ctx.scale
        if ctx.mistake == "one head of a group":
            return dq, dk[:, ::group], dv[:, ::group], None
        dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        if ctx.mistake == "averaged":
            dv = dv / group
        if ctx.mistake == "exchanged":
            dq, dk = (dk, dq) if dq.shape == dk.shape else (dq, dk)
        return dq, dk, dv, None


def flash(q, k, v, mistake=""):
    return Flash.apply(q, k, v, mistake)


def flash_backward(q, k, v, slope):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        return torch.autograd.grad(blockwise(q, k, v)[0], (q, k, v), slope)


def backward_without_scale(q, k, v, slope):
    dq, dk, dv = flash_backward(q, k, v, slope)
    return dq, dk * q.shape[-1] ** 0.5, dv


def attend_detached(q, k, v):
    return blockwise(q, k, v)[0].detach()


def drop(q, k, v, rate=0.2, kept=None, factor=None, is_shared=False):
    weights = compute_weights(q, k)
    shape = (1, 1, *weights.shape[2:]) if is_shared else weights.shape
    mask = torch.rand(shape) < (1 - rate if kept is None else kept)
    return weights * mask * (1 / (1 - rate) if factor is None else factor) @ share(v, q)


def monitor_entropy(q, k, v):
    """The entropy from the log-sum-exp, as a kernel can have it: lse - sum of weights times scores."""
    context, lse, _ = blockwise(q, k, v)
    scores = q @ share(k, q).mT * q.shape[-1] ** -0.5
    return {"out": context, "row_entropy": lse - (compute_weights(q, k) * scores).sum(-1)}


def monitor_mean_entropy(q, k, v):
    return blockwise(q, k, v)[0], torch.special.entr(compute_weights(q, k)).sum(-1).mean(-1)


def monitor_sink(q, k, v):
    """The same kernel with values of 1 for the first key and 0 for all others."""
    ones = torch.zeros_like(v)
    ones[:, :, 0] = 1
    return blockwise(q, k, v)[0], blockwise(q, k, ones)[0][..., 0]


def monitor_mean_sink(q, k, v):
    return blockwise(q, k, v)[0], compute_weights(q, k)[..., 0].mean((0, 2))


RIGHT = {
    "monitor of entropy": (monitor_entropy, {}),
    "monitor of mean entropy": (monitor_mean_entropy, {"outputs": ("entropy",)}),
    "monitor of sinks": (monitor_sink, {"outputs": ("sink",)}),
    "monitor of mean sinks": (monitor_mean_sink, {"outputs": ("sink",)}),
    "sdpa": (F.scaled_dot_product_attention, {"expects": Everything()}),
    "sdpa causal": (functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True), {"offset": 0}),
    "blockwise": (with_lse, {"offset": "last"}),
    "with the maximum": (with_lse_and_max, {}),
    "with weights": (with_weights, {}),
    "base two, stated": (base_two, {"outputs": ("lse2",)}),
    "whole blocks": (powers_of_whole_blocks, {}),
    "flash": (flash, {"offset": "last"}),
    "flash with its backward": (attend_detached, {"backward": flash_backward}),
    "dropout": (with_lse, {"dropout": (drop, 0.2)}),
    "bfloat16": (with_lse, {"dtype": torch.bfloat16}),
    "sdpa in float16": (
        functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
        {"dtype": torch.float16},
    ),
    "stated scale": (lambda q, k, v: blockwise(q, k, v, scale=0.3)[0], {"scale": 0.3}),
    "reference": (lambda q, k, v: 2 * blockwise(q, k, v)[0], {"reference": lambda q, k, v: 2 * blockwise(q, k, v)[0]}),
}


def lse_of_base_two(q, k, v):
    # https://github.com/lightseekorg/tokenspeed/pull/571 https://github.com/vllm-project/vllm/pull/28840
    context, lse, _ = blockwise(q, k, v)
    return context, lse / LN2


def lse_without_maximum(q, k, v):
    context, lse, top = blockwise(q, k, v)
    return context, lse - top


def lse_in_two_bases(q, k, v):
    context, lse, top = blockwise(q, k, v)
    return context, top + (lse - top) / LN2


def lse_unscaled(q, k, v):
    return blockwise(q, k, v)[0], (q @ share(k, q).mT).masked_fill(~see(q, k), -torch.inf).logsumexp(-1)


def lse_of_all_keys(q, k, v):
    return blockwise(q, k, v)[0], (q @ share(k, q).mT * q.shape[-1] ** -0.5).logsumexp(-1)


def maximum_unscaled(q, k, v):
    context, _, top = blockwise(q, k, v)
    return {"out": context, "max_scores": top * q.shape[-1] ** 0.5}


def maximum_of_all_keys(q, k, v):
    return {"out": blockwise(q, k, v)[0], "max_scores": (q @ share(k, q).mT * q.shape[-1] ** -0.5).amax(-1)}


def weights_undivided(q, k, v):
    scores = (q @ share(k, q).mT * q.shape[-1] ** -0.5).masked_fill(~see(q, k), -torch.inf)
    return Weighted(blockwise(q, k, v)[0], (scores - scores.amax(-1, keepdim=True)).exp())


def weights_of_the_mean_head(q, k, v):
    return blockwise(q, k, v)[0], compute_weights(q, k).mean(1)


def scores_for_weights(q, k, v):
    return Weighted(blockwise(q, k, v)[0], q @ share(k, q).mT * q.shape[-1] ** -0.5)


def tile_groups(q, k, v):
    times = q.shape[1] // k.shape[1]
    return blockwise(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1))[0]


def drop_last_block(q, k, v):
    return blockwise(q, k, v, 64, stop=max(64, k.shape[-2] // 64 * 64))[0]


def fill_up_block(q, k, v):
    more = -k.shape[-2] % 16
    return blockwise(q, *(F.pad(x, (0, 0, 0, more)) for x in (k, v)), is_causal=False)[0]


def empty_rows_of_nan(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~see(q, k), -torch.inf).softmax(-1) @ v


def empty_rows_uniform(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~see(q, k), -1e9).softmax(-1) @ v


def align_to_first_corner(q, k, v):
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, seen)


def powers_of_two(q, k, v):
    return blockwise(q, k, v, scale=q.shape[-1] ** -0.5 * LN2)[0]


def width_rounded_up(q, k, v):
    return blockwise(q, k, v, scale=2.0 ** (-(q.shape[-1] - 1).bit_length() / 2))[0]


def exp_overflows(q, k, v):
    numbers = (q @ share(k, q).mT * q.shape[-1] ** -0.5).exp() * see(q, k)
    return numbers / numbers.sum(-1, keepdim=True) @ share(v, q)


def half_inside(q, k, v):
    return blockwise(*(x.bfloat16().to(x.dtype) for x in (q, k, v)))[0]


def columns_beyond_a_power_of_two(q, k, v):
    width = 1 << (q.shape[-1].bit_length() - 1)
    return (
        blockwise(q[..., :width], k[..., :width], v[..., :width], scale=q.shape[-1] ** -0.5)[0]
        .new_zeros(v.shape[0], q.shape[1], q.shape[2], v.shape[-1])
        .index_copy(
            -1, torch.arange(width), blockwise(q[..., :width], k[..., :width], v[..., :width], scale=q.shape[-1] ** -0.5)[0]
        )
    )


def values_for_keys(q, k, v):
    return blockwise(q, v, k)[0]


def attend_without_division(q, k, v):
    context, lse, top = blockwise(q, k, v)
    return context * (lse - top).exp().unsqueeze(-1)


def watch(compute):
    """The right context, and what is computed of its weights."""
    return lambda q, k, v: (blockwise(q, k, v)[0], compute(compute_weights(q, k)))


class WrongKernel(NamedTuple):
    """A kernel, the kind of its finding, words of the evidence, and further arguments."""

    kernel: object
    kind: str
    says: str
    arguments: dict = {}  # noqa: RUF012


LAST, ALL = {"offset": "last"}, {"expects": Everything()}
ENTROPY, SINK = {"outputs": ("entropy",)}, {"outputs": ("sink",)}
WRONG = {
    "entropy in bits": WrongKernel(
        watch(lambda a: torch.special.entr(a).sum(-1) / LN2), "wrong entropy of each row", "bits", ENTROPY
    ),
    "entropy of the mean head": WrongKernel(
        watch(lambda a: torch.special.entr(a.mean(1, keepdim=True)).sum(-1).expand(a.shape[:-1])),
        "wrong entropy of each row",
        "mean of all heads",
        ENTROPY,
    ),
    "entropy with a number in the logarithm": WrongKernel(
        watch(lambda a: -(a * (a + 1e-4).log()).sum(-1)), "wrong entropy of each row", "0.0001 is added", ENTROPY
    ),
    "mean entropy, its sign turned": WrongKernel(
        watch(lambda a: (a * a.clamp_min(1e-30).log()).sum(-1).mean(-1)), "wrong entropy of each row", "sign", ENTROPY
    ),
    "entropy of NaN": WrongKernel(watch(lambda a: -(a * a.log()).sum(-1)), "wrong entropy of each row", "NaN", ENTROPY),
    "sink of the last key": WrongKernel(watch(lambda a: a[..., -1]), "wrong weight on the first key", "last key", SINK),
    "sink of rows for columns": WrongKernel(
        watch(lambda a: a[..., 0, :]),
        "wrong weight on the first key",
        "rows and columns are exchanged",
        {**SINK, "offset": None},
    ),
    "sink of the largest weight": WrongKernel(
        watch(lambda a: a.amax(-1).mean((0, 2))), "wrong weight on the first key", "largest weight", SINK
    ),
    "lse in base 2": WrongKernel(lse_of_base_two, "wrong log-sum-exp", "in base 2"),
    "lse in base e where base 2 is stated": WrongKernel(
        with_lse, "wrong base-2 log-sum-exp", "in base e", {"outputs": ("lse2",)}
    ),
    "lse without the maximum": WrongKernel(lse_without_maximum, "wrong log-sum-exp", "largest score is not added"),
    "lse in two bases": WrongKernel(lse_in_two_bases, "wrong log-sum-exp", "largest score is in base e", {"outputs": ("lse",)}),
    "lse without the scale": WrongKernel(lse_unscaled, "wrong log-sum-exp", "not scaled"),
    "lse of hidden keys": WrongKernel(lse_of_all_keys, "wrong log-sum-exp", "hidden keys"),
    "max without the scale": WrongKernel(maximum_unscaled, "wrong largest score of each row", "not scaled"),
    "max of hidden keys": WrongKernel(maximum_of_all_keys, "wrong largest score of each row", "hidden keys"),
    "weights that are not divided": WrongKernel(weights_undivided, "wrong weights", "not divided"),
    "weights of the mean head": WrongKernel(
        weights_of_the_mean_head, "wrong weights", "mean of all heads", {"outputs": ("weights",)}
    ),
    "scores for weights": WrongKernel(scores_for_weights, "wrong weights", "before the softmax"),
    "groups tiled": WrongKernel(tile_groups, "mixed heads", "0, 1, 0, 1"),
    "last block dropped": WrongKernel(drop_last_block, "wrong mask", "last block of 64"),
    "block filled up with zeros": WrongKernel(fill_up_block, "not normalised", "keys of zeros", ALL),
    "empty rows of NaN": WrongKernel(empty_rows_of_nan, "blind row", "is NaN", LAST),
    "empty rows uniform": WrongKernel(empty_rows_uniform, "blind row", "mean of all values", LAST),
    "the other corner": WrongKernel(align_to_first_corner, "wrong mask", "other end of the keys", LAST),
    "exp2 without log2(e)": WrongKernel(powers_of_two, "wrong scale", "log2(e)"),
    "scale of a width rounded up": WrongKernel(width_rounded_up, "wrong scale", "rounded up to a power of two"),
    "exp without the maximum": WrongKernel(exp_overflows, "overflow", "not finite"),
    "half precision inside": WrongKernel(half_inside, "wrong precision", "differs by"),
    "columns beyond a power of two": WrongKernel(columns_beyond_a_power_of_two, "wrong blocks", "it does not"),
    "keys and values exchanged": WrongKernel(values_for_keys, "wrong roles", "exchanged"),
    "not divided": WrongKernel(attend_without_division, "not normalised", "not divided"),
    "gradient of k unscaled": WrongKernel(
        functools.partial(flash, mistake="k unscaled"), "wrong gradient", "of k is wrong: it is 4 times"
    ),
    "gradients without delta": WrongKernel(
        functools.partial(flash, mistake="without delta"), "wrong gradient", "is not subtracted"
    ),
    "gradients of base 2": WrongKernel(functools.partial(flash, mistake="base two"), "wrong gradient", "ln 2"),
    "gradients of hidden keys": WrongKernel(functools.partial(flash, mistake="unmasked"), "wrong gradient", ""),
    "gradients of one head": WrongKernel(
        functools.partial(flash, mistake="one head of a group"), "wrong gradient", "only the first of the heads"
    ),
    "gradients averaged": WrongKernel(functools.partial(flash, mistake="averaged"), "wrong gradient", "averaged, not summed"),
    "gradients exchanged": WrongKernel(functools.partial(flash, mistake="exchanged"), "wrong gradient", "gradient of k"),
    "a backward of its own, unscaled": WrongKernel(
        attend_detached, "wrong gradient", "the scale", {"backward": backward_without_scale}
    ),
    "the rate kept": WrongKernel(
        with_lse, "wrong dropout", "share that is kept", {"dropout": (functools.partial(drop, kept=0.2), 0.2)}
    ),
    "dropout not divided": WrongKernel(
        with_lse, "wrong dropout", "not divided by 1 - rate", {"dropout": (functools.partial(drop, factor=1.0), 0.2)}
    ),
    "dropout divided by the rate": WrongKernel(
        with_lse, "wrong dropout", "divided by the rate", {"dropout": (functools.partial(drop, factor=5.0), 0.2)}
    ),
    "no dropout": WrongKernel(with_lse, "wrong dropout", "no weight is dropped", {"dropout": (with_lse, 0.2)}),
    "dropout of all heads alike": WrongKernel(
        with_lse, "wrong dropout", "every head drops the same", {"dropout": (functools.partial(drop, is_shared=True), 0.2)}
    ),
    "another output than the reference": WrongKernel(
        with_lse, "wrong context", "the reference", {"reference": lambda q, k, v: 2 * blockwise(q, k, v)[0]}
    ),
}

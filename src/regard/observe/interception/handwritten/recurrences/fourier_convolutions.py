"""Convolutions of tokens with a kernel as long as they are, by products of Fourier transforms, as state spaces compute them.

``y_i = Σ_{j≤i} k_{i-j} u_j`` is the product of transforms of u and k that are padded to twice the length, cut to the length
(https://arxiv.org/abs/2111.00396, https://arxiv.org/abs/2302.10866). Each channel has the matrix of a long `Convolution`.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.map.convolution import Convolution
from regard.observe.interception.attention_call import CallAdapter
from regard.observe.interception.handwritten.products.score_form import COPIES, PRODUCTS, QUOTIENTS
from regard.observe.interception.handwritten.recurrences.followed_function import FollowedFunction
from regard.observe.interception.handwritten.recurrences.loop_check import OTHERWISE, ROUNDINGS
from regard.observe.interception.handwritten.recurrences.state_log import StateLog
from regard.observe.interception.handwritten.recurrences.state_loop import Spectrum
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.provenance import TOKEN, ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors, build_read_call

FORWARD, BACKWARD = {"fft_rfft", "fft_fft"}, {"fft_irfft", "fft_ifft"}
TRANSFORMS = FORWARD | BACKWARD
KERNEL = "by hand: convolution, {}"
GENERATED = "it is a convolution by Fourier transforms whose kernel depends on tokens, or on the batch row"
MIXED = "it is a convolution by Fourier transforms that is not of each channel with a kernel of its own"
SAMPLED_ROWS = 16  # of each matrix, compared with the layer's own output


@dataclass(eq=False)
class FourierConvolution:
    """The convolution of tokens u (..., t) with kernels k, its output (..., t), and whether a token made the kernels."""

    frame: ModuleFrame
    function: str
    tokens: Tensor
    kernels: Tensor
    outputs: Tensor
    is_generated: bool


class FourierConvolutions:
    """The convolutions of one forward."""

    def __init__(self, log: StateLog) -> None:
        self.log = log
        self.convolutions: list[FourierConvolution] = []

    def clear(self) -> None:
        """Forget all of them."""
        self.convolutions.clear()

    def follow_function(self, call: FollowedFunction) -> None:
        """Follow a function of Fourier transforms along the last axis."""
        core, args, y = call.core, call.args, call.y
        if not isinstance(y, Tensor):
            return
        known = [trace if isinstance(trace := call.find(x), Spectrum) else None for x in args]
        first = next((one for one in known if one is not None), None)
        if core in FORWARD:
            dim, n = call.read_argument("dim", 2, -1), call.read_argument("n", 1) or args[0].shape[-1]
            if first is None and dim in (-1, args[0].dim() - 1) and args[0].is_floating_point() and not has_norm(call):
                self.log.put(y, Spectrum((args[0],), n))
        elif first is None:
            return
        elif core in PRODUCTS and len(args) == 2:
            self.multiply_spectra(args, known, y)
        elif core in QUOTIENTS and len(args) == 2 and known[0] is not None and isinstance(args[1], int | float):
            self.log.put(y, known[0]._replace(factor=known[0].factor / args[1]))
        elif core in BACKWARD and len(first.signals) == 2 and not first.is_inverse:
            norm = call.read_argument("norm", 3)
            if norm in (None, "backward", "forward"):
                factor = first.factor * (first.n if norm == "forward" else 1)
                self.log.put(y, first._replace(is_inverse=True, factor=factor))
        elif core in COPIES or core == "real":
            self.log.put(y, first)
        elif first.is_inverse and core in ("getitem", "narrow") and y.dim() == args[0].dim():
            self.cut_convolution(call, first)

    def multiply_spectra(self, args: Any, known: list[Spectrum | None], y: Tensor) -> None:
        """Follow the product of two transforms, or of one with a number."""
        one, other = known
        if one is not None and other is not None:
            if len(one.signals) == len(other.signals) == 1 and one.n == other.n:
                self.log.put(y, Spectrum((*one.signals, *other.signals), one.n, one.factor * other.factor))
            return
        spectrum, by = (one, args[1]) if one is not None else (other, args[0])
        if spectrum is not None and isinstance(by, int | float):
            self.log.put(y, spectrum._replace(factor=spectrum.factor * by))

    def cut_convolution(self, call: FollowedFunction, found: Spectrum) -> None:
        """Keep the first entries of an inverse transform that are the convolution of two signals from their start."""
        frame, y, (one, other), t = call.frame, call.y, found.signals, call.y.shape[-1]
        start = call.args[0][..., :t]
        is_start = start.shape == y.shape and start.data_ptr() == y.data_ptr()
        if not is_start or found.n < 2 * t - 1 or t < 2:
            return
        tokens, kernels = (one, other) if one.numel() >= other.numel() else (other, one)
        if tokens.shape != y.shape or frame.find_contents(weakref.ref(tokens)) != TOKEN:
            return
        is_generated = frame.find_contents(weakref.ref(kernels)) == TOKEN
        scaled = kernels.detach()[..., :t] * found.factor
        own, outputs = (x.detach().clone() for x in (tokens, y))  # which the model may change afterwards
        self.convolutions.append(FourierConvolution(frame, "fft", own, scaled, outputs, is_generated))

    def take(self, frame: ModuleFrame) -> list[FourierConvolution]:
        """Return the convolutions of a module that ends, and forget them."""
        ended = [one for one in self.convolutions if one.frame is frame]
        self.convolutions = [one for one in self.convolutions if one.frame is not frame]
        return ended


def has_norm(call: FollowedFunction) -> bool:
    """Return whether a transform is divided by the length or by its root."""
    return call.read_argument("norm", 3) not in (None, "backward")


def read_convolution(found: FourierConvolution) -> tuple[RecurrenceCall, CallAdapter]:
    """Return a convolution as a call; it has run already. Raises UnreadableError if it is not one of each channel."""
    tokens, outputs, kernels = found.tokens, found.outputs, found.kernels
    t = outputs.shape[-1]
    if found.is_generated or (kernels.dim() >= tokens.dim() and len(kernels) > 1):
        raise UnreadableError(GENERATED)
    if tokens.dim() < 3:
        raise UnreadableError(MIXED)
    channels = tokens.shape[1:-1]
    kernels = kernels.reshape(kernels.shape[-tokens.dim() + 1 :] if kernels.dim() >= tokens.dim() else kernels.shape)
    kernels = kernels.expand(*channels, -1).reshape(channels.numel(), -1)
    values, outputs = (x.flatten(1, -2) for x in (tokens, outputs))
    rows = torch.linspace(0, t - 1, min(t, SAMPLED_ROWS), device=outputs.device).long().unique()
    back = rows.unsqueeze(1) - torch.arange(t, device=rows.device)  # (n, t)
    seen = (back >= 0) & (back < kernels.shape[1])
    entries = kernels.double()[:, back.clamp(0, kernels.shape[1] - 1)].masked_fill(~seen, 0)  # (c, n, t)
    product = torch.einsum("cnt,bct->bcn", entries, values.double())
    size = kernels.double().norm(dim=1).unsqueeze(1) * values.double().norm(dim=2, keepdim=True)  # as transforms round it
    difference = (product - outputs[..., rows].double()).abs()
    if bool((difference > ROUNDINGS * torch.finfo(outputs.dtype).eps * size).any()):
        raise UnreadableError(OTHERWISE.format(float(difference.nan_to_num(torch.inf).amax())))
    mechanism = Convolution(kernel=kernels.flip(1).unsqueeze(0).contiguous(), batch=len(values), length=t)
    factors = RecurrenceFactors(mechanism, values.unsqueeze(3), outputs.unsqueeze(3), None)
    return build_read_call(KERNEL.format(found.function), factors), CallAdapter(lambda: None)

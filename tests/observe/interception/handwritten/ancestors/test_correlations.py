"""Attention whose scores are correlations by Fourier transforms along the tokens is missed; products of features are none."""

import math

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import record_and_compare
from regard.observe.interception.handwritten.handwritten_call import UNFOLLOWED

B, H, T, D = 3, 2, 12, 4
C = H * D


class AutoCorrelation(nn.Module):
    """The attention of Autoformer as its authors wrote it. https://github.com/thuml/Autoformer"""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.q, self.k, self.v, self.out = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (H, D)).permute(0, 2, 3, 1).contiguous() for layer in (self.q, self.k, self.v))
        spectrum = torch.fft.rfft(q, dim=-1) * torch.conj(torch.fft.rfft(k, dim=-1))
        mean = torch.fft.irfft(spectrum, n=T, dim=-1).mean(1).mean(1)  # (b, t)
        count, contexts = int(math.log(T)), torch.zeros_like(v)
        if self.style == "rolled":
            delays = mean.mean(0).topk(count)[1]
            weights = torch.stack([mean[:, delay] for delay in delays], -1).softmax(-1)
        else:
            largest, delays = mean.topk(count, dim=-1)
            weights = largest.softmax(-1)
        for n in range(count):
            if self.style == "rolled":
                moved = v.roll(-int(delays[n]), -1)
            else:
                places = torch.arange(T).expand_as(v) + delays[:, n].view(-1, 1, 1, 1)
                moved = v.repeat(1, 1, 1, 2).gather(-1, places)
            contexts = contexts + moved * weights[:, n].view(-1, 1, 1, 1).repeat(1, H, D, T)
        return self.out(contexts.permute(0, 3, 1, 2).flatten(2))


@pytest.mark.parametrize("style", ["rolled", "gathered"])
def test_attention_to_delays_is_missed(style):
    recording, _ = record_and_compare(AutoCorrelation(style), lambda m: m(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [UNFOLLOWED]


class NoCorrelation(nn.Module):
    """Products of spectra that are no scores: features bound to each other, and a convolution with a learned kernel."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.q, self.k, self.v = style, nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)
        self.kernel = nn.Parameter(torch.randn(C, T))

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "features":
            bound = torch.fft.irfft(torch.fft.rfft(self.q(x)) * torch.fft.rfft(self.k(x)).conj(), n=C)
            return bound.softmax(1) * self.v(x)
        spectrum = torch.fft.rfft(self.q(x).mT) * torch.fft.rfft(self.kernel).conj()
        return torch.fft.irfft(spectrum, n=T).mT.sigmoid() * self.v(x)


@pytest.mark.parametrize("style", ["features", "a learned kernel"])
def test_other_products_of_spectra_are_no_scores(style):
    recording, _ = record_and_compare(NoCorrelation(style), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls

"""Convolutions of tokens by Fourier transforms have the matrix of a long convolution for each channel."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from observe.recording_checks import EQUAL, assert_equal, assert_same_mechanism, record_and_compare
from regard.map.convolution import Convolution
from regard.observe.interception.handwritten.recurrences.fourier_convolutions import GENERATED

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C = 2, 11, 6
Convolve = Callable[[Tensor, Tensor], Tensor]


def multiply_spectra(u: Tensor, k: Tensor) -> Tensor:
    """As S4D's minimal listing. https://arxiv.org/abs/2206.11893"""
    n = 2 * u.shape[-1]
    return torch.fft.irfft(torch.fft.rfft(u, n=n) * torch.fft.rfft(k, n=n), n=n)[..., : u.shape[-1]]


def divide_spectrum(u: Tensor, k: Tensor) -> Tensor:
    """As Hyena. https://arxiv.org/abs/2302.10866"""
    n = 2 * u.shape[-1]
    spectrum = torch.fft.rfft(k, n=n) / n
    return torch.fft.irfft(torch.fft.rfft(u.to(k.dtype), n=n) * spectrum, n=n, norm="forward")[..., : u.shape[-1]]


def multiply_complex(u: Tensor, k: Tensor) -> Tensor:
    n = 3 * u.shape[-1]
    return torch.fft.ifft(torch.fft.fft(k, n) * torch.fft.fft(u, n), n).real.narrow(-1, 0, u.shape[-1])


CONVOLUTIONS: list[Convolve] = [multiply_spectra, divide_spectrum, multiply_complex]


class LongConvolution(nn.Module):
    """A diagonal state space as a convolution, with a skip. https://arxiv.org/abs/2206.11893"""

    def __init__(self, convolve: Convolve, n: int = 4) -> None:
        super().__init__()
        self.convolve, self.inner, self.d = convolve, nn.Linear(5, C), nn.Parameter(torch.randn(C))
        self.log_rates, self.angles, self.out = (nn.Parameter(torch.rand(C, n)) for _ in range(3))

    def compute_kernel(self, t: int) -> Tensor:
        """The kernels (c, t)."""
        powers = torch.arange(t, dtype=self.d.dtype) * self.log_rates.exp().unsqueeze(-1)
        return (self.out.unsqueeze(-1) * torch.exp(-powers) * torch.cos(powers * self.angles.unsqueeze(-1))).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        u = self.inner(x).mT
        return (self.convolve(u, self.compute_kernel(u.shape[-1])) + self.d.unsqueeze(-1) * u).mT


def define(kernel: Tensor) -> Tensor:
    """The matrix (c, t, t) of kernels (c, t)."""
    t = kernel.shape[-1]
    back = torch.arange(t).unsqueeze(-1) - torch.arange(t)
    return kernel[:, back.clamp(min=0)].masked_fill(back < 0, 0)


@pytest.mark.parametrize("convolve", CONVOLUTIONS)
def test_a_convolution_by_transforms_has_the_matrix_of_its_kernel(convolve):
    model, x = LongConvolution(convolve), torch.randn(B, T, 5)
    recording, output = record_and_compare(nn.Sequential(model), lambda model: model(x))
    found = recording.map(0, kind="implicit")
    with torch.no_grad():
        u, kernel = model.inner(x).mT, model.compute_kernel(T)
    assert isinstance(found.mechanism, Convolution)
    assert_equal(found.dense(), define(kernel).expand(B, -1, -1, -1))
    assert_equal((found @ u.unsqueeze(-1)).squeeze(-1).mT + (model.d.unsqueeze(-1) * u).mT.detach(), output.detach())
    assert found.certificate().error < EQUAL
    assert found.mechanism.kernel.numel() == C * T


def test_a_convolution_in_float32_is_compared_with_its_rounding():
    model, x = LongConvolution(multiply_spectra).float(), torch.randn(B, 200, 5, dtype=torch.float32)
    recording, output = record_and_compare(model, lambda model: model(x))
    found, u = recording.map(0, kind="implicit"), recording.values(0, kind="implicit")
    expected = output.mT - model.d.detach().unsqueeze(-1) * u.squeeze(-1)
    assert ((found @ u).squeeze(-1) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_saved_convolution_is_the_same(tmp_path):
    recording, _ = record_and_compare(LongConvolution(multiply_spectra), lambda model: model(torch.randn(B, T, 5)))
    recording.save(tmp_path / "recording")
    found, loaded = (one.map(0, kind="implicit") for one in (recording, regard.load(tmp_path / "recording")))
    assert_same_mechanism(loaded, found)


def generate_kernel(u: Tensor, k: Tensor) -> Tensor:
    return multiply_spectra(u, k * u.mean(-1, keepdim=True))


def generate_and_flip(u: Tensor, k: Tensor) -> Tensor:
    return multiply_spectra(u, u.roll(1, 1))


@pytest.mark.parametrize("convolve", [generate_kernel, generate_and_flip])
def test_a_convolution_with_a_kernel_of_tokens_is_missed(convolve):
    recording, _ = record_and_compare(LongConvolution(convolve), lambda m: m(torch.randn(B, T, 5)), missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [GENERATED]


def wrap_around(u: Tensor, k: Tensor) -> Tensor:
    """Without padding, so that the last tokens reach the first."""
    return torch.fft.irfft(torch.fft.rfft(u) * torch.fft.rfft(k), n=u.shape[-1])


def filter_by_weights(u: Tensor, k: Tensor) -> Tensor:
    """As a global filter, whose weights are the spectrum."""
    return torch.fft.irfft(torch.fft.rfft(u, n=2 * T) * F.pad(k, (0, 1)).to(torch.complex128), n=2 * T)[..., :T]


@pytest.mark.parametrize("convolve", [wrap_around, filter_by_weights])
def test_other_filters_are_neither_recorded_nor_missed(convolve):
    recording, _ = record_and_compare(LongConvolution(convolve), lambda model: model(torch.randn(B, T, 5)))
    assert not recording.calls


@torch.no_grad()
def test_tokens_that_change_in_place_after_their_convolution_are_kept_as_they_were():
    class Changed(LongConvolution):
        def forward(self, x: Tensor) -> Tensor:
            u = self.inner(x).mT.contiguous()
            y = self.convolve(u, self.compute_kernel(T))
            return (y + u.mul_(self.d.unsqueeze(-1))).mT

    model, x = Changed(multiply_spectra), torch.randn(B, T, 5)
    recording, _ = record_and_compare(nn.Sequential(model), lambda model: model(x))
    found, u = recording.map(0, kind="implicit"), model.inner(x).mT
    assert_equal(found.dense(), define(model.compute_kernel(T)).expand(B, -1, -1, -1))
    assert_equal((found @ recording.values(0, kind="implicit")).squeeze(-1), multiply_spectra(u, model.compute_kernel(T)))

"""A matrix that a layer generates for each token is a weight; the attention around it is recorded as its softmax."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

B, N, K, C, H, D = 2, 7, 3, 5, 2, 11  # graphs, tokens, neighbors, channels, heads, width

pytestmark = pytest.mark.usefixtures("in_float64")


class Radial(nn.Module):
    """A matrix of channels for each pair of tokens, made of their distance, times a basis of each pair if there is one."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.shape, self.net = (rows, columns), nn.Sequential(nn.Linear(1, 4), nn.GELU(), nn.Linear(4, rows * columns))

    def forward(self, distances: Tensor, basis: dict[str, Tensor]) -> Tensor:
        kernel = self.net(distances).unflatten(-1, self.shape)
        if not basis:
            return kernel
        turned = sum(kernel[..., None, :, None] * one[..., None, :, None, :] for one in basis.values())
        return turned.flatten(-4, -3).flatten(-2)


class Convolution(nn.Module):
    """Neighbors times a matrix that is generated from their distance, as in SE(3)-Transformers. https://arxiv.org/abs/2006.10503"""

    def __init__(self, rows: int, columns: int, turns: bool, is_pooled: bool = False) -> None:
        super().__init__()
        self.radial, self.turns, self.is_pooled = Radial(rows, columns), turns, is_pooled

    def forward(self, x: Tensor, found: Tensor, distances: Tensor) -> Tensor:
        """x (b, n, c, m) -> (b, n, k, rows, m), or the mean over k."""
        near = x[torch.arange(B)[:, None, None], found]
        one = torch.eye(x.shape[-1])
        basis = {"1": one * distances[..., None], "2": one.cos() - distances[..., None]} if self.turns else {}
        kernel = self.radial(distances, basis)
        y = torch.einsum("...oi,...ic->...oc", kernel, near.reshape(*near.shape[:3], kernel.shape[-1], -1))
        y = y.view(*y.shape[:3], -1, x.shape[-1])
        return y.mean(2) if self.is_pooled else y


class Norm(nn.Module):
    """A nonlinear function of the length of each vector."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        return F.gelu(length) * (x / length)


class NeighborAttention(nn.Module):
    """Attention of each token to its neighbors, whose keys and values are generated convolutions; a softmax for each degree."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.first, self.norm = Convolution(C, C, turns, is_pooled=True), Norm()
        self.num_heads, self.query = H, nn.Linear(C, H * D)
        self.key, self.value = (Convolution(H * D, C, turns) for _ in "kv")

    def forward(self, x: Tensor) -> Tensor:
        distances, found = torch.cdist(x[:, :, 0], x[:, :, 0]).topk(K, largest=False)
        x = self.norm(self.first(x, found, distances.unsqueeze(-1)))
        q = self.query(x.mT).mT.unflatten(2, (H, D)).transpose(1, 2)
        k, v = (
            part(x, found, distances.unsqueeze(-1)).unflatten(3, (H, D)).permute(0, 3, 1, 2, 4, 5)
            for part in (self.key, self.value)
        )
        self.weights = (torch.einsum("bhidm,bhijdm->bhij", q, k) / D**0.5).softmax(-1)
        return torch.einsum("bhij,bhijdm->bhidm", self.weights, v)


class Stack(nn.Module):
    """Two convolutions and a nonlinear function, without attention."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.one, self.two = (Convolution(C, C, turns, is_pooled=True) for _ in "12")
        self.norm = Norm()

    def forward(self, x: Tensor) -> Tensor:
        distances, found = torch.cdist(x[:, :, 0], x[:, :, 0]).topk(K, largest=False)
        x = self.norm(self.one(x, found, distances.unsqueeze(-1)))
        return self.two(x, found, distances.unsqueeze(-1)).flatten(2)


@pytest.mark.parametrize(("turns", "entries"), [(False, 1), (False, 3), (True, 3)])
def test_attention_with_generated_keys_and_values_is_recorded_as_its_softmax_alone(turns, entries):
    model, x = nn.Sequential(NeighborAttention(turns), Stack(turns)), torch.randn(B, N, C, entries)
    model[1].forward = lambda y: Stack.forward(model[1], x + y.mean())
    recording, _ = record_and_compare(model, lambda m: m(x))
    assert [(call.name, call.kind) for call in recording.calls] == [("0", "self")]
    assert recording.map(0).shape == (B * N, H, 1, K)
    weights = model[0].weights.transpose(1, 2).reshape(B * N, H, 1, K)
    assert (recording.map(0).dense() - weights).abs().max() < EQUAL

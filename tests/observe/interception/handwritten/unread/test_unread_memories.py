"""Loops over tokens whose state is a matrix are missed if no map is read from them, also where their writes read the state."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import record_and_compare
from regard.observe.interception.handwritten.unread.unread_recurrences import MEMORY

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, H, D = 2, 11, 2, 3


class Mixer(nn.Module):
    """A layer of projections, whose function mixes their tokens (b, t, h, d)."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.project, self.start = style, nn.Linear(H * D, 6 * H * D), nn.Parameter(torch.randn(H, D, D))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.style)(*self.split(x)).flatten(2)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        r, k, v, w, a, b = self.project(x).view(B, T, 6, H, D).unbind(2)
        return r, F.normalize(k, dim=-1), v, torch.exp(-torch.exp(w)), a.sigmoid(), F.normalize(b, dim=-1)


class Goose(Mixer):
    """RWKV-7. https://arxiv.org/abs/2503.14456"""

    def read_by_vectors(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        state, outputs = torch.zeros(B, H, D, D), []
        for i in range(T):
            removed = (state @ -b[:, i].unsqueeze(-1)) @ (b[:, i] * a[:, i]).unsqueeze(-2)
            state = state * w[:, i].unsqueeze(-2) + removed + v[:, i].unsqueeze(-1) @ k[:, i].unsqueeze(-2)
            outputs.append((state @ r[:, i].unsqueeze(-1)).squeeze(-1))
        return torch.stack(outputs, 1)

    def multiply_matrices(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        state, outputs = torch.zeros(B, H, D, D), torch.empty(B, T, H, D)
        for i in range(T):
            new = v[:, i].unsqueeze(-1) @ k[:, i].unsqueeze(-2)
            removal = (-b[:, i]).unsqueeze(-1) @ (b[:, i] * a[:, i]).unsqueeze(-2)
            state = state * w[:, i, :, None, :] + state @ removal + new
            outputs[:, i] = (state @ r[:, i].unsqueeze(-1)).squeeze(-1)
        return outputs

    def sum_entries(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """With tokens along the axis before the last, as in flash-linear-attention."""
        r, k, v, w, a, b = (x.transpose(1, 2) for x in (r, k, v, w, -b, b * a))
        state, outputs = v.new_zeros(B, H, D, D), torch.zeros_like(v)
        for i in range(T):
            read = (state * a[:, :, i, :, None]).sum(-2, keepdim=True)
            state = state * w[:, :, i, :, None] + (k[:, :, i, :, None] * v[:, :, i, None] + read * b[:, :, i, :, None])
            outputs[:, :, i] = torch.einsum("bhd,bhde->bhe", r[:, :, i], state)
        return outputs.transpose(1, 2)


class Memories(Mixer):
    """Other memories that tokens write to."""

    def multiply_by_reflections(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """A delta rule as products of matrices. https://arxiv.org/abs/2406.06484"""
        state, outputs = torch.zeros(B, H, D, D), []
        for i in range(T):
            key, scaled = k[:, i].unsqueeze(-2), (a[:, i, :, :1] * k[:, i]).unsqueeze(-2)
            state = state @ (torch.eye(D) - scaled.mT * key) + v[:, i].unsqueeze(-1) * scaled
            outputs.append((state @ r[:, i].unsqueeze(-1)).squeeze(-1))
        return torch.stack(outputs, 1)

    def subtract_reads(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        state, outputs = None, []
        for i in range(T):
            scaled, new = (a[:, i, :, :1] * k[:, i]).unsqueeze(-2), v[:, i].unsqueeze(-1)
            state = new @ scaled if state is None else state - (state @ k[:, i].unsqueeze(-1)) @ scaled + new @ scaled
            outputs.append((state @ r[:, i].unsqueeze(-1)).squeeze(-1))
        return torch.stack(outputs, 1)

    def descend(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """TTT-Linear, a step of gradient descent for each token. https://arxiv.org/abs/2407.04620"""
        weight, outputs = self.start.expand(B, H, D, D), []
        for i in range(T):
            error = k[:, i].unsqueeze(-2) @ weight - v[:, i].unsqueeze(-2)
            weight = weight - a[:, i, :, :1, None] * (k[:, i].unsqueeze(-1) @ error)
            outputs.append((r[:, i].unsqueeze(-2) @ weight).squeeze(-2))
        return torch.stack(outputs, 1)

    def descend_through_a_norm(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        weight, outputs = self.start.expand(B, H, D, D), []
        for i in range(T):
            read = F.layer_norm(k[:, i].unsqueeze(-2) @ weight, (D,))
            weight = torch.baddbmm(
                weight.flatten(0, 1), k[:, i].reshape(-1, D, 1), (v[:, i].unsqueeze(-2) - read).flatten(0, 1), alpha=0.1
            ).view(B, H, D, D)
            outputs.append(r[:, i] + F.layer_norm((r[:, i].unsqueeze(-2) @ weight).squeeze(-2), (D,)))
        return torch.stack(outputs, 1)


class ReadOtherwise(Mixer):
    """Memories beside other maps of their module."""

    def transform_by_matrices(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """RWKV-7 by products of matrices, of which those of features with features are no attention."""
        state, outputs = torch.zeros(B, H, D, D), []
        for i in range(T):
            transition = torch.diag_embed(w[:, i]) - torch.einsum("bhi,bhj->bhij", b[:, i], b[:, i] * a[:, i])
            new = torch.einsum("bhi,bhj->bhij", v[:, i], k[:, i])
            state = torch.einsum("bhij,bhjk->bhik", state, transition) + new
            outputs.append(torch.einsum("bhij,bhj->bhi", state, r[:, i]))
        return torch.stack(outputs, 1)

    def descend_with_momentum(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Titans' memory, of one layer. https://arxiv.org/abs/2501.00663"""
        memory, momentum, outputs = torch.zeros(B, H, D, D), torch.zeros(B, H, D, D), []
        for i in range(T):
            error = torch.einsum("bhd,bhde->bhe", k[:, i], memory) - v[:, i]
            momentum = a[:, i, :, :1, None] * momentum - 0.1 * torch.einsum("bhd,bhe->bhde", k[:, i], error)
            memory = w[:, i, :, :1, None] * memory + momentum
            outputs.append(torch.einsum("bhd,bhde->bhe", r[:, i], memory))
        return torch.stack(outputs, 1)

    def attend_beside(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """With attention in the same layer."""
        q, keys, values = r.transpose(1, 2), b.transpose(1, 2), v.transpose(1, 2)
        context = (q @ keys.mT).softmax(-1) @ values
        return context.transpose(1, 2) + Goose.read_by_vectors(self, r, k, v, w, a, b)


@pytest.mark.parametrize("style", ["transform_by_matrices", "descend_with_momentum", "attend_beside"])
def test_a_memory_is_missed_beside_maps_of_something_else(style):
    model = nn.Sequential(ReadOtherwise(style))
    recording, _ = record_and_compare(model, lambda model: model(torch.randn(B, T, H * D)), missing=True)
    assert [(one.module, one.reason) for one in recording.missed] == [("0", MEMORY)]
    assert [call.kind for call in recording.calls] == ["self"] * (style == "attend_beside")


FORMS = [
    *((Goose, one) for one in ("read_by_vectors", "multiply_matrices", "sum_entries")),
    *((Memories, one) for one in ("multiply_by_reflections", "subtract_reads", "descend", "descend_through_a_norm")),
]


@pytest.mark.parametrize(("kind", "style"), FORMS)
def test_a_memory_that_is_not_read_is_missed_by_its_reason(kind, style):
    recording, _ = record_and_compare(nn.Sequential(kind(style)), lambda model: model(torch.randn(B, T, H * D)), missing=True)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [("0", MEMORY)]


@pytest.mark.parametrize("style", ["multiply_matrices", "sum_entries"])
def test_the_spellings_of_rwkv_7_are_one_recurrence(style):
    model, x = Goose("read_by_vectors"), torch.randn(B, T, H * D)
    expected = model(x)
    model.style = style
    torch.testing.assert_close(model(x), expected)


class Others(Mixer):
    """Loops over tokens in which no product of tokens is carried from token to token, or none is read as it grows."""

    def generate_weights(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """A layer of each token, changed by a product of two vectors."""
        outputs = []
        for i in range(T):
            weight = self.start + a[:, i].unsqueeze(-1) * b[:, i].unsqueeze(-2) + k[:, i].unsqueeze(-1) * w[:, i].unsqueeze(-2)
            outputs.append((r[:, i].unsqueeze(-2) @ weight).squeeze(-2))
        return torch.stack(outputs, 1)

    def remember(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """A long short-term memory beside generated weights."""
        cell, hidden, outputs = torch.zeros(B, H, D), torch.zeros(B, H, D), []
        for i in range(T):
            gate = (a[:, i] + torch.einsum("bhd,hde->bhe", hidden, self.start)).sigmoid()
            cell = gate * cell + (1 - gate) * (v[:, i] + hidden).tanh()
            weight = self.start + k[:, i].unsqueeze(-1) * b[:, i].unsqueeze(-2)
            hidden = torch.einsum("bhd,bhde->bhe", cell, weight).tanh()
            outputs.append(hidden)
        return torch.stack(outputs, 1)

    def sum_covariance(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Of which the last sum alone is read."""
        covariance, outputs = torch.zeros(B, H, D, D), []
        for i in range(T):
            covariance = covariance + (k[:, i] - k.mean(1)).unsqueeze(-1) * (k[:, i] - k.mean(1)).unsqueeze(-2)
            outputs.append(v[:, i] * w[:, i])
        return torch.stack(outputs, 1) + torch.einsum("bthd,bhde->bthe", r, covariance)

    def normalize(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """By running means and variances."""
        mean, square, outputs = torch.zeros(B, H, D), torch.zeros(B, H, D), []
        for i in range(T):
            mean, square = 0.9 * mean + 0.1 * k[:, i], 0.9 * square + 0.1 * k[:, i] * k[:, i]
            outputs.append((k[:, i] - mean) / (square + 1e-3).sqrt())
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("style", ["generate_weights", "remember", "sum_covariance", "normalize"])
def test_loops_without_a_memory_are_neither_recorded_nor_missed(style):
    recording, _ = record_and_compare(nn.Sequential(Others(style)), lambda model: model(torch.randn(B, T, H * D)))
    assert not recording.calls

"""Delta rules in chunks of tokens are one recurrence over all tokens with the layer's own values, or are missed."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.interception.handwritten.chunk_forms import ChunkLayer, gate_in_a_loop
from observe.recording_checks import assert_equal, record_and_compare
from regard.map.linear_recurrence import LinearRecurrence
from regard.observe.interception.handwritten.linear.corrected_values import CORRECTED
from regard.observe.interception.handwritten.recurrences.loop_recurrence import GROWS

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, D, E, C, N = 2, 3, 5, 7, 6, 4


def invert(scores: Tensor) -> Tensor:
    """1 over 1 + tril(scores, -1), by forward substitution as flash-linear-attention's naive form writes it."""
    found = -scores.masked_fill(torch.ones(N, N).triu().bool(), 0)
    for i in range(1, N):
        found[..., i, :i] = found[..., i, :i].clone() + (found[..., i, :, None].clone() * found[..., :, :i].clone()).sum(-2)
    return found + torch.eye(N)


def correct(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, logs: Tensor) -> Tensor:
    """delta_rule_chunkwise of flash-linear-attention, without decays. https://arxiv.org/abs/2406.06484"""
    v, scaled = v * beta[..., None], k * beta[..., None]
    q, k, v, scaled = (x.unflatten(2, (-1, N)) for x in (q, k, v, scaled))
    inverse = invert(scaled @ k.mT)
    u, w = inverse @ v, inverse @ scaled
    state, outputs = k.new_zeros(*k.shape[:2], k.shape[-1], E), torch.zeros_like(v)
    for i in range(q.shape[2]):
        one, key = q[:, :, i], k[:, :, i]
        scores = (one @ key.mT).masked_fill_(torch.ones(N, N).triu(1).bool(), 0)
        value = u[:, :, i] - w[:, :, i] @ state
        outputs[:, :, i] = one @ state + scores @ value
        state = state + key.mT @ value
    return outputs.flatten(2, 3)


def correct_with_decays(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, logs: Tensor, times: float = 1.0) -> Tensor:
    """torch_chunk_gated_delta_rule of transformers, with padding. https://arxiv.org/abs/2412.06464"""
    length, room = q.shape[2], -q.shape[2] % N
    q, k, v = (F.pad(x, (0, 0, 0, room)) for x in (q, k, v))
    beta, logs = (F.pad(x, (0, room)) for x in (beta, logs))
    q, k, v, scaled_v, scaled = (x.unflatten(2, (-1, N)) for x in (q, k, v, v * beta[..., None], k * beta[..., None]))
    sums = logs.unflatten(2, (-1, N)).cumsum(-1)
    decays = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril().exp().tril()
    inverse = invert(scaled @ k.mT * decays)
    u, w = inverse @ scaled_v, inverse @ (scaled * sums.exp()[..., None])
    state, outputs = k.new_zeros(*k.shape[:2], k.shape[-1], E), torch.zeros_like(v)
    for i in range(q.shape[2]):
        one, key, own = q[:, :, i], k[:, :, i], sums[:, :, i]
        scores = (one @ key.mT * decays[:, :, i]).masked_fill_(torch.ones(N, N).triu(1).bool(), 0)
        value = u[:, :, i] - times * (w[:, :, i] @ state)
        outputs[:, :, i] = (one * own[..., None].exp()) @ state + scores @ value
        state = state * own[..., -1, None, None].exp() + (key * (own[..., -1:] - own).exp()[..., None]).mT @ value
    return outputs.flatten(2, 3)[:, :, :length]


def correct_before_outputs(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, logs: Tensor) -> Tensor:
    """The states first, then the outputs of all chunks at once, as flash-linear-attention's kernels order them."""
    q, k, v, beta = (x.unflatten(2, (-1, N)) for x in (q, k, v, beta[..., None]))
    inverse = invert(beta * k @ k.mT)
    state, states, written = k.new_zeros(B, H, D, E), [], []
    for i in range(q.shape[2]):
        states.append(state)
        written.append(inverse[:, :, i] @ (beta[:, :, i] * (v[:, :, i] - k[:, :, i] @ state)))
        state = state + k[:, :, i].mT @ written[-1]
    return (q @ torch.stack(states, 2) + (q @ k.mT).tril() @ torch.stack(written, 2)).flatten(2, 3)


def correct_all_tokens(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, logs: Tensor) -> Tensor:
    """All tokens as one chunk, without a state."""
    beta = beta[..., None]
    lower = torch.eye(q.shape[2]) + (beta * k @ k.mT).tril(-1)
    return (q @ k.mT).tril() @ torch.linalg.solve_triangular(lower, beta * v, upper=False)


def correct_without_tokens_own_keys(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, logs: Tensor) -> Tensor:
    """Values that are mixed by other products of the keys than those of a delta rule."""
    return (q @ k.mT).tril() @ (v + (k @ k.mT).tril(-1) @ v)


class DeltaLayer(nn.Module):
    """A layer that projects its input, and applies a delta rule in chunks."""

    def __init__(self, form) -> None:
        super().__init__()
        self.form = form
        self.keys, self.values, self.gates = nn.Linear(C, 2 * H * D), nn.Linear(C, H * E), nn.Linear(C, 2 * H)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.keys(x).chunk(2, -1))
        k, v = F.normalize(k, dim=-1), self.values(x).unflatten(-1, (H, E))
        beta, logs = self.gates(x).transpose(1, 2).chunk(2, 1)
        parts = q, k, v.transpose(1, 2), beta.sigmoid(), F.logsigmoid(logs)
        self.parts = [one.detach() for one in parts]
        self.output = self.form(*parts)
        return self.output.transpose(1, 2).flatten(2)


def compute_matrix(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, logs: Tensor, decays: bool) -> Tensor:
    """Compute the matrix (b, h, t, t), token by token: what the rule makes of values that are rows of the identity."""
    t = q.shape[2]
    state, rows = q.new_zeros(B, H, q.shape[3], t), []
    for i in range(t):
        state = state * logs[:, :, i, None, None].exp() if decays else state
        value = beta[:, :, i, None] * (torch.eye(t)[i] - (k[:, :, i, None] @ state).squeeze(2))
        state = state + k[:, :, i, :, None] * value.unsqueeze(2)
        rows.append((q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize(
    ("form", "t"),
    [
        *((correct, 12), (correct_with_decays, 12), (correct_with_decays, 14)),
        *((correct, N), (correct_with_decays, N), (correct_with_decays, N - 1)),  # a single chunk
        *((correct_before_outputs, 12), (correct_before_outputs, N), (correct_all_tokens, 13), (correct_all_tokens, N)),
    ],
)
def test_a_delta_rule_in_chunks_has_the_matrix_of_the_layers_own_values(form, t, has_gradients):
    layer, x = DeltaLayer(form), torch.randn(B, t, C)
    with torch.set_grad_enabled(has_gradients):
        recording, _ = record_and_compare(nn.Sequential(layer), lambda m: m(x), keep="values")
    found = recording.map(0, kind="implicit")
    assert isinstance(found.mechanism, LinearRecurrence)
    assert found.mechanism.beta is not None
    assert_equal(recording.values(0, kind="implicit"), layer.parts[2])
    assert_equal(found.dense(), compute_matrix(*layer.parts, form is correct_with_decays))
    assert_equal(found.dense() @ layer.parts[2], layer.output.detach())


def mix_values(k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """What the inverse, which is freed, makes of values and keys."""
    inverse = invert(beta * k @ k.mT)
    return inverse @ (beta * v), inverse @ (beta * k)


def correct_in_a_loop(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, logs: Tensor) -> Tensor:
    state, outputs = k.new_zeros(*k.shape[:2], k.shape[-1], E), []
    for i in range(0, q.shape[2], N):
        one, key, value, b = (x[:, :, i : i + N] for x in (q, k, v, beta[..., None]))
        u, w = mix_values(key, value, b)
        written = u - w @ state
        outputs.append(one @ state + (one @ key.mT).tril() @ written)
        state = state + key.mT @ written
    return torch.cat(outputs, 2)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("sizes", [(7, 5, 7), (5, 5, 7), (5, 5, 5), (4, 7, 4)])
@pytest.mark.parametrize("form", [correct, correct_with_decays, correct_before_outputs, correct_all_tokens, correct_in_a_loop])
def test_chunks_as_long_as_they_are_wide_are_recorded(form, sizes, chunks, monkeypatch):
    for name, size in zip(("N", "D", "E"), sizes, strict=True):
        monkeypatch.setattr(sys.modules[__name__], name, size)
    layer = DeltaLayer(form)
    recording, _ = record_and_compare(nn.Sequential(layer), lambda m: m(torch.randn(B, chunks * N, C)), keep="values")
    assert len(recording.calls) == 1
    assert_equal(recording.values(0, kind="implicit"), layer.parts[2])
    assert_equal(recording.map(0, kind="implicit").dense(), compute_matrix(*layer.parts, form is correct_with_decays))


@pytest.mark.parametrize("form", [correct, correct_with_decays, correct_before_outputs])
def test_chunks_of_one_token_are_recorded_and_nothing_of_them_is_missed(form, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "N", 1)
    layer = DeltaLayer(form)
    recording, _ = record_and_compare(nn.Sequential(layer), lambda m: m(torch.randn(B, 11, C)), keep="values")
    assert len(recording.calls) == 1
    assert_equal(recording.values(0, kind="implicit"), layer.parts[2])
    assert_equal(recording.map(0, kind="implicit").dense(), compute_matrix(*layer.parts, form is correct_with_decays))


def test_a_loop_of_which_chunks_make_their_values_by_a_layer_is_missed_beside_them():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.other = nn.Linear(C, C), ChunkLayer(gate_in_a_loop, 2, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y, state, rows = self.tokens(x), x.new_zeros(B, C, C), []
            for i in range(x.shape[1]):
                state = 1.5 * state + y[:, i, :, None] * x[:, i, None]
                rows.append((y[:, i, None] @ state).squeeze(1))
            return self.other.mix(self.other.project(torch.stack(rows, 1)))

    recording, _ = record_and_compare(Two(), lambda m: m(torch.randn(B, 12, C)), missing=True)
    assert len(recording.calls) == 1
    assert [one.reason for one in recording.missed] == [GROWS]


def test_what_is_written_otherwise_by_what_the_state_holds_is_missed():
    layer = DeltaLayer(lambda *parts: correct_with_decays(*parts, 0.5))
    recording, _ = record_and_compare(nn.Sequential(layer), lambda m: m(torch.randn(B, 12, C)), missing=True)
    assert not recording.calls
    assert [CORRECTED in one.reason for one in recording.missed] == [True]


def test_values_that_products_of_keys_mix_otherwise_are_missed():
    layer = DeltaLayer(correct_without_tokens_own_keys)
    recording, _ = record_and_compare(nn.Sequential(layer), lambda m: m(torch.randn(B, 13, C)), missing=True, keep="values")
    assert_equal(recording.values(0, kind="implicit"), layer.parts[2])  # of the product behind
    assert len(recording.calls) == 1
    assert [CORRECTED in one.reason for one in recording.missed] == [True]


def test_a_delta_rule_without_an_axis_of_heads_has_the_values_of_the_layer():
    class OneHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(C, 2 * D + E + 1)

        def forward(self, x: Tensor) -> Tensor:
            q, k, self.v, beta = self.project(x).split((D, D, E, 1), -1)
            k, state, outputs = F.normalize(k, dim=-1), x.new_zeros(B, D, E), []
            for i in range(0, x.shape[1], N):
                one, key, v, b = (y[:, i : i + N] for y in (q, k, self.v, beta.sigmoid()))
                lower = torch.eye(one.shape[1]) + (b * key @ key.mT).tril(-1)
                value = torch.linalg.solve_triangular(lower, b * (v - key @ state), upper=False)
                outputs.append(one @ state + (one @ key.mT).tril() @ value)
                state = state + key.mT @ value
            return torch.cat(outputs, 1)

    for t in (12, N, N - 1):
        model = OneHead()
        recording, output = record_and_compare(nn.Sequential(model), lambda m, t=t: m(torch.randn(B, t, C)), keep="values")
        assert recording.map(0, kind="implicit").mechanism.beta is not None
        assert_equal(recording.values(0, kind="implicit")[:, 0], model.v.detach())
        assert_equal((recording.map(0, kind="implicit").dense()[:, 0] @ model.v).detach(), output.detach())


def test_a_delta_rule_behind_other_chunks_has_the_values_of_the_layer_too():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.beta = ChunkLayer(gate_in_a_loop, 2, 3, 3), nn.Linear(C, 3 * H * E), nn.Linear(C, H)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first.mix(self.first.project(x)).transpose(1, 2).flatten(2)
            q, k, v = (one.unflatten(-1, (H, E)).transpose(1, 2) for one in self.second(y).chunk(3, -1))
            parts = q, F.normalize(k, dim=-1), v, self.beta(x).transpose(1, 2)
            self.parts = [one.detach() for one in parts]
            return correct(*parts, x)

    model, x = Two(), torch.randn(B, 12, C)
    recording, _ = record_and_compare(nn.Sequential(model), lambda m: m(x))
    first, second = recording.calls
    assert first.map.mechanism.beta is None
    assert_equal(second.map.dense(), compute_matrix(*model.parts, x, False))

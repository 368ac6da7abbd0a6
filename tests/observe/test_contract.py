"""The contract of what is recorded (docs/record.md): calls, other weights, missed, and what is not seen, on small models."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard

B, H, T, D = 2, 3, 7, 5
C = H * D


class Projected(nn.Module):
    """A layer that projects queries, keys and values; its class is not called attention unless a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)

    def project(self, x: Tensor) -> list[Tensor]:
        return [part(x).unflatten(-1, (H, D)).transpose(1, 2) for part in (self.q, self.k, self.v)]


class Kernel(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.project(x), is_causal=True)


class ByHand(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return (q @ k.mT / D**0.5).softmax(-1) @ v


class Activated(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return (q @ k.mT).relu() @ v


class OfDistances(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (-torch.cdist(x, x)).softmax(-1) @ x


class Named(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return regard.attends((q @ k.mT).tril(), v)


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(C, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(x).softmax(1) * x).sum(1)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(C, 4), nn.ModuleList(nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        return torch.einsum("bte,bted->btd", self.gate(x).softmax(-1), outputs)


class Predicted(nn.Module):
    """Weights of places that each token predicts without keys. https://arxiv.org/abs/2005.00743"""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.value = nn.Linear(C, T), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.place(x).softmax(-1) @ self.value(x)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose, self.codes = nn.Linear(C, 11), nn.Parameter(torch.randn(11, C))

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(x).softmax(-1) @ self.codes


class Memory(Projected):
    """A loop over tokens that a model writes out: linear attention, one token after the other."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        state, outputs = q.new_zeros(B, H, D, D), []
        for i in range(x.shape[1]):
            state = state + k[:, :, i, :, None] * v[:, :, i, None]
            outputs.append((q[:, :, i, None] @ state).squeeze(-2))
        return torch.stack(outputs, 2)


class MemoryAttention(Memory):
    """The same, called attention."""


class OnlineSoftmaxAttention(Projected):
    """A softmax over blocks of keys with a running maximum."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        largest, total, context = q.new_full((B, H, T, 1), -torch.inf), q.new_zeros(B, H, T, 1), torch.zeros_like(q)
        for keys, values in zip(k.split(3, 2), v.split(3, 2), strict=True):
            scores = q @ keys.mT
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, old = (scores - new).exp(), (largest - new).exp()
            total, context, largest = total * old + weights.sum(-1, keepdim=True), context * old + weights @ values, new
        return context / total


class BlocksOfKeysAttention(Projected):
    """The same without a maximum: exponentials of blocks of keys, which are divided by the sums of all."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        weights = [(q @ keys.mT).exp() for keys in k.split(3, 2)]
        context = sum(part @ values for part, values in zip(weights, v.split(3, 2), strict=True))
        return context / sum(part.sum(-1, keepdim=True) for part in weights)


class MergedBlocks(Projected):
    """A softmax of each block of keys, whose contexts are merged by the logarithms of their sums."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = [q @ keys.mT for keys in k.split(4, 2)]
        contexts = [part.softmax(-1) @ values for part, values in zip(scores, v.split(4, 2), strict=True)]
        merged = torch.stack([part.logsumexp(-1) for part in scores], -1).softmax(-1)
        return (torch.stack(contexts, -2) * merged.unsqueeze(-1)).sum(-2)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).sigmoid() * x


def record_alone(module: nn.Module) -> tuple[regard.Recording, Tensor, Tensor]:
    """Return the recording of a module, its input and its output, which is that without a recording to the bit."""
    torch.manual_seed(3)
    model, x = nn.Sequential(module).double(), torch.randn(B, T, C, dtype=torch.float64)
    plain = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with regard.record(model, keep="values") as recording:
            output = model(x)
    assert torch.equal(plain, output)
    return recording, x, output


@pytest.mark.parametrize("kind", [Kernel, ByHand, OfDistances])
def test_a_softmax_of_pairs_of_tokens_is_a_call_whose_map_gives_the_output(kind):
    recording, _, output = record_alone(kind())
    assert (recording.names, recording.missed, recording.other_weights) == (["0"], [], [])
    context = recording.map(0) @ recording.values(0)
    torch.testing.assert_close(context, output.unflatten(0, (B, -1)) if output.dim() == 3 else output)
    assert recording.map(0).certificate().error < 1e-12


@pytest.mark.parametrize("kind", [Activated, Named])
def test_an_activation_of_a_product_and_weights_that_code_names_are_calls_without_a_softmax(kind):
    recording, _, output = record_alone(kind())
    assert (recording.names, recording.missed, recording.other_weights) == (["0"], [], [])
    found = recording.map(0, kind="implicit")
    torch.testing.assert_close(found @ recording.values(0, kind="implicit"), output)


@pytest.mark.parametrize("kind", [Pooling, Router, Codebook, Predicted])
def test_normalized_weights_of_no_pair_of_tokens_are_kept_and_are_no_attention(kind, tmp_path):
    recording, _, _ = record_alone(kind())
    assert (recording.calls, recording.missed) == ([], [])
    (found,) = recording.other_weights
    assert (found.module, found.kernel.split()[0]) == ("0", "softmax")
    assert torch.allclose(found.weights.sum(1 if kind is Pooling else -1), torch.ones((), dtype=torch.float64))
    recording.save(tmp_path / "recording")
    (loaded,) = regard.load(tmp_path / "recording").other_weights
    assert torch.equal(loaded.weights, found.weights)
    assert (loaded.module, loaded.kernel) == (found.module, found.kernel)


@pytest.mark.parametrize("kind", [MemoryAttention, OnlineSoftmaxAttention, BlocksOfKeysAttention])
def test_a_module_called_attention_of_which_nothing_was_recorded_is_missed_and_named_in_one_sentence(kind):
    recording, _, _ = record_alone(kind())
    assert (recording.calls, recording.other_weights, [one.module for one in recording.missed]) == ([], [], ["0"])
    assert "regard.attends" in recording.missed[0].reason
    assert str(recording).count("\n") == 1
    assert "Nothing was recorded of 0: " in str(recording)
    with pytest.raises(regard.ConfigError, match=r"Nothing was recorded of 0: .*regard\.attends"):
        regard.page(recording, "unwritten.html")


def test_a_sentence_names_at_most_three_modules():
    torch.manual_seed(3)
    model = nn.ModuleList(MemoryAttention() for _ in range(5))
    model.forward = lambda x: [part(x) for part in model]
    with pytest.warns(UserWarning, match="not recorded"), regard.record(model) as recording:
        model(torch.randn(B, T, C))
    assert "Nothing was recorded of 0, 1, 2 and 2 more: " in str(recording)


@pytest.mark.parametrize("kind", [Memory, Gate])
def test_everything_else_is_not_seen(kind):
    recording, _, _ = record_alone(kind())
    assert (recording.calls, recording.other_weights, recording.missed) == ([], [], [])


def test_blocks_that_are_merged_are_calls_and_the_weights_that_merge_them_are_not():
    recording, _, _ = record_alone(MergedBlocks())
    assert [call.map.shape for call in recording.calls] == [(B, H, T, 4), (B, H, T, 3)]
    assert [found.weights.shape for found in recording.other_weights] == [(B, H, T, 2, 1)]

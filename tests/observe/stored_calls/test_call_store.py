"""What is stored of a call: no unwritten slots of a cache, and a bias of distances by its diagonals."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from observe.recording_checks import EQUAL
from regard.errors import ConfigError
from regard.observe import record

B, H, G, D, SLOTS, PROMPT, TOKENS = 2, 6, 3, 5, 17, 4, 7
SOFTCAP = 2.0


class CachedHeads(nn.Module):
    """Attention to all slots of a cache, by hand or by a kernel, with its own weights kept."""

    def __init__(self, form: str, slots: int = SLOTS) -> None:
        super().__init__()
        self.form, self.at, self.weights = form, 0, []
        for name in "qkv":
            heads = H if name == "q" else G
            self.register_parameter(name, nn.Parameter(torch.randn(heads, H, D)))
        self.register_buffer("slots", torch.zeros(2, B, G, slots, D))
        self.register_buffer("sinks", torch.linspace(-1, 1, H).view(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btc,hcd->bhtd", x, one) for one in (self.q, self.k, self.v))
        t = x.shape[1]
        self.slots[:, :, :, self.at : self.at + t] = torch.stack([k, v])
        k, v = (one.repeat_interleave(H // G, 1) for one in self.slots)
        shown = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril()[self.at : self.at + t]
        self.at += t
        scores = q @ k.mT / math.sqrt(D)
        if self.form == "a mask that is added after a softcap":
            weights = (SOFTCAP * torch.tanh(scores / SOFTCAP) + shown).softmax(-1)
        elif self.form.startswith("a mask in a bias"):
            padded = torch.arange(k.shape[2]) < torch.arange(B).view(-1, 1, 1, 1) * 2
            slopes = torch.linspace(0.1, 1, H).view(H, 1, 1) * torch.arange(k.shape[2])
            smallest = torch.finfo(x.dtype).min if self.form.endswith("smallest") else -1e9
            bias = slopes + torch.zeros(()).masked_fill(~shown | padded, smallest)
            weights = (scores + bias).softmax(-1)
        elif self.form == "sinks":
            weights = torch.cat([scores, self.sinks.expand(B, H, t, 1)], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        self.weights.append(weights)
        return F.scaled_dot_product_attention(q, k, v) if self.form == "a kernel" else weights @ v


@pytest.mark.parametrize("form", ["a mask that is added after a softcap", "sinks", "no mask", "a kernel"])
def test_unwritten_slots_that_a_model_attends_to_are_a_sink(form, in_float64):
    torch.manual_seed(7)
    model = nn.Sequential(CachedHeads(form))
    with torch.no_grad(), record(model, keep="values") as recording:
        outputs = [model(torch.randn(B, n, H)) for n in (PROMPT, *[1] * (TOKENS - PROMPT))]
    (run,), own = recording.runs, model[0].weights
    assert not recording.missed
    assert [call.map.shape[2:] for call in run.calls] == [(PROMPT, PROMPT), *((1, n) for n in range(PROMPT + 1, TOKENS + 1))]
    written = range(PROMPT, TOKENS + 1)
    expected = torch.cat([F.pad(one[..., :n], (0, TOKENS - n)) for one, n in zip(own, written, strict=True)], 2)
    joined = run.map(0)
    torch.testing.assert_close(joined.dense(), expected, rtol=0, atol=EQUAL)
    context = joined.dense() @ run.values(0)
    torch.testing.assert_close(context, torch.cat(outputs, 2), rtol=0, atol=EQUAL)
    assert any("unwritten slots of a cache or padding" in note for note in recording.notes)


@pytest.mark.parametrize("form", ["a mask in a bias, the smallest", "a mask in a bias, -1e9"])
def test_slots_that_a_bias_hides_are_no_sink(form, in_float64):
    torch.manual_seed(7)
    model = nn.Sequential(CachedHeads(form))
    with torch.no_grad(), record(model) as recording:
        for n in (PROMPT, *[1] * (TOKENS - PROMPT)):
            model(torch.randn(B, n, H))
    assert not recording.missed
    own = torch.cat([one[..., :TOKENS] for one in model[0].weights], 2)
    is_token = torch.arange(TOKENS) >= torch.arange(B).unsqueeze(-1) * 2
    found, expected = (x.transpose(1, 2)[is_token] for x in (recording.map(0).dense(), own))
    torch.testing.assert_close(found, expected, rtol=0, atol=EQUAL)
    assert not any("unwritten" in note for note in recording.notes)


def test_steps_with_unwritten_slots_and_one_without_are_no_single_map(in_float64):
    torch.manual_seed(7)
    model = nn.Sequential(CachedHeads("no mask", slots=TOKENS))
    with torch.no_grad(), record(model) as recording:
        for n in (PROMPT, *[1] * (TOKENS - PROMPT)):
            model(torch.randn(B, n, H))
    for call, own in zip(recording.calls, model[0].weights, strict=True):
        torch.testing.assert_close(call.map.dense(), own[..., : call.map.shape[3]], rtol=0, atol=EQUAL)
    with pytest.raises(ConfigError, match="recording\\['0'\\] has the map of each"):
        recording.map(0)


class Distances(nn.Module):
    """Attention whose scores have a number for each distance and head added, as T5's, under a mask or none."""

    def __init__(self, activation: str, is_causal: bool) -> None:
        super().__init__()
        self.activation, self.is_causal = activation, is_causal
        self.project, self.table = nn.Linear(H * D, 2 * H * D), nn.Embedding(32, H)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        q, k = self.project(x).unflatten(-1, (2, H, D)).permute(2, 0, 3, 1, 4)
        distance = (torch.arange(t) - torch.arange(t).unsqueeze(-1)).clamp(-9, 22) + 9
        scores = q @ k.mT + self.table(distance).permute(2, 0, 1)
        if self.is_causal:
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        self.weights = scores.softmax(-1) if self.activation == "softmax" else scores.relu()
        return self.weights @ k


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("activation", ["softmax", "relu"])
def test_a_bias_of_distances_is_stored_by_its_diagonals(activation, is_causal, in_float64, tmp_path):
    torch.manual_seed(7)
    model, kept, kind = nn.Sequential(Distances(activation, is_causal)), [], "self" if activation == "softmax" else "implicit"
    for t in (31, 62):
        with torch.no_grad(), record(model) as recording:
            model(torch.randn(B, t, H * D))
        recording.save(tmp_path / "recording")
        for one in (recording, regard.load(tmp_path / "recording")):
            torch.testing.assert_close(one.map(0, kind=kind).dense(), model[0].weights, rtol=0, atol=EQUAL)
        kept.append(recording.map(0, kind=kind).nbytes)
    assert kept[1] <= 2 * kept[0] + H * 8  # 2 t - 1 diagonals of 8 bytes
    assert not recording.notes

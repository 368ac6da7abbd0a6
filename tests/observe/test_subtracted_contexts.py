"""Differential attention that subtracts contexts has a signed map, whose rows times the values are the module's own output."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

import regard
from examination.wrong_designs import Differential
from regard import load
from regard.cli.look import describe_kind
from regard.observe import record
from regard.observe.interception import function_mode

B, T, D, H = 2, 7, 5, 3
EXACT = {"rtol": 0, "atol": 1e-12}


def make_diffllama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, eos_token_id=None))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5)
    return model.double().eval()


def collect_outputs(model) -> list[Tensor]:
    """What each layer gives to its norm, (b, h, q, e), as it runs."""
    found: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.groupnorm.register_forward_pre_hook(lambda _, args: found.append(args[0].detach().transpose(1, 2)))
    return found


@torch.no_grad()
def test_the_signed_map_of_diffllama_times_its_values_is_its_own_output(tmp_path):
    model, ids = make_diffllama(), torch.randint(0, 64, (B, T))
    expected = model(ids).logits
    outputs = collect_outputs(model)
    with record(model) as recording:
        assert torch.equal(model(ids).logits, expected)
    assert not recording.missed
    recording.save(tmp_path / "one.reg")
    for one in (recording, load(tmp_path / "one.reg")):
        assert one.layers("implicit") == one.layers()
        for layer, output in enumerate(outputs):
            signed = one.map(layer, kind="implicit").dense()
            assert signed.min() < 0
            assert (signed.triu(1) == 0).all()
            torch.testing.assert_close(signed @ one.values(layer, kind="implicit"), output, **EXACT)
            first, second = one.map(layer).dense().double().chunk(2, 1)
            attention = model.model.layers[layer].self_attn
            lambdas = [
                (getattr(attention, f"lambda_q{n}") * getattr(attention, f"lambda_k{n}")).sum().float().exp() for n in (1, 2)
            ]
            factor = (lambdas[0] - lambdas[1]).double() + attention.lambda_init
            torch.testing.assert_close(signed, first - factor * second, rtol=0, atol=1e-6)  # lambda is of float32


@torch.no_grad()
def test_the_steps_of_a_generation_are_one_signed_map():
    model, ids = make_diffllama(), torch.randint(0, 64, (B, T))
    outputs = collect_outputs(model)
    with record(model) as recording:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    for layer in range(2):
        signed = recording.map(layer, kind="implicit")
        assert signed.shape == (B, 4, T + 3, T + 3)
        output = torch.cat(outputs[layer::2], 2)
        torch.testing.assert_close(signed.dense() @ recording.values(layer, kind="implicit"), output, **EXACT)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Subtracts(Differential):
    """Differential attention of two calls, whose contexts a function joins; the output is kept."""

    def __init__(self, combine, dropout=0.0):
        super().__init__()
        self.join, self.dropout = combine, dropout

    def forward(self, x):
        q, k = (f(x).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4) for f in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (2, -1)).transpose(1, 2)
        contexts = [F.scaled_dot_product_attention(a, b, v, None, self.dropout, True) for a, b in zip(q, k, strict=True)]
        self.output = self.join(*contexts, self.get_lambda(), v)
        return self.o_proj(self.output.transpose(1, 2).flatten(2))


JOINED = {
    "subtracted": lambda first, second, factor, v: first - factor * second,
    "by a function": lambda first, second, factor, v: torch.sub(first, second * factor),
    "added, negative": lambda first, second, factor, v: first + -factor * second,
    "a factor of each head": lambda first, second, factor, v: first - torch.tensor([0.3, 0.7]).view(2, 1, 1) * second,
    "in place": lambda first, second, factor, v: first.sub_(factor * second),
    "by an operator in place": lambda first, second, factor, v: operator.isub(first, factor * second),
    "with alpha": lambda first, second, factor, v: torch.sub(first, second, alpha=float(factor)),
    "from the right": lambda first, second, factor, v: torch.rsub(factor * second, first),
    "added to a negative": lambda first, second, factor, v: -factor * second + first,
    "a product added": lambda first, second, factor, v: torch.addcmul(first, second, -factor),
    "a product of a number added": lambda first, second, factor, v: torch.addcmul(first, second, factor, value=-1),
    "extrapolated": lambda first, second, factor, v: torch.lerp(first, second, -float(factor)),
    "both by factors": lambda first, second, factor, v: 0.7 * first - factor * second,
    "of merged heads": lambda first, second, factor, v: (
        (merge(first) - factor * merge(second)).unflatten(2, (2, -1)).transpose(1, 2)
    ),
    "in another layout": lambda first, second, factor, v: (
        first.transpose(1, 2) - factor * second.transpose(1, 2)
    ).mT.mT.transpose(1, 2),
}


@torch.no_grad()
@pytest.mark.parametrize("name", JOINED)
def test_two_calls_of_a_kernel_are_one_signed_map(name):
    torch.manual_seed(0)
    model = Subtracts(JOINED[name]).double()
    x = torch.randn(B, T, model.q_proj.in_features, dtype=torch.float64)
    with record(model) as recording:
        model(x)
    signed = recording.map(0, kind="implicit")
    torch.testing.assert_close(signed.dense() @ recording.values(0, kind="implicit"), model.output, **EXACT)
    assert [call.kind for call in recording[""]] == ["self", "self", "implicit"]


OTHERS = {
    "added": lambda first, second, factor, v: first + factor * second,
    "less the values": lambda first, second, factor, v: first - v,
    "less a mean": lambda first, second, factor, v: first - first.mean(-1, keepdim=True),
    "of a part of the queries": lambda first, second, factor, v: first[:, :, 1:] - factor * second[:, :, 1:],
    "less noise": lambda first, second, factor, v: first - factor * (second + 1e-6 * torch.randn_like(second)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", OTHERS)
def test_other_differences_have_no_signed_map(name):
    torch.manual_seed(0)
    model = Subtracts(OTHERS[name]).double()
    model.o_proj = nn.Identity()
    with record(model) as recording:
        model(torch.randn(B, T, model.q_proj.in_features, dtype=torch.float64))
    assert not recording.layers("implicit")
    assert len(recording[""]) == 2


@torch.no_grad()
def test_what_is_subtracted_by_a_factor_of_each_query_is_noted():
    torch.manual_seed(0)
    model = Subtracts(lambda first, second, factor, v: first - v.mean(-1, keepdim=True).sigmoid() * second).double()
    with record(model) as recording:
        model(torch.randn(B, T, model.q_proj.in_features, dtype=torch.float64))
    assert not recording.layers("implicit")
    assert any("by a factor of each query" in note for note in recording.notes)


@torch.no_grad()
def test_contexts_of_dropped_weights_are_noted():
    torch.manual_seed(0)
    model = Subtracts(JOINED["subtracted"], dropout=0.5).double()
    with record(model) as recording:
        model(torch.randn(B, T, model.q_proj.in_features, dtype=torch.float64))
    assert not recording.layers("implicit")
    assert any("as after dropout" in note for note in recording.notes)


@pytest.mark.parametrize("kind", [None, "implicit"])
def test_a_rollout_is_of_the_softmaxes_or_of_the_signed_map(kind):
    model, ids = make_diffllama(), torch.randint(0, 64, (B, T))
    with torch.no_grad(), record(model) as recording:
        model(ids)
    expected = torch.eye(T, dtype=torch.float64).expand(B, T, T)
    for layer in range(2):
        mean = recording.map(layer, kind=kind or "self").dense().double().mean(1)
        expected = (mean @ expected + expected) / 2
    torch.testing.assert_close(regard.rollout(recording, kind=kind).double(), expected, rtol=0, atol=1e-10)
    assert not any("softmax" in note for note in regard.heads(recording).notes)
    assert describe_kind(recording, "self") == "Differences of softmaxes have signed maps: --attention implicit."


def test_the_pull_of_calls_on_parts_of_the_values_is_that_of_their_one_map():
    model, ids = make_diffllama(), torch.randint(0, 64, (B, T))
    with record(model, keep="values") as recording:
        number = model(ids).logits[0, -1, 3]
    found = recording.attribute(number)
    gradients, _ = found.gradients_and_contexts(1)
    expected = torch.einsum("bhqe,bhke->bhqk", gradients, recording.values(1).repeat_interleave(2, 1))
    weights = recording.map(1).dense()
    torch.testing.assert_close(found.map(1).dense(), weights * expected, rtol=0, atol=1e-10)
    assert found.relevance(-1).shape == (B, T)


@torch.no_grad()
def test_sums_that_no_contexts_can_be_subtracted_in_are_not_compared(monkeypatch):
    class Adds(nn.Module):
        def forward(self, x):
            y = F.scaled_dot_product_attention(x, x, x)
            for _ in range(5):
                y = y + x
            return y + torch.zeros(1, H, T, T).add(1).sum()

    compared: list[str] = []
    monkeypatch.setattr(function_mode, "read_subtraction", lambda made, name, *given: compared.append(name))
    model = nn.Sequential(Adds())
    with record(model) as recording:
        model(torch.randn(B, H, T, D))
    assert len(recording.calls) == 1
    assert not compared

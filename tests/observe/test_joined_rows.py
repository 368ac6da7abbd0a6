"""Attention that is computed query by query in one forward is one map of the module."""

import pytest
import torch
from torch import Tensor, nn
from transformers import DiffLlamaConfig, DiffLlamaModel

import regard
from regard import ConfigError, load
from regard.observe import record

B, T, D = 2, 7, 5


class Own(nn.Module):
    """q, k and v (b, t, d), whose context a loop computes."""

    def __init__(self, loop: object) -> None:
        super().__init__()
        self.project, self.loop = nn.Linear(D, 3 * D, dtype=torch.float64), loop

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(*self.project(x).chunk(3, -1))


def join_chunks(q, k, v):
    return torch.cat([(part @ k.mT).softmax(-1) @ v for part in q.split(3, 1)], 1)


def join_prefixes(q, k, v):
    rows = [(q[:, i : i + 1] @ k[:, : i + 1].mT).softmax(-1) @ v[:, : i + 1] for i in range(T)]
    return torch.cat(rows, 1)


LOOPS = {
    "chunks of queries": (join_chunks, False),
    "growing prefixes": (join_prefixes, True),
    "rows of weights": (lambda q, k, v: torch.cat([row @ v for row in (q @ k.mT).softmax(-1).split(1, 1)], 1), False),
}


@pytest.mark.parametrize("name", LOOPS)
def test_queries_one_after_another_are_rows_of_one_map(name):
    torch.manual_seed(0)
    loop, is_causal = LOOPS[name]
    model, x = Own(loop), torch.randn(B, T, D, dtype=torch.float64)
    plain = model(x)
    with record(model, keep="values") as recording:
        output = model(x)
    assert torch.equal(plain, output)
    assert not recording.missed
    q, k, _ = model.project(x).chunk(3, -1)
    scores = q @ k.mT
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf) if is_causal else scores
    found = recording.map(0).dense()
    assert torch.allclose(found[:, 0], scores.softmax(-1), rtol=0, atol=1e-10)
    assert torch.allclose(found[:, 0] @ recording.values(0)[:, 0], output, rtol=0, atol=1e-10)


def test_sequences_that_are_packed_stay_blocks_of_one_map():
    def attend(q, k, v):
        parts = [nn.functional.scaled_dot_product_attention(*(x[:, None, n : n + 3] for x in (q, k, v))) for n in (0, 3)]
        return torch.cat(parts, 2)

    torch.manual_seed(0)
    model, x = Own(attend), torch.randn(B, 3, D, dtype=torch.float64).repeat(1, 2, 1)  # both sequences are the same
    with record(model) as recording:
        model(x)
    found = recording.map(0).dense()
    assert found.shape == (B, 1, 6, 6)
    assert not found[:, :, :3, 3:].any()


def test_a_loop_over_heads_is_no_packed_sequence_also_from_a_file(tmp_path):
    def attend(q, k, v):
        parts = [(q[..., n::2] @ k[..., n::2].mT).softmax(-1) @ v[..., n::2] for n in (0, 1)]
        return torch.cat(parts, 2)

    model, x = Own(attend), torch.randn(B, T, D, dtype=torch.float64)
    with record(model, keep="values") as recording:
        model(x)
    recording.save(tmp_path / "heads.reg")
    for one in (recording, load(tmp_path / "heads.reg")):
        assert len(one[""]) == 2
        for ask in (one.map, one.values):
            with pytest.raises(ConfigError, match="calls attention 2 times in one forward"):
                ask(0)


def test_calls_on_parts_of_the_values_with_the_same_weights_have_one_map_and_all_values(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    model = DiffLlamaModel(DiffLlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).double().eval()
    ids = torch.randint(0, 64, (2, 7))
    with torch.no_grad(), record(model, keep="values") as recording:
        model(ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        (expected, _), contexts = (model(ids, output_attentions=True).attentions, [])
        model.layers[0].self_attn.v_proj.register_forward_hook(lambda module, args, result: contexts.append(result))
        model(ids)
    recording.save(tmp_path / "halves.rgd")
    value = torch.cat(contexts[0].unflatten(-1, (2, 8)).transpose(1, 2).chunk(2, 1), -1).repeat(1, 2, 1, 1)
    for one in (recording, load(tmp_path / "halves.rgd")):
        assert one.map(0).shape == (2, 4, 7, 7)
        torch.testing.assert_close(one.map(0).dense(), expected.double(), rtol=0, atol=1e-6)  # its softmax is of float32
        torch.testing.assert_close(one.values(0), value, rtol=0, atol=1e-12)
    regard.page(recording, tmp_path / "page.html")
    assert {row.layer for row in regard.heads(recording)} == {0, 1}
    with record(model, keep="values") as recording:
        number = model(ids).last_hidden_state[0, -1, 3]
    pulls = recording.attribute(number)
    gradients, _ = pulls.gradients_and_contexts(1)
    expected = torch.einsum("bhqe,bhke->bhqk", gradients, recording.values(1).repeat_interleave(2, 1))
    torch.testing.assert_close(pulls.map(1).dense(), recording.map(1).dense() * expected, rtol=0, atol=1e-10)

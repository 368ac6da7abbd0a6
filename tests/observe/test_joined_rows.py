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


class TrainAndTest(nn.Module):
    """Rows of test that look at the keys of the rows of training, or at the first head of these, as in TabPFN."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.project = heads, nn.Linear(D, 3 * 12, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        k, v = k[:, :, :5], v[:, :, :5]
        shared = [y[:, : self.heads].expand(-1, 4, -1, -1) for y in (k, v)]
        self.weights = torch.cat([q[:, :, :5] @ k.mT, q[:, :, 5:] @ shared[0].mT], 2).div(3**0.5).softmax(-1)
        attend = nn.functional.scaled_dot_product_attention
        test, train = attend(q[:, :, 5:], *shared), attend(q[:, :, :5], k, v)  # the rows of the map are in order of the tokens
        return torch.cat([train, test], 2)


@pytest.mark.parametrize("heads", [1, 4])
def test_other_queries_on_the_same_keys_are_rows_on_the_same_columns(heads, tmp_path):
    model = TrainAndTest(heads)
    with torch.no_grad(), record(model, keep="values") as recording:
        model(torch.randn(B, T, D, dtype=torch.float64))
    recording.save(tmp_path / "rows.rgd")
    for found in (recording, load(tmp_path / "rows.rgd")):
        assert torch.allclose(found.map(0).dense(), model.weights, rtol=0, atol=1e-12)
        assert found.notes == ["the model: 2 calls of other queries on the same keys are rows of one map"]
        if heads == 1:
            with pytest.raises(ConfigError, match=r"recording\[name\] has each of them"):
                found.values(0)
        else:
            assert found.values(0).shape == (B, 4, 5, 3)


def attend_twice(q, k, v):
    attend = nn.functional.scaled_dot_product_attention
    first = attend(*(x[:, None] for x in (q, k, v)))
    return attend(first, first, v[:, None])


def attend_by_heads(q, k, v):
    heads = ([y.contiguous()[None] for y in x.unflatten(-1, (D, 1)).permute(0, 2, 1, 3).contiguous()[0]] for x in (q, k, v))
    return torch.cat([nn.functional.scaled_dot_product_attention(*head) for head in zip(*heads, strict=True)], -1)


def attend_overlapping(q, k, v):
    attend = nn.functional.scaled_dot_product_attention
    return torch.cat(
        [attend(q[:, None, a:b], k[:, None, c:d], v[:, None, c:d]) for a, b, c, d in ((0, 3, 0, 4), (3, T, 2, T))], 2
    )


def attend_interleaved(q, k, v):
    parts = ([x[:, None, start::2] for x in (q, k, v)] for start in range(2))
    return torch.cat([nn.functional.scaled_dot_product_attention(*part) for part in parts], 2)


def attend_with_interleaved_queries(q, k, v):
    attend = nn.functional.scaled_dot_product_attention
    return torch.cat([attend(q[:, None, start::2], k[:, None], v[:, None]) for start in range(2)], 2)


def attend_with_heads_of_queries(q, k, v):
    attend = nn.functional.scaled_dot_product_attention
    return attend(q[:, None], k[:, None], v[:, None]) - attend(q.flip(-1)[:, None], k[:, None], v[:, None])


NO_PARTS = [
    attend_twice,
    attend_by_heads,
    attend_overlapping,
    attend_interleaved,
    attend_with_interleaved_queries,
    attend_with_heads_of_queries,
]


@pytest.mark.parametrize("loop", NO_PARTS)
def test_calls_that_are_no_parts_of_one_input_are_no_map(loop, tmp_path):
    model = Own(loop)
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(1, T, D, dtype=torch.float64))
    recording.save(tmp_path / "calls.rgd")
    for found in (recording, load(tmp_path / "calls.rgd")):
        assert len(found[""]) > 1
        for ask in (found.map, lambda _, found=found: regard.rollout(found)):
            with pytest.raises(ConfigError, match=r"recording\[name\] has each of them"):
                ask(0)


@pytest.mark.parametrize(
    "cut", [lambda x: x.split((2, 4, 1), 2), lambda x: x.chunk(3, 2), lambda x: (x[:, :, :6], x[:, :, 6:])]
)
def test_documents_that_are_cut_after_a_rotation_are_blocks_of_one_map(cut):
    class Documents(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(D, 12, dtype=torch.float64)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
            turn = torch.arange(T).double().unsqueeze(-1)
            q, k = (y * turn.cos() + y.flip(-1) * turn.sin() for y in (q, k))
            parts = [*zip(*map(cut, (q, k, v)), strict=True)]
            ids = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([part[0].shape[2] for part in parts]))
            scores = (q @ k.mT / 2**0.5).masked_fill(ids != ids[:, None], -torch.inf)
            self.weights = scores.softmax(-1)
            return torch.cat([nn.functional.scaled_dot_product_attention(*part) for part in parts], 2)

    model = Documents()
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(B, T, D, dtype=torch.float64))
    assert torch.allclose(recording.map(0).dense(), model.weights, rtol=0, atol=1e-12)
    assert "blocks of one map" in recording.notes[0]


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

"""A module that attends several times in a forward, each time in its own way, is shown with a layer for each call."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ProphetNetConfig, ProphetNetModel

import regard
from regard import ConfigError
from regard.observe import record
from regard.show.all_heads import draw_all_heads
from show.page.test_single_file import entries, picture

B, H, T, D = 1, 2, 7, 5


class Attends(nn.Module):
    """Causal attention once for each scale."""

    def __init__(self, *scales: float) -> None:
        super().__init__()
        self.scales = scales

    def forward(self, x: Tensor) -> Tensor:
        contexts = [F.scaled_dot_product_attention(x, x.flip(1), x, is_causal=True, scale=scale) for scale in self.scales]
        return x + sum(contexts)


def compute_weights(x: Tensor, scale: float) -> Tensor:
    """The weights (b, h, t, t) by the formula."""
    scores = scale * x @ x.flip(1).mT
    return scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.fixture(scope="module")
def recorded():
    """A recording of three layers, of which the second attends twice, and the weights of each call."""
    torch.manual_seed(0)
    x, model = torch.randn(B, H, T, D, dtype=torch.float64), nn.Sequential(Attends(0.5), Attends(0.4, 0.9), Attends(0.3))
    inputs = [x, model[0](x), model[0](x), model[:2](x)]
    with record(model) as recording:
        model(x)
    return recording, [compute_weights(given, scale) for given, scale in zip(inputs, (0.5, 0.4, 0.9, 0.3), strict=True)]


def test_the_table_of_heads_has_each_call_and_says_so(recorded):
    recording, weights = recorded
    table = regard.heads(recording, scores=[score_first_key])
    assert list(dict.fromkeys(row.name for row in table)) == ["0", "1, call 1", "1, call 2", "2"]
    for row in table:
        expected = weights[row.layer][0, row.head, -1, 0]
        torch.testing.assert_close(float(row.scores["score first key"]), float(expected), rtol=0, atol=1e-12)
    assert any(note.startswith("1: several calls of attention") for note in table.notes)
    assert {row.layer for row in regard.heads(recording, layers=[0, 2])} == {0, 2}


def score_first_key(m):
    """The weight of the last query on the first key."""
    return m[:, :, -1, 0]


def test_every_head_of_every_call_is_drawn(recorded):
    recording, weights = recorded
    drawn = draw_all_heads(recording)
    images = [torch.from_numpy(axes.images[0].get_array().filled(0)) for axes in drawn.axes if axes.images]
    torch.testing.assert_close(torch.stack(images[: 4 * H]), torch.cat(weights, 1)[0], rtol=0, atol=1e-12)
    assert any("several calls" in text.get_text() for text in drawn.texts)


def test_the_page_has_each_call(recorded, tmp_path):
    recording, weights = recorded
    regard.page(recording, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = entries(text)
    for layer, expected in enumerate(weights):
        for head in range(H):
            codes = picture(found, f"r1/picture?kind=self&part=&b=0&layer={layer}&head={head}&level=0&how=mean", (T, T))
            decoded = regard.map.codes.decode_weights(codes).double()
            torch.testing.assert_close(decoded, expected[0, head], rtol=3e-4, atol=1e-9)
    assert "several calls of attention" in text


def test_what_needs_one_map_of_each_layer_says_where_the_calls_are(recorded):
    recording, _ = recorded
    for ask in (lambda: recording.map(1), lambda: regard.rollout(recording), lambda: regard.heads(recording, layers=[1])):
        with pytest.raises(ConfigError, match=r"1 calls attention 2 times in one forward: recording\[name\] has each of them"):
            ask()


def test_both_streams_of_prophetnet_are_layers():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "vocab_size": 30, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12}
    layers = {f"num_{part}_layers": 1 for part in ("encoder", "decoder")}
    heads = {f"num_{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    model = ProphetNetModel(ProphetNetConfig(**sizes, **layers, **heads, decoder_start_token_id=1)).eval()
    ids = torch.randint(3, 30, (1, 6))
    with torch.no_grad(), record(model) as recording:
        model(input_ids=ids, decoder_input_ids=ids)
    name = "decoder.layers.0.self_attn"
    assert len(recording[name]) == 2
    assert {row.name for row in regard.heads(recording)} == {f"{name}, call 1", f"{name}, call 2"}

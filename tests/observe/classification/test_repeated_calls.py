"""A module that attends several times in a forward, each time in its own way, is shown with a layer for each call."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ProphetNetConfig, ProphetNetModel

import regard
from regard import ConfigError
from regard.cli import main
from regard.observe import record
from regard.observe.classification.repeated_calls import split_calls
from regard.show.all_heads import draw_all_heads
from regard.show.page.recording_entry import HeadPlace
from regard.show.page.session import Session
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


def test_layers_count_and_name_each_call(recorded):
    recording, weights = recorded
    named = ["1, call 1", "1, call 2", "2"]
    for layers in ([1, 2, 3], named):
        table = regard.heads(recording, layers=layers, scores=[score_first_key])
        assert list(dict.fromkeys((row.layer, row.name) for row in table)) == [*zip((1, 2, 3), named, strict=True)]
        for row in table:
            expected = float(weights[row.layer][0, row.head, -1, 0])
            assert float(row.scores["score first key"]) == pytest.approx(expected, rel=0, abs=1e-12)
        assert any(note.startswith("1: several calls of attention") for note in table.notes)
    with pytest.raises(regard.MissingNameError, match=r"Recorded: '0', '1, call 1', '1, call 2', '2'\."):
        regard.heads(recording, layers=["1"])


def score_first_key(m):
    """The weight of the last query on the first key."""
    return m[:, :, -1, 0]


@pytest.mark.parametrize("layers", [None, [0, 2], [1]])
def test_every_head_of_every_call_is_drawn(recorded, layers):
    recording, weights = recorded
    drawn = draw_all_heads(recording, layers=layers)
    images = [torch.from_numpy(axes.images[0].get_array().filled(0)) for axes in drawn.axes if axes.images]
    expected = torch.cat([weights[layer] for layer in layers or range(4)], 1)[0]
    torch.testing.assert_close(torch.stack(images[: len(expected)]), expected, rtol=0, atol=1e-12)
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


def test_the_commands_print_each_call(recorded, tmp_path, capsys):
    recording, weights = recorded
    recording.save(tmp_path / "one.regard")
    assert main(["heads", str(tmp_path / "one.regard"), "--csv"]) == 0
    rows = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[1]) for row in rows[1:]] == [(str(layer), str(head)) for layer in range(4) for head in range(H)]
    column = rows[0].index("first token")
    table = [float(one.scores["first token"]) for one in regard.heads(recording)]
    assert [float(row[column]) for row in rows[1:]] == pytest.approx(table, abs=1e-6)
    assert main(["heads", str(tmp_path / "one.regard")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 layers, 8 heads. 7 tokens. 1: several calls of attention in one forward, each a layer of its own here" in said
    assert main(["heads", str(tmp_path / "one.regard"), "--head", "2.1", "--query", "6"]) == 0
    printed = [float(one) for one in re.findall(r"0\.\d+", capsys.readouterr().out)]
    assert float(weights[2][0, 1, 6].max()) == pytest.approx(max(printed), abs=0.006)


def test_what_needs_one_map_of_each_layer_says_where_the_calls_are(recorded):
    recording, _ = recorded
    for ask in (lambda: recording.map(1), lambda: regard.rollout(recording)):
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


class Writer(nn.Module):
    """A language model of 19 tokens whose second layer attends twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(19, H * D), nn.Linear(H * D, 19)
        self.layers = nn.Sequential(Attends(0.5), Attends(0.4, 0.9))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).unflatten(-1, (H, D)).transpose(1, 2)
        return self.head(self.layers(x).transpose(1, 2).flatten(2))


class LetterAdapter:
    """The writer as the page runs it: each letter is a token."""

    name, context = "writer", None

    def __init__(self, model: Writer) -> None:
        self.model = model

    def tokens(self, text, most):
        return torch.tensor([self.encode(text)]), [*text], len(text)

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + token) for token in ids)

    def run(self, ids):
        return self.model(ids)


def test_the_live_page_has_each_call_of_a_text_that_it_reads():
    model = Writer().double()
    ids = torch.tensor([[3, 1, 4, 15, 9, 2, 6]])
    with record(model, keep="values") as recording:
        logits = model(ids)
    split, _ = split_calls(recording)
    found = replace(recording.attribute(logits[0, -1, 5]), run=split.last)
    session = Session(adapter=LetterAdapter(model))
    summary = session.run_text("dbepjcg", lambda: None)
    (attention,) = summary["attentions"]
    assert [one["name"] for one in attention["layers"]] == ["layers.0", "layers.1, call 1", "layers.1, call 2"]
    assert any(note.startswith("layers.1: several calls") for note in summary["notes"])
    entry = session.get_entry(summary["id"])
    for layer in range(3):
        place = HeadPlace(layer=layer, head=1)
        torch.testing.assert_close(entry.get_map(place)[0, 0], split.map(layer)[0, 1], rtol=0, atol=1e-12)
        pull = session.get_attribution_map(entry, place, "pull", None, 5, lambda: None)
        torch.testing.assert_close(pull[0], found.map(layer)[0], rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match=r"layers\.1 calls attention several times in one forward"):
        session.predict_without_heads(entry, [HeadPlace(layer=1)], 0, lambda: None)
    with pytest.raises(ConfigError, match="how these are joined is not recorded"):
        regard.rollout(split)


class Sees(nn.Module):
    """A model of images of 3 x 5 patches whose second layer attends twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.first, self.second = nn.Conv2d(3, H * D, 2, 2), Attends(0.5), Attends(0.4, 0.9)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).unflatten(1, (H, D)).mT
        return self.second(self.first(x))[:, :, -1].sum((1, 2))


def test_which_of_several_images_a_call_reads_is_not_known():
    model = Sees().double()
    with record(model) as recording:
        model(torch.randn(1, 3, 6, 10, dtype=torch.float64))
    recording.places = {"second": [regard.PatchGrid(3, 5, 0), regard.PatchGrid(3, 5, 15)], "first": regard.PatchGrid(3, 5)}
    split, _ = split_calls(recording)
    assert [len(split.axis_places(layer)[1]) for layer in range(3)] == [1, 0, 0]


def test_a_page_with_an_image_has_each_call_and_its_pull(tmp_path):
    model, pixels = Sees().double(), torch.randn(1, 3, 6, 10, dtype=torch.float64)
    with record(model, keep="values") as recording:
        number = model(pixels)[0]
    assert isinstance(recording.places, dict)
    pull = recording.attribute(number)
    regard.page(recording, tmp_path / "page.html", image=pixels, attribution=pull)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found, run = entries(text), split_calls(recording)[0].last
    (attention,) = json.loads(re.search(r'id="regard-start">(.*?)</script>', text)[1])["recordings"][0]["attentions"]
    assert [(one["name"], one["grids"], one["pull"]) for one in attention["layers"]] == [
        (name, [0], H) for name in ("first", "second, call 1", "second, call 2")
    ]
    assert not attention["rollout"]  # how the calls are joined is not known
    for layer in range(3):
        stored = np.frombuffer(found[f"r1/pull?kind=self&part=&b=0&layer={layer}"], "<f4").reshape(H, 15, 15)
        expected = replace(pull, run=run).map(layer)[0]
        seen = ~np.isnan(stored)
        assert seen.sum() == H * 15 * 16 / 2
        np.testing.assert_allclose(stored[seen], expected.numpy()[seen], rtol=1e-6, atol=1e-12)
    assert "several calls of attention" in text

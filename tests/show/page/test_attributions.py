"""What weights do, as the server says it: the numbers are those of recording.attribute and regard.contributions."""

import json

import numpy as np
import pytest
import torch

import regard
from regard import GPT2, AttentionMap, Causal, GPT2Config
from regard.map.attribution_map import AttributionMap
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page import attributions
from show.page.server_client import format_address, open_client, record_sorter

TEXT = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his"
LONG = "CAB" * 101
LAYER = 3


def get_numbers(client, **query) -> torch.Tensor:
    """The numbers of an answer in their shape, in float64."""
    status, headers, body = client.ask(format_address("/api/r/r1/attribution", query))
    assert status == 200, body
    return torch.from_numpy(np.frombuffer(body, "<f4").astype(np.float64)).view(*map(int, headers["x-shape"].split(",")))


def assert_equal_but_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Asserts that float64 numbers came as float32, with NaN where the rule hides them; exact is (q, k) or a part of it."""
    seen = ~found.isnan()
    torch.testing.assert_close(found[seen], exact[seen].double(), rtol=3e-7, atol=1e-9)
    assert (exact[~seen] == 0).all()


def write_pocket() -> GPT2Adapter:
    return GPT2Adapter("pocket", GPT2.load("pocket", torch.float64))


@pytest.fixture(scope="module")
def client():
    with open_client(write_pocket(), text=TEXT) as found:
        yield found


@pytest.fixture(scope="module")
def forward():
    """A recording of the same text with gradients, and its logits."""
    model = GPT2.load("pocket", torch.float64)
    with regard.record(model, keep="values") as recording:
        logits = model(torch.tensor([model.text.encode(TEXT)]))
    return recording, logits


def test_the_target_is_the_likeliest_next_word_unless_another_is_asked_for(client, forward):
    logits = forward[1].detach()
    for query, at in (({}, -1), ({"at": 7}, 7)):
        found = client.json("/api/r/r1/target", **query)
        values, tokens = logits[0, at].softmax(-1).topk(10)
        assert found["token"] == int(tokens[0])
        assert found["at"] == range(logits.shape[1])[at]
        assert found["logit"] == pytest.approx(float(logits[0, at].max()), rel=1e-12)
        assert [one["token"] for one in found["likeliest"]] == tokens.tolist()
        assert [one["probability"] for one in found["likeliest"]] == pytest.approx(values.tolist(), rel=1e-5)
    blue = write_pocket().encode(" blue")[0]
    found = client.json("/api/r/r1/target", at=20, token=blue)
    assert (found["at"], found["token"], found["word"]) == (20, blue, " blue")
    assert found["logit"] == pytest.approx(float(logits[0, 20, blue]), rel=1e-12)


@pytest.mark.parametrize("show", ["pull", "cut"])
@pytest.mark.parametrize("at", [None, 15])
def test_rows_columns_and_tiles_are_the_maps_of_the_attribution(client, forward, show, at):
    recording, logits = forward
    place = -1 if at is None else at
    exact = recording.attribute(logits[0, place, logits[0, place].argmax()]).map(LAYER, kind=show).dense()[0]
    query = {"show": show, "layer": LAYER} | ({} if at is None else {"at": at})
    seen = Causal().table(*exact.shape[1:]).reshape(exact.shape[1:])
    for head in (0, 5):
        row, column = (get_numbers(client, **query, head=head, **one) for one in ({"q": 14}, {"k": 9}))
        assert torch.equal(~row.isnan(), seen[14])
        assert torch.equal(~column.isnan(), seen[:, 9])
        assert_equal_but_rounded(row, exact[head, 14])
        assert_equal_but_rounded(column, exact[head, :, 9])
        for how in ("mean", "max"):
            tile = get_numbers(client, **query, head=head, level=0, row=0, column=0, how=how)
            assert torch.equal(~tile.isnan(), seen)
            assert_equal_but_rounded(tile, exact[head])
    assert_equal_but_rounded(get_numbers(client, **query, heads="0,2,5", q=14), exact[[0, 2, 5], 14].mean(0))


def test_what_is_carried_is_that_of_the_contributions(client, forward):
    model = GPT2.load("pocket", torch.float64)
    found = regard.contributions(model, torch.tensor([model.text.encode(TEXT)]), 0)
    exact = found.map(LAYER, kind="carried").dense()[0]
    query = {"show": "carried", "layer": LAYER, "head": 2}
    assert client.json("/api/r/r1/settings") == {"carried": None, "pull": None, "cut": None}
    for found, part in (
        (get_numbers(client, **query, q=14), exact[2, 14]),
        (get_numbers(client, **query, k=9), exact[2, :, 9]),
    ):
        assert_equal_but_rounded(found, part)
    assert_equal_but_rounded(get_numbers(client, **query, level=0, row=0, column=0, how="mean"), exact[2])


@pytest.mark.parametrize("how", ["mean", "max"])
def test_coarser_tiles_pool_the_signed_numbers(how):
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=1, heads=2, width=8, context=512, vocabulary=3)).eval().double()
    model.text = GPT2.load("sorter").text
    with regard.record(model, keep="values") as recording:
        logits = model(torch.tensor([model.text.encode(LONG)]))
    exact = recording.attribute(logits[0, -1].max()).map(0).dense()[0, 1]
    count = len(exact)
    size = -(-count // 2)
    padded = torch.zeros(2 * size, 2 * size, dtype=exact.dtype)
    padded[:count, :count] = exact
    pixels = padded.view(size, 2, size, 2).transpose(1, 2).flatten(2)
    areas = torch.full((size,), 2.0, dtype=exact.dtype)
    areas[-1] = count - 2 * (size - 1)
    expected = (
        pixels.sum(-1) / (areas[:, None] * areas) if how == "mean" else pixels.gather(-1, pixels.abs().argmax(-1, True))[..., 0]
    )
    with open_client(GPT2Adapter("letters", model), text=LONG) as client:
        found = get_numbers(client, show="pull", head=1, level=1, row=0, column=0, how=how)
        assert torch.equal(~found.isnan(), Causal().table(size, size).reshape(size, size))
        scale = float(expected.abs().max())
        assert (found.nan_to_num(0) - expected).abs().max() < 1e-6 * scale
        fine = get_numbers(client, show="pull", head=1, level=0, row=1, column=0, how=how)
        assert fine.shape == (count - 256, 256)
        assert (fine - exact[256:, :256]).abs().max() < 1e-6 * scale


def test_what_every_word_did_is_refused_where_there_is_no_such_word(client):
    for query, said in (
        ({"show": "pull", "at": 24, "token": 1}, "at must be at least 0 and below 24"),
        ({"show": "pull", "at": 1, "token": 10**8}, "token must be at least 0"),
        ({"show": "all", "at": 1, "token": 1}, "show must be"),
        ({"show": "cut", "token": 1}, "at must be a whole number"),
    ):
        status, told = client.expect_refusal("/api/r/r1/influence", **query)
        assert status == 400
        assert said in told
    assert client.expect_refusal("/api/r/r1/story")[0] == 404


def test_one_backward_serves_every_layer_head_and_setting(monkeypatch):
    made = []
    compute = attributions.compute_target
    monkeypatch.setattr(attributions, "compute_target", lambda *given: made.append(given[-2:]) or compute(*given))
    with open_client(write_pocket(), text=TEXT) as client:
        token = client.json("/api/r/r1/target")["token"]
        for show in ("pull", "cut"):
            for layer in range(3):
                for query in ({"q": 5}, {"k": 5}, {"level": 0, "row": 0, "column": 0, "how": "mean"}):
                    get_numbers(client, show=show, layer=layer, head=layer, **query)
        get_numbers(client, show="pull", token=token, at=23, q=5)
        assert len(made) == 1
        get_numbers(client, show="pull", token=token + 1, q=5)
        get_numbers(client, show="pull", at=4, q=4)
        assert len(made) == 3


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"q": 1}, "show must be carried, pull or cut, got nothing."),
        ({"show": "weight", "q": 1}, "show must be carried, pull or cut, got 'weight'."),
        ({"show": "pull", "q": 24}, "q must be at least 0 and below 24, got 24."),
        ({"show": "pull", "k": 24}, "k must be at least 0 and below 24, got 24."),
        ({"show": "pull", "q": 1, "at": 24}, "at must be at least 0 and below 24, got 24."),
        ({"show": "pull", "q": 1, "token": 999_999}, "token must be at least 0 and below"),
        ({"show": "pull", "q": 1, "token": -1}, "token must be a whole number of at least 0"),
        ({"show": "cut", "q": 1, "layer": 99}, "layer must be at least 0"),
        ({"show": "cut", "q": 1, "heads": "0,99"}, "head must be at least 0"),
        ({"show": "cut"}, "level must be a whole number"),
        ({"show": "cut", "level": 0, "row": 1, "column": 0, "how": "mean"}, "row must be at least 0 and below 1, got 1."),
        ({"show": "cut", "level": 63, "row": 0, "column": 0, "how": "mean"}, "level must be at least 0 and below"),
        ({"show": "cut", "level": 0, "row": 0, "column": 0, "how": "sum"}, "how must be mean or max, got 'sum'."),
    ],
)
def test_what_is_not_there_is_refused_in_a_sentence(client, query, sentence):
    status, told = client.expect_refusal("/api/r/r1/attribution", **query)
    assert status == 400
    assert told.startswith(sentence)


def test_a_recording_that_no_model_read_here_shows_weights_alone():
    with open_client(record_sorter(keep="values"), adapter=write_pocket()) as client:
        for name, query in (("settings", {}), ("target", {}), ("attribution", {"show": "pull", "q": 1})):
            status, told = client.expect_refusal(f"/api/r/r1/{name}", **query)
            assert (status, "type the text" in told) == (400, True)
        read = json.loads(client.post("/api/type", {"text": TEXT})[1])["id"]
        assert client.json(f"/api/r/{read}/settings")["carried"] is None


def test_a_model_whose_projection_is_not_found_says_why_and_has_the_other_settings():
    class Scaled(GPT2):
        def forward(self, *given, **more):
            return 2 * super().forward(*given, **more)

    model = GPT2.load("pocket", torch.float64)
    model.__class__ = Scaled
    with open_client(GPT2Adapter("scaled", model), text=TEXT) as client:
        found = client.json("/api/r/r1/settings")
        assert "last norm times the unembedding" in found["carried"]
        assert (found["pull"], found["cut"]) == (None, None)
        assert "last norm" in client.expect_refusal("/api/r/r1/attribution", show="carried", q=1)[1]
        assert get_numbers(client, show="pull", q=1).shape == (24,)


@pytest.mark.parametrize("number", [-1e9, -torch.inf])
def test_each_head_hides_what_its_own_mask_hides(number):
    generator = torch.Generator().manual_seed(1)
    q, k, left, v = torch.randn(4, 1, 3, 11, 5, generator=generator)
    hidden = torch.rand(1, 3, 11, 11, generator=generator) < 0.5
    hidden[..., 0] = False
    m = AttributionMap(AttentionMap(q, k, bias=torch.zeros(1, 3, 11, 11).masked_fill(hidden, number)), left, v)
    assert torch.equal(attributions.draw_thumbnails(m)[0].isnan(), hidden[0])
    for head in range(3):
        assert torch.equal(attributions.draw_tile(m.select(heads=[head]), 0, 0, 0, "mean").isnan(), hidden[0, head])
        assert torch.equal(attributions.compute_line(m, [head], q=4).isnan(), hidden[0, head, 4])
        assert torch.equal(attributions.compute_line(m, [head], k=7).isnan(), hidden[0, head, :, 7])

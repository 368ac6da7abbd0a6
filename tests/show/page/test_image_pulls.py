"""The pull of an image on the server and in a file: rows of it are weight times gradient, by autograd on the formula."""

import html
import json

import numpy as np
import pytest
import torch

import regard
from regard import ConfigError
from regard.map.codes import decode_weights
from regard.models.vision_transformer import VisionTransformer
from regard.show.page import image_pulls
from regard.weights.vision_weights import INCLUDED
from show.page.server_client import TEXT, open_client, record_sorter
from show.page.test_single_file import START, entries

IMAGE = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # of sums over 65 keys in float32


@pytest.fixture(scope="module")
def recorded():
    """A recording of the included model with its graph, and the pull on the logit of 3."""
    model = VisionTransformer.load(INCLUDED["digits"])
    with regard.record(model, keep="values") as recording:
        logits = model(IMAGE)
    return recording, recording.attribute(logits[0, 3])


def compute_pulls(recorded, layer):
    """Weight times gradient of every head, (h, q, k): that of the context, times the values."""
    recording, found = recorded
    gradients, _ = found.gradients_and_contexts(layer)
    values = recording.values(layer)
    return (recording.map(layer).dense() * (gradients.double() @ values.double().mT))[0]


def read_numbers(client, path):
    status, headers, body = client.ask(path)
    assert status == 200, body
    return torch.from_numpy(np.frombuffer(body, "<f4").copy()).view(*map(int, headers["x-shape"].split(","))).double()


def test_a_served_page_has_the_pull_of_each_head_and_the_rollout(recorded):
    recording, found = recorded
    with open_client(recording, image=IMAGE, attribution=found, number="the logit of 3") as client:
        (summary,) = client.json("/api/start")["recordings"]
        assert summary["number"] == "the logit of 3"
        (attention,) = summary["attentions"]
        assert [layer["pull"] for layer in attention["layers"]] == [4, 4, 4]
        assert attention["rollout"]
        for layer, q, heads in ((0, 27, "1,3"), (2, 0, "0,1,2,3")):
            path = f"/api/r/r1/attribution?show=pull&layer={layer}&q={q}&heads={heads}"
            wanted = compute_pulls(recorded, layer)[list(map(int, heads.split(","))), q].mean(0)
            torch.testing.assert_close(read_numbers(client, path), wanted, **CLOSE)
        shown = decode_weights(client.codes("/api/r/r1/rollout", layer=1, q=27)).double()
        torch.testing.assert_close(shown, regard.rollout(recording, [27], layers=[0, 1])[0, 0].double(), rtol=3e-4, atol=1e-9)
        status, said = client.expect_refusal("/api/r/r1/attribution", show="cut", layer=0, q=0)
        assert status == 400
        status, said = client.expect_refusal("/api/r/r1/rollout", layer=0, q=65)
        assert "q must be at least 0 and below 65" in said


def test_a_text_has_no_rollout_on_the_page():
    with open_client(record_sorter(TEXT)) as client:
        status, said = client.expect_refusal("/api/r/r1/rollout", layer=0, q=0)
        assert (status, said) == (400, "the rollout is shown for recordings with images; regard.rollout computes others.")


@pytest.mark.parametrize(("limit", "heads"), [(3 * 4 * 65**2 * 4, 4), (3 * 4 * 65**2, 1), (3 * 4 * 65**2 - 1, 0)])
def test_a_file_has_as_many_pulls_as_have_room(recorded, tmp_path, monkeypatch, limit, heads):
    recording, found = recorded
    monkeypatch.setattr(image_pulls, "MAX_PULL_BYTES", limit)
    regard.page(recording, tmp_path / "page.html", image=IMAGE, attribution=found)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    (summary,) = json.loads(START.search(text)[1])["recordings"]
    assert [layer.get("pull", 0) for layer in summary["attentions"][0]["layers"]] == [heads] * 3
    assert len(summary["notes"]) == (heads < 4)
    kept = {name: data for name, data in entries(text).items() if "/pull?" in name}
    assert len(kept) == (3 if heads else 0)
    for layer in range(3 if heads else 0):
        data = kept[f"r1/pull?kind=self&part=&b=0&layer={layer}"]
        numbers = torch.from_numpy(np.frombuffer(data, "<f4").copy()).view(heads, 65, 65).double()
        wanted = compute_pulls(recorded, layer)
        torch.testing.assert_close(numbers, wanted if heads == 4 else wanted.mean(0, keepdim=True), **CLOSE)


def test_the_page_in_a_notebook_is_that_of_the_file_with_its_image_and_pulls(recorded, tmp_path):
    recording, found = recorded
    settings = {"image": IMAGE, "attribution": found, "number": "the logit of 3", "scores": [score_first_key]}
    regard.page(recording, tmp_path / "page.html", **settings)
    wanted = (tmp_path / "page.html").read_text(encoding="utf-8")
    shown = html.unescape(recording.page(**settings).html)
    assert entries(shown) == entries(wanted)
    summaries = [json.loads(START.search(text)[1])["recordings"][0] for text in (shown, wanted)]
    assert summaries[0]["images"] == summaries[1]["images"] != []
    assert summaries[0]["number"] == "the logit of 3"


def score_first_key(m):
    """The weight on the first key."""
    return m[:, :, -1, 0]


def test_what_cannot_be_shown_is_refused(recorded, tmp_path):
    recording, found = recorded
    with pytest.raises(ConfigError, match="pass image= too"):
        regard.page(recording, tmp_path / "page.html", attribution=found)
    model = VisionTransformer.load(INCLUDED["digits"])
    with torch.no_grad(), regard.record(model) as other:
        model(IMAGE)
    with pytest.raises(ConfigError, match="of the last run of this recording"):
        regard.page(other, tmp_path / "page.html", image=IMAGE, attribution=found)
    with pytest.raises(ConfigError, match="beside a recording"), open_client(model, image=IMAGE):
        pass

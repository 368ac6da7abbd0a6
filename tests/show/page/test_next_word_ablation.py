"""The next words without some heads are those of the model whose columns of the output projection are 0."""

import copy

import pytest
import torch

from regard import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from show.page.server_client import make_sorter, open_client, record_sorter

TEXT = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his"
OFF = {"3.1": (3, 1), "3.4": (3, 4), "5.0": (5, 0)}


@pytest.fixture(scope="module")
def model() -> GPT2:
    return GPT2.load("pocket", torch.float64)


@pytest.fixture(scope="module")
def client(model):
    with open_client(GPT2Adapter("pocket", model), text=TEXT) as found:
        yield found


def predict(model: GPT2) -> torch.Tensor:
    """The probability of every next word."""
    with torch.inference_mode():
        return model(torch.tensor([model.text.encode(TEXT)]))[0, -1].float().softmax(-1)


def test_the_words_are_those_of_a_model_whose_heads_are_cut_out_of_its_weights(client, model):
    cut = copy.deepcopy(model)
    width = model.config.width // model.config.heads
    with torch.no_grad():
        for layer, head in OFF.values():
            cut.blocks[layer].attention.out_proj.weight[:, head * width : (head + 1) * width] = 0
    before, after = predict(model), predict(cut)
    found = client.json("/api/r/r1/ablation", off=",".join(OFF))["words"]
    listed = {model.text.encode(one["word"])[0] for one in found}
    assert listed == {*before.topk(10).indices.tolist(), *after.topk(5).indices.tolist()}
    assert [one["before"] for one in found] == sorted((one["before"] for one in found), reverse=True)
    for one in found:
        token = model.text.encode(one["word"])[0]
        assert one["before"] == pytest.approx(float(before[token]), rel=1e-5)
        assert one["after"] == pytest.approx(float(after[token]), rel=1e-5)
    assert any(abs(one["before"] - one["after"]) > 1e-3 for one in found)


@pytest.mark.parametrize(
    ("off", "says"),
    [
        ("", "off must be heads such as 3.1"),
        ("3", "off must be heads such as 3.1"),
        ("3.1,", "off must be heads such as 3.1"),
        ("9.0", "layer must be at least 0"),
        ("3.99", "head must be at least 0"),
    ],
)
def test_heads_that_do_not_exist_are_refused_in_a_sentence(client, off, says):
    status, sentence = client.expect_refusal("/api/r/r1/ablation", off=off)
    assert status == 400
    assert says in sentence


def test_a_recording_alone_says_what_it_needs():
    with open_client(record_sorter(), adapter=make_sorter()) as client:
        status, sentence = client.expect_refusal("/api/r/r1/ablation", off="0.0")
    assert status == 400
    assert "regard serve with --model" in sentence

"""A page with several models: a request chooses among them, and each recording is of the model that read it."""

import json

import pytest
import torch
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel, GPT2TokenizerFast

import regard
from regard import ConfigError
from regard.cli.model_loading import CAUSAL_LM, load_model
from regard.show.page.server import make_server
from regard.text.byte_pair import GPT2_FOLDER
from show.page.server_client import make_sorter, make_writer, open_client

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"
)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A model of transformers with random weights, GPT-2's words and a chat template."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("foreign")
    GPT2LMHeadModel(TheirConfig(n_layer=2, n_head=4, n_embd=32, n_positions=64, initializer_range=0.3)).save_pretrained(place)
    tokenizer = GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    return load_model(str(place), CAUSAL_LM)


@pytest.fixture(scope="module")
def client():
    with open_client(adapter=make_sorter(), others=[make_writer()]) as found:
        yield found


def post(client, path: str, **sent) -> dict:
    status, body = client.post(path, sent)
    assert status == 200, body
    return json.loads(body.splitlines()[-1])


def test_a_request_chooses_among_the_models_and_the_first_is_the_default(client):
    assert [one["name"] for one in client.json("/api/start")["models"]] == ["sorter", "writer"]
    read = {
        name: post(client, "/api/type", text="CAB", **sent) for name, sent in (("sorter", {}), ("writer", {"model": "writer"}))
    }
    assert {name: one["model"] for name, one in read.items()} == {"sorter": "sorter", "writer": "writer"}
    assert read["sorter"]["id"] != read["writer"]["id"]
    assert read["sorter"]["request"] == {"text": "CAB"}
    assert read["writer"]["request"] == {"text": "CAB", "model": "writer"}  # so that a link makes it again


def test_each_recording_asks_the_model_that_read_it(client):
    found = post(client, "/api/type", text="CAB", model="writer")["id"]
    model = client.session.adapters["writer"].model
    target = client.json(f"/api/r/{found}/target")
    with torch.no_grad():
        logits = model(torch.tensor([client.session.adapters["writer"].encode("CAB")]))
    assert target["logit"] == pytest.approx(float(logits[0, -1].max()), rel=1e-5)


def test_a_story_names_its_model(client):
    made = post(client, "/api/generate", text="CA", tokens=3, temperature=0, seed=3, model="writer")["recording"]
    assert made["model"] == "writer"
    assert made["request"] == {"text": "CA", "tokens": 3, "temperature": 0.0, "seed": 3, "model": "writer"}


def test_two_models_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two models of the page are called sorter"):
        make_server(adapter=make_sorter(), others=[make_sorter()])


@pytest.mark.slow
def test_any_causal_model_continues_a_text_as_its_own_generate_does(foreign):
    ids = torch.tensor([foreign.encode("the cat sat on the")])
    with torch.no_grad():
        right = foreign.model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    with open_client(adapter=foreign) as client:
        assert client.json("/api/start")["writes"]
        status, body = client.post("/api/generate", {"text": "the cat sat on the", "tokens": 9, "temperature": 0, "seed": 0})
        *lines, last = map(json.loads, body.splitlines())
        assert status == 200
        assert [line["token"] for line in lines] == right
        name = last["recording"]["id"]
        read = torch.tensor([[*ids[0].tolist(), *right[:-1]]])
        with torch.no_grad(), regard.record(foreign.model) as recording:
            logits = foreign.model(input_ids=read).logits
        shares = logits[0, ids.shape[1] - 1 :].softmax(-1)
        for n, line in enumerate(lines):
            assert line["probability"] == pytest.approx(float(shares[n, line["token"]]), rel=1e-4)
        row = client.codes(f"/api/r/{name}/row", q=10, layer=1, head=2)
        assert int(row.argmax()) == int(recording.map(1)[0, 2, 10].argmax())


@pytest.mark.slow
def test_a_prompt_goes_through_the_models_own_chat_template_where_asked(foreign):
    with open_client(adapter=foreign) as client:
        assert client.json("/api/start")["models"][0]["chats"]
        sent = {"text": "Hello", "tokens": 2, "temperature": 0, "seed": 0}
        status, body = client.post("/api/generate", {**sent, "chat": 1})
        *lines, last = map(json.loads, body.splitlines())
        assert status == 200
        assert lines[0]["place"] == len(foreign.encode("<user> Hello\n<me>"))
        assert last["recording"]["request"] == {**sent, "temperature": 0.0, "chat": True}
        assert client.json(f"/api/r/{last['recording']['id']}/story")["text"] == "Hello"
    with open_client(adapter=make_sorter()) as client:
        status, body = client.post("/api/generate", {**sent, "text": "CAB", "chat": 1})
    assert (status, "no chat template" in json.loads(body.splitlines()[-1])["error"]) == (400, True)

"""A page with several models: a request chooses among them, and each recording is of the model that read it."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel, GPT2TokenizerFast, LlamaConfig, LlamaForCausalLM

import regard
from bounds import EXPONENTIAL, assert_within, estimate_rounding
from regard.cli.model_loading import CAUSAL_LM, TransformersModel, load_model
from regard.compiled import threads
from regard.generate import generate
from regard.models import TransformersDecoder
from regard.models.compiled_decoder import CompiledDecoder
from regard.models.gpt2_adapter import GPT2Adapter
from regard.observe import record
from regard.show.page import model_adapter
from regard.show.page.session import GenerationRequest, Session
from regard.text.byte_pair import GPT2_FOLDER
from show.page.server_client import make_sorter, make_writer, open_client

compiled = pytest.mark.skipif(
    not (threads.can_run_loops() and threads.find_barrier_address()),
    reason="this torch has no OpenMP to call, or numba is not installed",
)
NEW, INNER = 9, 331
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
def llama():
    """A random Llama so wide that compiled code runs it, its weights so large that its logits are decided."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 264, "intermediate_size": INNER, "num_hidden_layers": 4, "num_attention_heads": 6}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 48, "vocab_size": 50257, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1, bos_token_id=None, eos_token_id=None)).eval()
    words = GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe"))
    return TransformersModel("llama", model, words)


def write_story(adapter, **settings) -> tuple[list[dict], dict]:
    """The lines of a text that a model writes, and the last, with its recording."""
    asked = GenerationRequest("the cat sat on", NEW, **settings)
    *lines, last = Session(None, adapter).generate_text(asked, lambda: None)
    return lines, last


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.3, "seed": 5}])
def test_a_llama_writes_in_compiled_calls_what_generate_writes(llama, settings, monkeypatch):
    run, counts = CompiledDecoder.run, []
    monkeypatch.setattr(
        model_adapter, "SLOW_STEP", 1e9
    )  # seconds; else a step after a slow one, as on a busy machine, is watched
    monkeypatch.setattr(CompiledDecoder, "run", lambda own, new, cache: counts.append(new.numel()) or run(own, new, cache))
    lines, last = write_story(llama, **settings)
    assert counts == [1] * (NEW - 1)  # all but the first token, for which the model itself reads the prompt
    decoder, ids = TransformersDecoder(llama.model), llama.encode("the cat sat on")
    assert [one["token"] for one in lines] == [int(token) for token in generate(decoder, [ids], NEW, **settings)]
    assert last["recording"]["model"] == "llama"


@pytest.mark.slow
def test_what_a_llama_looked_at_is_what_eager_attention_in_float64_says(llama):
    lines, last = write_story(llama, temperature=1.0, seed=1)
    prompt = llama.encode("the cat sat on")
    ids = torch.tensor([[*prompt, *(one["token"] for one in lines[:-1])]])

    @torch.no_grad()
    def compute_rows(model):
        return model(input_ids=ids, output_attentions=True).attentions[3][0].mean(0)[len(prompt) - 1 :]  # of 4 layers the last

    exact = copy.deepcopy(llama.model).double()
    exact.set_attn_implementation("eager")
    rows, bound = compute_rows(exact), estimate_rounding(exact, compute_rows, INNER + EXPONENTIAL)
    assert len(last["looked"]) == NEW
    for row, looked in zip(rows, last["looked"], strict=True):
        weights = torch.tensor([near["weight"] for near in looked])
        assert_within(weights, row[[near["place"] for near in looked]], bound)
        assert_within(weights, row.topk(len(looked)).values, bound)


def make_wide_letters(dtype: torch.dtype) -> GPT2Adapter:
    """A random GPT-2 of letters, so wide that compiled code runs it in float32."""
    torch.manual_seed(0)
    model = regard.GPT2(regard.GPT2Config(layers=3, heads=4, width=256, context=32, vocabulary=3)).eval().to(dtype)
    model.text = regard.GPT2.load("sorter").text
    return GPT2Adapter("wide", model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "foreign"])
@pytest.mark.parametrize(("prompt", "new"), [("CCABACB", 5), ("C", 3), ("CCAB", 1)])
def test_a_recorded_story_is_that_of_one_forward_over_it(name, prompt, new, llama, foreign):
    adapter = make_wide_letters(torch.float64)
    if name != "gpt2":
        given = llama if name == "llama" else foreign
        adapter = TransformersModel(name, copy.deepcopy(given.model).double(), given.tokenizer)
    session = Session(None, adapter)
    *lines, last = session.generate_text(GenerationRequest(prompt, new, 1.0, seed=1), lambda: None)
    found = session.get_entry(last["recording"]["id"]).recording
    whole = torch.tensor([[*adapter.encode(prompt), *(one["token"] for one in lines[:-1])]])
    with record(adapter.model, keep="values") as expected, torch.no_grad():
        adapter.run(whole)
    assert found.layers() == expected.layers()
    for layer in range(adapter.layers):
        for read in (lambda one: one.map(layer).dense(), lambda one: one.values(layer)):  # noqa: B023  # called here
            assert read(found).shape == read(expected).shape
            assert torch.allclose(read(found), read(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_prompt_is_read_once(name, llama):
    adapter, counts = make_wide_letters(torch.float32) if name == "gpt2" else llama, []
    embedding = adapter.model.tokens if name == "gpt2" else adapter.model.model.embed_tokens
    hook = embedding.register_forward_pre_hook(lambda _, given: counts.append(given[0].numel()))
    prompt = "CCABACB" if name == "gpt2" else "the cat sat on the mat"
    *_, last = Session(None, adapter).generate_text(GenerationRequest(prompt, NEW, 1.0), lambda: None)
    hook.remove()
    assert "recording" in last
    assert counts == [len(adapter.encode(prompt)), *[1] * (NEW - 1), NEW - 1]  # all new tokens again, for the recording


@compiled
def test_words_are_written_in_compiled_calls_while_another_visitor_waits_for_a_finding(monkeypatch):
    run, counts = CompiledDecoder.run, []
    monkeypatch.setattr(model_adapter, "SLOW_STEP", 1e9)
    monkeypatch.setattr(CompiledDecoder, "run", lambda own, new, cache: counts.append(new.numel()) or run(own, new, cache))
    session = Session(None, make_wide_letters(torch.float32))
    lines = session.generate_text(GenerationRequest("CCAB", NEW, 1.0), lambda: None)
    next(lines)
    monkeypatch.setattr("regard.show.page.session.find_finding", lambda *_: [next(lines), next(lines)])
    session.get_finding(SimpleNamespace(id="another", ids=None), None, lambda: None)
    assert "recording" in [*lines][-1]
    assert counts == [1] * (NEW - 1)


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

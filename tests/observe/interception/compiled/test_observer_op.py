"""attn_implementation="regard": a model of transformers is recorded while it is compiled, and its bits stay the same."""

import subprocess
import sys

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5Model

import regard
from observe.family import widen
from regard.observe import record

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor


@pytest.fixture(autouse=True)
def dynamo_reset():
    regard.register_attention()
    transformers.logging.set_verbosity_error()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build_llama(**settings):
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, **settings)).eval()
    widen(model, 1.2)
    return model


def build_t5(**settings):
    torch.manual_seed(3)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 36, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    model = T5Model(T5Config(**sizes, decoder_start_token_id=0, **settings)).eval()
    widen(model, 1.2)
    return model


def feed(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"decoder_input_ids": ids[:, :5]} if isinstance(model, T5Model) else {}
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False, **given}


def list_maps(recording):
    """Every map of a recording by kind, part and layer."""
    return {(name, kind): recording.map(name, kind=kind) for kind in ("self", "cross") for name in set_of(recording, kind)}


def set_of(recording, kind):
    return [call.name for call in recording.calls if call.kind == kind]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "backend"), [(build_llama, "eager"), (build_t5, "eager"), (build_t5, "inductor")])
@torch.no_grad()
def test_a_model_that_was_compiled_before_is_recorded_and_its_bits_do_not_change(build, backend):
    model, ids = build(attn_implementation="regard"), torch.randint(1, 64, (2, 11))
    given = feed(model, ids)
    compiled = torch.compile(model, backend=backend)
    expected = compiled(**given)[0]
    with record(compiled) as recording:
        output = compiled(**given)[0]
    assert torch.equal(output, expected)
    assert not recording.missed
    with record(model) as eager:
        model(**given)
    with record(other := build()) as plain:
        other(**given)
    assert list_maps(recording).keys() == list_maps(plain).keys()
    for key, m in list_maps(plain).items():
        for found in (list_maps(recording)[key], list_maps(eager)[key]):
            assert float((found.dense() - m.dense()).abs().max()) < 1e-5, key
            if backend == "eager":
                assert torch.equal(found.dense(), m.dense()), key


@pytest.mark.slow
@torch.no_grad()
def test_a_model_of_transformers_that_is_compiled_in_the_block_is_recorded_and_its_bits_do_not_change():
    model, ids = build_llama(), torch.randint(1, 64, (2, 11))
    given = feed(model, ids)
    expected = torch.compile(model, backend="eager")(**given)[0]
    torch._dynamo.reset()
    with record(model) as recording:
        output = torch.compile(model, backend="eager")(**given)[0]
    assert torch.equal(output, expected)
    assert not recording.missed
    assert recording.names == [f"model.layers.{n}.self_attn" for n in range(3)]


@pytest.mark.slow
@torch.no_grad()
def test_a_generation_whose_steps_are_compiled_is_one_map():
    model, ids = build_llama(attn_implementation="regard"), torch.randint(1, 64, (2, 7))
    with record(model) as eager:
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.forward = torch.compile(model.forward, backend="eager")
    with record(model) as recording:
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert not recording.missed
    assert len(recording.runs) == 1
    for layer in range(3):
        assert torch.equal(recording.map(layer).dense(), eager.map(layer).dense())


@torch.no_grad()
def test_a_layer_that_is_compiled_in_place_is_recorded():
    model, ids = build_llama(attn_implementation="regard"), torch.randint(1, 64, (2, 7))
    with record(model) as eager:
        expected = model(ids).logits
    model.model.layers[1].compile(backend="eager")
    with record(model) as recording:
        assert torch.equal(model(ids).logits, expected)
    assert recording.names == eager.names
    assert not recording.missed


@pytest.mark.slow
def test_registering_without_transformers_says_what_to_do():
    code = "import regard\ntry: regard.register_attention()\nexcept regard.ConfigError as error: print(error)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=600).stdout
    assert told.startswith("transformers is not imported here: import it before")

"""The recurrence of every family is recorded as a map: times the values it is what the layer computed, and nothing changes."""

import warnings

import pytest
import torch

import regard
from observe.recurrent_models import RECURRENT, draw_tokens
from regard.errors import ConfigError
from regard.map.implicit_map import ImplicitMap
from regard.observe import record
from regard.show.page.recording_entry import RecordingEntry, summarize_entry

EQUAL = 1e-5  # float32, relative to the largest output of a head
every = pytest.mark.parametrize(
    "family", [pytest.param(one, id=one.name, marks=() if one.quick else pytest.mark.slow) for one in RECURRENT]
)


def get(name):
    return next(one for one in RECURRENT if one.name == name)


def run(model, tokens, **options):
    with torch.no_grad():
        return model(tokens, **options)[0]


def generate(model, tokens, count=4, **options):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(tokens, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, **options)


def list_maps(recording) -> list[ImplicitMap]:
    return [recording.map(layer, kind="implicit") for layer in range(len(recording.layers("implicit")))]


@every
def test_every_layer_is_recorded_its_product_is_its_output_and_no_bit_changes(family):
    model, tokens = family.build(), draw_tokens(21)
    outside = run(model, tokens)
    with record(model) as recording:
        inside = run(model, tokens)
    assert torch.equal(outside, inside)
    assert not recording.missed
    assert len(recording.layers("implicit")) == family.implicit
    assert len(recording.layers()) == family.softmax
    for layer, found in enumerate(list_maps(recording)):
        b, h, q, k = found.shape
        assert (b, q, k) == (2, 21, 21)
        certificate = found.certificate()
        assert certificate.rows == b * h * q
        assert certificate.error < EQUAL
        values = recording.values(layer, kind="implicit")
        expected = found @ values
        for row in range(b):
            outputs = found.outputs.outputs[row].double()
            bias = torch.stack([torch.as_tensor(found.get_bias(head)).double() for head in range(h)]).view(h, 1, 1)
            far = (expected[row].double() + bias - outputs).abs().flatten(1).amax(1)
            assert (far <= EQUAL * outputs.abs().flatten(1).amax(1)).all()


@pytest.mark.slow
@every
def test_the_steps_of_a_generation_form_the_map_of_one_forward(family):
    model, tokens = family.build(), draw_tokens()
    if not hasattr(model, "generate"):
        pytest.skip("this class does not generate")
    outside = generate(model, tokens)
    with record(model) as recording:
        inside = generate(model, tokens)
    assert torch.equal(outside, inside)
    assert not recording.missed
    assert len(recording.runs) == 1
    with record(model) as whole:
        run(model, outside[:, :-1])
    for found, expected in zip(list_maps(recording), list_maps(whole), strict=True):
        assert found.certificate().error < EQUAL
        if family.name != "rwkv" and family.is_same_stepwise:  # RWKV's generation reads some tokens twice
            size = expected.dense().abs().max()
            assert (found.dense() - expected.dense()).abs().max() < EQUAL * size
    last = [call for call in recording.calls if call.kind == "implicit"][-1]
    assert last.step == 3
    assert last.map.certificate().error < 10 * EQUAL  # of a single row, whose outputs may all be small


def test_a_model_in_float64_has_exact_maps_where_its_code_does_not_round_to_float32():
    model = get("lfm2").build().double()
    with record(model) as recording:
        run(model, draw_tokens(29))
    assert max(found.certificate().error for found in list_maps(recording)) < 1e-14
    assert recording.map(0, kind="implicit").dtype == torch.float64


def test_numbers_that_are_both_decay_and_scale_are_stored_once():
    model = get("mamba").build()
    with record(model) as recording:
        run(model, draw_tokens(31))
    found = recording.map(0, kind="implicit").mechanism
    assert found.decay.data_ptr() == found.key_scale.data_ptr()


def test_only_the_last_state_of_a_generation_is_kept():
    model = get("mamba2").build()
    with record(model) as recording:
        generate(model, draw_tokens(), count=5)
    states = [call.stored.state is None for call in recording["backbone.layers.0.mixer"]]
    assert states == [True, True, True, True, False]


def test_memory_grows_with_the_tokens_not_with_their_square():
    model = get("mamba2").build()
    sizes = []
    for tokens in (16, 32, 64):
        with record(model) as recording:
            run(model, draw_tokens(tokens))
        sizes.append(recording.map(0, kind="implicit").nbytes)
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


def test_softmax_layers_keep_their_numbers_and_default_names():
    model = get("qwen3_next").build()
    with record(model) as recording:
        run(model, draw_tokens())
    assert recording.layers() == ["model.layers.1.self_attn", "model.layers.3.self_attn"]
    assert recording.layers("implicit") == ["model.layers.0.linear_attn", "model.layers.2.linear_attn"]
    assert [call.kind for call in recording.calls] == ["implicit", "self", "implicit", "self"]
    assert recording["model.layers.2.linear_attn"][0].map.shape == (2, 4, 13, 13)
    assert recording.map(1, head=2, kind="implicit").shape == (2, 1, 13, 13)
    assert recording.heads(1, kind="implicit") == (0, 1, 2, 3)
    assert not recording.last.parts


def test_padding_beams_and_a_second_prompt_keep_their_rows_apart():
    model, tokens = get("qwen3_next").build(), draw_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    with record(model) as recording:
        run(model, tokens, attention_mask=mask)
        run(model, tokens)
    assert len(recording.runs) == 2
    padded = recording.runs[0].map(0, kind="implicit")
    assert padded.certificate().error < EQUAL
    assert not padded[0, :, 4:, :3].any()  # what is padded writes nothing that is read
    with record(model) as beams:
        sequences = generate(model, tokens[:1], num_beams=3)
    with record(model) as whole:
        run(model, sequences[:, :-1])
    found = beams.map(1, kind="implicit").select(batch=beams.last.rows[0]).dense()
    expected = whole.map(1, kind="implicit").dense()
    assert (found - expected).abs().max() < EQUAL * expected.abs().max()


def test_generations_that_take_turns_keep_their_own_states_where_those_of_the_first_layer_are_equal():
    model, tokens = get("lfm2").build().double(), draw_tokens(batch=1)  # of convolutions, whose states are of the last words
    with record(model) as recording:
        sequence = generate(model, tokens, 7, guidance_scale=1.7)
    assert not recording.missed
    assert [run.map(1).shape[2:] for run in recording.runs] == [(19, 19), (7, 7)]
    for found, read in zip(recording.runs, (sequence[:, :-1], sequence[:, 12:-1]), strict=True):
        with record(model) as expected:
            run(model, read)
        for kind in ("self", "implicit"):
            for layer in range(2):
                ours, theirs = (one.map(layer, kind=kind).dense() for one in (found, expected))
                assert (ours - theirs).abs().max() < EQUAL


@pytest.mark.parametrize("end", [None, 41, 20])
@pytest.mark.parametrize("prompt", [[5, 9] * 5, [5, 9, 33] * 4])
def test_guesses_that_were_rejected_leave_convolutions(prompt, end):
    model, tokens = get("lfm2").build().double(), torch.tensor([prompt])
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    with record(model) as recording:
        sequence = model.generate(tokens, prompt_lookup_num_tokens=4, **options)
    assert torch.equal(sequence, model.generate(tokens, **options))
    assert not recording.missed
    assert recording.last.rows == [0]
    read = sequence[:, : recording.map(0).shape[2]]
    assert read.shape[1] >= sequence.shape[1] - 1
    with record(model) as expected:
        run(model, read)
    for layer in range(2):
        for kind in ("self", "implicit"):
            assert (recording.map(layer, kind=kind).dense() - expected.map(layer, kind=kind).dense()).abs().max() < EQUAL
        ours, theirs = (one.values(layer, kind="implicit") for one in (recording, expected))
        assert (ours - theirs).abs().max() < EQUAL * theirs.abs().max()
        assert recording.map(layer, kind="implicit").certificate().error < EQUAL


def test_a_text_that_goes_on_after_rejected_guesses_continues_convolutions():
    model, tokens = get("lfm2").build().double(), torch.tensor([[5, 9] * 5])
    with record(model) as recording:
        first = generate(model, tokens, 6, prompt_lookup_num_tokens=4, return_dict_in_generate=True)
        more = torch.cat([first.sequences, torch.tensor([[7, 8]])], 1)
        sequence = generate(model, more, 3, past_key_values=first.cache)
    assert not recording.missed
    assert len(recording.runs) == 1
    with record(model) as expected:
        run(model, sequence[:, :-1])
    for layer in range(2):
        ours, theirs = (one.map(layer, kind="implicit") for one in (recording, expected))
        assert (ours.dense() - theirs.dense()).abs().max() < EQUAL


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_values_after_beams_are_those_of_the_sequence_that_won(name):
    model, tokens = get(name).build(), draw_tokens()
    with record(model) as beams:
        sequences = generate(model, tokens, num_beams=3)
    with record(model) as whole:
        run(model, sequences[:, :-1])
    history = next(iter(beams.last.implicit_histories.values()))
    assert any(not torch.equal(rows, torch.arange(len(rows))) for rows in history.parent_rows.values())
    found, expected = beams.values(0, kind="implicit")[beams.last.rows], whole.values(0, kind="implicit")
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < EQUAL * expected.abs().max()


def test_states_that_a_model_does_not_move_with_its_beams_are_followed_as_they_are():
    model = get("recurrent_gemma").build()
    with record(model) as recording:
        generate(model, draw_tokens(batch=1), num_beams=3)
    assert max(found.certificate().error for found in list_maps(recording)) < EQUAL


def test_a_state_from_before_the_recording_is_missed_by_its_reason():
    model, tokens = get("qwen3_next").build(), draw_tokens()
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        with pytest.warns(UserWarning, match="enter record before the prompt"), record(model) as recording:
            model(tokens[:, :1], cache=cache)
    assert {one.module for one in recording.missed} == {"model.layers.0.linear_attn", "model.layers.2.linear_attn"}
    assert len(recording.layers()) == 2
    assert not recording.layers("implicit")


@pytest.mark.parametrize("name", ["OwnDeltaNet", "NeuralMemory"])
def test_a_recurrent_module_whose_code_is_unknown_is_missed_by_its_name(name):
    own = type(name, (torch.nn.Module,), {"forward": lambda self, x: x.cumsum(1)})
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), own())
    with pytest.warns(UserWarning, match="implied_map"), record(model) as recording:
        model(torch.randn(2, 7, 3))
    assert [(one.kernel, one.module) for one in recording.missed] == [(name, "1")]


def test_a_selection_of_layers_leaves_the_others_out_without_a_word():
    model = get("mamba").build()
    with record(model, layers=[1]) as recording:
        run(model, draw_tokens())
    assert recording.layers("implicit") == ["backbone.layers.1.mixer"]
    assert not recording.missed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "recurrent_gemma", "lfm2", "qwen3_next"])
def test_a_saved_recording_has_the_same_maps_to_the_bit(name, tmp_path):
    model = get(name).build()
    with record(model) as recording:
        generate(model, draw_tokens(batch=1), num_beams=2)
    recording.save(tmp_path / "recording")
    loaded = regard.load(tmp_path / "recording")
    assert [call.kind for call in loaded.calls] == [call.kind for call in recording.calls]
    for ours, theirs in zip(list_maps(recording), list_maps(loaded), strict=True):
        assert torch.equal(ours.dense(), theirs.dense())
        assert ours.certificate() == theirs.certificate()


def test_what_needs_weights_says_that_there_are_none():
    model = get("mamba").build()
    with record(model) as recording:
        run(model, draw_tokens())
    assert "no layer has a softmax" in str(regard.heads(recording))
    assert "No softmax: entries are signed" in recording._repr_html_()
    with pytest.raises(ConfigError, match="takes no needle"):
        regard.heads(recording, kind="implicit", needle=slice(1))
    with pytest.raises(ConfigError, match=r"it has implicit attention\. Pass kind='implicit'"):
        recording.map(recording.names[0])


@pytest.mark.parametrize(("family", "softmaxes"), [("mamba", 0), ("qwen3_next", 2)])
def test_the_page_shows_layers_with_a_softmax_apart_from_those_without(family, softmaxes):
    model = get(family).build()
    with record(model) as recording:
        run(model, draw_tokens(batch=1))
    found = summarize_entry(RecordingEntry("r1", recording))
    shown = [layer["name"] for one in found["attentions"] for layer in one["layers"]]
    assert len(shown) == softmaxes
    assert [one["name"] for one in found["implicit"]] == recording.layers("implicit")
    assert not {*shown} & {*recording.layers("implicit")}

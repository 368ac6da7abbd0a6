"""Effects of heads beside edits of the model's own weights, and estimates beside autograd."""

import json

import pytest
import torch

import regard
from observe.models import bart, gpt2, llama, words
from regard.errors import ConfigError, DataError, MissingNameError

pytestmark = pytest.mark.usefixtures("in_float64", "float64_models")
EQUAL = 1e-9  # float64


def pick_lead(output):
    """The lead of token 3 over token 7 after the last word, of each row."""
    return output.logits[:, -1, 3] - output.logits[:, -1, 7]


@pytest.mark.slow
def test_the_effect_of_a_head_is_that_of_its_rows_of_the_output_projection_set_to_zero():
    model, tokens = gpt2().eval(), words(3, 11)
    found = regard.effects(model, tokens, pick_lead)
    with torch.no_grad():
        before = pick_lead(model(tokens))
    assert [(row.layer, row.head) for row in found] == [(layer, head) for layer in range(3) for head in range(4)]
    for row in found:
        changed = gpt2().eval()
        with torch.no_grad():
            changed.transformer.h[row.layer].attn.c_proj.weight[8 * row.head : 8 * row.head + 8] = 0
            expected = pick_lead(changed(tokens)) - before
        assert abs(row.effect - float(expected.mean())) < EQUAL
        assert row.effect.low < row.effect < row.effect.high
        assert row.effect.count == 3
    assert found.whole == pytest.approx(float(before.mean()), abs=EQUAL)


def test_the_effects_on_a_translator_are_those_of_its_decoder_alone():
    inputs = {"input_ids": words(2, 11), "decoder_input_ids": words(2, 5)}
    with torch.no_grad():
        before = pick_lead(bart()(**inputs))
    for row in regard.effects(bart(), inputs, pick_lead, heads=[(0, 1), (2, 3)]):
        changed = bart()
        with torch.no_grad():
            changed.model.decoder.layers[row.layer].self_attn.out_proj.weight[:, 8 * row.head : 8 * row.head + 8] = 0
            expected = pick_lead(changed(**inputs)) - before
        assert abs(row.effect - float(expected.mean())) < EQUAL


@pytest.mark.slow
def test_the_estimate_is_the_derivative_with_respect_to_the_size_of_a_heads_output():
    model, tokens = llama().eval(), words(2, 9)
    found = regard.effects(model, tokens, pick_lead, heads=[(0, 1), (1, 5)])
    step = 1e-5
    for row in found:
        sizes = []
        for sign in (1, -1):
            changed = llama().eval()
            weight = changed.model.layers[row.layer].self_attn.o_proj.weight
            with torch.no_grad():
                weight[:, 8 * row.head : 8 * row.head + 8] *= 1 - sign * step
                sizes.append(float(pick_lead(changed(tokens)).mean()))
        assert row.estimate == pytest.approx((sizes[0] - sizes[1]) / (2 * step), rel=1e-5, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["mean", "resample"])
def test_other_replacements_are_those_of_knock_out_and_come_from_a_source(by):
    model, tokens = gpt2().eval(), words(2, 9)
    with torch.no_grad(), regard.record(model, keep="values") as source:
        model(words(5, 12))
    for given in ({}, {"source": source}):
        found = regard.effects(model, tokens, pick_lead, heads=[(1, 2)], by=by, **given)
        with torch.no_grad():
            before = pick_lead(model(tokens))
            with regard.intervene(model, regard.KnockOut(1, 2, by=by, **given)):
                after = pick_lead(model(tokens))
        assert abs(found.rows[0].effect - float((after - before).mean())) < EQUAL


@pytest.mark.slow
def test_a_call_that_ended_continues_from_its_file_and_another_call_is_refused(tmp_path):
    model, tokens, path = gpt2().eval(), words(2, 9), tmp_path / "effects.jsonl"
    whole = regard.effects(model, tokens, pick_lead)
    done = []

    def stop_after_five(rows, count):
        for n, row in enumerate(rows):
            if n == 5:
                raise KeyboardInterrupt
            yield row

    with pytest.raises(KeyboardInterrupt):
        regard.effects(model, tokens, pick_lead, path=path, watch=stop_after_five)
    with path.open("a") as file:
        file.write('{"layer": 1, "he')  # a killed process
    forwards = model.register_forward_hook(lambda *_: done.append(1))
    again = regard.effects(model, tokens, pick_lead, path=path)
    forwards.remove()
    assert len(done) == 1 + 12 - 5
    assert again.to_dicts() == whole.to_dicts()
    assert [len(json.loads(line)) for line in path.read_text().splitlines()] == [3] * 13
    before = path.read_bytes()
    with pytest.raises(DataError, match="not of this call"):
        regard.effects(model, words(2, 10), pick_lead, path=path)
    path.write_text("not a line\n")
    with pytest.raises(DataError, match="not of this call"):
        regard.effects(model, tokens, pick_lead, path=path)
    assert before


def test_a_frozen_model_in_training_mode_is_measured_and_left_as_it_was():
    model, tokens = gpt2(), words(1, 9)
    model.requires_grad_(False).train()
    found = regard.effects(model, tokens, lambda output: output.logits[0, -1, 3], heads=[(0, 0)])
    assert model.training
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert found.rows[0].effect != 0
    assert found.rows[0].estimate != 0


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"measure": lambda output: output.logits}, ConfigError),
        ({"measure": lambda output: 3.0}, ConfigError),
        ({"measure": lambda output: output.logits[0, -1, 3].detach()}, ConfigError),
        ({"measure": "logits"}, ConfigError),
        ({"heads": "some"}, MissingNameError),
        ({"heads": [(9, 9)]}, ConfigError),
        ({"heads": [3]}, ConfigError),
        ({"heads": [(0.0, 1)]}, ConfigError),
        ({"heads": [(True, 1)]}, ConfigError),
        ({"by": "noise"}, MissingNameError),
        ({"watch": 3}, ConfigError),
        ({"by": "mean"}, ConfigError),
    ],
)
def test_what_cannot_be_measured_is_refused(given, error):
    with pytest.raises(error):
        regard.effects(gpt2().eval(), words(1, 9), **({"measure": pick_lead} | given))


@pytest.mark.parametrize("by", ["mean", "resample"])
def test_a_file_of_effects_with_another_source_is_refused(tmp_path, by):
    model, tokens, path = gpt2().eval(), words(2, 9), tmp_path / "effects.jsonl"
    sources = []
    for others in (words(2, 11), words(3, 12)):
        with torch.no_grad(), regard.record(model, keep="values") as source:
            model(others)
        sources.append(source)
    settings = {"heads": [(1, 2)], "by": by, "path": path}
    found = regard.effects(model, tokens, pick_lead, source=sources[0], **settings)
    assert regard.effects(model, tokens, pick_lead, source=sources[0], **settings).to_dicts() == found.to_dicts()
    with pytest.raises(DataError, match="not of this call"):
        regard.effects(model, tokens, pick_lead, source=sources[1], **settings)

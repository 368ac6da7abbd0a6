import pytest
import torch
from benchmarks.lineage import MODELS, make_model, prove, sentence, start_decoding, write


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_at_once_and_beside_another_are_one_function(name):
    with torch.inference_mode():
        prove(make_model(name), sentence(7))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_steps_are_another_function_is_found_out(name, monkeypatch):
    model = make_model(name)
    honest = model.read
    monkeypatch.setattr(model, "read", lambda tokens, state: (honest(tokens, state)[0] + 1e-3, honest(tokens, state)[1]))
    with torch.inference_mode(), pytest.raises(AssertionError, match="differs from itself"):
        prove(model, sentence(5))


def test_the_models_are_of_about_one_size():
    counts = [sum(one.numel() for one in make_model(name).parameters()) for name in MODELS]
    assert max(counts) < 1.06 * min(counts)


def test_as_many_tokens_are_written_as_are_asked_for():
    model, source = make_model("plain"), sentence(5)
    with torch.inference_mode():
        assert write(model, start_decoding(model, source), 11).shape == (1, 11)

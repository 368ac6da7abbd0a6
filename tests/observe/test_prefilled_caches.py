"""A step recorded with a cache that was filled before: its query stands behind the keys of the cache."""

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import regard
from observe.models import CACHE, bart, gpt2, llama, words

pytestmark = pytest.mark.usefixtures("in_float64", "float64_models")
EQUAL = 1e-9  # float64
PAST = 5


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 101}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).double()


def fill_cache(model):
    """Return the arguments of a step after a forward that filled a cache, and the name of its tokens."""
    if not model.config.is_encoder_decoder:
        return {CACHE: model(words(2, PAST), use_cache=True).past_key_values}, "input_ids"
    found = model(input_ids=words(2, 7), decoder_input_ids=words(2, PAST), use_cache=True)
    return {"encoder_outputs": (found.encoder_last_hidden_state,), CACHE: found.past_key_values}, "decoder_input_ids"


@pytest.mark.parametrize("make", [gpt2, llama, bart, t5])
@pytest.mark.parametrize("count", [1, 2])
def test_the_distances_are_from_the_place_behind_the_cache(make, count, tmp_path):
    model = make().eval()
    with torch.no_grad():
        given, name = fill_cache(model)
        with regard.record(model) as recording:
            model(**given, **{name: words(2, PAST + 2)[:, PAST : PAST + count]}, use_cache=True)
    recording.save(tmp_path / "step.regard")
    for one in (recording, regard.load(tmp_path / "step.regard")):
        for layer in range(len(one.layers())):
            weights = one.map(layer)[...]
            assert weights.shape[2:] == (count, PAST + count)
            back = PAST + torch.arange(count).unsqueeze(1) - torch.arange(PAST + count)
            distances = (weights * back).sum(-1).mean((0, 2))
            before = weights[:, :, torch.arange(count), PAST - 1 + torch.arange(count)].mean((0, 2))
            for row in regard.heads(one, layers=[layer]):
                assert row.scores["distance"] == pytest.approx(float(distances[row.head]), abs=EQUAL)
                assert row.scores["previous token"] == pytest.approx(float(before[row.head]), abs=EQUAL)

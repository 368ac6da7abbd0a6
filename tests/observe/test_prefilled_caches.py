"""A step recorded with a cache that was filled before: its query stands behind the keys of the cache."""

import pytest
import torch
import torch.nn.functional as F
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


class Attention(torch.nn.Module):
    """Causal attention whose cache is a pair of tensors, with which it joins the new keys and values."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x, past=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], -2), torch.cat((past[1], v), dim=2)
        if self.form == "sdpa":
            context = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        else:
            later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
            context = (q @ k.mT / 2).masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.out(context.transpose(1, 2).flatten(2)), (k, v)


class ClassAttention(torch.nn.Module):
    """A class token, the first of all tokens, looks at them."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.q, self.kv = torch.nn.Linear(16, 16), torch.nn.Linear(16, 32)

    def forward(self, token, others):
        x = torch.cat([token, others], 1)
        q = self.q(token).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 4, 4)).permute(2, 0, 3, 1, 4)
        if self.form == "sdpa":
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("form", ["sdpa", "by hand"])
def test_a_step_stands_behind_keys_that_its_module_joins_with_the_new_one(form):
    torch.manual_seed(0)
    model, x = Attention(form).double().eval(), torch.randn(2, PAST + 1, 16, dtype=torch.float64)
    with torch.no_grad():
        _, past = model(x[:, :PAST])
        with regard.record(model) as recording:
            model(x[:, PAST:], past)
    weights = recording.map(0)[...]
    assert weights.shape == (2, 4, 1, PAST + 1)
    distances = (weights * (PAST - torch.arange(PAST + 1))).sum(-1).mean((0, 2))
    for row in regard.heads(recording):
        assert row.scores["distance"] == pytest.approx(float(distances[row.head]), abs=EQUAL)
        assert row.scores["previous token"] == pytest.approx(float(weights[:, row.head, 0, PAST - 1].mean()), abs=EQUAL)
        assert row.scores["itself"] == pytest.approx(float(weights[:, row.head, 0, PAST].mean()), abs=EQUAL)


@pytest.mark.parametrize("form", ["sdpa", "by hand"])
def test_a_class_token_that_is_the_first_of_all_tokens_stands_there(form):
    torch.manual_seed(0)
    model, x = ClassAttention(form).double().eval(), torch.randn(2, PAST + 1, 16, dtype=torch.float64)
    with torch.no_grad(), regard.record(model) as recording:
        model(x[:, :1], x[:, 1:])
    weights = recording.map(0)[...]
    assert weights.shape == (2, 4, 1, PAST + 1)
    for row in regard.heads(recording):
        assert row.scores["itself"] == pytest.approx(float(weights[:, row.head, 0, 0].mean()), abs=EQUAL)

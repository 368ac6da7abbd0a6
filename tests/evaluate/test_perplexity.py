import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import assert_within, cross_entropy_bounds
from evaluate.small_gpt2 import compute_losses_by_windows, gpt2, theirs
from regard import ConfigError, DataError, ShapeError
from regard.evaluate import perplexity
from regard.evaluate.perplexity import count_words_and_bytes
from regard.evaluate.token_losses import losses
from regard.text import BytePair, Letters
from regard.text.corpus import prepare

N, C = 19, 31
WORDS = BytePair.train(["the cat sat on the mat"] * 5, 270)
TEXTS = st.text(st.sampled_from("ab é\n\u2003🦊<|endoftext|>")).filter(str.strip)


@pytest.fixture(scope="module")
def model():
    return gpt2(N, C)


def text(length, seed=0):
    return torch.randint(0, N, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@given(st.integers(2, 90), st.integers(1, C), st.data())
def test_it_is_the_plain_sum_of_log_probabilities_each_token_once(model, length, context, data):
    stride, batch = data.draw(st.integers(1, context)), data.draw(st.integers(1, 7))
    tokens = text(length)
    expected = compute_losses_by_windows(model, tokens, context, stride)
    found = perplexity(model, tokens, context=context, stride=stride, batch=batch)
    assert found.tokens == length - 1 == len(expected)
    assert found.nats == pytest.approx(math.fsum(expected), rel=1e-12)
    assert found.by_token == pytest.approx(math.exp(math.fsum(expected) / (length - 1)), rel=1e-12)


@given(st.integers(2, 90), st.integers(1, C), st.data())
def test_several_windows_at_once_are_what_they_are_one_at_a_time(model, length, context, data):
    stride = data.draw(st.integers(1, context))
    one, several = (perplexity(model, text(length), context=context, stride=stride, batch=batch) for batch in (1, 5))
    assert several.nats == pytest.approx(one.nats, rel=1e-12)
    assert several.tokens == one.tokens


@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_every_token_is_predicted_from_as_many_as_is_promised(length, context, data):
    stride = data.draw(st.integers(1, context))
    seen = {}

    def uniform(tokens):  # each token is its place, so that what stands before it is known
        for row in tokens.tolist():
            for place, token in enumerate(row):
                seen.setdefault(token + 1, place + 1)
        return torch.zeros(*tokens.shape, 100, dtype=torch.float64)

    found = perplexity(uniform, list(range(length)), context=context, stride=stride)
    assert found.by_token == pytest.approx(100)
    assert all(seen[at] == at if at <= context else seen[at] >= context - stride + 1 for at in range(1, length))


def test_ours_theirs_and_a_function_are_models_alike(model, tmp_path):
    tokens = text(80)
    other = theirs(model, tmp_path / "model")
    asked = {"context": C, "stride": 11, "batch": 2}
    expected = perplexity(model, tokens, **asked).nats
    for subject in (other, lambda t: model(t), lambda t: SimpleNamespace(logits=model(t))):
        assert perplexity(subject, tokens, **asked).nats == pytest.approx(expected, rel=1e-12)


def test_tokens_may_be_a_list_a_tensor_an_array_or_a_corpus(model, tmp_path):
    letters = Letters("".join(map(chr, range(97, 97 + N))))
    corpus = prepare([letters.decode(text(70))], letters, tmp_path / "corpus", shard=13)
    found = {perplexity(model, one, context=C, stride=7).nats for one in (text(70), torch.tensor(text(70)), corpus)}
    found |= {perplexity(model, np.array(text(70), np.uint16), context=C, stride=7).nats}
    assert len(found) == 1


def test_words_and_bytes_share_the_same_nats(model):
    found = perplexity(model, text(50), context=C, words=13, bytes=97)
    assert found.loss_nats * 49 == pytest.approx(found.nats)
    assert (math.log(found.by_token) * 49, math.log(found.by_word) * 13, math.log(found.by_byte) * 97) == pytest.approx(
        [found.nats] * 3
    )
    assert found.bits_per_byte == pytest.approx(math.log2(found.by_byte))
    bare = perplexity(model, text(50), context=C)
    assert (bare.by_word, bare.by_byte, bare.bits_per_byte, bare.stride) == (None, None, None, C)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_a_wider_one(dtype):
    logits = torch.randn(37, 4099, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.arange(37) * 100
    exact = -logits.double().log_softmax(-1)[range(37), targets]
    rows = zip(logits.split(1), targets.split(1), strict=True)
    allowed = torch.tensor([cross_entropy_bounds(torch.float32, *row, terms=1)[0] for row in rows])
    assert_within(losses(logits, targets), exact, allowed)
    assert losses(logits, targets).dtype == torch.float64


def test_a_model_is_run_in_evaluation_and_left_as_it_was(model):
    training = gpt2(N, C)
    for dropout in (part for part in training.modules() if isinstance(part, torch.nn.Dropout)):
        dropout.p = 0.5
    training.train()
    training.blocks[1].eval()
    before = [part.training for part in training.modules()]
    assert perplexity(training, text(40), context=C).nats == perplexity(model, text(40), context=C).nats
    assert [part.training for part in training.modules()] == before
    assert all(weight.grad is None for weight in training.parameters())


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"context": 5, "stride": 6}, ConfigError, "or tokens are left out; got stride=6, context=5"),
        ({"context": 0}, ConfigError, "context must be a whole number of at least 1"),
        ({"context": 5, "batch": 0}, ConfigError, "batch must be"),
        ({"context": C + 1}, ShapeError, "the model's context is 31"),
        ({"context": 5, "tokens": [3]}, DataError, "at least two tokens"),
        ({"context": 5, "model": lambda t: t}, ShapeError, r"must give logits \(b, t, n\)"),
        ({"context": 5, "model": lambda t: (1, 2)}, ShapeError, "got tuple"),
    ],
)
def test_what_cannot_be_scored_is_refused(model, asked, error, says):
    subject, tokens = asked.pop("model", model), asked.pop("tokens", text(50))
    with pytest.raises(error, match=says):
        perplexity(subject, tokens, **asked)


@pytest.mark.parametrize("context", [2, C])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_model_that_sees_the_tokens_it_predicts_is_refused(context, stride):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(N, 8), layer, torch.nn.Linear(8, N)).eval()
    with pytest.raises(ConfigError, match="change with later tokens"):
        perplexity(model, text(40), context=context, stride=stride)
    causal = SimpleNamespace(mask=torch.nn.Transformer.generate_square_subsequent_mask)
    assert perplexity(lambda x: model[2](layer(model[0](x), causal.mask(x.shape[1]))), text(40), context=C).tokens == 39


@given(st.lists(TEXTS, min_size=1), st.integers(1, 9))
def test_words_and_bytes_of_a_corpus_are_those_of_its_documents(tmp_path_factory, texts, block):
    made = prepare(texts, WORDS, tmp_path_factory.mktemp("made") / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(count_words_and_bytes.__globals__, "DECODE_BLOCK", block)
        words, size = count_words_and_bytes(made)
    assert words == sum(len(text.split()) for text in texts)
    assert size == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_a_token_that_has_no_logit_is_named(wrong):
    with pytest.raises(DataError, match=f"token {wrong} is out of range: the model has tokens 0 to 10"):
        losses(torch.zeros(3, 11), torch.tensor([0, wrong, 10]))

import pytest
import torch

from regard.generate import choices
from regard.models import GPT2, GPT2Config
from regard.observe import record
from regard.show.generated_tokens import MAX_ATTENDED, describe_tokens, list_attended
from regard.text.number_tokenizer import NumberTokenizer

PROMPT, NEW, CONTEXT, WORDS, TOP = [3, 1, 4, 1, 5], 6, 11, 17, 3


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = GPT2(GPT2Config(layers=5, heads=3, width=12, context=CONTEXT, vocabulary=WORDS)).double().eval()
    with torch.no_grad():
        for weights in made.parameters():
            weights.mul_(8 if weights.dim() > 1 else 1)  # so that heads are not nearly even
    return made


def test_each_token_is_shown_with_its_probability_and_those_that_were_likelier(model):
    said = list(describe_tokens(choices(model, [PROMPT], NEW, seed=7), NumberTokenizer(), TOP))
    assert len(said) == NEW
    for n, one in enumerate(said):
        with torch.no_grad():
            expected = model(torch.tensor([[*PROMPT, *(earlier.token for earlier in said[:n])]]))[0, -1].softmax(-1)
        values, tokens = expected.topk(TOP)
        assert (one.word, one.probability) == (str(one.token), pytest.approx(float(expected[one.token]), rel=1e-10))
        assert [word for word, _ in one.likeliest] == [str(token) for token in tokens.tolist()]
        assert [value for _, value in one.likeliest] == pytest.approx(values.tolist(), rel=1e-10)


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
def test_one_forward_over_the_text_tells_what_each_token_attended_to_as_it_was_chosen(model, layers, prompt, monkeypatch):
    monkeypatch.setattr("regard.show.generated_tokens.ROWS", 4)  # several blocks of queries
    tokens, rows = list(prompt), []
    with record(model) as steps:
        for chosen in choices(model, [prompt], NEW, seed=7):
            rows.append(torch.stack([call.map.dense()[0, :, -1] for call in steps.last.softmax_calls[-layers:]]).mean((0, 1)))
            tokens.append(int(chosen.tokens))
    with record(model) as whole, torch.no_grad():
        model(torch.tensor([tokens[:-1]]))
    words = NumberTokenizer().pieces(tokens)
    found = list_attended(whole, layers, words, len(prompt) - 1)
    assert len(found) == NEW
    for row, attended in zip(rows, found, strict=True):
        values, places = row.topk(min(MAX_ATTENDED, len(row)))
        assert [near.position for near in attended] == places.tolist()
        assert [near.weight for near in attended] == pytest.approx(values.tolist(), rel=1e-10)
        assert all(near.word == words[near.position] for near in attended)

import pytest
import torch

from regard.generate import choices
from regard.models import GPT2, GPT2Config
from regard.observe import record
from regard.show.generated_tokens import MAX_ATTENDED, describe_tokens, select_last_layers
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


def telling(model, new=NEW, layers=2, **settings):
    """What is told of each new token, and the words at the end."""
    words = NumberTokenizer().pieces(PROMPT)
    with record(model) as recording:
        steps = choices(model, [PROMPT], new, seed=7, **settings)
        return list(describe_tokens(steps, words, NumberTokenizer(), TOP, recording, layers)), words


def test_each_token_is_shown_with_its_probability_and_those_that_were_likelier(model):
    said, words = telling(model)
    assert words == [*map(str, PROMPT), *(one.word for one in said)]
    for n, one in enumerate(said):
        with torch.no_grad():
            expected = model(torch.tensor([[*PROMPT, *(earlier.token for earlier in said[:n])]]))[0, -1].softmax(-1)
        values, tokens = expected.topk(TOP)
        assert one.probability == pytest.approx(float(expected[one.token]), rel=1e-10)
        assert [word for word, _ in one.likeliest] == [str(token) for token in tokens.tolist()]
        assert [value for _, value in one.likeliest] == pytest.approx(values.tolist(), rel=1e-10)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_what_it_looked_at_is_the_mean_row_of_the_last_layers_of_the_token_before_it(model, layers):
    said, words = telling(model, layers=layers)
    with torch.no_grad(), record(model) as whole:
        model(torch.tensor([[int(word) for word in words]]))
    for n, one in enumerate(said):
        query = len(PROMPT) + n - 1  # the token that it was chosen after
        rows = [whole.map(layer)[0, :, query, : query + 1] for layer in range(5 - layers, 5)]
        values, places = torch.stack(rows).mean((0, 1)).topk(MAX_ATTENDED)
        assert [near.position for near in one.attended] == places.tolist()
        assert [near.weight for near in one.attended] == pytest.approx(values.tolist(), rel=1e-10)
        assert all(near.word == words[near.position] for near in one.attended)


@pytest.mark.slow
def test_beyond_the_context_places_are_still_counted_among_all_words(model):
    said, words = telling(model, new=2 * CONTEXT, past="slide")
    last = said[-1]
    assert min(near.position for near in last.attended) >= len(words) - 1 - CONTEXT
    assert all(near.word == words[near.position] for near in last.attended)
    assert max(near.position for near in last.attended) > CONTEXT


def test_nothing_is_said_that_was_not_asked_for(model):
    words = NumberTokenizer().pieces(PROMPT)
    (one,) = describe_tokens(choices(model, [PROMPT], 1, seed=7), words, NumberTokenizer())
    assert (one.likeliest, one.attended) == ([], [])


@pytest.mark.parametrize(("layers", "last"), [(1, [0]), (3, [2]), (6, [5]), (8, [6, 7]), (12, [9, 10, 11])])
def test_the_last_layers_are_a_quarter_of_them_and_at_least_one(layers, last):
    assert list(select_last_layers(layers)) == last

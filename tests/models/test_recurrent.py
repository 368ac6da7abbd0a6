import pytest
import torch

from models.translators import RECURRENT, make_translator, pad_sentences, sentences
from regard import ConfigError, ShapeError
from regard.models.recurrent import RecurrentTranslator

KINDS = ["plain", "plain lstm of two layers", "additive", "additive lstm of two layers"]
HIDDEN, WIDTH = RECURRENT["hidden"], RECURRENT["width"]


def sizes(**other) -> dict:
    return {**RECURRENT, **other}


def gru(x, state, part, direction=""):
    """A step of Cho et al. 2014's unit, as torch writes its equations."""
    weights = (getattr(part, f"{name}_l0{direction}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    w, u, b, a = weights
    (xr, xz, xn), (hr, hz, hn) = (w @ x + b).chunk(3), (u @ state + a).chunk(3)
    reset, update = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    return (1 - update) * torch.tanh(xn + reset * hn) + update * state


def compute_logits_by_equations(model, source, target):
    """The logits by the papers' equations, a sentence and a word at a time."""
    embedding = model.vocabulary.words.weight
    words = [embedding[token] * WIDTH**0.5 for token in source]
    forward, backward = [torch.zeros(HIDDEN).double()], [torch.zeros(HIDDEN).double()]
    for ahead, back in zip(words, reversed(words), strict=True):
        forward.append(gru(ahead, forward[-1], model.encoder))
        backward.append(gru(back, backward[-1], model.encoder, "_reverse"))
    annotations = [torch.cat(pair) for pair in zip(forward[1:], reversed(backward[1:]), strict=True)]
    state, logits = torch.tanh(model.start(backward[-1])), []
    for token in target:
        context, word = torch.cat((forward[-1], backward[-1])), embedding[token] * WIDTH**0.5
        if model.attention is not None:
            query, key, weight = model.attention.W_query.weight, model.attention.W_key.weight, model.attention.weight
            scores = torch.stack([weight @ torch.tanh(query @ state + key @ one) for one in annotations])
            context = sum(share * one for share, one in zip(scores.exp() / scores.exp().sum(), annotations, strict=True))
        state = gru(torch.cat((word, context)), state, model.decoder)
        logits.append(embedding @ torch.tanh(model.readout(torch.cat((state, word, context)))))
    return torch.stack(logits)


@pytest.mark.parametrize("kind", ["plain", "additive"])
@torch.no_grad()
def test_the_logits_are_the_equations_of_the_papers_written_out(kind):
    model, rows = make_translator(kind), sentences(5, 3, 1)
    targets = torch.tensor([[5, 2, 7, 1], [5, 9, 9, 4], [5, 1, 2, 3]])
    found = model(*pad_sentences(rows), targets)
    for row, source in enumerate(rows):
        torch.testing.assert_close(found[row], compute_logits_by_equations(model, source, targets[row]))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_never_enters(kind):
    model, rows, targets = make_translator(kind), sentences(7, 2, 5), torch.tensor([[5, 2, 7], [5, 9, 9], [5, 1, 2]])
    found = model(*pad_sentences(rows), targets)
    assert torch.equal(found, model(*pad_sentences(rows, filler=11), targets))
    for row, source in enumerate(rows):
        torch.testing.assert_close(found[row], model(*pad_sentences([source]), targets[row : row + 1])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_at_a_time_gives_the_logits_of_all_at_once(kind):
    model, source = make_translator(kind), pad_sentences(sentences(7, 2, 5))
    targets = torch.tensor([[5, 2, 7, 3], [5, 9, 9, 1], [5, 1, 2, 8]])
    state, logits = model.begin(model.encode(*source)), []
    for column in targets.T:
        found, state = model.read(column, state)
        logits.append(found)
    torch.testing.assert_close(torch.stack(logits, 1), model(*source, targets))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_state_go_on_as_those_rows(kind):
    model, source, index = make_translator(kind), pad_sentences(sentences(7, 2, 5)), torch.tensor([2, 2, 0, 1])
    state = model.read(torch.tensor([5, 5, 5]), model.begin(model.encode(*source)))[1]
    expected = model.read(torch.tensor([3, 4, 8]), state)[0]
    found = model.read(torch.tensor([3, 4, 8])[index], state.select_rows(index))[0]
    torch.testing.assert_close(found, expected[index])
    torch.testing.assert_close(model.read(torch.tensor([3, 4, 8]), state)[0], expected)  # the state is a value


def test_dropout_is_of_training_alone():
    torch.manual_seed(0)
    model = RecurrentTranslator("additive", **sizes(dropout=0.5))
    asked = (*pad_sentences(sentences(7, 2)), torch.tensor([[5, 2], [5, 9]]))
    assert not torch.equal(model(*asked), model(*asked))
    model.eval()
    assert torch.equal(model(*asked), model(*asked))


@pytest.mark.parametrize("kind", KINDS)
def test_its_sizes_make_it_again(kind):
    model = make_translator(kind, dtype=torch.float32, tied=False)
    again = type(model)(**model.sizes)
    again.load_state_dict(model.state_dict())
    asked = (*pad_sentences(sentences(7, 2)), torch.tensor([[5, 2], [5, 9]]))
    assert torch.equal(again.eval()(*asked), model(*asked))
    assert again.sizes == model.sizes


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"cell": "rnn"}, "cell must be one of gru, lstm; got 'rnn'"),
        ({"attention": "dot"}, "attention must be None or \"additive\", got 'dot'"),
        ({"hidden": 0}, "hidden must be a whole number of at least 1, got 0"),
        ({"dropout": 1.0}, "dropout must be a probability"),
    ],
)
def test_impossible_sizes_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        RecurrentTranslator(**sizes(**wrong))


@pytest.mark.parametrize("lengths", [[3, 0], [3, 4], [3], [3.0, 2.0]])
def test_lengths_that_do_not_fit_the_sources_are_refused(lengths):
    with pytest.raises(ShapeError, match=r"lengths must be \(b,\), 2 whole numbers from 1 to 3, one per source"):
        make_translator("plain").encode(torch.ones(2, 3, dtype=torch.int64), lengths)

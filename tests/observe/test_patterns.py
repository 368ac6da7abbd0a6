import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense import both, close
from regard import AttentionMap, Causal, ConfigError, ShapeError
from regard.observe import patterns
from regard.observe.map_view import MapView
from regard.observe.patterns import Duplicate, Induction
from strategies import requests

ASKED = requests().filter(lambda asked: asked.k.shape[2] > 0)
H, T, D = 3, 41, 5


def member(pattern, tokens, p, j):
    """Whether a query at position p finds key j in a pattern, by its definition."""
    source = j - isinstance(pattern, Induction)
    return 0 <= p < len(tokens) and 0 <= source < p and tokens[source] == tokens[p]


@st.composite
def looks(draw):
    """A map with tokens of few kinds, the same as a dense matrix, and a pattern."""
    m, dense = both(draw(ASKED))
    tokens = torch.randint(0, draw(st.integers(1, 4)), (dense.shape[0], dense.shape[3]))
    return MapView(m, tokens), dense, draw(st.sampled_from([Duplicate(), Induction()]))


def is_padding(dense, n, j):
    """Whether a key is padding: in no head does its own query count, or any that counts attend to it."""
    for m in range(dense.shape[1]):
        queries = dense.queries(n, m)
        if all(p != j or i in queries for i, p in enumerate(dense.positions[n])) or (dense.weights[n, m, queries, j] > 0).any():
            return False
    return True


def table(dense, pattern, tokens):
    """A pattern as a bool table (b, h, q, k) of the keys a query may see."""
    b, h, q, k = dense.shape
    found = torch.zeros(b, h, q, k, dtype=torch.bool)
    for n in range(b):
        for i in range(q):
            for j in range(k):
                found[n, :, i, j] = member(pattern, tokens[n].tolist(), dense.positions[n][i], j)
        if isinstance(pattern, Induction):
            found[n, :, :, [j for j in range(1, k) if is_padding(dense, n, j - 1)]] = False
    return found & dense.visible


@pytest.mark.slow
@settings(max_examples=80)
@given(looks())
def test_a_score_is_the_mean_weight_on_the_pattern_of_the_queries_that_may_see_it(given_look):
    look, dense, pattern = given_look
    there = table(dense, pattern, look.tokens)
    expected = dense.mean(
        lambda b, h, i: dense.weights[b, h, i, there[b, h, i]].sum(), lambda b, h, i: bool(there[b, h, i].any())
    )
    close(patterns.score(look, pattern), expected)
    close(pattern.match(look).count, there.sum(-1))


def their_pattern(pattern, tokens):
    """What it looks for, (t, t): duplicates are all equal tokens before a query, and induction those moved on by one."""
    t = len(tokens)
    equal = (tokens.unsqueeze(0) == tokens.unsqueeze(1)).float().tril(-1)
    if isinstance(pattern, Duplicate):
        return equal
    return torch.cat([torch.zeros(t, 1), equal[:, :-1]], 1).tril()


@pytest.mark.parametrize("few", [1, 2, 5, 100])
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("pattern", [Duplicate(), Induction()], ids=repr)
def test_groups_of_any_size_are_summed_alike(pattern, few, rows, monkeypatch):
    torch.manual_seed(7)
    tokens = torch.randint(0, 5, (2, T)) * torch.randint(0, 2, (2, T))  # one token is half of the text
    q, k = torch.randn(2, 2, H, T, D, dtype=torch.float64)
    m = AttentionMap(q, k, Causal())
    monkeypatch.setattr(patterns, "FEW", few)
    monkeypatch.setattr(patterns, "ROWS", rows)
    monkeypatch.setattr(patterns, "PAIRS", 11)
    monkeypatch.setattr("regard.observe.map_view.BLOCK_NUMBERS", 29)
    found = pattern.match(MapView(m, tokens))
    sought = torch.stack([their_pattern(pattern, one) for one in tokens]).double().unsqueeze(1)
    close(found.weight, (m.dense() * sought).sum(-1))
    close(found.count, sought.sum(-1).expand(2, H, T))


def test_no_part_of_a_pattern_is_larger_than_a_block(monkeypatch):
    tokens = torch.zeros(1, 3000, dtype=torch.int64)
    groups = patterns.group_by_token(tokens[0], torch.arange(3000), 0, torch.ones(3000, dtype=torch.bool))
    parts = list(groups.iterate_parts())
    assert sum(len(queries) for queries, _, among in parts if among is None) == sum(range(1, patterns.FEW + 1))
    assert all(len(queries) <= patterns.PAIRS for queries, _, among in parts if among is None)
    assert all(len(queries) <= patterns.ROWS for queries, _, among in parts if among is not None)


def test_tokens_are_needed_and_are_one_for_each_key():
    m = AttentionMap(torch.randn(1, 1, T, D), torch.randn(1, 1, T, D), Causal())
    with pytest.raises(ConfigError, match=r"MapView\(m, tokens=ids\)"):
        patterns.score(m, Induction())
    with pytest.raises(ShapeError, match=rf"\(1, {T}\)"):
        MapView(m, torch.zeros(1, T - 1))


@pytest.mark.parametrize("hide", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("is_left", [True, False])
def test_padding_is_no_earlier_occurrence_of_a_token(hide, is_left):
    torch.manual_seed(2)
    pads, q, k = 4, torch.randn(1, H, 13, D), torch.randn(1, H, 13, D)
    text = slice(pads, None) if is_left else slice(9)
    is_padding = torch.ones(13, dtype=torch.bool)
    is_padding[text] = False
    tokens = torch.randint(1, 4, (1, 13)).masked_fill(is_padding, 1)  # the token of padding stands in the text too
    tokens[0, text.start or 0] = 1
    bias = torch.zeros(1, 1, 1, 13).masked_fill(is_padding, hide)
    padded = MapView(AttentionMap(q, k, Causal(), bias=bias), tokens)
    alone = MapView(AttentionMap(q[:, :, text], k[:, :, text], Causal()), tokens[:, text])
    for pattern in (Duplicate(), Induction()):
        close(patterns.score(padded, pattern), patterns.score(alone, pattern))

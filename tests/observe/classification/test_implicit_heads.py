"""The scores of heads without a softmax are shares of the absolute values of the dense matrix, by plain loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from dense import Recorded
from map.test_implicit_map import dense, recurrences
from observe.recurrent_models import RECURRENT, draw_tokens
from regard import ConfigError
from regard.map.convolution import Convolution
from regard.map.implicit_map import ImplicitMap
from regard.map.linear_recurrence import LinearRecurrence
from regard.map.scored_matrix import ScoredMatrix
from regard.map.stored_matrix import JoinedMatrices, StoredMatrix
from regard.mechanism.mask_algebra import EVERYTHING
from regard.mechanism.masks import Causal, Given, Window
from regard.observe.classification.implicit_heads import has_own_tokens, score_absolute_shares
from show.implicit_recordings import SiluAttention, record_implicit

FAMILIES = {one.name: one for one in RECURRENT}
WINDOW = 2


class ImplicitRecorded(Recorded):
    """A recording of maps without a softmax."""

    def layers(self, kind="self", part=None):
        return self.names if kind == "implicit" else []


def score_by_loops(matrix, reaches, tokens, first=0):
    """The mean share of each pattern, its chance, and the number of queries that count, of one matrix (q, k)."""
    patterns = {
        "previous token": lambda i, j: j == i - 1,
        "itself": lambda i, j: j == i,
        "duplicate": lambda i, j: j < i and tokens[j] == tokens[i],
        "induction": lambda i, j: 0 < j <= i and tokens[j - 1] == tokens[i],
        "first token": lambda i, j: j == 0,
        "back 3": lambda i, j: j == i - 3,
        "local": lambda i, j: abs(i - j) <= WINDOW,
    }
    found = {}
    for name, is_on in patterns.items():
        shares, chances = [], []
        for row, entries in enumerate(matrix.tolist()):
            i, total = row + first, math.fsum(map(abs, entries))
            on = [j for j in range(len(entries)) if is_on(i, j) and reaches(i - j)]
            if total and on:
                shares.append(math.fsum(abs(entries[j]) for j in on) / total)
                chances.append(len(on) / sum(reaches(i - j) for j in range(len(entries))))
        found[name] = [math.fsum(x) / len(x) if x else math.nan for x in (shares, chances)] + [len(shares)]
    return found


def assert_scores(m, matrices, reaches, tokens):
    assert has_own_tokens(m)
    found = score_absolute_shares(m, WINDOW, [3], tokens)
    for row in range(m.shape[0]):
        for head in range(m.shape[1]):
            expected = score_by_loops(matrices[row, head], reaches, tokens[row].tolist(), m.first)
            for name, (mean, chance, count) in expected.items():
                one = found[name]
                assert int(one.counts[row, head]) == count
                assert float(one.mean()[row, head]) == pytest.approx(mean, abs=1e-10, nan_ok=True)
                assert float(one.chance[row, head]) == pytest.approx(chance, abs=1e-12, nan_ok=True)
            sizes = matrices[row, head].abs()
            back = torch.arange(m.shape[2]).unsqueeze(-1) + m.first - torch.arange(m.shape[3])
            rows = sizes.sum(-1) > 0
            distances = (sizes * back).sum(-1)[rows] / sizes.sum(-1)[rows]
            assert float(found["distance"].mean()[row, head]) == pytest.approx(float(distances.mean()), abs=1e-9, nan_ok=True)


@given(recurrences(), st.data())
def test_shares_are_those_of_the_dense_matrix(mechanism, data):
    b, _, t = mechanism.shape
    first = data.draw(st.integers(0, t - 1))
    tokens = torch.randint(0, 4, (b, t), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    nearest = 1 if mechanism.is_strict and mechanism.skip is None else 0
    assert_scores(ImplicitMap(mechanism, first=first), dense(mechanism)[:, :, first:], lambda back: back >= nearest, tokens)


def test_a_convolution_reaches_the_keys_of_its_width():
    torch.manual_seed(0)
    m = ImplicitMap(Convolution(kernel=torch.randn(1, 3, 4).double(), batch=2, length=11))
    assert_scores(m, m.dense(), lambda back: 0 <= back < 4, torch.randint(0, 3, (2, 11)))


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("lengths", [[11], [7, 1, 1, 2]], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(4)], ids=str)
def test_signed_maps_reach_the_keys_of_their_mask_also_in_steps(mask, lengths, first):
    torch.manual_seed(0)
    mixing = torch.tensor([[[1.0, -0.6]], [[0.4, -0.9]]]).double()
    parts, end = [], 0
    for length in lengths:
        end += length
        q, k = torch.randn(2, 2, length, 3).double(), torch.randn(2, 2, end, 3).double()
        parts.append(ScoredMatrix(q=q, k=k, mask=mask, offset=end - length, mixing=mixing))
    m = ImplicitMap(parts[0] if len(parts) == 1 else JoinedMatrices(parts), first=first)
    nearest = 11 if mask == Causal() else 5
    assert_scores(m, m.dense(), lambda back: 0 <= back < nearest, torch.randint(0, 3, (2, 11)))


def test_masks_that_do_not_show_whose_tokens_the_keys_are_are_refused():
    q, k = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 3)
    for mask in (EVERYTHING, Given(torch.rand(5, 5) < 0.7), Causal() & ~Window(1)):
        assert not has_own_tokens(ImplicitMap(ScoredMatrix(q=q, k=k, mask=mask)))
    assert not has_own_tokens(ImplicitMap(ScoredMatrix(q=q[:, :, :1], k=k, mask=Causal(), offset=4)))
    assert not has_own_tokens(ImplicitMap(StoredMatrix(entries=torch.randn(1, 2, 5, 5).tril())))


def test_a_head_is_named_after_where_its_absolute_values_are():
    t, h = 40, 2
    signs = torch.randn(1, 1, t, 1).sign().double()
    previous = LinearRecurrence(decay=torch.full((1, h, t, 1), -5.0).double(), q=signs, k=signs.flip(2), is_strict=True)
    own = LinearRecurrence(decay=torch.full((1, h, t, 1), -5.0).double(), q=signs, k=signs.flip(2))
    recording = ImplicitRecorded([ImplicitMap(previous), ImplicitMap(own)], tokens=[f"a{n % 7}" for n in range(t)])
    table = regard.heads(recording, kind="implicit")
    assert [(row.layer, row.head, row.kind) for row in table] == [
        (0, 0, "previous token"),
        (0, 1, "previous token"),
        (1, 0, "itself"),
        (1, 1, "itself"),
    ]
    assert "entropy" not in table.detectors
    assert "breadth" not in table.detectors
    assert [row.layer for row in regard.heads(recording, kind="implicit", layers=["layer.1"])] == [1, 1]
    assert "no duplicate, induction" in str(regard.heads(ImplicitRecorded([ImplicitMap(own)]), kind="implicit"))


def test_heads_of_a_model_have_a_row_each():
    model = FAMILIES["mamba2"].build()
    with torch.no_grad(), regard.record(model) as recording:
        model(draw_tokens())
    recording.tokens = draw_tokens()
    table = regard.heads(recording, kind="implicit")
    assert [(row.layer, row.head) for row in table] == [(layer, head) for layer in range(2) for head in range(6)]
    found = score_absolute_shares(recording.map(1, kind="implicit"), 16, (), draw_tokens())
    assert table[8].scores["induction"] == pytest.approx(float(found["induction"].mean()[:, 2].nanmean()))


def test_what_may_be_cross_attention_is_refused():
    with pytest.raises(ConfigError, match="neither a recurrence nor a convolution"):
        regard.heads(record_implicit(7, SiluAttention), kind="implicit")

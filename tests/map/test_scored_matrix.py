"""A ScoredMatrix and a StoredMatrix are the matrices that their formulas say, whatever is asked of their maps."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ConfigError, ShapeError
from regard.map.implicit_map import ImplicitMap
from regard.map.scored_matrix import ScoredMatrix
from regard.map.stored_matrix import JoinedMatrices, StoredMatrix
from regard.mechanism.masks import Causal, Window

EQUAL = 1e-12  # float64
FORMULAS = {
    "softmax": lambda s: s.softmax(-1).nan_to_num(),
    "relu": F.relu,
    "squared relu": lambda s: F.relu(s) ** 2,
    "sigmoid": torch.sigmoid,
    "square": lambda s: s**2,
    "silu": lambda s: s * torch.sigmoid(s),
    "gelu": lambda s: s * (1 + torch.erf(s / 2**0.5)) / 2,
}


@st.composite
def matrices(draw):
    """A ScoredMatrix, and its entries."""
    b, g, share, h = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q, k, d, n = draw(st.integers(1, 11)), draw(st.integers(1, 13)), draw(st.integers(1, 5)), g * share
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))

    def number(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    name = draw(st.sampled_from(sorted(FORMULAS)))
    given = {"q": number(b, n, q, d), "k": number(b, g, k, d), "scale": 0.7, "activation": name}
    scores = given["q"] @ given["k"].repeat_interleave(share, 1).mT * 0.7
    if draw(st.booleans()):
        given["softcap"] = 2.0
        scores = 2 * (scores / 2).tanh()
    if draw(st.booleans()):
        given["bias"] = number(draw(st.sampled_from([1, b])), draw(st.sampled_from([1, n])), draw(st.sampled_from([1, q])), k)
        scores = scores + given["bias"]
    if draw(st.booleans()):
        given["shift"] = 0.3
        scores = scores + 0.3
    seen = torch.ones(q, k, dtype=torch.bool)
    if draw(st.booleans()):
        given["mask"], given["offset"] = Causal() & Window(3), draw(st.integers(-2, 4))
        seen = given["mask"].table(q, k, given["offset"])
    if name == "softmax":
        entries = FORMULAS[name](scores.masked_fill(~seen, -torch.inf))
    else:
        entries = FORMULAS[name](scores).masked_fill(~seen, 0)
    if draw(st.booleans()):
        given["mixing"] = number(draw(st.sampled_from([1, b])), h, n)
        entries = torch.einsum("bhn,bnqk->bhqk", given["mixing"].expand(b, -1, -1), entries)
    if draw(st.booleans()):
        given["constant"] = number(1, entries.shape[1])
        entries = entries + given["constant"][..., None, None]
    if draw(st.booleans()):
        given["row_scale"] = number(1, draw(st.sampled_from([1, entries.shape[1]])), draw(st.sampled_from([1, q])))
        entries = entries * given["row_scale"].unsqueeze(-1)
    return ScoredMatrix(**given), entries


def assert_equal(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < EQUAL * max(1, float(expected.abs().max()))


@given(matrices())
def test_every_question_is_answered_as_by_the_dense_matrix(found):
    matrix, entries = found
    m = ImplicitMap(matrix)
    b, h, q, k = entries.shape
    assert m.shape == entries.shape
    assert_equal(m.dense(), entries)
    assert_equal(m[-1, 0, q - 1, :], entries[-1, 0, q - 1])
    assert_equal(m[:, :, 0, 0], entries[:, :, 0, 0])
    assert_equal(m.row_sums(), entries.sum(-1))
    assert_equal(m.column_sums(), entries.sum(-2))
    v = torch.randn(b, h, k, 2, dtype=torch.float64)
    assert_equal(m @ v, entries @ v)
    assert_equal(ImplicitMap(StoredMatrix(entries=entries)).dense(), entries)
    offset = max(0, k - q)
    diagonal = torch.stack([entries[:, :, i, i + offset] if i + offset < k else entries[:, :, i, 0] * 0 for i in range(q)], -1)
    assert_equal(m.diagonal(), diagonal)


@given(matrices(), st.integers(0, 3))
def test_the_steps_of_a_generation_are_the_rows_of_one_matrix_whose_later_keys_are_0(found, count):
    matrix, entries = found
    b, h, q, k = entries.shape
    steps = [torch.randn(b, h, 1, k + n + 1, dtype=torch.float64) for n in range(count)]
    joined = JoinedMatrices([matrix, *(StoredMatrix(entries=one) for one in steps)])
    m = ImplicitMap(joined)
    expected = torch.cat([F.pad(one, (0, k + count - one.shape[3])) for one in (entries, *steps)], 2)
    assert m.shape == (b, h, q + count, k + count)
    assert_equal(m.dense(), expected)
    assert_equal(ImplicitMap(joined, first=q - 1).dense(), expected[:, :, q - 1 :])


def test_parts_that_do_not_fit_are_refused():
    q, k = torch.randn(2, 1, 2, 5, 3)
    for wrong in ({"k": k[..., :2]}, {"mixing": q[0, :1]}, {"row_scale": q[0]}, {"bias": q}):
        with pytest.raises(ShapeError):
            ScoredMatrix(**{"q": q, "k": k} | wrong)
    with pytest.raises(ConfigError, match="activation"):
        ScoredMatrix(q=q, k=k, activation="exp")
    with pytest.raises(ShapeError):
        StoredMatrix(entries=q[0])

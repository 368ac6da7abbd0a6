"""An ImplicitMap is the matrix of a recurrence run token by token, whatever the decays, the groups and the way it is asked."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map.implicit_map import ImplicitMap, SampledOutputs
from regard.map.linear_recurrence import CHUNK, LinearRecurrence
from regard.map.pooling import bin_edges

EQUAL = 1e-10  # float64, relative to the largest entry


def run_recurrence(m: LinearRecurrence, v: Tensor) -> Tensor:
    """The outputs (b, h, t, e) of a recurrence on values v (b, h, t, e), one token after the other, with its state at hand."""
    b, h, t = m.shape
    outputs = torch.zeros_like(v)
    for row in range(b):
        for head in range(h):
            own = {name: x[row % len(x), head // (h // x.shape[1])].expand(t, *x.shape[3:]) for name, x in m.tensors.items()}
            decay = own["decay"] * own.get("rates", torch.ones(1))
            width = max(x.shape[-1] for name, x in own.items() if name in ("decay", "rates", "q", "k"))
            state = torch.zeros(width, v.shape[3], dtype=torch.float64)
            for i in range(t):
                earlier, state = state, decay[i].exp().unsqueeze(-1) * state
                key = own["k"][i] if "k" in own else torch.ones(width, dtype=torch.float64)
                key = key * own["key_scale"][i] if "key_scale" in own else key
                key = key * own["key_logs"][i].exp() if "key_logs" in own else key
                value = v[row, head, i]
                if "beta" in own:
                    value = own["beta"][i] * (value - key @ state)
                kept = decay[i].exp().unsqueeze(-1) * earlier
                state = state + key.unsqueeze(-1) * value
                query = own["q"][i] if "q" in own else torch.ones(width, dtype=torch.float64)
                query = query * own["row_logs"][i].exp() if "row_logs" in own else query
                output = query @ (kept if m.is_strict else state)
                output = output + own["skip"][i] * v[row, head, i] if "skip" in own else output
                outputs[row, head, i] = output * own["gate"][i] if "gate" in own else output
    return outputs


def dense(m: LinearRecurrence) -> Tensor:
    """The matrix, whose columns are the outputs for values that are 1 at one token."""
    b, h, t = m.shape
    return run_recurrence(m, torch.eye(t, dtype=torch.float64).expand(b, h, t, t))


@st.composite
def recurrences(draw, longest=11):
    b, g, share = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    t, d = draw(st.integers(1, longest) | st.just(CHUNK + 3)), draw(st.integers(1, 5))
    h = g * share
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))

    def number(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    kind = draw(st.sampled_from(["scalar", "channels", "delta", "delta of channels", "normalized"]))
    wide = d if "channels" in kind else 1
    parts = {
        "decay": -number(
            draw(st.sampled_from([1, b])), draw(st.sampled_from([1, g, h])), draw(st.sampled_from([1, t])), wide
        ).abs()
    }
    if draw(st.booleans()):
        parts["rates"] = number(1, h, 1, wide).abs()
    if draw(st.booleans()):
        parts["decay"][:, :, -1:] = -torch.inf  # a reset
    if kind != "normalized" or draw(st.booleans()):
        parts["q"], parts["k"] = number(b, g, t, d), F.normalize(number(b, g, t, d), dim=-1)
    if "delta" in kind:
        parts["beta"] = 2 * torch.rand(b, h, t, dtype=torch.float64)
    elif draw(st.booleans()):
        parts["key_scale"] = number(b, h, t)
    strict = False
    if kind == "normalized":
        parts["key_logs"], parts["row_logs"], strict = number(b, h, t), number(b, h, t), draw(st.booleans())
    elif kind == "channels" and d > 1:
        parts["row_logs"], strict = number(b, g, t, draw(st.sampled_from([1, d]))), draw(st.booleans())
    for name in ("skip", "gate"):
        if draw(st.booleans()):
            parts[name] = number(1 if name == "skip" else b, h, 1 if name == "skip" else t)
    ones = {"w": number(b, h, t)} if not any(x.shape[1] == h for x in parts.values()) else {}
    parts |= {"gate": ones["w"]} if ones else {}
    if not any(x.shape[2] == t and len(x) == b for x in parts.values()):
        parts["gate"] = number(b, h, t)
    return LinearRecurrence(**parts, is_strict=strict)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    size = float(expected.abs().max()) if expected.numel() else 0.0
    assert torch.allclose(found, expected, rtol=0, atol=EQUAL * max(1.0, size))


@pytest.mark.slow
@pytest.mark.emulated
@given(recurrences())
def test_entries_sums_products_and_pictures_are_those_of_the_recurrence(mechanism):
    found, expected = ImplicitMap(mechanism), dense(mechanism)
    b, h, t = mechanism.shape
    assert_equal(found.dense(), expected)
    assert_equal(found[...], expected)
    overview = found.overview()
    assert_equal(overview.row_sums, expected.sum(-1))
    assert_equal(found.row_sums(), expected.sum(-1))
    assert_equal(overview.column_sums, expected.sum(-2))
    assert_equal(found.received(), expected.sum(-2))
    assert_equal(overview.largest.abs(), expected.abs().amax(-1))
    assert_equal(overview.mean, expected)
    values, keys = found.top(t)
    assert_equal(expected.gather(-1, keys), values)
    v = torch.randn(b, h, t, 3, dtype=torch.float64)
    assert_equal(found @ v, run_recurrence(mechanism, v))
    assert_equal(found.mT @ v, expected.mT @ v)
    few = torch.rand(t) < 0.5
    assert_equal(found.mass(few), expected[..., few].sum(-1))
    for back in (0, 2, -1, t):
        diagonal = torch.zeros(b, h, t, dtype=torch.float64)
        for i in range(t):
            if 0 <= i - back < t:
                diagonal[..., i] = expected[..., i, i - back]
        assert_equal(found.diagonal(back), diagonal)


@given(recurrences(), st.integers(1, 5), st.integers(1, 5))
def test_bins_hold_the_signed_mean_the_sum_or_the_entry_largest_in_size(mechanism, rows, columns):
    found, expected = ImplicitMap(mechanism), dense(mechanism)
    t = mechanism.shape[2]
    edges = [bin_edges(1, t, bins).tolist() if t > 1 else [0] * (bins + 1) for bins in (rows, columns)]
    part = slice(1, t) if t > 1 else slice(0, 0)
    pictures = {how: found.tile(part, part, (rows, columns), how) for how in ("mean", "sum", "max")}
    assert_equal(found.pooled(1, 1, "sum")[..., 0, 0], expected.sum((-1, -2)))
    for r in range(rows):
        for c in range(columns):
            block = expected[:, :, edges[0][r] : edges[0][r + 1], edges[1][c] : edges[1][c + 1]].flatten(2)
            assert_equal(pictures["sum"][:, :, r, c], block.sum(-1))
            assert_equal(pictures["mean"][:, :, r, c], block.sum(-1) / max(block.shape[2], 1))
            if block.shape[2]:
                assert_equal(pictures["max"][:, :, r, c].abs(), block.abs().amax(-1))


@given(recurrences(), st.data())
def test_an_index_gives_what_it_gives_of_the_matrix(mechanism, data):
    found, expected = ImplicitMap(mechanism), dense(mechanism)
    b, h, t = mechanism.shape
    places = st.lists(st.integers(-t, t - 1), min_size=1, max_size=4)
    rows, keys = (torch.tensor(data.draw(places)) for _ in range(2))
    assert_equal(found[0, h - 1, rows], expected[0, h - 1, rows])
    assert_equal(found[:, :, rows, : t // 2], expected[:, :, rows, : t // 2])
    assert_equal(found[b - 1, 0, rows.unsqueeze(-1), keys], expected[b - 1, 0, rows.unsqueeze(-1), keys])
    assert_equal(found[:, 0, int(rows[0]), int(keys[0])], expected[:, 0, int(rows[0]), int(keys[0])])
    chosen = found.select(batch=b - 1, heads=[h - 1, 0])
    assert_equal(chosen.dense(), expected[[b - 1]][:, [h - 1, 0]])


@given(recurrences(), st.integers(1, 10))
def test_calls_that_continue_each_other_form_the_map_of_one_call(mechanism, cut):
    b, h, t = mechanism.shape
    cut = min(cut, t)
    parts = [
        LinearRecurrence(
            **{
                name: x if name == "rates" or (x.shape[2] == 1 and t > 1) else x[:, :, piece]
                for name, x in mechanism.tensors.items()
            },
            is_strict=mechanism.is_strict,
        )
        for piece in (slice(cut), slice(cut, None))
        if t > cut or piece.start is None
    ]
    lengths = [cut, t - cut]
    parts = [part for part, length in zip(parts, lengths, strict=False) if length]
    if any(part.shape[2] != length for part, length in zip(parts, lengths, strict=False)):
        return  # all of its factors are the same at every token
    found = ImplicitMap(LinearRecurrence.join_tokens(parts), first=t - cut)
    assert_equal(found.dense(), dense(mechanism)[:, :, t - cut :])
    assert found.shape == (b, h, cut, t)


def test_linear_attention_with_a_normalizer_has_rows_that_sum_to_one():
    b, h, t, d = 2, 3, 29, 5
    q, k = torch.rand(2, b, h, t, d, dtype=torch.float64)
    sums = (q * k.cumsum(2)).sum(-1)
    mechanism = LinearRecurrence(decay=torch.zeros(1, 1, 1, 1, dtype=torch.float64), q=q, k=k, row_logs=-sums.log())
    found = ImplicitMap(mechanism)
    weights = (q @ k.mT).tril()
    assert_equal(found.dense(), weights / weights.sum(-1, keepdim=True))
    assert_equal(found.row_sums(), torch.ones(b, h, t, dtype=torch.float64))


def test_a_certificate_is_the_largest_distance_from_the_outputs():
    t = 23
    mechanism = LinearRecurrence(
        decay=-torch.rand(1, 2, t, 1).double(), q=torch.randn(1, 2, t, 3).double(), k=torch.randn(1, 2, t, 3).double()
    )
    v = torch.randn(1, 2, t, 5, dtype=torch.float64)
    outputs = run_recurrence(mechanism, v)
    queries = torch.tensor([3, 11, 22])
    right = ImplicitMap(mechanism, values=v, outputs=SampledOutputs(queries, outputs[:, :, queries])).certificate()
    assert right.error < EQUAL
    assert right.rows == 6
    outputs[0, 1, 11, 2] += torch.copysign(outputs[0, 1, queries].abs().max() / 8, outputs[0, 1, 11, 2])
    wrong = ImplicitMap(mechanism, values=v, outputs=SampledOutputs(queries, outputs[:, :, queries])).certificate()
    assert 0.05 < wrong.error <= 0.125 + EQUAL
    outputs[0, 0, 3, 1] = torch.nan
    unknown = ImplicitMap(mechanism, values=v, outputs=SampledOutputs(queries, outputs[:, :, queries])).certificate()
    assert math.isnan(unknown.error)
    with pytest.raises(ConfigError, match="a map of a recording"):
        ImplicitMap(mechanism).certificate()


@pytest.mark.parametrize(
    ("parts", "error", "says"),
    [
        ({"decay": torch.zeros(1, 2, 3)}, ShapeError, "decay must be a floating point tensor of 4 axes"),
        ({"decay": torch.zeros(1, 2, 3, 1), "q": torch.zeros(1, 3, 3, 4)}, ShapeError, "a divisor of 3"),
        ({"decay": torch.zeros(1, 2, 3, 1), "beta": torch.zeros(1, 2, 5)}, ShapeError, "5 or 1"),
        ({"decay": torch.zeros(1, 2, 3, 1), "rates": torch.zeros(1, 2, 3, 1)}, ShapeError, "rates must be"),
        ({"decay": torch.zeros(1, 2, 3, 4), "key_logs": torch.zeros(1, 2, 3)}, ConfigError, "need one decay"),
    ],
)
def test_factors_that_do_not_fit_are_refused_by_name(parts, error, says):
    with pytest.raises(error, match=says):
        LinearRecurrence(**parts)


@given(recurrences(), st.data())
def test_products_of_some_rows_heads_and_queries_are_those_of_the_matrix(mechanism, data):
    b, h, t = mechanism.shape
    first = data.draw(st.integers(0, t - 1))
    rows = data.draw(st.lists(st.integers(0, b - 1), min_size=1, max_size=3))
    heads = data.draw(st.lists(st.integers(0, h - 1), min_size=1, max_size=4))
    some, expected = ImplicitMap(mechanism, first=first).select(rows, heads), dense(mechanism)[rows][:, heads, first:]
    v, r = torch.randn(len(rows), 1, t, 3).double(), torch.randn(len(rows), len(heads), t - first, 2).double()
    assert_equal(some @ v, expected @ v)
    assert_equal(some.mT @ r, expected.mT @ r)

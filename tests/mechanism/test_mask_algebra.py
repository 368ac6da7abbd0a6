import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Causal, Documents, Given, Padding, Prefix, ShapeError, Window
from regard.mechanism.mask_algebra import QueryBlock
from regard.mechanism.spans import Spans
from strategies import Asked, requests

B, H, K = 2, 3, 7


def tabulate_mask(asked: Asked) -> torch.Tensor:
    b, h, q, k = asked.q.shape[0], asked.q.shape[1], asked.q.shape[2], asked.k.shape[2]
    table = [[[[asked.sees(n, m, i, j) for j in range(k)] for i in range(q)] for m in range(h)] for n in range(b)]
    return torch.tensor(table, dtype=torch.bool).view(b, h, q, k)


@given(requests(kinds=("offset",)))
def test_the_table_of_any_rule_is_the_rule_at_each_pair_of_positions(asked):
    expected = tabulate_mask(asked)
    table = asked.mask.table(*expected.shape[2:], asked.options.get("offset", 0))
    assert table.dtype == torch.bool
    assert torch.equal(table.expand(expected.shape), expected)


def keys_of(ranges: Spans) -> set[int]:
    return {n for start, stop in ranges for n in range(start, stop)}


@given(requests(kinds=("offset",), longest=12))
def test_bounds_of_a_rule_hold_for_every_run_of_queries(asked):
    table = tabulate_mask(asked)
    offset = asked.options.get("offset", 0)
    starts = [offset] if isinstance(offset, int) else offset.tolist()
    queries, keys = table.shape[2:]
    for start in range(queries):
        for stop in range(start + 1, queries + 1):
            rows = QueryBlock(start, stop, min(starts), max(starts))
            seen = table[:, :, start:stop].flatten(0, 2)
            assert keys_of(asked.mask.find_possible_keys(rows, keys)) >= set(seen.any(0).nonzero().flatten().tolist())
            assert keys_of(asked.mask.find_certain_keys(rows, keys)) <= set(seen.all(0).nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Causal(), [(0, 20)]),
        (Window(3, 0), [(7, 20)]),
        (Window(3, 0) | Prefix(2), [(0, 2), (7, 20)]),
        (~Causal(), [(11, 64)]),
        (Documents(torch.arange(64) // 16), [(0, 32)]),
        (Padding([5, 9]), [(0, 9)]),
        (Causal() & ~Prefix(4), [(4, 20)]),
        (Given((torch.arange(64) % 64 == 7).expand(64, 64)), [(7, 8)]),
    ],
)
def test_bounds_are_tight_where_blocks_are_to_be_skipped(rule, expected):
    assert rule.find_possible_keys(QueryBlock(10, 20), 64) == tuple(expected)


def test_a_rule_prints_as_it_is_written():
    assert repr(Causal() & (Window(2) | Prefix(1))) == "Causal() & (Window(left=2, right=None) | Prefix(n=1))"
    assert repr(~(Causal() | Prefix(1))) == "~(Causal() | Prefix(n=1))"
    assert repr(Padding([1, 2])) == "Padding(lengths=(1, 2))"
    assert repr(Padding([1, 2], side="left")) == "Padding(lengths=(1, 2), side='left')"
    assert repr(Padding(torch.ones(2, 3) > 0)) == "Padding(table (2, 3))"
    assert repr(Documents([0, 0, 1])) == "Documents(ids (1, 3))"
    assert repr(Given(torch.ones(2, 3, dtype=torch.bool))) == "Given(table (1, 1, 2, 3))"


def test_equal_rules_compare_equal_and_hash_alike():
    pairs = [
        (Window(3), Window(3, None)),
        (Padding([1, 2]), Padding(torch.tensor([1, 2]))),
        (Padding([1, 2], "left"), Padding(torch.tensor([1, 2]), side="left")),
        (Padding(torch.eye(3) > 0), Padding(torch.eye(3) > 0)),
        (Documents([0, 1]), Documents(torch.tensor([0, 1]))),
        (Given(torch.eye(3) > 0), Given(torch.eye(3) > 0)),
        (Causal() & Padding([2]), Causal() & Padding([2])),
    ]
    for a, b in pairs:
        assert a == b
        assert hash(a) == hash(b)
    assert Window(3) != Window(3, 0)
    assert len({Padding([1, 1]), Padding([1, 1], "left"), Padding(torch.eye(2) > 0), Padding(torch.eye(2).flip(0) > 0)}) == 4
    assert Documents([0, 1]) != Documents([0, 2])
    assert Documents([0, 1]) != Documents([0, 1], [0, 1])
    assert Given(torch.eye(3) > 0) != Given(torch.ones(3, 3) > 0)


def test_rules_for_batches_of_different_size_do_not_join():
    rule = Padding([1, 2]) & Padding([1, 2, 3])
    with pytest.raises(ShapeError, match="2 and for 3 batch rows"):
        rule.table(3, 3)


@given(st.data())
def test_the_first_keys_and_the_first_queries_of_a_rule_are_those_of_its_table(data):
    n = data.draw(st.integers(1, K))
    m = data.draw(st.integers(1, n))
    parts = [
        Causal(),
        Window(2),
        Prefix(3),
        Documents([0, 0, 1, 1, 1, 2, 2]),
        Documents([0, 1, 1, 2, 2, 3, 3], [0] * 3 + [2] * 4),
    ]
    tables = [Given(torch.rand(B, 1, 1, K) < 0.5), Given(torch.rand(1, H, K, K) < 0.5), Given(torch.rand(B, 1, K, 1) < 0.5)]
    rule = data.draw(st.sampled_from(parts)) & ~data.draw(st.sampled_from(tables)) | data.draw(st.sampled_from(tables))
    whole = rule.table(K, K).expand(B, H, K, K)
    smaller = rule.truncate(m, n)
    assert torch.equal(smaller.table(m, n).expand(B, H, m, n), whole[:, :, :m, :n])


def test_some_heads_of_a_rule_are_those_of_its_table():
    rule = Causal() & Given(torch.rand(B, H, K, K) < 0.5) & Given(torch.rand(B, 1, 1, K) < 0.5)
    whole = rule.table(K, K).expand(B, H, K, K)
    assert torch.equal(rule.select_heads([2, 0]).table(K, K), whole[:, [2, 0]])
    assert torch.equal(rule.select_heads(slice(1, 2)).table(K, K), whole[:, 1:2])

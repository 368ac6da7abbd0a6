import numpy as np
import pytest
import torch

from regard import Causal, ConfigError, Documents, Everything, Given, Padding, Prefix, ShapeError, Window

Q, K = 5, 7


def draw_mask(rule, q=Q, k=K, offset=0) -> list[str]:
    return rule.draw(q, k, offset).replace(" ", "").splitlines()


def test_a_table_has_an_axis_for_batch_and_heads_only_where_they_differ():
    assert Causal().table(Q, K).shape == Prefix(2).table(Q, K).shape == Padding([3]).table(Q, K).shape == (Q, K)
    assert Padding([3, 4]).table(Q, K).shape == (2, 1, Q, K)
    assert Given(torch.ones(3, 1, K) > 0).table(Q, K).shape == (3, Q, K)
    assert Causal().table(Q, K, torch.tensor([0, 1])).shape == (2, 1, Q, K)


def test_padding_on_the_left_hides_the_first_keys_and_where_more_follow_the_same_ones():
    rule = Padding([0, 3, K + 1], side="left")
    assert rule.table(1, K).sum(-1).flatten().tolist() == [0, 3, K]
    real = rule.table(1, K)[:, 0, 0]
    assert torch.equal((Causal() & Padding(real)).table(K, K), (Causal() & rule).table(K, K))
    longer = rule.for_keys(K).table(1, K + 2)[:, 0, 0]
    assert torch.equal(longer, torch.cat([real, torch.ones(3, 2, dtype=torch.bool)], 1))
    assert torch.equal(Padding(real).truncate(keys=4).table(1, 4)[:, 0, 0], real[:, :4])


def test_each_of_a_batch_may_have_its_own_offset():
    table = Causal().table(1, K, torch.tensor([0, 6, -1]))
    assert table.sum(-1).flatten().tolist() == [1, 7, 0]


def test_a_window_counts_the_keys_before_and_after_the_query_s_own():
    assert draw_mask(Window(2, 0), 4, 4) == ["■···", "■■··", "■■■·", "·■■■"]
    assert draw_mask(Window(None, 1), 3, 4) == ["■■··", "■■■·", "■■■■"]
    assert draw_mask(Window(1, None), 3, 4) == ["■■■■", "■■■■", "·■■■"]
    assert draw_mask(Window(), 1, 3) == ["■■■"]


def test_a_prefix_joined_by_or_is_seen_whatever_else_is_masked():
    assert draw_mask(Causal() | Prefix(3), 4, 4) == ["■■■·", "■■■·", "■■■·", "■■■■"]


def test_documents_may_differ_within_a_batch():
    table = Documents(torch.tensor([[0, 1], [1, 1]])).table(2, 2)
    assert table[:, 0].tolist() == [[[True, False], [False, True]], [[True, True], [True, True]]]


def test_a_rule_is_a_value_that_later_changes_of_a_tensor_do_not_reach():
    table, own = torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0, 1])
    given, documents = Given(table), Documents(own)
    table[:] = False
    own[:] = 7
    assert given.table(2, 3).all()
    assert documents == Documents([0, 0, 1])


def test_bounds_may_be_whole_numbers_of_any_kind():
    assert Window(np.int64(3)) == Window(3)
    assert Prefix(np.int64(3)) == Prefix(3)
    assert Padding(np.array([1, 2])) == Padding([1, 2])


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Window(-1), ConfigError, r"Window\(left\) .* got -1"),
        (lambda: Window(None, -2), ConfigError, r"Window\(right\) .* got -2"),
        (lambda: Prefix(-1), ConfigError, "at least 0, got -1"),
        (lambda: Padding([3, -1]), ConfigError, "at least 0, got -1"),
        (lambda: Padding([1.5]), ConfigError, "whole number .* got 1.5"),
        (lambda: Padding(3), ShapeError, r"\(b,\)"),
        (lambda: Window(2.5), ConfigError, "whole number .* or None .* got 2.5"),
        (lambda: Prefix(True), ConfigError, "whole number"),
        (
            lambda: Causal() & torch.ones(2, 2).bool(),
            ConfigError,
            r"got a tensor of torch.bool \(2, 2\). Pass a bool tensor as Given",
        ),
        (lambda: Causal() | None, ConfigError, "got None. Use Everything"),
        (lambda: Causal() & 3, ConfigError, r"got 3. Combine rules with & and |, as in Causal\(\) & Window"),
        (lambda: Causal() & [[True]], ConfigError, "got a list. Pass a bool tensor as Given"),
        (lambda: Documents([[0], [0, 1]]), ShapeError, "rows of equal length"),
        (lambda: Documents(["a"]), ShapeError, "whole numbers"),
        (lambda: Documents(torch.zeros(2, 3), torch.zeros(3, 3)).batch, ShapeError, "2 and for 3 batch rows"),
        (lambda: Padding(torch.ones(2, 2, dtype=torch.int64)), ShapeError, r"\(b,\).*of 0 and 1: Padding\(mask.bool\(\)\)"),
        (lambda: Padding([3], side="up"), ConfigError, "side.* must be one of 'right', 'left'; got 'up'"),
        (lambda: Padding(torch.ones(2, 3) > 0).table(2, 4), ShapeError, "for 3 keys, but there are 4"),
        (
            lambda: Padding([3], "left").block(*[torch.arange(3)] * 2),
            ConfigError,
            r"use mask.table\(q, k\), or mask.for_keys\(k\)",
        ),
        (lambda: (Causal() & Padding([3], "left")).truncate(keys=2), ConfigError, "depends on the number of keys"),
        (lambda: Given(torch.ones(2, 2)), ShapeError, "bool tensor .* got a tensor of torch.float32"),
        (lambda: Given([[True]]), ShapeError, "got a list"),
        (lambda: Documents(torch.zeros(1, 2, 3)), ShapeError, r"\(t,\) or \(b, t\), got \(1, 2, 3\)"),
        (lambda: Documents([0, 1]).table(2, 3), ShapeError, "ids for 2 keys, but there are 3"),
        (lambda: Documents([0, 1], [0, 1, 2]).table(3, 3), ShapeError, "ids for 2 queries, but there are 3"),
        (lambda: Given(torch.ones(2, 3) > 0).table(2, 4), ShapeError, "its k is 3, expected 1 or 4"),
        (lambda: Given(torch.ones(2, 3) > 0).table(5, 3), ShapeError, "its q is 2, expected 1 or 5"),
    ],
)
def test_a_rule_that_cannot_be_says_what_was_expected_and_what_came(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize("offset", [0, 3, -4])
@pytest.mark.parametrize(
    "rule",
    [
        Everything(),
        Causal(),
        Window(2, 1),
        Window(None, 2),
        Prefix(3),
        Padding([0, 4, K + 1]),
        Padding([0, 4, K + 1], side="left"),
        ~Padding([0, 4, K + 1], side="left"),
        ~Window(2, 1) & Padding([3], side="left"),
        ~Prefix(0),
        Causal() & Window(2) & Padding([5]),
        Causal() | Prefix(3),
        Documents([0, 0, 1, 1, 1, 2, 0]) & Causal(),
        Documents([[0, 0, 1, 1, 1, 2, 2], [5] * 7, [3, 2, 1, 0, 4, 5, 6]]),
        Window(1) | Prefix(1),
        ~Causal(),
        Given(torch.ones(1, 1) > 0),
    ],
)
def test_the_stretches_of_a_rule_are_its_table(rule, offset):
    found, j = rule.find_key_ranges(Q, K, offset), torch.arange(K)
    several = (rule.table(Q, K, offset).int().diff(dim=-1) == 1).sum(-1) + rule.table(Q, K, offset)[..., 0].int() > 1
    assert found is None or not several.any()
    if found is None:  # nobody promises to find them for rules that are not simple, or beyond the ids of documents
        assert not isinstance(rule, Causal | Window | Prefix | Padding | Everything)
        return
    lows, highs = (x[:, None, :, None] for x in found)
    assert lows.dtype == highs.dtype == torch.int32
    table = rule.table(Q, K, offset)
    assert torch.equal((lows <= j) & (j < highs), table[(None,) * (4 - table.dim())].expand(len(lows), 1, Q, K))


@pytest.mark.parametrize(
    "rule",
    [
        Everything(),
        Causal(),
        Window(2, 1),
        Window(None, 2),
        Prefix(3),
        Causal() & Window(2),
        Window(1) | Prefix(1),
        Causal() & (Window(1) | Prefix(2)),
        Given(torch.tensor([True, False, True, True, False, True, False])),
        Given(torch.rand(2, 3, 1, K, generator=torch.Generator().manual_seed(0)) > 0.5) | Window(2),
        Padding([3]),
        ~Causal(),
        Documents([0, 0, 1, 1, 1, 2, 0]),
        Given(torch.ones(K, K).tril() > 0),
    ],
)
def test_the_ends_of_the_keys_of_a_rule_are_its_causal_table(rule):
    ends = rule.find_key_ends(K)
    if ends is None:
        assert isinstance(rule, Padding | Documents | Given) or rule == ~Causal()
        return
    p, j = torch.arange(K).unsqueeze(-1), torch.arange(K)
    expected = rule.block(torch.arange(K), torch.arange(K)) & (j <= p)
    assert torch.equal(*torch.broadcast_tensors((p < ends.unsqueeze(2)) & (j <= p), expected))


def test_documents_that_follow_each_other_are_stretches_and_those_that_come_back_are_not():
    assert Documents([4, 4, 4, 2, 2, 9, 9]).find_key_ranges(K, K, 0) is not None
    assert Documents([4, 4, 2, 2, 4, 9, 9]).find_key_ranges(K, K, 0) is None

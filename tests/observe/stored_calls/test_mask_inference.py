import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import EXPONENTIAL, assert_within, attention_bounds, sum_bound
from regard import AttentionMap, Causal, Documents, Everything, Given, Padding, Prefix, Window
from regard.observe.stored_calls import mask_inference

B, H, Q, K, D = 2, 3, 5, 7, 11
SMALLEST = torch.finfo(torch.float32).min


def draw_queries_and_keys(queries=Q, keys=K):
    return torch.randn(B, H, queries, D), torch.randn(B, H, keys, D)


def square(mask, tokens=K):
    """A bool table (b, 1, t, t) of a rule."""
    return mask.table(tokens, tokens).expand(B, 1, tokens, tokens).clone()


def assert_table(found, seen):
    rule, offset = found[:2]
    assert torch.equal(rule.table(*seen.shape[2:], offset).expand_as(seen), seen)


PADDED = Given(torch.tensor([[False, False, True, True, True, True, True], [True] * 5 + [False] * 2]).view(B, 1, 1, K))
PLAIN = {
    "everything": Everything(),
    "causal": Causal(),
    "a window": Causal() & Window(2),
    "a window on both sides": Window(2, 2),
    "a lopsided window": Window(1, 3),
    "packed sequences": Causal() & Documents([0, 0, 0, 1, 1, 2, 2]),
    "packed sequences seen whole": Documents([0, 0, 0, 1, 1, 2, 2]),
    "chunks of each row": Causal() & Documents([[0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 1, 1]]),
}


@pytest.mark.parametrize("rule", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("padded", [False, True])
def test_a_table_is_replaced_by_a_rule_that_needs_none(rule, padded):
    seen = square(rule & PADDED if padded else rule)
    found, offset = mask_inference.infer_table_rule(seen, K, K)
    assert_table((found, offset), seen)
    assert all(one.dim() < 4 or one.shape[2] == 1 for one in found.tensors)  # ids, and keys that are hidden from all


@pytest.mark.parametrize("offset", [0, K - Q, 1])
def test_the_offset_of_a_table_with_more_keys_is_found(offset):
    seen = Causal().table(Q, K, offset).expand(B, 1, Q, K)
    found = mask_inference.infer_table_rule(seen, Q, K)
    assert_table(found, seen)
    assert found == (Causal(), offset)


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 9), st.sampled_from([1, B]), st.sampled_from([1, H]))
def test_any_table_comes_back_whatever_it_is(seed, queries, keys, b, h):
    generator = torch.Generator().manual_seed(seed)
    seen = torch.rand(b, h, queries, keys, generator=generator) < torch.rand((), generator=generator)
    assert_table(mask_inference.infer_table_rule(seen, queries, keys), seen)


@given(st.data())
def test_any_rule_comes_back_as_one_with_its_table(data):
    tokens = data.draw(st.integers(1, 9))
    sizes = st.integers(0, tokens)
    plain = [Causal(), Window(data.draw(sizes), data.draw(sizes)), Prefix(data.draw(sizes))]
    lengths = Padding([data.draw(sizes), data.draw(sizes)])
    documents = Documents(data.draw(st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens)))
    rule = data.draw(st.sampled_from(plain)) & data.draw(st.sampled_from([Everything(), lengths, documents]))
    assert_table(mask_inference.infer_table_rule(square(rule, tokens), tokens, tokens), square(rule, tokens))


def test_a_table_is_safe_from_writes():
    for seen in (torch.rand(B, H, Q, K) < 0.5, torch.rand(B, 1, 1, K) < 0.5):
        before = seen.clone()
        rule, offset = mask_inference.infer_table_rule(seen, Q, K)
        seen.fill_(True)
        assert torch.equal(rule.table(Q, K, offset).expand(B, H, Q, K), before.expand(B, H, Q, K))


# masks of numbers


def weights(found, q, k):
    rule, offset, bias = found
    return AttentionMap(q, k, rule, bias=bias, offset=offset).dense()


def assert_softmax(found, q, k, added):
    """Fail unless the weights of a rule and a bias are those of scores to which a mask of numbers was added."""
    q, k, added = (x.double() for x in (q, k, added))
    expected = (q @ k.mT / D**0.5 + added).softmax(-1).nan_to_num()
    bias = added.where(added.abs() < 1e29, 0)  # what is smaller hides its key, or swallows the scores of a whole row
    assert_within(found, expected, attention_bounds(torch.float32, q, k, k, expected, bias=bias).weights)


@pytest.mark.parametrize("smallest", [SMALLEST, -torch.inf, -1e30])
def test_numbers_that_only_hide_are_a_rule(smallest):
    q, k = draw_queries_and_keys(K)
    added = torch.zeros(B, 1, K, K).masked_fill(~square(Causal()), smallest)
    found = mask_inference.infer_rule(added, q, k)
    assert_softmax(weights(found, q, k), q, k, added)
    if smallest != -1e30:
        assert found == (Causal(), 0, None)


def test_a_row_of_the_smallest_number_is_uniform_as_its_softmax_is():
    q, k = draw_queries_and_keys(K)
    added = torch.zeros(B, 1, K, K).masked_fill(~square(Causal() & PADDED), SMALLEST)
    found = mask_inference.infer_rule(added, q, k)
    assert_softmax(weights(found, q, k), q, k, added)
    uniform = torch.full((H, K), 1 / K, dtype=torch.float64)
    assert_within(weights(found, q, k)[0, :, 0], uniform, sum_bound(torch.float32, K + EXPONENTIAL, 1 / K))
    assert found[2].shape == (B, 1, K, 1)


def test_a_row_of_minus_infinity_is_blind():
    q, k = draw_queries_and_keys(K)
    added = torch.zeros(B, 1, K, K).masked_fill(~square(Causal() & PADDED), -torch.inf)
    found = mask_inference.infer_rule(added, q, k)
    assert_softmax(weights(found, q, k), q, k, added)
    assert not weights(found, q, k)[0, :, 0].any()


@pytest.mark.parametrize("kind", ["causal mask and padding", "numbers of both kinds"])
def test_a_row_of_the_smallest_number_and_minus_infinity_is_uniform_over_the_former(kind):
    q, k = draw_queries_and_keys(K)
    added = torch.zeros(B, 1, K, K).masked_fill(~square(PADDED), SMALLEST)
    if kind == "causal mask and padding":
        added = added + torch.zeros(K, K).masked_fill(~square(Causal())[0, 0], SMALLEST)  # twice the smallest is -inf
        assert (added == -torch.inf).any()
    else:
        rows = [SMALLEST, -torch.inf, SMALLEST, SMALLEST, -torch.inf, SMALLEST, -torch.inf], [-torch.inf] * K
        added[0, 0, :2] = torch.tensor(rows)
    found = mask_inference.infer_rule(added, q, k)
    assert_softmax(weights(found, q, k), q, k, added)


def test_a_row_with_a_nan_in_its_mask_is_nan():
    q, k = draw_queries_and_keys(K)
    added = torch.zeros(B, 1, K, K).masked_fill(~square(Causal()), SMALLEST)
    added[1, 0, 3, 2] = torch.nan
    found = weights(mask_inference.infer_rule(added, q, k), q, k)
    assert found[1, :, 3].isnan().all()
    assert not found[0].isnan().any()


@pytest.mark.parametrize("smallest", [SMALLEST, -torch.inf])
def test_numbers_that_matter_are_a_bias(smallest):
    q, k = draw_queries_and_keys()
    added = torch.randn(B, H, Q, K)
    added[..., 3] = smallest
    found = mask_inference.infer_rule(added, q, k)
    assert_softmax(weights(found, q, k), q, k, added)
    before = found[2].clone()
    added.zero_()
    assert torch.equal(found[2], before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_smallest_number_of_half_precision_hides_too(dtype):
    q, k = (x.to(dtype) for x in draw_queries_and_keys(K))
    added = torch.zeros(B, 1, K, K, dtype=dtype).masked_fill(~square(Causal() & PADDED), torch.finfo(dtype).min)
    found = mask_inference.infer_rule(added, q, k)
    assert_softmax(weights(found, q, k), q, k, added)


KINDS = {
    "none": lambda seen: None,
    "bool": lambda seen: seen,
    "smallest": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, SMALLEST),
    "infinite": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
    "numbers": lambda seen: torch.arange(float(K)).masked_fill(~seen, SMALLEST),
}


@pytest.mark.parametrize("rule", [Causal(), Causal() & PADDED, Everything() & PADDED], ids=["causal", "blind", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_of_positions_is_added_to_what_the_mask_says(kind, rule):
    q, k = draw_queries_and_keys(K)
    bias, mask = torch.randn(1, H, K, K), KINDS[kind](square(rule))
    if mask is None:  # as transformers: a causal table is written out
        rule, added = Causal(), torch.where(square(Causal()), bias, SMALLEST)
    else:
        added = torch.where(mask, bias, SMALLEST) if mask.dtype == torch.bool else bias + mask
    found = mask_inference.infer_rule_with_bias(mask, rule == Causal(), bias, q, k)
    assert_softmax(weights(found, q, k), q, k, added)


# parts of rules


@pytest.mark.parametrize("queries", [1, 3, Q])
def test_the_last_key_that_is_seen_is_that_of_the_last_query(queries):
    keys = 3 * K
    assert mask_inference.find_visible_end(Causal(), queries, keys, K - queries) == K
    assert mask_inference.find_visible_end(Causal() & Window(1), queries, keys, K - queries) == K
    assert mask_inference.find_visible_end(Everything(), queries, keys, 0) == keys


def test_a_row_that_is_uniform_does_not_make_unwritten_keys_seen():
    blind = torch.tensor([[True, True, False, False, False]]).view(1, 1, Q, 1)
    assert mask_inference.find_visible_end(Causal() | Given(blind), Q, 3 * K, 0) == Q


def test_a_long_rule_is_looked_at_a_part_at_a_time(monkeypatch):
    monkeypatch.setattr(mask_inference, "ROWS", 2)
    seen = square(Causal() & Window(2) & PADDED)
    assert_table(mask_inference.infer_table_rule(seen, K, K), seen)
    assert mask_inference.find_visible_end(Causal(), Q, 3 * K, 1) == Q + 1

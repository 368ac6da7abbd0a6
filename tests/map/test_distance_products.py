"""A bias of products with distances is the whole bias to the rounding of float64, and its memory grows as the length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from map.bias_changes import DOUBLE, KEPT, READ
from regard import AttentionMap, Causal
from regard.map.compressed_bias import compress_bias
from regard.map.distance_products import DistanceProducts, DistanceTerm

B, H, Q, K, D, N = 2, 3, 41, 53, 5, 11


def draw_term(
    queries: int = Q, keys: int = K, is_of_keys: bool = False, seed: int = 3, heads: int = H, batch: int = B, rows: int = N
) -> DistanceTerm:
    """A term of random vectors, of a table that all batch rows share, and of a random row of the table for each distance."""
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(batch, heads, keys if is_of_keys else queries, D, generator=draw, dtype=DOUBLE)
    table = torch.randn(1, heads, rows, D, generator=draw, dtype=DOUBLE).expand(batch, -1, -1, -1)
    return DistanceTerm(vectors, table, torch.randint(rows, (queries + keys - 1,), generator=draw), is_of_keys)


def compute_by_definition(term: DistanceTerm, queries: int, keys: int) -> Tensor:
    """The term by its formula, one entry of the table for each pair, as Shaw writes it."""
    distances = torch.arange(keys) - torch.arange(queries).unsqueeze(-1) + queries - 1
    relative = term.table[:, :, term.index[distances]]  # (b, h, q, k, d)
    return torch.einsum("bhkd,bhqkd->bhqk" if term.is_of_keys else "bhqd,bhqkd->bhqk", term.vectors, relative)


def draw_bias() -> tuple[DistanceProducts, Tensor]:
    """A bias of both kinds of terms and of one that depends on the key alone, and the whole of it."""
    terms = draw_term(), draw_term(is_of_keys=True, seed=5)
    rest = torch.randn(B, 1, 1, K, generator=torch.Generator().manual_seed(8), dtype=DOUBLE)
    return DistanceProducts(terms, rest), sum(compute_by_definition(one, Q, K) for one in terms) + rest


def are_close(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one shape and dtype, and numbers that are equal to the rounding of float64."""
    return x.shape == y.shape and x.dtype == y.dtype and bool(((x - y).abs() <= 1e-12).all())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_block_of_a_bias_is_that_block_of_the_whole(data):
    (i, m), (j, n) = (sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2))) for length in (Q, K))
    bias, whole = draw_bias()
    assert are_close(bias[..., i:m, j:n].to_dense(), whole[..., i:m, j:n])
    assert are_close(bias[1, 2, i:m, j:n].to_dense(), whole[1, 2, i:m, j:n])


@pytest.mark.parametrize("name", [*KEPT, *READ])
def test_what_is_read_of_products_is_what_the_whole_bias_has(name):
    (bias, whole), change = draw_bias(), (KEPT | READ)[name]
    found, expected = change(bias), change(whole)
    assert isinstance(found, DistanceProducts) or name not in KEPT
    found = found.to_dense()
    assert are_close(found, expected) or (name == "another precision" and (found - expected).abs().max() <= 0.25)


def test_products_have_the_gradients_of_the_whole_bias():
    term = draw_term()
    given = [x.clone().requires_grad_() for x in (term.vectors, term.table)]
    weights = torch.randn(B, H, Q, K, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    found, expected = (
        torch.autograd.grad((whole * weights).sum(), given)
        for whole in (
            DistanceProducts((DistanceTerm(*given, term.index),)).to_dense(),
            compute_by_definition(DistanceTerm(*given, term.index), Q, K),
        )
    )
    assert all(map(are_close, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("lengths", [(Q, K), (300, 310)], ids=["small", "large"])
def test_a_map_with_products_is_that_of_the_whole_bias(dtype, lengths):
    torch.manual_seed(3)
    queries, keys = lengths
    terms = draw_term(*lengths), draw_term(*lengths, is_of_keys=True)
    rest = torch.randn(B, 1, 1, keys, dtype=DOUBLE)
    rest[1, ..., -5:] = torch.finfo(torch.float32).min
    whole = sum(compute_by_definition(one, *lengths) for one in terms) + rest
    q, k = torch.randn(B, H, queries, D), torch.randn(B, H, keys, D)
    given = {"mask": Causal(), "offset": keys - queries, "softcap": 3.0}
    bias = DistanceProducts(terms, rest).to(dtype)
    found, expected = (AttentionMap(q.to(dtype), k.to(dtype), bias=x, **given) for x in (bias, whole.to(dtype)))
    tolerance = 1e-12 if dtype == DOUBLE else 2e-5
    planes = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1])
    for read in (
        AttentionMap.dense,
        lambda m: m[:, 1, 7],
        lambda m: m[:, :, 3:33:5],
        lambda m: m[0, 0, 3:33, 2:9],
        lambda m: m[*planes, torch.tensor([40, 3, 11]), torch.tensor([5, 0, 1])],
        lambda m: m.tile(slice(3, 20), slice(5, 40), 4),
        lambda m: m.pooled(5, 7),
        lambda m: m.top(3)[0],
        AttentionMap.entropy,
        AttentionMap.received,
        lambda m: m.diagonal(1),
        lambda m: m.mass(slice(0, 3)),
        lambda m: m.select(batch=[1], heads=[2, 0]).dense(),
        lambda m: torch.stack([m.overview().entropy, m.overview().distance, m.overview().largest]),
        lambda m: m.overview().mean,
        lambda m: m @ torch.ones(B, H, keys, 2, dtype=dtype).cumsum(2),
        lambda m: m.mT @ torch.ones(B, H, queries, 2, dtype=dtype),
    ):
        ours, theirs = read(found), read(expected)
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)
    assert found.certificate().error <= tolerance
    assert torch.equal(found.top(3)[1], expected.top(3)[1])


@pytest.mark.parametrize("first", [-2, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_bias_of_a_few_distances_is_stored_by_its_entries_at_these(dtype, first):
    width, distances = 3, torch.arange(K) - torch.arange(Q).unsqueeze(-1)
    whole = torch.randn(B, H, Q, K, generator=torch.Generator().manual_seed(3), dtype=DOUBLE).to(dtype)
    whole = whole.masked_fill((distances < first) | (distances >= first + width), 0)
    bias = compress_bias(whole)
    assert isinstance(bias, DistanceProducts)
    assert torch.equal(bias.to_dense(), whole)
    assert bias.nbytes <= B * H * Q * width * whole.element_size() + (width + 1) * width * 8 + (Q + K) * 8
    for place in ((0, 0, 0, K - 1), (1, 2, Q - 1, 0), (0, 1, 17, 41)):
        for other in (1.0, torch.nan, torch.inf):
            changed = whole.clone()
            changed[place] = other
            assert compress_bias(changed) is changed


def draw_buckets(queries: int = Q, keys: int = K) -> Tensor:
    """A bias that has a number of each query for each of four spans of distances, of which one is all later keys."""
    numbers = torch.randn(B, H, queries, 4, generator=torch.Generator().manual_seed(11), dtype=DOUBLE)
    distances = torch.arange(keys) - torch.arange(queries).unsqueeze(-1)
    buckets = torch.bucketize(distances, torch.tensor([-9, -3, -1]))
    return numbers.gather(-1, buckets.expand(B, H, -1, -1))


@pytest.mark.parametrize(("queries", "keys"), [(Q, K), (K, Q), (K, K)])
def test_a_bias_of_spans_of_distances_is_stored_as_a_number_of_each_query_for_each(queries, keys):
    bias = draw_buckets(queries, keys)
    found = compress_bias(bias)
    assert isinstance(found, DistanceProducts)
    assert torch.equal(found.to_dense(), bias)
    assert found.terms[0].vectors.shape == (B, H, queries, 4)

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import AttentionMap
from regard.map.compressed_bias import compress_bias
from regard.map.hiding_bias import find_hiding_bias
from regard.map.relative_bias import RelativeBias

B, H, Q, K, D = 2, 3, 11, 13, 5
SMALLEST = torch.finfo(torch.float32).min
HIDING = [-1e4, -1e9, SMALLEST]
NUMBERS = [0.0, 3.0, -40.0, -100.0, -110.0, -150.0, -1e3, -1100.0, *HIDING, -math.inf]


def draw_inputs(seed, dtype=torch.float32, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(B, H, Q, D, generator=generator), torch.randn(B, H, K, D, generator=generator)
    return q.to(dtype) * size, k.to(dtype), generator


def find_level(m):
    return find_hiding_bias(m.planes.request)


@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4, unique=True),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.1, 1.0, 30.0]),
    st.sampled_from([{}, {"softcap": 2.0}, {"scale": 3.0}, {"scale": -0.5}, {"weight": True}, {"sinks": True}]),
)
def test_a_number_that_hides_has_no_weight_beside_any_other(seed, numbers, dtype, size, options):
    q, k, generator = draw_inputs(seed, dtype, size)
    bias = torch.tensor(numbers, dtype=dtype)[torch.randint(len(numbers), (B, 1, Q, K), generator=generator)]
    bias = bias + torch.randn(B, 1, Q, K, generator=generator)
    tensors = {"weight": torch.randn(D, dtype=dtype) * 9, "sinks": torch.randn(H, dtype=dtype)}
    m = AttentionMap(q, k, bias=bias, **{name: tensors.get(name, x) for name, x in options.items()})
    hidden = (bias <= find_level(m)).expand(m.shape)
    has_other = ~hidden.all(-1, keepdim=True)
    assert not m.dense()[hidden & has_other].any()


@pytest.mark.parametrize("number", HIDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_that_is_added_or_filled_in_hides(number, dtype):
    q, k, generator = draw_inputs(1, dtype)
    rest, seen = torch.randn(B, H, Q, K, generator=generator, dtype=dtype), torch.rand(B, 1, Q, K, generator=generator) < 0.7
    for bias in (rest.masked_fill(~seen, number), rest + torch.zeros_like(rest).masked_fill(~seen, number)):
        level = find_level(AttentionMap(q, k, bias=bias))
        assert torch.equal(bias > level, seen.expand(B, H, Q, K))


@pytest.mark.parametrize("t", [13, 997])
@pytest.mark.parametrize("number", [None, -math.inf])
def test_a_bias_that_falls_with_distance_hides_nothing(t, number):
    places = torch.arange(t)
    bias = (places[:, None] - places).abs() * -torch.tensor([4.0, 1.0, 0.25]).view(1, H, 1, 1)
    bias = bias if number is None else bias.masked_fill(places > places[:, None], number)
    assert find_level(AttentionMap(torch.randn(1, H, t, D), torch.randn(1, H, t, D), bias=bias)) == -math.inf


@pytest.mark.parametrize("number", [-1e5, SMALLEST])
def test_what_hides_beside_a_bias_that_falls_with_distance_is_found_by_its_diagonals(number):
    t = 97
    places = torch.arange(t)
    bias = (places - places[:, None]) * torch.tensor([4.0, 1.0, 0.25]).view(1, H, 1, 1)
    bias = compress_bias(bias.masked_fill(places > places[:, None], number))
    assert isinstance(bias, RelativeBias)
    m = AttentionMap(torch.randn(1, H, t, D), torch.randn(1, H, t, D), bias=bias)
    assert find_level(m) == torch.tensor(number)


def test_a_number_does_not_hide_beside_scores_as_large():
    q, k, _ = draw_inputs(4, size=1e4)
    bias = torch.zeros(K).masked_fill(torch.arange(K) == 1, -1e4)
    assert find_level(AttentionMap(q, k, bias=bias)) == -math.inf
    assert find_level(AttentionMap(q, k, bias=bias, softcap=50.0)) == -1e4

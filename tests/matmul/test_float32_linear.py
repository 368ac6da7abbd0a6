"""The product is torch's, whatever their shape, and gives way wherever torch's own is asked for."""

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bounds import assert_within, sum_bound
from regard.compiled import kernel_choice
from regard.matmul import Linear, linear
from regard.matmul.float32_linear import LEAST, can_use_fast_product, load_compiled_products
from skips import NEEDS_LOOPS

ROWS, N = 521, 127  # more numbers than LEAST


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(x, weight, bias):
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_is_product(found, x, weight, bias=None):
    """Compare with float64: of a sum of n products and a bias in float32, in any order."""
    size = exact(x.abs(), weight.abs(), None if bias is None else bias.abs())
    terms = weight.shape[1] + (bias is not None)
    assert_within(found, exact(x, weight, bias), sum_bound(torch.float32, terms) * size)


@NEEDS_LOOPS
@given(st.lists(st.integers(1, 4), max_size=2), st.integers(1, 700), st.integers(1, 300), st.booleans(), st.integers(0, 99))
def test_it_is_the_product_in_float64(lead, rows, n, biased, seed):
    rows = max(rows, -(-LEAST // n))
    x, weight, bias = numbers(*lead, n, seed=seed), numbers(rows, n, seed=seed + 1), numbers(rows) if biased else None
    assert can_use_fast_product(x, weight, bias)
    found = linear(x, weight, bias)
    assert found.shape == (*lead, rows)
    assert_is_product(found, x, weight, bias)


@pytest.mark.parametrize("count", [2, 5, 17])
def test_infinities_and_nan_come_out_where_they_go_in(count):
    x, weight = numbers(count, N), numbers(ROWS, N)
    x[0, 5], weight[7, 3] = torch.inf, torch.nan
    found, expected = linear(x, weight), F.linear(x, weight)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


@pytest.mark.parametrize("count", [3, 8, 17])
def test_x_may_lie_anyhow_in_memory(count):
    weight = numbers(ROWS, N)
    for x in (numbers(N, count).T, numbers(count, 2, N)[:, 1], numbers(count, 1).expand(count, N)):
        assert can_use_fast_product(x, weight, None)
        assert_is_product(linear(x, weight), x, weight)


@pytest.mark.parametrize("count", [1, 16])
def test_the_same_comes_out_every_time_and_in_every_thread(count):
    if (
        count > kernel_choice.count_most_compiled_vectors() or load_compiled_products() is None
    ) and not kernel_choice.find_onednn_limit():
        pytest.skip(
            "the product is MKL's on this processor, which chooses its number of threads, and with it the bits, by the load"
        )
    x, weight, bias = numbers(count, 768), numbers(2000, 768), numbers(2000)
    expected, wrong = linear(x, weight, bias), []

    def work():
        for _ in range(50):
            if not torch.equal(linear(x, weight, bias), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@NEEDS_LOOPS
def test_of_few_vectors_the_sums_do_not_depend_on_the_number_of_threads():
    x, weight, bias, before = numbers(2, 768), numbers(2000, 768), numbers(2000), torch.get_num_threads()
    expected = linear(x, weight, bias)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(linear(x, weight, bias), expected)
    finally:
        torch.set_num_threads(before)


X, W, BIAS = numbers(1, N), numbers(ROWS, N), numbers(ROWS)
OTHERS = {
    "no vector": (numbers(0, N), W, BIAS),
    "a small matrix": (X, W[:7], None),
    "half precision": (X.half(), W.half(), BIAS.half()),
    "float64": (X.double(), W.double(), BIAS.double()),
    "a matrix turned": (X, numbers(N, ROWS).T, BIAS),
    "a gradient of x": (X.clone().requires_grad_(), W, BIAS),
    "a gradient of the weights": (X, nn.Parameter(W), BIAS),
    "a gradient of the bias": (X, W, nn.Parameter(BIAS)),
    "the meta device": (X.to("meta"), W.to("meta"), BIAS.to("meta")),
    "a subclass": (X.as_subclass(type("Own", (torch.Tensor,), {})), W, BIAS),
    "another width": (numbers(1, N + 1), W, BIAS),
    "a bias of another length": (X, W, BIAS[:-1]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_everything_else_is_torchs(case):
    x, weight, bias = OTHERS[case]
    assert not can_use_fast_product(x, weight, bias)
    if "width" in case or "length" in case:
        with pytest.raises(RuntimeError, match=r"(shape|size)"):
            linear(x, weight, bias)
        return
    expected = F.linear(x, weight, bias)
    found = linear(x, weight, bias)
    assert type(found) is type(expected)
    assert found.device == expected.device
    assert found.is_meta or torch.equal(found, expected)


def test_the_layer_is_torchs_and_learns():
    torch.manual_seed(0)
    ours, theirs = Linear(N, ROWS), nn.Linear(N, ROWS)
    theirs.load_state_dict(ours.state_dict())
    for one in (ours, theirs):
        one(X).square().sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    with torch.no_grad():
        assert_is_product(ours(X), X, theirs.weight, theirs.bias)
        assert_is_product(theirs(X), X, theirs.weight, theirs.bias)

"""torch's default dtype is the user's: compiled functions write float32 whatever it is."""

import pytest
import torch

import regard
from default_dtype import use_default_dtype
from generate.small_models import gpt2
from regard import AttentionMap, Causal
from regard.generate import quantise
from regard.generate.kv_cache import Cache
from regard.map import small_maps
from regard.matmul.float32_linear import linear
from regard.matmul.quantized_linear import WEIGHTS
from regard.observe.detectors import local_weight
from regard.observe.map_view import MapView

MODEL = gpt2(dtype=torch.float32, layers=2, heads=2, width=16, inner=32, context=20, vocabulary=50).eval()


def list_statistics(tokens):
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 2, 4, tokens, 8, dtype=torch.float32)
    m = AttentionMap(q, k, Causal())
    look = MapView(m)
    look.gather_sums(2, 0.1, 0.3)
    means = [] if look.sums is None else [look.sums.means]
    return [*vars(m.overview()).values(), m @ v, m.mT @ v, m.logsumexp(), m.dense(), local_weight(look), *means]


def decode():
    found = []
    for one in (MODEL, *(quantise(MODEL, to) for to in WEIGHTS)):
        cache = Cache(one.config.layers, 12)
        with torch.no_grad():
            found += [one(tokens, cache) for tokens in (torch.arange(7)[None], torch.tensor([[5]]))]
    return found


def multiply():
    torch.manual_seed(2)
    x, weight = torch.randn(1, 96, dtype=torch.float32), torch.randn(2048, 96, dtype=torch.float32)
    with torch.no_grad():
        return [linear(x, weight)]


def attend():
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 1, 2, 33, 8, dtype=torch.float32).requires_grad_().unbind()
    found = regard.attention(q, k, v, mask=Causal())
    return [found, *torch.autograd.grad(found.sum(), (q, k, v))]


RUNS = {
    "a small map": lambda: list_statistics(20),
    "a map of one matrix at a time": lambda: list_statistics(small_maps.LONGEST + 9),
    "a token of a model": decode,
    "linear": multiply,
    "attention": attend,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", RUNS)
def test_the_result_is_that_with_the_usual_default(name, dtype):
    expected = RUNS[name]()
    with use_default_dtype(dtype):
        found = RUNS[name]()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)

"""The route of a GPU, run here on the CPU: uncompiled, and once compiled."""

import shutil
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from bounds import TORCH_EXPONENTIAL, assert_within, attention_bounds
from regard import Causal, Documents, Given, Padding, Prefix, Window, attend
from regard.mechanism import flex
from regard.mechanism.request import make_request

B, H, G, T, D = 2, 4, 2, 300, 16
RULES = [
    Causal(),
    Causal() & Window(40),
    Documents(torch.arange(T) // 37),
    Causal() & Padding([0, 250]),
    Causal() & (Window(16) | Prefix(2)),
    ~Causal(),
    Given(torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(0)) > 0.5),
]


def tensors(dtype=torch.float64):
    torch.manual_seed(1)
    return [torch.randn(*shape, dtype=dtype) for shape in ((B, H, T, D), (B, G, T, D), (B, G, T, D))]


def run_flex_uncompiled(*args, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(*args, **options)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0, "scale": 0.7},
        {"sinks": torch.linspace(-1, 1, H)},
        {"bias": torch.linspace(-2, 2, H).view(H, 1, 1)},
        {"offset": 5},
        {"offset": torch.tensor([-9, 30])},
    ],
    ids=str,
)
def test_flex_attention_computes_what_attend_computes(rule, options):
    q, k, v = tensors()
    found = flex.apply_flex_attention(run_flex_uncompiled, make_request(q, k, v, rule, **options))
    torch.testing.assert_close(found, attend(q, k, v, rule, **options).context, rtol=0, atol=1e-12)


def test_blocks_that_the_rule_leaves_empty_are_not_listed():
    blocks = flex.make_block_mask(Causal() & Window(128), 1, 1024, 1024, 0, torch.device("cpu"))
    listed = blocks.kv_num_blocks + blocks.full_kv_num_blocks
    assert listed.flatten().tolist() == [1] + [2] * 7  # of 8 columns


def test_blocks_that_every_query_sees_whole_need_no_rule():
    blocks = flex.make_block_mask(Causal(), 1, 512, 512, 0, torch.device("cpu"))
    assert blocks.full_kv_num_blocks.flatten().tolist() == [0, 1, 2, 3]
    assert blocks.kv_num_blocks.flatten().tolist() == [1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's compiler's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler, and there is no g++")
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch compiles flex_attention for a CPU with AVX2 or more"
)
@pytest.mark.skipif(" " in torch.__file__, reason="torch.compile does not quote the path of torch, which has a space here")
def test_compiled_it_is_the_same():
    q, k, v = tensors(torch.float32)
    rule = Causal() & Window(40)
    with torch.no_grad():
        found = flex.run_flex(make_request(q, k, v, rule))
    exact = attend(q.double(), k.double(), v.double(), rule)
    fast = TORCH_EXPONENTIAL[torch.float32]
    allowed = attention_bounds(torch.float32, q, k, v, exact.weights, exponential=fast).context
    assert_within(found, exact.context, allowed)

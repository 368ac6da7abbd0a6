"""The route of a GPU, run here on the CPU: uncompiled, and once compiled."""

import shutil
import warnings

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from bounds import TORCH_EXPONENTIAL, assert_within, attention_bounds
from regard import Causal, Documents, Given, Padding, Prefix, Window, attend
from regard.mechanism import flex
from regard.mechanism.mask_algebra import find_key_ranges
from regard.mechanism.request import make_request
from run_limits import limit_examples

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


RANGES = (
    st.builds(Window, st.none() | st.integers(0, 300), st.none() | st.integers(0, 300))
    | st.just(Causal())
    | st.builds(lambda lengths: Padding(lengths), st.lists(st.integers(0, 400), min_size=2, max_size=2))
    | st.builds(lambda size: Documents(torch.arange(400) // size), st.integers(1, 150))
)


@given(RANGES, RANGES, st.integers(1, 300), st.sampled_from([0, 57, (0, 31)]))
@settings(max_examples=limit_examples(60))
def test_the_blocks_of_ranges_are_those_of_the_table(one, other, queries, offset):
    k, mask = 400, one & other
    ranges = find_key_ranges(mask, queries, k, offset)
    assert ranges is not None
    blocks = flex.make_range_block_mask(ranges, k, torch.device("cpu"))
    table = mask.table(queries, k, offset if isinstance(offset, int) else torch.tensor(offset)).expand(2, 1, queries, k)
    i, j = torch.arange(queries).unsqueeze(-1), torch.arange(k)
    for b in range(2):
        assert torch.equal(blocks.mask_mod(torch.tensor(b), torch.tensor(0), i, j), table[b, 0])
        row = b if len(ranges[0]) > 1 else 0
        for r, rows in enumerate(table[b, 0].split(flex.BLOCK)):
            full, partial = (
                set(indices[row, 0, r, : counts[row, 0, r]].tolist())
                for counts, indices in (
                    (blocks.full_kv_num_blocks, blocks.full_kv_indices),
                    (blocks.kv_num_blocks, blocks.kv_indices),
                )
            )
            seen = list(rows.split(flex.BLOCK, 1))
            assert not full & partial
            assert full == {n for n, part in enumerate(seen) if part.all()}
            assert {n for n, part in enumerate(seen) if part.any()} <= full | partial


@pytest.mark.parametrize(
    ("alike", "forms"),
    [
        ([Causal() & Window(40), Window(9), Causal() & Prefix(70), Documents(torch.arange(T) // 37)], 1),
        ([~Window(9, 9), Causal() & (Window(16) | Prefix(2)), Documents(torch.arange(T) % 7), ~Window(1, 1), ~Window(3, 2)], 2),
    ],
    ids=["one range", "several ranges"],
)
def test_rules_share_compiled_forms(alike, forms):
    """Torch compiles a function anew for the code of each rule, and for each number in it that is no tensor."""
    count = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend=count, fullgraph=True)
    for rule in alike:
        flex.apply_flex_attention(compiled, make_request(*tensors(), rule))
    assert count.frame_count == forms  # the second is for any number of tables


def test_a_mask_that_cuts_too_many_blocks_is_computed_in_blocks_of_queries(monkeypatch):
    monkeypatch.setattr(flex, "CUT_BYTES", 8 * flex.BLOCK**2)
    monkeypatch.setattr(flex, "compile_flex_attention", lambda: run_flex_uncompiled)
    q, k, v = tensors()
    rule = Given(torch.rand(T, T, generator=torch.Generator().manual_seed(1)) > 0.5)  # of 9 blocks
    with pytest.warns(UserWarning, match="computed in blocks of queries, not by flex_attention: Given"):
        found = flex.run_flex(make_request(q, k, v, rule))
    torch.testing.assert_close(found, attend(q, k, v, rule).context, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler, and there is no g++")
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch compiles flex_attention for a CPU with AVX2 or more"
)
@pytest.mark.skipif(" " in torch.__file__, reason="torch.compile does not quote the path of torch, which has a space here")
@pytest.mark.parametrize("rule", [Causal() & Window(40), Causal() & (Window(16) | Prefix(2)) & Padding([0, 250])], ids=repr)
def test_compiled_it_is_the_same(rule):
    q, k, v = tensors(torch.float32)
    with torch.no_grad():
        found = flex.run_flex(make_request(q, k, v, rule))
    exact = attend(q.double(), k.double(), v.double(), rule)
    fast = TORCH_EXPONENTIAL[torch.float32]
    allowed = attention_bounds(torch.float32, q, k, v, exact.weights, exponential=fast).context
    assert_within(found, exact.context, allowed)

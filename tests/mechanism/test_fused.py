import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import oracle
from bounds import TORCH_EXPONENTIAL, assert_within, attention_bounds, gamma, half_bound, propagate_errors
from regard import Causal, Documents, Everything, Given, Padding, Prefix, Window, attend, attention
from regard.mechanism.fused import choose
from run_limits import limit_examples
from strategies import requests

B, H, Q, K, D, E = 2, 3, 5, 7, 11, 13
LONG = 300  # more than two runs of queries


def tensors(dtype=torch.float64, q=Q, k=K, d=D, e=E, groups=H):
    torch.manual_seed(1)
    return [torch.randn(*shape, dtype=dtype) for shape in ((B, H, q, d), (B, groups, k, d), (B, groups, k, e))]


RULES = {
    "everything": Everything(),
    "causal": Causal(),
    "window": Window(20, 3),
    "half a window": Window(None, 5) & Window(40),
    "prefix": Causal() | Prefix(9),
    "padding": Padding([0, 250]),
    "causal padding": Causal() & Padding([111, LONG]),
    "documents": Documents(torch.arange(LONG) // 37) & Causal(),
    "documents of each": Documents(torch.stack([torch.arange(LONG) // 37, torch.arange(LONG) // 150])),
    "sink and window": Causal() & (Window(16) | Prefix(2)),
    "table": Given(torch.rand(LONG, LONG, generator=torch.Generator().manual_seed(0)) > 0.5),
    "nothing": ~Everything(),
    "not causal": ~Causal(),
}
EXTRAS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "offset": {"offset": 13},
    "offsets": {"offset": torch.tensor([-40, 17])},
    "sinks": {"sinks": torch.linspace(-1, 1, H, dtype=torch.float64)},
    "bias": {"bias": torch.linspace(-2, 2, LONG, dtype=torch.float64).view(1, 1, LONG)},
    "table of bias": {"bias": torch.linspace(-2, 2, LONG * LONG, dtype=torch.float64).view(LONG, LONG).sin()},
}


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=0, atol=atol)


@settings(max_examples=limit_examples(200))
@given(requests())
def test_attention_is_the_formula_written_out_in_float64(asked):
    arrays, options = asked.numpy()
    _, context = oracle.attention(*arrays, asked.sees, **options)
    close(attention(asked.q, asked.k, asked.v, asked.mask, **asked.options), context)


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("rule", RULES)
def test_attention_and_its_gradients_are_those_of_attend_over_many_runs_of_queries(rule, extra):
    q, k, v = (x.requires_grad_() for x in tensors(q=LONG, k=LONG))
    options = {
        n: o.clone().requires_grad_() if torch.is_tensor(o) and o.is_floating_point() else o for n, o in EXTRAS[extra].items()
    }
    leaves = [q, k, v, *(o for o in options.values() if torch.is_tensor(o) and o.requires_grad)]
    expected = attend(q, k, v, RULES[rule], **options).context
    found = attention(q, k, v, RULES[rule], **options)
    close(found, expected)
    seed = torch.randn_like(expected)
    for a, b in zip(gradients(found, leaves, seed), gradients(expected, leaves, seed), strict=True):
        close(a, b, atol=1e-11)


def gradients(context, leaves, seed):
    found = torch.autograd.grad(context, leaves, seed, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


@pytest.mark.slow
@settings(max_examples=limit_examples(25))
@given(requests(longest=4))
def test_gradients_are_those_of_finite_differences(asked):
    leaves = asked.leaves()
    torch.autograd.gradcheck(lambda *_: attention(asked.q, asked.k, asked.v, asked.mask, **asked.options), leaves)


@pytest.mark.parametrize(("q", "k"), [(1, 1), (1, 40), (40, 1), (200, 3), (3, 200), (0, 5), (5, 0)])
@pytest.mark.parametrize("rank", [4, 3, 2])
def test_any_number_of_queries_and_keys_and_any_rank(q, k, rank):
    given_tensors = [x[(0,) * (4 - rank)] for x in tensors(q=q, k=k)]
    for mask in (Everything(), Causal(), Window(2)):
        found, expected = attention(*given_tensors, mask), attend(*given_tensors, mask).context
        assert found.shape == expected.shape
        close(found, expected)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("e", [D, D - 4, D + 4])
def test_grouped_keys_and_values_of_another_width(groups, e):
    q, k, v = tensors(groups=groups, e=e)
    for mask in (Everything(), Causal()):
        close(attention(q, k, v, mask), attend(q, k, v, mask).context)


def context_bounds(q, k, v, weights, *, scale=None, bias=None, sinks=None):
    """How far a context may be off whose scores, softmax and sums are float32, and what it is rounded to in half precision."""
    dtype, v = q.dtype, v.double()
    errors = attention_bounds(torch.float32, q, k, v, weights, scale=scale, bias=bias).scores / 2 + TORCH_EXPONENTIAL[dtype]
    if sinks is not None:  # one more score, which is a product of a query and a key too, of a value of zeros
        most = gamma(torch.float32, q.shape[3] + 8) * sinks.double().abs().view(-1, 1, 1) + TORCH_EXPONENTIAL[dtype]
        errors = torch.cat((errors, most.expand(*errors.shape[:3], 1)), 3)
        weights = torch.cat((weights, 1 - weights.sum(-1, keepdim=True)), 3)
        v = F.pad(v, (0, 0, 0, 1))
    allowed = propagate_errors(torch.float32, errors, v, weights).context
    return allowed if dtype == torch.float32 else allowed + half_bound(dtype, v, weights)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("form", ["attend", "attention"])
@pytest.mark.parametrize("rule", ["everything", "causal", "window", "causal padding", "sink and window"])
def test_half_precision_stays_within_its_budget_of_float64(dtype, size, form, rule):
    q, k, v = tensors(dtype, q=LONG, k=LONG, d=64, e=64)
    q, k = q * size, k * size  # 30: scores near 60,000 and past what float16 holds
    exact = attend(q.double(), k.double(), v.double(), RULES[rule])
    found = attend(q, k, v, RULES[rule]).context if form == "attend" else attention(q, k, v, RULES[rule])
    assert found.dtype == dtype
    assert_within(found, exact.context, context_bounds(q, k, v, exact.weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_finer_than_half_precision_is_not_rounded_to_it(dtype):
    q, k, v = tensors(dtype, d=E)
    bias = torch.linspace(100, 101, Q * K).view(Q, K)  # bfloat16 has nothing between 100 and 100.5
    exact = attend(q.double(), k.double(), v.double(), bias=bias.double())
    assert_within(attention(q, k, v, bias=bias), exact.context, context_bounds(q, k, v, exact.weights, bias=bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["everything", "window"])
def test_a_sink_finer_than_half_precision_is_not_rounded_to_it(dtype, rule):
    q = k = torch.full((B, H, LONG, 16), 4.0, dtype=dtype)  # every score is 64
    v = torch.ones(B, H, LONG, 16, dtype=dtype)
    keys = RULES[rule].table(LONG, LONG)[150].sum().log()
    sinks = 64 + keys + torch.tensor([0.0, 0.37, -0.41])  # about the sum of a row; bfloat16 knows only every half here
    exact = attend(q.double(), k.double(), v.double(), RULES[rule], sinks=sinks.double())
    found = attention(q, k, v, RULES[rule], sinks=sinks)
    assert 0.3 < exact.context[:, :, 150].min() < exact.context[:, :, 150].max() < 0.7
    equal_terms = 2 * gamma(torch.float32, 2 * LONG, alike=True)  # the sums of exponentials and of values
    assert_within(found, exact.context, context_bounds(q, k, v, exact.weights, sinks=sinks) + equal_terms)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("rule", ["everything", "window", "nothing"])
def test_a_sink_of_minus_infinity_is_no_sink(dtype, rule):
    q, k, v = tensors(dtype, q=LONG, k=LONG)
    found, without = attention(q, k, v, RULES[rule], sinks=torch.full((H,), -torch.inf)), attention(q, k, v, RULES[rule])
    if dtype == torch.float64:
        close(found, without)
    else:
        weights = attend(q.double(), k.double(), v.double(), RULES[rule]).weights
        assert_within(found, without, context_bounds(q, k, v, weights) + half_bound(dtype, v, weights))
    assert not attend(q, k, v, RULES[rule], sinks=torch.full((H,), -torch.inf)).context.isnan().any()


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("keys", [5, 40, LONG])
@pytest.mark.parametrize("rule", ["everything", "causal", "window", "padding"])
def test_nan_goes_out_in_the_rows_that_see_it_and_in_no_other(where, keys, rule):
    mask = RULES[rule] if rule != "padding" else Padding([keys, keys - 2])
    q, k, v = tensors(torch.float32, q=keys, k=keys)
    {"q": q, "k": k, "v": v}[where][1, 0, keys - 2, 0] = math.nan
    found, expected = attention(q, k, v, mask), attend(q, k, v, mask).context
    assert torch.equal(found.isnan().any(-1), expected.isnan().any(-1))
    seen = mask.table(keys, keys).expand(B, 1, keys, keys)[1, 0]
    hit = {keys - 2} if where == "q" else set(seen[:, keys - 2].nonzero().flatten().tolist())
    assert set(found[1, 0].isnan().any(-1).nonzero().flatten().tolist()) == hit
    assert not found[0].isnan().any()


def test_a_bias_of_minus_infinity_hides_a_nan_as_a_mask_does():
    q, k, v = tensors(torch.float32, q=LONG, k=LONG)
    bias = torch.zeros(LONG, LONG).masked_fill(~Causal().table(LONG, LONG), -math.inf)
    v[0, 0, 100] = math.nan
    assert attention(q, k, v, bias=bias)[0, 0].isnan().any(-1).tolist() == [i >= 100 for i in range(LONG)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1e-4, 1e-9, 0.0])
def test_a_sink_is_not_cut_by_a_small_scale(dtype, scale):
    q, k, v = tensors(dtype, q=LONG, k=LONG)
    sinks = torch.tensor([5.0, 20.0, -3.0])
    exact = attend(q.double(), k.double(), v.double(), Causal(), scale=scale, sinks=sinks.double())
    found = attention(q, k, v, Causal(), scale=scale, sinks=sinks)
    assert_within(found, exact.context, context_bounds(q, k, v, exact.weights, scale=scale, sinks=sinks))


def test_autocast_gives_what_the_rounded_tensors_give():
    q, k, v = tensors(torch.float32, q=LONG, k=LONG)
    for options in ({}, {"mask": Window(40)}, {"softcap": 5.0}):
        with torch.autocast("cpu", torch.bfloat16):
            found = attention(q, k, v, **options)
        assert torch.equal(found, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options))


def test_dropout_draws_what_attend_draws():
    q, k, v = tensors(q=LONG, k=LONG)
    torch.manual_seed(5)
    expected = attend(q, k, v, Causal(), dropout=0.4)
    torch.manual_seed(5)
    close(attention(q, k, v, Causal(), dropout=0.4), expected.context)
    torch.manual_seed(5)
    assert torch.equal(expected.dropped, F.dropout(expected.weights, 0.4))


@pytest.mark.parametrize(
    ("options", "kernel", "why"),
    [
        ({}, "sdpa", "every query sees every key"),
        ({"bias": torch.zeros(1)}, "sdpa", "additive mask"),
        ({"mask": Causal()}, "sdpa causal", "causal from the first key"),
        ({"mask": Causal(), "offset": 2}, "sdpa in blocks", "only the keys it may see"),
        ({"mask": Causal(), "offset": K - 2}, "sdpa in blocks", "only the keys it may see"),
        ({"mask": Causal(), "offset": K - 1}, "sdpa", "every query sees every key"),
        ({"mask": Window(2)}, "sdpa in blocks", "only the keys it may see"),
        ({"mask": Causal(), "softcap": 30.0}, "written out in blocks", "softcap"),
        ({"sinks": torch.zeros(H)}, "sdpa", "sinks, which .* as one more key"),
        ({"sinks": torch.zeros(H), "mask": Causal()}, "sdpa in blocks", "only the keys it may see"),
        ({"sinks": torch.zeros(H), "scale": 1e-310}, "written out in blocks", "scale so near 0"),
        ({"scale": 0.0}, "written out in blocks", "products that overflow"),
        ({"dropout": 0.1}, "written out", "dropout draws once"),
    ],
)
def test_choose_says_which_kernel_and_why(options, kernel, why):
    choice = choose(*tensors(), **options)
    assert choice.kernel == kernel
    assert re.search(why, choice.reason)


@pytest.mark.parametrize("offset", [K - 2, K - 1, K, K + 5])
def test_the_last_queries_see_what_their_offset_says(offset):
    q, k, v = tensors()
    close(attention(q, k, v, Causal(), offset=offset), attend(q, k, v, Causal(), offset=offset).context)


@pytest.mark.parametrize(
    ("options", "kernel"), [({"mask": Window(9)}, "flex"), ({"softcap": 9.0}, "flex"), ({"mask": Causal()}, "sdpa causal")]
)
def test_on_a_gpu_a_rule_with_empty_blocks_goes_to_flex_attention(options, kernel):
    with FakeTensorMode():
        q, k, v = (torch.empty(B, H, LONG, 64, device="cuda") for _ in range(3))
        assert choose(q, k, v, **options).kernel == kernel


class Largest(torch.overrides.TorchFunctionMode):
    """The most numbers that any one tensor held while this was on."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor):
                self.numbers = max(self.numbers, one.untyped_storage().nbytes() // one.element_size())
        return result


@pytest.mark.parametrize(
    "rule", [Causal() & Window(50), Causal() & Padding([900] * 2), Documents(torch.arange(2048) // 64), Causal() | Prefix(3)]
)
@pytest.mark.parametrize("extra", [{}, {"softcap": 5.0}, {"sinks": torch.zeros(H)}, {"offset": torch.tensor([1, 4])}])
def test_no_tensor_of_queries_times_keys_is_made_for_a_rule(rule, extra):
    t = 2048
    q, k, v = tensors(torch.float32, q=t, k=t, d=8, e=8)
    with Largest() as largest:
        attention(q, k, v, rule, **extra)
    assert largest.numbers <= B * H * 128 * (t + 1)  # one run of queries; t x t alone would be 16 times a run's table
    if not extra:
        assert largest.numbers < t * t


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["everything", "causal", "window", "causal padding"])
def test_under_compile_it_is_the_same_in_one_graph(rule):
    for dtype in (torch.float32, torch.float64):
        q, k, v = tensors(dtype, q=LONG, k=LONG, d=16, e=16)
        compiled = torch.compile(lambda q, k, v: attention(q, k, v, RULES[rule]), backend="eager", fullgraph=True)
        weights = attend(q.double(), k.double(), v.double(), RULES[rule]).weights
        allowed = context_bounds(q, k, v, weights) if dtype == torch.float32 else 0  # of float64 the kernel is the same
        assert_within(compiled(q, k, v), attention(q, k, v, RULES[rule]), allowed)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"scale": 0.0}, {"softcap": 5.0, "mask": Window(3)}, {"softcap": 5.0, "bias": 2.0}]
)
def test_transforms_of_torch_func_compute_the_gradients_of_attend(options):
    generator = torch.Generator().manual_seed(0)
    q, k, v, seed = (torch.randn(3, 2, 5, 7, generator=generator, dtype=torch.float64) for _ in range(4))
    options = {"mask": Causal(), **options}
    if "bias" in options:
        options["bias"] = torch.randn(5, 5, generator=generator, dtype=torch.float64)

    def loss(function, q, k, v, seed):
        return (function(q, k, v, **options) * seed).sum()

    def attended(*tensors, **options):
        return attend(*tensors, **options).context

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(loss(attended, *leaves, seed), leaves)
    found = torch.func.grad(partial(loss, attention), argnums=(0, 1, 2))(q, k, v, seed)
    of_each = torch.func.vmap(torch.func.grad(partial(loss, attention), argnums=(0, 1, 2)))(q, k, v, seed)
    for one in (found, of_each):
        for a, b in zip(one, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@given(requests())
@settings(max_examples=limit_examples(60))
def test_forward_derivatives_are_those_of_the_formula(asked):
    inputs = [x.detach() for x in (asked.q, asked.k, asked.v)]
    tangents = tuple(torch.randn_like(x) for x in inputs)
    _, found = torch.func.jvp(lambda *x: attention(*x, asked.mask, **asked.options), tuple(inputs), tangents)
    _, expected = torch.func.jvp(lambda *x: attend(*x, asked.mask, **asked.options).context, tuple(inputs), tangents)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", [Everything(), Causal(), Causal() & Window(20)], ids=repr)
@pytest.mark.parametrize("learns", [False, True])
def test_a_dual_tensor_has_the_forward_derivative_of_a_long_text(rule, learns):
    q, k, v = (x.float().requires_grad_(learns) for x in tensors(q=LONG, k=LONG, e=D))
    tangent = torch.randn_like(q)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, tangent)
        assert choose(dual, k, v, rule).kernel == "written out in blocks"
        found = forward_ad.unpack_dual(attention(dual, k, v, rule)).tangent
        precise = [x.detach().double() for x in (q, k, v)]
        dual = forward_ad.make_dual(precise[0], tangent.double())
        expected = forward_ad.unpack_dual(attend(dual, *precise[1:], rule).context).tangent
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert choose(q, k, v, rule).kernel != "written out in blocks"


def test_a_hessian_is_the_forward_derivative_of_the_gradient():
    q, k, v = tensors()
    found, expected = (
        torch.func.hessian(lambda x, one=one: one(x, k[:1, :1], v[:1, :1]).sin().sum())(q[:1, :1])
        for one in (attention, lambda *x: attend(*x).context)
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

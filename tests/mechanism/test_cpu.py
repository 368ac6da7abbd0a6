import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds import SMALLEST, assert_within, attention_bounds, gamma, gradient_bounds, propagate_errors, unit_roundoff
from regard import Causal, Documents, Everything, Padding, Prefix, Window, attend, attention
from regard.compiled import kernel_choice, processor
from regard.mechanism import cpu
from regard.mechanism.fused import choose
from regard.mechanism.request import make_request
from run_limits import limit_examples
from skips import NEEDS_LOOPS
from strategies import requests

pytestmark = NEEDS_LOOPS

B, H, G, Q, K, D, E = 2, 6, 2, 131, 197, 37, 53
RULES = {
    "causal": Causal(),
    "window": Window(29, 7),
    "padding": Padding([0, 151]),
    "causal padding": Causal() & Padding([111, K]),
    "prefix": Causal() | Prefix(61),
    "documents": Documents(torch.arange(K) // 43) & Causal(),
}


def tensors(dtype=torch.float32, q=Q, k=K, groups=G):
    torch.manual_seed(3)
    shapes = (B, H, q, D), (B, groups, k, D), (B, groups, k, E)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


def run_loops(request):
    """The context by the loops, however small the request."""
    return cpu.run_compiled_attention(
        request, request.mask.find_key_ranges(request.q.shape[2], request.k.shape[2], request.offset)
    )


def run_loops_and_formula(q, k, v, mask, **options):
    """Context and gradients of the loops, and of the formula in float64."""
    request = make_request(q, k, v, mask, **options)
    context = run_loops(request)
    seed = seeds(context)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attend(*exact, mask, **options).context
    grads = torch.autograd.grad(expected, exact, seed.double(), materialize_grads=True)
    return (context, *torch.autograd.grad(context, (q, k, v), seed)), (expected, *grads)


def seeds(context):
    """What is handed to the backward."""
    return torch.randn(context.shape, generator=torch.Generator().manual_seed(1)).to(context.dtype)


def loop_bounds(q, k, v, mask, scale=None, **options):
    """How far float32 may be off in the context and in the gradients of q, k and v."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    steps = attend(q, k, v, mask, scale=scale, **options)
    errors = attention_bounds(torch.float32, q, k, v, steps.weights, scale=scale).scores / 2
    context = propagate_errors(torch.float32, errors, v, steps.weights).context
    grad = seeds(steps.context)
    return context, *gradient_bounds(torch.float32, q, k, v, steps.weights, grad, scale=scale)


def check_float32(q, k, v, mask, **options):
    """Compare the loops with float64, number by number."""
    allowed = loop_bounds(q, k, v, mask, **options)
    for found, expected, bound in zip(*run_loops_and_formula(q, k, v, mask, **options), allowed, strict=True):
        assert_within(found, expected, bound)


@pytest.mark.slow
@pytest.mark.emulated
@settings(max_examples=limit_examples(150), deadline=None)
@given(requests(dtype=torch.float32, longest=23, kinds=("scale", "offset")))
def test_context_and_gradients_are_those_of_the_formula_in_float64(asked):
    leaves = asked.leaves()[:3]
    q, k = leaves[0].shape[2], leaves[1].shape[2]
    offset = asked.options.get("offset", 0)
    if not isinstance(offset, int) or not k or asked.mask.find_key_ranges(q, k, offset) is None:
        return
    check_float32(*leaves, asked.mask, **asked.options)


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize(
    ("rule", "offset"), [(rule, n) for rule in RULES for n in (0, K - Q)] + [("window", -9), ("causal", -9)]
)
def test_over_many_blocks_of_queries_and_grouped_keys(rule, offset):
    check_float32(*tensors(), RULES[rule], offset=offset)


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [None, -0.3])
def test_of_bfloat16_nothing_is_rounded_but_weights_their_slopes_and_what_comes_out(rule, scale):
    leaves, most = tensors(torch.bfloat16), unit_roundoff(torch.bfloat16)
    sums_of_float32 = loop_bounds(*leaves, RULES[rule], scale=scale)
    found, exact = run_loops_and_formula(*leaves, RULES[rule], scale=scale)
    q, k, v = (x.detach().double() for x in leaves)
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    scale = D**-0.5 if scale is None else scale
    steps = attend(q, k, v, RULES[rule], scale=scale)
    weights, grad = steps.weights, seeds(found[0]).double()
    sums = [weights @ v.abs()]
    apart = (grad.abs() * (sums[0] + steps.context.abs())).sum(-1, keepdim=True)  # the gradient meets the rounded context
    slopes = (weights * (grad @ v.mT - (grad * steps.context).sum(-1, keepdim=True))).abs() * abs(scale)
    slopes += weights * apart * abs(scale)
    sums += [slopes @ k.abs()]
    sums += [x.unflatten(1, (G, H // G)).sum(2) for x in (slopes.mT @ q.abs(), weights.mT @ grad.abs())]
    for one, other, each, rest in zip(found, exact, sums, sums_of_float32, strict=True):
        assert_within(one, other, most * (1 + most) * (each + other.abs()) + (1 + most) * rest)


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("size", [1.2e10, -1.2e10, 3e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_any_finite_size_give_weights(dtype, size):
    """Queries that all see the same large score have the mean of the values; one key that stands out has all of the weight."""
    t, d = 1024, 24
    q, k, v = torch.zeros(1, 1, t, d), torch.zeros(1, 1, t, d), torch.randn(1, 1, t, d)
    q[..., 0], k[..., 0] = size, 1
    mean = v.cumsum(2) / torch.arange(1, t + 1).unsqueeze(-1)
    found = attention(*(x.to(dtype) for x in (q, k, v)), Causal())
    assert torch.allclose(found.float(), mean, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)
    k[..., 0, 0] = 2 if size > 0 else 0
    found = attention(*(x.to(dtype) for x in (q, k, v)), Causal())
    assert torch.equal(found, v[:, :, :1].to(dtype).expand_as(found))


@pytest.mark.emulated
@pytest.mark.slow
@given(st.permutations(range(4)), st.permutations(range(4)), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=limit_examples(20), deadline=None)
def test_how_tensors_lie_in_memory_changes_no_bit(one, other, dtype):
    q, k, v = (x.detach() for x in tensors(dtype))
    orders = [one, other, one]
    laid = [
        x.permute(o).contiguous().permute(torch.tensor(o).argsort().tolist()) for x, o in zip((q, k, v), orders, strict=True)
    ]
    leaves = [x.requires_grad_() for x in laid]
    plain = [x.requires_grad_() for x in (q, k, v)]
    context, expected = run_loops(make_request(*leaves, Causal())), run_loops(make_request(*plain, Causal()))
    assert torch.equal(context, expected)
    seed = torch.randn_like(expected)
    for found, wanted in zip(
        torch.autograd.grad(context, leaves, seed.mT.contiguous().mT), torch.autograd.grad(expected, plain, seed), strict=True
    ):
        assert torch.equal(found, wanted)


def test_the_number_of_threads_changes_no_bit():
    q, k, v = tensors()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            context = run_loops(make_request(q, k, v, Causal()))
            results.append((context, *torch.autograd.grad(context.square().sum(), (q, k, v))))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    """The loops are taken where they are worth it, with registers of four numbers as well: they are right there too."""
    monkeypatch.setattr(kernel_choice, "is_attention_compiled", lambda: True)
    monkeypatch.setattr(kernel_choice, "is_torch_attention_faster", lambda *_: False)


def test_attention_is_torchs_where_the_loops_were_not_measured_to_be_faster(monkeypatch):
    monkeypatch.undo()
    q, k, v = (x.detach() for x in tensors(q=300, k=300, groups=H))
    for instructions, kernel in ((frozenset({"sse2"}), "sdpa causal"), (processor.AVX2, "compiled")):
        monkeypatch.setattr(processor, "read_features", lambda instructions=instructions: instructions)
        assert choose(q, k, v, Causal()).kernel == kernel


@pytest.mark.slow
def test_attention_is_torchs_where_its_products_use_tiles_and_were_measured_to_be_faster(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(processor, "read_features", lambda: processor.AMX)
    leaves = tensors(q=300, k=300, groups=H)
    plain = tuple(x.detach() for x in leaves)
    for masks, dtype, learns, is_compiled in (
        ([Everything()], torch.float32, False, False),
        ([Causal(), Causal() & Window(9)], torch.float32, True, True),
        ([Everything(), Causal(), Causal() & Window(9)], torch.bfloat16, False, False),
        ([Everything(), Causal()], torch.bfloat16, True, False),
        ([Causal() & Window(9)], torch.bfloat16, True, True),
    ):
        for mask in masks:
            kernel = choose(*(x.to(dtype) for x in (leaves if learns else plain)), mask).kernel
            assert (kernel == "compiled") == is_compiled, (mask, dtype, learns)
    few = (x[:, :, :100].bfloat16() for x in leaves)  # of so few weights the gradient is faster by the loops
    assert choose(*few, Causal()).kernel == "compiled"
    assert_within(attention(*plain, Everything()), attend(*plain, Everything()).context, loop_bounds(*plain, Everything())[0])


@pytest.mark.parametrize("queries", [1, 67])
@pytest.mark.parametrize("keys", [13, 131])
def test_scores_that_are_infinite_or_huge_or_nan_have_the_weights_of_torchs_softmax(keys, queries):
    """Each head has one such score; the queries multiply it by positive and negative numbers."""
    special = [torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e30, -1e30, 90.0, -90.0, 0.0]
    dice = torch.Generator().manual_seed(keys)
    k = torch.randn(1, len(special), keys, 1, generator=dice)
    k[0, range(len(special)), range(len(special)), 0] = torch.tensor(special)
    q = torch.ones(queries, 1)
    q[1:] = torch.randn(queries - 1, 1, generator=dice)
    q = q.expand(1, len(special), queries, 1)
    values = torch.eye(keys).expand(1, len(special), keys, keys)  # the context is then the weights
    found = run_loops(make_request(q, k, values, Everything(), scale=1.0))
    scores = q * k.mT
    expected = torch.softmax(scores, -1)
    assert torch.equal(found.isnan(), expected.isnan())
    exact, rest = torch.softmax(scores.double(), -1), ~expected.isnan()
    # the polynomial is off by 2⁻²²; a difference of up to 88, log₂ e and their product are rounded; below it, weights are 0
    off = 2.0**-22 + 3 * 88 * unit_roundoff(torch.float32) + gamma(torch.float32, keys)
    assert_within(found[rest], exact[rest], exact[rest] * off + SMALLEST)
    assert not found[exact < SMALLEST / 8].any()


def test_a_nan_in_a_hidden_key_or_value_stays_out_of_the_rows_that_do_not_see_it():
    q, k, v = (x.detach() for x in tensors(q=300, k=300, groups=H))
    k[:, :, 200], v[:, :, 210] = torch.nan, torch.nan
    context = attention(q, k, v, Causal())
    assert context[:, :, :200].isfinite().all()
    assert context[:, :, 200:].isnan().all()


@pytest.mark.slow
@pytest.mark.emulated
def test_transforms_of_torch_meet_a_kernel_that_they_know():
    q, k, v = (x.detach() for x in tensors(q=300, k=300, groups=H))
    seed = seeds(attention(q, k, v, Causal()))
    found = torch.func.grad(lambda q: (attention(q, k, v, Causal()) * seed).sum())(q)
    (expected,) = torch.autograd.grad(attention(q.requires_grad_(), k, v, Causal()), q, seed)
    assert_within(found, expected, loop_bounds(q, k, v, Causal())[1])


def test_a_gradient_of_the_gradient_is_refused_rather_than_wrong():
    q, k, v = tensors(q=300, k=300, groups=H)
    (grad,) = torch.autograd.grad(attention(q, k, v, Causal()).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()

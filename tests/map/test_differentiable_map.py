"""DifferentiableMap beside autograd through the dense formula in float64."""

import pytest
import torch

import regard
from regard.errors import ConfigError, ShapeError, TooLargeError
from regard.map import AttentionMap, DifferentiableMap, differentiable_map
from regard.mechanism import attend

EQUAL = 1e-10  # float64
B, H, G, Q, K, D, E = 2, 6, 3, 11, 13, 5, 7
CASES = {
    "everything": {},
    "causal, later": {"mask": regard.Causal(), "offset": 2},
    "window": {"mask": regard.Causal() & regard.Window(3)},
    "padding": {"mask": regard.Padding([9, 13])},
    "softcap": {"mask": regard.Causal(), "softcap": 1.7},
    "sinks": {"mask": regard.Causal(), "sinks": torch.linspace(-1, 1, H, dtype=torch.float64)},
    "blind rows": {"mask": regard.Causal(), "offset": -3},
    "scale": {"scale": -0.6},
}


@pytest.fixture(params=[2**22, 2 * K], ids=["one block", "blocks of two rows"], autouse=True)
def block_numbers(request, monkeypatch):
    monkeypatch.setattr(differentiable_map, "BLOCK_NUMBERS", request.param)


def draw_inputs(case):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(B, heads, t, width, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, t, width in ((H, Q, D), (G, K, D), (G, K, E))
    )
    case = dict(case)
    if case.pop("has_bias", False):
        case["bias"] = torch.randn(1, H, Q, K, generator=generator, dtype=torch.float64)
    return q, k, v, case


def compare(number, inputs, expected):
    """Compare a number and its gradients with respect to the inputs."""
    ours, theirs = (torch.autograd.grad(x, inputs, retain_graph=True, allow_unused=True) for x in (number, expected))
    assert float((number - expected).detach().abs()) < EQUAL * max(1, float(expected.detach().abs()))
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or float((one - other).abs().max()) < EQUAL * float(other.abs().max().clamp(min=1))
    assert any(one is not None and float(one.abs().max()) > 1e-3 for one in ours)


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("case", [*CASES.values(), {"has_bias": True}], ids=[*CASES, "bias"])
def test_entries_products_and_sums_have_the_gradients_of_the_dense_formula(case):
    q, k, v, case = draw_inputs(case)
    weights = attend(q, k, v, **case).weights
    m = DifferentiableMap(AttentionMap(q, k, **case), q, k)
    factors = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    compare((m.dense() * factors).sum(), (q, k), (weights * factors).sum())
    compare((m @ v).square().sum(), (q, k, v), attend(q, k, v, **case).context.square().sum())
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    compare((m.entropy() * factors[..., 0]).sum(), (q, k), (entropy * factors[..., 0]).sum())
    compare((m.mass(slice(2, 5)) * factors[..., 0]).sum(), (q, k), (weights[..., 2:5].sum(-1) * factors[..., 0]).sum())


@pytest.mark.parametrize(
    "index",
    [
        (0, 2),
        (slice(None), [3, 0], -1),
        (1, 4, [5, 5, 2], [1, 0, 1]),
        (1, slice(1, 3), torch.tensor([7, 2]), torch.tensor([3, 3])),
        (Ellipsis, 4),
        (0, 0, 6, 2),
        (slice(0, 0),),
    ],
    ids=str,
)
def test_an_index_selects_as_torch_does_with_its_graph(index):
    q, k, v, case = draw_inputs(CASES["causal, later"])
    weights, m = attend(q, k, v, **case).weights, DifferentiableMap(AttentionMap(q, k, **case), q, k)
    found, expected = m[index], weights[index]
    assert found.shape == expected.shape
    if expected.numel():
        compare(found.square().sum(), (q, k), expected.square().sum())


def test_a_selection_keeps_the_graph_of_its_heads_alone():
    q, k, v, case = draw_inputs(CASES["window"])
    m = DifferentiableMap(AttentionMap(q, k, **case), q, k).select(batch=1, heads=[4])
    assert m.shape == (1, 1, Q, K)
    (gradient,) = torch.autograd.grad(m.dense().square().sum(), q)
    (expected,) = torch.autograd.grad(attend(q, k, v, **case).weights[1, 4].square().sum(), q)
    assert float((gradient - expected).abs().max()) < EQUAL
    assert not gradient[0].any()
    assert gradient[1, 4].any()


def test_what_has_no_graph_or_another_shape_is_refused():
    q, k, v, _ = draw_inputs({})
    additive = AttentionMap(q[..., :5], q[..., :5], weight=torch.ones(5, dtype=torch.float64))
    with pytest.raises(ConfigError, match="dot products"):
        DifferentiableMap(additive, q, q)
    with pytest.raises(ShapeError, match="shape of the map's"):
        DifferentiableMap(AttentionMap(q, k), q[:, :, 1:], k)
    with pytest.raises(ShapeError, match="v must be"):
        DifferentiableMap(AttentionMap(q, k), q, k) @ v[:, :, 1:]
    long = torch.zeros(1, 1, 20000, 1).expand(-1, -1, -1, 4)
    with pytest.raises(TooLargeError):
        DifferentiableMap(AttentionMap(long, long), long, long).dense()


def test_no_weights_are_kept_for_the_backward():
    """Neither a matrix nor a block of it: what autograd keeps is q, k and v."""
    q, k, v, case = draw_inputs(CASES["causal, later"])
    m, saved = DifferentiableMap(AttentionMap(q, k, **case), q, k), set()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.add(x.untyped_storage().data_ptr()) or x, lambda x: x):
        number = (m @ v).sum() + m.entropy().sum()
    assert saved == {x.untyped_storage().data_ptr() for x in (q, k, v)}
    number.backward()
    assert q.grad is not None

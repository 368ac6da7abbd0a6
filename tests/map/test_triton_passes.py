"""The Triton kernels against the plain pass in float64: on a GPU if there is one, otherwise in Triton's interpreter."""

import math

import pytest
import torch
from hypothesis import given, settings

from bounds import assert_within
from map.map_bounds import assert_pictures_within, assert_rows_within, plane_bounds
from regard import AttentionMap, Causal, Documents, Everything, Given, Padding, Prefix, Window
from regard.map import passes, triton_passes
from regard.map.plane import Plane
from regard.map.pooling import BinnedWeights, bin_edges
from regard.mechanism.request import make_request
from run_limits import limit_examples
from strategies import requests

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy's, of -inf

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
T, K, D, BINS = (401, 1327, 20, 40) if HAS_GPU else (40, 100, 20, 11)  # fewer where each tile is interpreted
LOWEST = torch.finfo(torch.float32).min
HIDING = torch.zeros(1, K).index_fill(1, torch.arange(66), LOWEST)  # of more than a tile of keys, as models hide them
HALVES = [
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not HAS_GPU, reason="Triton's interpreter has no bfloat16")),
]
RULES = [
    Everything(),
    Causal(),
    Causal() & Window(40),
    Causal() & (Window(16) | Prefix(2)),
    Documents(torch.arange(K) // 37),
    Padding([K - 30]),
    ~Everything(),
    Given(torch.rand(T, K, generator=torch.Generator("cpu").manual_seed(0)) > 0.5),
]
OPTIONS = [
    {},
    {"softcap": 3.0, "scale": 0.7},
    {"offset": 50, "sinks": torch.tensor([0.7])},
    {"offset": torch.tensor([-30])},
    {"bias": torch.linspace(-9, 9, T * K).view(T, K).sin()},
    {"bias": torch.linspace(-3, 0, K).masked_fill(torch.arange(K) % 11 == 3, -math.inf), "softcap": 30.0},
]


def make_planes(mask, q, k, **options):
    """Make a plane on the device, and the same in float64 on the CPU."""
    moved, raised = (
        {n: change(o) if torch.is_tensor(o) else o for n, o in options.items()}
        for change in (lambda x: x.to(DEVICE), lambda x: x if is_index(x) else x.double())
    )
    given = [x.to(DEVICE) for x in (q, k)]
    return Plane(make_request(*given, given[1], mask, **moved), 0, 0), Plane(
        make_request(q.double(), k.double(), k.double(), mask, **raised), 0, 0
    )


def is_index(x):
    """Return whether a tensor holds whole numbers."""
    return not x.is_floating_point()


def assert_traversal_is_exact(single, double, rows, columns):
    """Assert that a traversal by the kernels gives what the plain pass gives in float64."""
    found, picture = triton_passes.gather_statistics([single], rows, columns)[0]
    reference = BinnedWeights(double, rows, columns)
    expected = passes.gather_statistics(double, passes.ROWS, [reference.add_run])
    assert set(found.rows) == set(passes.ROWS)
    allowed = plane_bounds(double)
    on_cpu = passes.TraversalResult({n: x.cpu() for n, x in found.rows.items()}, found.received.cpu(), found.denominators)
    assert_rows_within(on_cpu, expected, allowed, double.offset)
    assert_within(on_cpu.received, expected.received, allowed.received, "received")
    seen = BinnedWeights.from_sums(rows, columns, picture.sum.cpu(), picture.max.cpu())
    assert_pictures_within(seen, reference, allowed, double)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
@pytest.mark.parametrize("mask", RULES, ids=repr)
def test_the_kernels_find_what_the_plain_pass_finds_in_float64(mask, options):
    torch.manual_seed(1)
    planes = make_planes(mask, torch.randn(1, 1, T, D), torch.randn(1, 1, K, D), **options)
    assert_traversal_is_exact(*planes, bin_edges(0, T, BINS), bin_edges(0, K, BINS))


@pytest.mark.parametrize(
    "bias",
    [HIDING, HIDING.flip(1), torch.full((1, K), LOWEST), torch.full((1, K), -1e37)],
    ids=["first", "last", "all", "all by less"],
)
@pytest.mark.parametrize("options", [{}, {"sinks": torch.tensor([0.7])}], ids=lambda options: " ".join(options))
def test_keys_hidden_by_the_lowest_number_leave_every_statistic_finite(bias, options):
    torch.manual_seed(1)
    q, k, edges = torch.randn(1, 1, T, D), torch.randn(1, 1, K, D), (bin_edges(0, T, 5), bin_edges(0, K, 5))
    single, double = make_planes(Everything(), q, k, bias=bias, **options)
    found, picture = triton_passes.gather_statistics([single], *edges)[0]
    expected, reference = passes.gather_with_picture(double, *edges, passes.ROWS)
    for name in ("entropy", "largest", "first", "itself", "previous"):
        torch.testing.assert_close(found.rows[name].cpu().double(), expected.rows[name], rtol=0, atol=1e-5)
    torch.testing.assert_close(picture.pool("sum").cpu().double(), reference.pool("sum"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_multiplied_exactly(dtype):
    torch.manual_seed(1)
    q, k = torch.randn(1, 1, T, D).to(dtype), torch.randn(1, 1, K, D).to(dtype)
    assert_traversal_is_exact(*make_planes(Causal(), q, k, offset=9), bin_edges(0, T, BINS), bin_edges(0, K, BINS))


@pytest.mark.parametrize(("width", "bins"), [(1, (1, 1)), (16, (3, K)), (65, (T, 5)), (256, (9, 9))])
def test_widths_and_bins_may_be_of_any_size(width, bins):
    torch.manual_seed(1)
    planes = make_planes(Causal(), torch.randn(1, 1, T, width), torch.randn(1, 1, K, width), offset=30)
    assert_traversal_is_exact(*planes, bin_edges(0, T, bins[0]), bin_edges(0, K, bins[1]))


@pytest.mark.slow
@given(requests(torch.float32, longest=40))
@settings(max_examples=limit_examples(60) if HAS_GPU else 12)
def test_any_request_is_exact_in_each_of_its_matrices(asked):
    options = {n: o.to(DEVICE) if torch.is_tensor(o) else o for n, o in asked.options.items()}
    made = make_request(asked.q.to(DEVICE), asked.k.to(DEVICE), asked.k.to(DEVICE), asked.mask, **options)
    (batch, heads, q, _), k = made.q.shape, made.k.shape[2]
    if not q or not k:
        return
    pairs = [(b, h) for b in range(batch) for h in range(heads)]
    rows, columns = bin_edges(0, q, min(q, 7)), bin_edges(0, k, min(k, 7))
    found = triton_passes.gather_statistics([Plane(made, *pair) for pair in pairs], rows, columns)
    raised = {n: o.double() if torch.is_tensor(o) and o.is_floating_point() else o for n, o in asked.options.items()}
    exact = make_request(asked.q.double(), asked.k.double(), asked.k.double(), asked.mask, **raised)
    for pair, (one, picture) in zip(pairs, found, strict=True):
        double = Plane(exact, *pair)
        allowed, expected = plane_bounds(double), passes.gather_statistics(double, passes.ROWS)
        rows_found = passes.TraversalResult({n: x.cpu() for n, x in one.rows.items()}, one.received, one.denominators)
        assert_rows_within(rows_found, expected, allowed, double.offset)
        assert_within(one.received.cpu(), expected.received, allowed.received, "received")
        reference = BinnedWeights(double, rows, columns)
        passes.gather_statistics(double, {}, [reference.add_run])
        seen = BinnedWeights.from_sums(rows, columns, picture.sum.cpu(), picture.max.cpu())
        assert_pictures_within(seen, reference, allowed, double)


def test_a_nan_goes_to_the_plain_pass():
    q, k = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    q[0, 0, 3, 1] = math.nan
    single, _ = make_planes(Everything(), q, k)
    assert triton_passes.gather_statistics([single], bin_edges(0, 5, 5), bin_edges(0, 5, 5)) is None


def test_where_the_kernels_cannot_be_compiled_the_plain_pass_is_used_with_a_warning(monkeypatch):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(triton_passes, "summarize_rows", fail)
    monkeypatch.setattr(triton_passes, "broken_devices", set())
    single, _ = make_planes(Causal(), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4))
    with pytest.warns(UserWarning, match="Failed to find C compiler"):
        assert triton_passes.gather_statistics([single], bin_edges(0, 5, 5), bin_edges(0, 5, 5)) is None
    assert triton_passes.broken_devices == {single.q.device}


@pytest.mark.skipif(not HAS_GPU, reason="this machine has no GPU")
@pytest.mark.parametrize("t", [100, 300, 3000])
def test_a_map_on_a_gpu_is_that_on_the_cpu(t):
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, t, 32), torch.randn(2, 2, t, 32), torch.randn(2, 4, t, 8)
    exact = AttentionMap(q.double(), k.double(), Causal())
    found = AttentionMap(q.cuda(), k.cuda(), Causal())
    assert triton_passes.can_run_triton(Plane(found.planes.request, 0, 0))
    wanted, overview = exact.overview(), found.overview()
    for name in ("entropy", "largest", "first", "itself", "previous", "received", "mean", "max"):
        torch.testing.assert_close(getattr(overview, name).cpu().double(), getattr(wanted, name), rtol=1e-5, atol=2e-5)
    for read in (
        lambda m: m[1, 2, t // 2],
        lambda m: m[:, 1, [3, 50], 2],
        lambda m: m.top(3)[0],
        lambda m: m.pooled(7, 9),
        lambda m: m.tile(slice(5, 60), slice(0, 40), 6, "max"),
        lambda m: m.mass(slice(0, 4)),
        lambda m: m.diagonal(2),
        lambda m: m.entropy(),
        lambda m: m.received(),
        lambda m: m.logsumexp(),
        lambda m: m @ v.to(m.device, m[0, 0, 0].dtype),
        lambda m: m.mT @ v.to(m.device, m[0, 0, 0].dtype),
    ):
        torch.testing.assert_close(read(found).cpu().double(), read(exact), rtol=1e-5, atol=2e-5)
    assert found.certificate().error < 1e-5

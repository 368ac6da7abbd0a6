"""Queries times sums of keys times values as models write them: running sums, einsum, masks, divisors, other dtypes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D = 2, 7, 11, 5


class Projections(nn.Module):
    """Layers of queries, keys, values and weights, and the mask of the tokens that may be seen."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.query, self.key, self.value, self.weigh = (nn.Linear(C, D) for _ in range(4))
        self.scale = nn.Parameter(torch.rand(D) + 0.5)
        self.register_buffer("mask", torch.rand(B, T) < 0.6)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(x).sigmoid(), self.key(x), self.value(x)


class OfAllTokens(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return getattr(self, self.style)(q, k, v, self.mask, self.weigh(x))

    def divide_by_number(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        return q * ((k * v).sum(1, keepdim=True) / T)

    def divide_by_keys(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        k = k.exp()
        return ((k * v).sum(1) / (k.sum(1) + 1e-3)).unsqueeze(1) * q

    def divide_by_mask(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        mask = mask.to(k.dtype)
        return q * ((k * v * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None].clamp(min=1))

    def multiply_by_scale(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        return ((k * v).mean(1)[:, None] * self.scale * 3) * q

    def use_einsum(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        return q * torch.einsum("btc,btc->bc", k, v).unsqueeze(1)

    def use_einsum_of_temporaries(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        return q * (torch.einsum("bct,btc->cb", k.softmax(1).mT, v + 1).mT[:, None] / 3)

    def use_einsum_with_mask(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        return q * torch.einsum("btc,bt,btc->bc", k, mask.to(k.dtype), v)[:, None]

    def multiply_mask_first(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        return q * (mask.unsqueeze(-1) * k * v).sum(1, keepdim=True)

    def multiply_mask_last(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        return q * (k * v * mask[:, :, None]).sum(1, keepdim=True)

    def mask_product(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        product = k * v
        product = product.masked_fill(mask.unsqueeze(-1), 0)
        return q * product.mean(1, keepdim=True)

    def mask_keys(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        k = (k / k.norm(dim=-1, keepdim=True)).masked_fill(~mask.unsqueeze(-1), 0)
        return q * (k * v).sum(1, keepdim=True)

    def choose_keys(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        k = torch.where(mask[..., None], k, 0.0)
        return q * (k * v).sum(1, keepdim=True)

    def weigh_product(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        w = w.sigmoid()
        return q * (k * v * w).sum(1, keepdim=True)

    def halve_product(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        return q * (k * v * 0.5).sum(1, keepdim=True)

    def transpose_product(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        return q * (k * v).mT.sum(-1).unsqueeze(1)

    def list_keys(self, x: Tensor) -> Tensor:
        """The keys with all that multiplies them, (b, t, d)."""
        k, mask = self.key(x), self.mask[..., None].to(x.dtype)
        exponentials, ones = k.exp(), torch.ones(1)
        keys = {
            "divide_by_keys": exponentials / (exponentials.sum(1, keepdim=True) + 1e-3),
            "use_einsum_of_temporaries": k.softmax(1) / 3,
            "mask_keys": k / k.norm(dim=-1, keepdim=True) * mask,
        }
        factors = {
            "divide_by_number": ones / T,
            "divide_by_mask": mask / mask.sum(1, keepdim=True).clamp(min=1),
            "multiply_by_scale": 3 / T * self.scale,
            "use_einsum_with_mask": mask,
            "multiply_mask_first": mask,
            "multiply_mask_last": mask,
            "choose_keys": mask,
            "mask_product": (1 - mask) / T,
            "weigh_product": self.weigh(x).sigmoid(),
            "halve_product": ones / 2,
        }
        return keys.get(self.style, k * factors.get(self.style, ones))


STYLES = [name for name in vars(OfAllTokens) if name not in ("forward", "list_keys") and not name.startswith("_")]


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_each_channel_is_a_head_whatever_the_sum_is_written_as(style, has_gradients):
    part, x = OfAllTokens(style), torch.randn(B, T, C)
    with torch.set_grad_enabled(has_gradients):
        recording, output = record_and_compare(nn.Sequential(part), lambda model: model(x))
    assert [call.name for call in recording.calls] == ["0"]
    with torch.no_grad():
        expected = torch.einsum("bic,bjc->bcij", part.query(x).sigmoid(), part.list_keys(x))
        v = part.value(x) + (style == "use_einsum_of_temporaries")
    found = recording.map(0, kind="implicit")
    torch.testing.assert_close(found.dense(), expected, rtol=0, atol=EQUAL)
    torch.testing.assert_close(recording.values(0, kind="implicit").squeeze(-1), v.mT, rtol=0, atol=EQUAL)
    torch.testing.assert_close((found @ v.mT.unsqueeze(-1)).squeeze(-1).mT, output, rtol=0, atol=EQUAL)


class ByEinsum(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return torch.einsum("bc,btc->btc", torch.einsum("btc,btc->bc", k, v), q)


class ByMean(Projections):
    """Without any function that only attention uses."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return q * (k * v).mean(1, keepdim=True)


@pytest.mark.parametrize("kind", [ByEinsum, ByMean])
def test_a_layer_of_a_single_style_is_recorded(kind):
    part, x = kind(""), torch.randn(B, T, C)
    with torch.no_grad():
        recording, _ = record_and_compare(nn.Sequential(part), lambda model: model(x))
        q = part.query(x).sigmoid() if kind is ByEinsum else part.query(x) / T
        expected = torch.einsum("bic,bjc->bcij", q, part.key(x))
    torch.testing.assert_close(recording.map(0, kind="implicit").dense(), expected, rtol=0, atol=EQUAL)


class Causal(Projections):
    """Running sums over tokens, (b, t, c), or (t, b, c) where they are first."""

    def forward(self, x: Tensor) -> Tensor:
        self.gates = self.weigh(x).sigmoid()
        return getattr(self, self.style)(*self.project(x))

    def sum_up(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * (k * v).cumsum(1)

    def sum_up_tokens_first(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cumsum(k * v, dim=0) * q

    def divide_after(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.exp()
        return q * torch.cumsum(k * v, dim=1) / torch.cumsum(k, dim=1)

    def divide_temporaries(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * torch.cumsum(torch.exp(k) * v, dim=1) / torch.cumsum(torch.exp(k), dim=1)

    def divide_before(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = torch.exp(k - k.amax(1, keepdim=True))
        return q * ((k * v).cumsum(1) / (k.cumsum(1) + 1e-3))

    def divide_by_count(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * ((k * v).cumsum(-2) / torch.arange(1, T + 1).unsqueeze(-1))

    def mask_keys(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (k * v * self.mask.unsqueeze(-1)).cumsum(1) * q

    def divide_by_decays(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A selective scan, whose queries are multiplied by the decays first."""
        decays = (-self.gates).cumsum(1).exp()
        return q * decays * (k * v / decays).cumsum(1)

    def compute_weights(self, x: Tensor) -> Tensor:
        """The matrix of each channel, (b, c, t, t), of tokens (b, t, c)."""
        q, k, _ = self.project(x)
        if self.style == "divide_by_decays":
            q, k = q * (-self.weigh(x).sigmoid()).cumsum(1).exp(), k * self.weigh(x).sigmoid().cumsum(1).exp()
        is_divided = self.style in ("divide_before", "divide_after", "divide_temporaries")
        if is_divided:
            k = (k - k.amax(1, keepdim=True)).exp() if self.style == "divide_before" else k.exp()
        k = k * self.mask.unsqueeze(-1) if self.style == "mask_keys" else k
        weights = torch.einsum("bic,bjc->bcij", q, k).tril()
        if self.style == "divide_by_count":
            return weights / torch.arange(1, T + 1).unsqueeze(-1)
        if not is_divided:
            return weights
        sums = k.mT.unsqueeze(-2).expand_as(weights).tril().sum(-1, keepdim=True)
        return weights / (sums + 1e-3 * (self.style == "divide_before"))


RUNNING = [
    *("sum_up", "sum_up_tokens_first", "divide_after", "divide_before", "divide_by_count", "mask_keys", "divide_by_decays"),
    "divide_temporaries",
]


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("style", RUNNING)
def test_running_sums_are_causal(style, has_gradients):
    part, x = Causal(style), torch.randn(B, T, C)
    is_first = "first" in style
    given = x.transpose(0, 1).contiguous() if is_first else x
    with torch.set_grad_enabled(has_gradients):
        recording, output = record_and_compare(nn.Sequential(part), lambda model: model(given))
    assert [call.name for call in recording.calls] == ["0"]
    found = recording.map(0, kind="implicit")
    with torch.no_grad():
        torch.testing.assert_close(found.dense(), part.compute_weights(x), rtol=0, atol=EQUAL)
        v = part.value(x).mT.unsqueeze(-1)
    output = output.transpose(0, 1) if is_first else output
    torch.testing.assert_close((found @ v).squeeze(-1).mT, output, rtol=0, atol=EQUAL)


class OfPixels(nn.Module):
    """An image whose products are flattened before they are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(C, 3 * D, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, 1)
        return q * (k * v).flatten(2).mean(-1)[..., None, None]


def test_products_of_pixels_may_be_flattened():
    part, x = OfPixels(), torch.randn(B, C, 3, 4)
    with torch.no_grad():
        recording, _ = record_and_compare(nn.Sequential(part), lambda model: model(x))
        q, k, _ = (y.flatten(2) for y in part.project(x).chunk(3, 1))
    expected = torch.einsum("bci,bcj->bcij", q, k) / 12
    torch.testing.assert_close(recording.map(0, kind="implicit").dense(), expected, rtol=0, atol=EQUAL)


class OfHeads(nn.Module):
    """Channels that a layer splits into heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.project = 3, nn.Linear(C, 3 * 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(B, T, 3, self.num_heads, D).permute(2, 0, 3, 1, 4)
        return q * torch.einsum("bhtd,bhtd->bhd", k, v).unsqueeze(2)


def test_channels_of_all_heads_are_heads():
    part, x = OfHeads(), torch.randn(B, T, C)
    with torch.no_grad():
        recording, _ = record_and_compare(nn.Sequential(part), lambda model: model(x))
        q, k, _ = part.project(x).chunk(3, -1)
    expected = torch.einsum("bic,bjc->bcij", q, k)
    torch.testing.assert_close(recording.map(0, kind="implicit").dense(), expected, rtol=0, atol=EQUAL)


class TokensFirst(nn.Module):
    """A sum over the first axis, which is of tokens where a module states that no batch is first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first, self.project = batch_first, nn.Linear(C, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return q * (k * v).sum(0, keepdim=True)


def test_tokens_are_first_where_a_module_states_it():
    part, x = TokensFirst(False), torch.randn(T, B, C)
    with torch.no_grad():
        recording, _ = record_and_compare(nn.Sequential(part), lambda model: model(x))
        q, k, _ = part.project(x).chunk(3, -1)
    expected = torch.einsum("ibc,jbc->bcij", q, k)
    torch.testing.assert_close(recording.map(0, kind="implicit").dense(), expected, rtol=0, atol=EQUAL)
    recording, _ = record_and_compare(nn.Sequential(TokensFirst(True)), lambda model: model(x))
    assert not recording.calls


class OfTwoDtypes(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.style == "a product":
            return q * (k * v).float().sum(1, keepdim=True).to(q.dtype)
        if self.style == "keys and values":
            return (q.float() * (k.float() * v.float()).sum(1, keepdim=True)).to(q.dtype)
        if self.style == "a running sum":
            return q * torch.cumsum((k * v).float(), 1).to(q.dtype)
        assert self.style == "a sum"
        return q * (k * v).sum(1, keepdim=True, dtype=torch.float32).type_as(q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("style", ["a product", "keys and values", "a sum", "a running sum"])
def test_products_may_be_summed_in_another_dtype(style, dtype):
    part, x = OfTwoDtypes(style).to(dtype), torch.randn(B, T, C, dtype=dtype)
    with torch.no_grad():
        recording, _ = record_and_compare(nn.Sequential(part), lambda model: model(x))
        expected = torch.einsum("bic,bjc->bcij", part.query(x).double(), part.key(x).double())
    expected = expected.tril() if style == "a running sum" else expected
    torch.testing.assert_close(recording.map(0, kind="implicit").dense().double(), expected, rtol=0, atol=1e-5)


class FreedMask(Projections):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return q * (k * v * (1 - self.mask.to(k.dtype)).unsqueeze(-1)).sum(1, keepdim=True)


def test_a_mask_that_was_freed_is_missed():
    with torch.no_grad():
        recording, _ = record_and_compare(nn.Sequential(FreedMask("")), lambda model: model(torch.randn(B, T, C)), missing=True)
    assert [one.module for one in recording.missed] == ["0"]
    assert "whose keys or values were multiplied by a tensor that was freed" in recording.missed[0].reason


class Statistics(Projections):
    """Gates, poolings, norms and statistics that multiply and sum tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return getattr(self, self.style)(q, k, v, self.weigh(x), self.mask.unsqueeze(-1).to(x.dtype))

    def gate_by_own_mean(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        glu = k * v.sigmoid()
        return glu * glu.mean(1, keepdim=True)

    def excite(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        glu = k * v.sigmoid()
        return q * ((glu.sum(1, keepdim=True) / T) * self.scale).sigmoid()

    def bound_gate(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return q * (k * v).mean(1, keepdim=True).clamp(0, 1)

    def multiply_by_covariance(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        k, v = k - k.mean(1, keepdim=True), v - v.mean(1, keepdim=True)
        return q * (k * v).mean(1, keepdim=True)

    def multiply_by_correlation(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        k, v = k - k.mean(1, keepdim=True), v - v.mean(1, keepdim=True)
        return q * (torch.einsum("btc,btc->bc", k, v) / (k.square().sum(1) * v.square().sum(1)).sqrt()).unsqueeze(1)

    def multiply_by_standardized(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        k, v = ((one - one.mean(1, keepdim=True)) / one.std(1, keepdim=True) for one in (k, v))
        return q * (k * v).mean(1, keepdim=True)

    def multiply_by_pooled_units(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        units = F.silu(k) * v
        return q * units.mean(1, keepdim=True)

    def sum_up_units(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return q * torch.cumsum(k.sigmoid() * v, 1)

    def multiply_by_masked_mean(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return q * ((k * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1))

    def multiply_by_masked_glu(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        glu = k * v.sigmoid()
        return glu + q * (glu * mask).sum(1, keepdim=True)

    def normalize_batch(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        centered = q - q.mean((0, 1))
        return centered * (centered * centered).mean((0, 1)).add(1e-5).rsqrt() * self.scale

    def normalize_tokens(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return q * torch.rsqrt((k * k).mean(1, keepdim=True) + 1e-6) * self.scale

    def compute_loss(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        k, v = k.sigmoid(), v.sigmoid()
        return 1 - (2 * (k * v).sum(1) / (k.sum(1) + v.sum(1))).mean()

    def sum_features(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return q * torch.einsum("btc,btc->bt", k, v).unsqueeze(-1)

    def sum_batch(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return q * torch.einsum("btc,btc->tc", k, v) / B

    def sum_up_features(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return q * (k * v).cumsum(-1)

    def average_up(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return q * (k.cumsum(1) / torch.arange(1, T + 1).unsqueeze(-1)).sigmoid()

    def count_tokens(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return q * mask.cumsum(1) + (k * mask).cumsum(1) / mask.cumsum(1).clamp(min=1)


@pytest.mark.parametrize("style", [name for name in vars(Statistics) if name[0] != "_" and name != "forward"])
def test_gates_poolings_and_statistics_are_neither_recorded_nor_missed(style):
    part = nn.Sequential(Statistics(style))
    for has_gradients in (False, True):
        with torch.set_grad_enabled(has_gradients):
            recording, _ = record_and_compare(part, lambda model: model(torch.randn(B, T, C)))
        assert not recording.calls

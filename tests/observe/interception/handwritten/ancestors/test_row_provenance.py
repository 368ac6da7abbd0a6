"""Heads and tokens of queries in one axis, or in two, are told apart by the layer that projected them: no number is stated."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare
from regard.observe import record

pytestmark = pytest.mark.usefixtures("in_float64")

H, D, R, C, E, WIDTH = 3, 4, 2, 7, 5, 11  # heads; widths of queries, rotary parts, latent keys, values and tokens
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Rotate = Callable[[Tensor, Tensor], Tensor]


def keep_axes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (torch.einsum("bshc,btc->bsht", q, k) + mask[:, None]).softmax(-1)
    return weights.transpose(1, 2), torch.einsum("bsht,btc->bshc", weights, v)


def put_heads_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q.transpose(1, 2) @ k.mT[:, None] + mask).softmax(-1)
    return weights, (weights @ v[:, None]).transpose(1, 2)


def fold_heads_behind_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q.flatten(1, 2) @ k.mT + mask.repeat_interleave(H, 0)).softmax(-1)
    return weights.unflatten(1, (-1, H)).transpose(1, 2), (weights @ v).unflatten(1, (-1, H))


def fold_heads_before_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q.transpose(1, 2).flatten(1, 2) @ k.mT + mask.repeat(H, 1)).softmax(-1)
    return weights.unflatten(1, (H, -1)), (weights @ v).unflatten(1, (H, -1)).transpose(1, 2)


def view_folded_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = ((q.flatten(1, 2) @ k.mT).unflatten(1, (-1, H)) + mask[:, None]).softmax(-1)
    return weights.transpose(1, 2), (weights.flatten(1, 2) @ v).unflatten(1, (-1, H))


FORMS: list[Attend] = [keep_axes, put_heads_first, fold_heads_behind_tokens, fold_heads_before_tokens, view_folded_scores]


def absorb_by_einsum(q: Tensor, up: Tensor) -> Tensor:
    return torch.einsum("bshd,hdc->bshc", q, up)


def absorb_by_bmm(q: Tensor, up: Tensor) -> Tensor:
    return torch.bmm(q.flatten(0, 1).transpose(0, 1), up).transpose(0, 1).reshape(*q.shape[:3], -1)


class Latent(nn.Module):
    """Latent attention whose queries absorb the projection of the keys. https://arxiv.org/abs/2405.04434"""

    def __init__(self, attend: Attend, absorb: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend, self.absorb, self.weights = attend, absorb, torch.empty(0)
        self.query, self.latent, self.up = nn.Linear(WIDTH, H * (D + R)), nn.Linear(WIDTH, C + R), nn.Linear(C, H * (D + E))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, q_rope = self.query(x).view(b, t, H, D + R).split([D, R], -1)
        keys, up = self.latent(x), self.up.weight.view(H, D + E, C)
        q = torch.cat([self.absorb(q, up[:, :D]), q_rope], -1)
        mask = torch.full((t, t), -torch.inf).triu(1)
        weights, context = self.attend(q, keys, keys[..., :C], mask)
        self.weights = weights.detach()
        return torch.einsum("bshc,hdc->bshd", context, up[:, D:]).flatten(2)


@pytest.mark.parametrize(("b", "t"), [(1, 5), (2, 5), (3, 5), (2, 1), (3, 1), (2, 3), (3, 3)])
@pytest.mark.parametrize("absorb", [absorb_by_einsum, absorb_by_bmm])
@pytest.mark.parametrize("attend", FORMS, ids=lambda one: one.__name__)
def test_heads_that_share_latent_keys_are_known_by_the_layer_that_projected_their_queries(attend, absorb, b, t):
    part = Latent(attend, absorb)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(b, t, WIDTH)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)


class OwnLinear(nn.Module):
    """A layer that is no nn.Linear."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    angles = angles.repeat(1, 1, 2)
    return x * angles.cos() + torch.cat([-other, one], -1) * angles.sin()


def rotate_parts(x: Tensor, angles: Tensor) -> Tensor:
    one, other = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1)


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    one, other = x[..., ::2], x[..., 1::2]
    pairs = one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()
    return torch.stack(pairs, -1).flatten(-2)


def rotate_numbers(x: Tensor, angles: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


ROTATIONS = [rotate_halves, rotate_parts, rotate_pairs, rotate_numbers]


class Grouped(nn.Module):
    """Heads of groups that share keys, folded with tokens into one axis."""

    def __init__(self, groups: int, rotate: Rotate, linear: type[nn.Module], is_outer: bool) -> None:
        super().__init__()
        self.shape, self.rotate, self.is_outer, self.weights = (groups, H, D), rotate, is_outer, torch.empty(0)
        self.query, self.key, self.value = (linear(WIDTH, groups * n * D) for n in (H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        angles = (torch.arange(t)[:, None] * torch.tensor([1.0, 0.3]))[:, None]
        q, k = (self.rotate(one(x).view(b, t, -1, D), angles) for one in (self.query, self.key))
        q, k, v = q.unflatten(2, self.shape[:2]), k.transpose(1, 2), self.value(x).view(b, t, -1, D).transpose(1, 2)
        q = q.permute(0, 2, 3, 1, 4) if self.is_outer else q.transpose(1, 2)
        weights = (q.flatten(2, 3) @ k.mT).softmax(-1)
        unfolded = weights.view(*q.shape[:-1], t).detach()
        self.weights = (unfolded if self.is_outer else unfolded.transpose(2, 3)).flatten(1, 2)
        return (weights @ v).flatten(1)


@pytest.mark.parametrize(("b", "t"), [(2, 5), (1, 5), (2, 1), (2, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("is_outer", [True, False])
@pytest.mark.parametrize("linear", [nn.Linear, OwnLinear])
@pytest.mark.parametrize("rotate", ROTATIONS, ids=lambda one: one.__name__)
def test_heads_of_groups_that_are_folded_with_tokens_are_known_by_their_layer(rotate, linear, is_outer, groups, b, t):
    part = Grouped(groups, rotate, linear, is_outer)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(b, t, WIDTH)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)


class Inner(nn.Module):
    """The product of queries, keys and values that another module has folded."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class Outer(nn.Module):
    """Queries (b, t h, d) of some of the last tokens, of which a module of its own computes the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys, self.attend, self.weights = nn.Linear(WIDTH, H * D), nn.Linear(WIDTH, D), Inner(), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x)[:, -2:].unflatten(-1, (H, D)), self.keys(x)
        self.weights = (q.transpose(1, 2) @ k.mT[:, None]).softmax(-1).detach()
        return self.attend(q.flatten(1, 2), k, k)


def test_queries_of_some_tokens_are_known_in_the_module_that_they_are_passed_to():
    part = Outer()
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(2, 5, WIDTH)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)


class WithCache(nn.Module):
    """Heads of groups that share keys, in any order of axes, with a cache of keys and values."""

    def __init__(self, groups: int, order: str, states: bool) -> None:
        super().__init__()
        self.shape, self.order, self.weights = (groups, H, D), order, torch.empty(0)
        self.query, self.key, self.value = (nn.Linear(WIDTH, groups * n * D) for n in (H, 1, 1))
        self.held: tuple[Tensor, Tensor] | None = None
        if states:
            self.num_heads, self.num_kv_heads = groups * H, groups

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (one(x).view(b, t, -1, D) for one in (self.query, self.key, self.value))
        if self.held is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(self.held, (k, v), strict=True))
        self.held = k, v
        q = q.unflatten(2, self.shape[:2])
        self.weights = torch.einsum("btgrd,bsgd->bgrts", q, k).softmax(-1).flatten(1, 2).detach()
        q = q.permute(*("btgr".index(letter) for letter in self.order), 4)
        of_keys = self.order.replace("r", "").replace("t", "s")
        k, v = (one.permute(*("bsg".index(letter) for letter in of_keys), 3) for one in (k, v))
        weights = torch.einsum(f"{self.order}d,{of_keys}d->{self.order}s", q, k).softmax(-1)
        return torch.einsum(f"{self.order}s,{of_keys}d->btgrd", weights, v).flatten(2)


@pytest.mark.parametrize("b", [1, 2, 3, 6])
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("order", ["gbrt", "gbtr", "grbt", "tbgr", "bgrt", "btgr", "rgbt"])
def test_the_heads_of_a_decoding_step_are_those_of_its_layer_in_every_order_of_axes(order, groups, states, b):
    part = WithCache(groups, order, states)
    model = nn.Sequential(part)
    model(torch.randn(b, 5, WIDTH))
    held = part.held

    def step(model: nn.Module) -> Tensor:
        part.held = held
        return model(torch.randn(b, 1, WIDTH))

    recording, _ = record_and_compare(model, step)
    torch.testing.assert_close(recording.calls[0].map.dense(), part.weights, rtol=0, atol=EQUAL)


class Windows(nn.Module):
    """Heads that a layer of einops splits, in windows that are rows of the batch, with memory tokens before their keys."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.memory, self.attend = nn.Linear(WIDTH, 3 * H * D), nn.Parameter(torch.randn(H, 2, D)), Inner()
        self.split, self.weights = Rearrange("b n (h d) -> b h n d", h=H), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(one) for one in self.project(x).chunk(3, -1))
        q, k, v = (one.unflatten(2, (-1, 5)).transpose(1, 2).flatten(0, 1) for one in (q, k, v))
        k, v = (torch.cat([self.memory.expand(len(one), -1, -1, -1), one], 2) for one in (k, v))
        self.weights = (q @ k.mT).softmax(-1).detach()
        return self.attend(q, k, v)


@pytest.mark.parametrize("b", [1, 2, 3, 5])
def test_heads_that_a_layer_of_einops_splits_are_no_windows(b):
    part = Windows()
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(b, 10, WIDTH)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)


class Viewed(nn.Module):
    """A layer that splits heads off by views, and may repeat keys and values once."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).view(len(x), *self.shape) for one in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(1, 1) for one in (k, v))
        return ((q @ k.mT / 2).softmax(-1) @ v).flatten(1)


@pytest.mark.parametrize(
    "shape",
    [(3, 6, 4), (6, 3, 4)],  # heads before the tokens, which mixes them, and heads of each token that attend to one another
)
def test_heads_that_a_view_mixes_with_tokens_are_read_by_their_dimensions(shape):
    layer, x = Viewed(*shape), torch.randn(2, 6, 12)
    with record(layer) as recording:
        layer(x)
    q, k = (one(x).view(2, *shape) for one in (layer.q, layer.k))
    assert not recording.missed
    torch.testing.assert_close(recording.map(0).dense(), (q @ k.mT / 2).softmax(-1), rtol=0, atol=EQUAL)


class HeadInputs(nn.Module):
    """A layer of tokens with an axis of heads, (b, t, h, c), each of which is projected and shifted for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(H, WIDTH, D)) for _ in range(3))
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(H, D)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.weights, self.biases, strict=True)
        q, k, v = (torch.einsum("bthc,hcd->bthd", x, weight) + bias for weight, bias in parts)
        return torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1), v).flatten(2)


def test_heads_of_an_input_with_an_axis_of_heads_are_no_batch():
    layer, x = HeadInputs(), torch.randn(2, 5, H, WIDTH)
    with record(layer) as recording:
        layer(x)
    q, k = (torch.einsum("bthc,hcd->bhtd", x, layer.weights[n]) + layer.biases[n][:, None] for n in range(2))
    assert not recording.missed
    torch.testing.assert_close(recording.map(0).dense(), (q @ k.mT).softmax(-1), rtol=0, atol=EQUAL)

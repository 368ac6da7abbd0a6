"""Heads that share keys are told from tokens, wherever queries have the two, and in one axis with each other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

H, T, S, C, D = 3, 5, 6, 7, 4
Form = Callable[["MultiQuery", Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def fold_heads_behind_tokens(layer: "MultiQuery", q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = layer.weigh(q.flatten(1, 2) @ k.mT)
    return weights.unflatten(1, (-1, H)).transpose(1, 2), (weights @ v).unflatten(1, (-1, H))


def fold_heads_before_tokens(layer: "MultiQuery", q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = layer.weigh(q.transpose(1, 2).reshape(len(q), -1, D) @ k.mT)
    return weights.unflatten(1, (H, -1)), (weights @ v).unflatten(1, (H, -1)).transpose(1, 2)


def keep_heads_behind_tokens(layer: "MultiQuery", q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = layer.weigh(torch.einsum("bihd,bjd->bihj", q, k))
    return weights.transpose(1, 2), torch.einsum("bihj,bjd->bihd", weights, v)


def put_heads_before_tokens(layer: "MultiQuery", q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = layer.weigh(torch.einsum("bihd,bjd->bhij", q, k))
    return weights, torch.einsum("bhij,bjd->bihd", weights, v)


def broadcast_keys_to_heads(layer: "MultiQuery", q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = layer.weigh(q.transpose(1, 2) @ k.mT[:, None])
    return weights, (weights @ v[:, None]).transpose(1, 2)


def broadcast_keys_to_tokens(layer: "MultiQuery", q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = layer.weigh(q @ k.mT[:, None])
    return weights.transpose(1, 2), weights @ v[:, None]


FORMS: list[Form] = [
    fold_heads_behind_tokens,
    fold_heads_before_tokens,
    keep_heads_behind_tokens,
    put_heads_before_tokens,
    broadcast_keys_to_heads,
    broadcast_keys_to_tokens,
]
ACTIVATIONS = {"softmax": lambda s: s.softmax(-1), "relu": torch.relu}


class MultiQuery(nn.Module):
    """Queries of several heads, and keys and values that these share; a module may state the number of heads."""

    def __init__(self, form: Form, activation: str, is_stated: bool) -> None:
        super().__init__()
        self.form, self.weigh, self.q, self.kv = form, ACTIVATIONS[activation], nn.Linear(C, H * D), nn.Linear(C, 2 * D)
        self.weights = torch.empty(0)
        if is_stated:
            self.num_heads = H

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        k, v = self.kv(x if context is None else context).chunk(2, -1)
        weights, output = self.form(self, self.q(x).unflatten(-1, (H, D)), k, v)
        self.weights = weights.detach()
        return output.flatten(2)


@pytest.mark.parametrize("is_cross", [False, True])
@pytest.mark.parametrize("is_stated", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS, ids=lambda one: one.__name__)
def test_heads_that_share_keys_are_heads_in_every_layout(form, activation, batch, is_stated, is_cross):
    layer, x = MultiQuery(form, activation, is_stated).double(), torch.randn(batch, T, C, dtype=torch.float64)
    context = [torch.randn(batch, S, C, dtype=torch.float64)] if is_cross else []
    recording, _ = record_and_compare(layer, lambda m: m(x, *context))
    (call,) = recording.calls
    torch.testing.assert_close(call.map.dense(), layer.weights, rtol=0, atol=EQUAL)
    assert not recording.notes


@pytest.mark.parametrize("form", FORMS[:4], ids=lambda one: one.__name__)
def test_heads_of_a_single_token_are_heads(form):
    layer, context = MultiQuery(form, "softmax", is_stated=False).double(), torch.randn(2, S, C, dtype=torch.float64)
    recording, _ = record_and_compare(layer, lambda m: m(torch.randn(2, 1, C, dtype=torch.float64), context))
    torch.testing.assert_close(recording.calls[0].map.dense(), layer.weights, rtol=0, atol=EQUAL)


class Places(nn.Module):
    """Queries in two axes of places, and keys in one that fewer places make up."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.weights = nn.Linear(C, D), nn.Linear(C, 2 * D), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x.mean(1)).chunk(2, -1)
        weights = torch.einsum("bxyd,bkd->bxyk", self.q(x), k).softmax(-1)
        self.weights = weights.flatten(1, 2).unsqueeze(1).detach()
        return torch.einsum("bxyk,bkd->bxyd", weights, v)


@pytest.mark.parametrize("batch", [1, 2])
def test_two_axes_of_places_are_queries_and_no_heads(batch):
    layer = Places().double()
    recording, _ = record_and_compare(nn.Sequential(layer), lambda m: m(torch.randn(batch, 3, 5, C, dtype=torch.float64)))
    torch.testing.assert_close(recording.calls[0].map.dense(), layer.weights, rtol=0, atol=EQUAL)


Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def attend_in_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of places (b, h, x, y, d) by itself."""
    weights = (q @ k.mT).softmax(-1)
    return weights.transpose(1, 2).flatten(0, 1), weights @ v


def attend_in_columns(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.einsum("bhxyd,bhzyd->bhyxz", q, k).softmax(-1)
    return weights.transpose(1, 2).flatten(0, 1), torch.einsum("bhyxz,bhzyd->bhxyd", weights, v)


def attend_with_the_row_before(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (torch.cat([x.roll(1, 2), x], 3) for x in (k, v))
    return attend_in_rows(q, k, v)


def attend_to_windows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Each place of a row to the one before, itself and the next."""
    k, v = (nn.functional.pad(x, (0, 0, 1, 1)).unfold(3, 3, 1) for x in (k, v))
    weights = torch.einsum("bhxyd,bhxydn->bhxyn", q, k).softmax(-1)
    return weights.permute(0, 2, 3, 1, 4).flatten(0, 2).unsqueeze(2), torch.einsum("bhxyn,bhxydn->bhxyd", weights, v)


class OfPlaces(nn.Module):
    """Attention of places (b, x, y, c) by heads; no module states how many there are."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.qkv, self.weights = attend, nn.Linear(C, 3 * H * D), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (H, D)).permute(0, 3, 1, 2, 4) for one in self.qkv(x).chunk(3, -1))
        weights, output = self.attend(q, k, v)
        self.weights = weights.detach()
        return output.permute(0, 2, 3, 1, 4).flatten(3)


@pytest.mark.parametrize("places", [(3, 5), (5, 3), (2, 3)])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize(
    "attend",
    [attend_in_rows, attend_in_columns, attend_with_the_row_before, attend_to_windows],
    ids=lambda one: one.__name__,
)
def test_rows_of_places_are_no_heads(attend, batch, places):
    layer = OfPlaces(attend).double()
    recording, _ = record_and_compare(nn.Sequential(layer), lambda m: m(torch.randn(batch, *places, C, dtype=torch.float64)))
    torch.testing.assert_close(recording.calls[0].map.dense(), layer.weights, rtol=0, atol=EQUAL)


class GroupsBehindHeads(nn.Module):
    """Heads whose number is the outer part of the features, with keys shared by every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.weights = nn.Linear(C, 6 * D), nn.Linear(C, 2 * D), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x).unflatten(-1, (3, 2, D)), self.k(x).unflatten(-1, (2, D))
        weights = torch.einsum("bihgd,bjgd->bhgij", q, k).softmax(-1)
        self.weights = weights.transpose(1, 2).flatten(1, 2).detach()
        return torch.einsum("bhgij,bjgd->bihgd", weights, k).flatten(2)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_heads_that_share_keys_are_numbered_one_after_another(batch):
    layer = GroupsBehindHeads().double()
    recording, _ = record_and_compare(nn.Sequential(layer), lambda m: m(torch.randn(batch, T, C, dtype=torch.float64)))
    torch.testing.assert_close(recording.calls[0].map.dense(), layer.weights, rtol=0, atol=EQUAL)


class LatentAttention(nn.Module):
    """Queries of each head that absorb the projection of the keys, which are latent and shared. https://arxiv.org/abs/2405.04434"""

    def __init__(self, is_stated: bool) -> None:
        super().__init__()
        self.heads = [3]
        if is_stated:
            self.n_heads = 3
        self.query, self.latent, self.up = nn.Linear(24, 3 * 6), nn.Linear(24, 7 + 2), nn.Linear(7, 3 * (4 + 5), bias=False)
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        b, t, h = len(x), x.shape[1], self.heads[0]
        q, q_rope = self.query(x).view(b, t, h, 6).split([4, 2], -1)
        latent, k_rope = self.latent(x).split([7, 2], -1)
        up = self.up.weight.view(h, -1, 7)
        q = torch.einsum("bshd,hdc->bshc", q, up[:, :4])
        scores = torch.einsum("bshc,btc->bsht", q, latent) + torch.einsum("bshr,btr->bsht", q_rope, k_rope)
        scores = scores * 6**-0.5 + torch.full((t, t), -torch.inf).triu(1).unsqueeze(1).to(x.dtype)
        weights = scores.softmax(-1)
        self.weights = weights.detach().transpose(1, 2)
        return torch.einsum("bshc,hdc->bshd", torch.einsum("bsht,btc->bshc", weights, latent), up[:, -5:]).flatten(2)


@pytest.mark.parametrize("t", [1, 13])
@pytest.mark.parametrize("is_stated", [True, False])
def test_heads_that_stand_behind_queries_share_latent_keys(is_stated, t, in_float64):
    part = LatentAttention(is_stated)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(2, t, 24)))
    found = recording.map(0)
    assert found.shape == (2, 3, t, t)
    torch.testing.assert_close(found.dense(), part.weights, rtol=0, atol=EQUAL)
    assert found.planes.request.k.shape[1] == 1


class FoldedGroups(nn.Module):
    """Queries of the heads of each group that are folded with tokens, for products with the keys that the group shares."""

    def __init__(self, is_outer: bool) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.is_outer = 6, 2, is_outer
        self.query, self.key, self.value = nn.Linear(C, 6 * D), nn.Linear(C, 2 * D), nn.Linear(C, 2 * D)
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, D).transpose(1, 2) for layer in (self.query, self.key, self.value))
        q = q.unflatten(1, (2, 3)) if self.is_outer else q.unflatten(1, (2, 3)).transpose(2, 3)  # of heads, or of tokens
        weights = (q.flatten(2, 3) @ k.mT).view(*q.shape[:-1], t).softmax(-1)
        self.weights = (weights if self.is_outer else weights.transpose(2, 3)).flatten(1, 2).detach()
        return (weights.flatten(2, 3) @ v).flatten(1)


@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize("is_outer", [True, False])
def test_heads_of_groups_that_are_folded_with_tokens_are_heads(is_outer, t, in_float64):
    part = FoldedGroups(is_outer)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(2, t, C)))
    found = recording.map(0)
    assert found.shape == (2, 6, t, t)
    torch.testing.assert_close(found.dense(), part.weights, rtol=0, atol=EQUAL)
    assert found.planes.request.k.shape[1] == 2

"""Heads are told from batch rows and windows by what the running modules state."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare
from regard import KnockOut, intervene
from regard.observe.interception.handwritten.products.head_guesses import GUESSED

B, C, D, WINDOW = 2, 11, 3, 5
Attend = Callable[["Windowed", Tensor, Tensor, Tensor], Tensor]


class Windowed(nn.Module):
    """Attention in windows of 5 tokens of (b, t, c) or of (b, c, rows, columns), in the layout of a package."""

    def __init__(self, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend, self.knocked_out = heads, attend, slice(0)
        self.qkv, self.out = nn.Linear(7, 3 * heads * D), nn.Linear(heads * D, 7)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x if x.dim() == 3 else x.flatten(2).mT
        q, k, v = (one.unflatten(-1, (self.heads, D)).transpose(1, 2) for one in self.qkv(tokens).chunk(3, dim=-1))
        q, k, v = (one.unflatten(2, (-1, WINDOW)) for one in (q, k, v))  # (b, h, w, n, d)
        self.weights = (q @ k.mT).softmax(-1).transpose(1, 2).flatten(0, 1)
        y = self.out(self.attend(self, q, k, v).transpose(1, 2).flatten(1, 3).unflatten(1, (tokens.shape[1], -1)).flatten(2))
        return y if x.dim() == 3 else y.mT.unflatten(2, x.shape[2:])

    def weigh(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    def knock_out(self, context: Tensor) -> Tensor:
        """Set a head of a context (b, h, w, n, d) to 0, and move the heads behind the tokens."""
        context = context.clone()
        context[:, self.knocked_out] = 0
        return context.permute(0, 2, 1, 3, 4).transpose(2, 3)


def join_windows_before_heads(layer: Windowed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch, windows and heads in one axis, as TwinsSVT of vit-pytorch has them."""
    joined = layer.weigh(*(one.transpose(1, 2).flatten(0, 2) for one in (q, k, v)))
    return layer.knock_out(joined.unflatten(0, (B, -1, layer.heads)).transpose(1, 2))


def join_heads_with_batch(layer: Windowed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and heads in one axis and windows in another one, as local-attention has them."""
    joined = layer.weigh(*(one.flatten(0, 1) for one in (q, k, v)))
    return layer.knock_out(joined.unflatten(0, (B, layer.heads)))


def join_windows_with_batch(layer: Windowed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and windows in one axis and heads in another one, as SepViT of vit-pytorch has them."""
    joined = layer.weigh(*(one.transpose(1, 2).flatten(0, 1) for one in (q, k, v)))
    return layer.knock_out(joined.unflatten(0, (B, -1)).transpose(1, 2))


LAYOUTS: list[Attend] = [join_windows_before_heads, join_heads_with_batch, join_windows_with_batch]


@pytest.mark.parametrize("lead", [(B, 35, 7), (B, 7, 5, 7)], ids=["words", "pixels"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("attend", LAYOUTS)
def test_windows_are_batch_rows(attend, heads, lead):
    model = nn.Sequential(nn.Identity(), Windowed(heads, attend)).double()
    with torch.no_grad():
        recording, _ = record_and_compare(model, lambda m: m(torch.randn(lead).double()))
    assert recording.map(0).shape == (7 * B, heads, WINDOW, WINDOW)
    torch.testing.assert_close(recording.map(0).dense(), model[1].weights, rtol=0, atol=EQUAL)


@pytest.mark.parametrize("attend", LAYOUTS)
def test_a_head_is_knocked_out_in_every_window(attend):
    model, x = nn.Sequential(nn.Identity(), Windowed(3, attend)).double(), torch.randn(B, 35, 7).double()
    with torch.no_grad():
        with intervene(model, KnockOut(layer=0, head=1)):
            changed = model(x)
        model[1].knocked_out = slice(1, 2)
        torch.testing.assert_close(changed, model(x), rtol=0, atol=EQUAL)


def look_back(x: Tensor) -> Tensor:
    """Windows (n, w, i, d) of keys or values, each behind the one before it, padded with zeros."""
    padded = nn.functional.pad(x, (0, 0, 0, 0, 1, 0))
    return padded.unfold(1, 2, 1).movedim(-1, 2).flatten(2, 3)


def join_padded(x: Tensor) -> Tensor:
    padded = nn.functional.pad(x, (0, 0, 0, 0, 1, 0))
    return torch.cat([padded[:, :-1], padded[:, 1:]], 2)


def join_rolled(x: Tensor) -> Tensor:
    return torch.cat([x.roll(1, 1), x], 2)


def overlap(x: Tensor) -> Tensor:
    """Windows of one tensor that share memory."""
    n, w, i, d = x.shape
    padded = nn.functional.pad(x.flatten(1, 2), (0, 0, i, 0)).contiguous()
    return padded.as_strided((n, w, 2 * i, d), ((w + 1) * i * d, i * d, d, 1))


class WindowedArguments(nn.Module):
    """Attention of queries (b, h, t, d) or (n, t, d) that it is given, in windows that see the one before: local-attention."""

    def __init__(self, gather: Callable[[Tensor], Tensor] = look_back) -> None:
        super().__init__()
        self.gather, self.weights = gather, torch.empty(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t, short = q.shape[-2], -q.shape[-2] % WINDOW
        q, k, v = (nn.functional.pad(x.reshape(-1, *q.shape[-2:]), (0, 0, 0, short)) for x in (q, k, v))
        own, keys, values = (x.unflatten(1, (-1, WINDOW)) for x in (q, k, v))
        scores = torch.einsum("bhie,bhje->bhij", own, self.gather(keys))
        places = torch.arange(scores.shape[1])[:, None, None] * WINDOW + torch.arange(-WINDOW, WINDOW)
        self.weights = scores.masked_fill((places < 0) | (places >= t), -1e30).softmax(-1)
        return torch.einsum("bhij,bhje->bhie", self.weights, self.gather(values)).flatten(1, 2)


class WindowedProjections(nn.Module):
    """The same of queries, keys and values that a layer has projected to a number of heads, which no attribute states."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(C, 3 * count * D), WindowedArguments()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, D)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v)


@pytest.mark.parametrize(("windows", "short"), [(1, 0), (2, 0), (3, 0), (2, 2), (3, 2)])
@pytest.mark.parametrize(
    ("lead", "is_projected"),
    [((), False), *product([(2, 2), (2, 3), (3, 2), (1, 2), (1, 3), (2, 1), (2,), (3,)], [False, True])],
)
def test_windows_are_batch_rows_where_numbers_coincide(lead, windows, short, is_projected):
    b, heads, t = (*lead, 1, 1)[0], lead[1] if len(lead) == 2 else 1, windows * WINDOW - short
    model = nn.Sequential(WindowedProjections(heads) if is_projected else WindowedArguments()).double()
    shapes = [(b, t, C)] if is_projected else [(*lead, t, D)] * 3
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    with torch.no_grad():
        recording, _ = record_and_compare(model, lambda m: m[0](*given))
    part = model[0].attend if is_projected else model[0]
    expected = part.weights.unflatten(0, (b, heads)).transpose(1, 2).flatten(0, 1)
    assert recording.map(0).shape == expected.shape
    torch.testing.assert_close(recording.map(0).dense(), expected, rtol=0, atol=EQUAL)
    assert not recording.notes


@pytest.mark.parametrize("lead", [(2, 2), (3, 2), ()])
@pytest.mark.parametrize("gather", [join_padded, join_rolled, overlap])
def test_windows_are_batch_rows_however_keys_of_the_one_before_are_joined(gather, lead):
    part = WindowedArguments(gather)
    q, k, v = torch.randn(3, *lead, 2 * WINDOW, D, dtype=torch.float64)
    with torch.no_grad():
        recording, y = record_and_compare(nn.Sequential(part), lambda m: m[0](q, k, v), keep="values")
    expected = part.weights.unflatten(0, (*lead, 1, 1)[:2]).transpose(1, 2).flatten(0, 1)
    assert recording.map(0).shape == expected.shape
    torch.testing.assert_close(recording.map(0).dense(), expected, rtol=0, atol=EQUAL)
    context = (expected @ recording.values(0)).unflatten(0, (-1, 2)).transpose(1, 2).reshape(y.shape)
    torch.testing.assert_close(context, y, rtol=0, atol=EQUAL)


class SharedKeys(nn.Module):
    """Queries (b, t, c) of keys (e, s, c) that the batch shares, and values (b, e s, c) that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.norm, self.values = nn.Parameter(torch.randn(2, 7, C)), nn.LayerNorm(C), nn.Linear(C, C)
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("btc,esc->btes", x, self.norm(self.slots))
        values = self.values(torch.einsum("btes,btc->besc", scores.softmax(1), x)).flatten(1, 2)
        self.weights = scores.flatten(2).softmax(-1)
        return torch.einsum("bts,bsc->btc", self.weights, values)


def test_the_batch_that_values_have_and_keys_have_not_holds_no_queries():
    part = SharedKeys().double()
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, 5, C, dtype=torch.float64)))
    assert [call.map.shape for call in recording.calls] == [(B, 1, 14, 5), (B, 1, 5, 14)]
    torch.testing.assert_close(recording.calls[1].map.dense().squeeze(1), part.weights, rtol=0, atol=EQUAL)


class SharedByHeads(nn.Module):
    """One matrix of weights that multiplies the values of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        self.weights = (self.query(x) @ x.mT).softmax(-1)
        v = self.value(x).unflatten(-1, (3, 4)).transpose(1, 2)
        return (self.weights.unsqueeze(1) @ v).transpose(1, 2).flatten(2)


def test_weights_that_heads_share_keep_their_batch():
    part = SharedByHeads()
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, 7, 12)))
    torch.testing.assert_close(recording.map(0).dense()[:, 0], part.weights, rtol=0, atol=1e-6)


SHARED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "as they are": lambda weights, b: weights,
    "with a batch of 1": lambda weights, b: weights.unsqueeze(0),
    "expanded": lambda weights, b: weights.expand(b, -1, -1, -1),
    "repeated": lambda weights, b: weights.repeat(b, 1, 1, 1),
}


class Stacked(nn.Module):
    """Weights of each batch row that multiply several values of it, stacked before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        self.weights = (self.query(x) @ x.mT).softmax(-1)
        return (self.weights @ torch.stack([self.value(x), x])).sum(0)


def test_weights_of_tokens_keep_their_batch_where_values_are_stacked_before_it():
    part = Stacked().double()
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(3, 7, C, dtype=torch.float64)))
    found = recording.map(0).dense()
    assert found.shape == (3, 1, 7, 7)
    torch.testing.assert_close(found[:, 0], part.weights, rtol=0, atol=EQUAL)


class PickedKeys(nn.Module):
    """Heads in groups that share keys, of which each token picks three for itself, as in native sparse attention."""

    def __init__(self, groups: int, of: int, equation: str) -> None:
        super().__init__()
        self.num_heads, self.shape, self.equation = groups * of, (groups, of), equation
        self.q, self.k, self.picks = nn.Linear(C, groups * of * D), nn.Linear(C, groups * D), nn.Linear(C, groups * 3)
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        (b, t, _), (groups, of) = x.shape, self.shape
        q = self.q(x).view(b, t, groups, of, D).permute(0, 2, 3, 1, 4)
        k = self.k(x).view(b, t, groups, D).transpose(1, 2)
        places = (self.picks(x).sigmoid() * t).long().view(b, t, groups, 3).transpose(1, 2)
        k = k[:, :, None].expand(-1, -1, t, -1, -1).gather(3, places[..., None].expand(-1, -1, -1, -1, D))
        weights = torch.einsum(f"bhgid,bhijd->{self.equation}", q, k).softmax(-1)
        found = torch.einsum(f"{self.equation}->bihgj", weights).detach()
        self.weights = found.flatten(2, 3).flatten(0, 1).unsqueeze(2)
        return torch.einsum(f"{self.equation},bhijd->bihgd", weights, k).flatten(2)


@pytest.mark.parametrize("equation", ["bhgij", "bihgj", "bhigj"])
@pytest.mark.parametrize(("groups", "of"), [(2, 3), (1, 4), (3, 1), (2, 2)])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_groups_of_heads_whose_tokens_pick_keys_are_heads_and_tokens_are_rows(batch, groups, of, equation):
    part = PickedKeys(groups, of, equation).double()
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(batch, 5, C, dtype=torch.float64)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)


class ProjectedByHead(nn.Module):
    """Keys whose blocks a layer projects after they were split into heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.q, self.k, self.block = 4, nn.Linear(C, 4 * D), nn.Linear(C, 4 * D), nn.Linear(2 * D, D)
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (one(x).unflatten(-1, (4, D)).transpose(1, 2) for one in (self.q, self.k))
        k = self.block(k.unflatten(2, (-1, 2)).flatten(3))
        weights = torch.einsum("bhgid,bhjd->bhgij", q[:, :, None], k).softmax(-1)
        self.weights = weights.squeeze(2).detach()
        return torch.einsum("bhgij,bhjd->bihgd", weights, k).flatten(2)


@pytest.mark.parametrize("batch", [1, 2])
def test_keys_that_a_layer_projects_for_each_head_keep_their_heads(batch):
    part = ProjectedByHead().double()
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(batch, 6, C, dtype=torch.float64)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)


class Reversed(nn.Module):
    """Heads of queries, keys and values whose features a function reverses, behind which no layer is known."""

    def __init__(self, heads: int, **stated: int) -> None:
        super().__init__()
        self.qkv, self.count = nn.Linear(C, 3 * heads * D), (heads,)
        vars(self).update(stated)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (*self.count, D)).transpose(1, 2).flip(-1) for one in self.qkv(x).chunk(3, -1))
        self.weights = (q @ k.mT).softmax(-1)
        return (self.weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("heads", "stated", "is_guessed"),
    [(3, {}, False), (B, {}, True), (3, {"num_heads": 3}, False), (B, {"num_heads": B}, True), (1, {}, False)],
)
def test_a_note_says_where_heads_that_may_be_rows_of_the_batch_were_guessed(heads, stated, is_guessed):
    part = Reversed(heads, **stated).double()
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, 5, C, dtype=torch.float64)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)
    assert recording.notes == ([f"0: {GUESSED.format(heads)}"] if is_guessed else [])

"""Windows that are gathered by an index, cut, rolled or written: attention over them is recorded, with a row for each query."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RTDetrV2Config
from transformers.models.rt_detr_v2.modeling_rt_detr_v2 import RTDetrV2MultiscaleDeformableAttention

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, C, H, D, ROWS, COLUMNS, K, DILATION = 2, 6, 2, 3, 5, 7, 9, 2
T = ROWS * COLUMNS
SHIFTS = [(DILATION * i, DILATION * j) for i in (-1, 0, 1) for j in (-1, 0, 1)]


def find_neighbors() -> Tensor:
    """The places (t, k) of a dilated neighborhood, which moves inwards at the borders. https://arxiv.org/abs/2209.15001"""

    def find_along(size: int) -> Tensor:
        start = torch.arange(size) - DILATION
        start = torch.where(start < 0, start + DILATION, start)
        start = torch.where(start + 2 * DILATION >= size, start - DILATION, start).clamp(0, size - 1 - 2 * DILATION)
        return start[:, None] + DILATION * torch.arange(3)

    rows, columns = find_along(ROWS), find_along(COLUMNS)
    return (rows[:, None, :, None] * COLUMNS + columns[None, :, None, :]).reshape(T, K)


def pad(x: Tensor) -> Tensor:
    return F.pad(x, (DILATION,) * 4)


def cut(x: Tensor) -> list[Tensor]:
    """Padded copies (b, c, rows, columns), a place of the window each."""
    padded = pad(x)
    return [padded[..., DILATION + i : DILATION + i + ROWS, DILATION + j : DILATION + j + COLUMNS] for i, j in SHIFTS]


def write(x: Tensor) -> Tensor:
    windows = x.new_zeros(B, C, K, ROWS, COLUMNS)
    for n, one in enumerate(cut(x)):
        windows[:, :, n] = one
    return windows


def gather(x: Tensor) -> Tensor:
    index = find_neighbors().T.expand(B, C, K, T)
    return torch.gather(x.flatten(2).unsqueeze(2).expand(-1, -1, K, -1), 3, index)


def unfold(x: Tensor) -> Tensor:
    size = 2 * DILATION + 1
    return pad(x).unfold(2, size, 1).unfold(3, size, 1)[..., ::DILATION, ::DILATION].flatten(-2).movedim(-1, 2)


WINDOWS = {  # of x (b, c, rows, columns), as (b, c, k, ...)
    "an index": lambda x: x.flatten(2)[:, :, find_neighbors()].transpose(2, 3),
    "index_select": lambda x: x.flatten(2).index_select(2, find_neighbors().T.flatten()).view(B, C, K, T),
    "gather": gather,
    "take_along_dim": lambda x: torch.take_along_dim(x.flatten(2).unsqueeze(2), find_neighbors().T[None, None], 3),
    "F.unfold": lambda x: F.unfold(x, 3, DILATION, DILATION).view(B, C, K, T),
    "nn.Unfold": lambda x: UNFOLD(x).view(B, C, K, T),
    "Tensor.unfold": unfold,
    "rolls": lambda x: torch.stack([x.roll(shift, (2, 3)) for shift in SHIFTS], 2),
    "cuts": lambda x: torch.stack(cut(x), 2),
    "cuts in rows": lambda x: torch.stack([torch.stack(cut(x)[n : n + 3], 2) for n in (0, 3, 6)], 2).flatten(2, 3),
    "joined cuts": lambda x: torch.cat([one.unsqueeze(2) for one in cut(x)], 2),
    "written": write,
}
UNFOLD = nn.Unfold(3, DILATION, DILATION)


def multiply(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.einsum("bc...,bck...->bk...", q, k).softmax(1)
    return weights, torch.einsum("bk...,bck...->bc...", weights, v)


def add_up(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q.unsqueeze(2) * k).sum(1).softmax(1)
    return weights, (weights.unsqueeze(1) * v).sum(2)


def add_up_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.unflatten(1, (H, D)) for x in (q, k, v))
    weights = (q.unsqueeze(3) * k).sum(2).softmax(2)
    return weights, (weights.unsqueeze(2) * v).sum(3).flatten(1, 2)


def add_up_features(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.movedim(1, -1) for x in (q, k, v))
    weights = (q.unsqueeze(1) * k).sum(-1).softmax(1)
    return weights, (weights.unsqueeze(-1) * v).sum(1).movedim(-1, 1)


FORMS = {"einsum": multiply, "sums": add_up, "sums of heads": add_up_heads, "sums, features last": add_up_features}


class Neighborhood(nn.Module):
    """Attention of each pixel to those of its window."""

    def __init__(self, gather_windows, attend) -> None:
        super().__init__()
        self.gather_windows, self.attend = gather_windows, attend
        self.query, self.key, self.value = (nn.Conv2d(C, C, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.gather_windows(self.key(x)), self.gather_windows(self.value(x))
        q = self.query(x).view(B, C, *k.shape[3:])
        weights, context = self.attend(q, k, v)
        self.weights = weights.detach()
        return context.reshape(x.shape)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("is_inference", [False, True], ids=["", "inference"])
def test_attention_over_gathered_windows_has_a_row_for_each_query(windows, form, is_inference):
    part = Neighborhood(WINDOWS[windows], FORMS[form])
    x = torch.randn(B, C, ROWS, COLUMNS)
    with torch.inference_mode(is_inference):
        recording, y = record_and_compare(nn.Sequential(part), lambda model: model(x), keep="values")
        (call,) = recording.calls
        assert call.kind == "self"
        rows, values = call.map.dense(), recording.values(0)
    heads = H if form == "sums of heads" else 1
    weights = part.weights.reshape(B, heads, K, T).transpose(2, 3)
    assert rows.shape[2:] == (1, K)
    torch.testing.assert_close(rows.flatten(0, 2).sort(0).values, weights.flatten(0, 2).sort(0).values, rtol=0, atol=EQUAL)
    context, expected = (rows @ values).flatten().sort().values, y.flatten().sort().values
    torch.testing.assert_close(context, expected, rtol=0, atol=EQUAL)


class Attend(nn.Module):
    """Attention to windows that the module around it gathered."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return add_up(q, k, v.contiguous())


@pytest.mark.parametrize("windows", ["gather", "nn.Unfold", "rolls", "cuts"])
def test_windows_that_another_module_gathered_are_recorded(windows):
    part = Neighborhood(WINDOWS[windows], Attend())
    recording, _ = record_and_compare(nn.Sequential(part), lambda model: model(torch.randn(B, C, ROWS, COLUMNS)))
    (call,) = recording.calls
    assert (call.name, call.kind) == ("0.attend", "self")
    found, expected = (x.reshape(B, K, T).sort(2).values for x in (call.map.dense().view(B, T, K).mT, part.weights))
    torch.testing.assert_close(found, expected, rtol=0, atol=EQUAL)


def loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.stack([(q * one).sum(1) for one in cut(k)], 1).softmax(1)
    return sum(weights[:, n, None] * one for n, one in enumerate(cut(v)))


class DynamicConvolution(nn.Module):
    """A row of weights for each token and head, of the tokens before it. https://arxiv.org/abs/1901.10430"""

    TOKENS, PLACES, STEP = 11, 3, 2

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.num_heads = style, H
        self.weigh, self.value = nn.Linear(C, H * self.PLACES), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        weights, v = self.weigh(x).unflatten(-1, (H, -1)).softmax(-1), self.value(x)
        self.weights = weights.detach()
        width = self.STEP * (self.PLACES - 1)
        padded = F.pad(v, (0, 0, width, 0))
        index = torch.arange(self.TOKENS)[:, None] + self.STEP * torch.arange(self.PLACES)
        if self.style == "an index":
            windows = padded[:, index]
        elif self.style == "gather":
            windows = padded.gather(1, index.view(1, -1, 1).expand(B, -1, C)).unflatten(1, index.shape)
        elif self.style == "cuts":
            windows = torch.stack([padded[:, n : n + self.TOKENS] for n in range(0, width + 1, self.STEP)], 2)
        else:
            windows = padded.unfold(1, width + 1, 1)[..., :: self.STEP].transpose(2, 3)
        windows = windows.unflatten(-1, (H, D))  # (b, t, k, h, d)
        if self.style == "an index":
            return torch.einsum("bthk,btkhd->bthd", weights, windows).flatten(2)
        return (weights.transpose(2, 3).unsqueeze(-1) * windows).sum(2).flatten(2)


@pytest.mark.parametrize("style", ["an index", "gather", "cuts", "unfold"])
def test_a_dilated_dynamic_convolution_has_a_row_for_each_token(style):
    part = DynamicConvolution(style)
    recording, _ = record_and_compare(nn.Sequential(part), lambda model: model(torch.randn(B, part.TOKENS, C)))
    (call,) = recording.calls
    found = call.map.dense()
    assert call.kind == "cross"
    assert found.shape == (B * part.TOKENS, H, 1, part.PLACES)
    torch.testing.assert_close(found.squeeze(2), part.weights.flatten(0, 1), rtol=0, atol=EQUAL)


@pytest.mark.parametrize("is_inference", [False, True], ids=["", "inference"])
def test_deformable_attention_has_the_weights_of_the_pixels_that_it_picks(is_inference):
    """As RT-DETRv2 does with decoder_method="discrete"."""
    config = RTDetrV2Config(
        d_model=8, decoder_attention_heads=H, decoder_n_levels=2, decoder_n_points=3, decoder_method="discrete"
    )
    part, queries = RTDetrV2MultiscaleDeformableAttention(config), 5
    shapes = [(4, 6), (2, 3)]
    with torch.no_grad():
        for one in part.parameters():
            one.normal_()
    given = {
        "hidden_states": torch.randn(B, queries, 8),
        "encoder_hidden_states": torch.randn(B, 30, 8),
        "reference_points": torch.rand(B, queries, 1, 4),
        "spatial_shapes": torch.tensor(shapes),
        "spatial_shapes_list": shapes,
    }
    with torch.inference_mode(is_inference):
        recording, (_, weights) = record_and_compare(nn.ModuleList([part]), lambda model: model[0](**given))
        (call,) = recording.calls
        found = call.map.dense()
    assert call.kind == "cross"
    assert found.shape == (B * queries, H, 1, 6)
    expected = part.attention_weights(given["hidden_states"]).view(B * queries, H, 1, 6).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=EQUAL)
    assert torch.equal(weights.flatten(), expected.flatten())


class Gate(nn.Module):
    """Softmaxes over other things than the places of a window: x (b, t, c) with weights of C entries for each token."""

    def __init__(self, mix) -> None:
        super().__init__()
        self.mix, self.weigh, self.value = mix, nn.Linear(C, C), nn.Linear(C, C)
        self.table, self.kernel = nn.Parameter(torch.randn(T, C)), nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self, x, self.weigh(x).softmax(-1), self.value(x))


def shift(v: Tensor, dim: int = 1) -> list[Tensor]:
    return [v.roll(n, dim) for n in range(C)]


def route(self, x, w, v):
    """The chosen two of all experts, picked by two indices."""
    made = torch.stack([F.linear(v, self.table[n : n + C].mT) for n in range(C)], 2).flatten(0, 1)
    gates, chosen = w.flatten(0, 1).topk(2)
    return (gates.unsqueeze(-1) * made[torch.arange(len(made))[:, None], chosen]).sum(1)


def unsort(self, x, w, v):
    """Experts see the tokens in the order of the experts, and the results are put back."""
    gates, chosen = w.flatten(0, 1).topk(2)
    order = chosen.flatten().argsort()
    made = F.linear(v.flatten(0, 1)[order // 2], self.table[:C])[order.argsort()]
    return (gates.unsqueeze(-1) * made.unflatten(0, (-1, 2))).sum(1)


def quantize(self, x, w, v):
    """Codes of a table, of which each token picks several."""
    chosen = (v @ self.table.mT).topk(C).indices
    return (w.unsqueeze(-1) * self.table[chosen]).sum(2)


def restore_order(self, x, w, v):
    """Tokens that were shuffled are put back, and the groups of their features are gated."""
    order = x[..., 0].argsort(1)
    return (w.unsqueeze(-1) * v[torch.arange(B)[:, None], order].unflatten(-1, (C, 1))).sum(2)


def draw(self, x, w, v):
    drawn = torch.multinomial(w.flatten(0, 1), 2)
    return F.embedding(drawn, self.table) * w.flatten(0, 1).gather(1, drawn).unsqueeze(-1)


def contrast(self, x, w, v):
    """A loss of each token with itself and some others."""
    others = (torch.arange(T)[:, None] + torch.arange(C)) % T
    return -(x.unsqueeze(2) * v[:, others]).sum(-1).log_softmax(-1)[..., 0].mean()


def swap(self, x, w, v):
    """Tensors that are written into each other."""
    one, other = v.clone(), x.clone()
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    return (w.unsqueeze(-1) * one.unsqueeze(2).expand(-1, -1, C, -1)).sum(2)


def gate_groups(self, x, w, v):
    """Tokens that were repeated by an index, with gates of groups of their features."""
    repeats = torch.arange(3 * T) // 3
    return (self.weigh(x)[:, repeats, :H].softmax(-1).unsqueeze(-1) * v[:, repeats].unflatten(-1, (H, D))).sum(2)


GATES = {
    "a router": route,
    "a router that sorts": unsort,
    "a codebook": quantize,
    "tokens put back": restore_order,
    "a sampler": draw,
    "tensors that change places": swap,
    "repeated tokens": gate_groups,
    "a loss": contrast,
    "chunks of features": lambda self, x, w, v: (w.unsqueeze(-1) * torch.stack(v.chunk(C, -1), 2)).sum(2),
    "copies": lambda self, x, w, v: (w.unsqueeze(-1) * torch.stack([v] * C, 2)).sum(2),
    "a token and its predecessor": lambda self, x, w, v: (
        w[..., :2].softmax(-1).unsqueeze(-1) * torch.stack([v, v.roll(1, 1)], 2)
    ).sum(2),
    "a loop over two": lambda self, x, w, v: w[..., :1] * v + w[..., 1:2] * v.roll(1, 1),
    "layers": lambda self, x, w, v: (w.unsqueeze(-1) * torch.stack([self.value(v * n) for n in range(C)], 2)).sum(2),
    "a loop over layers": lambda self, x, w, v: sum(w[..., n, None] * self.value(v * n) for n in range(C)),
    "rolled features": lambda self, x, w, v: (w.unsqueeze(-2) * torch.stack(shift(v, -1), -1)).sum(-1),
    "a loop over rolled features": lambda self, x, w, v: sum(w[..., n, None] * one for n, one in enumerate(shift(v, -1))),
    "cut features": lambda self, x, w, v: (
        w.unsqueeze(-2) * torch.stack([F.pad(v, (0, C))[..., n : n + C] for n in range(C)], -1)
    ).sum(-1),
    "picked features": lambda self, x, w, v: (w.unsqueeze(-2) * v[..., (torch.arange(C)[:, None] + torch.arange(C)) % C]).sum(
        -1
    ),
    "a filter": lambda self, x, w, v: (self.kernel.softmax(0)[:, None] * torch.stack(shift(v), 2)).sum(2),
    "a loop of a filter": lambda self, x, w, v: sum(self.kernel.softmax(0)[n] * one for n, one in enumerate(shift(v))),
    "a filter for each sample": lambda self, x, w, v: (
        self.weigh(x.mean(1)).softmax(-1)[:, None, :, None] * torch.stack(shift(v), 2)
    ).sum(2),
    "a loop of a filter for each sample": lambda self, x, w, v: sum(
        self.weigh(x.mean(1)).softmax(-1)[:, n, None, None] * one for n, one in enumerate(shift(v))
    ),
    "a correlation volume": lambda self, x, w, v: F.conv1d(
        torch.stack([(x * one).mean(-1) for one in shift(v)], 1), self.table[:C, :, None]
    ),
    "a shift": lambda self, x, w, v: torch.cat([one.roll(n, 1) for n, one in enumerate(v.chunk(C, -1))], -1) * w,
    "pooling": lambda self, x, w, v: torch.stack(shift(v), 2).amax(2) * w + F.avg_pool1d(v.mT, 3, 1, 1).mT,
    "an embedding": lambda self, x, w, v: (w.unsqueeze(-1) * self.table[torch.arange(T)[:, None] % C + torch.arange(C)]).sum(2),
}


class GroupGate(nn.Module):
    """Gates of groups of the features of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(C, H)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weigh(x).softmax(-1).unsqueeze(-1) * x.unflatten(-1, (H, D))).sum(-2)


class Picked(nn.Module):
    """A module of tokens of which each was picked twice."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x[:, torch.arange(2 * T) // 2])


def test_gates_of_tokens_that_another_module_picked_are_neither_recorded_nor_missed():
    model = nn.Sequential(Picked(GroupGate()))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls


@pytest.mark.parametrize("is_inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", GATES)
def test_what_gathers_no_windows_is_neither_recorded_nor_missed(name, is_inference):
    model = nn.Sequential(Gate(GATES[name]))
    with torch.inference_mode(is_inference):
        recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls

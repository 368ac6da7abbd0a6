"""Heads are told from tokens, windows and rows of the batch wherever they stand, by what projected them if none is stated."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from default_dtype import use_default_dtype
from observe.recording_checks import EQUAL, record_and_compare
from regard import KnockOut, Recording, intervene
from regard.observe.interception.handwritten.products.head_guesses import GUESSED

B, H, T, S, C, D = 2, 3, 5, 6, 11, 4
Attend = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True, scope="module")
def in_float64():
    with use_default_dtype(torch.float64):
        yield


class Layer(nn.Module):
    """Projections to widths, and a function of them and the inputs that returns the weights (b, h, q, k) and the output."""

    def __init__(self, attend: Attend, *widths: int, **stated: int) -> None:
        super().__init__()
        self.attend, self.project = attend, nn.ModuleList(nn.Linear(C, width) for width in widths)
        vars(self).update(stated)

    def forward(self, *inputs: Tensor) -> Tensor:
        weights, output = self.attend(self.project, *inputs)
        self.weights = weights.detach()
        return output


def check_heads(layer: nn.Module, *inputs: Tensor, **options: str) -> Recording:
    """The recording of a layer, whose map is the weights that the layer keeps."""
    with torch.no_grad():
        recording, _ = record_and_compare(nn.Sequential(layer), lambda m: m[0](*inputs), **options)
    torch.testing.assert_close(recording.calls[-1].map.dense(), layer.weights, rtol=0, atol=EQUAL)
    return recording


# Keys and values (b, s, d) that all heads of queries (b, t, h, d) share.


def fold_heads_behind_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q.flatten(1, 2) @ k.mT + mask.repeat_interleave(H, 0)).softmax(-1)
    return weights.unflatten(1, (-1, H)).transpose(1, 2), (weights @ v).unflatten(1, (-1, H))


def fold_heads_before_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q.transpose(1, 2).flatten(1, 2) @ k.mT + mask.repeat(H, 1)).softmax(-1)
    return weights.unflatten(1, (H, -1)), (weights @ v).unflatten(1, (H, -1)).transpose(1, 2)


def view_folded_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = ((q.flatten(1, 2) @ k.mT).unflatten(1, (-1, H)) + mask[:, None]).softmax(-1)
    return weights.transpose(1, 2), (weights.flatten(1, 2) @ v).unflatten(1, (-1, H))


def keep_heads_behind_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (torch.einsum("bihd,bjd->bihj", q, k) + mask[:, None]).softmax(-1)
    return weights.transpose(1, 2), torch.einsum("bihj,bjd->bihd", weights, v)


def put_heads_before_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (torch.einsum("bihd,bjd->bhij", q, k) + mask).softmax(-1)
    return weights, torch.einsum("bhij,bjd->bihd", weights, v)


def broadcast_keys_to_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q.transpose(1, 2) @ k.mT[:, None] + mask).softmax(-1)
    return weights, (weights @ v[:, None]).transpose(1, 2)


def broadcast_keys_to_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT[:, None] + mask[:, None]).softmax(-1)
    return weights.transpose(1, 2), weights @ v[:, None]


SHARED = [
    *(fold_heads_behind_tokens, fold_heads_before_tokens, view_folded_scores, keep_heads_behind_tokens),
    *(put_heads_before_tokens, broadcast_keys_to_heads, broadcast_keys_to_tokens),
]


def attend_to_shared(attend: Attend) -> Attend:
    def run(project: nn.ModuleList, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        k, v = project[1](x if context is None else context).chunk(2, -1)
        weights, output = attend(project[0](x).unflatten(-1, (H, D)), k, v, torch.zeros(x.shape[1], k.shape[1]))
        return weights, output.flatten(2)

    return run


@pytest.mark.parametrize(
    ("batch", "stated", "is_cross"), [(1, {}, False), (1, {"num_heads": H}, True), (2, {}, True), (2, {"h": H}, False)]
)
@pytest.mark.parametrize("attend", SHARED, ids=lambda one: one.__name__)
def test_heads_that_share_keys_are_heads_in_every_layout(attend, batch, stated, is_cross):
    context = [torch.randn(batch, S, C)] if is_cross else []
    recording = check_heads(Layer(attend_to_shared(attend), H * D, 2 * D, **stated), torch.randn(batch, T, C), *context)
    assert not recording.notes


@pytest.mark.parametrize("attend", SHARED[:5], ids=lambda one: one.__name__)
def test_heads_of_a_single_token_are_heads(attend):
    check_heads(Layer(attend_to_shared(attend), H * D, 2 * D), torch.randn(2, 1, C), torch.randn(2, S, C))


class Latent(nn.Module):
    """Latent attention whose queries absorb the projection of the keys. https://arxiv.org/abs/2405.04434"""

    LATENT, ROPE, VALUE = 7, 2, 5

    def __init__(self, attend: Attend, is_einsum: bool) -> None:
        super().__init__()
        self.attend, self.is_einsum, self.query = attend, is_einsum, nn.Linear(C, H * (D + self.ROPE))
        self.latent, self.up = nn.Linear(C, self.LATENT + self.ROPE), nn.Linear(self.LATENT, H * (D + self.VALUE))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, q_rope = self.query(x).view(b, t, H, D + self.ROPE).split([D, self.ROPE], -1)
        keys, up = self.latent(x), self.up.weight.view(H, D + self.VALUE, self.LATENT)
        absorbed = torch.bmm(q.flatten(0, 1).transpose(0, 1), up[:, :D]).transpose(0, 1).reshape(b, t, H, -1)
        q = torch.cat([torch.einsum("bshd,hdc->bshc", q, up[:, :D]) if self.is_einsum else absorbed, q_rope], -1)
        weights, context = self.attend(q, keys, keys[..., : self.LATENT], torch.full((t, t), -torch.inf).triu(1))
        self.weights = weights.detach()
        return torch.einsum("bshc,hdc->bshd", context, up[:, D:]).flatten(2)


@pytest.mark.parametrize(("b", "t", "is_einsum"), [(1, 5, True), (2, 5, False), (3, 5, True), (2, 1, True), (3, 3, False)])
@pytest.mark.parametrize("attend", SHARED[:5], ids=lambda one: one.__name__)
def test_heads_that_share_latent_keys_are_known_by_the_layer_that_projected_their_queries(attend, b, t, is_einsum):
    recording = check_heads(Latent(attend, is_einsum), torch.randn(b, t, C))
    assert recording.map(0).planes.request.k.shape[1] == 1


# Heads of groups that share keys.


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


class Grouped(nn.Module):
    """Heads of groups that share keys, folded with tokens into one axis; queries and keys are rotated."""

    def __init__(
        self, groups: int, rotate: Callable[[Tensor, Tensor], Tensor], linear: type[nn.Module], is_outer: bool
    ) -> None:
        super().__init__()
        self.shape, self.rotate, self.is_outer = (groups, H, D), rotate, is_outer
        self.query, self.key, self.value = (linear(C, groups * n * D) for n in (H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        angles = (torch.arange(t)[:, None] * torch.tensor([1.0, 0.3]))[:, None]
        q, k = (self.rotate(part(x).view(b, t, -1, D), angles) for part in (self.query, self.key))
        q, k, v = q.unflatten(2, self.shape[:2]), k.transpose(1, 2), self.value(x).view(b, t, -1, D).transpose(1, 2)
        q = q.permute(0, 2, 3, 1, 4) if self.is_outer else q.transpose(1, 2)
        weights = (q.flatten(2, 3) @ k.mT).softmax(-1)
        unfolded = weights.view(*q.shape[:-1], t).detach()
        self.weights = (unfolded if self.is_outer else unfolded.transpose(2, 3)).flatten(1, 2)
        return (weights @ v).flatten(1)


@given(
    st.sampled_from([rotate_halves, rotate_parts, rotate_pairs, rotate_numbers]),
    st.sampled_from([nn.Linear, OwnLinear]),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from([(2, 5), (1, 5), (2, 1), (2, 2), (3, 3), (6, 1)]),
)
def test_heads_of_groups_that_are_folded_with_tokens_are_known_by_their_layer(rotate, linear, is_outer, groups, sizes):
    recording = check_heads(Grouped(groups, rotate, linear, is_outer), torch.randn(*sizes, C))
    assert recording.map(0).planes.request.k.shape[1] == groups


class WithCache(nn.Module):
    """Heads of groups that share keys, in any order of axes, with a cache of keys and values."""

    def __init__(self, groups: int, order: str, states: bool) -> None:
        super().__init__()
        self.shape, self.order, self.held = (groups, H, D), order, None
        self.query, self.key, self.value = (nn.Linear(C, groups * n * D) for n in (H, 1, 1))
        if states:
            self.num_heads, self.num_kv_heads = groups * H, groups

    def forward(self, x: Tensor, held: tuple[Tensor, Tensor] | None = None) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part(x).view(b, t, -1, D) for part in (self.query, self.key, self.value))
        if held is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(held, (k, v), strict=True))
        self.held = k, v
        q = q.unflatten(2, self.shape[:2])
        self.weights = torch.einsum("btgrd,bsgd->bgrts", q, k).softmax(-1).flatten(1, 2).detach()
        q = q.permute(*("btgr".index(letter) for letter in self.order), 4)
        of_keys = self.order.replace("r", "").replace("t", "s")
        k, v = (part.permute(*("bsg".index(letter) for letter in of_keys), 3) for part in (k, v))
        weights = torch.einsum(f"{self.order}d,{of_keys}d->{self.order}s", q, k).softmax(-1)
        return torch.einsum(f"{self.order}s,{of_keys}d->btgrd", weights, v).flatten(2)


@given(st.permutations("bgrt").map("".join), st.integers(1, 3), st.booleans(), st.sampled_from([1, 2, 3, 6]))
def test_the_heads_of_a_decoding_step_are_those_of_its_layer_in_every_order_of_axes(order, groups, states, b):
    part = WithCache(groups, order, states)
    part(torch.randn(b, 5, C))
    check_heads(part, torch.randn(b, 1, C), part.held)


class PickedKeys(nn.Module):
    """Heads in groups that share keys, of which each token picks three for itself, as in native sparse attention."""

    def __init__(self, groups: int, of: int, equation: str) -> None:
        super().__init__()
        self.num_heads, self.shape, self.equation = groups * of, (groups, of), equation
        self.q, self.k, self.picks = nn.Linear(C, groups * of * D), nn.Linear(C, groups * D), nn.Linear(C, groups * 3)

    def forward(self, x: Tensor) -> Tensor:
        (b, t, _), (groups, of) = x.shape, self.shape
        q = self.q(x).view(b, t, groups, of, D).permute(0, 2, 3, 1, 4)
        k = self.k(x).view(b, t, groups, D).transpose(1, 2)
        places = (self.picks(x).sigmoid() * t).long().view(b, t, groups, 3).transpose(1, 2)
        k = k[:, :, None].expand(-1, -1, t, -1, -1).gather(3, places[..., None].expand(-1, -1, -1, -1, D))
        weights = torch.einsum(f"bhgid,bhijd->{self.equation}", q, k).softmax(-1)
        self.weights = torch.einsum(f"{self.equation}->bihgj", weights).detach().flatten(2, 3).flatten(0, 1).unsqueeze(2)
        return torch.einsum(f"{self.equation},bhijd->bihgd", weights, k).flatten(2)


@pytest.mark.parametrize("equation", ["bhgij", "bihgj", "bhigj"])
@pytest.mark.parametrize(("batch", "groups", "of"), [(1, 2, 3), (2, 1, 4), (3, 3, 1), (2, 2, 2)])
def test_groups_of_heads_whose_tokens_pick_keys_are_heads_and_tokens_are_rows(batch, groups, of, equation):
    check_heads(PickedKeys(groups, of, equation), torch.randn(batch, 5, C))


# Other layouts: the weights and the output of projections of x (b, t, c).


def share_with_groups_first(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k = project[0](x).unflatten(-1, (2, 2, D)).permute(0, 3, 2, 1, 4), project[1](x).unflatten(-1, (2, D)).transpose(1, 2)
    weights = torch.einsum("bghqd,bhkd->bghqk", q, k).softmax(-1)
    return weights.transpose(1, 2).flatten(1, 2), torch.einsum("bghqk,bhkd->bqhgd", weights, k).flatten(2)


def share_behind_heads(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k = project[0](x).unflatten(-1, (2, 2, D)), project[1](x).unflatten(-1, (2, D))
    weights = torch.einsum("bihgd,bjgd->bhgij", q, k).softmax(-1)
    return weights.transpose(1, 2).flatten(1, 2), torch.einsum("bhgij,bjgd->bihgd", weights, k).flatten(2)


def broadcast_groups(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
    q = project[0](x).unflatten(-1, (2, 2, D)).permute(0, 2, 3, 1, 4)
    k = project[1](x).unflatten(-1, (2, D)).transpose(1, 2)[:, :, None]
    weights = (q @ k.mT).softmax(-1)
    return weights.flatten(1, 2), (weights @ k).flatten(1, 2).transpose(1, 2).flatten(2)


def project_keys_of_heads(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of keys, which a layer projects after they were split into heads."""
    q, k = (project[n](x).unflatten(-1, (4, D)).transpose(1, 2) for n in (0, 2))
    k = project[3](F.pad(k[:, :, : T // 2 * 2].unflatten(2, (-1, 2)).flatten(3), (0, C - 2 * D)))
    weights = torch.einsum("bhgid,bhjd->bhgij", q[:, :, None], k).softmax(-1)
    return weights.squeeze(2), torch.einsum("bhgij,bhjd->bihgd", weights, k).flatten(2)


def attend_on_a_plane(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys in two axes of places each."""
    q, k = (project[n](x).unflatten(1, (1, T)).unflatten(-1, (4, D)).permute(0, 3, 1, 2, 4) for n in (0, 2))
    weights = torch.einsum("bhxyd,bhijd->bhxyij", q, k).flatten(-2).softmax(-1)
    return weights.flatten(2, 3), torch.einsum("bhxyij,bhijd->bhxyd", weights.unflatten(-1, (1, T)), k).flatten(1)


def pass_folded_queries(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (b, t h, d) of some of the last tokens, of which a module computes the attention."""
    q, k = project[0](x)[:, -2:].unflatten(-1, (4, D)), project[4](x)
    return (q.transpose(1, 2) @ k.mT[:, None]).softmax(-1), INNER(q.flatten(1, 2), k, k)


def share_weights(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
    """One matrix of weights that multiplies the values of all heads."""
    weights = (project[4](x) @ project[4](x).mT).softmax(-1).unsqueeze(1)
    return weights, (weights @ project[0](x).unflatten(-1, (4, D)).transpose(1, 2)).transpose(1, 2).flatten(2)


def stack_values(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
    """Several values of each batch row, stacked before the batch."""
    weights = (project[4](x) @ project[4](x).mT).softmax(-1)
    return weights.unsqueeze(1), (weights @ torch.stack([project[0](x), project[2](x)])).sum(0)


class Inner(nn.Module):
    """The product of queries, keys and values that another module has arranged."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


INNER = Inner()
OTHERS = [
    *(share_with_groups_first, share_behind_heads, broadcast_groups, project_keys_of_heads, attend_on_a_plane),
    *(pass_folded_queries, share_weights, stack_values),
]


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("attend", OTHERS, ids=lambda one: one.__name__)
def test_heads_are_heads_and_no_batch_in_other_layouts(attend, batch):
    layer = Layer(attend, 4 * D, 2 * D, 4 * D, D, D)
    layer.inner = INNER
    check_heads(layer, torch.randn(batch, T, C))


@pytest.mark.parametrize(("rows", "heads"), [(2, 3), (3, 2), (4, 2)])
def test_heads_before_the_batch_are_heads_where_the_input_tells_their_sizes_apart(rows, heads):
    def attend(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (part(x).unflatten(-1, (heads, D)).permute(2, 0, 1, 3) for part in project)
        weights = (q @ k.mT).softmax(-1)
        return weights.transpose(0, 1), (weights @ k).permute(1, 2, 0, 3).flatten(2)

    check_heads(Layer(attend, heads * D, heads * D), torch.randn(rows, T, C))


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (4, 7), (5, 4)])
def test_as_many_queries_as_heads_of_a_bmm_are_no_batch(queries, keys):
    def attend(project: nn.ModuleList, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (tokens[..., :8].reshape(tokens.shape[1], 4, 2).transpose(0, 1) for tokens in (x, y))  # (heads, t, d), one row
        weights = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
        return weights.unsqueeze(0), torch.bmm(weights, k).transpose(0, 1).reshape(1, queries, 8)

    check_heads(Layer(attend), torch.randn(1, queries, C), torch.randn(1, keys, C))


def test_heads_of_an_input_with_an_axis_of_heads_are_no_batch():
    class HeadInputs(nn.Module):
        """A layer of tokens (b, t, h, c), each head of which is projected and shifted for itself."""

        def __init__(self) -> None:
            super().__init__()
            self.matrices = nn.ParameterList(nn.Parameter(torch.randn(H, C, D)) for _ in range(3))
            self.biases = nn.ParameterList(nn.Parameter(torch.randn(H, D)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            parts = zip(self.matrices, self.biases, strict=True)
            q, k, v = (torch.einsum("bthc,hcd->bthd", x, matrix) + bias for matrix, bias in parts)
            self.weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
            return torch.einsum("bhqk,bkhd->bqhd", self.weights, v).flatten(2)

    check_heads(HeadInputs(), torch.randn(2, 5, H, C))


def test_the_batch_that_values_have_and_keys_have_not_holds_no_queries():
    slots = nn.Parameter(torch.randn(2, 7, C))

    def attend(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.einsum("btc,esc->btes", x, layer.norm(slots))
        values = project[0](torch.einsum("btes,btc->besc", s.softmax(1), x)).flatten(1, 2)
        weights = s.flatten(2).softmax(-1)
        return weights.unsqueeze(1), torch.einsum("bts,bsc->btc", weights, values)

    layer = Layer(attend, C)
    layer.slots, layer.norm = slots, nn.LayerNorm(C)
    recording = check_heads(layer, torch.randn(B, T, C))
    assert [call.map.shape for call in recording.calls] == [(B, 1, 14, T), (B, 1, T, 14)]


@pytest.mark.parametrize("batch", [1, 2])
def test_two_axes_of_places_are_queries_and_no_heads(batch):
    def attend(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = project[1](x.mean(1)).chunk(2, -1)
        weights = torch.einsum("bxyd,bkd->bxyk", project[0](x), k).softmax(-1)
        return weights.flatten(1, 2).unsqueeze(1), torch.einsum("bxyk,bkd->bxyd", weights, v)

    check_heads(Layer(attend, D, 2 * D), torch.randn(batch, 3, 5, C))


def attend_in_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of places (b, h, x, y, d) by itself."""
    weights = (q @ k.mT).softmax(-1)
    return weights.transpose(1, 2).flatten(0, 1), weights @ v


def attend_in_columns(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.einsum("bhxyd,bhzyd->bhyxz", q, k).softmax(-1)
    return weights.transpose(1, 2).flatten(0, 1), torch.einsum("bhyxz,bhzyd->bhxyd", weights, v)


def attend_with_the_row_before(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return attend_in_rows(q, *(torch.cat([x.roll(1, 2), x], 3) for x in (k, v)))


def attend_to_windows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Each place of a row to the one before, itself and the next."""
    k, v = (F.pad(x, (0, 0, 1, 1)).unfold(3, 3, 1) for x in (k, v))
    weights = torch.einsum("bhxyd,bhxydn->bhxyn", q, k).softmax(-1)
    return weights.permute(0, 2, 3, 1, 4).flatten(0, 2).unsqueeze(2), torch.einsum("bhxyn,bhxydn->bhxyd", weights, v)


@pytest.mark.parametrize("sizes", [(1, 3, 5), (2, 5, 3), (3, 2, 3)])
@pytest.mark.parametrize("form", [attend_in_rows, attend_in_columns, attend_with_the_row_before, attend_to_windows])
def test_rows_of_places_are_no_heads(form, sizes):
    def attend(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, y = form(*(part(x).unflatten(-1, (H, D)).permute(0, 3, 1, 2, 4) for part in project))
        return weights, y.permute(0, 2, 3, 1, 4).flatten(3)

    check_heads(Layer(attend, *[H * D] * 3), torch.randn(*sizes, C))


@pytest.mark.parametrize(
    ("heads", "stated", "is_guessed"),
    [(3, {}, False), (B, {}, True), (3, {"num_heads": 3}, False), (B, {"num_heads": B}, True), (1, {}, False)],
)
def test_a_note_says_where_heads_that_may_be_rows_of_the_batch_were_guessed(heads, stated, is_guessed):
    def attend(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
        """A function reverses the features, behind which no layer is known."""
        q, k, v = (part(x).unflatten(-1, (count[0], D)).transpose(1, 2).flip(-1) for part in project)
        return (weights := (q @ k.mT).softmax(-1)), (weights @ v).transpose(1, 2).flatten(2)

    count = (heads,)
    recording = check_heads(Layer(attend, *[heads * D] * 3, **stated), torch.randn(B, T, C))
    assert recording.notes == ([f"0: {GUESSED.format(heads)}"] if is_guessed else [])


# Windows of tokens.

WINDOW = 5


class Windowed(nn.Module):
    """Attention in windows of 5 tokens of (b, t, c) or of (b, c, rows, columns), in the layout of a package."""

    def __init__(self, heads: int, attend: Callable[["Windowed", Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.attend, self.knocked_out = heads, attend, slice(0)
        self.qkv, self.out = nn.Linear(7, 3 * heads * D), nn.Linear(heads * D, 7)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x if x.dim() == 3 else x.flatten(2).mT
        q, k, v = (part.unflatten(-1, (self.heads, D)).transpose(1, 2) for part in self.qkv(tokens).chunk(3, dim=-1))
        q, k, v = (part.unflatten(2, (-1, WINDOW)) for part in (q, k, v))  # (b, h, w, n, d)
        self.weights = (q @ k.mT).softmax(-1).transpose(1, 2).flatten(0, 1)
        y = self.out(self.attend(self, q, k, v).transpose(1, 2).flatten(1, 3).unflatten(1, (tokens.shape[1], -1)).flatten(2))
        return y if x.dim() == 3 else y.mT.unflatten(2, x.shape[2:])

    def knock_out(self, context: Tensor) -> Tensor:
        """Set a head of a context (b, h, w, n, d) to 0, and move the heads behind the tokens."""
        context = context.clone()
        context[:, self.knocked_out] = 0
        return context.permute(0, 2, 1, 3, 4).transpose(2, 3)


def attend_within(*parts: Tensor) -> Tensor:
    q, k, v = parts
    return (q @ k.mT).softmax(-1) @ v


def join_windows_before_heads(layer: Windowed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch, windows and heads in one axis, as TwinsSVT of vit-pytorch has them."""
    joined = attend_within(*(x.transpose(1, 2).flatten(0, 2) for x in (q, k, v)))
    return layer.knock_out(joined.unflatten(0, (B, -1, layer.heads)).transpose(1, 2))


def join_heads_with_batch(layer: Windowed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and heads in one axis and windows in another one, as local-attention has them."""
    return layer.knock_out(attend_within(*(x.flatten(0, 1) for x in (q, k, v))).unflatten(0, (B, layer.heads)))


def join_windows_with_batch(layer: Windowed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and windows in one axis and heads in another one, as SepViT of vit-pytorch has them."""
    joined = attend_within(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)))
    return layer.knock_out(joined.unflatten(0, (B, -1)).transpose(1, 2))


LAYOUTS = [join_windows_before_heads, join_heads_with_batch, join_windows_with_batch]


@pytest.mark.parametrize(("heads", "sizes"), [(1, (B, 35, 7)), (3, (B, 35, 7)), (3, (B, 7, 5, 7))])
@pytest.mark.parametrize("attend", LAYOUTS)
def test_windows_are_batch_rows(attend, heads, sizes):
    recording = check_heads(Windowed(heads, attend), torch.randn(sizes))
    assert recording.map(0).shape == (7 * B, heads, WINDOW, WINDOW)


@pytest.mark.parametrize("attend", LAYOUTS)
def test_a_head_is_knocked_out_in_every_window(attend):
    model, x = nn.Sequential(nn.Identity(), Windowed(3, attend)), torch.randn(B, 35, 7)
    with torch.no_grad():
        with intervene(model, KnockOut(layer=0, head=1)):
            changed = model(x)
        model[1].knocked_out = slice(1, 2)
        torch.testing.assert_close(changed, model(x), rtol=0, atol=EQUAL)


@pytest.mark.parametrize("b", [1, 2, 5])
def test_heads_that_a_layer_of_einops_splits_are_no_windows(b):
    split, memory = Rearrange("b n (h d) -> b h n d", h=H), nn.Parameter(torch.randn(H, 2, D))

    def attend(project: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
        """Windows are rows of the batch, with memory tokens before their keys."""
        q, k, v = (layer.split(part(x)).unflatten(2, (-1, 5)).transpose(1, 2).flatten(0, 1) for part in project)
        k, v = (torch.cat([memory.expand(len(part), -1, -1, -1), part], 2) for part in (k, v))
        return (q @ k.mT).softmax(-1), layer.inner(q, k, v)

    layer = Layer(attend, *[H * D] * 3)
    layer.split, layer.memory, layer.inner = split, memory, INNER
    check_heads(layer, torch.randn(b, 10, C))


def look_back(x: Tensor) -> Tensor:
    """Windows (n, w, i, d) of keys or values, each behind the one before it, padded with zeros."""
    return F.pad(x, (0, 0, 0, 0, 1, 0)).unfold(1, 2, 1).movedim(-1, 2).flatten(2, 3)


def join_padded(x: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, 0, 0, 1, 0))
    return torch.cat([padded[:, :-1], padded[:, 1:]], 2)


def join_rolled(x: Tensor) -> Tensor:
    return torch.cat([x.roll(1, 1), x], 2)


def overlap(x: Tensor) -> Tensor:
    """Windows of one tensor that share memory."""
    n, w, i, d = x.shape
    padded = F.pad(x.flatten(1, 2), (0, 0, i, 0)).contiguous()
    return padded.as_strided((n, w, 2 * i, d), ((w + 1) * i * d, i * d, d, 1))


class WindowedArguments(nn.Module):
    """Attention of queries (b, h, t, d) or (n, t, d) that it is given, in windows that see the one before: local-attention."""

    def __init__(self, gather: Callable[[Tensor], Tensor] = look_back) -> None:
        super().__init__()
        self.gather = gather

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t, short, lead = q.shape[-2], -q.shape[-2] % WINDOW, (*q.shape[:-2], 1, 1)[:2]
        q, k, v = (F.pad(x.reshape(-1, *q.shape[-2:]), (0, 0, 0, short)) for x in (q, k, v))
        own, keys, values = (x.unflatten(1, (-1, WINDOW)) for x in (q, k, v))
        s = torch.einsum("bhie,bhje->bhij", own, self.gather(keys))
        places = torch.arange(s.shape[1])[:, None, None] * WINDOW + torch.arange(-WINDOW, WINDOW)
        weights = s.masked_fill((places < 0) | (places >= t), -1e30).softmax(-1)
        self.weights = weights.unflatten(0, lead).transpose(1, 2).flatten(0, 1)
        return torch.einsum("bhij,bhje->bhie", weights, self.gather(values)).flatten(1, 2)


class WindowedProjections(nn.Module):
    """The same of queries, keys and values that a layer has projected to a number of heads, which no attribute states."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(C, 3 * count * D), WindowedArguments()

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(*self.qkv(x).unflatten(-1, (3, -1, D)).permute(2, 0, 3, 1, 4))
        self.weights = self.attend.weights
        return y


@given(
    st.sampled_from([(1, 0), (2, 0), (3, 0), (2, 2), (3, 2)]),
    st.sampled_from([(), (2, 2), (2, 3), (3, 2), (1, 2), (1, 3), (2, 1), (2,), (3,)]),
    st.booleans(),
)
def test_windows_are_batch_rows_where_numbers_coincide(windows, lead, is_projected):
    t = windows[0] * WINDOW - windows[1]
    if is_projected and lead:
        layer, inputs = WindowedProjections((*lead, 1)[1]), [torch.randn(lead[0], t, C)]
    else:
        layer, inputs = WindowedArguments(), list(torch.randn(3, *lead, t, D))
    recording = check_heads(layer, *inputs)
    assert not recording.notes


@pytest.mark.parametrize("lead", [(2, 2), (3, 2), ()])
@pytest.mark.parametrize("gather", [join_padded, join_rolled, overlap])
def test_windows_are_batch_rows_however_keys_of_the_one_before_are_joined(gather, lead):
    part, (q, k, v) = WindowedArguments(gather), torch.randn(3, *lead, 2 * WINDOW, D)
    recording = check_heads(part, q, k, v, keep="values")
    context = (part.weights @ recording.values(0)).unflatten(0, (-1, 2)).transpose(1, 2).reshape(-1, 2 * WINDOW, D)
    torch.testing.assert_close(context, part(q, k, v), rtol=0, atol=EQUAL)

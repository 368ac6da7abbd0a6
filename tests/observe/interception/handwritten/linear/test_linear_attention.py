"""Linear attention that a layer writes out is recorded whatever it is called: rows times values are the layer's output."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from observe.recording_checks import EQUAL, assert_same_mechanism, record_and_compare
from regard.map.linear_recurrence import LinearRecurrence
from regard.observe.interception.handwritten.linear.activated_scores import sample_evenly
from regard.observe.interception.handwritten.linear.linear_call import CHANGED
from regard.observe.interception.handwritten.linear.linear_contexts import COPIED
from regard.observe.interception.handwritten.linear.linear_scores import CHAINED

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, T, D, E, EPS = 2, 3, 13, 5, 7, 1e-5
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def divide_by_column_of_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As LiteMLA of EfficientViT writes it. https://arxiv.org/abs/2205.14756"""
    context = q @ (k.transpose(-1, -2) @ F.pad(v, (0, 1), mode="constant", value=1.0))
    return context[..., :-1] / (context[..., -1:] + EPS)


def divide_by_row_of_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with tokens last, as EfficientViT's own repository writes it."""
    context = (F.pad(v.mT, (0, 0, 0, 1), value=1.0) @ k) @ q.mT
    return (context[..., :-1, :] / (context[..., -1:, :] + EPS)).mT


def divide_by_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = q @ (k.mT @ v)
    return context / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)


def multiply_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As fast-transformers and LoFTR write it, with heads behind tokens. https://arxiv.org/abs/2006.16236"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    context = torch.einsum("nshd,nshm->nhmd", k, v / T)
    z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + EPS)
    return (torch.einsum("nlhd,nhmd,nlh->nlhm", q, context, z) * T).transpose(1, 2).contiguous()


def multiply_by_einsum_of_factors_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As performer-pytorch writes it."""
    inverse = 1.0 / torch.einsum("...nd,...d->...n", q, k.sum(dim=-2).type_as(q))
    context = torch.einsum("...nd,...ne->...de", k, v)
    return torch.einsum("...de,...nd,...n->...ne", context, q, inverse)


def scale_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ ((k.mT @ v) * (torch.arange(1, H + 1) / T).view(H, 1, 1))


def reorder_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.mT @ v).flip(-2)


def divide_heads_side_by_side(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = (q @ (k.mT @ v)).transpose(1, 2).contiguous()
    context /= (q @ k.sum(-2).unsqueeze(-1)).transpose(1, 2)
    return context.transpose(1, 2)


def divide_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = torch.einsum("bhnd,bhde->bnhe", [q, torch.einsum("bhnd,bhne->bhde", [k, v])])
    return torch.einsum("bnhe,bhn->bhne", [context, 1 / torch.einsum("bhnd,bhd->bhn", q, k.sum(-2))])


def divide_by_addcdiv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.addcdiv(torch.zeros(()), q @ (k.mT @ v), (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True), value=0.3)


def sum_entries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k[..., None] * v[..., None, :]).sum(2)


def sum_entries_and_keep_their_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    products = (k[..., None] * v[..., None, :]).sum(2, keepdim=True)
    return (q[..., None] * products).sum(-2, True).squeeze(-2)


def average_entries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[..., None] * (k[..., None] * v[..., None, :]).mean(dim=2, keepdim=True)).mean(3)


def weigh_features_by_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return divide_by_sum(q.softmax(-1), k.softmax(-1), v)


def weigh_features_of_queries_by_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhnd,bhde->bhne", q.softmax(-1), torch.einsum("bhnd,bhne->bhde", k, v))


def weigh_features_by_softmax_tokens_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((v.mT @ k.softmax(-1)) @ q.mT.softmax(-2)).mT


def expand_exponentials(x: Tensor) -> Tensor:
    """As a Taylor series of exp(q · k) has it: 1, x and the products of x with itself. https://arxiv.org/abs/2402.18668"""
    x = x * D**-0.25
    squares = torch.einsum("...i,...j->...ij", x, x).flatten(-2) * 0.5**0.5
    return torch.cat([torch.ones_like(x[..., :1]), x, squares], -1)


def divide_by_sums_over_keys_in_the_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    inverse = 1.0 / torch.einsum("bhnd,bhmd->bhn", q, k).clamp(min=1e-5)
    context = torch.einsum("bhnd,bhne->bhde", k, v)
    return torch.einsum("bhnd,bhde,bhn->bhne", q, context, inverse)


def expand_and_divide(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return divide_by_sums_over_keys_in_the_product(expand_exponentials(q), expand_exponentials(k), v)


NOT_CAUSAL: dict[str, Form] = {
    "a sum over keys in the product": divide_by_sums_over_keys_in_the_product,
    "a series of exponentials": expand_and_divide,
    "a column of ones": divide_by_column_of_ones,
    "a row of ones": divide_by_row_of_ones,
    "a sum of keys": divide_by_sum,
    "an einsum of three": multiply_by_einsum,
    "an einsum of three, products first": multiply_by_einsum_of_factors_first,
    "a factor for each head": scale_products,
    "features in another order": reorder_features,
    "an einsum of lists": divide_by_einsum,
    "addcdiv": divide_by_addcdiv,
    "heads side by side": divide_heads_side_by_side,
    "a sum of entries": sum_entries,
    "sums of entries that keep their axes": sum_entries_and_keep_their_axes,
    "means of entries": average_entries,
    "entries times a number": lambda q, k, v: q @ (k.unsqueeze(-1) * v.unsqueeze(-2) / T).sum(2),
    "softmaxes over features": weigh_features_by_softmax,
    "a softmax over features of queries": weigh_features_of_queries_by_softmax,
    "softmaxes over features, tokens last": weigh_features_by_softmax_tokens_last,
}


def sum_up_outer_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(dim=2)
    return torch.einsum("bhnd,bhnde->bhne", q, state) / (q * k.cumsum(-2)).sum(-1, keepdim=True)


def divide_by_running_sum(context: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return context / (q * k.cumsum(-2)).sum(-1, keepdim=True)


def sum_up_entries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = (k[..., :, None] * v[..., None, :]).cumsum(dim=-3)
    return divide_by_running_sum((q[..., None] * state).sum(-2), q, k)


def sum_up_entries_of_values_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    inverse = 1 / (q * (k.cumsum(2) + EPS)).sum(-1, keepdim=True)
    return ((v[..., :, None] * k[..., None, :]).cumsum(2) * q[..., None, :]).sum(dim=-1) * inverse


def sum_up_entries_and_multiply(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
    return divide_by_running_sum((q.unsqueeze(-2) @ state).squeeze(-2), q, k)


def sum_up_matrices_of_one_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = (k.unsqueeze(-1) @ v.unsqueeze(-2)).cumsum(2)
    return divide_by_running_sum(torch.mul(q.unsqueeze(-1), state).sum(-2), q, k)


def sum_up_entries_and_keep_their_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = (k[..., :, None] * v[..., None, :]).cumsum(dim=-3)
    return (q[..., None] * state).sum(dim=-2, keepdim=True).squeeze(-2)


def average_entries_of_running_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[..., None] * (k[..., :, None] * v[..., None, :]).cumsum(dim=-3)).mean(-2)


PLACES = torch.arange(1, T + 1).view(T, 1, 1)


def sum_up_products(k: Tensor, v: Tensor) -> Tensor:
    return (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)


CHANGED_ENTRIES: dict[str, Form] = {  # which a factor changes, before or after their running sum, or that are written in place
    "in place": lambda q, k, v: sum_up_products(k, v).mul_(q.unsqueeze(-1)).sum(-2),
    "running sums over their number": lambda q, k, v: (sum_up_products(k, v) / PLACES * q.unsqueeze(-1)).sum(-2),
    "products over their number": lambda q, k, v: (q.unsqueeze(-1) * sum_up_products(k, v) / PLACES).sum(-2),
    "a factor in place": lambda q, k, v: (sum_up_products(k, v).mul_(0.5) * q.unsqueeze(-1)).mul_(3).sum(-2),
    "a factor of each product": lambda q, k, v: (
        ((k.unsqueeze(-1) * v.unsqueeze(-2)).mul_(0.5) * (1 / PLACES)).cumsum(2) * q.unsqueeze(-1)
    ).sum(-2),
    "a factor that broadcasts first": lambda q, k, v: (2 * (1 / PLACES) * (sum_up_products(k, v) * q[..., None])).sum(-2),
}


CAUSAL: dict[str, Form] = {
    **CHANGED_ENTRIES,
    "einsum": sum_up_outer_products,
    "entries": sum_up_entries,
    "entries of values first": sum_up_entries_of_values_first,
    "entries and a product": sum_up_entries_and_multiply,
    "matrices of one token": sum_up_matrices_of_one_token,
    "entries that keep their axis": sum_up_entries_and_keep_their_axis,
    "means of entries": average_entries_of_running_sums,
}


def multiply_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / T) @ v


def divide_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores / scores.sum(-1, keepdim=True) @ v


def divide_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k)
    return torch.einsum("bhij,bhje->bhie", scores, v) / (scores.sum(-1, keepdim=True) + EPS)


def normalize_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.normalize(q @ k.mT, p=1, dim=-1) @ v


def score_softmaxes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.softmax(-1) @ k.softmax(-1).mT) @ v


def average_over_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As non-local blocks with a dot product. https://arxiv.org/abs/1711.07971"""
    scores = q @ k.mT
    return scores / scores.shape[-1] @ v


def average_over_keys_by_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / torch.tensor(float(k.shape[-2]))) @ v


SCORED: dict[str, Form] = {
    "scaled": multiply_scores,
    "divided": divide_scores,
    "divided after": divide_product,
    "normalized": normalize_scores,
    "of softmaxes over features": score_softmaxes,
    "divided by their number": average_over_keys,
    "divided by a tensor of their number": average_over_keys_by_a_tensor,
}


def hide_by_tril(scores: Tensor) -> Tensor:
    return scores.tril()


def hide_by_product(scores: Tensor) -> Tensor:
    return scores * torch.ones(T, T).tril()


def hide_by_fill(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(T, T).triu(1).bool(), 0)


HIDDEN = [hide_by_tril, hide_by_product, hide_by_fill]


def make_decay() -> Tensor:
    """One constant decay for each head, of each key to each query; other numbers than 0 for later keys."""
    places = torch.arange(T)
    return torch.tensor([0.9, 0.8, 0.7]).view(H, 1, 1) ** (places.unsqueeze(-1) - places)


def decay_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the parallel form of RetNet. https://arxiv.org/abs/2307.08621"""
    return (q @ k.mT * make_decay().tril()) @ v


def decay_strongly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Decays after which less is left of the first key than of the last one's rounding."""
    return (q @ k.mT * make_decay() ** 16).tril() @ v


def normalize_decayed_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As RetNet's own code: decays over the root of their sums, and rows over the sum of their sizes, if that is above 1."""
    decay = make_decay().tril()
    scores = q @ k.mT * (decay / decay.sum(-1, keepdim=True).sqrt())
    return (scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)) @ v


def decay_by_segments(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the quadratic form of Mamba-2: a decay of each token. https://arxiv.org/abs/2405.21060"""
    total = F.logsigmoid(3 * v.sum(-1) + 1).cumsum(-1)
    exponents = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    return (q @ k.mT * exponents.exp()) @ v


def divide_after_decay(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = q.exp() @ k.exp().mT * make_decay().tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def decay_then_hide(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * make_decay()).masked_fill(torch.ones(T, T).triu(1).bool(), 0) @ v


def decay_and_grow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * (1 / make_decay()).tril()) @ v


def decay_and_grow_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logs = -torch.arange(T) + 3 * (torch.arange(T) > 6)
    return (q @ k.mT * (logs.unsqueeze(-1) - logs).double().exp().tril()) @ v


def decay_but_for_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    decay = make_decay().tril()
    decay[1, 5, 2] *= 1.01
    return (q @ k.mT * decay) @ v


DECAYED: dict[str, Form] = {
    "constant": decay_scores,
    "constant, strong": decay_strongly,
    "constant, in rows of one size": normalize_decayed_scores,
    "constant, then hidden": decay_then_hide,
    "constant, divided after": divide_after_decay,
    "of each token": decay_by_segments,
}
UNDECAYED: dict[str, Form] = {
    "growing": decay_and_grow,
    "growing once": decay_and_grow_once,
    "another entry": decay_but_for_one,
}


def attend_in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, outputs = q.new_zeros(B, H, D, E), []
    for n in range(0, T, 4):
        a, b, c = (x[:, :, n : n + 4] for x in (q, k, v))
        outputs.append((a @ b.mT).tril() @ c + a @ state)
        state = state + b.mT @ c
    return torch.cat(outputs, 2)


class Squared(nn.Module):
    """A feature map in a module of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * F.relu(x)


FEATURES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "relu": lambda: F.relu,
    "a module": nn.ReLU,
    "elu + 1": lambda: lambda x: F.elu(x) + 1,
    "a module that may be negative": nn.GELU,
    "a module of its own": Squared,
    "exp and an epsilon": lambda: lambda x: D**-0.5 * ((x - x.amax(-1, keepdim=True).detach()).exp() + 1e-4),
    "relu, then rotated": lambda: lambda x: x.relu() * 0.6 + torch.cat([-x.relu()[..., 2:], x.relu()[..., :2]], -1) * 0.8,
}


class Mixer(nn.Module):
    """Queries, keys and values by heads, without a name that states what it is."""

    def __init__(self, form: Form, feature_map: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.num_heads, self.form, self.feature_map = H, form, feature_map
        self.one, self.two, self.three = nn.Linear(11, H * D), nn.Linear(11, H * D), nn.Linear(11, H * E)
        self.values, self.output = torch.empty(0), torch.empty(0)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = (
            part(y).unflatten(-1, (H, -1)).transpose(1, 2)
            for part, y in ((self.one, x), (self.two, context), (self.three, context))
        )
        output = self.form(self.feature_map(q), self.feature_map(k), v)
        self.values, self.output = v.detach(), output.detach()
        return output.transpose(1, 2).flatten(2)


def check_map(mixer: Mixer, x: Tensor, *context: Tensor) -> None:
    recording, _ = record_and_compare(mixer, lambda m: m(x, *context))
    (call,) = recording.calls
    assert call.kind == "implicit"
    assert call.map.shape == (*mixer.output.shape[:3], mixer.values.shape[2])
    torch.testing.assert_close(call.map.dense() @ call.map.values, mixer.output, rtol=0, atol=EQUAL)
    assert call.map.certificate().error < EQUAL


@pytest.mark.parametrize("form", NOT_CAUSAL)
def test_rows_times_values_are_the_output_of_every_form(form):
    check_map(Mixer(NOT_CAUSAL[form], F.softplus), torch.randn(B, T, 11))


REARRANGED = {"a sum over keys in the product", "a column of ones", "a row of ones", "features in another order"}


@pytest.mark.parametrize("form", sorted(NOT_CAUSAL.keys() - REARRANGED))
def test_no_form_needs_feature_maps_where_a_layer_has_made_its_tensors(form):
    check_map(Mixer(NOT_CAUSAL[form], nn.Identity()), torch.randn(B, T, 11))


@pytest.mark.parametrize("removes", [False, True])
def test_products_of_features_with_each_other_are_a_feature_map(removes):
    """Without a nonlinear function before; with each product once, of a pair and of the other order."""

    def expand(x: Tensor) -> Tensor:
        x = x * D**-0.25
        squares = torch.einsum("...i,...j->...ij", x, x) * 0.5**0.5
        if removes:
            upper = squares[..., torch.ones(D, D).triu(1).bool()] * 2**0.5
            squares = torch.cat([squares.diagonal(dim1=-2, dim2=-1), upper], -1)
        return torch.cat([torch.ones_like(x[..., :1]), x, squares if removes else squares.flatten(3)], -1)

    check_map(Mixer(divide_by_sums_over_keys_in_the_product, expand), torch.randn(B, T, 11))


@pytest.mark.parametrize("feature_map", FEATURES)
def test_rows_times_values_are_the_output_with_every_feature_map(feature_map):
    check_map(Mixer(divide_by_column_of_ones, FEATURES[feature_map]()), torch.randn(B, T, 11))


@pytest.mark.parametrize("feature_map", [F.softplus, nn.Identity()])
@pytest.mark.parametrize("form", CAUSAL)
def test_rows_of_a_running_sum_see_no_later_key(form, feature_map):
    mixer = Mixer(CAUSAL[form], feature_map)
    check_map(mixer, torch.randn(B, T, 11))
    recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)))
    assert isinstance(recording.map(0, kind="implicit").mechanism, LinearRecurrence)
    assert not recording.map(0, kind="implicit").dense().triu(1).any()


@given(st.integers(1, 3), st.integers(1, 9), st.integers(2, 9), st.sampled_from(sorted(NOT_CAUSAL)))
@example(1, 3, 4, "features in another order")
def test_queries_may_be_of_another_sequence(b, n, t, form):
    if form != "an einsum of three":
        check_map(Mixer(NOT_CAUSAL[form], F.softplus), torch.randn(b, n, 11), torch.randn(b, t, 11))


@pytest.mark.parametrize("form", SCORED)
def test_scores_of_feature_maps_that_are_multiplied_with_values_are_recorded(form):
    check_map(Mixer(SCORED[form], F.softplus), torch.randn(B, T, 11))
    check_map(Mixer(SCORED[form], F.softplus), torch.randn(B, T, 11), torch.randn(B, T + 4, 11))


@pytest.mark.parametrize("form", [divide_scores, average_over_keys, average_over_keys_by_a_tensor])
def test_scores_that_are_divided_by_their_sums_or_their_number_need_no_feature_maps(form):
    check_map(Mixer(form, nn.Identity()), torch.randn(B, T, 11))


def test_the_number_of_keys_counts_in_float32_too():
    mixer = Mixer(lambda q, k, v: (q @ k.mT / torch.tensor(T, dtype=torch.float32)) @ v, nn.Identity()).float()
    recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11, dtype=torch.float32)))
    assert [call.map.shape for call in recording.calls] == [(B, H, T, T)]


@given(st.integers(1 - T, T - 1), st.sampled_from([torch.tril, torch.triu]))
def test_scores_on_one_side_of_any_diagonal_are_recorded(diagonal, hide):
    mixer = Mixer(lambda q, k, v: hide(q @ k.mT, diagonal=diagonal) @ v, F.softplus)
    check_map(mixer, torch.randn(B, T, 11))


@pytest.mark.parametrize("hide", HIDDEN)
@pytest.mark.parametrize("feature_map", [F.softplus, nn.Identity()])
def test_scores_without_those_of_later_keys_are_recorded_as_a_running_sum(hide, feature_map):
    mixer = Mixer(lambda q, k, v: hide(q @ k.mT) @ v, feature_map)
    check_map(mixer, torch.randn(B, T, 11))
    recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)))
    assert isinstance(recording.map(0, kind="implicit").mechanism, LinearRecurrence)


@given(st.integers(1 - T, T - 2), st.sampled_from([torch.tril, torch.triu]))
def test_scores_on_one_side_of_a_diagonal_need_no_feature_maps(distance, hide):
    diagonal = -distance if hide is torch.triu else distance
    check_map(Mixer(lambda q, k, v: hide(q @ k.mT, diagonal=diagonal) @ v, nn.Identity()), torch.randn(B, T, 11))


BANDS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "triu, tril": lambda scores, before, after: scores.triu(-before).tril(after),
    "tril, triu": lambda scores, before, after: scores.tril(after).triu(-before),
    "product": lambda scores, before, after: scores * torch.ones(T, T).triu(-before).tril(after),
    "fill": lambda scores, before, after: scores.masked_fill(~torch.ones(T, T).triu(-before).tril(after).bool(), 0),
    "where": lambda scores, before, after: torch.where(torch.ones(T, T).triu(-before).tril(after) > 0, scores, 0.0),
}


@given(st.integers(0, T - 2), st.integers(0, T - 2), st.sampled_from(sorted(BANDS)))
def test_scores_in_a_band_need_no_feature_maps(before, after, band):
    check_map(Mixer(lambda q, k, v: BANDS[band](q @ k.mT, before, after) @ v, nn.Identity()), torch.randn(B, T, 11))


class Adapted(nn.Module):
    """Values by a product of two weights, as wide as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(11, D), nn.Linear(11, D)
        self.down, self.up = nn.Parameter(torch.randn(11, 2)), nn.Parameter(torch.randn(2, T))

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(x) @ self.two(x).mT).tril() @ (x @ (self.down @ self.up))


def test_values_may_have_as_many_features_as_there_are_tokens():
    recording, output = record_and_compare(Adapted(), lambda m: m(torch.randn(T, 11)))
    (call,) = recording.calls
    torch.testing.assert_close((call.map.dense() @ call.map.values)[0, 0], output, rtol=0, atol=EQUAL)


class Channels(nn.Module):
    """Tokens times the products of their channels with each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ ((x.mT @ x) * (1 - torch.eye(x.shape[-1])))


def test_products_of_channels_without_a_diagonal_are_no_attention():
    recording, _ = record_and_compare(Channels(), lambda m: m(torch.randn(B, T, D)))
    assert not recording.calls


class Multiplied(nn.Module):
    """Products of arguments, which no layer has made, with a table that hides no pair."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * (torch.rand(T, T) + 1)) @ v


def test_a_table_that_hides_no_pair_is_no_mask():
    recording, _ = record_and_compare(Multiplied(), lambda m: m(*torch.randn(3, B, H, T, D)))
    assert not recording.calls


WITHOUT_FEATURE_MAPS: dict[str, tuple[Form, float]] = {
    "scores": (lambda q, k, v: q @ k.mT @ v, 1.0),
    "scaled scores": (lambda q, k, v: (q @ k.mT * D**-0.5) @ v, D**-0.5),
    "divided output": (lambda q, k, v: (q @ k.mT) @ v / T, 1 / T),
    "keys and values first": (lambda q, k, v: q @ (k.mT @ v), 1.0),
    "tokens last": (lambda q, k, v: ((v.mT @ k) @ q.mT).mT, 1.0),
    "two einsums": (
        lambda q, k, v: torch.einsum("bhij,bhje->bhie", torch.einsum("bhid,bhjd->bhij", q * D**-0.5, k), v),
        D**-0.5,
    ),
    "an einsum": (lambda q, k, v: torch.einsum("bhid,bhjd,bhje->bhie", q, k / T, v), 1 / T),
    "an einsum of values first": (lambda q, k, v: torch.einsum("...je,...id,...jd->...ie", v, q, k), 1.0),
    "an einsum of heads behind tokens": (
        lambda q, k, v: torch.einsum("bjhd,bihd,bjhe->bihe", *(x.transpose(1, 2) for x in (k, q, v))).transpose(1, 2),
        1.0,
    ),
}


@pytest.mark.parametrize("form", WITHOUT_FEATURE_MAPS)
@pytest.mark.parametrize("others", [0, T, T + 4])
def test_queries_keys_and_values_of_layers_need_no_feature_maps(form, others):
    mix, scale = WITHOUT_FEATURE_MAPS[form]
    mixer, x = Mixer(mix, nn.Identity()), torch.randn(B, T, 11)
    context = [torch.randn(B, others, 11)] if others else []
    check_map(mixer, x, *context)
    recording, _ = record_and_compare(mixer, lambda m: m(x, *context))
    q, k = (part(y).unflatten(-1, (H, D)) for part, y in ((mixer.one, x), (mixer.two, (context or [x])[0])))
    expected = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    torch.testing.assert_close(recording.map(0, kind="implicit").dense(), expected.detach(), rtol=0, atol=EQUAL)


LAYOUTS: dict[str, Form] = {  # copies of queries, keys and values (b, h, t, d) in another order of memory
    "reshape": lambda *parts: fold_heads(*(x.reshape(-1, *x.shape[2:]) for x in parts)),
    "flatten": lambda *parts: fold_heads(*(x.flatten(0, 1) for x in parts)),
    "contiguous and view": lambda *parts: fold_heads(*(x.contiguous().view(-1, *x.shape[2:]) for x in parts)),
    "clones": lambda *parts: parts[0].clone() @ (parts[1].clone().mT @ parts[2].clone()),
    "a reshape before": lambda *parts: multiply(*(x.mT.flatten(1, 2).reshape(len(x), -1, x.shape[2]).mT for x in parts)),
    "keys transposed": lambda q, k, v: q @ (k.mT.contiguous() @ v),
    "features first": lambda q, k, v: q @ (k.mT.reshape(len(k), H, -1, k.shape[2]) @ v),
    "repeated": lambda q, k, v: q @ (k[:, :1].repeat(1, H, 1, 1).mT @ v),
    "expanded": lambda q, k, v: q @ (k[:, :1].expand(-1, H, -1, -1).mT @ v),
    "repeated by each": lambda q, k, v: q @ (k[:, :1].repeat_interleave(H, 1).mT @ v),
    "repeated as one": lambda q, k, v: q @ (k[:, :1, None].expand(-1, -1, H, -1, -1).reshape(k.shape).mT @ v),
}


def fold_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ (k.mT @ v)).unflatten(0, (-1, H))


def multiply(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(*x.shape[:2], H, -1).permute(0, 2, 1, 3) for x in (q, k, v))
    return q @ (k.mT @ v)


REPEATED: dict[str, Form] = {  # products of the keys and values of one head, for all heads of queries
    "repeated": lambda q, k, v: q @ (k[:, :1].mT @ v[:, :1]).repeat(1, H, 1, 1),
    "expanded": lambda q, k, v: q @ (k[:, :1].mT @ v[:, :1]).expand(-1, H, -1, -1),
    "repeated by each": lambda q, k, v: q @ (k[:, :1].mT @ v[:, :1]).repeat_interleave(H, 1),
}


@pytest.mark.parametrize("form", REPEATED)
@pytest.mark.parametrize("feature_map", [nn.Identity(), F.softplus])
def test_products_of_keys_with_values_may_be_repeated_for_heads_of_queries(form, feature_map):
    mixer = Mixer(REPEATED[form], feature_map)
    recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)))
    (call,) = recording.calls
    found = call.map.dense() @ mixer.values[:, :1]
    torch.testing.assert_close(found.expand_as(mixer.output), mixer.output, rtol=0, atol=EQUAL)


def join_states(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ torch.stack([k[:, n].mT @ v[:, n] for n in range(H)], 1)


def test_products_that_are_joined_of_those_of_each_head_are_missed():
    recording, _ = record_and_compare(Mixer(join_states, F.softplus), lambda m: m(torch.randn(B, T, 11)), missing=True)
    assert not recording.calls
    assert "linear attention" in recording.missed[0].reason


@pytest.mark.parametrize("form", LAYOUTS)
def test_queries_keys_and_values_of_layers_may_be_copied_before_they_are_multiplied(form):
    check_map(Mixer(LAYOUTS[form], nn.Identity()), torch.randn(B, T, 11))


class Fused(nn.Module):
    """Queries, keys and values of one projection, multiplied in an order."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, self.project = form, nn.Linear(11, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(*self.project(x).chunk(3, -1))


@pytest.mark.parametrize("form", [lambda q, k, v: q @ (k.mT @ v), lambda q, k, v: (q @ k.mT) @ v])
@pytest.mark.parametrize("normalize", [lambda x: x, lambda x: x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()])
def test_parts_of_one_projection_need_no_feature_maps(form, normalize):
    mixer, x = Fused(lambda q, k, v: form(normalize(q), normalize(k), v)), torch.randn(B, T, 11)
    recording, output = record_and_compare(nn.Sequential(mixer), lambda m: m(x))
    (call,) = recording.calls
    q, k, v = mixer.project(x).detach().chunk(3, -1)
    expected = normalize(q) @ normalize(k).mT
    torch.testing.assert_close(call.map.dense()[:, 0], expected, rtol=0, atol=EQUAL)
    torch.testing.assert_close(expected @ v, output, rtol=0, atol=EQUAL)


def cut_to_batch(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(H, -1), 0)


def join_from_batch(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(H, 0), -1)


ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # to heads, and back to (b, t, h e)
    "(b, h, t, d)": (lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2), lambda y: y.transpose(1, 2).flatten(2)),
    "(h, b, t, d)": (lambda x: x.unflatten(-1, (H, -1)).permute(2, 0, 1, 3), lambda y: y.permute(1, 2, 0, 3).flatten(2)),
    "(h b, t, d) by cat": (cut_to_batch, join_from_batch),
    "(h, b, t, d) by stack": (lambda x: torch.stack(x.chunk(H, -1)), lambda y: torch.cat([*y], -1)),
    "(b h, t, d)": (
        lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2).flatten(0, 1),
        lambda y: y.unflatten(0, (-1, H)).transpose(1, 2).flatten(2),
    ),
    "(b h, t, d) of tokens first": (
        lambda x: x.transpose(0, 1).contiguous().view(x.shape[1], len(x) * H, -1).transpose(0, 1),
        lambda y: y.transpose(0, 1).reshape(y.shape[1], -1, H * y.shape[2]).transpose(0, 1),
    ),
}


class Ordered(nn.Module):
    """Heads in an order of axes, by a form of products; the number of heads is stated or not."""

    def __init__(self, order: str, form: Form, is_stated: bool) -> None:
        super().__init__()
        self.order, self.form = ORDERS[order], form
        self.one, self.two, self.three = nn.Linear(11, H * D), nn.Linear(11, H * D), nn.Linear(11, H * E)
        if is_stated:
            self.num_heads = H

    def forward(self, x: Tensor) -> Tensor:
        split, join = self.order
        q, k, v = self.one(x).exp(), self.two(x).exp(), self.three(x)
        q_heads, k_heads = (one.unflatten(-1, (H, D)) for one in (q, k))
        self.expected = torch.einsum("bihd,bjhd->bhij", q_heads, k_heads).detach()
        return join(self.form(*map(split, (q, k, v))))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", [lambda q, k, v: q @ k.mT @ v, lambda q, k, v: q @ (k.mT @ v)], ids=["scores", "states"])
@given(st.sampled_from([1, 2, H, 2 * H]), st.sampled_from([2, H, 7]), st.booleans())
def test_heads_may_stand_before_the_batch(order, form, batch, tokens, is_stated):
    mixer = Ordered(order, form, is_stated)
    recording, _ = record_and_compare(nn.Sequential(mixer), lambda m: m(torch.randn(batch, tokens, 11)))
    found = recording.map(0, kind="implicit").dense()
    torch.testing.assert_close(found, mixer.expected, rtol=EQUAL, atol=EQUAL)


class SharedKeys(nn.Module):
    """Groups of heads with the same keys and values, as products of four or five axes or with keys that are repeated."""

    def __init__(self, groups: int, form: str) -> None:
        super().__init__()
        self.groups, self.form = groups, form
        self.one, self.two, self.three = nn.Linear(11, 4 * D), nn.Linear(11, groups * D), nn.Linear(11, groups * E)

    def forward(self, x: Tensor) -> Tensor:
        q, k = F.elu(self.one(x)) + 1, F.elu(self.two(x)) + 1
        q, k, v = q.unflatten(-1, (self.groups, -1, D)), k.unflatten(-1, (-1, D)), self.three(x).unflatten(-1, (-1, E))
        self.expected = torch.einsum("bigrd,bjgd->bgrij", q, k).flatten(1, 2).detach()
        if self.form == "repeated":
            q = q.flatten(2, 3).transpose(1, 2)
            k, v = (one.transpose(1, 2).repeat_interleave(4 // self.groups, 1) for one in (k, v))
            return (q @ k.mT @ v).transpose(1, 2).flatten(2)
        if self.form == "states":
            return torch.einsum("bigrd,bgde->bigre", q, torch.einsum("bjgd,bjge->bgde", k, v)).flatten(2)
        scores = torch.einsum("bigrd,bjgd->bgrij", q, k)
        if self.form == "causal":
            scores, self.expected = scores.tril(), self.expected.tril()
        return torch.einsum("bgrij,bjge->bigre", scores, v).flatten(2)


@pytest.mark.parametrize("form", ["scores", "causal", "states", "repeated"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_heads_may_share_keys(form, groups, batch):
    mixer = SharedKeys(groups, form)
    recording, _ = record_and_compare(nn.Sequential(mixer), lambda m: m(torch.randn(batch, T, 11)))
    torch.testing.assert_close(recording.map(0, kind="implicit").dense(), mixer.expected, rtol=0, atol=EQUAL)


class Pixels(nn.Module):
    """Linear attention over the two axes of an image, with heads that share keys or one head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.one, self.two, self.three = heads, nn.Linear(11, heads * D), nn.Linear(11, D), nn.Linear(11, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.elu(self.one(x)) + 1, F.elu(self.two(x)) + 1, self.three(x)
        self.expected = torch.einsum("bihd,bjd->bhij", q.flatten(1, 2).unflatten(-1, (-1, D)), k.flatten(1, 2)).detach()
        states = torch.einsum("byxd,byxe->bde", k, v)
        if self.heads == 1:
            return torch.einsum("byxd,bde->byxe", q, states)
        return torch.einsum("byxhd,bde->byxhe", q.unflatten(-1, (-1, D)), states).flatten(3)


@pytest.mark.parametrize("heads", [1, 2])
def test_tokens_may_be_two_axes(heads):
    mixer = Pixels(heads)
    recording, _ = record_and_compare(nn.Sequential(mixer), lambda m: m(torch.randn(B, 3, 4, 11)))
    torch.testing.assert_close(recording.map(0, kind="implicit").dense(), mixer.expected, rtol=0, atol=EQUAL)


@pytest.mark.parametrize("form", [lambda q, k, v: q @ k.mT @ v, lambda q, k, v: q @ (k.mT @ v)], ids=["scores", "states"])
@pytest.mark.parametrize("tokens", [D, T])
def test_values_may_be_features_that_are_not_negative(form, tokens):
    mixer = Fused(lambda q, k, v: form(q.relu(), k.relu(), v.relu()))
    x = torch.randn(B, tokens, 11)
    recording, _ = record_and_compare(nn.Sequential(mixer), lambda m: m(x))
    q, k, _ = mixer.project(x).detach().relu().chunk(3, -1)
    torch.testing.assert_close(recording.map(0, kind="implicit").dense()[:, 0], q @ k.mT, rtol=0, atol=EQUAL)


class Unprojected(nn.Module):
    """Linear self-attention with one matrix for queries and keys, whose keys or values are the tokens themselves."""

    def __init__(self, are_values: bool) -> None:
        super().__init__()
        self.are_values, self.one, self.other = are_values, nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        q, y = x @ self.one, x @ self.other
        k, v = (y, x) if self.are_values else (x, y)
        self.expected = q @ k.mT / T
        return x + (q @ k.mT @ v) / T


@pytest.mark.parametrize("are_values", [False, True])
def test_keys_or_values_may_be_the_tokens_themselves(are_values):
    """As in proofs of what it learns, https://arxiv.org/abs/2306.09927."""
    mixer = Unprojected(are_values)
    recording, _ = record_and_compare(nn.Sequential(mixer), lambda m: m(torch.randn(B, T, D)))
    torch.testing.assert_close(recording.map(0, kind="implicit").dense()[:, 0], mixer.expected.detach(), rtol=0, atol=EQUAL)


OTHER_PRODUCTS: dict[str, Form] = {
    "one tensor": lambda q, k, v: q @ (q.mT @ q),
    "queries as keys": lambda q, k, v: q @ q.mT @ v,
    "running sums along keys": lambda q, k, v: (q @ k.mT).cumsum(-1) @ v,
    "one tensor in an einsum": lambda q, k, v: torch.einsum("bid,bjd,bje->bie", v, v, v),
    "copies of columns": lambda q, k, v: q @ k.mT @ v.mT.contiguous(),
    "copies of rows": lambda q, k, v: q.clone() @ k.mT.reshape(k.mT.shape) @ v.mT.clone(),
}


@pytest.mark.parametrize("form", OTHER_PRODUCTS)
def test_other_products_of_parts_of_a_projection_are_not_recorded(form):
    recording, _ = record_and_compare(nn.Sequential(Fused(OTHER_PRODUCTS[form])), lambda m: m(torch.randn(B, D, 11)))
    assert not recording.calls


WEIGHED: dict[str, Form] = {
    "weights first": lambda w, v, table: torch.einsum("bij,bjd,de->bie", w, v, table),
    "weights last": lambda w, v, table: torch.einsum("de,bjd,bij->bie", table, v, w),
}


@pytest.mark.parametrize("form", WEIGHED)
def test_weights_may_be_multiplied_with_values_and_a_matrix_at_once(form):
    mixer, x = Fused(lambda q, k, v: WEIGHED[form]((q @ k.mT).softmax(-1), v, torch.ones(D, E))), torch.randn(B, T, 11)
    recording, _ = record_and_compare(nn.Sequential(mixer), lambda m: m(x))
    q, k, _ = mixer.project(x).detach().chunk(3, -1)
    torch.testing.assert_close(recording.map(0).dense()[:, 0], (q @ k.mT).softmax(-1), rtol=0, atol=EQUAL)


def test_two_softmaxes_in_an_einsum_are_missed():
    mixer = Fused(lambda q, k, v: torch.einsum("bij,bjl,ble->bie", (q @ k.mT).softmax(-1), (k @ q.mT).softmax(-1), v))
    recording, _ = record_and_compare(nn.Sequential(mixer), lambda m: m(torch.randn(B, T, 11)), missing=True)
    assert not recording.runs


def test_queries_that_are_a_softmax_over_features_need_no_feature_map_of_keys():
    check_map(Mixer(weigh_features_of_queries_by_softmax, nn.Identity()), torch.randn(B, T, 11))


SOFTMAXES_IN_SCORES: dict[str, Form] = {
    "of queries over features": lambda q, k, v: (q.softmax(-1) @ k.mT) @ v,
    "of queries over features, scaled": lambda q, k, v: (q.softmax(-1) @ k.mT / D) @ v,
    "of queries over features, tokens last": lambda q, k, v: (v.mT @ (k @ q.mT.softmax(-2))).mT,
    "of both, over features and tokens": lambda q, k, v: (q.softmax(-1) @ k.softmax(-2).mT) @ v,
    "of keys over tokens": lambda q, k, v: (q @ k.softmax(-2).mT) @ v,
    "of queries, with normed keys": lambda q, k, v: (q.softmax(-1) @ F.normalize(k, dim=-1).mT) @ v,
    "of queries, with keys over their norms": lambda q, k, v: (q.softmax(-1) @ (k / k.norm(dim=-1, keepdim=True)).mT) @ v,
    "of queries, with standardized keys": lambda q, k, v: (q.softmax(-1) @ F.layer_norm(k, (D,)).mT) @ v,
}


@pytest.mark.parametrize("form", SOFTMAXES_IN_SCORES)
def test_scores_of_queries_or_keys_that_are_a_softmax_are_recorded_when_they_are_multiplied_with_values(form):
    check_map(Mixer(SOFTMAXES_IN_SCORES[form], nn.Identity()), torch.randn(B, T, 11))
    check_map(Mixer(SOFTMAXES_IN_SCORES[form], nn.Identity()), torch.randn(B, T, 11), torch.randn(B, T + 4, 11))


def test_scores_of_queries_that_are_a_softmax_are_no_attention_by_themselves():
    mixer = Mixer(lambda q, k, v: q.softmax(-1) @ k.mT, nn.Identity())
    recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)))
    assert not recording.calls


class ChannelsFirst(nn.Module):
    """Queries and keys whose features stand before their tokens, as convolutions make them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Conv1d(11, width, 1) for width in (D, D, E))
        self.values, self.output = torch.empty(0), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x.mT).unsqueeze(1) for part in (self.one, self.two, self.three))
        self.values = v.mT.detach()
        output = (q.softmax(2).mT @ k) @ v.mT
        self.output = output.detach()
        return output


def test_features_may_stand_before_tokens():
    model = ChannelsFirst()
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, 11)))
    assert [call.kind for call in recording.calls] == ["implicit"]
    torch.testing.assert_close(recording.calls[0].map.dense() @ model.values, model.output, rtol=0, atol=EQUAL)


def test_the_softmax_of_both_of_a_token_is_linear_attention_of_it_with_itself():
    """Tokens that are spread over clusters, and read what lies in these: the map is the product of both, not one for each."""
    mixer = Mixer(lambda q, k, v: q.softmax(-1) @ (q.softmax(-1).mT @ v), nn.Identity())
    check_map(mixer, torch.randn(B, T, 11))


def score_causally(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).tril()


SCORES_OF_SCORES: dict[str, Form] = {
    "causal": lambda q, k, v: score_causally(q, q) @ score_causally(k, k),
    "of feature maps": lambda q, k, v: (F.softplus(q) @ F.softplus(k).mT) @ (F.softplus(k) @ F.softplus(q).mT),
    "anticausal and causal": lambda q, k, v: (q @ k.mT).triu() @ score_causally(k, q),
}


@pytest.mark.parametrize("form", SCORES_OF_SCORES)
def test_a_product_of_two_matrices_of_scores_is_no_attention(form):
    mixer = Mixer(SCORES_OF_SCORES[form], nn.Identity())
    recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)))
    assert not recording.calls


def test_a_product_of_two_causal_matrices_of_scores_that_is_multiplied_with_values_is_missed():
    mixer = Mixer(lambda q, k, v: score_causally(q, q) @ score_causally(k, k) @ v, nn.Identity())
    recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)), missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [CHAINED]


def test_two_causal_matrices_of_scores_one_after_the_other_are_two_calls():
    mixer = Mixer(lambda q, k, v: score_causally(q, q) @ (score_causally(k, k) @ v), nn.Identity())
    recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)))
    first, second = (call.map for call in recording.calls)
    torch.testing.assert_close(first.dense() @ first.values, second.values, rtol=0, atol=EQUAL)
    torch.testing.assert_close(second.dense() @ second.values, mixer.output, rtol=0, atol=EQUAL)


@pytest.mark.parametrize("name", DECAYED)
def test_scores_that_decay_are_a_recurrence_of_few_numbers(name):
    mixer = Mixer(DECAYED[name], nn.Identity())
    check_map(mixer, torch.randn(B, T, 11))
    recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)))
    mechanism = recording.map(0, kind="implicit").mechanism
    assert isinstance(mechanism, LinearRecurrence)
    assert mechanism.decay.shape == ((B, H, T, 1) if name == "of each token" else (1, H, T, 1))
    assert sum(x.nbytes for x in mechanism.tensors.values()) <= 8 * B * H * T * (2 * D + 2)
    assert not recording.notes


@pytest.mark.parametrize("name", UNDECAYED)
def test_scores_times_another_table_are_recorded_as_they_are_with_a_note(name):
    mixer = Mixer(UNDECAYED[name], nn.Identity())
    check_map(mixer, torch.randn(B, T, 11))
    recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)))
    assert "it is linear attention: its formula differs from its weights" in recording.notes[0]
    assert recording.notes[0].endswith(f"stored as they are: {B * H * T * T * 8:,} bytes")


def test_each_entry_of_a_table_of_decays_counts_also_in_rows_that_are_not_sampled():
    t, places = 70, torch.arange(70)
    decay = (0.9 ** (places.unsqueeze(-1) - places)).double().tril()
    decay[3, 1] *= 1.01
    assert 3 not in sample_evenly(decay[None, None])
    mixer = Mixer(lambda q, k, v: (q @ k.mT * decay) @ v, nn.Identity())
    check_map(mixer, torch.randn(B, t, 11))


def test_causal_scores_of_chunks_of_which_the_last_is_one_token_are_one_map():
    assert T % 4 == 1
    check_map(Mixer(attend_in_chunks, nn.Identity()), torch.randn(B, T, 11))


class Generated(nn.Module):
    """Two layers whose weights a hypernetwork generates, at least 0 as feature maps are."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start, self.embed, self.generate = start, nn.Linear(11, 11), nn.Linear(11, 2 * 11 * D)

    def forward(self, x: Tensor, adapts_first: bool) -> Tensor:
        embedded = self.embed(x)
        if self.start == "a mean that is freed":
            weights = F.softplus(self.generate(embedded.mean(1)))
        else:
            start = embedded[:, 0] if self.start == "the first token" else embedded.mean(1)
            weights = F.softplus(self.generate(start))
        first, second = weights[:, : 11 * D].view(-1, 11, D), weights[:, 11 * D :].view(-1, D, 11)
        return F.softplus(x) @ (first @ second) if adapts_first else (F.softplus(x) @ first) @ second


@pytest.mark.parametrize("start", ["a mean", "a mean that is freed", "the first token"])
@pytest.mark.parametrize("adapts_first", [False, True])
def test_layers_whose_weights_are_generated_are_no_attention(start, adapts_first):
    model = Generated(start)
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, 11), adapts_first))
    assert not recording.calls


def test_a_saved_map_is_the_same(tmp_path):
    recording, _ = record_and_compare(Mixer(divide_by_sum, F.softplus), lambda m: m(torch.randn(B, T, 11)))
    recording.save(tmp_path / "recording")
    found, loaded = (one.map(0, kind="implicit") for one in (recording, regard.load(tmp_path / "recording")))
    assert_same_mechanism(loaded, found)
    assert repr(loaded) == repr(found)


class LiteMLA(nn.Module):
    """Multi-scale linear attention on pixels, as timm's efficientvit_mit.py writes it."""

    def __init__(self, heads: int, dim: int, scale: int = 5) -> None:
        super().__init__()
        total, self.dim, self.eps = heads * dim, dim, 1e-5
        self.qkv = nn.Conv2d(total, 3 * total, 1, bias=False)
        depthwise = nn.Conv2d(3 * total, 3 * total, scale, padding=scale // 2, groups=3 * total)
        self.aggreg = nn.ModuleList([nn.Sequential(depthwise, nn.Conv2d(3 * total, 3 * total, 1, groups=3 * heads))])
        self.kernel_func, self.proj = nn.ReLU(inplace=False), nn.Conv2d(2 * total, total, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtype = v.dtype
        q, k, v = q.float(), k.float(), v.float()
        out = q @ (k.transpose(-1, -2) @ v)
        return (out[..., :-1] / (out[..., -1:] + self.eps)).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        b, _, height, width = x.shape
        scales = [self.qkv(x)]
        for op in self.aggreg:
            scales.append(op(scales[0]))
        joined = torch.cat(scales, dim=1).reshape(b, -1, 3 * self.dim, height * width).transpose(-1, -2)
        q, k, v = joined.chunk(3, dim=-1)
        q, k = self.kernel_func(q), self.kernel_func(k)
        with torch.autocast(device_type=v.device.type, enabled=False):
            out = self.attend(q, k, F.pad(v, (0, 1), mode="constant", value=1.0))
        return self.proj(out.transpose(-1, -2).reshape(b, -1, height, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_attention_of_pixels_is_recorded_in_half_precision_too(dtype):
    model = nn.Sequential(nn.Conv2d(3, 24, 1), LiteMLA(3, 8)).to(dtype)
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(2, 3, 5, 6, dtype=dtype)))
    (call,) = recording.calls
    assert call.map.shape == (2, 6, 30, 30)
    assert call.map.certificate().error < 1e-5


def shift_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ ((k.mT @ v) + 1)


def add_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ ((k.mT @ v) + (k.flip(-2).mT @ v))


def keep_a_state_of_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, outputs = q.new_zeros(B, H, D, E), []
    for n in range(0, T, 3):
        state = 0.9 * state + torch.einsum("bhnd,bhne->bhde", k[:, :, n : n + 3], v[:, :, n : n + 3])
        outputs.append(torch.einsum("bhnd,bhde->bhne", q[:, :, n : n + 3], state))
    return torch.cat(outputs, 2)


def write_keys_afterwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = q @ (k.mT @ v)
    k.mul_(2)
    return context


@pytest.mark.parametrize("form", [shift_products, add_products, keep_a_state_of_chunks, write_keys_afterwards])
def test_what_cannot_be_read_exactly_is_missed_with_its_reason(form):
    mixer = Mixer(form, lambda x: F.elu(x) + 1)
    with torch.no_grad():
        recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)), missing=True)
    assert not recording.calls
    for missed in recording.missed:
        assert missed.kernel.startswith("by hand: linear attention")
        assert "linear attention" in missed.reason or "differs" in missed.reason


def multiply_copies(k: Tensor, v: Tensor) -> Tensor:
    return k.unsqueeze(-1).expand(*k.shape, v.shape[-1]).clone().mul_(v.unsqueeze(-2))


COPIES: dict[str, Form] = {
    "sums": lambda q, k, v: q @ multiply_copies(k, v).sum(2),
    "sums, entry by entry": lambda q, k, v: (q.unsqueeze(-1) * multiply_copies(k, v).sum(2, keepdim=True)).sum(-2),
    "running sums": lambda q, k, v: (q.unsqueeze(-2) @ multiply_copies(k, v).cumsum(2)).squeeze(-2),
    "running sums, entry by entry": lambda q, k, v: (multiply_copies(k, v).cumsum(2) * q.unsqueeze(-1)).sum(-2),
    "repeated keys": lambda q, k, v: q @ (k.unsqueeze(-1).repeat(1, 1, 1, 1, E) * v.unsqueeze(-2)).sum(2),
    "expanded values": lambda q, k, v: q @ (k.unsqueeze(-1) * v.unsqueeze(-2).expand(-1, -1, -1, D, -1)).sum(2),
}


class Buckets(nn.Module):
    """Causal linear attention in which each token sees the buckets before its own. https://arxiv.org/abs/2006.16236"""

    def __init__(self, weigh: Callable[[Tensor], Tensor], has_inverse: bool) -> None:
        super().__init__()
        self.num_heads, self.weigh, self.has_inverse = H, weigh, has_inverse
        self.project = nn.Linear(11, 3 * H * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        q, k, v = (y.unflatten(2, (-1, 2)) for y in (q.softmax(-1), self.weigh(k), v))
        state = torch.einsum("bhund,bhune->bhude", k, v).cumsum(-3)
        total = k.sum(-2).cumsum(-2)
        state, total = F.pad(state, (0, 0, 0, 0, 1, 0))[:, :, :-1], F.pad(total, (0, 0, 1, 0))[:, :, :-1]
        sums = torch.einsum("bhud,bhund->bhun", total, q).clamp(min=EPS)
        if self.has_inverse:
            y = torch.einsum("bhund,bhude,bhun->bhune", q, state, 1 / sums)
        else:
            y = torch.einsum("bhund,bhude->bhune", q, state) / sums.unsqueeze(-1)
        return y.flatten(2, 3).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("has_inverse", [False, True])
@pytest.mark.parametrize("weigh", [torch.exp, lambda k: k.softmax(-2)])
def test_linear_attention_to_the_buckets_before_is_missed_as_a_whole(weigh, has_inverse):
    recording, _ = record_and_compare(Buckets(weigh, has_inverse), lambda m: m(torch.randn(B, 14, 11)), missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [CHANGED.format("pad and getitem")]


def test_two_calls_that_are_missed_for_the_same_reason_do_not_stop_the_model():
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            q, k, v = (y.unflatten(2, (-1, 2)) for y in (x.softmax(-1), x.exp(), x))
            state = torch.einsum("bhund,bhune->bhude", k, v).cumsum(-3)
            state = F.pad(state, (0, 0, 0, 0, 1, 0))[:, :, :-1]
            return [torch.einsum("bhund,bhude->bhune", q, state) for _ in range(2)]

    recording, _ = record_and_compare(Twice(), lambda m: m(torch.randn(B, H, 14, D)), missing=True)
    assert [one.reason for one in recording.missed] == [CHANGED.format("pad and getitem")]


@pytest.mark.parametrize("form", COPIES)
def test_keys_that_are_repeated_before_they_are_multiplied_with_values_are_missed(form):
    for feature_map in (F.softplus, nn.Identity()) if "running" in form else (F.softplus,):
        mixer = Mixer(COPIES[form], feature_map)
        recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)), missing=True)
        assert not recording.calls
        assert [one.reason for one in recording.missed] == [COPIED]


def gate_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return divide_by_sum(q, k, v) * v[..., :1, :].sigmoid()


def test_a_gate_of_each_channel_is_not_part_of_the_map():
    mixer = Mixer(gate_channels, F.softplus)
    recording, _ = record_and_compare(mixer, lambda m: m(torch.randn(B, T, 11)))
    torch.testing.assert_close(recording.map(0, kind="implicit").row_sums(), torch.ones(B, H, T), rtol=0, atol=EQUAL)
    assert recording.map(0, kind="implicit").certificate().error < EQUAL


class Algebra(nn.Module):
    """Products in a row that are no linear attention: of parameters, and masks."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.project, self.table = style, nn.Linear(11, D), nn.Parameter(torch.rand(D, T))

    def forward(self, x: Tensor) -> Tensor:
        v = self.project(x)
        if self.style == "a learned table":
            return self.table.relu().mT @ (self.table.relu() @ v.relu())
        assert self.style == "segments"
        segments = F.one_hot(torch.arange(T) // 3).to(x.dtype).expand(len(x), -1, -1)
        return segments @ (segments.mT @ v)


@pytest.mark.parametrize("style", ["a learned table", "segments"])
def test_other_products_in_a_row_are_not_recorded(style):
    recording, _ = record_and_compare(nn.Sequential(Algebra(style)), lambda m: m(torch.randn(B, T, 11)))
    assert not recording.calls


class GraphConvolution(nn.Module):
    """Powers of an adjacency matrix times features of nodes, as SGC, ChebNet and APPNP multiply them with dense graphs."""

    def __init__(self, style: str, adjacency: nn.Module) -> None:
        super().__init__()
        self.style, self.adjacency, self.project = style, adjacency, nn.Linear(11, E)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        a, x = self.adjacency(a), self.project(x)
        if self.style == "Chebyshev":
            return 2 * (a @ (a @ x)) - x
        if self.style == "square":
            return (a @ a) @ x.relu()
        if self.style == "of features":
            return a @ (a @ x.relu())
        start, share = x, 0.1 if self.style == "restarts" else 0
        for _ in range(3):
            x = (1 - share) * (a @ x) + share * start if share else a @ x
        return x


@pytest.mark.parametrize("style", ["powers", "Chebyshev", "restarts", "square", "of features"])
@pytest.mark.parametrize("adjacency", [nn.Identity, nn.Sigmoid])
def test_a_matrix_that_is_applied_repeatedly_is_not_recorded(style, adjacency):
    model = GraphConvolution(style, adjacency())
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, 11), torch.rand(T, T)))
    assert not recording.calls


class Resize(nn.Module):
    def forward(self, image: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return rows @ (image @ columns.mT)


def test_arguments_that_nothing_has_made_are_no_feature_maps():
    recording, _ = record_and_compare(Resize(), lambda m: m(torch.rand(B, 3, T, 17), torch.rand(D, T), torch.rand(E, 17)))
    assert not recording.calls


class Rotations(nn.Module):
    """Rotations in a row, whose matrices are joined of squares and of products."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(11, 6)

    def forward(self, x: Tensor) -> Tensor:
        pairs = [pair.unbind(-1) for pair in self.project(x).unflatten(-1, (3, 2)).unbind(-2)]
        one, two, three = (
            torch.stack([a**2 - b**2, -2 * a * b, 2 * a * b, a**2 - b**2], -1).unflatten(-1, (2, 2)) for a, b in pairs
        )
        return (one @ two) @ three


def test_joins_of_feature_maps_with_others_are_no_feature_maps():
    recording, _ = record_and_compare(Rotations(), lambda m: m(torch.randn(B, 11)))
    assert not recording.calls


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q @ (k.mT @ v)


def test_feature_maps_may_be_computed_around_the_module_that_multiplies():
    check_map(Mixer(Inner(), F.softplus), torch.randn(B, T, 11))


def add_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = q @ (k.mT @ v)
    context += 1
    return context


def test_an_output_that_is_written_into_afterwards_is_recorded_as_it_was():
    recording, _ = record_and_compare(Mixer(add_in_place, F.softplus), lambda m: m(torch.randn(B, T, 11)))
    assert recording.map(0, kind="implicit").certificate().error < EQUAL


@pytest.mark.parametrize("shape", [(0, T), (B, 0)])
def test_empty_inputs_are_not_missed(shape):
    recording, _ = record_and_compare(Mixer(divide_by_sum, F.softplus), lambda m: m(torch.randn(*shape, 11)))
    assert not recording.calls


def divide_by_keyword(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.div(input=q @ (k.mT @ v), other=(q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True))


def add_products_by_keyword(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = q @ (k.mT @ v)
    return torch.addcmul(input=v, tensor1=context, tensor2=1 / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True))


def multiply_by_cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = q @ (k.mT @ v)
    return (1 / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)).type_as(context) * context


@pytest.mark.parametrize("form", [divide_by_keyword, add_products_by_keyword, multiply_by_cast])
def test_a_normalizer_by_keyword_or_with_the_dtype_of_the_output_is_followed(form):
    recording, _ = record_and_compare(Mixer(form, F.softplus), lambda m: m(torch.randn(B, T, 11)))
    torch.testing.assert_close(recording.map(0, kind="implicit").row_sums(), torch.ones(B, H, T), rtol=0, atol=EQUAL)


class DividedOutside(nn.Module):
    """A module that divides what the one that attends has returned."""

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x) / (2 + x.square().sum(-1, keepdim=True))


@pytest.mark.parametrize("form", [divide_by_sum, multiply_scores, sum_up_entries])
def test_rows_times_values_are_the_output_of_the_module_that_attends_not_of_its_caller(form):
    mixer = Mixer(form, F.softplus)
    recording, _ = record_and_compare(DividedOutside(mixer), lambda m: m(torch.randn(B, T, 11)))
    found = recording.map(0, kind="implicit")
    assert [call.name for call in recording.calls] == ["mixer"]
    torch.testing.assert_close(found.dense() @ found.values, mixer.output, rtol=0, atol=EQUAL)


class FavorAttention(nn.Module):
    """Positive random features, as performer-pytorch writes them. https://arxiv.org/abs/2009.14794"""

    def __init__(self, is_chunked: bool) -> None:
        super().__init__()
        self.is_chunked, self.to_qkv, self.to_out = is_chunked, nn.Linear(11, 3 * D), nn.Linear(D, 11)
        self.register_buffer("projection_matrix", torch.randn(3, D))

    def map_features(self, data: Tensor, dims: tuple[int, ...]) -> Tensor:
        projection = self.projection_matrix.expand(len(data), -1, -1).type_as(data)  # type: ignore[operator]
        products = torch.einsum("...id,...jd->...ij", D**-0.25 * data, projection)
        half_square = (data**2).sum(dim=-1, keepdim=True) / 2 * D**-0.5
        return 3**-0.5 * ((products - half_square - products.amax(dim=dims, keepdim=True).detach()).exp() + 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k = self.map_features(q, (-1,)), self.map_features(k, (-1, -2))
        if not self.is_chunked:
            return self.to_out(multiply_by_einsum_of_factors_first(q, k, v))
        keys, products, outputs = torch.zeros(()), torch.zeros(()), []
        for one, key, value in zip(*(one.chunk(T, dim=-2) for one in (q, k, v)), strict=True):
            sums = keys + key.cumsum(dim=-2)
            inverse = 1.0 / torch.einsum("...nd,...nd->...n", one, sums.type_as(one) + 1e-6)
            running = products + torch.einsum("...nd,...ne->...nde", key, value).cumsum(dim=-3)
            outputs.append(torch.einsum("...nde,...nd,...n->...ne", running, one, inverse))
            keys, products = sums[..., -1:, :], running[..., -1:, :, :]
        return self.to_out(torch.cat(outputs, dim=-2))


@pytest.mark.parametrize("is_chunked", [False, True])
def test_random_features_are_no_keys(is_chunked):
    recording, _ = record_and_compare(nn.Sequential(FavorAttention(is_chunked)), lambda m: m(torch.randn(B, T, 11)))
    (call,) = recording.calls
    assert call.map.shape == (B, 1, T, T)
    assert call.map.certificate().error < EQUAL

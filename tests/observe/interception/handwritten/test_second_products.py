"""Weights that are multiplied with more than the recorded values: a note says so, and an intervention warns."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from observe.interception.handwritten.handwritten_attention import B, C, D, H, Own, T, scores
from observe.recording_checks import record_and_compare
from regard.observe.interception.handwritten.scores.score_formula import STORED
from regard.observe.interception.handwritten.scores.second_products import MULTIPLIED

pytestmark = pytest.mark.usefixtures("in_float64")


class Relative(nn.Module):
    """Vectors of pairs of positions, and of distances, that belong to a model."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.distances = nn.Parameter(torch.randn(T, T, D)), nn.Parameter(torch.randn(2 * T - 1, D))


def multiply_pairs(weights: Tensor, relative: Relative) -> Tensor:
    """Multiply weights with a vector of each pair of positions, as Shaw et al. do."""
    return torch.einsum("bhqk,qkd->bhqd", weights, relative.pairs)


def multiply_distances(weights: Tensor, relative: Relative) -> Tensor:
    """Shift each row of weights to its distances by padding and views, as VITS does, and multiply a vector of each."""
    flat = functional.pad(functional.pad(weights, (0, T - 1)).flatten(-2), (T, 0))
    return flat.unflatten(-1, (T, 2 * T))[..., 1:] @ relative.distances


TWO_PRODUCTS = {
    "two values": lambda w, k, v, r: w @ v + w @ k,
    "transposed": lambda w, k, v, r: w @ v + w.mT @ k,
    "relative values": lambda w, k, v, r: w @ v + multiply_pairs(w, r),
    "relative values, entry by entry": lambda w, k, v, r: w @ v + (w.unsqueeze(-1) * r.pairs).sum(-2),
    "distances first": lambda w, k, v, r: multiply_distances(w, r) + w @ v,
    "two steps": lambda w, k, v, r: w @ (w @ v),
}
ONE_PRODUCT = {
    "alone": lambda w, k, v, r: w @ v,
    "beside their sums": lambda w, k, v, r: (w @ v) / (w @ torch.ones_like(v[..., :1])),
    "beside their entropy": lambda w, k, v, r: (w @ v) + 0 * (w * w.log()).sum(-1, keepdim=True),
    "beside their mean": lambda w, k, v, r: (w @ v) + 0 * w.mean(1).amax(),
    "beside a penalty of distances": lambda w, k, v, r: (w @ v) + 0 * (w * r.pairs[..., 0]).sum(),
    "by blocks of queries": lambda w, k, v, r: torch.cat([rows @ v for rows in w.split(2, -2)], -2),
}


def build_own(form, activate=lambda s: s.softmax(-1)) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(Own((lambda q, k, v, r: form(activate(scores(q, k)), k, v, r), Relative())))


def run(model: nn.Module):
    return model(torch.randn(B, T, C))


@pytest.mark.parametrize("form", TWO_PRODUCTS.values(), ids=TWO_PRODUCTS)
def test_a_second_product_of_weights_has_a_note_and_an_intervention_that_leaves_it_unchanged_warns(form):
    for activate in (torch.sigmoid, lambda s: s.softmax(-1)):
        model = build_own(form, activate)
        recording, _ = record_and_compare(model, run)
        (note,) = recording.notes
        assert len(recording.calls) == 1
        assert note.startswith(f"0: {MULTIPLIED.split('{')[0]}")
    told = pytest.warns(UserWarning, match="A part of the output of 0 was not changed: its weights")
    with torch.no_grad(), told, regard.intervene(model, regard.KnockOut(layer=0, head=1)):
        run(model)


@pytest.mark.parametrize("form", ONE_PRODUCT.values(), ids=ONE_PRODUCT)
def test_any_other_use_of_weights_has_no_note(form):
    model = build_own(form)
    recording, _ = record_and_compare(model, run)
    assert not any(MULTIPLIED.split("{")[0] in note for note in recording.notes)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with regard.intervene(model, regard.KnockOut(layer=0)):
            run(model)


def test_an_intervention_in_another_layer_does_not_warn():
    model = nn.Sequential(build_own(ONE_PRODUCT["alone"]), Merge(), build_own(TWO_PRODUCTS["two values"]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with regard.intervene(model, regard.KnockOut(layer=0)):
            run(model)


class Merge(nn.Module):
    """Heads side by side."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)


class Helper(nn.Module):
    """The product of weights with values, without parameters, that returns the weights too."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = scores(q, k).softmax(-1)
        return weights @ v, weights


class Heads(nn.Module):
    """Attention by a helper, which uses the weights again or returns them."""

    def __init__(self, uses_again: bool) -> None:
        super().__init__()
        self.project, self.helper, self.relative = nn.Linear(C, 3 * C), Helper(), Relative()
        self.uses_again = uses_again

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        context, weights = self.helper(q, k, v)
        return (context + multiply_pairs(weights, self.relative) if self.uses_again else context), weights


class WithLoss(nn.Module):
    """A model that computes a loss of the weights that its attention returns: of the distance that they look at."""

    def __init__(self, uses_again: bool) -> None:
        super().__init__()
        self.attention = Heads(uses_again)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        context, weights = self.attention(x)
        return context, (weights @ torch.arange(T, dtype=x.dtype)).square().mean()


@pytest.mark.parametrize("uses_again", [False, True])
def test_a_helper_without_parameters_belongs_to_its_caller_and_a_loss_of_the_model_does_not(uses_again):
    recording, _ = record_and_compare(WithLoss(uses_again), run)
    assert [note.startswith(f"attention.helper: {MULTIPLIED.split('{')[0]}") for note in recording.notes] == [True] * uses_again


def test_relative_values_of_vits_have_a_note_and_an_intervention_warns():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.VitsConfig(
        vocab_size=38, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, ffn_dim=36, flow_size=16, window_size=4
    )
    encoder = transformers.models.vits.modeling_vits.VitsEncoder(config).double().eval()

    def encode(model: nn.Module) -> Tensor:
        x = torch.randn(2, 13, 24)
        return model(x, torch.ones(2, 13, 1), attention_mask=torch.ones(2, 13))[0]

    with torch.no_grad():
        recording, _ = record_and_compare(encoder, encode)
        notes = [note.split(": ", 1) for note in recording.notes]
        stored = STORED.format(2 * 4 * 13 * 13 * 8)  # its relative keys are parameters
        assert [name for name, note in notes if note == stored] == ["layers.0.attention", "layers.1.attention"]
        assert [name for name, note in notes if note != stored] == ["layers.0.attention", "layers.1.attention"]
        told = pytest.warns(UserWarning, match="A part of the output of layers.1.attention was not changed")
        with told, regard.intervene(encoder, regard.KnockOut(layer=1)):
            encode(encoder)


class Contacts(nn.Module):
    """Two layers, contacts of tokens from the symmetric weights of both, without those of padding."""

    def __init__(self, join) -> None:
        super().__init__()
        self.layers, self.join, self.regression = nn.ModuleList(Heads(False) for _ in range(2)), join, nn.Linear(2 * H, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = []
        for layer in self.layers:
            context, own = layer(x)
            x, weights = context.transpose(1, 2).flatten(2), [*weights, own]
        real = (x[..., 0] > 0).to(x)
        joined = self.join(weights) * (real[:, :, None] * real[:, None])[:, None]
        return x, self.regression((joined + joined.mT).movedim(1, -1)).squeeze(-1)


@pytest.mark.parametrize("join", [lambda weights: torch.stack(weights, 1).flatten(1, 2), lambda weights: torch.cat(weights, 1)])
def test_weights_of_layers_that_are_joined_and_masked_are_no_products_with_values(join):
    recording, _ = record_and_compare(Contacts(join), lambda model: model(torch.randn(B, T, C)))
    assert [call.map.shape for call in recording.calls] == [(B, H, T, T)] * 2
    assert not recording.notes


def test_a_sum_of_weights_over_heads_in_their_own_layer_is_no_attention():
    class RankingAttention(nn.Module):
        """Weights times the norms of values, summed over the heads, rank tokens. https://arxiv.org/abs/2111.15667"""

        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.qkv = 3, nn.Linear(12, 36)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT / 2).softmax(-1)
            ranks = torch.einsum("b h n, b h n -> b n", weights[..., 0, 1:], v[..., 1:, :].norm(dim=-1))
            return (weights @ v).transpose(1, 2).flatten(2), ranks

    recording, _ = record_and_compare(nn.Sequential(RankingAttention()), lambda m: m(torch.randn(2, 7, 12)))
    assert [call.map.shape for call in recording.calls] == [(2, 3, 7, 7)]

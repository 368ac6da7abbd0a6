"""Scores that a table of decays for each pair of tokens multiplies are recorded as the matrix of their definition."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare
from regard.observe.interception.handwritten.linear.chunked_attention import CHUNKS

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, T, D, E = 2, 3, 7, 5, 11
Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of q, k (b, h, t, d), v (b, h, t, e), logs of decays (b, h, t)


def weigh_pairs(logs: Tensor) -> Tensor:
    """exp of the sum of the logs of the tokens j + 1 to i, 0 for later ones: (..., i, j)."""
    sums = logs.cumsum(-1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).exp()


def weigh_segments(logs: Tensor) -> Tensor:
    """The same by the stable sums of segments of Mamba-2."""
    t = logs.shape[-1]
    sums = logs.unsqueeze(-1).expand(*logs.shape, t).masked_fill(~torch.ones(t, t).tril(-1).bool(), 0).cumsum(-2)
    return sums.masked_fill(~torch.ones(t, t).tril().bool(), -torch.inf).exp()


def multiply_four(q: Tensor, k: Tensor, v: Tensor, logs: Tensor) -> Tensor:
    return torch.einsum("bhin,bhjn,bhij,bhjd->bhid", q, k, weigh_pairs(logs), v)


def multiply_four_by_segments(q: Tensor, k: Tensor, v: Tensor, logs: Tensor) -> Tensor:
    return torch.einsum("bhjd,bhij,bhjn,bhin->bhid", v, weigh_segments(logs), k, q)


def multiply_steps(q: Tensor, k: Tensor, v: Tensor, logs: Tensor) -> Tensor:
    return (q @ k.mT * weigh_segments(logs)) @ v


def multiply_scores_with_values(q: Tensor, k: Tensor, v: Tensor, logs: Tensor) -> Tensor:
    return torch.einsum("bhij,bhij,bhjd->bhid", q @ k.mT, weigh_pairs(logs), v)


def multiply_scores_alone(q: Tensor, k: Tensor, v: Tensor, logs: Tensor) -> Tensor:
    return torch.einsum("bhin,bhjn,bhij->bhij", q, k, weigh_pairs(logs)) @ v


def multiply_entries(q: Tensor, k: Tensor, v: Tensor, logs: Tensor) -> Tensor:
    scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) * weigh_segments(logs)
    return (scores.unsqueeze(-1) * v.unsqueeze(2)).sum(3)


def multiply_in_one_chunk(q: Tensor, k: Tensor, v: Tensor, logs: Tensor) -> Tensor:
    """As ssd_minimal_discrete, with all tokens in a chunk."""
    c, b, x = (y.transpose(1, 2).unsqueeze(1) for y in (q, k, v))
    y = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, weigh_segments(logs).unsqueeze(2), x)
    return y.squeeze(1).transpose(1, 2)


FORMS: list[Form] = [
    *(multiply_four, multiply_four_by_segments, multiply_steps, multiply_scores_with_values, multiply_scores_alone),
    *(multiply_entries, multiply_in_one_chunk),
]


class Mixer(nn.Module):
    def __init__(self, form: Form, channels: int = 13) -> None:
        super().__init__()
        self.form = form
        self.features, self.values, self.decays = (nn.Linear(channels, n) for n in (2 * H * D, H * E, H))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (q, k), v = self.features(x).unflatten(-1, (2, H, D)).permute(2, 0, 3, 1, 4), self.values(x).unflatten(-1, (H, E))
        return q, k, v.transpose(1, 2), -F.softplus(self.decays(x)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(*self.project(x)).transpose(1, 2).flatten(2)


def define_matrix(q: Tensor, k: Tensor, logs: Tensor) -> Tensor:
    """The matrix (b, h, t, t), entry by entry."""
    matrix = torch.zeros(B, H, T, T)
    for i in range(T):
        for j in range(i + 1):
            matrix[:, :, i, j] = (q[:, :, i] * k[:, :, j]).sum(-1) * logs[:, :, j + 1 : i + 1].sum(-1).exp()
    return matrix


@pytest.mark.parametrize("form", FORMS)
def test_the_map_of_decayed_scores_is_the_matrix_of_its_definition(form):
    model, x = nn.Sequential(Mixer(form)), torch.randn(B, T, 13)
    recording, output = record_and_compare(model, lambda model: model(x))
    assert [call.name for call in recording.calls] == ["0"]
    with torch.no_grad():
        q, k, v, logs = model[0].project(x)
        expected = define_matrix(q, k, logs)
    found = recording.map(0, kind="implicit")
    assert (found.dense() - expected).abs().max() < EQUAL * expected.abs().max()
    assert ((found @ v).transpose(1, 2).flatten(2) - output).abs().max() < EQUAL * output.abs().max()
    assert found.certificate().error < EQUAL


class Selective(nn.Module):
    """The quadratic form with a time step for each token beside the decays, and one head, https://arxiv.org/abs/2405.21060."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(13, 2 * D + E + 1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        b, c, v, step = self.project(x).split([D, D, E, 1], -1)
        return c, b, v, F.softplus(step.squeeze(-1))

    def forward(self, x: Tensor) -> Tensor:
        c, b, v, step = self.split(x)
        return torch.einsum("bin,bjn,bij,bj,bjd->bid", c, b, weigh_segments(-step), step, v)


def test_a_factor_of_each_key_beside_the_decays_is_one_of_the_entries():
    model, x = nn.Sequential(Selective()), torch.randn(B, T, 13)
    recording, output = record_and_compare(model, lambda model: model(x))
    with torch.no_grad():
        c, b, v, step = model[0].split(x)
        sums = step.cumsum(-1)
        expected = ((c @ b.mT) * (sums.unsqueeze(-2) - sums.unsqueeze(-1)).exp() * step.unsqueeze(-2)).tril()
    found = recording.map(0, kind="implicit")
    assert (found.dense()[:, 0] - expected).abs().max() < EQUAL * expected.abs().max()
    assert ((found @ v.unsqueeze(1))[:, 0] - output).abs().max() < EQUAL * output.abs().max()


class Chunks(Mixer):
    """As ssd_minimal_discrete, by chunks of 5 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, logs = (y.unflatten(2, (-1, 5)).transpose(1, 2) for y in self.project(x))
        return torch.einsum(
            "bclhn,bcshn,bhcls,bcshp->bclhp",
            *(q.transpose(2, 3), k.transpose(2, 3), weigh_segments(logs.transpose(1, 2)), v.transpose(2, 3)),
        )


def test_decayed_scores_of_chunks_are_missed():
    model, x = nn.Sequential(Chunks(multiply_four)), torch.randn(B, 15, 13)
    recording, _ = record_and_compare(model, lambda model: model(x), missing=True)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [("0", CHUNKS)]


class Others(nn.Module):
    """Einsums of several tensors that are no attention with decays."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.project, self.w = style, nn.Linear(13, 4 * D), nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.project(x).chunk(4, -1)
        if self.style == "forms":
            return torch.einsum("bin,nm,bjm->bij", a, self.w, b).sum(-1)
        if self.style == "factors":
            return torch.einsum("bin,bin,bin,bin->bin", a, b, c, d)
        if self.style == "trilinear":
            return torch.einsum("bin,bjn,bkn->b", a, b, c)
        return torch.einsum("bid,de,df,bie->bif", a, self.w.tril(), self.w, b)


@pytest.mark.parametrize("style", ["forms", "factors", "trilinear", "a triangular weight"])
def test_other_einsums_of_several_tensors_are_neither_recorded_nor_missed(style):
    recording, _ = record_and_compare(nn.Sequential(Others(style)), lambda model: model(torch.randn(B, T, 13)))
    assert not recording.calls

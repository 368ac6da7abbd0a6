"""Terms of relative positions in scores written out by hand are stored by the vectors of tokens and distances."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_stored_bias
from regard.map.distance_products import DistanceProducts
from regard.observe import record

B, H, D, REACH = 2, 3, 5, 6


class Relative(nn.Module):
    """Attention with terms of relative positions, of one form, under a mask or none, with its own weights kept."""

    def __init__(self, form: str, mask: str) -> None:
        super().__init__()
        self.form, self.mask = form, mask
        self.project, self.table = nn.Linear(H * D, 3 * H * D), nn.Embedding(2 * REACH + 1, D)
        self.positions = nn.Linear(H * D, H * D)
        self.u = nn.Parameter(torch.randn(H, 1, D))
        self.window = nn.Parameter(torch.randn(5, D))

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        scores = getattr(self, self.form.replace(" ", "_"))(q, k, t)
        if self.mask == "causal":
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        elif self.mask == "padded":
            scores = scores + torch.zeros(B, 1, 1, t).masked_fill_(torch.arange(t) >= t - 3, -1e30)
        self.weights = scores.softmax(-1)
        return (self.weights @ v).transpose(1, 2).flatten(2)

    def project_distances(self, count: int) -> Tensor:
        """The keys (h, n, d) of distances, which decrease."""
        waves = torch.outer(torch.arange(count, 0, -1.0), 0.1 ** torch.arange(H * D)).sin()
        return self.positions(waves.to(self.u.dtype)).unflatten(-1, (H, D)).transpose(0, 1)

    def find_distance(self, t: int) -> Tensor:
        """The clipped distance (t, t) of each key from each query, from 0."""
        return (torch.arange(t) - torch.arange(t).unsqueeze(-1)).clamp(-REACH, REACH) + REACH

    def gathered(self, q: Tensor, k: Tensor, t: int) -> Tensor:
        """DeBERTa's: products of queries with positions, and of keys with positions, that an index picks after them."""
        positions, distance = self.project_distances(2 * REACH + 1), self.find_distance(t)
        of_queries = torch.gather(q @ positions.mT, -1, distance.expand(B, H, t, t))
        of_keys = torch.gather(k @ positions.mT, -1, distance.T.expand(B, H, t, t)).mT
        relative = 0
        relative += of_queries / 3
        relative += of_keys / 2
        return (q @ k.mT + relative) / D**0.5

    def of_keys_alone(self, q: Tensor, k: Tensor, t: int) -> Tensor:
        """Those of keys alone, taken away from the scores."""
        positions, distance = self.project_distances(2 * REACH + 1), self.find_distance(t)
        return q @ k.mT - torch.take_along_dim(k @ positions.mT, distance.T.expand(B, H, t, t), -1).mT / 2

    def shifted(self, q: Tensor, k: Tensor, t: int) -> Tensor:
        """XLNet's: products with 2 t positions, of which a view in another shape shifts each row by one."""
        of_positions = (q + self.u) @ self.project_distances(2 * t).mT
        x = of_positions.reshape(B, H, 2 * t, t)[:, :, 1:].reshape(B, H, t, 2 * t - 1)
        return (q @ k.mT + torch.index_select(x, 3, torch.arange(t))) / D**0.5

    def padded(self, q: Tensor, k: Tensor, t: int) -> Tensor:
        """Conformer's: products with 2 t - 1 positions behind a column of zeros, in another shape."""
        of_positions = torch.matmul(q + self.u, self.project_distances(2 * t - 1).mT)
        x = torch.cat([torch.zeros(B, H, t, 1), of_positions], -1).view(B, H, 2 * t, t)
        x = x[:, :, 1:].view(B, H, t, 2 * t - 1)[..., :t]
        return (q @ k.mT + x) / D**0.5

    def shifted_below(self, q: Tensor, k: Tensor, t: int) -> Tensor:
        """Transformer-XL's: as Conformer's, of t positions, so that later keys have products of other queries, and zeros."""
        of_positions = torch.einsum("bhid,hjd->ijbh", q + self.u, self.project_distances(t))
        x = torch.cat([torch.zeros(t, 1, B, H), of_positions], 1).view(t + 1, t, B, H)[1:].view_as(of_positions)
        return ((torch.einsum("bhid,bhjd->ijbh", q, k) + x) / D**0.5).permute(2, 3, 0, 1)

    def picked_before(self, q: Tensor, k: Tensor, t: int) -> Tensor:
        """Shaw's: products with an embedding for each pair of a query and a key."""
        embedded = self.table(self.find_distance(t))
        return (q @ k.mT + torch.einsum("bhqd,qkd->bhqk", q, embedded)) / D**0.5

    def picked_for_both(self, q: Tensor, k: Tensor, t: int) -> Tensor:
        """Those of BERT with relative_key_query."""
        embedded = self.table(self.find_distance(t))
        of_queries = torch.einsum("bhqd,qkd->bhqk", q, embedded)
        of_keys = torch.einsum("bhkd,qkd->bhqk", k, embedded)
        return (q @ k.mT + of_queries + of_keys) / D**0.5

    def windowed(self, q: Tensor, k: Tensor, t: int) -> Tensor:
        """VITS's: products with bare parameters of the distances in a window, shifted as Conformer's, and 0 beside it."""
        table = F.pad(self.window, (0, 0, t - 3, t - 3))
        of_positions = F.pad(q @ table.mT, (0, 1)).flatten(2)
        x = F.pad(of_positions, (0, t - 1)).view(B, H, t + 1, 2 * t - 1)[:, :, :t, t - 1 :]
        return (q @ k.mT + x) / D**0.5

    def shuffled(self, q: Tensor, k: Tensor, t: int) -> Tensor:
        """An index that depends on more than the distance."""
        places = torch.randperm(t, generator=torch.Generator().manual_seed(t))
        distance = self.find_distance(t)[:, places]
        return q @ k.mT + torch.gather(q @ self.project_distances(2 * REACH + 1).mT, -1, distance.expand(B, H, t, t))


MASKS = ["none", "causal", "padded"]
FORMS = ["gathered", "of keys alone", "shifted", "padded", "picked before", "picked for both", "windowed"]


@pytest.mark.parametrize(("form", "mask"), [*itertools.product(FORMS, MASKS), ("shifted below", "causal")])
def test_terms_of_positions_take_memory_that_grows_with_the_length(form, mask, in_float64, tmp_path):
    torch.manual_seed(7)
    model, kept = nn.Sequential(Relative(form, mask)), []
    for t in (41, 82):
        x = torch.randn(B, t, H * D)
        kept.append(record_stored_bias(model, x, DistanceProducts, tmp_path).map(0).nbytes)
    assert kept[1] <= 2 * kept[0] + 8 * (H * D + 1)  # there are 2 t - 1 distances


@pytest.mark.parametrize("form", FORMS)
def test_selected_heads_have_their_terms(form, in_float64):
    torch.manual_seed(7)
    model = nn.Sequential(Relative(form, "causal"))
    with torch.no_grad(), record(model, heads=[2, 0]) as recording:
        model(torch.randn(B, 23, H * D))
    torch.testing.assert_close(recording.map(0).dense(), model[0].weights[:, [2, 0]], rtol=0, atol=EQUAL)
    assert isinstance(recording.map(0).planes.request.bias, DistanceProducts)


@pytest.mark.parametrize("form", ["shuffled", "shifted below"])
def test_a_term_of_more_than_the_distance_is_a_bias_as_it_is(form, in_float64):
    torch.manual_seed(7)
    model = nn.Sequential(Relative(form, "none"))
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(B, 19, H * D))
    torch.testing.assert_close(recording.map(0).dense(), model[0].weights, rtol=0, atol=EQUAL)
    size = B * H * 19 * 19 * 8
    assert recording.notes == [f"0: what is added to its scores is stored as it is, for each query and key: {size:,} bytes"]

"""Biases of image rows and columns, and of segments, are stored by numbers of groups of keys, and decays by one of each key."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from observe.recording_checks import EQUAL, record_stored_bias
from regard.map.distance_products import DistanceProducts
from regard.map.grouped_bias import GroupedBias
from regard.observe import record

B, H, D, COLUMNS, MOST = 2, 3, 5, 11, 32


class Decomposed(nn.Module):
    """Attention of an image with relative positions of rows and columns, as SAM's and MViT's, with its own weights kept."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.project = form, nn.Linear(H * D, 3 * H * D)
        self.of_rows, self.of_columns = (nn.Parameter(torch.randn(2 * MOST - 1, D)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = int(self.form == "class token")
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        image = q[:, :, first:].unflatten(2, (-1, COLUMNS))
        rows, columns = (table[self.find_distances(n)] for table, n in zip(self.tables, image.shape[2:4], strict=True))
        of_rows = torch.einsum("bhyxd,yid->bhyxi", image, rows)
        of_columns = torch.einsum("bhyxd,xjd->bhyxj", image, columns)
        bias = (of_rows.unsqueeze(-1) + of_columns.unsqueeze(-2)).flatten(4).flatten(2, 3)
        self.weights = (D**-0.5 * q @ k.mT + F.pad(bias, (first, 0, first, 0))).softmax(-1)
        if self.form == "kernel":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        return (self.weights @ v).transpose(1, 2).flatten(2)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """The tables of the distances of rows and of columns."""
        return self.of_rows, self.of_columns

    def find_distances(self, n: int) -> Tensor:
        """The distance (n, n) of each key from each query, from 0."""
        return torch.arange(n).unsqueeze(-1) - torch.arange(n) + MOST - 1


@pytest.mark.parametrize("form", ["scores", "class token", "kernel"])
def test_rows_and_columns_take_less_than_all_pairs(form, in_float64, tmp_path):
    torch.manual_seed(7)
    model, kept = nn.Sequential(Decomposed(form)), []
    for height in (13, 26):
        x = torch.randn(B, height * COLUMNS + (form == "class token"), H * D)
        recording = record_stored_bias(model, x, GroupedBias, tmp_path)
        kept.append(recording.map(0).nbytes - B * H * height * COLUMNS * height * 8)  # of rows: their number, for each query
    assert kept[1] <= 2 * kept[0]


class Segments(nn.Module):
    """XLNet's scores: products with distances, and a number of each query for keys of its segment and for others."""

    def __init__(self, has_distances: bool) -> None:
        super().__init__()
        self.project, self.table = nn.Linear(H * D, 3 * H * D), nn.Embedding(4 * MOST, D)
        self.segments, self.has_distances = nn.Parameter(torch.randn(2, H, D)), has_distances

    def forward(self, x: Tensor, segment: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        t, is_other = x.shape[1], (segment.unsqueeze(-1) != segment.unsqueeze(1)).long()
        scores = q @ k.mT
        if self.has_distances:
            embedded = self.table(torch.arange(t) - torch.arange(t).unsqueeze(-1) + t)
            scores = scores + torch.einsum("bhqd,qkd->bhqk", q, embedded)
        of_segments = torch.einsum("bhqd,shd->qbhs", q, self.segments)
        of_pairs = torch.einsum("bqks,qbhs->bhqk", F.one_hot(is_other, 2).to(q.dtype), of_segments)
        self.weights = ((scores + of_pairs) / D**0.5).softmax(-1)
        return (self.weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("has_distances", [False, True])
def test_segments_take_memory_that_grows_with_the_length(has_distances, in_float64, tmp_path):
    torch.manual_seed(7)
    model, kept = Segments(has_distances), []
    for t in (23, 46):
        x, segment = torch.randn(B, t, H * D), torch.stack([torch.arange(t) > 7, torch.arange(t) > 15]).long()
        with torch.no_grad(), record(model) as recording:
            model(x, segment)
        recording.save(tmp_path / "recording")
        for one in (recording, regard.load(tmp_path / "recording")):
            assert isinstance(one.map(0).planes.request.bias, DistanceProducts if has_distances else GroupedBias)
            torch.testing.assert_close(one.map(0).dense(), model.weights, rtol=0, atol=EQUAL)
        kept.append(recording.map(0).nbytes)
        assert not recording.notes
        assert not recording.missed
    assert kept[1] <= 2 * kept[0] + 8 * (H * D + 1)


class Forgetting(nn.Module):
    """Scores with decays that are added up from each key to its query. https://arxiv.org/abs/2503.02130"""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.project, self.gate = form, nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        total = F.logsigmoid(self.gate(x)).mT.cumsum(-1)
        decay, scores = total.unsqueeze(-1) - total.unsqueeze(-2), q @ k.mT / D**0.5
        if self.form == "hidden before":
            self.weights = (scores + decay.masked_fill(later, -torch.inf)).softmax(-1)
        else:
            self.weights = (scores + decay).masked_fill(later, -torch.inf).softmax(-1)
        return (self.weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("form", ["hidden before", "hidden after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decays_that_are_added_up_are_stored_by_key(form, dtype):
    torch.manual_seed(7)
    model, kept = nn.Sequential(Forgetting(form)).to(dtype), []
    for t in (37, 74):
        with torch.no_grad(), record(model) as recording:
            model(torch.randn(B, t, H * D, dtype=dtype))
        bias = recording.map(0).planes.request.bias
        assert bias.shape == (B, H, 1, t)
        torch.testing.assert_close(recording.map(0).dense(), model[0].weights, rtol=0, atol=64 * torch.finfo(dtype).eps)
        kept.append(recording.map(0).nbytes)
        assert not recording.notes
    assert kept[1] == 2 * kept[0]


def test_decays_of_each_pair_are_stored_as_they_are(in_float64):
    class Apart(Forgetting):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            bias = self.gate(x).mT.cumsum(-1)
            bias = (
                bias.unsqueeze(-1) - bias.unsqueeze(-2) + torch.arange(x.shape[1]).sin().outer(torch.arange(x.shape[1]).cos())
            )
            self.weights = (q @ k.mT + bias).softmax(-1)
            return (self.weights @ v).transpose(1, 2).flatten(2)

    torch.manual_seed(7)
    model = nn.Sequential(Apart("apart"))
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(B, 37, H * D))
    torch.testing.assert_close(recording.map(0).dense(), model[0].weights, rtol=0, atol=EQUAL)
    assert ["is stored as it is" in note for note in recording.notes] == [True]


def test_queries_that_hide_all_keys_leave_the_bias_of_others_as_it_is():
    class Biased(Forgetting):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            bias = torch.randn(H, x.shape[1], x.shape[1])
            bias[:, 5] = -1e9
            self.weights = (q @ k.mT / D**0.5 + bias).softmax(-1)
            return (self.weights @ v).transpose(1, 2).flatten(2)

    torch.manual_seed(7)
    model = nn.Sequential(Biased("biased"))
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(B, 37, H * D))
    assert recording.map(0).planes.request.q.shape[3] == D  # not the weights as they are
    torch.testing.assert_close(recording.map(0).dense(), model[0].weights, rtol=0, atol=1e-6)

"""What is added to scores is stored by vectors of tokens, distances, offsets, groups or keys, in memory of the length."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare, record_stored_bias
from regard.map.distance_products import DistanceProducts
from regard.map.grid_bias import GridBias
from regard.map.grouped_bias import GroupedBias
from regard.observe import record

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, D, REACH, ROWS, COLUMNS, WIDE, MOST = 2, 3, 5, 6, 8, 9, 11, 48
C = H * D
SPANS = (1, 2, 4, 8)


class Biased(nn.Module):
    """Attention whose scores a form makes of q, k (b, h, t, d) and x; `weights` are those of the last forward."""

    def __init__(self, form: str, mask: str = "none") -> None:
        super().__init__()
        self.form, self.mask, self.project = form.replace(" ", "_"), mask, nn.Linear(C, 3 * C)
        self.table, self.positions, self.u = nn.Embedding(2 * REACH + 1, D), nn.Linear(C, C), nn.Parameter(torch.randn(H, 1, D))
        self.window, self.offsets = nn.Parameter(torch.randn(5, D)), nn.Parameter(torch.randn(2, 2 * MOST - 1, D))
        self.spans = nn.Linear(C, H * (len(SPANS) + 1))
        self.segments, self.distances, self.gate = (
            nn.Parameter(torch.randn(2, H, D)),
            nn.Embedding(2 * MOST, D),
            nn.Linear(C, H),
        )

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        s = getattr(self, self.form)(q, k, x)
        if self.mask == "causal":
            s = s.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        elif self.mask == "padded":
            s = s + torch.zeros(B, 1, 1, t).masked_fill_(torch.arange(t) >= t - 3, -1e30)
        self.weights = s.softmax(-1)
        if self.form == "of_a_kernel":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=s - q @ k.mT * D**-0.5).transpose(1, 2).flatten(2)
        return (self.weights @ v).transpose(1, 2).flatten(2)

    # Terms of distances.

    def project_distances(self, count: int) -> Tensor:
        """The keys (h, n, d) of distances, which decrease."""
        waves = torch.outer(torch.arange(count, 0, -1.0), 0.1 ** torch.arange(C)).sin()
        return self.positions(waves.to(self.u.dtype)).unflatten(-1, (H, D)).transpose(0, 1)

    def find_distance(self, t: int) -> Tensor:
        """The clipped distance (t, t) of each key from each query, from 0."""
        return (torch.arange(t) - torch.arange(t).unsqueeze(-1)).clamp(-REACH, REACH) + REACH

    def gathered(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """DeBERTa's: products of queries with positions, and of keys with positions, that an index picks after them."""
        t = x.shape[1]
        positions, distance = self.project_distances(2 * REACH + 1), self.find_distance(t)
        of_queries = torch.gather(q @ positions.mT, -1, distance.expand(B, H, t, t))
        of_keys = torch.gather(k @ positions.mT, -1, distance.T.expand(B, H, t, t)).mT
        relative = 0
        relative += of_queries / 3
        relative += of_keys / 2
        return (q @ k.mT + relative) / D**0.5

    def of_keys_alone(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """Those of keys alone, taken away from the scores."""
        t = x.shape[1]
        positions, distance = self.project_distances(2 * REACH + 1), self.find_distance(t)
        return q @ k.mT - torch.take_along_dim(k @ positions.mT, distance.T.expand(B, H, t, t), -1).mT / 2

    def shifted(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """XLNet's: products with 2 t positions, of which a view in another shape shifts each row by one."""
        t = x.shape[1]
        of_positions = (q + self.u) @ self.project_distances(2 * t).mT
        y = of_positions.reshape(B, H, 2 * t, t)[:, :, 1:].reshape(B, H, t, 2 * t - 1)
        return (q @ k.mT + torch.index_select(y, 3, torch.arange(t))) / D**0.5

    def padded(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """Conformer's: products with 2 t - 1 positions behind a column of zeros, in another shape."""
        t = x.shape[1]
        of_positions = torch.matmul(q + self.u, self.project_distances(2 * t - 1).mT)
        y = torch.cat([torch.zeros(B, H, t, 1), of_positions], -1).view(B, H, 2 * t, t)
        return (q @ k.mT + y[:, :, 1:].view(B, H, t, 2 * t - 1)[..., :t]) / D**0.5

    def shifted_below(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """Transformer-XL's: as Conformer's, of t positions, so that later keys have products of other queries, and zeros."""
        t = x.shape[1]
        of_positions = torch.einsum("bhid,hjd->ijbh", q + self.u, self.project_distances(t))
        y = torch.cat([torch.zeros(t, 1, B, H), of_positions], 1).view(t + 1, t, B, H)[1:].view_as(of_positions)
        return ((torch.einsum("bhid,bhjd->ijbh", q, k) + y) / D**0.5).permute(2, 3, 0, 1)

    def picked_before(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """Shaw's: products with an embedding for each pair of a query and a key."""
        return (q @ k.mT + torch.einsum("bhqd,qkd->bhqk", q, self.table(self.find_distance(x.shape[1])))) / D**0.5

    def picked_for_both(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """Those of BERT with relative_key_query."""
        embedded = self.table(self.find_distance(x.shape[1]))
        of_queries, of_keys = torch.einsum("bhqd,qkd->bhqk", q, embedded), torch.einsum("bhkd,qkd->bhqk", k, embedded)
        return (q @ k.mT + of_queries + of_keys) / D**0.5

    def windowed(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """VITS's: products with bare parameters of the distances in a window, shifted as Conformer's, and 0 beside it."""
        t = x.shape[1]
        of_positions = F.pad(q @ F.pad(self.window, (0, 0, t - 3, t - 3)).mT, (0, 1)).flatten(2)
        return (q @ k.mT + F.pad(of_positions, (0, t - 1)).view(B, H, t + 1, 2 * t - 1)[:, :, :t, t - 1 :]) / D**0.5

    def shuffled(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """An index that depends on more than the distance."""
        t = x.shape[1]
        distance = self.find_distance(t)[:, torch.randperm(t, generator=torch.Generator().manual_seed(t))]
        return q @ k.mT + torch.gather(q @ self.project_distances(2 * REACH + 1).mT, -1, distance.expand(B, H, t, t))

    def segments_and_distances(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        t = x.shape[1]
        embedded = self.distances(torch.arange(t) - torch.arange(t).unsqueeze(-1) + MOST)
        return self.of_segments(q, k + 0, x) + torch.einsum("bhqd,qkd->bhqk", q, embedded) / D**0.5

    def predicting(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """ProphetNet's: one number of each query for each span of distances, and a key of its own behind those of the text."""
        t = x.shape[1]
        q, x = q[:, :, : t // 2], x[:, : t // 2]
        places, keys = torch.arange(t // 2).unsqueeze(-1), torch.arange(t)
        distances = (places - keys % (t // 2)).abs() + (keys >= t // 2)  # of keys behind them, that of the token before
        buckets = torch.bucketize(distances, torch.tensor(SPANS), right=True)
        bias = self.spans(x).unflatten(-1, (H, -1)).transpose(1, 2).gather(-1, buckets.expand(B, H, -1, -1))
        hidden = torch.where(keys < t // 2, keys > places, keys != places + t // 2)
        return q @ k.mT / D**0.5 + bias + torch.zeros(hidden.shape).masked_fill(hidden, -1e9)

    # Numbers of rows and columns of an image, and of segments.

    def decompose(self, q: Tensor, k: Tensor, first: int) -> Tensor:
        """SAM's and MViT's relative positions of rows and columns."""
        image = q[:, :, first:].unflatten(2, (-1, WIDE))
        places = [torch.arange(n).unsqueeze(-1) - torch.arange(n) + MOST - 1 for n in image.shape[2:4]]
        of_rows = torch.einsum("bhyxd,yid->bhyxi", image, self.offsets[0][places[0]])
        of_columns = torch.einsum("bhyxd,xjd->bhyxj", image, self.offsets[1][places[1]])
        bias = (of_rows.unsqueeze(-1) + of_columns.unsqueeze(-2)).flatten(4).flatten(2, 3)
        return D**-0.5 * q @ k.mT + F.pad(bias, (first, 0, first, 0))

    def of_rows_and_columns(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        return self.decompose(q, k, 0)

    def behind_a_class_token(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        return self.decompose(q, k, 1)

    of_a_kernel = of_rows_and_columns

    def of_segments(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """XLNet's number of each query for keys of its segment and for others."""
        segment = torch.arange(x.shape[1]) > torch.tensor([[7], [15]])
        is_other = (segment.unsqueeze(-1) != segment.unsqueeze(1)).long()
        numbers = torch.einsum("bhqd,shd->qbhs", q, self.segments)
        of_pairs = torch.einsum("bqks,qbhs->bhqk", F.one_hot(is_other, 2).to(q.dtype), numbers)
        return (q @ k.mT + of_pairs) / D**0.5

    # Decays of keys.

    def forgetting(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """Decays that are added up from each key to its query. https://arxiv.org/abs/2503.02130"""
        total = F.logsigmoid(self.gate(x)).mT.cumsum(-1)
        return q @ k.mT / D**0.5 + (total.unsqueeze(-1) - total.unsqueeze(-2))

    def decays_of_pairs(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        return self.forgetting(q, k, x) + places.sin().outer(places.cos())

    def blind_rows(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        bias = torch.randn(H, x.shape[1], x.shape[1], generator=torch.Generator().manual_seed(7))
        bias[:, 5] = -1e9
        return q @ k.mT / D**0.5 + bias


OF_DISTANCES = ["gathered", "of keys alone", "shifted", "padded", "picked before", "picked for both", "windowed"]
LINEAR = [  # form, mask, lengths, and the kind of bias
    *((form, mask, (41, 82), DistanceProducts) for form, mask in itertools.product(OF_DISTANCES, ["none", "causal", "padded"])),
    ("shifted below", "causal", (41, 82), DistanceProducts),
    ("segments and distances", "none", (23, 46), DistanceProducts),
    ("predicting", "none", (106, 212), DistanceProducts),
    ("of segments", "none", (23, 46), GroupedBias),
    ("forgetting", "causal", (37, 74), Tensor),
]


@pytest.mark.parametrize(("form", "mask", "lengths", "kind"), LINEAR)
def test_the_memory_of_what_is_added_grows_with_the_length(form, mask, lengths, kind, tmp_path):
    torch.manual_seed(7)
    model = nn.Sequential(Biased(form, mask))
    sizes = [record_stored_bias(model, torch.randn(B, t, C), kind, tmp_path).map(0).nbytes for t in lengths]
    assert sizes[1] <= 2 * sizes[0] + 8 * (C + 1)  # there are 2 t - 1 distances


@pytest.mark.parametrize("form", ["of rows and columns", "behind a class token", "of a kernel"])
def test_rows_and_columns_take_less_than_all_pairs(form, tmp_path):
    torch.manual_seed(7)
    model, sizes, first = nn.Sequential(Biased(form)), [], int(form == "behind a class token")
    for height in (13, 26):
        recording = record_stored_bias(model, torch.randn(B, height * WIDE + first, C), GroupedBias, tmp_path)
        sizes.append(recording.map(0).nbytes - B * H * height * WIDE * height * 8)  # of rows: their number, for each query
    assert sizes[1] <= 2 * sizes[0]


@pytest.mark.parametrize("form", OF_DISTANCES)
def test_selected_heads_have_their_terms(form):
    torch.manual_seed(7)
    model = nn.Sequential(Biased(form, "causal"))
    with torch.no_grad(), record(model, heads=[2, 0]) as recording:
        model(torch.randn(B, 23, C))
    torch.testing.assert_close(recording.map(0).dense(), model[0].weights[:, [2, 0]], rtol=0, atol=EQUAL)
    assert isinstance(recording.map(0).planes.request.bias, DistanceProducts)


@pytest.mark.parametrize("form", ["shuffled", "shifted below", "decays of pairs", "blind rows"])
def test_a_term_of_more_than_that_is_a_bias_as_it_is_with_its_bytes(form):
    torch.manual_seed(7)
    model = nn.Sequential(Biased(form))
    with torch.no_grad():
        recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, 19, C)))
    torch.testing.assert_close(recording.map(0).dense(), model[0].weights, rtol=0, atol=EQUAL)
    size = (1 if form == "blind rows" else B) * H * 19 * 19 * (4 if form == "blind rows" else 8)
    (note,) = recording.notes
    assert note.startswith("0: what is added to its scores is stored as it is, for each query and key: ")
    assert recording.map(0).planes.request.q.shape[3] == D  # not the weights as they are
    assert form == "blind rows" or note.endswith(f": {size:,} bytes")


class OfOffsets(nn.Module):
    """Attention of an image with a number for each head and offset, with its own weights kept.

    That of windows is Swin's, with a class token BEiT's; by the sizes of offsets it is LeViT's and EfficientFormer's.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.project, self.first = form, nn.Linear(C, 3 * C), int(form == "class token")
        self.table = nn.Parameter(torch.randn(4 * ROWS * COLUMNS + 3, H))
        self.register_buffer("index", self.find_offsets())

    def find_offsets(self) -> Tensor:
        """The index (q, k) of the table for each pair of pixels, and of a class token before them."""
        places = torch.stack(torch.meshgrid(torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")).flatten(1)
        offsets = places.unsqueeze(1) - places.unsqueeze(2)
        if self.form.startswith("absolute"):
            offsets = offsets.abs()
        y, x = offsets + torch.tensor([ROWS, COLUMNS]).view(2, 1, 1)
        index = F.pad(y * 2 * COLUMNS + x, (self.first, 0, self.first, 0), value=4 * ROWS * COLUMNS)
        if self.first:
            index[0, 0], index[1:, 0] = 4 * ROWS * COLUMNS + 1, 4 * ROWS * COLUMNS + 2
        return index

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        index = self.index
        if self.form.endswith("subsampled"):
            q = q.unflatten(2, (ROWS, COLUMNS))[:, :, ::2, ::2].flatten(2, 3)
            index = index.unflatten(0, (ROWS, COLUMNS))[::2, ::2].flatten(0, 1)
        bias = self.table[index].permute(2, 0, 1).unsqueeze(0)
        self.weights = (q @ k.mT * D**-0.5 + bias).softmax(-1)
        if self.form == "a kernel":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        return (self.weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("form", ["windows", "class token", "absolute offsets", "absolute offsets, subsampled", "a kernel"])
def test_numbers_of_offsets_are_stored_once(form, tmp_path):
    torch.manual_seed(7)
    layer = OfOffsets(form)
    x = torch.randn(B, ROWS * COLUMNS + layer.first, C)
    recording = record_stored_bias(nn.Sequential(layer), x, GridBias, tmp_path)
    bias, step = recording.map(0).planes.request.bias, 1 + form.endswith("subsampled")
    offsets = (ROWS - ROWS % step + ROWS - step + ROWS % step) * (2 * COLUMNS - 1)
    assert bias.nbytes == 8 * H * (offsets + layer.first * (2 * x.shape[1] - 1))


def test_decays_of_float32_are_stored_by_key():
    torch.manual_seed(7)
    model = nn.Sequential(Biased("forgetting", "causal")).float()
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(B, 37, C, dtype=torch.float32))
    assert recording.map(0).planes.request.bias.shape == (B, H, 1, 37)
    tolerance = 64 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(recording.map(0).dense(), model[0].weights, rtol=0, atol=tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_map_of_picked_queries_has_all_keys_and_continues_no_cache(is_causal):
    class ProbabilisticAttention(nn.Module):
        """The queries whose scores differ most attend, the others get a mean or a running sum. https://arxiv.org/abs/2012.07436"""

        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(C, C) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q, k, v = (f(x).view(b, t, H, D).transpose(1, 2) for f in (self.query, self.key, self.value))
            sampled = k.unsqueeze(-3).expand(-1, -1, t, -1, -1)[:, :, torch.arange(t).unsqueeze(1), torch.randint(t, (t, 4)), :]
            s = torch.matmul(q.unsqueeze(-2), sampled.transpose(-2, -1)).squeeze(-2)
            top = (s.max(-1)[0] - s.sum(-1) / t)[..., : t - 2].topk(4, sorted=False)[1]  # so that no query sees the last keys
            place = torch.arange(b)[:, None, None], torch.arange(H)[None, :, None], top
            s = torch.matmul(q[(*place, slice(None))], k.transpose(-2, -1)) / D**0.5
            if is_causal:
                s.masked_fill_(torch.ones(t, t).triu(1).bool().expand(b, H, t, t)[(*place, slice(None))], -torch.inf)
            self.weights = torch.softmax(s, -1).detach()
            context = v.cumsum(-2) if is_causal else v.mean(-2, keepdim=True).expand(-1, -1, t, -1).clone()
            context[(*place, slice(None))] = torch.matmul(torch.softmax(s, -1), v)
            return context.transpose(1, 2).flatten(2)

    part = ProbabilisticAttention()
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, 11, C)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)
    assert ["an index picked its queries" in note for note in recording.notes] == [True]

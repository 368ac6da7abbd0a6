"""Attention written out by hand is recorded by the name of its module; softmaxes that are no attention are not."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import BloomConfig, BloomForCausalLM

from default_dtype import use_default_dtype
from observe.family import Widened
from observe.recording_checks import EQUAL, record_and_compare
from regard import AdditiveAttention
from regard.observe import record
from regard.observe.attention_changes import KnockOut
from regard.observe.interception.handwritten.scores.score_formula import STORED
from regard.observe.intervene import intervene

B, H, T, D, C = 2, 3, 5, 4, 12


def softmaxes() -> dict[str, object]:
    return {
        "Tensor.softmax": lambda x: x.softmax(-1),
        "torch.softmax": lambda x: torch.softmax(x, -1),
        "F.softmax": lambda x: F.softmax(x, dim=-1),
        "in float32": lambda x: F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype),
        "nn.Softmax": nn.Softmax(-1),
        "torch.special": lambda x: torch.special.softmax(x, -1),
        "exponentials": lambda x: (e := (x - x.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True),
        "logarithms": lambda x: x.log_softmax(-1).exp(),
        "with dropout": lambda x: F.dropout(x.softmax(-1), 0.2),
        "masked": lambda x: x.masked_fill(~torch.ones(T, T).tril().bool(), -1e9).softmax(-1),
        "biased and capped": lambda x: (5 * torch.tanh(x / 5) + torch.randn(T, T)).softmax(-1),
        "where": lambda x: torch.where(torch.ones(T, T).tril().bool(), x, torch.tensor(-torch.inf)).softmax(-1),
    }


def products() -> dict[str, object]:
    return {
        "@": (lambda q, k: q @ k.mT, lambda w, v: w @ v),
        "matmul": (lambda q, k: torch.matmul(q, k.transpose(-1, -2)), torch.matmul),
        "einsum": (
            lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
            lambda w, v: torch.einsum("bhqk,bhkd->bhqd", w, v),
        ),
        "bmm": (
            lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT),
            lambda w, v: torch.bmm(w, v.flatten(0, 1)).unflatten(0, (B, H)),
        ),
        "baddbmm": (
            lambda q, k: torch.baddbmm(torch.zeros(B * H, T, T), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0),
            lambda w, v: torch.bmm(w, v.flatten(0, 1)).unflatten(0, (B, H)),
        ),
        "sums": (
            lambda q, k: (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1),
            lambda w, v: w @ v,
        ),
    }


class Hand(nn.Module):
    def __init__(self, softmax: object, multiply: object) -> None:
        super().__init__()
        self.project, self.softmax, self.multiply = nn.Linear(C, 3 * C), softmax, multiply

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        score, weigh = self.multiply
        return weigh(self.softmax(score(q, k) / math.sqrt(D)), v)


class Model(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(C, C), nn.ModuleDict({"attn": part}), nn.Linear(C, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.block["attn"](self.embed(x))


@pytest.fixture
def float64():
    with use_default_dtype(torch.float64):
        yield


def compute_weights(hand: Hand, x: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) of a module, (b, h, q, k), without what stands between the scores and the values."""
    q, k, _ = hand.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
    return hand.softmax(q @ k.mT / math.sqrt(D))


@pytest.mark.parametrize("softmax", softmaxes())
@pytest.mark.parametrize("product", products())
def test_attention_by_hand_is_recorded_as_its_weights(softmax, product, float64):
    model, x = Model(Hand(softmaxes()[softmax], products()[product])), torch.randn(B, T, C)
    hand = model.block["attn"]
    if softmax == "biased and capped":
        bias = torch.randn(T, T)
        hand.softmax = lambda scores: (5 * torch.tanh(scores / 5) + bias).softmax(-1)
    recording, _ = record_and_compare(model, lambda m: m(x))
    assert [call.name for call in recording.calls] == ["block.attn"]
    hand.softmax = hand.softmax if softmax != "with dropout" else (lambda scores: scores.softmax(-1))
    rounded = torch.finfo(torch.float32).eps if softmax == "in float32" else EQUAL
    torch.testing.assert_close(recording.map(0).dense(), compute_weights(hand, model.embed(x)), rtol=0, atol=rounded)
    assert recording.notes == ([f"block.attn: {STORED.format(T * T * 8)}"] if softmax == "biased and capped" else [])


def test_each_module_is_recorded_and_named():
    model = nn.Sequential(*(Model(Hand(softmaxes()["nn.Softmax"], products()["@"])) for _ in range(2)))
    model[0].head, model[1].head = nn.Identity(), nn.Identity()
    x = torch.randn(B, T, C)
    model[0].block["attn"].multiply = (products()["@"][0], lambda w, v: (w @ v).transpose(1, 2).flatten(2))
    for _ in range(2):
        recording, _ = record_and_compare(model, lambda m: m(x))
        assert recording.names == ["0.block.attn", "1.block.attn"]


class Additive(AdditiveAttention):
    """Additive attention as others write it."""

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        scores = (self.W_query(queries).unsqueeze(2) + self.W_key(keys).unsqueeze(1)).tanh() @ self.weight
        return scores.softmax(-1) @ keys


def test_additive_attention_written_by_hand_is_recorded():
    queries, keys = torch.randn(B, T, C), torch.randn(B, T + 2, C)
    model = Additive(C, C, D).double()
    for _ in range(2):
        recording, output = record_and_compare(model, lambda m: m(queries.double(), keys.double()))
        torch.testing.assert_close(recording.calls[0].map.dense()[:, 0] @ keys.double(), output, rtol=0, atol=EQUAL)


class Pairs(nn.Module):
    """A network that scores pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.score = nn.Linear(2 * C, D), nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.cat([x.unsqueeze(2).expand(-1, -1, T, -1), x.unsqueeze(1).expand(-1, T, -1, -1)], -1)
        return self.score(torch.tanh(self.hidden(pairs))).squeeze(-1).softmax(-1) @ x


def test_a_network_that_scores_pairs_is_recorded_with_its_bytes():
    model, x = Pairs().double(), torch.randn(B, T, C).double()
    for _ in range(3):
        recording, output = record_and_compare(model, lambda m: m(x))
        torch.testing.assert_close(recording.map(0).dense()[:, 0] @ x, output, rtol=0, atol=EQUAL)
        assert f"{B * T * T * 8:,} bytes" in recording.notes[0]


class Target(nn.Module):
    """One query beside each key, with their difference and product. https://arxiv.org/abs/1706.06978"""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(4 * C, D), nn.Sigmoid(), nn.Linear(D, 1))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        query = query.unsqueeze(1).expand_as(keys)
        joined = torch.cat([query, keys, query - keys, query * keys], -1)
        weights = self.score(joined).squeeze(-1).softmax(-1)
        self.weights = weights.detach()
        return (weights.unsqueeze(-1) * keys).sum(1)


def test_a_query_may_be_joined_with_more_than_its_keys(float64):
    part = Target()
    recording, _ = record_and_compare(part, lambda m: m(torch.randn(B, C), torch.randn(B, T, C)))
    torch.testing.assert_close(recording.map(0).dense()[:, 0, 0], part.weights, rtol=0, atol=EQUAL)


def build_bloom() -> nn.Module:
    torch.manual_seed(5)
    return BloomForCausalLM(BloomConfig(hidden_size=24, n_layer=2, n_head=2, vocab_size=31)).eval()


class PointTransformer(nn.Module):
    """A network scores each channel of each pair, and positions are added to the values. https://arxiv.org/abs/2012.09164"""

    def __init__(self, multiply: object) -> None:
        super().__init__()
        self.one, self.other, self.value, self.score, self.place = (nn.Linear(n, C) for n in (C, C, C, C, D))
        self.multiply = multiply

    def weigh(self, x: Tensor, places: Tensor) -> Tensor:
        return self.score(self.one(x)[:, :, None] - self.other(x)[:, None] + places).softmax(-2)

    def forward(self, x: Tensor) -> Tensor:
        places = self.place(x[:, :, None, :D] - x[:, None, :, :D])
        return self.multiply(self.weigh(x, places), self.value(x)[:, None] + places)


CHANNEL_PRODUCTS = {
    "einsum": lambda weights, values: torch.einsum("bqkc,bqkc->bqc", weights, values),
    "sum of a product": lambda weights, values: (weights * values).sum(2),
    "sum of a product, values first": lambda weights, values: torch.sum(values * weights, dim=-2),
}


@pytest.mark.parametrize("multiply", CHANNEL_PRODUCTS.values(), ids=CHANNEL_PRODUCTS)
def test_a_weight_for_each_channel_is_recorded_with_the_channels_as_heads(multiply, float64):
    part = PointTransformer(multiply)
    x = torch.randn(B, T, C)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(x))
    weights = part.weigh(x, part.place(x[:, :, None, :D] - x[:, None, :, :D])).permute(0, 3, 1, 2)
    maps = recording.map(0).dense()
    torch.testing.assert_close(maps.view(B, T, C, T).transpose(1, 2), weights, rtol=0, atol=EQUAL)


class NeighborTransformer(PointTransformer):
    """Each point attends to the nearest ones, whose pairs and values an index picks."""

    def weigh(self, x: Tensor, places: Tensor) -> Tensor:
        pairs = self.one(x)[:, :, None] - self.other(x)[:, None] + places
        return self.score(pairs.gather(2, self.find_nearest(x))).softmax(-2)

    def find_nearest(self, x: Tensor) -> Tensor:
        return torch.cdist(x[..., :D], x[..., :D]).topk(3, largest=False).indices[..., None].expand(-1, -1, -1, C)

    def forward(self, x: Tensor) -> Tensor:
        places = self.place(x[:, :, None, :D] - x[:, None, :, :D])
        return self.multiply(self.weigh(x, places), (self.value(x)[:, None] + places).gather(2, self.find_nearest(x)))


@pytest.mark.parametrize("multiply", CHANNEL_PRODUCTS.values(), ids=CHANNEL_PRODUCTS)
def test_a_weight_for_each_channel_of_picked_neighbors_is_recorded_query_by_query(multiply, float64):
    part = NeighborTransformer(multiply)
    x = torch.randn(B, T, C)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(x))
    weights = part.weigh(x, part.place(x[:, :, None, :D] - x[:, None, :, :D]))
    expected = weights.flatten(0, 1).transpose(1, 2).unsqueeze(2)  # (b t, channels, 1, neighbors)
    torch.testing.assert_close(recording.map(0).dense(), expected, rtol=0, atol=EQUAL)


class GroupedTransformer(nn.Module):
    """The same where an index picks keys and values before they are compared, in the order of the first public code."""

    def __init__(self, multiply: object, adds_places: bool) -> None:
        super().__init__()
        self.one, self.other, self.value = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)
        self.place, self.score = (nn.Sequential(nn.Linear(n, C), nn.ReLU(), nn.Linear(C, C)) for n in (D, C))
        self.multiply, self.adds_places = multiply, adds_places

    def pick(self, x: Tensor, index: Tensor) -> Tensor:
        flat = index.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
        return x.gather(1, flat).view(*index.shape, x.shape[-1])

    def forward(self, points: Tensor, x: Tensor) -> Tensor:
        index = torch.cdist(points, points).argsort()[:, :, :3]
        query, key, value = self.one(x), self.pick(self.other(x), index), self.pick(self.value(x), index)
        scores = query[:, :, None] - key
        if self.adds_places:
            places = self.place(points[:, :, None] - self.pick(points, index))
            scores, value = scores + places, value + places
        self.weights = F.softmax(self.score(scores) / C**0.5, dim=-2)
        return self.multiply(self.weights, value)


@pytest.mark.parametrize("adds_places", [True, False])
@pytest.mark.parametrize("multiply", CHANNEL_PRODUCTS.values(), ids=CHANNEL_PRODUCTS)
def test_a_weight_for_each_channel_of_keys_that_were_picked_before_is_recorded_query_by_query(multiply, adds_places, float64):
    part = GroupedTransformer(multiply, adds_places)
    recording, _ = record_and_compare(nn.Sequential(Calls(part)), lambda m: m(torch.randn(B, T, C)))
    expected = part.weights.detach().flatten(0, 1).transpose(1, 2).unsqueeze(2)
    torch.testing.assert_close(recording.map(0).dense(), expected, rtol=0, atol=EQUAL)


class Calls(nn.Module):
    """A part that is called with places and tokens."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x[..., :D], x)


class ChannelPool(nn.Module):
    """A pooling layer with a weight for each channel, by how far each token is from the mean. https://arxiv.org/abs/2005.07143"""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.place = nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C)), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.score(x - x.mean(1, keepdim=True) + self.place(x)).softmax(1)
        return torch.einsum("btc,btc->bc", weights, x)


def test_a_pooling_layer_with_a_weight_for_each_channel_is_no_attention():
    recording, _ = record_and_compare(nn.Sequential(ChannelPool()), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls


def test_a_head_that_is_knocked_out_adds_nothing():
    model, ids = build_bloom().double(), torch.randint(31, (1, T))
    with intervene(model, KnockOut(layer=0, head=1)):
        logits = model(ids).logits
    with torch.no_grad():
        model.transformer.h[0].self_attention.dense.weight[:, 12:] = 0
    torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=EQUAL)


class SoftmaxGradients(TorchFunctionMode):
    """Keeps every softmax with its gradient."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "softmax":
            result.retain_grad()
            self.weights.append(result)
        return result


def test_the_pull_is_weight_times_gradient():
    model, ids = build_bloom().double(), torch.randint(31, (1, T))
    with Widened(), record(model, keep="values") as recording:
        attribution = recording.attribute(model(ids).logits[0, -1, 3])
    with Widened(), SoftmaxGradients() as dense:
        model(ids).logits[0, -1, 3].backward()
    for layer, weights in enumerate(dense.weights):
        expected = (weights * weights.grad).view(1, 2, T, T)
        torch.testing.assert_close(attribution.map(layer, kind="pull").dense(), expected, rtol=0, atol=EQUAL)


def test_a_generation_with_a_cache_is_stitched_to_one_map():
    model = build_bloom()
    ids = torch.randint(31, (1, T))
    with record(model) as recording:
        longer = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with record(model) as whole:
        model(longer[:, :-1])
    assert not recording.missed
    assert len(recording.runs) == 1
    for layer in range(2):
        found, expected = recording.map(layer), whole.map(layer)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.dense(), expected.dense(), rtol=1e-4, atol=1e-6)


class Mixture(nn.Module):
    """A router, and experts that are all asked."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.router = style, nn.Linear(C, D)
        self.experts, self.weight = nn.ModuleList(nn.Linear(C, C) for _ in range(D)), nn.Parameter(torch.randn(C, D))

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.weight if self.style == "parameter" else self.router(x)
        gates = logits.softmax(-1)
        if self.style == "top":
            values, chosen = gates.topk(2)
            gates = torch.zeros_like(gates).scatter(-1, chosen, values / values.sum(-1, keepdim=True))
        made = torch.stack([expert(x) for expert in self.experts], -2)
        return torch.einsum("bte,btec->btc", gates, made)


class Classifier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.ones(7, C)).softmax(-1)


class Sampler(nn.Module):
    """Logits, of which the next token is drawn and embedded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, C)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = (x[:, -1:] @ self.embed.weight.mT).softmax(-1)
        return probabilities @ self.embed.weight, torch.multinomial(probabilities[:, 0], 1)


class Expected(nn.Module):
    """The mean of a distribution over bins."""

    def __init__(self) -> None:
        super().__init__()
        self.bins = nn.Linear(C, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.bins(x).softmax(-1) @ torch.arange(7.0)


class Contrast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -(x[:, 0] @ x[:, 1].mT).log_softmax(-1).diagonal().mean()


WITHOUT_ATTENTION = [Mixture("all"), Mixture("top"), Mixture("parameter"), Classifier()]


@pytest.mark.parametrize("part", [*WITHOUT_ATTENTION, Sampler(), Expected(), Contrast()], ids=lambda m: type(m).__name__)
def test_what_is_no_attention_is_not_reported(part):
    model, x = Model(part), torch.randn(B, T, C)
    for _ in range(2):
        recording, _ = record_and_compare(model, lambda m: m(x))
        assert not recording.calls


class Kernels(nn.Module):
    """A mixer of tokens without a softmax, in a class whose name says nothing of it."""

    def __init__(self, mix):
        super().__init__()
        self.one, self.two, self.three, self.mix = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C), mix

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (H, D)).transpose(1, 2) for part in (self.one, self.two, self.three))
        return self.mix(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "mix",
    [
        lambda q, k, v: (q @ k.mT).softmax(-1).log1p() @ v,
        lambda q, k, v: (q @ k.mT).cos() @ v,
        lambda q, k, v: (q @ k.mT).flip(-1) @ v,
    ],
    ids=["logarithms of weights", "cosines of scores", "scores in another order"],
)
def test_scores_that_are_multiplied_with_values_as_they_are_are_missed_in_a_module_called_attention(mix):
    model, x = Model(Kernels(mix)), torch.randn(B, T, C)
    recording, _ = record_and_compare(model, lambda m: m(x), missing=True)
    assert not recording.runs
    assert [(one.kernel, one.module) for one in recording.missed] == [("Kernels", "block.attn")]


TABLE = (
    torch.randn(T, T, generator=torch.Generator().manual_seed(3)).tril().masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
)


def start_from_table(q):
    return TABLE.to(q.dtype).expand(B, H, T, T).clone()


WRITTEN = {
    "addcdiv_": lambda q, k: start_from_table(q).addcdiv_(q @ k.mT, torch.tensor(2.0, dtype=q.dtype), value=0.3),
    "addcmul_": lambda q, k: start_from_table(q).addcmul_(q @ k.mT, torch.tensor(0.5, dtype=q.dtype)),
    "add_": lambda q, k: start_from_table(q).add_(q @ k.mT, alpha=0.5),
    "add_ of what is negative": lambda q, k: start_from_table(q).add_((q @ k.mT).neg()),
    "einsum of a factor": lambda q, k: torch.einsum("bhqk,bhq->bhqk", q @ k.mT, q.mean(-1).sigmoid()),
}


@pytest.mark.parametrize("form", WRITTEN)
def test_scores_that_are_written_into_a_table_or_multiplied_by_einsum_have_their_formula(form, float64):
    seen = []

    def mix(q, k, v):
        seen.append(WRITTEN[form](q, k).softmax(-1))
        return seen[-1] @ v

    model, x = Model(Kernels(mix)), torch.randn(B, T, C)
    with torch.no_grad():
        recording, _ = record_and_compare(model, lambda m: m(x))
    has_table = form != "einsum of a factor"
    assert recording.notes == [f"block.attn: {STORED.format(seen[-1].numel() * 8)}"] * has_table
    torch.testing.assert_close(recording.map(0).dense(), seen[-1], rtol=0, atol=EQUAL)


class WeightedValues(nn.Module):
    """Attention of one head whose weights and values are multiplied entry by entry, and summed by a function."""

    def __init__(self, add) -> None:
        super().__init__()
        self.project, self.add = nn.Linear(C, 3 * C), add

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        self.weights = (q @ k.mT).softmax(-1)
        return self.add(self.weights.unsqueeze(-1) * v.unsqueeze(1))


@pytest.mark.parametrize(
    "add",
    [
        lambda x: x[:, :, :3].sum(2),
        lambda x: x[:, :, torch.arange(T) % 2 > 0].sum(2),
        lambda x: torch.stack([x[:, n].sum(1) for n in range(T)], 1),
        lambda x: x.roll(1, 1).sum(2),
        lambda x: x.relu().sum(2),
    ],
    ids=["some keys", "keys of a mask", "query by query", "other queries", "a function of entries"],
)
def test_weighted_values_that_are_changed_before_their_sum_are_missed(add, float64):
    recording, _ = record_and_compare(nn.Sequential(WeightedValues(add)), lambda m: m(torch.randn(B, T, C)), missing=True)
    assert {one.module for one in recording.missed} == {"0"}
    assert not recording.calls


@pytest.mark.parametrize(
    "add",
    [lambda x: x.sum(2), lambda x: x.permute(3, 0, 2, 1).contiguous().sum(2).permute(1, 2, 0), lambda x: x[..., None].sum(2)],
    ids=["as they are", "in another order", "with one more axis"],
)
def test_weighted_values_may_get_another_layout_before_their_sum(add, float64):
    module = WeightedValues(add)
    recording, _ = record_and_compare(nn.Sequential(module), lambda m: m(torch.randn(B, T, C)))
    torch.testing.assert_close(recording.map(0).dense()[:, 0], module.weights, rtol=0, atol=EQUAL)


def test_weights_that_an_einsum_multiplies_by_a_gate_are_one_call(float64):
    gated = Kernels(lambda q, k, v: torch.einsum("bhqk,bhq->bhqk", (q @ k.mT).softmax(-1), q.mean(-1).sigmoid()) @ v)
    recording, _ = record_and_compare(Model(gated), lambda m: m(torch.randn(B, T, C)))
    assert len(recording.calls) == 1
    assert "multiplied by a gate" in recording.notes[0]


class RepeatedQuery(nn.Module):
    """Additive attention as tutorials on translation have it: one query (b, c), repeated for all keys (b, t, c)."""

    def __init__(self, join):
        super().__init__()
        self.query, self.keys, self.joined, self.score = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(2 * C, C), nn.Linear(C, 1)
        self.join, self.weights = join, []

    def forward(self, state, keys):
        scores = self.score(torch.tanh(self.join(self, state, keys))).squeeze(-1)
        self.weights.append(scores.softmax(-1).detach())
        return torch.bmm(scores.softmax(-1).unsqueeze(1), keys).squeeze(1)


class Steps(nn.Module):
    """A decoder of four steps."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.cell = attention, nn.GRUCell(C, C)

    def forward(self, keys):
        state = keys.mean(1)
        for _ in range(4):
            state = self.cell(self.attention(state, keys), state)
        return state


@pytest.mark.parametrize(
    "join",
    [
        lambda part, state, keys: part.joined(torch.cat([state.unsqueeze(1).repeat(1, T, 1), keys], 2)),
        lambda part, state, keys: part.joined(torch.cat([keys, state.unsqueeze(1).expand(-1, T, -1)], -1)),
        lambda part, state, keys: part.query(state).unsqueeze(1).expand(-1, T, -1) + part.keys(keys),
        lambda part, state, keys: part.query(state).unsqueeze(1) + part.keys(keys),
    ],
    ids=["repeated and joined", "expanded and joined", "expanded and added", "added"],
)
def test_a_query_that_is_repeated_for_all_keys_is_recorded_as_the_weights_of_each_step(join, float64):
    part = RepeatedQuery(join)
    recording, _ = record_and_compare(Steps(part), lambda m: m(torch.randn(B, T, C)))
    assert len(recording.calls) == 4
    for call, weights in zip(recording.calls, part.weights[-4:], strict=True):
        assert torch.allclose(call.map.dense(), weights[:, None, None], atol=EQUAL, rtol=0)


class Wrapped(nn.Module):
    """A linear layer in a module of its own."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class LocationAttention(nn.Module):
    """Scores from a query, keys and features of the weights of the step before. https://arxiv.org/abs/1506.07503"""

    def __init__(self, add, linear) -> None:
        super().__init__()
        self.query, self.keys, self.score = linear(C, D), linear(C, D), linear(D, 1)
        self.convolution, self.place = nn.Conv1d(1, 2, 3, padding=1), linear(2, D)
        self.add, self.weights = add, []

    def forward(self, state: Tensor, keys: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        before = torch.full(keys.shape[:2], 1 / T) if before is None else before
        places = self.place(self.convolution(before.unsqueeze(1)).mT)
        scores = self.score(torch.tanh(self.add(self.query(state).unsqueeze(1), self.keys(keys), places))).squeeze(-1)
        weights = scores.softmax(-1)
        self.weights.append(weights.detach())
        return torch.bmm(weights.unsqueeze(1), keys).squeeze(1), weights


class LocationSteps(nn.Module):
    """A decoder of four steps, whose first one has weights of 0 before it, or none."""

    def __init__(self, attention: nn.Module, has_first: bool) -> None:
        super().__init__()
        self.attention, self.cell, self.has_first = attention, nn.GRUCell(C, C), has_first

    def forward(self, keys: Tensor) -> Tensor:
        state, weights = keys.mean(1), keys.new_zeros(keys.shape[:2]) if self.has_first else None
        for _ in range(4):
            context, weights = self.attention(state, keys, weights)
            state = self.cell(context, state)
        return state


@pytest.mark.parametrize("linear", [nn.Linear, Wrapped])
@pytest.mark.parametrize("has_first", [False, True])
@pytest.mark.parametrize(
    "add",
    [lambda q, k, p: k + q + p, lambda q, k, p: q + p + k, lambda q, k, p: k + p + q, lambda q, k, p: p + (q + k)],
    ids=["keys and query first", "query and places first", "keys and places first", "places last"],
)
def test_scores_that_depend_on_the_weights_before_are_recorded_as_the_weights_of_each_step(add, has_first, linear, float64):
    part = LocationAttention(add, linear)
    recording, _ = record_and_compare(LocationSteps(part, has_first), lambda m: m(torch.randn(B, T, C)))
    assert len(recording.calls) == 4
    for call, weights in zip(recording.calls, part.weights[-4:], strict=True):
        torch.testing.assert_close(call.map.dense(), weights[:, None, None], rtol=0, atol=EQUAL)


@pytest.mark.parametrize("scores", [lambda h, k: torch.sum(h * k, 2), lambda h, k: torch.einsum("qbc,kbc->kb", h, k)])
def test_the_sentences_of_a_decoder_with_a_state_of_one_layer_are_a_batch_and_no_heads(scores, float64):
    class Luong(nn.Module):
        def forward(self, state, keys):  # (1, b, c) and (t, b, c), as in PyTorch's tutorials
            self.weights = F.softmax(scores(state, keys).t(), dim=1).unsqueeze(1)
            return self.weights.bmm(keys.transpose(0, 1))

    part = Luong()
    recording, _ = record_and_compare(part, lambda m: m(torch.randn(1, 3, C), torch.randn(7, 3, C)))
    (call,) = recording.calls
    assert torch.allclose(call.map.dense(), part.weights.unsqueeze(1), atol=EQUAL, rtol=0)


@pytest.mark.parametrize("queries", [4, 5])
@pytest.mark.parametrize("keys", [4, 7])
def test_as_many_queries_as_heads_of_a_bmm_are_no_batch(queries, keys, float64):
    class Folded(nn.Module):
        def forward(self, x, y):
            q, k = (one.view(one.shape[1], 4, C // 4).transpose(0, 1) for one in (x, y))  # (heads, t, d), in a batch of one
            self.weights = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
            return torch.bmm(self.weights, k).transpose(0, 1).reshape(x.shape)

    part = Folded()
    recording, _ = record_and_compare(part, lambda m: m(torch.randn(1, queries, C), torch.randn(1, keys, C)))
    assert recording.calls[0].map.shape == (1, 4, queries, keys)
    assert torch.allclose(recording.calls[0].map.dense()[0], part.weights, atol=EQUAL, rtol=0)


class DenseGraphAttention(nn.Module):
    """Scores of all pairs of nodes, from which a table that layers share hides those without edges, as pyGAT has it."""

    def __init__(self, hide, width: int) -> None:
        super().__init__()
        self.project, self.sender, self.receiver = nn.Linear(width, D), nn.Linear(D, 1), nn.Linear(D, 1)
        self.hide, self.weights = hide, torch.empty(0)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        values = self.project(x)
        scores = F.leaky_relu(self.receiver(values) + self.sender(values).mT, 0.2)
        self.weights = self.hide(scores, edges).softmax(-1)
        return self.weights @ values


class DenseGraphLayers(nn.Module):
    """Two heads whose outputs are joined, and a layer on top."""

    def __init__(self, hide) -> None:
        super().__init__()
        self.heads = nn.ModuleList(DenseGraphAttention(hide, C) for _ in range(2))
        self.top = DenseGraphAttention(hide, 2 * D)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.top(torch.cat([head(x, edges) for head in self.heads], -1), edges)


@pytest.mark.parametrize(
    "hide",
    [
        lambda scores, edges: torch.where(edges > 0, scores, -9e15 * torch.ones_like(scores)),
        lambda scores, edges: scores.masked_fill(edges == 0, -torch.inf),
        lambda scores, edges: scores + (edges - 1) * 1e9,
        lambda scores, edges: scores + edges,
    ],
    ids=["where", "masked_fill", "added", "added as it is"],
)
def test_layers_that_share_a_table_of_hidden_keys_are_no_routers(hide, float64):
    model, x = DenseGraphLayers(hide), torch.randn(T, C)
    edges = (torch.randn(T, T) + 3 * torch.eye(T) > 0).double()
    recording, _ = record_and_compare(model, lambda m: m(x, edges))
    assert recording.names == ["heads.0", "heads.1", "top"]
    for call, part in zip(recording.calls, (*model.heads, model.top), strict=True):
        torch.testing.assert_close(call.map.dense()[0, 0], part.weights, rtol=0, atol=EQUAL)


def test_attention_by_hand_in_another_model_is_not_ours():
    other, model, x = Model(Hand(softmaxes()["F.softmax"], products()["@"])), nn.Linear(C, C), torch.randn(B, T, C)
    recording, _ = record_and_compare(model, lambda m: (m(x), other(x)))
    assert not recording.calls


class Tagged(Tensor):
    """A subclass of tensors."""


def test_attention_by_hand_of_a_subclass_of_tensor_is_recorded():
    model, x = Model(Hand(softmaxes()["F.softmax"], products()["@"])), torch.randn(B, T, C).as_subclass(Tagged)
    recording, _ = record_and_compare(model, lambda m: m(x))
    assert recording.names == ["block.attn"]


SHARED_KEYS = {
    "by broadcasting": lambda q, k, v: (q @ k.unsqueeze(1).mT).softmax(-1) @ v.unsqueeze(1),
    "by einsum": lambda q, k, v: torch.einsum("bhqk,bke->bhqe", torch.einsum("bhqd,bkd->bhqk", q, k).softmax(-1), v),
}


@pytest.mark.parametrize("form", SHARED_KEYS)
def test_heads_that_share_one_head_of_keys_are_heads_of_one_map(form, float64):
    class SharedKeys(nn.Module):
        def forward(self, q, k, v):
            return SHARED_KEYS[form](q, k, v)

    q, k, v = torch.randn(B, H, T, D), torch.randn(B, T + 2, D), torch.randn(B, T + 2, C)
    model = nn.ModuleDict({"own": SharedKeys()})
    model.forward = lambda x: model["own"](x, k + 0, v + 0)
    recording, output = record_and_compare(model, lambda m: m(q + 0))
    found = recording.calls[0].map
    assert found.shape == (B, H, T, T + 2)
    torch.testing.assert_close(found.dense() @ v.unsqueeze(1), output, rtol=0, atol=EQUAL)
    assert not recording.notes


class AddedMask(nn.Module):
    """litgpt with a softcap and a cache: a boolean mask is added to the scores, so that it hides no key."""

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ x.mT).div(3).tanh() * 3
        scores = scores + torch.ones(x.shape[1], x.shape[1]).tril().bool()
        return scores.softmax(-1) @ x


def test_a_boolean_mask_that_is_added_to_scores_is_recorded_as_what_it_does_and_noted():
    model, x = nn.Sequential(AddedMask()), torch.randn(2, 5, 4)
    recording, _ = record_and_compare(model, lambda m: m(x))
    scores = (x @ x.mT).div(3).tanh() * 3 + torch.ones(5, 5).tril()
    torch.testing.assert_close(recording.map(0).dense()[:, 0], scores.softmax(-1))
    assert "it adds a boolean mask to its scores" in recording.notes[0]


class BiasOfPositions(nn.Module):
    """Scores with a bias of each head added, as RelPosBias of timm."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 7, 7))

    def forward(self, scores):
        return scores + self.table


class BiasedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.bias = nn.Linear(12, 36), BiasOfPositions()

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.bias(q @ k.mT).softmax(-1) @ v


def test_a_bias_in_a_module_of_its_own_mixes_no_heads():
    with torch.no_grad(), record(model := nn.Sequential(BiasedAttention())) as recording:
        model(torch.randn(2, 7, 12))
    assert "made by BiasOfPositions, so its weights" in recording.notes[0]


class OneHotTokens(nn.Module):
    """Tokens that are rows of zeros and ones, which a query reads as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.W_query = nn.Linear(C, C, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.one_hot(ids, C).to(self.W_query.weight.dtype)
        self.weights = (self.W_query(x) @ x.mT).softmax(-1)
        return self.weights @ x


def test_tokens_that_are_one_hot_are_keys_and_no_index_of_a_graph():
    module = OneHotTokens().double()
    with torch.no_grad(), record(module) as recording:
        module(torch.randint(0, C, (B, T)))
    assert not recording.missed
    assert not recording.notes
    torch.testing.assert_close(recording.map(0).dense().view(B, T, T), module.weights, rtol=0, atol=EQUAL)


INTEGERS = torch.arange(12).view(4, 3)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda: torch.embedding(INTEGERS, torch.tensor(2)),
        lambda: torch.embedding(INTEGERS, torch.tensor([2, 0])),
        lambda: torch.embedding(INTEGERS, indices=torch.tensor([2, 0])),
        lambda: torch.embedding(weight=INTEGERS, indices=torch.tensor([2, 0])),
        lambda: F.embedding(torch.tensor([2, 0]), weight=INTEGERS),
    ],
)
def test_a_table_that_is_read_in_an_unusual_way_stops_no_model(look_up):
    class Lookup(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + look_up().sum()

    module = Lookup()
    with record(module) as recording:
        assert torch.equal(module(torch.ones(3)), module.forward(torch.ones(3)))
    assert not recording.missed


class Measured(nn.Module):
    """Attention whose weights are measured on the way by a function that takes keywords alone."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.mT).softmax(-1)
        torch.linalg.vector_norm(x=weights)
        return weights @ x


def test_weights_that_a_function_takes_by_keyword_are_still_followed():
    recording, _ = record_and_compare(Measured(), lambda m: m(torch.randn(B, T, C)))
    assert len(recording.calls) == 1
    assert not recording.missed

"""Loops over blocks of keys: an online softmax is recorded as one call, and an intervention warns of it."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import regard
from observe.interception.handwritten.handwritten_attention import CAUSAL, B, C, D, H, Own, T, scores
from observe.recording_checks import assert_equal, compute_weights, record_and_compare
from regard.observe.interception.handwritten.softmax.joined_blocks import UNORDERED
from regard.observe.interception.handwritten.softmax.key_blocks import BLOCKS, OTHERWISE, KeyBlocks
from regard.observe.interception.handwritten.softmax.merged_blocks import MERGED

pytestmark = pytest.mark.usefixtures("in_float64")


def compute_online_softmax(q: Tensor, k: Tensor, v: Tensor, take_maximum, size: int = 2, is_causal: bool = False) -> Tensor:
    """Sum over blocks of keys with a running maximum and running sums, as flash attention does."""
    largest, sums = torch.full((*q.shape[:3], 1), -1e30), torch.zeros(*q.shape[:3], 1)
    context = torch.zeros_like(v)
    for start in range(0, T, size):
        block = slice(start, start + size)
        part = scores(q, k[:, :, block])
        part = part.masked_fill(~CAUSAL[:, block], -torch.inf) if is_causal else part
        new = take_maximum(largest, part.amax(-1, keepdim=True))
        weights, decay = (part - new).exp(), (largest - new).exp()
        sums, context, largest = sums * decay + weights.sum(-1, keepdim=True), context * decay + weights @ v[:, :, block], new
    return context / sums


def loop_over_tiles(q: Tensor, k: Tensor, v: Tensor, rows: int = 3, size: int = 2) -> Tensor:
    """The same for each tile of queries, which skips later keys, into a buffer (Dao 2023)."""
    context = torch.zeros_like(v)
    for first in range(0, T, rows):
        tile = slice(first, first + rows)
        own = q[:, :, tile]
        largest, sums = torch.full(own.shape[:3], -torch.inf), torch.zeros(own.shape[:3])
        added = torch.zeros_like(v[:, :, tile])
        for start in range(0, min(first + rows, T), size):
            block = slice(start, start + size)
            part = scores(own, k[:, :, block]).masked_fill(~CAUSAL[tile, block], -torch.inf)
            new = torch.maximum(largest, part.max(-1).values)
            weights, decay = torch.exp(part - new[..., None]), torch.exp(largest - new)
            sums, largest = decay * sums + weights.sum(-1), new
            added = decay[..., None] * added + torch.einsum("bhqk,bhkd->bhqd", weights, v[:, :, block])
        context[:, :, tile] = added / sums.unsqueeze(-1)
    return context


def loop_over_keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks shifted by their own maximum, and a context that is divided by the sums so far (Dao et al. 2022)."""
    tiles = (q * q.shape[-1] ** -0.5).split(2, 2)
    contexts, sums = [torch.zeros_like(one) for one in tiles], [torch.zeros(*one.shape[:3], 1) for one in tiles]
    largest = [torch.full_like(one, -1e10) for one in sums]
    for keys, values in zip(k.split(3, 2), v.split(3, 2), strict=True):
        for n, own in enumerate(tiles):
            part = torch.einsum("...id,...jd->...ij", own, keys)
            top = part.max(-1, keepdim=True).values
            weights = torch.exp(part - top)
            new = torch.maximum(top, largest[n])
            before, now = torch.exp(largest[n] - new), torch.exp(top - new)
            total = before * sums[n] + now * weights.sum(-1, keepdim=True)
            contexts[n] = sums[n] / total * before * contexts[n] + now / total * (weights @ values)
            sums[n], largest[n] = total, new
    return torch.cat(contexts, 2)


def loop_without_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sums of exponentials of blocks that nothing shifts."""
    parts = [scores(q, keys).exp() for keys in k.split(2, 2)]
    context = sum(part @ values for part, values in zip(parts, v.split(2, 2), strict=True))
    return context / sum(part.sum(-1, keepdim=True) for part in parts)


def loop_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Parts of buffers that are written into, as in a kernel."""
    context, sums, largest = torch.zeros_like(v), torch.zeros(*q.shape[:3], 1), torch.full((*q.shape[:3], 1), -torch.inf)
    tiles = zip(*(x.split(3, 2) for x in (q, context, sums, largest)), strict=True)
    for own, added, total, top in tiles:
        for keys, values in zip(k.split(2, 2), v.split(2, 2), strict=True):
            part = scores(own, keys)
            new = torch.maximum(part.amax(-1, keepdim=True), top)
            weights, decay = torch.exp(part - new), torch.exp(top - new)
            added.mul_(decay).add_(weights @ values)
            total.mul_(decay).add_(weights.sum(-1, keepdim=True))
            top.copy_(new)
        added.div_(total)
    return context


def divide_at_the_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sums of all tiles in one buffer, which is divided when all blocks have been added."""
    context, sums, largest = torch.zeros_like(v), torch.zeros(*q.shape[:3], 1), torch.full((*q.shape[:3], 1), -torch.inf)
    for start in range(0, T, 2):
        keys, values = k[:, :, start : start + 2], v[:, :, start : start + 2]
        for first in range(0, T, 3):
            tile = slice(first, first + 3)
            part, before = scores(q[:, :, tile], keys), largest[:, :, tile].clone()
            new = torch.maximum(before, part.amax(-1, keepdim=True))
            weights, decay = torch.exp(part - new), torch.exp(before - new)
            sums[:, :, tile] = sums[:, :, tile] * decay + weights.sum(-1, keepdim=True)
            context[:, :, tile] = context[:, :, tile] * decay + weights @ values
            largest[:, :, tile] = new
    return context / sums


def divide_joined_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Lists of the sums of tiles, which are divided when they are joined."""
    contexts, totals = [], []
    for own in q.split(3, 2):
        largest, sums, context = torch.full((*own.shape[:3], 1), -torch.inf), 0, 0
        for keys, values in zip(k.split(2, 2), v.split(2, 2), strict=True):
            part = scores(own, keys)
            new = torch.maximum(largest, part.amax(-1, keepdim=True))
            weights, decay = torch.exp(part - new), torch.exp(largest - new)
            sums, context, largest = sums * decay + weights.sum(-1, keepdim=True), context * decay + weights @ values, new
        contexts.append(context)
        totals.append(sums)
    return torch.cat(contexts, 2) / torch.cat(totals, 2)


def stack_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks that are stacked, and rescaled by the largest score of all (Rabe and Staats 2021)."""
    contexts = []
    for own in q.split(2, 2):
        found = []
        for keys, values in zip(k.split(2, 2), v.split(2, 2), strict=True):
            part = torch.einsum("bhid,bhjd->bhij", own * q.shape[-1] ** -0.5, keys)
            top = part.amax(-1, keepdim=True).detach()
            weights = (part - top).exp()
            found.append((torch.einsum("bhij,bhjd->bhid", weights, values), weights.sum(-1), top.squeeze(-1)))
        added, sums, largest = (torch.stack(one, -1) for one in zip(*found, strict=True))
        factor = (largest - largest.amax(-1, keepdim=True)).exp()
        contexts.append((added * factor.unsqueeze(-2)).sum(-1) / (sums * factor).sum(-1).unsqueeze(-1))
    return torch.cat(contexts, 2)


def stack_blocks_of_heads_in_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with bmm, as sub-quadratic attention of image models is written."""
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    found = []
    for start in range(0, T, 2):
        empty, keys = torch.empty(1, 1, 1), k.mT[:, :, start : start + 2]
        part = torch.baddbmm(empty, q, keys, alpha=q.shape[-1] ** -0.5, beta=0)
        top, _ = torch.max(part, -1, keepdim=True)
        weights = torch.exp(part - top)
        found.append((torch.bmm(weights, v[:, start : start + 2]), weights.sum(-1), top.squeeze(-1)))
    added, sums, largest = map(torch.stack, zip(*found, strict=True))
    factor = torch.exp(largest - torch.max(largest, 0, keepdim=True)[0])
    added *= factor.unsqueeze(-1)
    return (added.sum(dim=0) / (sums * factor).unsqueeze(-1).sum(dim=0)).view(B, H, T, D)


def add_logarithms(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Contexts of blocks, joined by the logarithms of their sums."""
    context = total = None
    for keys, values in zip(k.split(2, 2), v.split(2, 2), strict=True):
        part = scores(q, keys)
        own = part.logsumexp(-1, keepdim=True)
        added = (part - own).exp() @ values
        new = own if total is None else torch.logaddexp(total, own)
        context = added if context is None else context * (total - new).exp() + added * (own - new).exp()
        total = new
    return context


def add_decays(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ALiBi in blocks."""
    places = torch.arange(T).double()
    slopes = torch.tensor([0.5, 0.25, 0.125]).view(H, 1, 1)
    largest, sums, context = torch.full((B, H, T, 1), -1e30), 0, torch.zeros_like(v)
    for start in range(0, T, 2):
        block = slice(start, start + 2)
        part = scores(q, k[:, :, block]) - slopes * (places[:, None] - places[block]).abs()
        new = torch.maximum(largest, part.amax(-1, keepdim=True))
        weights, decay = (part - new).exp(), (largest - new).exp()
        sums, context, largest = sums * decay + weights.sum(-1, keepdim=True), context * decay + weights @ v[:, :, block], new
    return context / sums


DECAYS = -torch.tensor([0.5, 0.25, 0.125]).view(H, 1, 1) * (torch.arange(T).double()[:, None] - torch.arange(T)).abs()
LOOPS = {  # with who sees whom, and what is added to the scores
    "torch.maximum": (lambda q, k, v: compute_online_softmax(q, k, v, torch.maximum), None, None),
    "torch.max": (lambda q, k, v: compute_online_softmax(q, k, v, torch.max), None, None),
    "causal": (lambda q, k, v: compute_online_softmax(q, k, v, torch.maximum, is_causal=True), CAUSAL, None),
    "one block": (lambda q, k, v: compute_online_softmax(q, k, v, torch.maximum, size=T), None, None),
    "tiles of queries": (loop_over_tiles, CAUSAL, None),
    "keys first": (loop_over_keys_first, None, None),
    "divided at the end": (divide_at_the_end, None, None),
    "divided when joined": (divide_joined_tiles, None, None),
    "stacked": (stack_blocks, None, None),
    "stacked, with bmm": (stack_blocks_of_heads_in_the_batch, None, None),
    "logarithms of sums": (add_logarithms, None, None),
    "no maximum": (loop_without_maximum, None, None),
    "decays": (add_decays, None, DECAYS),
}


class Attention(Own):
    """A form whose queries and keys are kept."""

    def forward(self, x: Tensor) -> Tensor:
        self.q, self.k, _ = self.project(x).detach().unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return super().forward(x)


def assert_one_exact_map(form, visible: Tensor | None, bias: Tensor | None) -> None:
    model = nn.Sequential(Attention(form))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)), keep="values")
    assert len(recording.calls) == 1
    expected = compute_weights(model[0].q, model[0].k, visible, bias)
    assert_equal(recording.map(0).dense(), expected)
    assert_equal(recording.values(0), model[0].values)
    assert not [one for one in recording.notes if "do not sum" in one]


@pytest.mark.parametrize(("form", "visible", "bias"), LOOPS.values(), ids=LOOPS)
def test_a_loop_over_blocks_of_keys_is_recorded_as_one_call(form, visible, bias):
    assert_one_exact_map(form, visible, bias)


def test_a_loop_over_blocks_of_buffers_is_recorded_as_one_call():
    with torch.no_grad():
        assert_one_exact_map(loop_in_place, None, None)


@pytest.mark.parametrize(("form", "visible", "bias"), LOOPS.values(), ids=LOOPS)
def test_every_layer_with_a_loop_over_blocks_of_keys_is_recorded(form, visible, bias):
    layers = [Attention(lambda q, k, v: form(q, k, v).transpose(1, 2).flatten(2)) for _ in range(3)]
    recording, _ = record_and_compare(nn.Sequential(*layers), lambda m: m(torch.randn(B, T, C)))
    assert recording.names == ["0", "1", "2"]
    for n, layer in enumerate(layers):
        assert_equal(recording.map(n).dense(), compute_weights(layer.q, layer.k, visible, bias))


def test_a_loop_over_blocks_of_bounded_scores_is_recorded_as_one_call():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        largest, sums, context = torch.full((B, H, T, 1), -1e30), 0, 0
        for keys, values in zip(k.split(2, 2), v.split(2, 2), strict=True):
            part = 0.5 * torch.tanh(scores(q, keys) / 0.5)
            new = torch.maximum(largest, part.amax(-1, keepdim=True))
            weights, decay = torch.exp(part - new), torch.exp(largest - new)
            sums, context, largest = sums * decay + weights.sum(-1, keepdim=True), context * decay + weights @ values, new
        return context / sums

    model = nn.Sequential(Attention(attend))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert_equal(recording.map(0).dense(), (0.5 * torch.tanh(scores(model[0].q, model[0].k) / 0.5)).softmax(-1))


def forget_to_rescale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An online softmax with the mistake that learners make: what was added up keeps its old maximum."""
    largest, sums, context = torch.full((B, H, T, 1), -1e30), 0, torch.zeros_like(v)
    for start in range(0, T, 2):
        part = scores(q, k[:, :, start : start + 2])
        new = torch.maximum(largest, part.amax(-1, keepdim=True))
        weights = (part - new).exp()
        sums, context, largest = sums + weights.sum(-1, keepdim=True), context + weights @ v[:, :, start : start + 2], new
    return context / sums


def take_every_second_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A loop over keys that are not side by side."""
    largest, sums, context = torch.full((B, H, T, 1), -1e30), 0, torch.zeros_like(v)
    for start in range(2):
        part = scores(q, k[:, :, start::2])
        new = torch.maximum(largest, part.amax(-1, keepdim=True))
        weights, decay = (part - new).exp(), (largest - new).exp()
        sums, context, largest = (
            sums * decay + weights.sum(-1, keepdim=True),
            context * decay + weights @ v[:, :, start::2],
            new,
        )
    return context / sums


@pytest.mark.parametrize(
    ("form", "reason"), [(forget_to_rescale, OTHERWISE), (take_every_second_key, UNORDERED.format("keys"))]
)
def test_a_loop_that_is_no_softmax_over_blocks_side_by_side_is_missed(form, reason):
    recording, _ = record_and_compare(nn.Sequential(Own(form)), lambda m: m(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert {one.reason for one in recording.missed} == {reason}


@pytest.mark.parametrize(("form", "count"), [(forget_to_rescale, 0), (LOOPS["torch.maximum"][0], 1)])
def test_a_loop_in_half_precision_is_told_from_one_that_is_no_softmax(form, count):
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    model = nn.Sequential(Own(form))
    model[0].project.weight.data[: 2 * C] *= 3
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)), missing=not count)
    assert len(recording.calls) == count
    assert {one.reason for one in recording.missed} == (set() if count else {OTHERWISE})


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.04), (torch.float16, 0.005)])  # five roundings
@pytest.mark.parametrize("gain", [1, 2])
@pytest.mark.parametrize("size", [1, 2, T])
@pytest.mark.parametrize("has_sink", [False, True])
def test_a_sink_that_takes_some_roundings_of_half_precision_from_each_row_is_missed(size, gain, dtype, share, has_sink):
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        largest, sums, context = torch.full((B, H, T, 1), -1e4), 0, 0
        for keys, values in zip(k.split(size, 2), v.split(size, 2), strict=True):
            part = scores(q, keys)
            new = torch.maximum(largest, part.amax(-1, keepdim=True))
            weights, decay = torch.exp(part - new), torch.exp(largest - new)
            sums, context, largest = sums * decay + weights.sum(-1, keepdim=True), context * decay + weights @ values, new
        return context / (sums * (1 + share * has_sink))

    model = nn.Sequential(Own(attend))
    model[0].project.weight.data[: 2 * C] *= gain
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)), missing=has_sink)
    assert len(recording.calls) == 1 - has_sink
    assert {one.reason for one in recording.missed} == ({OTHERWISE} if has_sink else set())


class OfParts(nn.Module):
    """Attention whose blocks a layer projects one by one, from the last to the first, or whose heads share keys in a loop."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.num_heads = part, H
        self.of_queries, self.of_keys, self.of_values = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        layers = self.of_queries, self.of_keys, self.of_values
        q, k, v = ([layer(x).unflatten(-1, (H, D)).transpose(1, 2)] for layer in layers)
        last_first = [x[:, start : start + 2] for start in (4, 2, 0)]
        if self.part == "queries":
            q = [self.of_queries(one).unflatten(-1, (H, D)).transpose(1, 2) for one in last_first]
            k, v = k[0].split(2, 2), v[0].split(2, 2)
        elif self.part == "keys":
            k, v = ([layer(one).unflatten(-1, (H, D)).transpose(1, 2) for one in last_first] for layer in layers[1:])
        else:
            q = [*q[0].contiguous().split(1, 1)] if self.part == "heads" else [*q[0].contiguous().unbind(1)]
            k, v = ([part if self.part == "heads" else part[:, 0] for part in one[0][:, :1].split(2, 2)] for one in (k, v))
        return torch.cat([self.add_up(one, k, v) for one in q], -2)

    @staticmethod
    def add_up(q: Tensor, k: list[Tensor], v: list[Tensor]) -> Tensor:
        largest, sums, context = torch.full((*q.shape[:-1], 1), -1e30), 0, 0
        for keys, values in zip(k, v, strict=True):
            part = scores(q, keys)
            new = torch.maximum(largest, part.amax(-1, keepdim=True))
            weights, decay = torch.exp(part - new), torch.exp(largest - new)
            sums, context, largest = sums * decay + weights.sum(-1, keepdim=True), context * decay + weights @ values, new
        return context / sums


@pytest.mark.parametrize(
    ("part", "tokens"), [("queries", "queries"), ("keys", "keys"), ("heads", "queries"), ("picked heads", "queries")]
)
def test_blocks_whose_order_among_the_tokens_is_not_known_are_missed(part, tokens):
    recording, _ = record_and_compare(nn.Sequential(OfParts(part)), lambda m: m(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert {one.reason for one in recording.missed} == {UNORDERED.format(tokens)}


def test_blocks_that_are_divided_one_by_one_have_maps_of_their_own():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contexts = []
        for keys, values in zip(k.split(2, 2), v.split(2, 2), strict=True):
            weights = (scores(q, keys) - scores(q, keys).amax(-1, keepdim=True)).exp()
            contexts.append(weights @ values / weights.sum(-1, keepdim=True))
        return sum(contexts)

    model = nn.Sequential(Attention(attend))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert len(recording.calls) == 3
    for call, keys in zip(recording.calls, model[0].k.split(2, 2), strict=True):
        assert_equal(call.map.dense(), compute_weights(model[0].q, keys))


def test_an_online_softmax_that_an_intervention_should_change_stays_with_a_warning():
    model = nn.Sequential(Own(LOOPS["causal"][0]))
    x = torch.randn(B, T, C)
    plain = model(x)
    told = pytest.warns(UserWarning, match="KnockOut of layer 0 was not applied: 0: its exponentials are shifted by a running")
    with torch.no_grad(), told, regard.intervene(model, regard.KnockOut(layer=0)):
        assert torch.equal(model(x), plain)


@pytest.mark.parametrize("take_maximum", [lambda s: s.amax(-1, keepdim=True), lambda s: s.max(-1, keepdim=True)[0]])
def test_a_softmax_that_is_shifted_by_the_maximum_of_its_rows_is_recorded(take_maximum):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (scores(q, k) - take_maximum(scores(q, k))).exp()
        return (weights @ v) / weights.sum(-1, keepdim=True)

    model = nn.Sequential(Own(attend))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert len(recording.calls) == 1


def test_an_intervention_warns_of_calls_of_a_changed_module_that_are_missed():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).softmax(-1) @ v + LOOPS["causal"][0](q, k, v)

    model = nn.Sequential(Own(attend))
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with regard.intervene(model, regard.KnockOut(layer=0)):
            model(torch.randn(B, T, C))
    assert [str(one.message) for one in said] == [f"A part of the output of 0 was not changed: {BLOCKS}."]


def merge_blocks(q: Tensor, k: Tensor, v: Tensor, *, is_last: bool, by_stack: bool) -> Tensor:
    """Merge softmaxes over blocks of keys by the logarithms of their sums, as flash decoding and ring attention do."""
    contexts, sums = list[Tensor](), list[Tensor]()
    for start in range(0, T, 2):
        part = scores(q, k[:, :, start : start + 2])
        total = part.new_zeros(()) if is_last else part.logsumexp(-1, keepdim=True)
        contexts.append(part.softmax(-1) @ v[:, :, start : start + 2])
        sums.append(part.logsumexp(-1, keepdim=True) if is_last else total)
    if by_stack:
        return torch.einsum("nbhqi,nbhqd->bhqd", torch.stack(sums).softmax(0), torch.stack(contexts))
    context, total = contexts[0], sums[0]
    for one, other in zip(contexts[1:], sums[1:], strict=True):
        context = context - torch.sigmoid(other - total) * (context - one)
        total = torch.logaddexp(total, other)
    return context


@pytest.mark.parametrize("by_stack", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
def test_it_is_noted_that_blocks_of_keys_are_merged_by_the_logarithms_of_their_sums(is_last, by_stack):
    model = nn.Sequential(Own(lambda q, k, v: merge_blocks(q, k, v, is_last=is_last, by_stack=by_stack)))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with regard.record(model) as recording:
            model(torch.randn(B, T, C))
    assert any(MERGED in note for note in recording.notes)


def test_nothing_is_noted_of_one_softmax_whose_sum_is_computed_too():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        part = scores(q, k)
        return part.softmax(-1) @ v + 0 * part.logsumexp(-1, keepdim=True)

    recording, _ = record_and_compare(nn.Sequential(Own(attend)), lambda m: m(torch.randn(B, T, C)))
    assert len(recording.calls) == 1
    assert not recording.notes


def test_a_block_that_cannot_be_followed_is_missed_and_does_not_stop_the_model(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no layout")

    monkeypatch.setattr(KeyBlocks, "add", fail)
    model = nn.Sequential(Own(LOOPS["torch.maximum"][0]))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)), missing=True)
    assert all("no layout" in one.reason for one in recording.missed)

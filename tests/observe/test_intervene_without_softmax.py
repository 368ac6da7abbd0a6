"""Changed attention whose weights are no softmax equals the same layer written with these scores or weights changed."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from observe.recording_checks import EQUAL, assert_equal
from regard import ConfigError, CutEdges, KnockOut, Patch, Temperature, intervene, record

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, T, D = 2, 3, 13, 5
C = H * D


def see(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


class Primitives:
    """What a layer computes its weights by: scores of q and k, a softmax of them, and the result of an activation."""

    def __init__(self, hidden=None, t=1.0, is_causal=True):
        self.hidden, self.t, self.is_causal = hidden, t, is_causal

    def score(self, q, k):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores if self.t == 1.0 else scores / self.t
        return scores.masked_fill(~see(*scores.shape[-2:]), -torch.inf) if self.is_causal else scores

    def softmax(self, scores):
        if self.hidden is None:
            return torch.softmax(scores, -1)
        return torch.softmax(scores.masked_fill(self.hidden, -torch.inf), -1).nan_to_num(0)

    def activate(self, weights):
        return weights if self.hidden is None else weights.masked_fill(self.hidden, 0)


class DeepNorm(nn.Module):
    """Mixed heads, normed over the heads, as vit-pytorch's DeepViT."""

    def __init__(self):
        super().__init__()
        self.mixing, self.norm = nn.Parameter(torch.randn(H, H)), nn.LayerNorm(H)
        nn.init.normal_(self.norm.weight)

    def forward(self, weights):
        mixed = torch.einsum("bhij,hg->bgij", weights, self.mixing)
        return self.norm(mixed.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def normalize(weights):
    return weights / (weights.sum(-1, keepdim=True) + 1e-3)


def subtract_halves(p, q, k):
    """The Differential Transformer's own code: one softmax of twice as many heads."""
    weights = p.softmax(p.score(torch.cat([q, q.flip(-1)], 1), torch.cat([k, k * 2], 1)))
    weights = weights.view(len(q), 2, H, *weights.shape[-2:])
    return weights[:, 0] - 0.8 * weights[:, 1]


def mix(build=lambda: nn.Conv2d(H, H, 1)):
    return [build]


NOT_CAUSAL = ("talking twice", "scores times their sigmoid")
FORMS = {  # name: weights of q and k by primitives, how modules are built
    "talking heads": (lambda p, q, k, after: after(p.softmax(p.score(q, k))), mix()),
    "talking heads of a linear": (
        lambda p, q, k, after: after(p.softmax(p.score(q, k)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        mix(lambda: nn.Linear(H, H, bias=False)),
    ),
    "talking heads, normed": (lambda p, q, k, after: after(p.softmax(p.score(q, k))), mix(DeepNorm)),
    "talking twice": (  # as CaiT's
        lambda p, q, k, before, after: after(p.softmax(before(p.score(q, k)))),
        [lambda: nn.Conv2d(H, H, 1)] * 2,
    ),
    "differential": (lambda p, q, k: p.softmax(p.score(q, k)) - 0.3 * p.softmax(p.score(k[:, :, -q.shape[2] :], k)), []),
    "differential of halves": (subtract_halves, []),
    "relu": (lambda p, q, k: p.activate(p.score(q, k).relu()), []),
    "relu over the length": (lambda p, q, k: p.activate(p.score(q, k).relu()) / T, []),
    "relu over its sums": (lambda p, q, k: normalize(p.activate(p.score(q, k).relu())), []),
    "nn.ReLU": (lambda p, q, k, act: p.activate(act(p.score(q, k))), [nn.ReLU]),
    "squared relu": (lambda p, q, k: p.activate(p.score(q, k).relu()).square(), []),
    "sigmoid": (lambda p, q, k: p.activate(torch.sigmoid(p.score(q, k) - math.log(T))), []),
    "scores times their sigmoid": (lambda p, q, k: (s := p.score(q, k)) * p.activate(torch.sigmoid(s)), []),
    "Laplace, as in Mega": (lambda p, q, k: p.activate(0.5 * (1 + torch.erf((p.score(q, k) - 0.7) / 0.3))), []),
    "softplus": (lambda p, q, k: p.activate(F.softplus(p.score(q, k))), []),
}


class Own(nn.Module):
    """Weights that a function makes of q and k (b, h, t, d), times values."""

    def __init__(self, weigh, parts=(), is_causal=True):
        super().__init__()
        self.project, self.weigh, self.parts = nn.Linear(C, 3 * C), weigh, nn.ModuleList(build() for build in parts)
        self.primitives = Primitives(is_causal=is_causal)

    def forward(self, x, cache=None):
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = (torch.cat([*earlier, new], 2) for earlier, new in ((cache[0], k), (cache[1], v)))
            cache[0], cache[1] = [k], [v]
        return (self.weigh(self.primitives, q, k, *self.parts) @ v).transpose(1, 2).flatten(2)


def build(name):
    torch.manual_seed(5)
    weigh, parts = FORMS[name]
    model = nn.Sequential(Own(weigh, parts, is_causal=name not in NOT_CAUSAL), nn.Linear(C, C)).eval()
    return model, torch.randn(B, T, C)


def compute_heads(model, x, primitives):
    """The context (b, t, h, d) of the first layer with other primitives."""
    primitives.is_causal = model[0].primitives.is_causal
    own, model[0].primitives = model[0].primitives, primitives
    context = model[0](x).unflatten(-1, (H, D))
    model[0].primitives = own
    return context


def hide(queries, keys):
    hidden = torch.zeros(T, T, dtype=torch.bool)
    hidden[queries.unsqueeze(-1), keys] = True
    return hidden


@pytest.mark.parametrize(("name", "heads"), [(name, (None, [0, 2])[n % 2]) for n, name in enumerate(FORMS)])
def test_edges_that_are_cut_have_a_score_of_minus_infinity_or_a_weight_of_zero(name, heads):
    model, x = build(name)
    queries, keys = torch.arange(4, 9), torch.tensor([0, 3, 4])
    changed, plain = (compute_heads(model, x, Primitives(one)) for one in (hide(queries, keys), None))
    expected = plain.clone()
    expected[:, :, slice(None) if heads is None else heads] = changed[:, :, slice(None) if heads is None else heads]
    with intervene(model, CutEdges(queries.tolist(), keys.tolist(), kind="implicit", head=heads)):
        found = model(x)
    assert_equal(found, model[1](expected.flatten(2)))
    assert not torch.allclose(found, model(x))


@pytest.mark.parametrize("name", [*FORMS][1::2])
def test_queries_that_see_nothing_any_more_have_what_a_blind_row_has(name):
    model, x = build(name)
    expected = compute_heads(model, x, Primitives(hide(torch.arange(2), torch.arange(T))))
    with intervene(model, CutEdges(slice(0, 2), kind="implicit")):
        assert_equal(model(x), model[1](expected.flatten(2)))


@pytest.mark.parametrize("name", [*FORMS][::2])
def test_a_temperature_divides_the_scores_before_the_softmax_or_activation(name):
    model, x = build(name)
    expected = compute_heads(model, x, Primitives())
    expected[:, :, 1] = compute_heads(model, x, Primitives(t=2.5))[:, :, 1]
    with intervene(model, Temperature(0, 1, 2.5, kind="implicit")):
        assert_equal(model(x), model[1](expected.flatten(2)))


@pytest.mark.parametrize(("name", "by"), [(name, ("zero", "mean", "resample")[n % 3]) for n, name in enumerate(FORMS)])
def test_a_head_knocked_out_has_a_context_of_zero_or_the_mean(name, by):
    model, x = build(name)
    plain = compute_heads(model, x, Primitives())
    head = plain[:, :, 1]
    expected = plain.clone()
    expected[:, :, 1] = {"zero": torch.zeros(()), "mean": head.mean(0), "resample": head.roll(1, 0)}[by]
    with intervene(model, KnockOut(0, 1, by, kind="implicit")):
        assert_equal(model(x), model[1](expected.flatten(2)))


@pytest.mark.parametrize("name", [*FORMS][::3])
def test_a_change_that_changes_nothing_leaves_every_bit(name):
    model, x = build(name)
    expected = model(x)
    for change in (
        CutEdges([], [], kind="implicit"),
        Temperature(t=1.0, kind="implicit"),
        KnockOut(head=[], kind="implicit"),
        Temperature(head=[], t=3.0, kind="implicit"),
        CutEdges(99, 0, kind="implicit"),
    ):
        with intervene(model, change):
            assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", ["talking heads", "differential", "relu over its sums"])
def test_other_rows_and_heads_keep_every_bit(name):
    model, x = build(name)
    model = model[:1]
    expected = model(x).unflatten(-1, (H, D))
    with intervene(model, CutEdges(slice(4, 9), 0, kind="implicit", head=1)):
        found = model(x).unflatten(-1, (H, D))
    assert torch.equal(found[:, :, [0, 2]], expected[:, :, [0, 2]])
    assert torch.equal(found[:, :4], expected[:, :4])
    assert torch.equal(found[:, 9:], expected[:, 9:])
    assert not torch.equal(found[:, 4:9, 1], expected[:, 4:9, 1])


@pytest.mark.parametrize("name", [*FORMS][1::2])
def test_gradients_are_those_of_the_layer_with_these_scores(name):
    model, x = build(name)
    hidden, x = hide(torch.arange(6), torch.tensor([0, 1])), x.requires_grad_()  # among them queries that see nothing
    expected = torch.autograd.grad(
        model[1](compute_heads(model, x, Primitives(hidden)).flatten(2)).square().sum(), [x, *model.parameters()]
    )
    with intervene(model, CutEdges(slice(0, 6), [0, 1], kind="implicit")):
        found = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    size = max(float(x.abs().max()) for x in expected)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < EQUAL * size


def test_several_changes_of_different_heads_are_made_together_and_other_layers_stay():
    torch.manual_seed(5)
    weigh, parts = FORMS["talking heads"]
    model, x = nn.Sequential(*(Own(weigh, parts) for _ in range(3))).eval(), torch.randn(B, T, C)
    hidden, first = hide(torch.arange(4, 9), torch.tensor([2])), model[0](x)
    expected = compute_heads(model[1:], first, Primitives())
    expected[:, :, 1] = compute_heads(model[1:], first, Primitives(hidden, t=0.5))[:, :, 1]
    expected[:, :, 2] = 0
    changes = (
        CutEdges(slice(4, 9), 2, layer=1, head=[1, 2], kind="implicit"),
        Temperature(1, 1, 0.5, kind="implicit"),
        KnockOut(1, 2, kind="implicit"),
    )
    with intervene(model, *changes), record(model) as recording:
        found = model(x)
    assert_equal(found, model[2](expected.flatten(2)))
    weights = recording.map(1, kind="implicit").dense()
    with record(model) as before:
        model(x)
    assert torch.equal(recording.map(0, kind="implicit").dense(), before.map(0, kind="implicit").dense())
    assert (weights[:, 0] - before.map(1, kind="implicit").dense()[:, 0]).abs().max() < EQUAL
    assert not torch.allclose(weights[:, 1], before.map(1, kind="implicit").dense()[:, 1])
    assert recording.map(1, kind="implicit").certificate().error < EQUAL
    assert not recording.missed


@pytest.mark.parametrize("name", ["talking heads of a linear", "differential", "relu", "relu over its sums"])
def test_edges_are_cut_by_position_while_a_cache_grows(name):
    model, x = build(name)
    layer = model[0]
    hidden = hide(torch.tensor([5, 8, 10, 12]), torch.tensor([0, 7, 9]))
    expected = compute_heads(model, x, Primitives(hidden)).flatten(2)
    model.forward = lambda x, cache: layer(x, cache)
    cache = [[], []]
    with torch.no_grad(), intervene(model, CutEdges([5, 8, 10, 12], [0, 7, 9], kind="implicit")), record(model) as recording:
        found = torch.cat([model(part, cache) for part in (x[:, :7], x[:, 7:9], *x[:, 9:].split(1, 1))], 1)
    assert_equal(found, expected)
    assert len(recording.runs) == 1
    weights = recording.map(0, kind="implicit").dense()
    assert not weights[:, :, [10, 12]][..., [0, 7, 9]].any()


@pytest.mark.parametrize("of", ["weights", "output"])
@pytest.mark.parametrize("name", ["talking heads", "talking heads, normed", "relu over its sums", "differential of halves"])
def test_weights_and_outputs_of_another_input_are_patched(name, of):
    model, x = build(name)
    other = torch.randn(B, T, C)
    with record(model, keep="values") as source:
        model(other)
    expected, theirs = (compute_heads(model, one, Primitives()) for one in (x, other))
    if of == "weights":
        values = model[0].project(x).unflatten(-1, (3, H, D))[:, :, 2].transpose(1, 2)
        theirs = (source.map(0, kind="implicit").dense() @ values).transpose(1, 2)
    expected[:, 3:6, 1] = theirs[:, 3:6, 1]
    with intervene(model, Patch(recording=source, layer=0, head=1, of=of, queries=slice(3, 6), kind="implicit")):
        assert_equal(model(x), model[1](expected.flatten(2)))


def run_with_warning(model, x, match, *changes):
    with pytest.warns(UserWarning, match=match), intervene(model, *changes):
        return model(x)


def test_what_a_layer_counts_and_draws_in_training_is_as_without_the_change():
    weigh = lambda p, q, k, norm: F.dropout(norm(p.softmax(p.score(q, k))), 0.5)  # noqa: E731
    results = []
    for changes in ((), (CutEdges(keys=1, kind="implicit"),)):
        torch.manual_seed(5)
        model, x = nn.Sequential(Own(weigh, [lambda: nn.BatchNorm2d(H)]), nn.Dropout()), torch.randn(B, T, C)
        result = run_with_warning(model, x, "give other numbers when they run again", *changes) if changes else model(x)
        results.append((result, *model.buffers()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


UNCHANGEABLE = {
    "dropout": (lambda p, q, k: F.dropout(p.score(q, k).relu(), 0.5), "give other numbers when they run again"),
    "Laplace over its sums": (
        lambda p, q, k: normalize(0.5 * (1 + torch.erf((p.score(q, k) - 0.7) / 0.3))),
        "divided by sums of what its activation makes",
    ),
    "over the queries": (lambda p, q, k: p.score(q, k).softmax(-2), "some are over other keys or queries"),
    "both directions": (lambda p, q, k: (w := p.score(q, k).softmax(-1)) + w.mT, "some are over other keys or queries"),
}


@pytest.mark.parametrize("name", UNCHANGEABLE)
def test_weights_that_cannot_be_computed_again_stay_with_a_warning_that_says_why(name):
    torch.manual_seed(5)
    weigh, why = UNCHANGEABLE[name]
    model, x = nn.Sequential(Own(weigh, is_causal=False)), torch.randn(B, T, C)
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    found = run_with_warning(model, x, f"CutEdges of all layers was not applied: 0: .*{why}", CutEdges(kind="implicit", keys=1))
    assert torch.equal(found, expected)
    torch.manual_seed(3)
    with intervene(model, KnockOut(kind="implicit")):
        assert not model(x).any()


class CutOff(nn.Module):
    """An activation of more scores than those whose values are summed."""

    def forward(self, x):
        return (x @ x.mT).relu()[..., 1:] @ x[:, 1:]


def test_weights_of_which_keys_were_cut_off_stay_with_a_warning_that_says_so():
    model, x = nn.Sequential(CutOff()), torch.randn(B, T, C)
    found = run_with_warning(model, x, "some are over other keys or queries", CutEdges(kind="implicit", keys=1))
    assert torch.equal(found, model(x))


def test_changes_of_self_attention_leave_it_and_say_which_kind_it_is():
    model, x = build("differential")
    expected = model(x)
    told = "0: its weights are no softmax .* and stay unchanged: changes with kind='implicit' are about them"
    assert torch.equal(run_with_warning(model, x, told, KnockOut(0)), expected)


def test_what_names_no_head_or_no_kind_is_refused():
    model, x = build("relu")
    with intervene(model, KnockOut(0, 3, kind="implicit")), pytest.raises(ConfigError, match="has head 3, but the heads are 0"):
        model(x)
    with pytest.raises(ConfigError, match="kind must be"):
        KnockOut(kind="linear")


class Distances(nn.Module):
    """A softmax of scores that are no product, whose weights a recording stores as they are."""

    def forward(self, x, hidden=False, t=1.0):
        scores = -torch.cdist(x, x) / t
        return torch.softmax(scores.masked_fill(torch.as_tensor(hidden), -torch.inf), -1) @ x


class Mixed(nn.Module):
    """Softmaxes mixed by numbers that sum to 1, so that the rows of the weights do too."""

    def forward(self, x, hidden=False, t=1.0):
        q, mixing = x.unflatten(-1, (2, -1)).transpose(1, 2), torch.tensor([[0.3, 0.7], [0.6, 0.4]])
        weights = torch.softmax(
            (q @ (q * torch.tensor([1.0, -2.0]).view(2, 1, 1)).mT / t).masked_fill(torch.as_tensor(hidden), -torch.inf), -1
        )
        return (torch.einsum("gh,bhij->bgij", mixing, weights) @ q).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("build", [Distances, Mixed])
def test_weights_that_are_stored_as_they_are_are_changed_by_their_scores_with_gradients(build):
    torch.manual_seed(2)
    model, x, hidden = nn.Sequential(build()), torch.randn(B, T, 4, requires_grad=True), torch.arange(T) < 2
    with torch.no_grad(), record(model) as recording:
        model(x)
    assert "stored as they are" in recording.notes[0]
    with intervene(model, CutEdges(keys=[0, 1]), Temperature(t=2.0)), record(model) as changed:
        found = model(x)
    expected = model[0](x, hidden, 2.0)
    assert_equal(found, expected)
    one, other = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
    assert_equal(one, other)
    assert not changed.map(0).dense()[..., :2].any()
    assert (changed.map(0).dense().sum(-1) - 1).abs().max() < EQUAL


def test_interventions_inside_each_other_add_up():
    model, x = build("differential")
    expected = compute_heads(model, x, Primitives(hide(torch.arange(4, 9), torch.tensor([1, 3])), t=2.0))
    outer, inner = (CutEdges(slice(4, 9), key, kind="implicit") for key in (1, 3))
    with intervene(model, outer, Temperature(t=2.0, kind="implicit")), intervene(model, inner):
        assert_equal(model(x), model[1](expected.flatten(2)))


@pytest.mark.parametrize("is_cut_outside", [False, True])
def test_a_head_that_one_block_takes_out_stays_out_in_one_around_or_inside_it(is_cut_outside):
    model, x = build("differential")
    expected = compute_heads(model, x, Primitives(hide(torch.arange(4, 9), torch.tensor([1, 3])), t=2.0)).clone()
    expected[:, :, 1] = 0
    blocks = [[KnockOut(head=1, kind="implicit")], [CutEdges(slice(4, 9), [1, 3], kind="implicit")]]
    blocks[1].append(Temperature(t=2.0, kind="implicit"))
    outer, inner = blocks[::-1] if is_cut_outside else blocks
    with intervene(model, *outer), intervene(model, *inner):
        assert_equal(model(x), model[1](expected.flatten(2)))


def test_nothing_of_a_router_is_kept():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(C, 4), nn.ModuleList(nn.Linear(C, C) for _ in range(4))

        def forward(self, x):
            weights = self.router(x).softmax(-1)
            y = torch.stack([expert(x) for expert in self.experts], -1)
            self.made = weakref.ref(y)
            return (y * weights.unsqueeze(-2)).sum(-1)

    layer = Routed()
    gone = nn.Identity()
    gone.register_forward_hook(lambda *_: gone.alive.append(layer.made() is not None))
    gone.alive = []
    model = nn.Sequential(layer, gone)
    with pytest.warns(UserWarning, match="was not applied"), torch.no_grad(), intervene(model, CutEdges(keys=0)):
        model(torch.randn(B, T, C))
    assert gone.alive == [False]

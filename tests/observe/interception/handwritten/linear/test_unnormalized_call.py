"""Handwritten weights that are no softmax are recorded as what they are, equal to the model's own, and no bit of it changes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from observe.recording_checks import EQUAL, assert_same_mechanism, record_and_compare
from regard.map.scored_matrix import ScoredMatrix
from regard.map.stored_matrix import StoredMatrix
from regard.observe import record
from regard.observe.interception.handwritten.linear.unnormalized_call import UNKNOWN

B, H, T, D = 2, 3, 37, 5
C = H * D


class Own(nn.Module):
    """Weights that a function makes of q and k (b, h, t, d), times values; `seen` are the weights."""

    def __init__(self, weigh, parts=()):
        super().__init__()
        self.project, self.weigh, self.parts = nn.Linear(C, 3 * C), weigh, nn.ModuleList(build() for build in parts)
        self.multiply = torch.matmul

    def forward(self, x, cache=None):
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = (torch.cat([*earlier, new], 2) for earlier, new in ((cache[0], k), (cache[1], v)))
            cache[0], cache[1] = [k], [v]
        self.seen = self.weigh(q, k, *self.parts)
        return self.multiply(self.seen, v).transpose(1, 2).flatten(2)


def score(q, k):
    return q @ k.mT / math.sqrt(q.shape[-1])


def see(n, k):
    return torch.ones(n, k, dtype=torch.bool).tril(k - n)


def hide(scores, value=-torch.inf):
    return scores.masked_fill(~see(*scores.shape[-2:]), value)


def mix_then_norm(q, k, mix, norm):
    return norm(mix(score(q, k).softmax(-1)))


def subtract_halves(q, k):
    """The Differential Transformer's own code: one softmax of twice as many heads. https://arxiv.org/abs/2410.05258"""
    weights = score(torch.cat([q, q.flip(-1)], 1), torch.cat([k, k * 2], 1)).softmax(-1)
    weights = weights.view(B, H, 2, T, T)
    return weights[:, :, 0] - 0.8 * weights[:, :, 1]


def subtract_with_a_factor_for_each(q, k):
    factor = torch.sigmoid(q.mean((2, 3)))[..., None, None]
    return hide(score(q, k)).softmax(-1) - factor * hide(score(q, q)).softmax(-1)


def choose_straight_through(q, k):
    """Hard choices of a softmax over the queries that gradients take for soft ones, as GroupViT's groups."""
    soft = score(q, k).softmax(-2)
    hard = torch.zeros_like(soft).scatter_(-2, soft.argmax(-2, keepdim=True), 1.0)
    return hard - soft.detach() + soft


FORMS = {  # name: weights, how modules are built, what it is called, whether it has a formula
    "relu": (lambda q, k: F.relu(score(q, k)), [], "relu attention", True),
    "relu over the length": (lambda q, k: score(q, k).relu() / T, [], "relu attention", True),
    "relu over what is seen": (
        lambda q, k: hide(score(q, k)).relu() / torch.arange(1, T + 1).unsqueeze(-1),
        [],
        "relu attention",
        True,
    ),
    "nn.ReLU, masked after": (lambda q, k, act: act(score(q, k)).tril(), [nn.ReLU], "relu attention", True),
    "a table after": (
        lambda q, k: score(q, k).sigmoid().masked_fill(torch.arange(T) % 3 == 1, 0),
        [],
        "sigmoid attention",
        True,
    ),
    "squared relu": (lambda q, k: hide(score(q, k)).relu().square(), [], "squared relu attention", True),
    "squared by itself": (lambda q, k: (r := score(q, k).relu()) * r, [], "squared relu attention", True),
    "scores by themselves": (lambda q, k: (s := score(q, k)) * s, [], "square attention", True),
    "Laplace, as in Mega": (lambda q, k: 0.5 * (1 + torch.erf((score(q, k) - 0.7) / 0.3)), [], "erf attention", False),
    "clamp": (lambda q, k: score(q, k).clamp(min=0).pow(2), [], "squared relu attention", True),
    "sigmoid": (lambda q, k: torch.sigmoid(hide(score(q, k)) - math.log(T)), [], "sigmoid attention", True),
    "silu": (lambda q, k: F.silu(score(q, k)) * 0.1, [], "silu attention", True),
    "gelu": (lambda q, k: F.gelu(score(q, k)), [], "gelu attention", True),
    "another clamp": (lambda q, k: score(q, k).clamp(min=0.5), [], UNKNOWN, False),
    "a clamp just above 0": (lambda q, k: score(q, k).clamp(min=1e-6), [], UNKNOWN, False),
    "a clamp on both sides": (lambda q, k: score(q, k).clamp(-1, 1), [], UNKNOWN, False),
    "a cube": (lambda q, k: score(q, k) ** 3, [], UNKNOWN, False),
    "a cube of products": (lambda q, k: (s := score(q, k)) * s * s, [], UNKNOWN, False),
    "a cube of relu": (lambda q, k: score(q, k).relu() ** 3, [], UNKNOWN, False),
    "a root of relu": (lambda q, k: score(q, k).relu().sqrt(), [], UNKNOWN, False),
    "leaky relu": (lambda q, k: F.leaky_relu(score(q, k)), [], "leaky_relu attention", False),
    "talking heads": (
        lambda q, k, mix: mix(hide(score(q, k)).softmax(-1)),
        [lambda: nn.Conv2d(H, H, 1, bias=False)],
        "talking heads",
        True,
    ),
    "talking heads with a bias": (
        lambda q, k, mix: mix(score(q, k).softmax(-1)),
        [lambda: nn.Conv2d(H, H, 1)],
        "talking heads",
        True,
    ),
    "talking heads of a linear": (
        lambda q, k, mix: mix(score(q, k).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        [lambda: nn.Linear(H, H)],
        "talking heads",
        True,
    ),
    "talking twice": (
        lambda q, k, before, after: after(before(score(q, k)).softmax(-1)),
        [lambda: nn.Conv2d(H, H, 1)] * 2,
        "attention whose weights are no softmax",
        False,
    ),
    "mixed and normed": (mix_then_norm, [lambda: nn.Conv2d(H, H, 1), lambda: nn.BatchNorm2d(H)], "talking heads", True),
    "differential": (
        lambda q, k: score(q, k).softmax(-1) - 0.3 * score(k, q).softmax(-1),
        [],
        "differential attention",
        True,
    ),
    "differential of halves": (subtract_halves, [], "differential attention", True),
    "differential, its own factor": (subtract_with_a_factor_for_each, [], "differential attention", True),
    "a sum": (lambda q, k: score(q, k).softmax(-1) + score(k, q).softmax(-1), [], "a sum of softmaxes", True),
    "both directions": (
        lambda q, k: (w := score(q, k).softmax(-1)) + w.mT,
        [],
        "attention whose weights are no softmax",
        False,
    ),
    "slots": (
        lambda q, k: (w := score(q, k).softmax(-2)) / w.sum(-1, keepdim=True),
        [],
        "attention whose weights are no softmax",
        False,
    ),
    "over the queries": (lambda q, k: score(q, k).softmax(-2), [], "attention whose weights are no softmax", False),
    "straight through": (choose_straight_through, [], "attention whose weights are no softmax", False),
    "a power": (lambda q, k: score(q, k).softmax(-1) ** 3, [], "attention whose weights are no softmax", False),
}


def run(name, dtype=torch.float64):
    torch.manual_seed(5)
    weigh, parts, *_ = FORMS[name]
    model = nn.Sequential(Own(weigh, parts)).to(dtype).eval()
    return model, *record_and_compare(model, lambda m: m(torch.randn(B, T, C, dtype=dtype)))


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_recorded_under_its_name_and_equals_the_models_weights(name):
    model, recording, _ = run(name)
    _, _, title, has_formula = FORMS[name]
    assert recording.layers("implicit") == ["0"]
    found = recording.map(0, kind="implicit")
    assert (found.dense() - model[0].seen).abs().max() < EQUAL
    assert found.certificate().error < EQUAL
    assert found.mechanism.title == title
    assert isinstance(found.mechanism, ScoredMatrix if has_formula else StoredMatrix)
    assert bool(recording.notes) == (not has_formula or name == "a table after"), recording.notes
    if recording.notes:
        assert title in recording.notes[0]
        assert "bytes" in recording.notes[0]


@pytest.mark.parametrize("name", ["relu over what is seen", "talking heads with a bias", "differential", "sigmoid"])
def test_float32_is_recorded_by_its_formula_too(name):
    model, recording, _ = run(name, torch.float32)
    found = recording.map(0, kind="implicit")
    assert isinstance(found.mechanism, ScoredMatrix)
    assert (found.dense() - model[0].seen).abs().max() < 1e-5
    assert found.dtype == torch.float32


@pytest.mark.parametrize("weigh", [lambda s: s.clamp(min=0.5), lambda s: s.clamp_min(0.1), lambda s: s.clip(min=0) + 0.2])
def test_the_weight_of_a_single_key_is_that_of_the_model_and_not_1(weigh):
    model = nn.Sequential(Own(lambda q, k: weigh(score(q, k)))).double()
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, 1, C, dtype=torch.float64)))
    assert (recording.map(0, kind="implicit").dense() - model[0].seen).abs().max() < EQUAL


def test_a_formula_takes_memory_that_grows_with_the_length_alone():
    sizes = []
    for length in (101, 202):
        model = nn.Sequential(Own(FORMS["talking heads"][0], FORMS["talking heads"][1]))
        with torch.no_grad(), record(model) as recording:
            model(torch.randn(1, length, C))
        mechanism = recording.map(0, kind="implicit").mechanism
        sizes.append(sum(x.nbytes for x in mechanism.tensors.values()))
    assert sizes[1] < 2.01 * sizes[0]


def decay(scores):
    """Scores that fade with the distance from query to key, by a rate for each head, as those of retention."""
    n, k = scores.shape[-2:]
    back = torch.arange(k - n, k).unsqueeze(-1) - torch.arange(k)
    return scores * (see(n, k) * torch.tensor([0.9, 0.8, 0.7], dtype=scores.dtype).view(H, 1, 1) ** back.clamp(min=0))


@pytest.mark.parametrize("name", ["relu", "differential", "decaying"])
def test_the_steps_of_a_generation_are_one_map_also_from_a_file(name, tmp_path):
    torch.manual_seed(2)
    weigh = {
        "relu": lambda q, k: hide(score(q, k)).relu(),
        "differential": lambda q, k: hide(score(q, k)).softmax(-1) - 0.5 * hide(score(q, 2 * k)).softmax(-1),
        "decaying": lambda q, k: decay(score(q.relu(), k.relu())),
    }[name]
    model, x, cache = nn.Sequential(Own(weigh)).double(), torch.randn(B, 13, C, dtype=torch.float64), [[], []]
    model.forward = lambda x, cache=None: model[0](x, cache)
    with torch.no_grad(), record(model) as recording:
        for part in (x[:, :7], x[:, 7:9], *x[:, 9:].split(1, 1)):
            model(part, cache)
    model(x)
    assert len(recording.runs) == 1
    assert not recording.missed
    found = recording.map(0, kind="implicit")
    assert (found.dense() - model[0].seen).abs().max() < EQUAL
    assert found.certificate().error < EQUAL
    assert recording.values(0, kind="implicit").shape == (B, H, 13, D)
    assert recording.calls[-1].map.shape == (B, H, 1, 13)
    assert torch.equal(recording.calls[1].map.dense(), found.dense()[:, :, 7:9, :9])
    recording.save(tmp_path / "recording")
    loaded = regard.load(tmp_path / "recording")
    assert_same_mechanism(loaded.map(0, kind="implicit"), found)
    assert repr(loaded.map(0, kind="implicit")) == repr(found)


def test_a_second_prompt_is_a_run_of_its_own():
    model = nn.Sequential(Own(FORMS["relu"][0]))
    with torch.no_grad(), record(model) as recording:
        for _ in range(2):
            model(torch.randn(B, T, C))
    assert len(recording.runs) == 2
    assert not recording.missed


def test_weights_that_are_dropped_are_recorded_as_they_were_before():
    torch.manual_seed(3)
    model = nn.Sequential(Own(lambda q, k, drop: drop(score(q, k).relu()), [nn.Dropout])).double()
    x = torch.randn(B, T, C, dtype=torch.float64)
    with record(model) as recording:
        model(x)
    model.eval()(x)
    assert (recording.map(0, kind="implicit").dense() - model[0].seen).abs().max() < EQUAL


@pytest.mark.parametrize("name", ["topk", "sort"])
def test_keys_that_each_query_picks_are_the_mask_of_a_softmax(name):
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(C, 3 * C)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            scores = hide(score(q, k))
            found, where = scores.topk(7) if name == "topk" else scores.sort(-1, descending=True)
            picked = v.unsqueeze(2).expand(-1, -1, T, -1, -1).gather(3, where.unsqueeze(-1).expand(-1, -1, -1, -1, D))
            weights = found.softmax(-1)
            self.seen = torch.zeros(B, H, T, T, dtype=x.dtype).scatter(-1, where, weights)
            return (weights.unsqueeze(-2) @ picked).squeeze(-2).transpose(1, 2).flatten(2)

    torch.manual_seed(1)
    model = nn.Sequential(Picks()).double()
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C, dtype=torch.float64)))
    assert (recording.map(0).dense() - model[0].seen).abs().max() < EQUAL
    assert f"it is {'top-k' if name == 'topk' else 'sorted'} attention" in recording.notes[0]


class Divided(nn.Module):
    """Weights that an activation makes of scores, whose product with the values is changed; `context` is what it is then."""

    def __init__(self, activate, change):
        super().__init__()
        self.project, self.activate, self.change = nn.Linear(C, 3 * C), activate, change

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        self.seen = self.activate(score(q, k))
        context = self.change(self.seen, v)
        self.context = context.detach().clone()
        v.data.zero_()
        return context.transpose(1, 2).flatten(2)


def total(weights):
    return weights.sum(-1, keepdim=True)


def divide_in_place(weights, v):
    context = weights @ v
    context /= total(weights) + 1e-6
    return context


def divide_by_column_of_ones(weights, v):
    context = weights @ F.pad(v, (0, 1), value=1.0)
    return context[..., :-1] / context[..., -1:].clamp(min=1e-9)


ACTIVATIONS = {  # positive ones
    "relu": lambda s: (s + 2).relu(),
    "sigmoid": torch.sigmoid,
    "squared relu": lambda s: hide(s + 2, -9).relu().square(),
    "softplus, which is stored": F.softplus,
    "without keys for the first queries": lambda s: (s + 1).relu().tril(-2),
}
CHANGES = {
    "divided": lambda w, v: (w @ v) / (total(w) + 1e-9),
    "divided in place": divide_in_place,
    "a column of ones": divide_by_column_of_ones,
    "multiplied by reciprocals": lambda w, v: (1 / total(w).clamp(min=1e-6)) * (w @ v),
    "with heads side by side": lambda w, v: ((w @ v).transpose(1, 2) / (total(w).transpose(1, 2) + 1e-9)).transpose(1, 2),
    "by einsum": lambda w, v: torch.einsum("bhqd,bhq->bhqd", w @ v, 1 / (w.sum(-1) + 1e-9)),
    "over the number of keys": lambda w, v: (w @ v) / T,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activated_scores_are_recorded_as_their_product_with_values_is_divided(activation, change):
    torch.manual_seed(3)
    model = nn.Sequential(Divided(ACTIVATIONS[activation], CHANGES[change])).double().eval()
    with torch.no_grad():
        recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C, dtype=torch.float64)))
    found = recording.map(0, kind="implicit")
    torch.testing.assert_close(found.dense() @ found.values, model[0].context, rtol=0, atol=EQUAL)
    assert found.certificate().error < EQUAL


def test_a_norm_of_each_row_is_no_part_of_activated_scores():
    def norm(weights, v):
        context = weights @ v
        return context * context.square().mean(-1, keepdim=True).rsqrt()

    model = nn.Sequential(Divided(torch.sigmoid, norm)).double()
    with torch.no_grad():
        recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C, dtype=torch.float64)))
    assert (recording.map(0, kind="implicit").dense() - model[0].seen).abs().max() < EQUAL


def test_the_steps_of_a_generation_are_divided_each_by_their_own_sums():
    torch.manual_seed(2)
    part, x, cache = Own(lambda q, k: hide(score(q, k)).sigmoid()), torch.randn(B, 13, C).double(), [[], []]
    part.multiply = lambda weights, v: (weights @ v) / total(weights)
    model = nn.Sequential(part).double()
    model.forward = lambda x, cache=None: model[0](x, cache)
    with torch.no_grad(), record(model) as recording:
        for rows in (x[:, :7], x[:, 7:9], *x[:, 9:].split(1, 1)):
            model(rows, cache)
    model(x)
    assert len(recording.runs) == 1
    assert not recording.missed
    expected = part.seen / total(part.seen)
    assert (recording.map(0, kind="implicit").dense() - expected).abs().max() < EQUAL

"""Maps with a graph to the model, and recordings that share memory with the graph of the forward."""

import pytest
import torch
import torch.nn.functional as F

import regard
from bounds import assert_within, attention_bounds
from observe.families import find_family
from observe.family import Widened
from regard import AttentionMap, Causal
from regard.errors import ConfigError

EQUAL = 1e-10  # float64


def loss_of(rows):
    """A loss that depends on every weight."""
    return (rows * torch.linspace(-1, 1, rows.shape[-1], dtype=rows.dtype)).square().sum()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_oss", "bart"])
def test_a_loss_on_the_map_reaches_the_model_as_one_on_eager_weights(name):
    family = find_family(name)
    eager = family.build(torch.float64, attn_implementation="eager")
    given = family.feed(eager, "none")
    kind = "cross" if name == "bart" else "self"
    with Widened():
        weights = eager(**given, output_attentions=True)["cross_attentions" if kind == "cross" else "attentions"]
    loss = sum(loss_of(one[:, :, -2:]) for one in weights)
    loss.backward()
    model = family.build(torch.float64)
    with Widened(), regard.record(model, keep="values") as recording:
        model(**given)
    ours = sum(loss_of(recording.map(layer, kind=kind, grad=True)[:, :, -2:]) for layer in range(len(weights)))
    ours.backward()
    assert float((ours - loss).detach().abs()) < EQUAL * float(loss.detach())
    gradients = [one.grad for one in eager.parameters()]
    assert any(one is not None and one.abs().max() > 1e-6 for one in gradients)
    for (name, one), other in zip(model.named_parameters(), gradients, strict=True):
        if "sinks" in name:  # a constant of the map
            continue
        if other is not None and one.grad is not None:
            assert float((one.grad - other).abs().max()) < EQUAL * max(float(other.abs().max()), 1e-3)
        else:
            assert all(x is None or not x.any() for x in (one.grad, other))


def test_one_head_and_recorded_heads_have_the_graph_of_their_own():
    family = find_family("llama")
    model = family.build(torch.float64)
    given = family.feed(model, "none")

    def compute_query_gradient(recording, head):
        model.zero_grad()
        loss_of(recording.map(0, head, grad=True).dense()).backward()
        return next(p.grad for n, p in model.named_parameters() if "q_proj" in n).clone()

    with regard.record(model, keep="values") as whole:
        model(**given)
    expected = compute_query_gradient(whole, 2)
    with regard.record(model, keep="values", heads=[3, 2]) as some:
        model(**given)
    assert (compute_query_gradient(some, 2) - expected).abs().max() < EQUAL
    assert expected.any()


def test_a_map_without_a_graph_is_refused_with_the_reason(tmp_path):
    model = regard.GPT2(regard.GPT2Config(layers=1, heads=2, width=8, context=12, vocabulary=30))
    ids = torch.arange(10).unsqueeze(0)
    with regard.record(model) as without:
        model(ids)
    with torch.no_grad(), regard.record(model, keep="values") as frozen:
        model(ids)
    for recording in (without, frozen):
        with pytest.raises(ConfigError, match="without values or without gradients"):
            recording.map(0, grad=True)
    with regard.record(model, keep="bfloat16,values") as half:
        model(ids)
    with pytest.raises(ConfigError, match=r"stored in torch\.bfloat16, not in torch\.float32"):
        half.map(0, grad=True)
    with regard.record(model, keep="values", to=tmp_path / "folder") as stored:
        model(ids)
    assert stored.map(0, grad=True).dense().requires_grad
    stored.save(tmp_path / "recording")
    with pytest.raises(ConfigError, match="without values or without gradients"):
        regard.load(tmp_path / "recording").map(0, grad=True)


def test_a_map_of_stored_weights_has_no_graph_and_says_so():
    """A loss on it would train nothing."""

    class Distances(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.softmax(-torch.cdist(self.project(x), x), dim=-1) @ self.project(x)

    model = torch.nn.Sequential(Distances())
    with regard.record(model, keep="values") as recording:
        model(torch.randn(1, 5, 4))
    assert "stored as they are" in recording.notes[0]
    with pytest.raises(ConfigError, match="need no gradient, as those of weights that are stored as they are"):
        recording.map(0, grad=True)


class Changing(torch.nn.Module):
    """A layer that may write to its keys after its attention."""

    def __init__(self, writes):
        super().__init__()
        self.project, self.writes = torch.nn.Linear(8, 24), writes

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.project(x).chunk(3, -1))
        k = k.clone()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.writes:
            k.mul_(2)
        return out


def test_a_recording_shares_what_the_graph_keeps_and_notices_when_it_is_written_to(tmp_path):
    x = torch.randn(1, 7, 8)
    model = Changing(False)
    with regard.record(model, keep="values") as recording:
        model(x)
    stored = recording.calls[0].stored
    assert stored.q.untyped_storage().data_ptr() == stored.graph.q.untyped_storage().data_ptr()
    assert not stored.q.requires_grad
    recording.save(tmp_path / "recording")
    ours, loaded = (one.map(0).planes.request for one in (recording, regard.load(tmp_path / "recording")))
    assert torch.equal(loaded.q, ours.q)  # a product of them may round by where in memory they lie
    assert torch.equal(loaded.k, ours.k)
    model.writes = True
    with regard.record(model, keep="values") as changed:
        model(x)
    for read in (lambda: changed.map(0), lambda: changed.values(0), lambda: changed.save(tmp_path / "other")):
        with pytest.raises(ConfigError, match="changed in place after its attention"):
            read()


@pytest.mark.parametrize("keep", [None, "values"])
def test_a_recording_without_gradients_has_the_keys_that_the_kernel_saw(keep):
    model, x = Changing(False), torch.randn(1, 7, 8)
    with torch.no_grad(), regard.record(model, keep=keep) as recording:
        model(x)
    model.writes = True
    with torch.no_grad(), regard.record(model, keep=keep) as changed:
        model(x)
    ours, others = (one.map(0).planes.request for one in (recording, changed))
    assert torch.equal(others.q, ours.q)
    assert torch.equal(others.k, ours.k)


def test_queries_that_are_parameters_are_copied():
    """An optimizer writes to them."""

    class Learned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = torch.nn.Parameter(torch.randn(1, 1, 3, 4))

        def forward(self, x):
            return F.scaled_dot_product_attention(self.queries, x, x)

    model, x = Learned(), torch.randn(1, 1, 5, 4)
    with regard.record(model, keep="values") as recording:
        model(x)
    kind = recording.calls[0].kind
    before = recording.map(0, kind=kind).dense()
    with torch.no_grad():
        model.queries.mul_(3)
    assert torch.equal(recording.map(0, kind=kind).dense(), before)


def test_under_autocast_the_graph_is_of_what_the_kernel_saw():
    model = regard.GPT2(regard.GPT2Config(layers=1, heads=2, width=8, context=12, vocabulary=30))
    with torch.autocast("cpu", torch.bfloat16), regard.record(model, keep="values") as recording:
        model(torch.arange(10).unsqueeze(0))
    found, m = recording.map(0, grad=True).dense(), recording.map(0)
    q, k = (x.double() for x in (m.planes.request.q, m.planes.request.k))
    weights = AttentionMap(q, k, Causal()).dense()
    for one in (found, m.dense()):  # by two products
        assert_within(one, weights, attention_bounds(torch.float32, q, k, k, weights).weights)
    loss_of(found).backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())

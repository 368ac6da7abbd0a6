"""The number or the path of a layer means the same calls in an intervention, in a recording and in record's selection."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AlbertConfig, AlbertModel

from observe.models import gpt2, words
from observe.recording_checks import EQUAL
from regard import ConfigError, CutEdges, KnockOut, Patch, effects, heads, intervene, record

pytestmark = pytest.mark.usefixtures("in_float64", "float64_models")
B, H, T, D = 2, 3, 7, 5
C = H * D


class Attention(nn.Module):
    """Heads of attention whose context, if it is 0, adds nothing."""

    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C, bias=False)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Relu(Attention):
    """Attention without a softmax."""

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self.out(((q @ k.mT / D).relu() @ v).transpose(1, 2).flatten(2))


class Cached(Attention):
    """Causal attention that keeps its keys and values for the next forward."""

    known = None

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        if self.known is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.known, (k, v), strict=True))
        self.known = k, v
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Steps(nn.Module):
    """Modules of attention by their paths, and the order in which a forward runs them."""

    def __init__(self, order, build=Attention):
        super().__init__()
        torch.manual_seed(1)
        self.order = order
        for path in sorted(set(order)):
            parent = self
            *above, last = path.split(".")
            for one in above:
                if one not in parent._modules:
                    parent.add_module(one, nn.Module())
                parent = parent._modules[one]
            parent.add_module(last, build())

    def forward(self, x, left_out=None, order=None):
        for n, path in enumerate(self.order if order is None else order):
            if n != left_out:
                x = x + self.get_submodule(path)(x)
        return x


ORDERS = {
    "groups of one module": ["groups.0.attn", "groups.0.attn", "groups.1.attn", "groups.1.attn"],
    "a loop over two modules": ["layers.0.attn", "layers.1.attn"] * 2,
    "a stem of its own": ["stem.attn", "blocks.0.attn", "blocks.1.attn", "blocks.2.attn"],
    "towers": ["text.0.attn", "text.1.attn", "vision.0.attn", "vision.1.attn", "vision.2.attn"],
    "kinds of blocks in turn": ["layers.0.local", "layers.1.wide", "layers.2.local", "layers.3.wide"],
    "another order than that of the modules": ["blocks.2.attn", "blocks.0.attn", "blocks.1.attn"],
    "stages": ["stages.0.blocks.0.attn", "stages.1.blocks.0.attn", "stages.1.blocks.1.attn"],
}


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("order", "build", "kind"),
    [
        *((order, Attention, "self") for order in ORDERS),
        *((order, Relu, "implicit") for order in ("groups of one module", "towers")),
    ],
)
def test_a_number_is_that_of_the_map_in_the_order_in_which_layers_run(order, build, kind):
    model, x = Steps(ORDERS[order], build).eval(), torch.randn(B, T, C)
    with record(model) as plain:
        model(x)
    assert plain.layers(kind) == ORDERS[order]
    for n in range(len(ORDERS[order])):
        with intervene(model, KnockOut(layer=n, kind=kind)):
            once = model(x)
            assert n or torch.equal(model(x), once)
        assert (once - model(x, left_out=n)).abs().max() < EQUAL
    for n in (1, len(ORDERS[order]) - 1):
        with intervene(model, CutEdges(queries=3, keys=[1, 2], layer=n, kind=kind)), record(model) as cut:
            model(x)
        are_cut = [not cut.map(one, kind=kind).dense()[:, :, 3, 1:3].any() for one in range(len(ORDERS[order]))]
        assert are_cut == [one == n for one in range(len(ORDERS[order]))]


@pytest.mark.parametrize("order", ORDERS)
def test_a_path_means_all_runs_of_its_module(order):
    model, x = Steps(ORDERS[order]).eval(), torch.randn(B, T, C)
    for path in set(ORDERS[order]):
        with intervene(model, KnockOut(layer=path)):
            found = model(x)
        kept = [one for one in ORDERS[order] if one != path]
        assert (found - model(x, order=kept)).abs().max() < EQUAL


@pytest.mark.parametrize("order", [*ORDERS][::2])
def test_record_keeps_the_layer_of_a_number(order):
    model, x = Steps(ORDERS[order]).eval(), torch.randn(B, T, C)
    with record(model) as plain:
        model(x)
    for n, path in enumerate(ORDERS[order]):
        with record(model, layers=[n]) as one:
            model(x)
        assert path in one.layers()
        place = one.layers().index(path)
        assert torch.equal(one.map(place).dense(), plain.map(n).dense())
        if order not in ("a stem of its own", "towers"):  # where it is also the number of a layer of a part
            assert one.layers() == [path]


@pytest.mark.parametrize(("order", "of"), [(order, ("weights", "output")[n % 2]) for n, order in enumerate(ORDERS)])
def test_a_patch_takes_what_the_same_run_of_the_module_did(order, of):
    model, x, other = Steps(ORDERS[order]).eval(), torch.randn(B, T, C), torch.randn(B, T, C)
    with torch.no_grad(), record(model, keep="values") as source:
        model(other)
    for n in range(len(ORDERS[order])):
        with torch.no_grad(), record(model, keep="values") as now, intervene(model, Patch(layer=n, recording=source, of=of)):
            found = model(x)
        with torch.no_grad():
            hidden = x
            for place, path in enumerate(ORDERS[order]):
                attention = model.get_submodule(path)
                context = source.map(n) @ (source if of == "output" else now).values(n)
                own = attention(hidden) if place != n else attention.out(context.transpose(1, 2).flatten(2))
                hidden = hidden + own
        assert (found - hidden).abs().max() < EQUAL


def test_a_run_of_a_module_that_a_recording_left_out_is_not_another_one_of_it():
    model, x = Steps(ORDERS["groups of one module"]).eval(), torch.randn(B, T, C)
    with torch.no_grad(), record(model, layers=[1], keep="values") as part:
        model(x)
    assert part.layers() == ["groups.0.attn"]
    with (
        pytest.raises(ConfigError, match=r"has run 1 of groups.0.attn, not run 0"),
        intervene(model, Patch(layer=0, recording=part)),
    ):
        model(x)
    with torch.no_grad(), intervene(model, Patch(layer=1, recording=part)):
        patched = model(x)
    assert (patched - model(x)).abs().max() < EQUAL


def test_a_layer_that_a_forward_leaves_out_makes_numbers_of_others_a_choice():
    """As in layer drop: number 1 is another module in each forward."""
    model, x = Steps(ORDERS["stages"]).eval(), torch.randn(B, T, C)

    def run_twice(layer):
        with intervene(model, KnockOut(layer=layer)):
            model(x)
            model(x, left_out=1)

    with pytest.raises(ConfigError, match=r"layer 1 is both stages.1.blocks.0.attn and stages.1.blocks.1.attn"):
        run_twice(1)
    with pytest.raises(ConfigError, match=r"layer 2 .*stages.1.blocks.1.attn has been number 1 and 2"):
        run_twice(2)
    with intervene(model, KnockOut(layer="stages.1.blocks.1.attn")):
        found = model(x, left_out=1)
    assert (found - model(x, order=ORDERS["stages"][:1])).abs().max() < EQUAL


def test_a_number_of_the_encoder_alone_is_refused_where_numbers_count_the_decoder():
    order = [f"encoder.{n}.attn" for n in range(3)] + [f"decoder.{n}.attn" for n in range(2)]
    model, x = Steps(order).eval(), torch.randn(B, T, C)
    with record(model) as recording:
        model(x)
    with pytest.raises(ConfigError, match="layer must be below 2"):
        recording.map(2)
    with pytest.raises(ConfigError, match=r"layer 2 .*encoder.2.attn.*pass its path"), intervene(model, KnockOut(layer=2)):
        model(x)
    with intervene(model, KnockOut(layer="encoder.2.attn")):
        found = model(x)
    assert (found - model(x, left_out=2)).abs().max() < EQUAL


@pytest.mark.parametrize("number", [2, 3])
def test_the_steps_of_a_generation_are_recorded_of_the_layers_of_its_first_forward(number):
    order, recordings = ["tower.0", "tower.1", "text.0", "text.1", "text.2", "text.3"], []
    x = torch.randn(B, T, C)
    for chosen in ({}, {"layers": [number]}):
        model = Steps(order, Cached)
        with torch.no_grad(), record(model, **chosen) as found:
            model(x)
            for n in range(3):
                model(x[:, n : n + 1], order=order[2:])
        recordings.append(found)
    whole, part = recordings
    assert part.layers()[0] == order[number]
    for name in part.layers():
        assert whole.map(name).shape[2] == T + 3
        torch.testing.assert_close(part.map(name).dense(), whole.map(name).dense(), rtol=EQUAL, atol=EQUAL)


def test_a_number_that_no_layer_has_is_answered_with_those_that_there_are():
    model, tokens = gpt2(), words(1, 5)
    with (
        pytest.warns(UserWarning, match=r"no self attention ran there: layers 0 to 2 are h.0.attn, h.1.attn, h.2.attn"),
        intervene(model.transformer, KnockOut(layer=-1)),
    ):
        model.transformer(tokens)


class Parts(Attention):
    """One call of attention for each half of the tokens, as of images that are packed."""

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        halves = zip(*(one.split(4, 2) for one in (q, k, v)), strict=True)
        contexts = [F.scaled_dot_product_attention(*half) for half in halves]
        return self.out(torch.cat(contexts, 2).transpose(1, 2).flatten(2))


def test_positions_of_several_calls_of_one_visit_are_said_to_be_those_of_each():
    model, x = nn.Sequential(Parts()), torch.randn(B, T, C)
    with pytest.warns(UserWarning, match=r"0 calls attention several times in one run.* positions"):  # noqa: SIM117
        with intervene(model, CutEdges(queries=2, keys=1)), record(model) as recording:
            model(x)
    assert [call.map.dense()[0, 0].eq(0).nonzero().tolist() for call in recording["0"]] == [[[2, 1]], [[2, 1]]]
    with intervene(model, KnockOut(head=1)):
        found = model(x)
    model[0].out.weight.data[:, D : 2 * D] = 0
    assert (found - model(x)).abs().max() < EQUAL


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_of_a_loop_over_heads_are_said_to_be_those_of_each_call(heads):
    class Loop(Parts):
        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            parts = [F.scaled_dot_product_attention(*one) for one in zip(*(y.split(heads, 1) for y in (q, k, v)), strict=True)]
            return self.out(torch.cat(parts, 1).transpose(1, 2).flatten(2))

    layer = Loop()
    layer.num_heads = H
    model, x = nn.Sequential(layer), torch.randn(B, T, C)
    with (
        pytest.warns(UserWarning, match=r"0 calls attention several times in one run.* heads"),
        intervene(model, KnockOut(head=0)),
    ):
        model(x)
    with intervene(model, KnockOut()):  # of every head
        assert not model(x).any()


def albert():
    torch.manual_seed(3)
    sizes = {"hidden_size": C - 3, "num_attention_heads": H, "intermediate_size": 11, "embedding_size": 8, "vocab_size": 101}
    return AlbertModel(AlbertConfig(num_hidden_layers=4, num_hidden_groups=2, initializer_range=0.5, **sizes)).eval()


def test_layers_of_albert_are_numbered_as_its_maps_are():
    model, tokens = albert(), words(2, T)
    names = ["encoder.albert_layer_groups.0.albert_layers.0.attention"] * 2
    names += ["encoder.albert_layer_groups.1.albert_layers.0.attention"] * 2
    with record(model) as recording:
        model(tokens)
    assert recording.layers() == names
    for n in (1, 2):
        with intervene(model, CutEdges(queries=3, keys=[1, 2], layer=n)), record(model) as cut:
            model(tokens)
        assert [not cut.map(one).dense()[:, :, 3, 1:3].any() for one in range(4)] == [one == n for one in range(4)]


def test_effects_of_layers_of_one_module_are_those_of_each_run():
    model, x = Steps(ORDERS["groups of one module"]).eval(), torch.randn(1, T, C)
    found = effects(model, x, lambda y: y[0, -1].sum(), heads=[(n, 1) for n in range(4)])
    for n, row in enumerate(found):
        own = x
        for place, path in enumerate(ORDERS["groups of one module"]):
            attention = model.get_submodule(path)
            weight = attention.out.weight.detach().clone()
            weight[:, D : 2 * D] *= place != n
            own = own + torch.func.functional_call(attention, {"out.weight": weight}, own)
        assert abs(float(row.effect) - (own - model(x))[0, -1].sum().item()) < 1e-9


def test_a_path_of_a_module_that_ran_several_times_is_no_layer_of_a_table_of_heads():
    model, x = Steps(ORDERS["groups of one module"]).eval(), torch.randn(B, T, C)
    with record(model) as recording:
        model(x)
    with pytest.raises(ConfigError, match="ran 2 times"):
        heads(recording, layers=["groups.0.attn"])


def test_the_residual_stream_of_a_run_of_a_module_is_patched():
    model, tokens, others = albert(), words(2, T), words(2, T + 1)[:, 1:]
    with torch.no_grad(), record(model, keep="residual") as source:
        model(others)
    for n in (1, 2):
        with torch.no_grad(), intervene(model, Patch(layer=n, recording=source, of="residual", queries=[2, 3])):
            found = model(tokens).last_hidden_state
        turns = []

        def put(module, args, output, n=n, turns=turns):
            turns.append(output.clone())
            if len(turns) == n + 1:
                turns[-1][:, 2:4] = source.residual(n)[:, 2:4]
            return turns[-1]

        layers = [group.albert_layers[0] for group in model.encoder.albert_layer_groups]
        handles = [layer.register_forward_hook(put) for layer in layers]
        with torch.no_grad():
            expected = model(tokens).last_hidden_state
        for handle in handles:
            handle.remove()
        assert (found - expected).abs().max() < EQUAL
        assert len(turns) == 4

"""A whole model is examined layer by layer and from end to end, and a leak is laid at the right layer's door."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from examination.whole_models import WIDTH, ByHand, Still, T, causal, gpt2, kinds, read_intent, seeing
from observe import models as others
from observe.families import DECODERS, ENCODERS
from regard import GPT2, Causal, Everything, GPT2Config, Window


@pytest.mark.parametrize("make", [gpt2, others.gpt2, others.llama])
def test_nothing_is_found_of_a_right_model(make):
    report = regard.examine(make())
    assert report, str(report)
    assert any("layers" in one.sensitivity for one in report.checked)
    assert any("end to end" in one.what for one in report.checked)


QUICK = [family for family in (*DECODERS, *ENCODERS) if family.quick]


SLOW = [family for family in (*DECODERS, *ENCODERS) if family not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*QUICK, *SLOW], ids=lambda family: family.name)
def test_nothing_but_a_window_is_found_of_a_family_and_nothing_with_the_rules_that_the_cure_states(family):
    model = family.build()
    report = regard.examine(model, expects=Causal() if family in DECODERS else Everything())
    if report.findings:
        (finding,) = report.findings
        assert finding.kind == "wrong mask"
        assert ", found " in finding.evidence
        assert "Window(" in finding.evidence
        report = regard.examine(model, expects=read_intent(finding))
    assert not report.findings, str(report)


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_leak_is_attributed_to_its_layer(layer):
    model = gpt2()
    seeing(model.blocks[layer].attention, Everything())
    report = regard.examine(model)
    assert kinds(report) == ["future leak"]
    assert f"blocks.{layer}.attention: row 0 puts" in report.findings[0].evidence
    assert "moves output 0 of the model" in report.findings[0].evidence


@pytest.mark.parametrize(("make", "path"), [(others.gpt2, "transformer.h.1.attn"), (others.llama, "model.layers.1.self_attn")])
def test_a_leak_of_one_layer_of_hugging_face_is_attributed_to_it(make, path):
    model = make()
    attention = model.get_submodule(path)
    plain = attention.forward

    def forward(*given, **named):
        named["attention_mask"] = torch.zeros(1, 1, T, T)  # nothing is hidden
        return plain(*given, **named)

    attention.forward = forward
    report = regard.examine(model)
    assert kinds(report) == ["future leak"]
    assert f"{path}: row 0 puts" in report.findings[0].evidence


def test_a_layer_that_sees_less_is_found():
    model = gpt2()
    seeing(model.blocks[1].attention, Causal() & ~Window(0, 0) | Window(0, 0) & regard.Prefix(1))
    (finding,) = regard.examine(model).findings
    assert finding.kind == "wrong mask"
    assert finding.layer == "blocks.1.attention"
    assert "expected Causal(), found another mask" in finding.evidence


def test_what_several_windows_reach_together_is_no_leak():
    model = gpt2()
    for block in model.blocks:
        seeing(block.attention, Causal() & Window(2))
    assert regard.examine(model, expects=Causal() & Window(2))
    assert kinds(regard.examine(model, expects=Causal() & Window(1))) == ["wrong mask"]


def test_attention_that_cannot_be_recorded_is_reported_and_the_whole_is_examined():
    class Block(nn.Module):
        def __init__(self, leak, window=T):
            super().__init__()
            self.leak, self.window, self.project = leak, window, nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x):
            q, k, v = self.project(x).chunk(3, -1)
            scores = torch.einsum("bqc,bkc->bqk", q, k)
            hidden = (torch.ones_like(scores).triu(1 + self.leak) + torch.ones_like(scores).tril(-1 - self.window)).bool()
            weights = scores.relu().masked_fill(hidden, 0)  # no softmax
            return x + torch.einsum("bqk,bkc->bqc", weights, v)

    def model(*settings):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(19, WIDTH), Block(0), Block(*settings), nn.Linear(WIDTH, 19))

    report = regard.examine(model(0))
    assert report.is_inconclusive
    assert any(one.what.startswith("in 2 no query sees a later token") for one in report.checked)
    (finding,) = regard.examine(model(1)).findings
    assert (finding.kind, finding.layer) == ("future leak", "2")
    (finding,) = regard.examine(model(0, 3)).findings
    assert finding.evidence.startswith("2: query 4 may see token 0, but changing it does not move output 4")


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (Causal() & ~(regard.Prefix(1) & ~Window(0, 0)), "row 1 may see token 0, but puts no weight on it"),
        (Window(6, 1), "(each row sees one token too many)"),
        (Causal() & ~Window(0, 0), "blocks.1.attention"),
    ],
)
def test_a_mask_that_is_nearly_right_is_no_window(mask, told):
    model = gpt2()
    seeing(model.blocks[1].attention, mask)
    (finding,) = regard.examine(model).findings
    assert told in finding.evidence


@pytest.mark.slow
def test_an_encoder_beside_a_decoder_is_no_leak_and_the_decoder_is_examined_alone():
    model = others.bart()
    report = regard.examine(model)
    assert report
    assert any("an encoder gets the same ids" in one.what for one in report.unknown)
    ids, sources = others.words(2, T), others.words(2, 5)
    alone = lambda ids: model(sources, decoder_input_ids=ids)  # noqa: E731
    report = regard.examine(alone, sample=ids)
    assert report
    assert any("end to end" in one.what for one in report.checked)
    feed = model.model.decoder.layers[1].fc1
    plain = feed.forward
    feed.forward = lambda x: plain(x + x.mean(1, keepdim=True))
    (finding,) = regard.examine(alone, sample=ids).findings
    assert finding.kind == "future leak"
    assert finding.evidence.endswith("model.decoder.layers.1.fc1")


def test_mode_hooks_random_state_and_weights_are_as_before():
    model = gpt2(dropout=0.1).train()
    model.blocks[1].eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    regard.examine(model)
    assert model.training
    assert not model.blocks[1].training
    assert all(not part._forward_hooks for part in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.slow
def test_the_shape_of_gpt2_takes_little_memory():
    resource = pytest.importorskip("resource")
    model = GPT2(GPT2Config.small())
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert regard.examine(model)
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000
    )  # KiB; its weights are 500 MB, and 129 outputs 26


def test_a_model_that_changes_itself_is_as_it_was():
    model = ByHand(causal)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    regard.examine(model)
    assert (model.last, model.calls) == (None, [])
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


class Twice(nn.Module):
    """Two attentions in one module, one less the other, as differential attention has it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(12, 36)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (6, 6)).transpose(1, 2).chunk(3, 1)
        one, two = (F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale) for scale in (0.4, 0.2))
        return (one - 0.3 * two).transpose(1, 2).flatten(2)


@pytest.mark.slow
def test_a_layer_that_calls_attention_twice_is_missed_and_said_to_be():
    model = Still(causal)
    model.attention = Twice()
    report = regard.examine(model)
    assert report.is_inconclusive, str(report)
    assert any("calls attention 2 times" in one.what for one in report.unknown)


@pytest.mark.slow
def test_decoding_of_a_whole_model_is_held_against_its_full_forward():
    model = gpt2()
    assert "decoding with its cache equals the full forward" in [one.what for one in regard.examine(model).checked]
    own = model.positions.forward

    def restart_positions(places):
        return own(places if len(places) > 1 else torch.zeros_like(places))

    model.positions.forward = restart_positions
    report = regard.examine(model)
    assert kinds(report) == ["wrong cache"]
    assert report.findings[0].evidence.startswith(
        "decoding token by token with its cache, output 1 differs from the full forward by "
    )

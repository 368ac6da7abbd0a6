"""Attention that weighs values without pairs of queries and keys is recorded: its map times values is what a layer computes."""

import pytest
import torch

from observe.eager_weights import are_equal, run
from observe.recording_checks import EQUAL
from observe.shared_rows import SHARED, compare_with_outputs, compute_gated, compute_multiplied, keep_projections
from regard.observe import record

every = pytest.mark.parametrize("one", SHARED, ids=lambda one: one.family.name)


@every
def test_the_map_times_the_values_is_what_each_layer_computes(one):
    maps, difference = compare_with_outputs(one)
    assert maps > 0
    assert difference < EQUAL


@every
def test_no_bit_changes_inside_record(one):
    model = one.family.build()
    given = one.family.feed(model)
    plain, _ = run(model, given)
    inside, recording = run(model, given, recorded=True)
    assert are_equal(plain, inside)
    assert not recording.missed


def test_delays_of_training_are_recorded_and_the_decoder_reads_the_encoder():
    family = SHARED[0].family
    model = family.build().train()
    with record(model) as recording:
        model(**family.feed(model))
    assert not recording.missed
    assert [call.kind for call in recording.calls] == ["self", "self", "self", "cross", "self", "cross"]
    sums = torch.stack([call.map.dense().sum(-1).flatten()[:99] for call in recording.calls])
    torch.testing.assert_close(sums, torch.ones_like(sums))


TIMM = {"mobilevitv2_050": ("qkv_proj", "out_proj", compute_gated), "swiftformer_xs": ("to_key", "proj", compute_multiplied)}


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
@torch.no_grad()
def test_the_same_attention_of_timm_is_recorded(name):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(3)
    model, images = timm.create_model(name, num_classes=5).eval().double(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    projection, inner, compute = TIMM[name]
    parts = {one: part for one, part in model.named_modules() if hasattr(part, projection)}
    kept = {one: keep_projections(part, (projection,), inner) for one, part in parts.items()}
    plain = model(images)
    with record(model, keep="values") as recording:
        assert torch.equal(model(images), plain)
    assert not recording.missed
    assert [call.name for call in recording.calls] == list(parts)
    for call in recording.calls:
        product = call.map.dense() @ recording.values(call.name, kind=call.kind)
        assert torch.allclose(compute(product, kept[call.name]), kept[call.name][inner], rtol=0, atol=EQUAL)

"""TransformerLens' HookedTransformer, whose attention is written out by hand, is recorded as the patterns that it caches."""

import pytest
import torch

import regard
from observe.recording_checks import EQUAL, record_and_compare

pytest.importorskip("transformer_lens", reason="TransformerLens is not installed")
try:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
except ImportError:
    pytest.skip("HookedTransformer was removed in TransformerLens 4", allow_module_level=True)

SIZES = {"n_layers": 2, "d_model": 24, "n_heads": 3, "d_head": 8, "n_ctx": 32, "d_vocab": 53, "act_fn": "gelu"}
ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 8}
FORMS = {
    "learned positions": {},
    "rotary": ROTARY,
    "ALiBi": {"positional_embedding_type": "alibi"},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "grouped keys": {**ROTARY, "n_heads": 4, "n_key_value_heads": 2},
    "windows": {"use_local_attn": True, "window_size": 4, "attn_types": ["local", "global"]},
    "a softcap": {"attn_scores_soft_cap": 5.0},
    "both directions": {"attention_dir": "bidirectional"},
}
IDS = torch.randint(0, 53, (2, 13), generator=torch.Generator().manual_seed(5))


def make_model(**settings):
    config = HookedTransformerConfig(**{**SIZES, **settings}, device="cpu", seed=0, initializer_range=0.5)
    return HookedTransformer(config).double().eval()


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_the_maps_are_the_cached_patterns(form):
    model = make_model(**FORMS[form])
    recording, _ = record_and_compare(model, lambda m: m(IDS))
    _, cache = model.run_with_cache(IDS)
    assert not recording.missed
    assert not recording.notes
    for layer in range(2):
        assert (recording.map(layer).dense() - cache["pattern", layer]).abs().max() < EQUAL


@torch.no_grad()
def test_each_step_of_a_generation_has_the_pattern_of_the_hook():
    model, patterns = make_model(), []
    hooks = [("blocks.1.attn.hook_pattern", lambda x, hook: patterns.append(x.clone()))]
    with model.hooks(hooks), regard.record(model) as recording:
        model.generate(IDS, max_new_tokens=4, do_sample=False, verbose=False, stop_at_eos=False)
    assert [x.shape[2] for x in patterns] == [13, 1, 1, 1]
    found, first = recording.map(1).dense(), 0
    for x in patterns:
        rows, keys = x.shape[2:]
        assert (found[:, :, first : first + rows, :keys] - x).abs().max() < EQUAL
        first += rows


@torch.no_grad()
def test_a_head_that_is_knocked_out_is_that_of_the_hook():
    model, head = make_model(), torch.tensor([2])
    with regard.intervene(model, regard.KnockOut(layer=1, head=2)):
        found = model(IDS)
    expected = model.run_with_hooks(IDS, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: z.index_fill(2, head, 0))])
    assert torch.equal(found, expected)
    assert (found - model(IDS)).abs().max() > 1

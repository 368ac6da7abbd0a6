"""The kept keys are those of kvpress, on the keys and queries of one model."""

import pytest
import torch

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed: it needs a transformers below 5.3")

import regard  # noqa: E402
from regard.policies import TOVA, ExpectedAttention, Knorm, ObservedAttention, SnapKV, StreamingLLM  # noqa: E402
from regard.policy_audit.recorded_inputs import read_inputs  # noqa: E402

T, LAYERS, G = 101, 2, 2
PAIRS = [
    (0.3, lambda r: kvpress.SnapKVPress(r, window_size=8, kernel_size=5), SnapKV(0.3, 8, 5)),
    (0.5, lambda r: kvpress.ObservedAttentionPress(r), ObservedAttention(0.5)),
    (0.2, lambda r: kvpress.TOVAPress(r), TOVA(0.2)),
    (0.2, lambda r: kvpress.KnormPress(r), Knorm(0.2)),
    (0.3, lambda r: kvpress.StreamingLLMPress(r, n_sink=4), StreamingLLM(4, budget=0.3)),
    (0.3, lambda r: kvpress.ExpectedAttentionPress(r), ExpectedAttention(0.3, rotary_base=10000.0)),
]


def make_model(kind="sdpa"):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=G,
        vocab_size=71,
        initializer_range=0.3,
        max_position_embeddings=1024,
        attn_implementation=kind,
    )
    return LlamaForCausalLM(config).eval()


def run_with_cache(model, tokens):
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True)
    return [layer.keys for layer in cache.layers]


@pytest.mark.parametrize(("budget", "make_press", "policy"), PAIRS, ids=[policy.label for _, _, policy in PAIRS])
@pytest.mark.filterwarnings("ignore")
def test_the_kept_keys_are_those_of_kvpress(budget, make_press, policy):
    tokens = torch.randint(71, (1, T), generator=torch.Generator().manual_seed(1))
    model = make_model("eager" if isinstance(policy, ObservedAttention) else "sdpa")
    complete = run_with_cache(model, tokens)
    press = make_press(1 - budget)
    with press(model):
        compressed = run_with_cache(model, tokens)
    recorded = make_model()
    with regard.record(recorded, keep="values") as recording, torch.no_grad():
        recorded(tokens)
    for layer in range(LAYERS):
        mask = policy.choose_keys(read_inputs(recording, layer, T))
        for group in range(G):
            same = (complete[layer][0, group].unsqueeze(1) == compressed[layer][0, group]).all(-1)
            theirs = set(same.any(1).nonzero().flatten().tolist())
            if isinstance(policy, StreamingLLM):
                seen = mask.block(torch.tensor([T - 1]), torch.arange(T))[0, 0, 0]
            else:
                seen = mask.ends[0, group * 3] > T
            assert set(seen.nonzero().flatten().tolist()) == theirs
            assert len(theirs) == int(T * budget)

"""Small random models of transformers with layers that have no softmax, one for each family."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

WORDS = 61
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": WORDS}
SIZES = {**ENDS, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 36}
TEXT = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMALL = {**ENDS, "hidden_size": 24, "num_hidden_layers": 2}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
DELTA = {
    **TEXT,
    **LINEAR,
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
}
SCAN = {"mamba_d_state": 8, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
LATENT = {
    **TEXT,
    **LINEAR,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "qk_nope_head_dim": 8,
    "moe_intermediate_size": 20,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
SHORT = {"layer_types": ["conv", "full_attention"] * 2}


@dataclass(frozen=True)
class RecurrentFamily:
    """A family: its model type in transformers, the sizes of a small model, and what of it must be recorded."""

    name: str
    implicit: int  # layers without a softmax
    softmax: int
    sizes: dict[str, Any] = field(repr=False)
    quick: bool = False  # whether it is in the everyday run
    is_same_stepwise: bool = True  # whether the logits of its own steps are those of its forward, recorded or not

    def build(self) -> nn.Module:
        """Return the model, with seeded weights that are large enough to tell tokens apart."""
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.name, **self.sizes)
        kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel
        model = kind.from_config(config).eval()
        drawn = torch.Generator().manual_seed(1)
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.data = torch.randn(weight.shape, generator=drawn) * weight.shape[-1] ** -0.5
        return model


def draw_tokens(tokens: int = 13, batch: int = 2) -> torch.Tensor:
    """Return token ids (b, t)."""
    return torch.randint(3, WORDS, (batch, tokens), generator=torch.Generator().manual_seed(2))


RECURRENT = [
    RecurrentFamily("mamba", 2, 0, {**SMALL, "state_size": 5, "expand": 2}, quick=True),
    RecurrentFamily("falcon_mamba", 2, 0, {**SMALL, "state_size": 5, "expand": 2}),
    RecurrentFamily(
        "mamba2",
        2,
        0,
        {**SMALL, "state_size": 8, "expand": 2, "num_heads": 6, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
        quick=True,
    ),
    RecurrentFamily(
        "jamba",
        2,
        2,
        {
            **TEXT,
            "mamba_d_state": 5,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    RecurrentFamily(
        "zamba",
        6,
        2,
        {
            **TEXT,
            "num_hidden_layers": 6,
            "mamba_d_state": 5,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
            "layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"],
        },
    ),
    RecurrentFamily(
        "zamba2",
        4,
        2,
        {
            **TEXT,
            "mamba_d_state": 8,
            "n_mamba_heads": 6,
            "mamba_headdim": 16,
            "mamba_ngroups": 2,
            "mamba_expand": 2,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 1,
        },
        is_same_stepwise=False,  # they are 2e-4 to 7e-4 apart
    ),
    RecurrentFamily("bamba", 3, 1, {**TEXT, **SCAN, "attn_layer_indices": [1]}),
    RecurrentFamily("falcon_h1", 4, 4, {**TEXT, **SCAN, "mamba_d_ssm": 96}),
    RecurrentFamily(
        "granitemoehybrid",
        3,
        1,
        {
            **TEXT,
            **SCAN,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 20,
        },
    ),
    RecurrentFamily(
        "nemotron_h",
        2,
        1,
        {
            **TEXT,
            "head_dim": 12,
            "ssm_state_size": 8,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        },
        is_same_stepwise=False,  # they are 1e-4 to 6e-4 apart
    ),
    RecurrentFamily("qwen3_next", 2, 2, {**DELTA, **EXPERTS}, quick=True),
    RecurrentFamily("qwen3_5_text", 2, 2, DELTA),
    RecurrentFamily("qwen3_5_moe_text", 2, 2, {**DELTA, **EXPERTS}),
    RecurrentFamily("olmo_hybrid", 2, 2, {**{k: v for k, v in DELTA.items() if k != "head_dim"}, "linear_num_value_heads": 2}),
    RecurrentFamily(
        "qwen4_exp_text",
        2,
        2,
        {
            **DELTA,
            **EXPERTS,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 12,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "ple_embed_dim": 8,
            "ple_layer_ids": [],
            "ngram_vocab_size_base": 50,
            "hc_count": 2,
            "hc_lowrank": 4,
            "split_ngram_parts": 2,
            "heads_per_ngram": 2,
        },
    ),
    RecurrentFamily(
        "kimi_linear",
        2,
        2,
        {**LATENT, "linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["dense"] * 4},
        quick=True,
    ),
    RecurrentFamily("bailing_hybrid", 2, 2, {**LATENT, "head_dim": 8}),
    RecurrentFamily("rwkv", 3, 0, {**SMALL, "num_hidden_layers": 3, "context_length": 64}, quick=True),
    RecurrentFamily(
        "recurrent_gemma",
        2,
        1,
        {
            **ENDS,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 36,
            "lru_width": 32,
            "attention_window_size": 16,
        },
        quick=True,
    ),
    RecurrentFamily("lfm2", 2, 2, {**TEXT, **SHORT}, quick=True),
    RecurrentFamily(
        "lfm2_moe", 2, 2, {**TEXT, **SHORT, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    ),
    RecurrentFamily("lfm3", 3, 1, TEXT),
    RecurrentFamily(
        "minimax",
        2,
        2,
        {**TEXT, **LINEAR, "num_local_experts": 3, "num_experts_per_tok": 2, "block_size": 8, "head_dim": 12},
        quick=True,
    ),
    RecurrentFamily("xlstm", 2, 0, {**ENDS, "hidden_size": 128, "num_blocks": 2, "num_heads": 2, "chunk_size": 64}),
]

"""Small language models of transformers with random weights, whose linear parts lie in different places."""

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    XGLMConfig,
    XGLMForCausalLM,
)

N, C, H, G, E, T = 61, 24, 4, 2, 6, 40
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {
    "vocab_size": N,
    "hidden_size": C,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": E,
    "max_position_embeddings": T,
}


def make_model(name: str):
    """Make a model with weights that are neither symmetric nor small, in evaluation mode."""
    torch.manual_seed(0)
    if name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=N, n_positions=T, n_embd=C, n_layer=2, n_head=H, **TOKENS))
    elif name == "bloom":  # a norm of the embedding
        model = BloomForCausalLM(BloomConfig(vocab_size=N, hidden_size=C, n_layer=2, n_head=H, **TOKENS))
    elif name == "gpt":  # norms after the sums
        model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=N, n_positions=T, n_embd=C, n_layer=2, n_head=H))
    elif name == "gpt_neox":  # one projection of q, k and v, head by head; a head that is not the embedding
        sizes = {key: GROUPED[key] for key in GROUPED if key not in ("num_key_value_heads", "head_dim")}
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **TOKENS))
    elif name == "xglm":  # an embedding module that multiplies, and positions
        sizes = {"vocab_size": N, "d_model": C, "ffn_dim": 32, "num_layers": 2, "attention_heads": H}
        model = XGLMForCausalLM(XGLMConfig(**sizes, max_position_embeddings=T, **TOKENS))
    else:
        known = {"llama": (LlamaConfig, LlamaForCausalLM), "gemma": (GemmaConfig, GemmaForCausalLM)}
        known["gemma2"] = (Gemma2Config, Gemma2ForCausalLM)
        known["granite"] = (GraniteConfig, GraniteForCausalLM)
        config, kind = known[name]
        further = {
            "gemma2": {"final_logit_softcapping": None},
            "granite": {"residual_multiplier": 0.22, "embedding_multiplier": 3.0},
        }
        model = kind(config(**GROUPED, **TOKENS, **further.get(name, {})))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.2) + (parameter.dim() == 1) * 0.7)
    return model.eval()

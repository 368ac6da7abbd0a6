"""Small models of others, with random weights, that the tests of this room look into."""

import inspect

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

WORDS = 101
WINDOW = 4  # of mistral
CACHE = "cache" if "cache" in inspect.signature(GPT2LMHeadModel.forward).parameters else "past_key_values"  # before 5.24


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=4, n_embd=32, vocab_size=WORDS, initializer_range=0.3, **ends)).eval()


def llama() -> PreTrainedModel:
    """Six heads that share two of keys."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=WORDS, initializer_range=0.3, **sizes)).eval()


def mistral() -> PreTrainedModel:
    """Four heads that see the last four tokens, of which a cache holds the keys."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    config = MistralConfig(num_hidden_layers=2, vocab_size=WORDS, initializer_range=0.3, sliding_window=WINDOW, **sizes)
    return MistralForCausalLM(config).eval()


def bart() -> PreTrainedModel:
    torch.manual_seed(0)
    layers = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": WORDS, "init_std": 0.3}
    return BartForConditionalGeneration(BartConfig(**layers, **sizes)).eval()


def words(rows: int, tokens: int) -> Tensor:
    return torch.randint(3, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(tokens))

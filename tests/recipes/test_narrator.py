import dataclasses
import struct

import pytest
import torch
from recipes.pocket.narrator import START, Narrator, read_vocabulary
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

C, INNER, LAYERS, HEADS, N, T = 24, 37, 3, 2, 41, 19


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """What a file of llama2.c holds, in its order, every number one that bfloat16 has."""
    torch.manual_seed(0)
    shapes = {"embedding": (N, C), "norm_attention": (LAYERS, C)}
    shapes |= dict.fromkeys(("q", "k", "v", "out"), (LAYERS, C, C))
    shapes |= {"norm_feed": (LAYERS, C), "gate": (LAYERS, INNER, C), "down": (LAYERS, C, INNER), "up": (LAYERS, INNER, C)}
    shapes["norm"] = (C,)
    return {name: (torch.randn(shape) * 0.3 + ("norm" in name)).bfloat16().float() for name, shape in shapes.items()}


def theirs(weights: dict[str, Tensor]) -> LlamaForCausalLM:
    """The same Llama by transformers, which turns a head's first half with its second where the file turns neighbours."""
    sizes = {"hidden_size": C, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = LlamaConfig(vocab_size=N, max_position_embeddings=T + 1, rms_norm_eps=1e-5, tie_word_embeddings=True, **sizes)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = LlamaForCausalLM(config).eval()
    halves = {name: weights[name].view(LAYERS, HEADS, -1, 2, C).transpose(2, 3).reshape(LAYERS, C, C) for name in "qk"}
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(weights["embedding"])
        model.model.norm.weight.copy_(weights["norm"])
        for n, layer in enumerate(model.model.layers):
            given = {"q": halves["q"], "k": halves["k"], "v": weights["v"], "o": weights["out"]}
            for name, tensor in given.items():
                getattr(layer.self_attn, f"{name}_proj").weight.copy_(tensor[n])
            for name in ("gate", "up", "down"):
                getattr(layer.mlp, f"{name}_proj").weight.copy_(weights[name][n])
            layer.input_layernorm.weight.copy_(weights["norm_attention"][n])
            layer.post_attention_layernorm.weight.copy_(weights["norm_feed"][n])
    return model


def greedy(model: LlamaForCausalLM) -> list[int]:
    """The likeliest token after the start, after that, and so on, by a whole forward each time."""
    tokens = [START]
    with torch.no_grad():
        while len(tokens) <= T and (len(tokens) == 1 or tokens[-1] != START):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return [token for token in tokens if token != START]


@pytest.mark.slow
def test_the_narrator_tells_what_transformers_llama_holds_likeliest(tmp_path, weights):
    path = tmp_path / "model.bin"
    numbers = b"".join(tensor.numpy().tobytes() for tensor in weights.values())
    path.write_bytes(struct.pack("7i", C, INNER, LAYERS, HEADS, HEADS, N, T) + numbers)
    narrator = Narrator.load(path)
    whole = {name: x.float() for name, x in vars(narrator).items() if isinstance(x, Tensor)}
    stories = list(dataclasses.replace(narrator, **whole).generate_stories(5, rows=2, seed=0, top_k=1))
    expected = greedy(theirs(weights))
    assert len(expected) > 5
    assert len(stories) >= 5
    nearly_greedy = dataclasses.replace(narrator, **whole).generate_stories(5, rows=2, seed=0, temperatures=(1e-4,))
    assert list(nearly_greedy) == stories
    mixed = list(dataclasses.replace(narrator, **whole).generate_stories(9, rows=3, seed=0, temperatures=(1e-4, 5.0)))
    assert len(stories) / 2 < len([story for story in mixed if story == expected]) < len(mixed)  # rows 0 and 2 of each three
    assert stories == [expected] * len(stories)  # those that begin in a row where another ended, too


def test_pieces_are_read_as_bytes(tmp_path):
    pieces = [b"<unk>", b" the", b"<0x0A>", "é".encode()]
    rows = b"".join(struct.pack("fi", 0.0, len(piece)) + piece for piece in pieces)
    (tmp_path / "tokenizer.bin").write_bytes(struct.pack("i", 7) + rows)
    assert read_vocabulary(tmp_path / "tokenizer.bin") == [b"<unk>", b" the", b"\n", "é".encode()]

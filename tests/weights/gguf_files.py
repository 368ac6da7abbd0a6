"""A writer of small .gguf files, for the tests: a Llama of two layers and a vocabulary of bytes and four pairs."""

import struct
from pathlib import Path

import numpy as np

from regard.text.byte_pair_files import map_bytes_to_letters

PAIRS = ["h e", "l l", "he ll", "hell o"]
WORDS = [*map_bytes_to_letters().values(), *(pair.replace(" ", "") for pair in PAIRS), "<|endoftext|>"]
WIDTH, INNER, HEADS, GROUPS, LAYERS = 24, 40, 4, 2, 2
END = len(WORDS) - 1
BLOCK = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH)} | {
    "attn_k": (WIDTH // 2, WIDTH),
    "attn_v": (WIDTH // 2, WIDTH),
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}
SETTINGS = {
    "general.architecture": "llama",
    "llama.context_length": 32,
    "llama.embedding_length": WIDTH,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": GROUPS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": WIDTH // HEADS,
    "llama.vocab_size": len(WORDS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": [1] * END + [3],
    "tokenizer.ggml.merges": PAIRS,
    **{f"tokenizer.ggml.{name}_token_id": END for name in ("bos", "eos", "unknown")},
}


def tensors() -> dict[str, np.ndarray]:
    """Random numbers in float32, a tensor in float16 among them."""
    shapes = {"token_embd.weight": (len(WORDS), WIDTH), "output_norm.weight": (WIDTH,)}
    shapes |= {f"blk.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in BLOCK.items()}
    generator = np.random.default_rng(0)
    found = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return found | {"blk.1.attn_q.weight": found["blk.1.attn_q.weight"].astype(np.float16)}


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word.encode())) + word.encode()


def setting(value: object) -> bytes:
    """A setting's type, and what it is."""
    if isinstance(value, list):
        kind, parts = (8, map(text, value)) if isinstance(value[0], str) else (5, (struct.pack("<i", one) for one in value))
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(parts)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def pad_to_alignment(content: bytes, alignment: int) -> bytes:
    return content + bytes(-len(content) % alignment)


def gguf(arrays: dict[str, np.ndarray], settings: dict[str, object], alignment: int = 32) -> bytes:
    """The content of a file."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(settings))
    head += b"".join(text(name) + setting(value) for name, value in settings.items())
    numbers = b""
    for name, array in arrays.items():
        axes = struct.pack(f"<I{array.ndim}Q", array.ndim, *reversed(array.shape))
        head += text(name) + axes + struct.pack("<IQ", {"float32": 0, "float16": 1}[array.dtype.name], len(numbers))
        numbers += pad_to_alignment(array.tobytes(), alignment)
    return pad_to_alignment(head, alignment) + numbers


def write(path: Path) -> bytes:
    """Writes the file, and says what is in it."""
    path.write_bytes(gguf(tensors(), SETTINGS))
    return path.read_bytes()

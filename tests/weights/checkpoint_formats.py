"""One small model of transformers, and the same numbers as everyone else writes them to disk."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from weights import bundle

LAYERS, HEADS, WIDTH, WORDS, CONTEXT = 2, 3, 15, 53, 17
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "vocab_size": WORDS}
CONV = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
NORMS = ("ln_1", "ln_2", "ln_f")


def make_small_gpt2(seed: int = 0, **changes) -> GPT2LMHeadModel:
    """A model in which no number is a default: biases and norms are random too."""
    config = GPT2Config(**{**SIZES, "n_positions": CONTEXT, **ENDS, **changes})
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1 if ".ln_" in name and name.endswith("weight") else 0, 0.3)
    return model


def tensors(model: GPT2LMHeadModel) -> dict[str, Tensor]:
    """Its tensors, the tied head left out."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def folder(model: GPT2LMHeadModel, path: Path, state: dict[str, Tensor] | None = None, **said) -> Path:
    """transformers' own folder, its tensors or its config changed."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors(model) if state is None else state, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({**model.config.to_dict(), **said}))
    return path


def without_prefix(model: GPT2LMHeadModel, path: Path) -> Path:
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool).tril() for n in range(LAYERS)}
    masks |= {f"h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(LAYERS)}
    return folder(model, path, {name.removeprefix("transformer."): x for name, x in tensors(model).items()} | masks)


def head_present(model: GPT2LMHeadModel, path: Path) -> Path:
    return folder(model, path, tensors(model) | {"lm_head.weight": model.lm_head.weight.detach().clone()})


def write_shards(model: GPT2LMHeadModel, path: Path) -> Path:
    model.save_pretrained(path, max_shard_size="5KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def write_pickle(model: GPT2LMHeadModel, path: Path, legacy: bool = False) -> Path:
    folder(model, path)
    (path / "model.safetensors").unlink()
    state = model.state_dict()  # with the head, which is the embedding once more
    state["transformer.wpe.weight"] = state["transformer.wpe.weight"].T.contiguous().T  # laid out by columns
    torch.save(state, path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    return path


def write_pickled_parts(model: GPT2LMHeadModel, path: Path) -> Path:
    folder(model, path)
    (path / "model.safetensors").unlink()
    places = {name: f"part-{n % 3}.bin" for n, name in enumerate(tensors(model))}
    for part in set(places.values()):
        torch.save({name: x for name, x in tensors(model).items() if places[name] == part}, path / part)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def openai(model: GPT2LMHeadModel) -> dict[str, np.ndarray]:
    """The arrays by the names of OpenAI's code, each matrix with a first axis of one."""
    found = {}
    for name, tensor in tensors(model).items():
        path, _, kind = name.removeprefix("transformer.").replace("h.", "h").rpartition(".")
        ending = "" if path in ("wte", "wpe") else "/g" if kind == "weight" and path.endswith(NORMS) else f"/{kind[0]}"
        array = tensor.float().numpy()
        found["model/" + path.replace(".", "/") + ending] = array[None] if name.endswith(CONV) else array
    return found


def hparams(model: GPT2LMHeadModel, path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    sizes = {"n_vocab": WORDS, "n_ctx": CONTEXT, "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS}
    (path / "hparams.json").write_text(json.dumps(sizes))
    return path


def tensorflow(model: GPT2LMHeadModel, path: Path) -> Path:
    bundle.write(hparams(model, path), openai(model), entries_in_block=5)
    return path


def npz(model: GPT2LMHeadModel, path: Path, save: Callable = np.savez) -> Path:
    arrays = openai(model)
    arrays["model/wpe"] = np.asfortranarray(arrays["model/wpe"])
    save(hparams(model, path) / "model.npz", **arrays)
    return path


def linear(model: GPT2LMHeadModel) -> dict[str, Tensor]:
    """The names of transformers, the matrices of nn.Linear: nanoGPT, minGPT."""
    return {name: x.T.contiguous() if name.endswith(CONV) else x for name, x in tensors(model).items()}


def nanogpt(model: GPT2LMHeadModel, path: Path, **changes) -> Path:
    """A checkpoint of a compiled model in training: its activation is the exact GELU."""
    path.mkdir(parents=True, exist_ok=True)
    state = linear(model) | {"lm_head.weight": model.transformer.wte.weight.detach()}
    arguments = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": CONTEXT, "bias": True}
    saved = {
        "model": {f"_orig_mod.{name}": x for name, x in state.items()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
        "model_args": {**arguments, "vocab_size": WORDS, "dropout": 0.0, **changes},
        "iter_num": 7,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare"},
    }
    torch.save(saved, path / "ckpt.pt")
    return path / "ckpt.pt"


def lectures(model: GPT2LMHeadModel, path: Path) -> Path:
    """The state dict of the lectures' GPT: no heads told, a mask in every layer, a head of its own."""
    path.mkdir(parents=True, exist_ok=True)
    theirs = tensors(model)
    state = {f"{short}_emb.weight": theirs[f"transformer.w{short[0]}e.weight"] for short in ("tok", "pos")}
    for n in range(LAYERS):
        ours, block = f"trf_blocks.{n}.", f"transformer.h.{n}."
        weights = theirs[block + "attn.c_attn.weight"].T.split(WIDTH)
        biases = theirs[block + "attn.c_attn.bias"].split(WIDTH)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            state |= {f"{ours}att.W_{name}.weight": weight, f"{ours}att.W_{name}.bias": bias}
        for mine, name in {"att.out_proj": "attn.c_proj", "ff.layers.0": "mlp.c_fc", "ff.layers.2": "mlp.c_proj"}.items():
            state[f"{ours}{mine}.weight"] = theirs[f"{block}{name}.weight"].T
            state[f"{ours}{mine}.bias"] = theirs[f"{block}{name}.bias"]
        state |= normal(f"{ours}norm1", theirs, f"{block}ln_1") | normal(f"{ours}norm2", theirs, f"{block}ln_2")
        state[f"{ours}att.mask"] = torch.ones(CONTEXT, CONTEXT).triu(1)
    state |= normal("final_norm", theirs, "transformer.ln_f") | {"out_head.weight": model.lm_head.weight.detach()}
    torch.save(state, path / "model.pth")
    (path / "config.json").write_text(json.dumps({"n_heads": HEADS}))
    return path


def normal(mine: str, theirs: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {f"{mine}.scale": theirs[f"{name}.weight"], f"{mine}.shift": theirs[f"{name}.bias"]}


FORMATS: dict[str, Callable[[GPT2LMHeadModel, Path], Path]] = {
    "transformers": folder,
    "without prefix": without_prefix,
    "head present": head_present,
    "sharded": write_shards,
    "pickle": write_pickle,
    "old pickle": lambda model, path: write_pickle(model, path, legacy=True),
    "pickles": write_pickled_parts,
    "TensorFlow": tensorflow,
    "npz": npz,
    "packed npz": lambda model, path: npz(model, path, np.savez_compressed),
    "lectures": lectures,
}

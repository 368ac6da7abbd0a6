"""Generating with GPT-2's smallest shape, random weights: beside Hugging Face's generate and CTranslate2, on the same weights.

Equal are the tokens of all that compute in float32; of those that round, the largest difference of the logits from
float32's is told, as a share of the logits' deviation. CTranslate2 only where it is installed, which is said.
"""

import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

from benchmarks.tables import Table
from benchmarks.timing import timed
from regard.generate import quantise
from regard.models import GPT2
from regard.text.byte_pair import GPT2_FOLDER

TITLE = "Generating with GPT-2's shape (124M): tokens a second, greedy"
COLUMNS = ["batch", "prompt", "new", "by", "weights", "seconds", "tokens a second", "logits off float32's by"]
CASES = ((1, 16, 128), (1, 1000, 1), (16, 16, 64))  # batch, prompt, new tokens
VOCABULARY = 50257


@dataclass(frozen=True, eq=False)
class Contender:
    """Who computes, in what; a function (prompts, count) to tokens (b, count), and one from prompts to logits (b, t, n)."""

    by: str
    weights: str
    tokens: Callable[[Tensor, int], Tensor]
    logits: Callable[[Tensor], Tensor]


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row a contender and case; each of a case in turn."""
    table = Table(TITLE, COLUMNS)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        found = contenders(Path(folder))
        exact = [one for one in found if one.weights == "float32"]
        prompt = prompts(2, 64)
        logits = [one.logits(prompt) for one in found]
        errors = [float((x - logits[0]).abs().max() / logits[0].std()) for x in logits]
        assert all(error < 1e-3 for one, error in zip(found, errors, strict=True) if one in exact), errors
        for b, t, new in CASES:
            given = prompts(b, t)
            same = {one.by: one.tokens(given, new) for one in exact}
            first = next(iter(same.values()))
            assert all(torch.equal(first, other) for other in same.values()), f"not the same tokens: {list(same)}"
            ways = {str(place): partial(answered, one, given, new) for place, one in enumerate(found)}
            medians = timed(ways, 0.0).medians
            for place, one in enumerate(found):
                seconds = medians[str(place)] / 1e3
                table.add(b, t, new, one.by, one.weights, seconds, b * new / seconds, errors[place])
    return table


def answered(one: Contender, given: Tensor, new: int) -> Tensor:
    """The number of tokens, which all of them are to make."""
    return torch.tensor(one.tokens(given, new).numel())


def prompts(b: int, t: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (b, t), generator=torch.Generator().manual_seed(b * t))


def contenders(folder: Path) -> list[Contender]:
    """The same weights in everybody's hands."""
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(initializer_range=0.05, bos_token_id=None, eos_token_id=None)).eval()
    theirs.save_pretrained(folder / "model")
    words = GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe"))
    words.save_pretrained(folder / "model")
    half = GPT2LMHeadModel.from_pretrained(folder / "model", dtype=torch.bfloat16).eval()
    ours = GPT2.load(folder / "model")
    found = [hugging_face(theirs, "float32"), hugging_face(half, "bfloat16"), *list_ctranslate2(folder, words)]
    return [*found, regard(ours, "float32"), regard(quantise(ours, "int8"), "int8")]


def list_ctranslate2(folder: Path, words: GPT2TokenizerFast) -> list[Contender]:
    """The contenders of CTranslate2, of the model in a folder; none where it is not installed, which is printed."""
    if importlib.util.find_spec("ctranslate2") is None:
        print("CTranslate2 is left out: it is not installed (pip install ctranslate2).")
        return []
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    found = []
    for kind in ("float32", "int8"):
        converted = TransformersConverter(str(folder / "model")).convert(str(folder / kind), quantization=kind)
        generator = ctranslate2.Generator(converted, device="cpu", intra_threads=torch.get_num_threads(), compute_type=kind)
        found.append(translate(generator, words, kind))
    return found


def hugging_face(model: GPT2LMHeadModel, weights: str) -> Contender:
    def tokens(given: Tensor, new: int) -> Tensor:
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return model.generate(given, attention_mask=torch.ones_like(given), **settings)[:, given.shape[1] :]

    return Contender("Hugging Face", weights, tokens, lambda given: model(given).logits.float())


def translate(generator: Any, words: GPT2TokenizerFast, weights: str) -> Contender:
    def named(given: Tensor) -> list[list[str]]:
        return [words.convert_ids_to_tokens(row) for row in given.tolist()]

    def tokens(given: Tensor, new: int) -> Tensor:
        settings = {
            "max_length": new,
            "min_length": new,
            "sampling_topk": 1,
            "include_prompt_in_result": False,
            "end_token": [],
        }
        return torch.tensor([one.sequences_ids[0] for one in generator.generate_batch(named(given), **settings)])

    return Contender(
        "CTranslate2", weights, tokens, lambda given: torch.from_numpy(np.array(generator.forward_batch(named(given))))
    )


def regard(model: GPT2, weights: str) -> Contender:
    def tokens(given: Tensor, new: int) -> Tensor:
        return torch.stack(list(model.generate(given, new, temperature=0, end=None)), -1)

    return Contender("regard", weights, tokens, model)

"""Generating with GPT-2's smallest shape, random weights: beside Hugging Face's generate and other engines, same weights.

Beside each row stands its share of the limit: of the time that the bytes of the weights take through memory, or their products
at the rate of large matrices, whichever is longer, for the prompt and for each further token. Memory is read in turn with the
contenders, as fast as torch sums float32 weights. Weights of 8 and 4 bits count without their scales. The rate of products is
torch's or oneDNN's, the higher one, and for weights in fewer bits than float32 also that of bfloat16.

Equal are the tokens of all that compute in float32; of those that round, the largest difference of the logits from
float32's is given, as a share of the logits' deviation. Freed memory is kept for all of them, as `regard generate` keeps it.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

from benchmarks.engines import Contender, list_engines
from benchmarks.machine import SECONDS, SIDE
from benchmarks.tables import Table
from benchmarks.timing import time_contenders
from regard import malloc
from regard.generate import quantise
from regard.machine import time_fastest_run
from regard.matmul import linear
from regard.matmul.quantized_linear import WEIGHTS
from regard.models import GPT2
from regard.text.byte_pair import GPT2_FOLDER

TITLE = "Generating with GPT-2's shape (124M): tokens a second, greedy"
COLUMNS = ["batch", "prompt", "new", "by", "weights", "seconds", "tokens a second", "share of limit", "logits off float32's by"]
CASES = ((1, 16, 128), (1, 768, 256), (1, 1000, 1), (16, 16, 64))  # batch, prompt, new tokens
VOCABULARY, WIDTH, LAYERS = 50257, 768, 12
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row a contender and case; each of a case in turn."""
    table, rates = Table(TITLE, COLUMNS), peak | {torch.float32: max(peak[torch.float32], measure_linear_rate())}
    malloc.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        found = contenders(Path(folder))
        exact = [one for one in found if one.weights == "float32"]
        weights = [torch.ones(VOCABULARY, WIDTH), *(torch.ones(WIDTH, 12 * WIDTH) for _ in range(LAYERS))]
        prompt = prompts(2, 256)  # long enough for the products that only many vectors go through
        logits = [one.logits(prompt) for one in found]
        errors = [float((x - logits[0]).abs().max() / logits[0].std()) for x in logits]
        assert all(error < 1e-3 for one, error in zip(found, errors, strict=True) if one in exact), errors
        for b, t, new in CASES:
            given = prompts(b, t)
            able = [one for one in found if b <= one.most_rows]
            same = {one.by: one.tokens(given, new) for one in exact if one in able}
            first = next(iter(same.values()))
            assert all(torch.equal(first, other) for other in same.values()), f"not the same tokens: {list(same)}"
            ways = {str(place): partial(generate_tokens, one, given, new) for place, one in enumerate(able)}
            medians = time_contenders(ways | {"memory": partial(read_weights, weights, b * new)}, 0.0).medians
            bandwidth = sum(one.nbytes for one in weights) / medians["memory"] / 1e6
            for place, one in enumerate(able):
                seconds = medians[str(place)] / 1e3
                share = bound_seconds(b, t, new, one.weights, rates, bandwidth) / seconds
                table.add(b, t, new, one.by, one.weights, seconds, b * new / seconds, share, errors[found.index(one)])
    malloc.restore_malloc_defaults()
    return table


def read_weights(weights: list[Tensor], count: int) -> Tensor:
    """Sum all weights, which reads them once; return the number of tokens of a contender."""
    for one in weights:
        one.sum()
    return torch.tensor(count)


def measure_linear_rate() -> float:
    """10⁹ operations a second of the fastest product of a linear layer of float32 within a few seconds."""
    x = torch.ones(SIDE, SIDE)
    with torch.inference_mode():
        return 2 * SIDE**3 / time_fastest_run(lambda: linear(x, x), SECONDS) / 1e9


def bound_seconds(b: int, t: int, new: int, weights: str, peak: dict[torch.dtype, float], bandwidth: float) -> float:
    """The least seconds for prompts (b, t) and new tokens, by memory in GB/s or by products in 10⁹ operations a second."""
    kind = weights.partition(",")[0]
    rate = 1e9 * (peak[torch.float32] if kind == "float32" else max(peak.values()))
    layers, output = 12 * LAYERS * WIDTH**2, VOCABULARY * WIDTH  # numbers in the matrices
    reading = WEIGHT_BYTES[kind] * (layers + output) / (bandwidth * 1e9)
    attention = 2 * LAYERS * b * t * t * WIDTH  # half of the products of queries, keys and values: a query sees no later key
    prompt = (2 * b * (t * layers + output) + attention) / rate
    return max(reading, prompt) + (new - 1) * max(reading, 2 * b * (layers + output) / rate)


def generate_tokens(one: Contender, given: Tensor, new: int) -> Tensor:
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
    found = [hugging_face(theirs, "float32"), hugging_face(half, "bfloat16"), *list_engines(folder, theirs, words)]
    return [*found, regard(ours, "float32"), *(regard(quantise(ours, to), to) for to in WEIGHTS)]


def hugging_face(model: GPT2LMHeadModel, weights: str) -> Contender:
    def tokens(given: Tensor, new: int) -> Tensor:
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return model.generate(given, attention_mask=torch.ones_like(given), **settings)[:, given.shape[1] :]

    return Contender("Hugging Face", weights, tokens, lambda given: model(given).logits.float())


def regard(model: GPT2, weights: str) -> Contender:
    def tokens(given: Tensor, new: int) -> Tensor:
        return torch.stack(list(model.generate(given, new, temperature=0, end=None)), -1)

    return Contender("regard", weights, tokens, model)

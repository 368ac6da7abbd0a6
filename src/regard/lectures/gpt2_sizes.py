"""The sizes of GPT-2: their parameters counted from layers and width."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from regard.layers import MultiHeadAttention
from regard.lectures.comparison import Claim, Example, FieldComparison, Verdict

VOCABULARY, CONTEXT = 50_257, 1_024  # of the GPT-2 that was released
FIRST_VOCABULARY = 40_478  # of the first GPT
HEAD_WIDTH = 64
WHOLE_MILLIONS = 0.5  # largest error of rounding to a million


def recompute_gpt2_sizes(example: Example) -> Iterable[Claim]:
    """Count the millions of parameters of the four sizes, against the paper's numbers and a corrected one."""
    table, field = example["table"], "table.parameters"
    paper, corrected = extract_millions(table, r"^(\d+)M"), extract_millions(table, r"corrected: (\d+)M")
    released, first = count_millions(table, VOCABULARY), count_millions(table, FIRST_VOCABULARY)

    def make_claim(read: dict[int, float], counted: Tensor, note: str, known: Verdict = Verdict.AGREES) -> Claim:
        comparison = FieldComparison(field, torch.tensor(list(read.values())), counted[list(read)])
        return Claim([comparison], f"in millions: {note}", known, WHOLE_MILLIONS)

    exact = f"{count_parameters(table[0]['layers'], table[0]['d_model'], VOCABULARY):,}"
    yield make_claim(corrected, released, f"the corrected count; exactly {exact}, with a vocabulary of {VOCABULARY:,}")
    sizes = ", ".join(f"{size:.1f}" for size in released.tolist())
    note = f"the paper's counts, not reproducible with the models that were released, which have {sizes}"
    yield make_claim(paper, released, note, Verdict.MISPRINT)
    note = f"the paper's counts again, with the first GPT's vocabulary of {FIRST_VOCABULARY:,}: where they seem to come from"
    yield make_claim(paper, first, note)


def extract_millions(table: list[dict[str, Any]], pattern: str) -> dict[int, float]:
    """Extract the millions that a pattern matches in the rows of the table, by row."""
    found = {n: re.search(pattern, row["parameters"]) for n, row in enumerate(table)}
    return {n: float(match[1]) for n, match in found.items() if match}


def count_millions(table: list[dict[str, Any]], vocabulary: int) -> Tensor:
    """Count the parameters, in millions, of each size in the table."""
    return torch.tensor(
        [count_parameters(row["layers"], row["d_model"], vocabulary) / 1e6 for row in table], dtype=torch.float64
    )


def count_parameters(layers: int, c: int, vocabulary: int) -> int:
    """Count n c + t c + layers (attention + 8 c² + 5 c + 4 c) + 2 c: embeddings, blocks with two norms each, last norm."""
    with torch.device("meta"):  # shapes only
        attention = MultiHeadAttention(c, c, CONTEXT, 0.0, num_heads=c // HEAD_WIDTH, qkv_bias=True)
    block = sum(weight.numel() for weight in attention.parameters()) + 8 * c * c + 9 * c
    return (vocabulary + CONTEXT + 2) * c + layers * block

"""Small models: ours with random weights in float64, and transformers' of the same weights."""

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from regard.models import GPT2, GPT2Config


def gpt2(vocabulary: int = 19, context: int = 31, dtype: torch.dtype = torch.float64) -> GPT2:
    """Ours, its weights large enough that its logits differ."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=2, heads=3, width=12, context=context, vocabulary=vocabulary)).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.4)
    return model


def theirs(model: GPT2, folder) -> GPT2LMHeadModel:
    """The same as transformers reads it."""
    model.save(folder)
    return GPT2LMHeadModel.from_pretrained(folder, dtype=next(model.parameters()).dtype).eval()


def compute_losses_by_windows(model, tokens: list[int], context: int, stride: int) -> list[float]:
    """-log p of each token but the first, one window at a time, by the plainest sums."""
    found: dict[int, float] = {}
    start = 0
    while len(found) < len(tokens) - 1:
        window = tokens[start : start + context]
        logits: Tensor = model(torch.tensor([window]))[0].double()
        for place, row in enumerate(logits.tolist()):
            at = start + place + 1  # the token that this row foretells
            if at < len(tokens) and at not in found:
                largest = max(row)
                total = sum(2.718281828459045235360287 ** (one - largest) for one in row)
                found[at] = largest + float(torch.tensor(total, dtype=torch.float64).log()) - row[tokens[at]]
        start += stride
    return [found[at] for at in sorted(found)]

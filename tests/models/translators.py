"""Small translators of every kind, and a way to look at what their attention sees."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.mechanism import attend
from regard.mechanism.additive import additive_attention, attend_additive
from regard.mechanism.fused import attention
from regard.models.recurrent import RecurrentTranslator
from regard.models.transformer import Transformer

VOCABULARY, END = 53, 5
RECURRENT = {"vocabulary": VOCABULARY, "width": 11, "hidden": 7}
MADE: dict[str, Callable[..., RecurrentTranslator | Transformer]] = {
    "plain": lambda **other: RecurrentTranslator(**{**RECURRENT, **other}),
    "plain lstm of two layers": lambda **other: RecurrentTranslator(**{**RECURRENT, "cell": "lstm", "layers": 2, **other}),
    "additive": lambda **other: RecurrentTranslator("additive", **{**RECURRENT, **other}),
    "additive lstm of two layers": lambda **other: RecurrentTranslator(
        "additive", **{**RECURRENT, "cell": "lstm", "layers": 2, **other}
    ),
    "transformer": lambda **other: Transformer(**{"vocabulary": VOCABULARY, "width": 12, "heads": 3, "layers": 2, **other}),
    "transformer, norm first": lambda **other: Transformer(
        **{"vocabulary": VOCABULARY, "width": 12, "heads": 3, "layers": 2, "norm": "pre", **other}
    ),
}


def make_translator(kind: str, seed: int = 0, dtype: torch.dtype = torch.float64, loud: float = 2.0, **other):
    """A model with random weights, so large that its logits are decided; in evaluation mode."""
    torch.manual_seed(seed)
    model = MADE[kind](**other).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.3) if "bias" in name else weight.mul_(loud if "norm" not in name else 1)
    return model


def sentences(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random sentences that end."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCABULARY, (length - 1,), generator=generator).tolist() for length in lengths]
    return [[*(token + (token == END) for token in row), END] for row in rows]


def pad_sentences(rows: list[list[int]], filler: int = 0) -> tuple[Tensor, Tensor]:
    """Sources (b, s) and lengths (b,)."""
    most = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (most - len(row))] for row in rows]), torch.tensor([len(row) for row in rows])


class Weights(TorchFunctionMode):
    """The attention weights of every call while it is on, in order."""

    def __init__(self):
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        written = {attention: attend, additive_attention: attend_additive}.get(function)
        if written is not None:
            with torch._C.DisableTorchFunction():
                self.found.append(written(*args, **(kwargs or {})).weights.detach())
        return function(*args, **(kwargs or {}))

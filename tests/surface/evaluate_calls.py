"""The calls of `regard.evaluate`."""

from typing import Any

import torch

from regard import evaluate
from surface import wrong
from surface.call import Call
from surface.mechanism_calls import SIZES
from surface.wrong import COUNT, OBJECT, SCALARS, constant, without

SIZE = without(COUNT, "huge") | SIZES
TOKENS = without(SCALARS, "a set") | wrong.FRACTIONS | constant(of_fractions=[1, 2.5], too_few=[1])


def model(tokens: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*tokens.shape, 5)


def read() -> dict[str, Any]:
    return {"model": model, "tokens": [1, 2, 3, 1], "context": 3}


def passages() -> dict[str, Any]:
    return {"model": model, "passages": ["a b", "b a"], "encode": lambda text: [ord(one) % 5 for one in text]}


MODEL = without(OBJECT, "a class")
CALLS = [
    Call(
        "evaluate.perplexity",
        evaluate.perplexity,
        read,
        {
            "model": MODEL | {"of another shape": lambda: lambda tokens: tokens},
            "tokens": without(TOKENS, "a list", "a lone surrogate") | constant(beyond_the_vocabulary=[1, 9]),
            "context": SIZE,
            "stride": without(SIZE, "none") | constant(above_the_context=4),
            "batch": SIZE,
            "words": without(COUNT, "none", "huge"),
            "bytes": without(COUNT, "none", "huge"),
            "watch": {},
        },
    ),
    Call(
        "evaluate.lambada",
        evaluate.lambada,
        passages,
        {
            "model": MODEL | {"of another shape": lambda: lambda tokens: tokens},
            "passages": without(SCALARS, "a set") | wrong.FRACTIONS | constant(of_one_word=["a"]),
            "encode": without(OBJECT, "a class"),
            "context": SIZE | constant(too_short=1),
            "stop": without(SCALARS, "an empty list", "a list", "a set", "a dict")
            | wrong.FRACTIONS
            | constant(negative=[-1], beyond=[9]),
            "batch": SIZE,
            "watch": {},
        },
    ),
]

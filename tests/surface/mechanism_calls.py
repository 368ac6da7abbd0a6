"""The calls of `regard.mechanism` and `regard.layers`."""

from typing import Any

import torch

import regard
from regard import mechanism
from regard.mechanism import heads, positions, scores, softmax
from surface import wrong
from surface.call import Call, method
from surface.wrong import COUNT, MASK, NUMBER, SCALARS, SHAPES, TENSOR, constant, without

Q, K = (1, 2, 5, 4), (1, 2, 7, 4)
WIDE = constant(an_infinite_number=float("inf"))
OFFSET = without(COUNT, "negative", "a sparse tensor") | {"a float tensor": lambda: torch.ones(1)}
FLOATING = wrong.NONE | wrong.STRANGE | wrong.LISTS | wrong.FRACTIONS | wrong.DTYPES
SIZES = constant(zero=0)
PAIRED = without(TENSOR, "six axes")
IDS = without(SHAPES, "a vector")


def draw_queries_keys_and_values() -> dict[str, Any]:
    return {"q": torch.randn(Q), "k": torch.randn(K), "v": torch.randn(K)}


OPTIONS = {
    "mask": MASK,
    "scale": without(NUMBER, "none") | WIDE,
    "softcap": without(NUMBER, "none") | WIDE | constant(zero=0.0, negative=-1.0),
    "bias": without(TENSOR, "none", "a tensor without axes", "another width") | {"wide": lambda: torch.ones(5, 6)},
    "sinks": without(TENSOR, "none"),
    "offset": OFFSET,
}
ATTENDED = {"q": TENSOR, "k": TENSOR, "v": without(TENSOR, "another width"), **OPTIONS}
ATTENDED["v"] = without(TENSOR, "another width") | {"another length": lambda: torch.ones(1, 2, 6, 4)}
DROPOUT = {"dropout": NUMBER | WIDE | constant(one=1.0, negative=-0.1)}
SCORES = {"scores": FLOATING | {"a tensor without axes": lambda: torch.ones(())}}


def draw_scores() -> dict[str, Any]:
    return {"scores": torch.randn(3, 5)}


def make_table_sizes() -> dict[str, Any]:
    return {"q": 5, "k": 7}


TABLE = {"q": COUNT, "k": COUNT, "offset": {}}
MASKS = {
    "Everything": lambda: regard.Everything(),
    "Causal": lambda: regard.Causal(),
    "Window": lambda: regard.Window(2),
    "Prefix": lambda: regard.Prefix(2),
    "Padding": lambda: regard.Padding([3]),
    "Documents": lambda: regard.Documents([0] * 7),
    "Given": lambda: regard.Given(torch.ones(5, 7).bool()),
}
BOUND = without(COUNT, "none")
RANKED = (
    wrong.NONE
    | wrong.STRANGE
    | wrong.LISTS
    | wrong.FRACTIONS
    | {name: wrong.DTYPES[name] for name in ("a sparse tensor", "a nested tensor", "an array")}
)
CALLS = [
    Call("attend", regard.attend, draw_queries_keys_and_values, ATTENDED | DROPOUT),
    Call("attention", regard.attention, draw_queries_keys_and_values, ATTENDED | DROPOUT),
    Call("mechanism.choose", mechanism.choose, draw_queries_keys_and_values, ATTENDED | DROPOUT),
    Call("Everything", regard.Everything, dict, {}),
    Call("Causal", regard.Causal, dict, {}),
    Call("Window", regard.Window, dict, {"left": BOUND, "right": BOUND}),
    Call("Prefix", regard.Prefix, lambda: {"n": 2}, {"n": COUNT}),
    Call(
        "Padding",
        regard.Padding,
        lambda: {"lengths": [1, 2], "side": "left"},
        {"lengths": without(COUNT, "an empty list", "a list", "uint8"), "side": wrong.CHOICE},
    ),
    Call(
        "Documents",
        regard.Documents,
        lambda: {"queries": [0, 0, 1], "keys": [0, 1]},
        {
            "queries": without(SCALARS, "an empty list", "a list") | wrong.FRACTIONS | IDS,
            "keys": without(SCALARS, "an empty list", "a list", "none") | wrong.FRACTIONS | IDS,
        },
    ),
    Call(
        "Given",
        regard.Given,
        lambda: {"table": torch.ones(5, 7).bool()},
        {"table": without(SCALARS, "a bool tensor") | wrong.FRACTIONS | SHAPES},
    ),
    *(method(f"{name}.table", make, make_table_sizes, **TABLE) for name, make in MASKS.items()),
    *(method(f"{name}.draw", make, make_table_sizes, **TABLE) for name, make in MASKS.items()),
    *(
        method(f"{name}.{join}", make, lambda: {"other": regard.Causal()}, other=MASK)
        for name, make in MASKS.items()
        for join in ("__and__", "__or__")
    ),
    Call("mechanism.softmax.by_sum", softmax.by_sum, draw_scores, SCORES),
    Call("mechanism.softmax.naive", softmax.naive, draw_scores, SCORES),
    Call("mechanism.softmax.stable", softmax.stable, draw_scores, SCORES),
    Call("mechanism.softmax.blockwise", softmax.blockwise, draw_scores, SCORES | {"block": COUNT | SIZES}),
    Call(
        "mechanism.scores.dot",
        scores.dot,
        lambda: {"q": torch.ones(5, *Q[1:]), "k": torch.ones(5, *K[1:])},
        {"q": PAIRED, "k": PAIRED},
    ),
    Call(
        "mechanism.scores.scaled_dot",
        scores.scaled_dot,
        lambda: {"q": torch.ones(5, *Q[1:]), "k": torch.ones(5, *K[1:])},
        {"q": PAIRED, "k": PAIRED, "scale": without(NUMBER, "none", "not a number")},
    ),
    Call(
        "mechanism.scores.additive",
        scores.additive,
        lambda: {"q": torch.ones(5, 2, 5, 4), "k": torch.ones(5, 2, 7, 4), "weight": torch.ones(4)},
        {"q": PAIRED, "k": PAIRED, "weight": TENSOR},
    ),
    Call(
        "mechanism.positions.sinusoidal",
        positions.sinusoidal,
        lambda: {"t": 3, "width": 4},
        {"t": COUNT, "width": COUNT | SIZES | constant(odd=5), "base": NUMBER | WIDE | SIZES},
    ),
    Call(
        "mechanism.positions.rotary",
        positions.rotary,
        lambda: {"x": torch.ones(Q)},
        {
            "x": without(TENSOR, "six axes", "another batch"),
            "positions": without(SCALARS, "none", "an int tensor", "a bool tensor", "a float8 tensor", "uint8")
            | without(SHAPES, "a tensor without axes"),
            "base": NUMBER | WIDE | SIZES,
            "pairing": wrong.CHOICE,
        },
    ),
    Call(
        "mechanism.heads.split",
        heads.split,
        lambda: {"x": torch.ones(1, 5, 4), "heads": 2},
        {"x": RANKED, "heads": COUNT | SIZES},
    ),
    Call("mechanism.heads.join", heads.join, lambda: {"x": torch.ones(Q)}, {"x": RANKED}),
    Call("mechanism.heads.share", heads.share, lambda: {"k": torch.ones(Q), "heads": 4}, {"k": RANKED, "heads": COUNT}),
]

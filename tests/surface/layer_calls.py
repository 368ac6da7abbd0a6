"""The calls of `regard.layers`."""

from typing import Any

import torch
from torch import nn

import regard
from surface import wrong
from surface.call import Call, method
from surface.mechanism_calls import SIZES, WIDE
from surface.wrong import COUNT, MASK, NUMBER, TENSOR, Wrong, constant, without

X = without(TENSOR, "a vector") | {
    "another width": lambda: torch.ones(1, 5, 7),
    "float64": lambda: torch.ones(1, 5, 4, dtype=torch.float64),
    "on another device": lambda: torch.ones(1, 5, 4, device="meta"),
}
FREE = without(X, "another width", "float64", "on another device")
LONG = {"too long": lambda: torch.ones(1, 50, 4)}
SIZE = COUNT | SIZES
FLAG = wrong.SCALARS | constant(a_number=1)
CAUSAL: dict[str, Any] = {"d_in": 4, "d_out": 6, "context_length": 9, "dropout": 0.0}
HEADS = {**CAUSAL, "num_heads": 2}
CAUSAL_REFUSES = {"d_in": SIZE, "d_out": SIZE, "context_length": SIZE, "dropout": NUMBER | WIDE, "qkv_bias": FLAG}
HEADS_REFUSE = {**CAUSAL_REFUSES, "num_heads": SIZE}
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "SimpleSelfAttention": ({}, {}, FREE),
    "BareSelfAttention": ({"d_in": 4, "d_out": 6}, {"d_in": SIZE, "d_out": SIZE}, X),
    "SelfAttention": ({"d_in": 4, "d_out": 6}, {"d_in": SIZE, "d_out": SIZE, "qkv_bias": FLAG}, X),
    "CausalAttention": (CAUSAL, CAUSAL_REFUSES, X | LONG),
    "StackedHeads": (HEADS, HEADS_REFUSE, X | LONG),
    "MultiHeadAttention": (HEADS, HEADS_REFUSE, X | LONG),
}
MORE: dict[str, dict[str, Wrong]] = {"MultiHeadAttention.forward": {"mask": MASK, "past": {}}}


def layer(name: str) -> nn.Module:
    made: nn.Module = getattr(regard, name)(**LAYERS[name][0])
    return made


def x() -> dict[str, Any]:
    return {"x": torch.randn(1, 5, 4)}


def draw_queries_keys_and_values() -> dict[str, Any]:
    return {"queries": torch.randn(1, 3, 4), "keys": torch.randn(1, 5, 6), "values": torch.randn(1, 5, 2)}


def additive() -> nn.Module:
    return regard.AdditiveAttention(4, 6, 5)


VALUES = without(FREE, "none")
ADDITIVE = {"queries": X, "keys": without(X, "none"), "values": VALUES, "mask": MASK}
CALLS = [
    *(Call(name, getattr(regard, name), lambda name=name: LAYERS[name][0], LAYERS[name][1]) for name in LAYERS),
    *(
        method(f"{name}.{what}", lambda name=name: layer(name), x, x=LAYERS[name][2], **MORE.get(f"{name}.{what}", {}))
        for name in LAYERS
        for what in ("forward", "steps", "project")
        if hasattr(getattr(regard, name), what)
    ),
    method("BareSelfAttention.to_linear", lambda: layer("BareSelfAttention"), dict),
    method("SelfAttention.to_bare", lambda: layer("SelfAttention"), dict),
    method("MultiHeadAttention.to_stacked", lambda: layer("MultiHeadAttention"), dict),
    Call(
        "MultiHeadAttention.from_stacked",
        regard.MultiHeadAttention.from_stacked,
        lambda: {"stacked": layer("StackedHeads")},
        {"stacked": wrong.OBJECT | {"another layer": lambda: layer("SelfAttention")}},
    ),
    Call(
        "AdditiveAttention",
        regard.AdditiveAttention,
        lambda: {"query_width": 4, "key_width": 6, "hidden": 5},
        {"query_width": SIZE, "key_width": SIZE, "hidden": SIZE},
    ),
    method("AdditiveAttention.forward", additive, draw_queries_keys_and_values, **ADDITIVE),
    method("AdditiveAttention.steps", additive, draw_queries_keys_and_values, **ADDITIVE),
]

"""Families of transformers whose weights are no softmax of queries and keys alone, beside what their layers compute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.families import LLAMA
from observe.family import B, Family, Widened
from regard.observe import record


def series(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Time series that are known, and what is known of their future."""
    before, after = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": torch.randn(B, before),
        "past_time_features": torch.randn(B, before, 2),
        "past_observed_mask": torch.ones(B, before),
        "future_values": torch.randn(B, after),
        "future_time_features": torch.randn(B, after, 2),
    }


def squares(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Pictures of 64 x 64 pixels."""
    return {"pixel_values": torch.randn(B, 3, 64, 64)}


def join_heads(product: Tensor, outputs: dict[str, Tensor]) -> Tensor:
    """The input of an output projection: the products (b, h, t, d) with the heads side by side."""
    return product.transpose(1, 2).flatten(2)


def compute_gated(product: Tensor, outputs: dict[str, Tensor]) -> Tensor:
    """The input of MobileViTV2's output projection: (b, c, p, n), each query's product (b p, 1, n, c) times its gate."""
    half = (outputs["qkv_proj"].shape[1] - 1) // 2
    gate = F.relu(outputs["qkv_proj"][:, 1 + half :])
    return gate * product[:, 0].unflatten(0, (len(gate), -1)).permute(0, 3, 1, 2)


def compute_multiplied(product: Tensor, outputs: dict[str, Tensor]) -> Tensor:
    """The input of SwiftFormer's projection: each key times the sum."""
    return product[:, 0] * F.normalize(outputs["to_key"], dim=-1)


@dataclass(frozen=True, eq=False)
class SharedRows:
    """A family, its class that attends, and how a product of a map with values becomes the input of one of its children.

    `outputs` are the children whose outputs `compute` needs.
    """

    family: Family
    attention: str
    inner: str
    compute: Callable[[Tensor, dict[str, Tensor]], Tensor]
    outputs: tuple[str, ...] = ()


SINKS = {**LLAMA, "num_key_value_heads": 4, "num_local_experts": 3, "sliding_window": 5}  # applied behind the softmax
SHARED = [
    SharedRows(
        Family(
            "autoformer",
            "AutoformerModel",
            {
                "prediction_length": 11,
                "context_length": 23,
                "num_time_features": 2,
                "lags_sequence": [1, 2, 3],
                "d_model": 24,
                "encoder_attention_heads": 3,
                "decoder_attention_heads": 4,
                "moving_average": 5,
                "label_length": 5,
                "encoder_layerdrop": 0.0,
                "decoder_layerdrop": 0.0,
            },
            series,
        ),
        "AutoformerAttention",
        "out_proj",
        join_heads,
    ),
    SharedRows(
        Family(
            "mobilevitv2",
            "MobileViTV2Model",
            {"image_size": 64, "width_multiplier": 0.125, "n_attn_blocks": [1, 2, 1], "base_attn_unit_dims": [64, 64, 64]},
            squares,
        ),
        "MobileViTV2LinearSelfAttention",
        "out_proj",
        compute_gated,
        ("qkv_proj",),
    ),
    SharedRows(
        Family("swiftformer", "SwiftFormerModel", {"depths": [1, 1, 2, 1], "embed_dims": [8, 12, 16, 20]}, squares),
        "SwiftFormerEfficientAdditiveAttention",
        "proj",
        compute_multiplied,
        ("to_key",),
    ),
    *(
        SharedRows(Family(name, f"{kind}Model", SINKS), f"{kind}Attention", "o_proj", join_heads)
        for name, kind in (("granite_swa", "GraniteSWA"), ("granitemoe_swa", "GraniteMoeSWA"))
    ),
]


def compare_with_outputs(one: SharedRows) -> tuple[int, float]:
    """The number of maps, and the largest difference of a map times the values from what its layer computes, in float64.

    It is relative to the largest number that a layer computes. AssertionError if a layer is missing.
    """
    model = one.family.build(torch.float64)
    modules = {name: module for name, module in model.named_modules() if type(module).__name__ == one.attention}
    seen = {name: keep_projections(module, one.outputs, one.inner) for name, module in modules.items()}
    with torch.no_grad(), Widened(), record(model, keep="values") as recording:
        model(**one.family.feed(model))
    assert [call.name for call in recording.calls] == list(modules)
    assert not recording.missed
    found = []
    for call in recording.calls:
        product = call.map.dense() @ recording.values(call.name, kind=call.kind)
        expected = seen[call.name][one.inner]
        found.append(float((one.compute(product, seen[call.name]) - expected).abs().max() / expected.abs().max()))
    return len(found), max(found)


def keep_projections(module: nn.Module, outputs: tuple[str, ...], inner: str) -> dict[str, Tensor]:
    """The outputs of some children of a module, and the input of another, by name, of its next forward."""
    kept: dict[str, Tensor] = {}
    for name in outputs:
        getattr(module, name).register_forward_hook(lambda m, x, y, name=name: kept.update({name: y.detach()}))
    getattr(module, inner).register_forward_pre_hook(lambda m, x: kept.update({inner: x[0].detach()}))
    return kept

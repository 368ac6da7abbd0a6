"""A family recorded, beside what the same model says of itself with attn_implementation="eager".

Both are computed in float64, where they are equal; what is recorded in float32 is held against that, within its rounding.
"""

import functools
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bounds import EXPONENTIAL, estimate_rounding, sum_bound
from observe.family import Family, Widened
from regard import AttentionMap
from regard.observe import Recording, record

PARTS = {"encoder_attentions": "encoder", "decoder_attentions": "decoder"}
Handed = dict[tuple[str, str | None, int], Any]  # kind, part and layer to weights


@dataclass(frozen=True)
class Beside:
    """What came of a family whose sequences are padded on one side."""

    implementation: str  # the one it runs by itself
    unchanged: bool  # whether its outputs inside record are those outside to the bit
    difference: float  # the largest of its maps from its own eager attention
    eager: float  # the largest difference of its maps from its weights where both are of eager attention
    asked: float  # the same, of what it hands out inside record when it is asked for attentions
    handed: int  # of those that were maps
    maps: int  # that were compared
    recorded: int  # one for each visit of a module
    rounding: tuple[float, float]  # of its maps in float32, and how large it may be; NaN but for the last side
    missed: tuple[Any, ...]


@functools.cache
def compare_with_eager(family: Family, side: str) -> Beside:
    """A family recorded as it runs by itself, and as it runs eager attention."""
    model, exact, other = build_models(family)
    plain, _ = run(model, family.feed(model, side))
    inside, rounded = run(model, family.feed(model, side), recorded=True)
    inputs = family.feed(exact, side)
    with Widened():  # the models only: maps are computed in the dtype of what they hold
        _, recording = run(exact, inputs, recorded=True)
        handed, _ = run(exact, inputs, recorded=True, output_attentions=True)
        told, _ = run(other, inputs, output_attentions=True)
        _, eager = run(other, inputs, recorded=True)
    weights = list_attentions(told)
    maps = {key: m for key, m in list_attentions(handed).items() if isinstance(m, AttentionMap)}
    ours = {key: find_map(recording, key) for key in weights}
    dense = {key: m.dense() for key, m in ours.items()}
    real = inputs.get("attention_mask") if any(has_blind_rows(m) for m in ours.values()) else None
    rounding = math.nan, math.nan
    if side == family.sides[-1]:
        rounding = measure_rounding(other if real is None else exact, inputs, rounded, dense)
    return Beside(
        model.config._attn_implementation,
        unchanged=are_equal(plain, inside),
        difference=largest({key: (m, weights[key]) for key, m in dense.items()}, real),
        eager=largest({key: (find_map(eager, key).dense(), weights[key]) for key in weights} if not eager.missed else {}),
        asked=largest({key: (m.dense(), weights[key]) for key, m in maps.items()}, real),
        handed=len(maps),
        maps=len(weights),
        recorded=len({key[:3] for key in rounded.last.histories}),
        rounding=rounding,
        missed=(*rounded.missed, *recording.missed, *eager.missed),
    )


@functools.lru_cache(maxsize=1)  # the sides of a family follow each other
def build_models(family: Family) -> tuple[nn.Module, nn.Module, nn.Module]:
    """A family as it runs by itself, in float32 and in float64, and with eager attention in float64."""
    return family.build(), family.build(torch.float64), family.build(torch.float64, attn_implementation="eager")


def measure_rounding(source: nn.Module, inputs: dict[str, Tensor], rounded: Recording, dense: Handed) -> tuple[float, float]:
    """How far the maps in float32 are from those in float64, and how far they may be: the layers below, the softmax itself.

    source: the model in float64. With eager attention it says its weights itself, which are the maps where no row is blind.
    """
    expected, is_eager = join_weights(dense.values()), source.config._attn_implementation == "eager"

    def run_and_join(model: nn.Module) -> Tensor:
        if model is source:  # which has run
            return expected
        with Widened():
            output, recording = run(model, inputs, recorded=not is_eager, output_attentions=is_eager)
        weights = list_attentions(output)
        return join_weights(weights[key] if is_eager else find_map(recording, key).dense() for key in dense)

    moved = estimate_rounding(source, run_and_join, widest(source))
    most, keys = max(float(one.max()) for one in dense.values()), max(one.shape[-1] for one in dense.values())
    found = float((join_weights(find_map(rounded, key).dense() for key in dense) - expected).abs().max())
    return found, moved + sum_bound(torch.float32, keys + EXPONENTIAL, most)


def join_weights(weights: Iterable[Tensor]) -> Tensor:
    """The weights of all maps, in one row of float64."""
    return torch.cat([one.double().flatten() for one in weights])


def widest(model: nn.Module) -> int:
    """The terms of the longest sum in a model's linear layers and convolutions."""
    return max(p[0].numel() for p in model.parameters() if p.dim() > 1 and p.numel())


def run(model: nn.Module, inputs: dict[str, Tensor], recorded: bool = False, **options: Any) -> tuple[Any, Recording]:
    """What a model says, and a recording of it if asked for."""
    torch.manual_seed(7)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if not recorded:
            return model(**inputs, **options), Recording()
        with record(model) as recording:
            output = model(**inputs, **options)
    return output, recording


def list_attentions(output: Any, part: str | None = None) -> Handed:
    """The attentions in a model's output, those of its towers too."""
    found: Handed = {}
    for name, value in output.items():
        if name.endswith("attentions"):
            kind = "cross" if "cross" in name else "self"
            found |= {(kind, PARTS.get(name, part), n): one for n, one in enumerate(value or ())}
        elif hasattr(value, "items") and not name.startswith("image_"):  # of packed pictures, piece by piece, since 5.24
            found |= list_attentions(value, name.split("_")[0])
    return found


def find_map(recording: Recording, key: tuple[str, str | None, int]) -> AttentionMap:
    """The map that is recorded of attentions a model hands out."""
    kind, part, layer = key
    return recording.map(layer, kind=kind, part=part)


def has_blind_rows(m: AttentionMap) -> bool:
    """Whether a query of it sees nothing."""
    return not bool(AttentionMap.logsumexp(m).isfinite().all())


def largest(pairs: dict[Any, tuple[Tensor, Tensor]], real: Tensor | None = None) -> float:
    """The largest difference; of the rows of real tokens only, where padding sees nothing.

    There eager attention, whose masks hold a finite minimum, is uniform, and a kernel gives zero: what follows from
    these rows differs in the model itself, and never reaches a real token.
    """
    found = 0.0
    for dense, weights in pairs.values():
        if dense.shape != weights.shape:
            return float("inf")
        apart = (dense - weights).abs()
        if real is not None and real.shape[1] == dense.shape[2]:
            apart = apart[real.bool()[:, None, :].expand(dense.shape[:3])]
        found = max(found, float(apart.max()))
    return found


def are_equal(one: Any, other: Any) -> bool:
    """Whether two outputs are equal to the bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    if hasattr(one, "items"):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(are_equal(*both) for both in zip(one, other, strict=True))
    return type(one) is type(other)

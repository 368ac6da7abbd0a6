"""What a forward infers once of masks and other tensors that its layers share, until one of them is written to."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.map.computed_bias import drop_repeated_axes
from regard.observe.interception.thread_state import STATE
from regard.observe.stored_calls.mask_inference import InferredRule, infer_rule

Inferred = TypeVar("Inferred")
MASKS = 8  # cached until the forward ends


def infer_mask_rule(mask: Tensor, q: Tensor, k: Tensor) -> InferredRule:
    """Return the rule, offset and bias of a mask with four axes, inferred once per forward for all layers that share it."""
    return infer_once((mask,), q, k, lambda: infer_rule(mask, q, k))


def infer_once(masks: tuple[Tensor | None, ...], q: Tensor, k: Tensor, infer: Callable[[], Inferred], *how: object) -> Inferred:
    """Return what `infer` returns for some masks, such as their rule, offset and bias; inferred once per forward.

    A result is reused for masks with the same memory, layout and dtype, the same lengths, and the same way to read them, `how`.
    """
    layout = *how, *(None if m is None else (m.shape, m.stride(), m.dtype) for m in masks), q.shape, k.shape[2]
    key = layout, *(None if m is None else m.data_ptr() for m in masks)
    result: Inferred = cache_in_forward(key, masks, infer, lambda: find_equal_masks(layout, masks))
    return result


def find_equal_masks(layout: tuple[object, ...], masks: tuple[Tensor | None, ...]) -> tuple[list[Any], Any] | None:
    """Return the fingerprints and what was inferred in this forward of other masks with the same numbers.

    Every layer may have its own. None if there are none, or where numbers are not compared, as on a GPU.
    """
    for (other, *_), (_, fingerprints, result) in STATE.inferred_masks.items():
        if other == layout and all(
            x is None if m is None else isinstance(x, Tensor) and have_same_bits(x, drop_repeated_axes(m))
            for m, x in zip(masks, fingerprints, strict=True)
        ):
            return fingerprints, result
    return None


def cache_in_forward(
    key: Any,
    tensors: Iterable[Any],
    compute: Callable[[], Any],
    find_equal: Callable[[], tuple[list[Any], Any] | None] = lambda: None,
) -> Any:
    """Return the result cached under a key in this forward; recompute it if a tensor in `tensors` has been written to.

    `find_equal` returns the fingerprints and the result of equal tensors under another key, if there are any.
    """
    cached = STATE.inferred_masks.pop(key, None)
    if cached is None or not all(map(is_unchanged, *cached[:2])):
        tensors = list(tensors)  # kept alive, so that their memory and ids are not reused
        with torch.no_grad():
            found = find_equal() or ([take_fingerprint(x) if isinstance(x, Tensor) else None for x in tensors], compute())
        cached = tensors, *found
    while len(STATE.inferred_masks) >= MASKS:
        del STATE.inferred_masks[next(iter(STATE.inferred_masks))]
    STATE.inferred_masks[key] = cached
    return cached[2]


def take_fingerprint(x: Tensor) -> int | Tensor:
    """Return what changes when x is written to: its version, or a copy of its values where torch may not count all writes.

    torch counts none in inference mode, and none through numpy. To compare copies would make a GPU wait.
    """
    is_counted = x.device.type != "cpu" and not x.is_inference()
    return x._version if is_counted else drop_repeated_axes(x).clone()


def is_unchanged(x: Any, was: int | Tensor | None) -> bool:
    """Return whether a tensor still equals its fingerprint; True for anything that is no tensor."""
    if was is None:
        return True
    return bool(x._version == was) if isinstance(was, int) else have_same_bits(drop_repeated_axes(x), was)


def have_same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same bits, compared eight bytes at a time where they can be."""
    if x.dtype == y.dtype and x.element_size() < 8:
        with suppress(RuntimeError):  # of a layout in which the entries of a row do not make whole numbers of eight bytes
            x, y = x.view(torch.int64), y.view(torch.int64)
    return torch.equal(x, y)

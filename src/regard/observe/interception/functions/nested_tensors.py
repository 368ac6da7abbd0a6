"""Attention on nested tensors, whose sequences have different lengths: they are padded, and the mask hides the padding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.mechanism.mask_algebra import Mask
from regard.mechanism.masks import Causal, Documents, Padding
from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.plain_tensors import UnreadableError, disable_modes


def read_nested_call(
    run: Callable[[], Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
    *,
    is_masked: bool,
    is_causal: bool,
    scale: float | None,
    has_separate_sources: bool | None,
) -> tuple[AttentionCall, CallAdapter]:
    """Read a call on nested queries, keys and values, each of b sequences (h, t, d).

    Its map is that of (b, h, t, d), where t is the longest length. Raises UnreadableError for other arguments.
    """
    if is_masked or not all(x.is_nested and x.dim() == 4 for x in tensors):
        raise UnreadableError("its tensors are nested, and it has a mask, or no heads, or other tensors that are not nested")
    q, k, v = map(pad_sequences, tensors)
    padding = hide_padding(list_sequences(tensors[0]), list_sequences(tensors[1]))
    call = AttentionCall(
        kernel="sdpa",
        q=q,
        k=k,
        v=v,
        mask=padding & Causal() if is_causal else padding,
        scale=scale,
        has_separate_sources=has_separate_sources,
        can_use_cache=False,
    )
    return call, CallAdapter(run, pad_sequences, replace_sequences)


def hide_padding(queries: Sequence[Tensor] | Tensor, keys: Sequence[Tensor] | Tensor) -> Mask:
    """Return the rule of sequences of queries and keys, nested or in lists: nothing sees what pads them, which sees nothing."""
    lengths = [torch.tensor([*map(len, x.unbind() if isinstance(x, Tensor) else x)]) for x in (queries, keys)]
    ids = [(torch.arange(int(n.max()))[None] >= n[:, None]).long() for n in lengths]
    return Padding(lengths[1]) & Documents(*ids)


def list_sequences(x: Tensor) -> list[Tensor]:
    """Return the sequences of a nested tensor (b, h, t, d), each (t, h, d)."""
    with disable_modes():
        return [*x.transpose(1, 2).unbind()]


def pad_sequences(x: Tensor) -> Tensor:
    """Return a nested tensor as (b, h, t, d), with zeros behind each sequence."""
    sequences = list_sequences(x)
    with disable_modes():
        return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).transpose(1, 2)


def replace_sequences(new: Tensor, out: Tensor) -> Tensor:
    """Return a nested tensor with the lengths of `out` and the numbers of `new` (b, h, t, d)."""
    lengths = map(len, list_sequences(out))
    with disable_modes():
        rows = [one[:, :n] for one, n in zip(new, lengths, strict=True)]
        if out.layout is torch.strided:
            return torch.nested.nested_tensor(rows)
        values = torch.cat(rows, 1).transpose(0, 1)  # (tokens of all, h, d)
        jagged: Any = out.transpose(1, 2)
        return torch.nested.nested_tensor_from_jagged(values, jagged.offsets()).transpose(1, 2)


def pad_nested(x: Tensor) -> Tensor:
    """Return a nested tensor padded with zeros; any other as it is."""
    return x.to_padded_tensor(0.0) if x.is_nested else x


def nest_like(y: Tensor, x: Tensor) -> Tensor:
    """Return a tensor (b, t, c) as a nested tensor with the lengths of x; as it is if x is not nested."""
    if not x.is_nested:
        return y
    return torch.nested.as_nested_tensor([row[: len(own)] for row, own in zip(y, x.unbind(), strict=True)])

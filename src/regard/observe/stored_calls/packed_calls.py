"""Calls of one visit of a module that were cut from one tensor, as of packed sequences: found by the memory of q and k."""

from contextlib import suppress
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.provenance import ModuleFrame


class Memory:
    """The memory of a tensor, also once it is freed; that of a tensor inside torch.func equals none."""

    def __init__(self, x: Tensor) -> None:
        self.address: int | None = None
        with suppress(RuntimeError):
            self.reference = StorageWeakRef(x.untyped_storage())  # as long as it is there, no other memory has the address
            self.address = self.reference.cdata

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Memory) and self.address is not None and self.address == other.address

    __hash__ = None  # type: ignore[assignment]


class Cut(NamedTuple):
    """The memory of the queries and the keys of a call, with the addresses where they begin in it."""

    memories: tuple[Memory, ...]
    addresses: tuple[int, ...]
    tokens: int  # of the input of the module that the first call of the visit was cut from; 0 if the calls have no such input


class PackedCalls:
    """The last call of each visit so far."""

    def __init__(self) -> None:
        self.cuts: dict[tuple[str, str, int], Cut] = {}

    def count_tokens(self, visit: tuple[str, str, int], number: int, call: AttentionCall, frame: ModuleFrame) -> int:
        """Return the number of tokens of the input that the calls of a visit so far are consecutive parts of; 0 if of none."""
        tensors = call.q, call.k
        tokens = count_input_tokens(call, frame) if number == 0 else 0
        cut = Cut(tuple(map(Memory, tensors)), tuple(x.data_ptr() for x in tensors), tokens)
        before = self.cuts.get(visit)
        if number and before is not None and before.memories == cut.memories:
            is_behind = all(start < next_start for start, next_start in zip(before.addresses, cut.addresses, strict=True))
            cut = cut._replace(tokens=before.tokens if is_behind else 0)
        self.cuts[visit] = cut
        return cut.tokens


def count_input_tokens(call: AttentionCall, frame: ModuleFrame) -> int:
    """Return the number of tokens of a module's first input (..., c), or of queries that it was given; 0 if that is not known.

    One head of (t, d) may be one of several that a loop cuts from (h, t, d).
    """
    x = next((x for x in frame.input_tensors if x.is_floating_point() and x.dim() > 1), None)
    if x is None or not x.numel():
        return 0
    (b, h, _, d), rows = call.q.shape, x.numel() // x.shape[-1]
    if x.shape[-1] == d and h == 1 and (x.dim() > 3 or (x.dim() == 3 and len(x) != b)):
        return 0
    return rows // h if x.shape[-1] == d and h in x.shape[:-1] else rows

"""Calls of one visit of a module that were cut from one tensor, as of packed sequences: found by the memory of q and k."""

from contextlib import suppress
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from regard.observe.interception.attention_call import AttentionCall, CallPart
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
    """The memory of the queries and the keys of a call, with the address of the last token of their first head."""

    memories: tuple[Memory, ...]
    ends: tuple[int, ...]
    queries: int  # of the calls of the visit so far
    input_tokens: int  # of the input of the module at the first call of the visit; 0 if that is not known
    packed_tokens: int  # the same if the calls so far are consecutive parts of it, else 0


class PackedCalls:
    """The last call of each visit so far."""

    def __init__(self) -> None:
        self.cuts: dict[tuple[str, str, int], Cut] = {}

    def place_call(self, visit: tuple[str, str, int], number: int, call: AttentionCall, frame: ModuleFrame) -> CallPart:
        """Return where the queries of a call lie beside those of the calls of its visit so far.

        They are no further rows of a map if the calls have more queries than the input has tokens, as heads have, or calls that
        are subtracted.
        """
        tensors, queries = (call.q, call.k), len(call.q) * call.q.shape[2]
        starts = tuple(x.data_ptr() for x in tensors)
        ends = tuple(x.data_ptr() + (x.shape[2] - 1) * x.stride(2) * x.element_size() for x in tensors)
        cut, before, is_same = Cut(tuple(map(Memory, tensors)), ends, queries, 0, 0), self.cuts.get(visit), [True]
        if number == 0 or before is None:
            tokens = count_input_tokens(call, frame)
            cut = cut._replace(input_tokens=tokens, packed_tokens=tokens)
        else:
            is_same = [own == last for own, last in zip(cut.memories, before.memories, strict=True)]
            is_behind = [end < start for end, start in zip(before.ends, starts, strict=True)]
            packed = before.packed_tokens if all(is_same + is_behind) else 0
            cut = cut._replace(queries=before.queries + queries, input_tokens=before.input_tokens, packed_tokens=packed)
        self.cuts[visit] = cut
        has_too_many = 0 < cut.input_tokens < cut.queries
        first = int(call.q.storage_offset()) * call.q.element_size()
        return CallPart(cut.packed_tokens, not has_too_many, (first, first + ends[0] - starts[0]) if is_same[0] else None)


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

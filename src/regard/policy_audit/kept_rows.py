"""What a cache drops from every row of one head, by compiled passes.

All that eviction can do is to end a key, so that a cache is one number for each key (`Mask.find_key_ends`). Complete rows are
computed in two parts, the keys of the prompt and later ones: policies that keep all later keys share the second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from regard.compiled import processor
from regard.compiled.threads import run_parts
from regard.errors import ConfigError
from regard.map import compiled_passes
from regard.map.pass_inputs import pack_panels
from regard.map.passes import AppliedWeights
from regard.map.plane import Denominators, Plane
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.scores import score_dtype
from regard.policies import AttentionInputs
from regard.policy_audit.row_measures import RowMeasures

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Integers = NDArray[np.int32]

LARGEST_END = 2**31 - 1
ALIGNED = 64  # keys: a multiple of the width of every panel


def can_run_compiled(inputs: AttentionInputs, values: Tensor) -> bool:
    """Return whether the compiled passes apply to a layer: float32 on a CPU, without a bias, with finite values."""
    is_plain = inputs.bias is None and inputs.q.device.type == "cpu" and min(inputs.q.shape[3], values.shape[3]) > 0
    is_float32 = score_dtype(inputs.q.dtype) == torch.float32 and values.dtype == torch.float32
    return is_plain and is_float32 and processor.has_numba() and bool(values.isfinite().all())


def find_ends(inputs: AttentionInputs, mask: Mask) -> "Integers | None":
    """Return the end of each key, (b or 1, h or 1, t), under the masks of the model and of a policy; None if they have none."""
    ends = (inputs.mask & mask).find_key_ends(inputs.tokens)
    return None if ends is None else ends.clamp(max=LARGEST_END).int().numpy()


@dataclass(eq=False)
class RowSoftmax:
    """The softmax of rows over some of their keys: its denominators and mean distances, (n,), and its contexts (n, e)."""

    shift: "Floats"
    total: "Floats"
    distance: "Floats"
    context: "Floats"

    def __getitem__(self, rows: slice) -> "RowSoftmax":
        return RowSoftmax(*(x[rows] for x in self.arrays))

    @property
    def arrays(self) -> "tuple[Floats, Floats, Floats, Floats]":
        """The arrays, as the compiled functions take them."""
        return self.shift, self.total, self.distance, self.context

    def add_keys(self, other: "RowSoftmax") -> None:
        """Add the other's keys, in place."""
        from regard.policy_audit import numba_kept_rows

        numba_kept_rows.add_keys(*self.arrays, *other.arrays)

    def add_sink(self, plane: Plane) -> None:
        """Add the head's sink, which has no value, in place."""
        if plane.sink is not None:
            sink = np.full_like(self.shift, float(plane.sink))
            self.add_keys(RowSoftmax(sink, np.ones_like(sink), np.zeros_like(sink), np.zeros_like(self.context)))

    @classmethod
    def make_empty(cls, rows: int, width: int) -> "RowSoftmax":
        """Return arrays to be filled, of some rows and of contexts of a width."""
        return cls(*(np.empty(shape, np.float32) for shape in ((rows,), (rows,), (rows,), (rows, width))))

    @classmethod
    def from_applied(cls, applied: AppliedWeights) -> "RowSoftmax":
        """Return the arrays of tensors."""
        below = applied.denominators
        return cls(*(x.contiguous().numpy() for x in (below.shift, below.total, applied.distance, applied.product)))

    def to_applied(self) -> AppliedWeights:
        """Return the arrays as tensors."""
        shift, total, distance, context = map(torch.from_numpy, self.arrays)
        return AppliedWeights(context, Denominators(shift, total), distance, shift[:0])


@dataclass(frozen=True, eq=False)
class CompleteRows:
    """The softmax of all rows of a head, that of the rows from `cut` on over the keys from there on, and the prompt's sums."""

    rows: RowSoftmax
    late: RowSoftmax | None
    cut: int
    sums: Tensor  # (prompt,), of the weights of the prompt's queries on each of its keys, but for a sink

    @classmethod
    def compute(cls, plane: Plane, v: Tensor, prompt: int, threads: int) -> "CompleteRows | None":
        """Compute the rows of a plane; None if there is a NaN."""
        t, cut = len(v), min(len(v), -(-prompt // ALIGNED) * ALIGNED)
        without_sink = Plane(plane.request._replace(sinks=None), plane.b, plane.h)
        parts = [((0, t), (0, cut)), *([((cut, t), (cut, t))] if cut < t else [])]
        found = [
            compiled_passes.apply_weights_with_statistics(without_sink, threads, v, part, 0 if n else prompt)
            for n, part in enumerate(parts)
        ]
        first, *others = [None if one is None else RowSoftmax.from_applied(one) for one in found]
        if found[0] is None or first is None or None in others:
            return None
        late = others[0] if others else None
        if late is not None:
            first[cut:].add_keys(late)
        first.add_sink(plane)
        return cls(first, late, cut, found[0].received[:prompt])


def measure_head(
    plane: Plane,
    cache: "HeadCache",
    prompt: int,
    complete: CompleteRows,
    ends: "Sequence[Integers | None]",
    found: RowMeasures,
    threads: int,
) -> None:
    """Measure the rows of one head under each policy with ends (b or 1, h or 1, t).

    The last of the ends are those of the model's own mask. Raises ConfigError where a policy keeps no key.
    """
    t, cut, tail = len(cache.v), complete.cut, complete.late
    *policies, whole = (None if one is None else select_plane(one, plane) for one in ends)
    assert whole is not None
    for n, own in enumerate(policies):
        if own is None:
            continue
        rows = find_incomplete_rows(own, whole, prompt)
        shares_tail = tail is not None and np.array_equal(own[cut:], whole[cut:])
        kept, counts = cache.attend(own, rows, cut if shares_tail else t, threads)
        complete_counts = found.kept[n, plane.b, plane.h, rows].numpy()
        if tail is not None and shares_tail:
            late = slice(cut - rows.start, None)
            kept[late].add_keys(tail)
            counts[late] += np.minimum(complete_counts[late], np.arange(1, t - cut + 1, dtype=np.int32))
        write_kept_rows(plane, complete, kept, counts, rows, found, n)


def find_incomplete_rows(ends: "Integers", whole: "Integers", prompt: int) -> slice:
    """Return the queries of which a key may be missing, given the ends of keys (..., t) with a policy and without one."""
    is_late = bool((ends[..., :prompt] >= np.minimum(whole[..., :prompt], prompt)).all())
    return slice(prompt if is_late else 0, ends.shape[-1])


def write_kept_rows(
    plane: Plane, complete: CompleteRows, kept: RowSoftmax, counts: "Integers", rows: slice, found: RowMeasures, policy: int
) -> None:
    """Write what some rows keep under a policy, given their softmax over the kept keys and how many these are.

    Raises ConfigError where that is none.
    """
    from regard.policy_audit import numba_kept_rows

    if not counts.all():
        raise ConfigError(describe_empty_row(rows.start + int(np.argmin(counts != 0)), plane.h))
    names = ("kept", "kl", "recall", "output_error", "dropped_distance")
    complete_counts, *measures = (getattr(found, name)[policy, plane.b, plane.h, rows].numpy() for name in names)
    kept.add_sink(plane)
    numba_kept_rows.compare_softmax(complete.rows[rows].arrays, kept.arrays, complete_counts, counts, *measures)
    complete_counts[:] = counts


def describe_empty_row(query: int, head: int) -> str:
    """Return the message for a query of which a policy keeps no key."""
    return (
        f"a policy keeps no key for query {query:,} in head {head}: it must leave each query at least one that the model sees."
    )


def select_plane(ends: "Integers", plane: Plane) -> "Integers":
    """Return the ends (t,) of one head, from (b or 1, h or 1, t)."""
    return np.ascontiguousarray(ends[plane.b if len(ends) > 1 else 0, plane.h if ends.shape[1] > 1 else 0])


class HeadCache:
    """The queries, keys and values of one head, and the softmax over those that a cache holds."""

    def __init__(self, plane: Plane, v: Tensor) -> None:
        tensors = plane.q * plane.request.scale, plane.k, v
        self.q, self.k, self.v = (x.contiguous().numpy() for x in tensors)
        self.softcap = np.float32(plane.request.softcap or 0)

    @cached_property
    def panels(self) -> "tuple[Floats, Floats]":
        """The keys and the values, packed for products of blocks."""
        return pack_panels(self.k.T), pack_panels(self.v)

    def attend(self, ends: "Integers", rows: slice, stop: int, threads: int) -> "tuple[RowSoftmax, Integers]":
        """Return the softmax of some rows over the keys before `stop` that they see, and how many these are, (n,)."""
        from regard.policy_audit.numba_kept_rows import BLOCK, attend_to_slots

        t = len(self.q)
        found = RowSoftmax.make_empty(t, self.v.shape[1])
        counts = np.empty(t, np.int32)
        capacity = count_slots(ends[:stop], rows, BLOCK)
        blocks = -(-(rows.stop - rows.start) // BLOCK)
        edges = [min(rows.start + blocks * n // threads * BLOCK, rows.stop) for n in range(threads + 1)]

        def work(n: int) -> None:
            given = edges[n], edges[n + 1], stop, capacity, self.softcap
            if edges[n] < edges[n + 1]:  # without a row there is no slot for a key
                attend_to_slots(self.q, self.k, self.v, ends, *given, *found.arrays, counts)

        run_parts(work, threads)
        return found[rows], counts[rows]


def count_slots(ends: "Integers", rows: slice, block: int) -> int:
    """Return the most keys that a block of rows sees, rounded up to whole panels; the keys (n,) begin at their own position."""
    lives = ends > np.arange(len(ends))
    born, died = np.cumsum(np.append(0, lives)), np.sort(ends[lives])
    starts = np.arange(rows.start, rows.stop, block)
    seen = born[np.minimum(np.minimum(starts + block, rows.stop), len(ends))] - np.searchsorted(died, starts, side="right")
    return -(-max(int(seen.max(initial=0)), 1) // ALIGNED) * ALIGNED

"""What queries drop whose keys are chosen page by page, or as columns and diagonals, of one head, by compiled passes."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from regard.compiled.threads import run_parts
from regard.map.plane import Plane
from regard.mechanism.mask_algebra import Mask
from regard.policies import AttentionInputs, ChosenPages, Lines
from regard.policy_audit.kept_rows import CompleteRows, HeadCache, RowSoftmax, write_kept_rows
from regard.policy_audit.row_measures import RowMeasures

if TYPE_CHECKING:
    from regard.policy_audit.kept_rows import Integers

ROWS = 64  # queries that a thread takes at a time
LARGEST_PART = 8  # pages with at least an eighth of the keys are faster in products of whole blocks


def measure_head(
    plane: Plane,
    cache: HeadCache,
    inputs: AttentionInputs,
    masks: Sequence[Mask],
    complete: CompleteRows,
    found: RowMeasures,
    threads: int,
) -> None:
    """Measure the rows of one head under each of the masks that is a ChosenPages or Lines.

    Raises ConfigError where a policy keeps no key.
    """
    for n, mask in enumerate(masks):
        if isinstance(mask, ChosenPages | Lines):
            kept, counts = attend_to_chosen_keys(mask, plane, cache, inputs, threads)
            write_kept_rows(plane, complete, kept, counts, mask.find_choosing_rows(len(cache.q)), found, n)


def attend_to_chosen_keys(
    mask: ChosenPages | Lines, plane: Plane, cache: HeadCache, inputs: AttentionInputs, threads: int
) -> "tuple[RowSoftmax, Integers]":
    """Return the softmax of the rows that choose keys over the keys chosen for them, and how many these are, (n,)."""
    from regard.policy_audit import numba_chosen_keys

    t = len(cache.q)
    rows, (lows, stops) = mask.find_choosing_rows(t), inputs.find_key_ranges()
    place = plane.b if mask.batch > 1 else 0, plane.h if mask.heads > 1 else 0
    if isinstance(mask, ChosenPages):
        pages = mask.pages[place].int().contiguous().numpy()
        chosen = pages, mask.page, mask.rows, mask.start
        if pages.shape[1] * mask.page * LARGEST_PART < (rows.start + rows.stop) // 2:
            attend = partial(numba_chosen_keys.attend_to_pages, *chosen)
        else:
            attend = partial(numba_chosen_keys.attend_to_many_pages, *chosen, *cache.panels)
    else:
        columns, distances = (x[place].nonzero().flatten().int().numpy() for x in (mask.columns, mask.distances))
        attend = partial(numba_chosen_keys.attend_to_lines, columns, distances, mask.columns[place].contiguous().numpy())
    found, counts = RowSoftmax.make_empty(*cache.v.shape), np.empty(t, np.int32)

    def work(n: int) -> None:
        for first in range(rows.start + n * ROWS, rows.stop, threads * ROWS):
            bounds = lows, stops, first, min(first + ROWS, rows.stop)
            attend(cache.q, cache.k, cache.v, *bounds, cache.softcap, *found.arrays, counts)

    run_parts(work, threads)
    return found[rows], counts[rows]

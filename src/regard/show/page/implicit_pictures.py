"""The layers of a recording without a softmax: their summary, and pictures and entries of the signed matrix of a head."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor

from regard.errors import ConfigError
from regard.map.attribution_passes import gather_blocks
from regard.map.implicit_map import ImplicitMap
from regard.map.pooling import EntryBlock, How, bin_edges
from regard.observe.implicit_history import join_head_maps
from regard.observe.recorded_runs.part_names import describe_module
from regard.observe.recorded_runs.run import IMPLICIT, HistoryKey, Run

PICTURE_PIXELS = 256  # maximum pixels along each side of a picture
FILE_PIXELS = (1024, 512, 256, 128, 64, 32, 16)  # of the pictures in a single file: the most that fit
MAX_FILE_BYTES = 16 * 2**20  # of these pictures, before compression
SIGNS = "No softmax: entries are signed, blue above 0, brown below; rows need not sum to 1."
SIGNED_LOG = "Colors are logarithmic, over four decades on each side of 0."
MAX_FILE_HEADS = 64  # maximum heads of a layer in a single file: a layer without heads has one for each of its channels


@dataclass(frozen=True)
class ImplicitLayer:
    """A layer without a softmax: its module, the calls that its map joins, and what its map is."""

    name: str
    calls: tuple[HistoryKey, ...]
    title: str
    shape: tuple[int, int, int, int]
    offset: int  # the place of the first query among the keys


def list_implicit_layers(run: Run) -> tuple[list[ImplicitLayer], list[str]]:
    """Return the layers without a softmax of all parts of a run, and a sentence on each that has no map."""
    found, notes = [], []
    for name, visit in run.list_all_visits(IMPLICIT):
        calls = tuple(key for key in run.implicit_histories if (key[0], key[2]) == (name, visit))
        try:
            found.append(describe_layer(run, name, calls))
        except ConfigError:  # calls of different shapes or kinds
            for n, one in enumerate(calls):
                try:
                    found.append(describe_layer(run, f"{name}, call {n}", (one,)))
                except ConfigError as error:
                    notes.append(f"{name} is not drawn: {error}")
    return found, notes


def describe_layer(run: Run, name: str, calls: tuple[HistoryKey, ...]) -> ImplicitLayer:
    """Describe the map of some calls. Raises ConfigError if they do not form one."""
    m = build_implicit_map(run, calls)
    return ImplicitLayer(name, calls, m.title, m.shape, m.offset)


def build_implicit_map(run: Run, calls: Sequence[HistoryKey]) -> ImplicitMap:
    """Return the map (b, h, q, k) of some calls of a module without a softmax."""
    return join_head_maps([run.implicit_histories[one].build_map() for one in calls])


def count_pixels(layer: ImplicitLayer, pixels: int) -> tuple[int, int]:
    """Return the rows and columns of the pictures of a layer, of at most some pixels along each side."""
    return min(layer.shape[2], pixels), min(layer.shape[3], pixels)


def choose_file_pixels(layers: list[ImplicitLayer]) -> int:
    """Return the most pixels along a side at which the pictures of all heads in a single file fit."""
    for pixels in FILE_PIXELS:
        counts = (math.prod(count_pixels(one, pixels)) * one.shape[0] * min(one.shape[1], MAX_FILE_HEADS) for one in layers)
        if 2 * 4 * sum(counts) <= MAX_FILE_BYTES:
            return pixels
    return FILE_PIXELS[-1]


def note_limits(layers: list[ImplicitLayer], pixels: int) -> list[str]:
    """Return the sentences on what a single file does not contain of the layers without a softmax."""
    most = max((one.shape[1] for one in layers), default=0)
    found = []
    if most > MAX_FILE_HEADS:
        found.append(
            f"This file contains the first {MAX_FILE_HEADS} of up to {most:,} heads of each layer without a softmax; "
            "regard serve shows all."
        )
    if any(max(one.shape[2:]) > pixels for one in layers):
        found.append(
            f"This file contains pictures of at most {pixels} x {pixels} pixels of the layers without a softmax; "
            "regard serve shows every entry."
        )
    return found


def draw_implicit(m: ImplicitMap, rows: int, columns: int, how: How, alive: Callable[[], None]) -> Tensor:
    """Compute a picture (rows, columns) of the first matrix of a map; alive() is called between blocks."""
    edges = [bin_edges(0, size, bins).to(m.device) for size, bins in zip(m.shape[2:], (rows, columns), strict=True)]
    return gather_blocks(iterate_alive(m, alive), m.shape[2:], m.dtype, *edges).picture.pool(how)


def iterate_alive(m: ImplicitMap, alive: Callable[[], None]) -> Iterator[tuple[EntryBlock, Tensor]]:
    """Yield the blocks of the first matrix of a map as long as its client is there."""
    for block in m.iterate_plane(0, 0):
        alive()
        yield block


def get_entry_number(m: ImplicitMap, q: int, k: int) -> float | None:
    """Return one entry of the first matrix of a map; None if it is no finite number."""
    found = float(m[0, 0, q, k])
    return found if math.isfinite(found) else None


def summarize_implicit(
    layers: list[ImplicitLayer], pixels: int, word_lists: Mapping[tuple[str, str | None], tuple[str | None, str | None]]
) -> list[dict[str, Any]]:
    """Summarize layers without a softmax, given the pixels of their pictures and the lists of their words."""
    found = []
    for one in layers:
        b, h, q, k = one.shape
        rows, columns = count_pixels(one, pixels)
        found.append(
            {
                "name": describe_module(one.name),
                "title": one.title,
                "batch": b,
                "heads": h,
                "queries": q,
                "keys": k,
                "offset": one.offset,
                "words": word_lists[IMPLICIT, one.name][1],
                "rows": rows,
                "columns": columns,
            }
        )
    return found


def iterate_implicit_pictures(
    layers: list[ImplicitLayer], pixels: int, get_map: Callable[[int, int, int], ImplicitMap]
) -> Iterator[tuple[str, Tensor]]:
    """Generate the pictures of a single file, under the names by which file_source.js requests them."""
    for n, one in enumerate(layers):
        size = count_pixels(one, pixels)
        hows: tuple[How, ...] = ("mean",) if size == one.shape[2:] else ("mean", "max")
        for b, head, how in product(range(one.shape[0]), range(min(one.shape[1], MAX_FILE_HEADS)), hows):
            name = f"implicit?layer={n}&b={b}&head={head}&how={how}"
            yield name, draw_implicit(get_map(n, b, head), *size, how, lambda: None)

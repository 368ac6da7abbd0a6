"""Pictures of a recording's heads as codes: small ones of all heads of a layer, and tiles of one at every zoom level."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.map import AttentionMap, Pyramid
from regard.map.codes import coded
from regard.map.pooling import edges
from regard.map.visible import visible
from regard.mechanism import Causal
from regard.observe.look import Look
from regard.show.page.entry import Entry, Place

SMALL = 48  # pixels along each side of a small picture
WHOLE = 2**24  # maximum weights of a layer whose small pictures use all of them
ROWS = 4  # rows read of each pixel of larger layers
BINS = 512  # bins of a profile
Alive = Callable[[], None]  # raises once the client has disconnected


class Opened:
    """An opened head: its pyramid, computed once by the first thread that needs it, while the others wait."""

    def __init__(self, m: AttentionMap, copied: int = 0) -> None:
        self.pyramid, self.copied = Pyramid(m), copied
        self.share = 0.0
        self._turn = threading.Lock()

    def busy(self) -> bool:
        """Return whether a thread is computing the pyramid now."""
        return self._turn.locked()

    @property
    def nbytes(self) -> int:
        """Bytes of the pyramid, including those that its map keeps in addition to the recording."""
        return self.pyramid.nbytes + self.copied

    def strips(self, alive: Alive) -> Iterator[float]:
        """Compute the pyramid and yield the share that is done.

        alive() is called between strips, and the next caller continues where one stopped.
        """
        while self.share < 1:
            if not self._turn.acquire(timeout=0.1):
                alive()
                yield self.share
                continue
            try:
                for share in self.pyramid.strips() if self.share < 1 else ():
                    self.share = share
                    alive()
                    yield self.share
            finally:
                self._turn.release()

    def wait(self, alive: Alive) -> Pyramid:
        """Return the pyramid once it is computed."""
        for _ in self.strips(alive):
            pass
        return self.pyramid


def warm() -> None:
    """Load the compiled passes, so that the first picture does not wait for them."""
    m = AttentionMap(torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4), Causal())
    m.overview()
    m.picture(torch.tensor([0, 2, 4]), torch.tensor([0, 2, 4]))


def opening(entry: Entry, place: Place, opened: Opened, alive: Alive) -> Iterator[dict[str, Any]]:
    """Generate the progress, and then the statistics of a head: its size, its kind, and profiles of its rows and columns."""
    for share in opened.strips(alive):
        yield {"done": share}
    pyramid = opened.pyramid
    _, _, q, k = pyramid.map.shape
    rows = {name: profile(found) for name, found in pyramid.rows.items()} if q else {}
    columns = {"received": profile(pyramid.received)} if q and k else {}
    kind = entry.kind(place)
    yield {"levels": pyramid.levels, "queries": q, "keys": k, "kind": kind, "rows": rows, "columns": columns}


def profile(numbers: Tensor) -> list[float | None]:
    """Compute the means of numbers (n,) in at most 512 bins, None for a bin with a NaN."""
    n = len(numbers)
    cuts = edges(0, n, min(n, BINS))
    broken = numbers.isnan()
    sums, lost = (
        torch.cat([x.new_zeros(1, dtype=torch.float64), x.double().cumsum(0)])[cuts] for x in (numbers.nan_to_num(), broken)
    )
    means = (sums.diff() / cuts.diff()).tolist()
    return [None if some else mean for mean, some in zip(means, lost.diff().tolist(), strict=True)]


def thumbs(entry: Entry, place: Place) -> tuple[Tensor, bool]:
    """Compute small pictures of all heads of a place's layer: codes (h, r, c), the largest weight of each pixel.

    The second result is whether only some rows were read, as in a layer of more than 16 million weights.
    """
    _, h, q, k = entry.shape(place)
    rows, columns = (edges(0, length, min(length, SMALL)) for length in (q, k))
    if h * q * k > WHOLE:
        maps = (entry.map(replace(place, head=head)) for head in range(h))  # one at a time
        return torch.stack([small(m, some_rows(m, rows, columns), rows, columns) for m in maps]), True
    layer = entry.layer(place)
    found = layer.pooled(len(rows) - 1, len(columns) - 1, "max")[0]
    return torch.stack([small(layer.select(heads=head), found[head], rows, columns) for head in range(h)]), False


def small(m: AttentionMap, picture: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Encode a picture of a map of one matrix as codes, given the edges of its pixels."""
    return coded(picture, visible(Look(m).plane(0, 0), rows, columns, picture == 0))


def some_rows(m: AttentionMap, rows: Tensor, columns: Tensor) -> Tensor:
    """Compute the largest weights in the pixels of one head's picture, of a few rows of each pixel."""
    places = rows[:-1, None] + (2 * torch.arange(ROWS) + 1) * rows.diff()[:, None] // (2 * ROWS)
    bins = list(zip(columns[:-1].tolist(), columns[1:].tolist(), strict=True))
    found = []
    for some in places:
        weights = m[0, 0, some.tolist()].amax(0)  # (k,)
        found.append(torch.stack([weights[i:j].amax() for i, j in bins]))
    return torch.stack(found)

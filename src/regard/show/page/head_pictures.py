"""Pictures of a recording's heads as codes: small ones of all heads of a layer, and tiles of one at every zoom level."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.map import AttentionMap, Pyramid
from regard.map.codes import encode_weights
from regard.map.pooling import bin_edges
from regard.map.visible_pixels import find_visible_pixels
from regard.mechanism import Causal
from regard.observe.map_view import MapView
from regard.show.page.recording_entry import HeadPlace, RecordingEntry

THUMBNAIL_PIXELS = 48  # pixels along each side of a small picture
MAX_FULL_WEIGHTS = 2**24  # maximum weights of a layer whose small pictures use all of them
SAMPLED_ROWS = 4  # rows read of each pixel of larger layers
PROFILE_BINS = 512  # bins of a profile
Alive = Callable[[], None]  # raises once the client has disconnected


class OpenedHead:
    """An opened head: its pyramid, computed once by the first thread that needs it, while the others wait."""

    def __init__(self, m: AttentionMap, copied: int = 0) -> None:
        self.pyramid, self.copied = Pyramid(m), copied
        self.done_share = 0.0
        self._lock = threading.Lock()

    def is_busy(self) -> bool:
        """Return whether a thread is computing the pyramid now."""
        return self._lock.locked()

    @property
    def nbytes(self) -> int:
        """Bytes of the pyramid, including those that its map keeps in addition to the recording."""
        return self.pyramid.nbytes + self.copied

    def compute_strips(self, alive: Alive) -> Iterator[float]:
        """Compute the pyramid and yield the share that is done.

        alive() is called between strips, and the next caller continues where one stopped.
        """
        while self.done_share < 1:
            if not self._lock.acquire(timeout=0.1):
                alive()
                yield self.done_share
                continue
            try:
                for share in self.pyramid.iterate_strips() if self.done_share < 1 else ():
                    self.done_share = share
                    alive()
                    yield self.done_share
            finally:
                self._lock.release()

    def wait_for_pyramid(self, alive: Alive) -> Pyramid:
        """Return the pyramid once it is computed."""
        for _ in self.compute_strips(alive):
            pass
        return self.pyramid


def load_passes() -> None:
    """Load the compiled passes, so that the first picture does not wait for them."""
    m = AttentionMap(torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4), Causal())
    m.overview()
    m.draw_picture(torch.tensor([0, 2, 4]), torch.tensor([0, 2, 4]))


def stream_head(entry: RecordingEntry, place: HeadPlace, opened: OpenedHead, alive: Alive) -> Iterator[dict[str, Any]]:
    """Generate the progress, and then the statistics of a head: its size, its kind, and profiles of its rows and columns."""
    for share in opened.compute_strips(alive):
        yield {"done": share}
    pyramid = opened.pyramid
    _, _, q, k = pyramid.map.shape
    rows = {name: compute_profile(found) for name, found in pyramid.rows.items()} if q else {}
    columns = {"received": compute_profile(pyramid.received)} if q and k else {}
    kind = entry.get_kind(place)
    yield {"levels": pyramid.levels, "queries": q, "keys": k, "kind": kind, "rows": rows, "columns": columns}


def compute_profile(numbers: Tensor) -> list[float | None]:
    """Compute the means of numbers (n,) in at most 512 bins, None for a bin with a NaN."""
    numbers, n = numbers.cpu(), len(numbers)
    cuts = bin_edges(0, n, min(n, PROFILE_BINS)).cpu()
    broken = numbers.isnan()
    sums, lost = (
        torch.cat([x.new_zeros(1, dtype=torch.float64), x.double().cumsum(0)])[cuts] for x in (numbers.nan_to_num(), broken)
    )
    means = (sums.diff() / cuts.diff()).tolist()
    return [None if some else mean for mean, some in zip(means, lost.diff().tolist(), strict=True)]


def make_thumbnails(entry: RecordingEntry, place: HeadPlace) -> tuple[Tensor, bool]:
    """Compute small pictures of all heads of a place's layer: codes (h, r, c), the largest weight of each pixel.

    The second result is whether only some rows were read, as in a layer of more than 16 million weights.
    """
    _, h, q, k = entry.get_shape(place)
    rows, columns = (bin_edges(0, length, min(length, THUMBNAIL_PIXELS)) for length in (q, k))
    hiding = MapView(entry.get_map(place)).hiding_bias
    if h * q * k > MAX_FULL_WEIGHTS:
        maps = (entry.get_map(replace(place, head=head)) for head in range(h))  # one at a time
        sampled = [encode_thumbnail(m, pool_sampled_rows(m, rows, columns), rows, columns, hiding) for m in maps]
        return torch.stack(sampled), True
    layer = entry.get_layer_map(place)
    found = layer.pooled(len(rows) - 1, len(columns) - 1, "max")[0]
    pictures = [encode_thumbnail(layer.select(heads=head), found[head], rows, columns, hiding) for head in range(h)]
    return torch.stack(pictures), False


def encode_thumbnail(m: AttentionMap, picture: Tensor, rows: Tensor, columns: Tensor, hiding_bias: float) -> Tensor:
    """Encode a picture of a map of one matrix as codes, given the edges of its pixels, and which bias hides a key."""
    return encode_weights(picture, find_visible_pixels(MapView(m).get_plane(0, 0), rows, columns, picture == 0, hiding_bias))


def pool_sampled_rows(m: AttentionMap, rows: Tensor, columns: Tensor) -> Tensor:
    """Compute the largest weights in the pixels of one head's picture, of a few rows of each pixel."""
    places = rows[:-1, None] + (2 * torch.arange(SAMPLED_ROWS) + 1) * rows.diff()[:, None] // (2 * SAMPLED_ROWS)
    bins = list(zip(columns[:-1].tolist(), columns[1:].tolist(), strict=True))
    found = []
    for some in places:
        weights = m[0, 0, some.tolist()].amax(0)  # (k,)
        found.append(torch.stack([weights[i:j].amax() for i, j in bins]))
    return torch.stack(found)

import pytest
import torch

from regard.map.codes import encode_weights
from regard.map.pooling import bin_edges
from regard.show.page import head_pictures
from regard.show.page.head_pictures import OpenedHead, compute_profile, make_thumbnails
from regard.show.page.recording_entry import HeadPlace, RecordingEntry
from show.page.server_client import rows_and_keys

NAN = float("nan")


class GoneError(Exception):
    pass


def never():
    pass


def raise_after(count):
    """Raises when it has been asked so many times."""
    asked = []

    def alive():
        asked.append(1)
        if len(asked) >= count:
            raise GoneError

    return alive


def long():
    q = torch.randn(1, 2, 97, 5, generator=torch.Generator().manual_seed(0))
    return rows_and_keys(q, q)


def test_a_small_picture_has_the_largest_weight_of_each_pixel():
    entry = RecordingEntry("r1", long())
    found, sampled = make_thumbnails(entry, HeadPlace())
    assert (found.shape, sampled) == ((2, 48, 48), False)
    dense, cuts = entry.recording.map(0)[0, 1], bin_edges(0, 97, 48).tolist()
    for r, c in ((0, 0), (30, 7), (47, 46), (7, 30)):
        pixel = dense[cuts[r] : cuts[r + 1], cuts[c] : cuts[c + 1]].amax()
        assert abs(int(found[1, r, c]) - int(encode_weights(pixel, torch.tensor(r >= c)))) <= 1


def test_of_a_large_layer_some_rows_are_examined(monkeypatch):
    monkeypatch.setattr(head_pictures, "MAX_FULL_WEIGHTS", 2 * 97 * 97 - 1)
    monkeypatch.setattr(head_pictures, "SAMPLED_ROWS", 2)  # of a pixel of two rows, and so all, but for the odd ones
    entry = RecordingEntry("r1", long())
    found, sampled = make_thumbnails(entry, HeadPlace())
    assert sampled
    monkeypatch.setattr(head_pictures, "MAX_FULL_WEIGHTS", 2 * 97 * 97)
    whole, sampled = make_thumbnails(entry, HeadPlace())
    assert not sampled
    apart = whole.to(torch.int32) - found.to(torch.int32)
    assert apart.min() >= -1
    assert (apart[:, :-1] <= 1).all()  # all but the pixels of three rows


def test_who_comes_next_goes_on_where_the_last_one_left(monkeypatch):
    monkeypatch.setattr("regard.map.pyramid.STRIP", 8)
    opened = OpenedHead(long().map(0, 1))
    shares = []
    with pytest.raises(GoneError):
        shares.extend(opened.compute_strips(raise_after(3)))
    assert not opened.is_busy()
    assert 0 < opened.done_share < 1
    rest = list(opened.compute_strips(never))
    assert shares[-1] < rest[0]
    assert rest[-1] == opened.done_share == 1
    assert list(opened.compute_strips(never)) == []


@pytest.mark.parametrize(
    ("numbers", "means"),
    [([1.0, 2.0], [1.0, 2.0]), ([1.0, NAN, 3.0], [1.0, None, 3.0]), ([float(n) for n in range(1024)], None)],
)
def test_a_profile_is_means_in_bins(numbers, means):
    found = compute_profile(torch.tensor(numbers))
    assert found == (means if means is not None else [2 * n + 0.5 for n in range(512)])

import pytest
import torch

from regard import Causal
from regard.map.codes import coded
from regard.map.pooling import edges
from regard.show.page import pictures
from regard.show.page.entry import Entry, Place
from regard.show.page.pictures import Opened, profile, thumbs
from show.page.asking import in_steps, recorded, rows_and_keys

NAN = float("nan")


class GoneError(Exception):
    pass


def never():
    pass


def after(count):
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
    entry = Entry("r1", long())
    found, sampled = thumbs(entry, Place())
    assert (found.shape, sampled) == ((2, 48, 48), False)
    dense, cuts = entry.recording.map(0)[0, 1], edges(0, 97, 48).tolist()
    for r, c in ((0, 0), (30, 7), (47, 46), (7, 30)):
        pixel = dense[cuts[r] : cuts[r + 1], cuts[c] : cuts[c + 1]].amax()
        assert abs(int(found[1, r, c]) - int(coded(pixel, torch.tensor(r >= c)))) <= 1


def test_of_a_large_layer_some_rows_are_looked_at(monkeypatch):
    monkeypatch.setattr(pictures, "WHOLE", 2 * 97 * 97 - 1)
    monkeypatch.setattr(pictures, "ROWS", 2)  # of a pixel of two rows, and so all, but for the odd ones
    entry = Entry("r1", long())
    found, sampled = thumbs(entry, Place())
    assert sampled
    monkeypatch.setattr(pictures, "WHOLE", 2 * 97 * 97)
    whole, sampled = thumbs(entry, Place())
    assert not sampled
    apart = whole.to(torch.int32) - found.to(torch.int32)
    assert apart.min() >= -1
    assert (apart[:, :-1] <= 1).all()  # all but the pixels of three rows


def test_small_pictures_of_calls_that_are_joined_are_those_of_the_map():
    recording = in_steps(dtype=torch.float32)
    found, _ = thumbs(Entry("r1", recording), Place(b=1, layer=1))
    seen = Causal().table(13, 13).reshape(13, 13)
    expected = torch.stack([coded(recording.map(1, n)[1, 0], seen) for n in range(4)])
    assert (found.to(torch.int32) - expected.to(torch.int32)).abs().max() <= 1


def test_who_comes_next_goes_on_where_the_last_one_left(monkeypatch):
    monkeypatch.setattr("regard.map.pyramid.STRIP", 8)
    opened = Opened(long().map(0, 1))
    shares = []
    with pytest.raises(GoneError):
        shares.extend(opened.strips(after(3)))
    assert not opened.busy()
    assert 0 < opened.share < 1
    rest = list(opened.strips(never))
    assert shares[-1] < rest[0]
    assert rest[-1] == opened.share == 1
    assert list(opened.strips(never)) == []


def test_what_a_head_keeps_counts_what_its_map_copied():
    m = recorded().map(0, 1)
    assert Opened(m, 1000).nbytes == Opened(m).nbytes + 1000


@pytest.mark.parametrize(
    ("numbers", "means"),
    [([1.0, 2.0], [1.0, 2.0]), ([1.0, NAN, 3.0], [1.0, None, 3.0]), ([float(n) for n in range(1024)], None)],
)
def test_a_profile_is_means_in_bins(numbers, means):
    found = profile(torch.tensor(numbers))
    assert found == (means if means is not None else [2 * n + 0.5 for n in range(512)])

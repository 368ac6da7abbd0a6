"""Figures of layers without a softmax: their colors are the signed entries, pooled one bin at a time by the test."""

import numpy as np
import pytest

import regard
from regard.show.all_heads import draw_all_heads
from regard.show.color_ramp import shade_signed
from show.implicit_recordings import SiluAttention, SoftmaxAttention, pool_signed, record_implicit, record_spread

T, LONG, BINS = 11, 613, 512  # words; more tokens than a picture has bins
NOTE = "No softmax: entries are signed, blue above 0, brown below; rows need not sum to 1."


@pytest.fixture(scope="module")
def recording():
    return record_implicit(T, SoftmaxAttention, SiluAttention)


@pytest.fixture(scope="module")
def long_recording():
    return record_implicit(LONG, SiluAttention, SiluAttention, batch=1)


def read_texts(picture):
    """All that a figure says."""
    picture.draw_without_rendering()  # formats the ticks
    return " ".join(text.get_text() for text in picture.findobj(match=lambda one: hasattr(one, "get_text")))


def find_share(values, decades=None):
    """The place of numbers between brown, -1, and blue, 1: linear, or by their powers of ten, in size."""
    size = np.abs(values) / np.abs(values).max()
    if decades:
        with np.errstate(divide="ignore"):
            size = np.maximum(1 + np.log10(size) / decades, 0)
    return np.sign(values) * size


def expect_colors(artist, values, decades=None):
    """The colors of an artist are those of the numbers."""
    shown = artist.to_rgba(artist.get_array()).reshape(-1, 4)[:, :3]
    wanted = np.array([shade_signed(float(share)) for share in find_share(values, decades).ravel()]) / 255
    assert np.abs(255 * (shown - wanted)).max() < 2.5  # half of 257 shades, and two roundings: at most 2


def test_a_short_head_has_its_words_its_numbers_and_both_hues(recording):
    dense = recording.map(0, kind="implicit").dense()[1, 2]
    picture = regard.figure(recording, 0, 2, kind="implicit", row=1)
    (mesh,) = (one for one in picture.axes[0].collections)
    assert np.allclose(mesh.get_array().reshape(T, T), dense.numpy(), rtol=1e-12, atol=0)
    expect_colors(mesh, dense.numpy())
    said = read_texts(picture)
    assert "layer 0, head 2: silu attention" in said
    assert NOTE in said
    assert "b10" in said
    assert f"{float(dense[3, 4]):.2f}".replace("-", "−") in said


def test_a_long_head_is_drawn_in_bins_of_the_entry_that_is_largest_in_size():
    recording = record_spread(LONG)
    dense = recording.map(0, kind="implicit").dense()[0, 1]
    picture = regard.figure(recording, 0, 1)  # no layer has a softmax
    pooled = pool_signed(dense, BINS, BINS, "max").numpy()
    assert np.median(np.abs(pooled)) < np.abs(pooled).max() / 100
    (image,) = picture.axes[0].images
    assert np.allclose(image.get_array(), pooled, rtol=1e-6, atol=0)
    expect_colors(image, pooled, decades=4)
    said = read_texts(picture)
    assert "entry largest\nin size" in said
    assert NOTE in said
    assert "Colors are logarithmic, over four decades on each side of 0." in said
    assert f"{np.abs(pooled).max():+.2g}" in said
    assert "keys, in bins of 1.2 tokens" in said


def test_a_sheet_has_the_first_heads_of_each_layer_on_one_scale(long_recording, monkeypatch):
    monkeypatch.setattr("regard.show.all_heads.MAX_SIGNED_HEADS", 2)
    picture = draw_all_heads(long_recording)
    images = [axes.images[0] for axes in picture.axes if axes.images]
    assert len(images) == 4
    pooled = [
        pool_signed(long_recording.map(layer, kind="implicit").dense()[0, head], 64, 64, "max").numpy()
        for layer in (0, 1)
        for head in (0, 1)
    ]
    most = max(np.abs(one).max() for one in pooled)
    for image, wanted in zip(images, pooled, strict=True):
        assert np.allclose(image.get_array(), wanted, rtol=1e-6, atol=0)
        assert image.get_clim() == pytest.approx((-most, most), rel=1e-6)
    assert "The first 2 of up to 3 heads." in read_texts(picture)

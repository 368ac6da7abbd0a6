import numpy as np
import pytest
import torch
from matplotlib.colors import LogNorm, Normalize

import regard
from regard import ConfigError
from regard.show.all_heads import draw_all_heads
from show.pictures import assert_readable, vectors
from show.small_recordings import record_long_text, record_small_model, record_translator


class Layer(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def images(picture):
    return [axes.images[0].get_array() for axes in picture.axes if axes.images]


def test_every_weight_of_every_head_is_drawn_in_its_place():
    found = images(draw_all_heads(record_small_model()))
    assert len(found) == 6
    for n, image in enumerate(found):
        dense = record_small_model().map(n // 3, n % 3).dense()[0, 0].numpy()
        np.testing.assert_allclose(image.filled(0), dense, rtol=0, atol=1e-12)


def test_colours_are_even_over_few_tokens_and_go_by_ratios_over_many():
    assert [type(draw_all_heads(found()).axes[0].images[0].norm) for found in (record_small_model, record_long_text)] == [
        Normalize,
        LogNorm,
    ]


def test_many_tokens_share_a_cell_that_shows_the_largest_weight():
    (first, _) = images(draw_all_heads(record_long_text()))
    assert first.shape == (64, 64)
    assert float(first.max()) == pytest.approx(float(record_long_text().map(0, 0).dense().max()), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 3), (30, 9), (3, 40), (60, 2)])
def test_its_words_can_be_read_however_many_heads_there_are(layers, heads):
    model = torch.nn.Sequential(*[Layer() for _ in range(layers)])
    with regard.record(model) as recording:
        model(torch.randn(1, heads, 5, 2))
    picture = draw_all_heads(recording, title="a title of some length")
    assert len(images(picture)) == layers * heads
    assert_readable(picture)


def test_columns_have_the_numbers_of_the_recorded_heads():
    layer = Layer()
    with regard.record(layer, heads=[2, 5]) as recording:
        layer(torch.randn(1, 7, 5, 2))
    assert [text.get_text() for text in draw_all_heads(recording).texts] == ["layer 0", "2", "5", "head"]


def test_layers_are_chosen_and_what_is_not_there_is_refused():
    assert len(images(draw_all_heads(record_small_model(), layers=[1]))) == 3
    with pytest.raises(ConfigError, match="layer must be below 2"):
        draw_all_heads(record_small_model(), layers=[2])
    with pytest.raises(ConfigError, match="no layer of kind 'cross'"):
        draw_all_heads(record_small_model(), kind="cross")


def test_cross_attention_is_drawn_where_there_is_nothing_else():
    (image,) = images(draw_all_heads(record_translator()))
    np.testing.assert_allclose(
        image.filled(0), record_translator().map(0, kind="cross").dense()[0, 0].numpy(), rtol=0, atol=1e-12
    )
    assert [picture.shape for picture in images(draw_all_heads(record_translator("transformer")))] == [(3, 3)] * 6


def test_its_words_are_vectors():
    assert vectors(draw_all_heads(record_small_model())).count('<g id="text_') >= 6

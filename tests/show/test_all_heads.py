import numpy as np
import pytest
import torch

import regard
from regard import ConfigError
from regard.show.all_heads import draw_all_heads
from show.pictures import assert_readable
from show.small_recordings import record_long_text, record_small_model


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


def test_layers_are_chosen_and_what_is_not_there_is_refused():
    assert len(images(draw_all_heads(record_small_model(), layers=[1]))) == 3
    with pytest.raises(ConfigError, match="layer must be below 2"):
        draw_all_heads(record_small_model(), layers=[2])
    with pytest.raises(ConfigError, match="no layer of kind 'cross'"):
        draw_all_heads(record_small_model(), kind="cross")

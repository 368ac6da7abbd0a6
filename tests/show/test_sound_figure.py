import numpy as np
import pytest
import torch
from matplotlib.image import AxesImage

from regard import AudioFrames, ConfigError, ShapeError, record
from regard.show.sound_figure import draw_sound
from show.implicit_recordings import SiluAttention, record_implicit


@pytest.fixture(scope="module")
def recording():
    """Three words that attend to eleven frames of half a second, and to each other."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerDecoderLayer(8, 2, 6, dropout=0.0, batch_first=True).double()
    with record(layer) as found:
        layer(torch.randn(1, 3, 8).double(), torch.randn(1, 11, 8).double())
    found.places = {"cross": AudioFrames(0.5)}
    found.tokens = {"rows": ["a", "b", "c"], "columns": [str(n) for n in range(11)]}
    return found


def test_frames_of_layers_without_a_softmax_have_signed_colors():
    found = record_implicit(11, SiluAttention)
    found.places = AudioFrames(0.5)
    drawn = draw_sound(found, torch.randn(7, 11), 0, 1, row=1)
    entries, image = found.map(0, 1, kind="implicit").dense()[1, 0].numpy(), find_map(drawn)
    assert np.allclose(image.get_array(), entries, rtol=0, atol=1e-12)
    assert (entries < 0).any()
    assert image.get_clim() == pytest.approx((-abs(entries).max(), abs(entries).max()))
    mean = find_map(draw_sound(found, torch.randn(7, 11), 0, kind="implicit")).get_array()
    assert np.allclose(mean, found.map(0, kind="implicit").dense()[0].mean(0).numpy(), rtol=0, atol=1e-12)


def find_map(drawn):
    return next(one for one in drawn.axes[1].get_children() if isinstance(one, AxesImage))


def test_the_map_and_the_waveform_share_the_axis_of_time(recording):
    drawn = draw_sound(recording, np.sin(np.arange(5500)), 0, 1, rate=1000)
    above, below = drawn.axes[:2]
    assert above.get_xlim() == below.get_xlim() == (0, 5.5)
    drawn_weights, m = find_map(drawn).get_array(), recording.map(0, 1, "cross")
    assert np.array_equal(drawn_weights, m.pooled(*m.shape[2:], how="max")[0, 0].numpy())
    assert np.allclose(drawn_weights, m.dense()[0, 0].numpy(), rtol=0, atol=1e-14)  # another product than that of the picture
    assert [text.get_text() for text in below.get_yticklabels()] == ["a", "b", "c"]


def test_sound_or_times_that_do_not_fit_are_refused(recording):
    with pytest.raises(ShapeError, match="waveform"):
        draw_sound(recording, torch.randn(2, 3, 5))
    with pytest.raises(ShapeError, match="3 queries"):
        draw_sound(recording, torch.randn(50), times=[0.1])
    with pytest.raises(ConfigError, match="AudioFrames"):
        draw_sound(recording, torch.randn(50), kind="self")

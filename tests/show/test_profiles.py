import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

import regard
from regard.show.profiles import BINS, draw_layer_profiles, draw_profiles
from show.pictures import assert_readable, vectors
from show.small_recordings import record_long_text, record_small_model


def curves(axes):
    return {line.get_label(): line.get_ydata() for line in axes.lines}


def test_a_named_head_has_its_entropy_and_its_distance_at_every_query():
    dense = record_small_model().map(1, 2).dense()[0, 0].double().numpy()
    entropy = -(dense * np.log(np.where(dense > 0, dense, 1))).sum(1)
    back = (dense * (np.arange(17)[:, None] - np.arange(17))).sum(1)
    upper, lower = draw_profiles(record_small_model(), 1, heads=[2]).axes
    np.testing.assert_allclose(curves(upper)["2"], entropy, rtol=0, atol=1e-10)
    np.testing.assert_allclose(curves(lower)["2"], back, rtol=0, atol=1e-10)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tokens", [17, 700])
def test_padding_has_no_part_in_a_profile(side, tokens):
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 5}
    model = BertModel(BertConfig(vocab_size=23, max_position_embeddings=tokens, **sizes)).double().eval()
    length, ids = tokens // 3, torch.randint(0, 23, (1, tokens))
    inside = slice(length) if side == "right" else slice(tokens - length, None)
    mask = torch.zeros(1, tokens, dtype=torch.long)
    mask[:, inside] = 1
    with torch.no_grad(), regard.record(model) as padded:
        model(ids, attention_mask=mask, position_ids=torch.arange(tokens)[None])
    weights = [padded.map(layer).dense()[0, :, inside, inside].double() for layer in range(2)]
    entropies = [-torch.special.xlogy(one, one).sum(-1) for one in weights]
    for axes in draw_profiles(padded, 1).axes:
        for line in axes.lines:
            drawn, places = line.get_ydata(), line.get_xdata()
            outside = (places + 0.5 < inside.indices(tokens)[0] - 3) | (places - 0.5 > inside.indices(tokens)[1] + 3)
            assert np.isnan(drawn[outside]).all()
            assert np.isfinite(drawn[~outside]).any()
    mean = draw_layer_profiles(padded).axes[0].lines[-1].get_ydata()
    np.testing.assert_allclose(mean, [float(one.mean()) for one in entropies], rtol=1e-9)
    lowest = [line.get_label() for line in draw_profiles(padded, 1).axes[0].lines]
    assert lowest == [str(n) for n in entropies[1].mean(1).argsort().tolist()]
    if tokens < BINS:
        curve = curves(draw_profiles(padded, 1, heads=[2]).axes[0])["2"]
        np.testing.assert_allclose(curve[inside], entropies[1][2], rtol=0, atol=1e-9)


def test_a_long_text_is_drawn_in_means_that_keep_the_mean():
    upper, _ = draw_profiles(record_long_text(), 0, heads=[0]).axes
    curve = curves(upper)["0"]
    assert len(curve) == BINS
    edges = np.linspace(0, 700, BINS + 1).astype(int)
    assert (curve * np.diff(edges)).sum() / 700 == pytest.approx(
        float(record_long_text().map(0, 0).entropy().mean()), rel=1e-10
    )


def test_over_the_layers_every_head_is_a_dot_at_its_mean():
    upper, lower = draw_layer_profiles(record_small_model()).axes
    for axes, statistic in ((upper, "entropy"), (lower, "distance")):
        dots = [line for line in axes.lines if line.get_marker() == "o"]
        for layer, line in enumerate(dots):
            expected = getattr(record_small_model().map(layer).overview(), statistic)[0].mean(1)
            np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-10)
            assert set(line.get_xdata()) == {layer}


@pytest.mark.slow
def test_their_words_can_be_read_and_they_are_vectors():
    for picture in (
        draw_profiles(record_small_model(), 0),
        draw_profiles(record_long_text(), 0),
        draw_layer_profiles(record_small_model(), title="a title"),
    ):
        assert_readable(picture)
        assert "<image" not in vectors(picture)

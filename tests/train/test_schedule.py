import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.train import TrainConfig
from regard.train.schedule import rate


@st.composite
def configs(draw) -> TrainConfig:
    return TrainConfig(
        steps=draw(st.integers(1, 300)),
        warmup=draw(st.integers(0, 400)),
        schedule=draw(st.sampled_from(["cosine", "constant then decay"])),
        decay_share=draw(st.sampled_from([0.0, 0.2, 1.0])),
        final_rate=draw(st.sampled_from([0.0, 0.1, 1.0])),
        learning_rate=0.5,
    )


@given(configs())
def test_it_rises_in_a_line_and_never_rises_again(config):
    rates = [rate(step, config) for step in range(1, config.steps + 1)]
    rise, fall = rates[: config.warmup], rates[config.warmup :]
    assert rise == pytest.approx([0.5 * step / config.warmup for step in range(1, len(rise) + 1)])
    assert all(a >= b for a, b in zip([0.5, *fall], fall, strict=False))
    decays = config.schedule == "cosine" or round(config.decay_share * config.steps)
    if fall and decays:
        assert fall[-1] == pytest.approx(0.5 * config.final_rate)


def test_the_cosine_is_half_way_in_the_middle():
    config = TrainConfig(steps=110, warmup=10, learning_rate=1.0, final_rate=0.2)
    assert rate(10, config) == 1
    assert rate(60, config) == pytest.approx(0.6)
    assert rate(35, config) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)


def test_by_the_inverse_square_root_four_times_the_steps_have_half_the_rate():
    config = TrainConfig(steps=1000, warmup=50, schedule="inverse square root", learning_rate=1.0)
    assert [rate(step, config) for step in (25, 50, 200, 800)] == pytest.approx([0.5, 1, 0.5, 0.25])
    assert rate(4, TrainConfig(warmup=0, schedule="inverse square root", learning_rate=1.0)) == 0.5


def test_constant_then_decay_is_constant_until_the_last_share():
    config = TrainConfig(
        steps=100, warmup=10, schedule="constant then decay", decay_share=0.4, final_rate=0.0, learning_rate=1.0
    )
    assert [rate(step, config) for step in (10, 11, 60, 61, 80, 100)] == pytest.approx([1, 1, 1, 39 / 40, 0.5, 0])

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bounds import assert_within, sum_bound
from regard.models import GPT2, GPT2Config
from regard.train import TrainConfig, optimizer
from regard.train.optimizer import compute_learning_rate


def test_matrices_decay_and_nothing_else():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=2, heads=2, width=6, context=5, vocabulary=7)).double()
    before = {name: weight.detach().clone().fill_(3) for name, weight in model.named_parameters()}
    model.load_state_dict(before)
    made = optimizer.make_optimizer(model, TrainConfig(weight_decay=0.5))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.update_parameters(made, 0.1, norm=0.0, clip=1.0)
    for name, weight in model.named_parameters():
        expected = 3 * (1 - 0.1 * 0.5) if weight.dim() >= 2 else 3
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, expected), rtol=1e-12, atol=0, msg=name)


@pytest.mark.parametrize("clip", [0.0, 0.5, 3.0, 1e6])
def test_long_gradients_are_shortened_as_by_torch_and_short_ones_are_left(clip):
    """In float64, but for the scale that torch takes, a float32: a moment is off by that much of the gradients in it, and a
    step of Adam, m / √v, at most by twice as much, since with these betas no mean of |g| is above 1.01 √v."""
    torch.manual_seed(0)
    start = torch.arange(6.0, dtype=torch.float64).view(2, 3), torch.ones(4, dtype=torch.float64)
    ours, theirs = ([nn.Parameter(one.clone()) for one in start] for _ in range(2))
    mine, adam = (torch.optim.AdamW(side, betas=(0.8, 0.9), fused=True) for side in (ours, theirs))
    largest, rates = 0.0, []
    for rate in (0.1, 0.05, 0.2):
        rates.append(rate)
        gradients = [torch.randn_like(one) for one in ours]
        for side in (ours, theirs):
            for one, gradient in zip(side, gradients, strict=True):
                one.grad = gradient.clone()
        optimizer.update_parameters(mine, rate, float(nn.utils.get_total_norm(gradients)), clip)
        nn.utils.clip_grad_norm_(theirs, clip or float("inf"))
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        largest = max(largest, *(float(one.grad.abs().max()) for one in theirs))
        for one, other in zip(ours, theirs, strict=True):
            assert_within(one, other, sum_bound(torch.float32, 2, 1.01 * sum(rates)))
            assert_within(mine.state[one]["exp_avg"], adam.state[other]["exp_avg"], sum_bound(torch.float32, 1, largest))
            squares = adam.state[other]["exp_avg_sq"]  # a step itself hardly hears of one scale for all
            assert_within(mine.state[one]["exp_avg_sq"], squares, sum_bound(torch.float32, 2) * squares)


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
    rates = [compute_learning_rate(step, config) for step in range(1, config.steps + 1)]
    rise, fall = rates[: config.warmup], rates[config.warmup :]
    assert rise == pytest.approx([0.5 * step / config.warmup for step in range(1, len(rise) + 1)])
    assert all(a >= b for a, b in zip([0.5, *fall], fall, strict=False))
    decays = config.schedule == "cosine" or round(config.decay_share * config.steps)
    if fall and decays:
        assert fall[-1] == pytest.approx(0.5 * config.final_rate)

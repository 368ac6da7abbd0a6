import torch

from regard.models import GPT2, GPT2Config
from regard.train import TrainConfig, optimiser


def test_matrices_decay_and_nothing_else():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=2, heads=2, width=6, context=5, vocabulary=7))
    before = {name: weight.detach().clone().fill_(3) for name, weight in model.named_parameters()}
    model.load_state_dict(before)
    made = optimiser.made(model, TrainConfig(weight_decay=0.5))
    optimiser.set_rate(made, 0.1)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    made.step()
    for name, weight in model.named_parameters():
        expected = 3 * (1 - 0.1 * 0.5) if weight.dim() >= 2 else 3
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, expected), msg=name)


def test_every_parameter_is_in_one_group():
    model = GPT2(GPT2Config(layers=1, heads=2, width=6, context=5, vocabulary=7))
    grouped = [id(one) for group in optimiser.groups(model, 0.1) for one in group["params"]]
    assert sorted(grouped) == sorted(id(one) for one in model.parameters())

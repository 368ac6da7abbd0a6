import pytest
import torch
import torch.nn.functional as F
from recipes.lineage.linear_probe import RIDGE, fit_probe

from regard.errors import ShapeError

N, C, CLASSES = 211, 5, 3


def clouds(apart):
    """Vectors around a centre for each class."""
    dice = torch.Generator().manual_seed(0)
    classes = torch.randint(CLASSES, (N,), generator=dice)
    centres = apart * torch.randn(CLASSES, C, generator=dice, dtype=torch.float64)
    return centres[classes] + torch.randn(N, C, generator=dice, dtype=torch.float64), classes


def test_classes_that_lie_apart_are_all_distinguished():
    x, classes = clouds(20)
    assert bool((fit_probe(x, classes)(x) == classes).all())


def test_no_step_from_what_was_learned_lowers_the_loss():
    x, classes = clouds(1)
    found = fit_probe(x, classes)
    weight, bias = found.weight.clone().requires_grad_(), found.bias.clone().requires_grad_()
    even = (x - x.mean(0)) / x.std(0, correction=0)
    (F.cross_entropy(F.linear(even, weight, bias), classes) + RIDGE * weight.square().sum()).backward()
    assert float(weight.grad.abs().max()) < 1e-4
    assert float(bias.grad.abs().max()) < 1e-4


def test_a_scale_and_an_offset_of_the_vectors_change_nothing():
    x, classes = clouds(1)
    assert torch.equal(fit_probe(x, classes)(x), fit_probe(1000 * x + 7, classes)(1000 * x + 7))


def test_of_vectors_that_say_nothing_the_most_frequent_class_is_read():
    classes = torch.tensor([0, 2, 2, 1, 2, 2, 0])
    found = fit_probe(torch.zeros(7, C), classes)
    assert found(torch.zeros(4, C)).tolist() == [2] * 4


def test_vectors_and_classes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        fit_probe(torch.zeros(4, C), torch.zeros(3, dtype=torch.long))

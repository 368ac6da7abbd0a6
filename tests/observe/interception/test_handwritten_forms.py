"""No form of attention that is written out by hand is silent: it is recorded, or in missed by the name of its module."""

import pytest
import torch
from torch import nn

from observe.beheld import beheld
from observe.interception import innocent
from observe.interception.handwritten import MODULES, B, C, Own, T, batched, unbatched

FORMS = {f"(t, d): {name}": (form, (T, C)) for name, form in unbatched().items()}
FORMS |= {f"(b, h, t, d): {name}": (form, (B, T, C)) for name, form in batched().items()}


def assert_told(part: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(C, C), nn.ModuleDict({"own": part}))
    model.forward = lambda x: model[1]["own"](model[0](x))
    x = torch.randn(shape)
    recording, _ = beheld(model, lambda m: m(x), missing=True)
    assert {one.module for one in recording.missed} == {"1.own"}
    assert not recording.calls


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_told_with_the_name_of_its_module(name):
    form, shape = FORMS[name]
    assert_told(Own(form), shape)


@pytest.mark.parametrize("part", MODULES, ids=lambda part: part.__name__)
def test_every_module_with_scores_of_another_kind_is_told(part):
    assert_told(part(), (B, T, C))


@pytest.mark.parametrize("name", innocent.innocents())
def test_softmaxes_and_products_that_are_no_attention_are_not_told(name):
    model = nn.Sequential(nn.Linear(innocent.C, innocent.C), innocent.innocents()[name])
    x = torch.randn(innocent.B, innocent.T, innocent.C)
    for _ in range(2):
        beheld(model, lambda m: m(x))

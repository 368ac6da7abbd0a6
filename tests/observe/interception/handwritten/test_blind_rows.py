"""Rows from which several masks hide all keys have the weights that the order of the masks gives them, by the formula."""

import math

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import EQUAL
from regard.observe import record

B, H, T, D = 2, 3, 5, 4
LATER = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDED = (torch.arange(T) < torch.tensor([2, 0])[:, None]).view(B, 1, 1, T)  # on the left


def add(scores: Tensor, hidden: Tensor, low: float) -> Tensor:
    return scores + torch.zeros(hidden.shape, dtype=scores.dtype).masked_fill(hidden, low)


FORMS = {  # functions of the scores and the smallest number
    "filled, then added, as GPT-Neo": lambda s, low: add(torch.where(LATER, torch.tensor(low, dtype=s.dtype), s), PADDED, low),
    "added, then filled": lambda s, low: add(s, PADDED, low).masked_fill(LATER, low),
    "added twice": lambda s, low: add(add(s, LATER, low), PADDED, low),
    "filled twice": lambda s, low: s.masked_fill(LATER, low).masked_fill(PADDED, low),
    "filled, then added -inf": lambda s, low: add(s.masked_fill(LATER, low), PADDED, -math.inf),
}


class Masked(nn.Module):
    def __init__(self, form) -> None:
        super().__init__()
        self.form = form

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        self.weights = self.form(q @ k.mT / math.sqrt(D), torch.finfo(q.dtype).min).softmax(-1)
        return self.weights @ k


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_from_which_several_masks_hide_all_keys_has_the_weights_of_the_model(form, dtype):
    torch.manual_seed(7)
    model, q, k = nn.Sequential(Masked(form)), *torch.randn(2, B, H, T, D, dtype=dtype)
    with torch.no_grad(), record(model) as recording:
        model[0](q, k)
    found, expected = recording.map(0).dense(), model[0].weights.nan_to_num()
    torch.testing.assert_close(found, expected, rtol=0, atol=EQUAL if dtype == torch.float64 else 1e-6)
    assert not recording.notes

"""Linear attention whose heads are joined in one product, of which a table keeps the blocks on the diagonal, has its heads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import assert_equal, record_and_compare
from regard.observe.interception.handwritten.linear.linear_call import CHANGED

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, T, D, E, C = 2, 3, 11, 5, 7, 13
Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def divide_by_sums(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    sums = (q * k.sum(1, keepdim=True)) @ table
    return q @ (k.mT @ v * table) / sums


FORMS: dict[str, Form] = {
    "multiplied": lambda q, k, v, table: q @ (k.mT @ v * table),
    "filled": lambda q, k, v, table: q @ (k.mT @ v).masked_fill(table == 0, 0.0),
    "an einsum": lambda q, k, v, table: torch.einsum("btd,bde->bte", q, torch.einsum("btd,bte->bde", k, v) * table),
    "divided by sums": divide_by_sums,
}


class JoinedHeads(nn.Module):
    """Heads of D features and values of E, all in one product."""

    def __init__(self, form: Form, feature_map: Callable[[Tensor], Tensor], table: Tensor) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(C, H * D), nn.Linear(C, H * D), nn.Linear(C, H * E)
        self.form, self.feature_map = form, feature_map
        self.register_buffer("table", table)
        self.parts: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.feature_map(self.q(x)), self.feature_map(self.k(x)), self.v(x)
        self.parts = [y.detach().unflatten(-1, (H, -1)).transpose(1, 2) for y in (q, k, v)]
        return self.form(q, k, v, self.table)


@pytest.mark.parametrize("feature_map", [torch.sigmoid, lambda x: x], ids=["a feature map", "none"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_heads_that_are_joined_in_one_product_have_maps_of_their_own(form, feature_map):
    part = JoinedHeads(form, feature_map, torch.block_diag(*[torch.ones(D, E)] * H))
    recording, output = record_and_compare(part, lambda m: m(torch.randn(B, T, C)), keep="values")
    q, k, _ = part.parts
    weights = q @ k.mT
    if form is divide_by_sums:
        weights = weights / weights.sum(-1, keepdim=True)
    found = recording.map(0, kind="implicit")
    assert_equal(found.dense(), weights)
    assert_equal((found @ recording.values(0, kind="implicit")).transpose(1, 2).flatten(2), output)


def test_a_table_of_other_products_is_missed():
    table = torch.block_diag(*[torch.ones(D, E)] * H)
    table[0, -1] = 1
    part = JoinedHeads(FORMS["multiplied"], torch.sigmoid, table)
    recording, _ = record_and_compare(part, lambda m: m(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [CHANGED.format("a table of features and values")]

"""Masked scores that are multiplied with values as they are, in any layout of tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import assert_equal, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
C, D = 6, 7


class MaskedScores(nn.Module):
    """Causal linear attention of an input (t, b, c), or (b, t, c)."""

    def __init__(self, heads: int, has_tokens_first: bool, hide: Callable[[Tensor], Tensor] = torch.tril) -> None:
        super().__init__()
        self.heads, self.has_tokens_first, self.hide = heads, has_tokens_first, hide
        self.project = nn.Linear(C, 3 * heads * D)

    def forward(self, x: Tensor) -> Tensor:
        order = (1, 2, 0, 3) if self.has_tokens_first else (0, 2, 1, 3)
        parts = (y.unflatten(-1, (self.heads, D)).permute(order) for y in self.project(x).chunk(3, -1))
        q, k, self.values = parts
        self.weights = self.hide(q.relu() @ k.relu().mT)
        return (self.weights @ self.values).transpose(1, 2)


@pytest.mark.parametrize("has_tokens_first", [True, False])
@pytest.mark.parametrize(("t", "b", "h"), [(5, 5, 3), (3, 5, 3), (3, 2, 3), (5, 3, 3), (5, 2, 5), (4, 4, 4), (5, 1, 5)])
def test_as_many_tokens_as_batch_rows_or_heads_are_all_tokens(t, b, h, has_tokens_first):
    layer, shape = MaskedScores(h, has_tokens_first), (t, b, C) if has_tokens_first else (b, t, C)
    recording, _ = record_and_compare(nn.Sequential(nn.Linear(C, C), layer), lambda m: m(torch.randn(shape)))
    found = recording.map(0, kind="implicit")
    assert_equal(found.dense(), layer.weights.detach())
    assert_equal(recording.values(0, kind="implicit"), layer.values.detach())


def see(s: Tensor) -> Tensor:
    return torch.ones(s.shape[-2:]).tril().bool()


TABLES = {
    "of the scores' shape": lambda s: torch.where(see(s), s, torch.zeros_like(s)),
    "of queries and keys": lambda s: torch.where(~see(s), torch.zeros(s.shape[-2:]), s),
    "of keys": lambda s: s.where(see(s), torch.zeros(s.shape[-1])),
}


@pytest.mark.parametrize("name", TABLES)
def test_zeros_of_a_table_hide_later_keys(name):
    layer = MaskedScores(3, False, TABLES[name])
    recording, _ = record_and_compare(nn.Sequential(nn.Linear(C, C), layer), lambda m: m(torch.randn(2, 5, C)))
    assert_equal(recording.map(0, kind="implicit").dense(), layer.weights.detach())
    assert not recording.notes

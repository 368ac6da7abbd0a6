"""Loops that take the states of several sequences by an index are missed, unless every step has those of all."""

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import assert_equal, record_and_compare
from regard.observe.interception.handwritten.unread.unread_states import INDEXED

pytestmark = pytest.mark.usefixtures("in_float64")
LENGTHS, C, H, D, E = (5, 8), 6, 2, 3, 4


class Packed(nn.Module):
    """Sequences behind one another (t, c), which a loop takes a token at a time of each that is not at its end."""

    def __init__(self, lengths: tuple[int, ...], style: str) -> None:
        super().__init__()
        self.lengths, self.style = torch.tensor(lengths), style
        self.q, self.k, self.v, self.a = (nn.Linear(C, H * n) for n in (D, D, E, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, a = (one(x).unflatten(-1, (H, -1)) for one in (self.q, self.k, self.v, self.a))
        states, starts, self.rows = (
            x.new_zeros(len(self.lengths), H, D, E),
            self.lengths.cumsum(0) - self.lengths,
            x.new_zeros(len(x), H, E),
        )
        for i in range(int(self.lengths.max())):
            running = (self.lengths > i).nonzero().squeeze(1)
            rows = starts[running] + i
            if self.style == "all":
                states = now = self.write(states, a[rows], k[rows], v[rows])
            elif self.style == "copied":
                now = self.write(states[running], a[rows], k[rows], v[rows])
                states = states.index_copy(0, running, now)
            else:
                states[running] = self.write(states[running], a[rows], k[rows], v[rows])
                now = states[running]
            read = torch.einsum("bhd,bhde->bhe", q[rows], now)
            self.rows = self.rows.index_copy(0, rows, read) if self.style == "copied" else self.rows.index_put((rows,), read)
        return self.rows

    @staticmethod
    def write(states: Tensor, a: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return a.sigmoid().unsqueeze(-1) * states + k.unsqueeze(-1) * v.unsqueeze(-2)


@pytest.mark.parametrize("style", ["copied", "in place"])
def test_states_that_are_taken_by_an_index_are_missed_with_this_reason(style):
    x = torch.randn(sum(LENGTHS), C)
    with torch.no_grad():
        recording, _ = record_and_compare(nn.Sequential(Packed(LENGTHS, style)), lambda m: m(x), missing=True)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [("0", INDEXED)]


def test_states_of_all_sequences_that_rows_are_written_of_by_an_index_are_recorded():
    model, x = Packed((7, 7), "all"), torch.randn(14, C)
    with torch.no_grad():
        recording, output = record_and_compare(nn.Sequential(model), lambda m: m(x), keep="values")
    product = recording.map(0, kind="implicit").dense() @ recording.values(0, kind="implicit")
    assert_equal(product.transpose(1, 2).flatten(0, 1), output)


def test_rows_that_are_taken_by_an_index_of_a_product_are_no_states():
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = nn.Linear(C, D), nn.Linear(C, D)

        def forward(self, x: Tensor) -> Tensor:
            k, v, found = self.k(x), self.v(x), []
            for i in range(6):
                rows = torch.tensor([i, i + 1])
                found.append(((1 + k[rows].unsqueeze(-1) * v[rows].unsqueeze(-2)) @ k[rows].unsqueeze(-1)).squeeze(-1))
            return torch.stack(found)

    recording, _ = record_and_compare(nn.Sequential(Picks()), lambda m: m(torch.randn(9, C)))
    assert not recording.calls

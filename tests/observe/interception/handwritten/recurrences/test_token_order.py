"""Loops take tokens in their order, however each is picked, or have no map, whose rows would be of other tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import assert_equal, record_and_compare
from regard.observe.interception.handwritten.recurrences.token_joiner import BACKWARDS
from regard.observe.interception.handwritten.unread.unread_recurrences import LOOP

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D = 2, 11, 5, 3
FORWARD = [*range(T)]
ORDERS = {"backwards": FORWARD[::-1], "two swapped": [0, 2, 1, *FORWARD[3:]]}
Pick = Callable[[Tensor], Callable[[int], Tensor]]
PICKS: dict[str, Pick] = {
    "an integer": lambda x: lambda i: x[:, i],
    "a negative integer": lambda x: lambda i: x[:, i - T],
    "select": lambda x: lambda i: x.select(1, i),
    "unbind": lambda x: x.unbind(1).__getitem__,
    "split": lambda x: lambda i: x.split(1, 1)[i].squeeze(1),
    "a slice": lambda x: lambda i: x[:, i : i + 1].squeeze(1),
    "narrow": lambda x: lambda i: x.narrow(1, i, 1).squeeze(1),
    "chunk": lambda x: lambda i: x.chunk(T, 1)[i].squeeze(1),
    "iteration": lambda x: [*x.transpose(0, 1)].__getitem__,
    "index_select": lambda x: lambda i: x.index_select(1, torch.tensor([i])).squeeze(1),
    "a tensor": lambda x: lambda i: x[:, torch.tensor(i)],
    "gather": lambda x: lambda i: x.gather(1, torch.full((B, 1, C), i)).squeeze(1),
}


class Loop(nn.Module):
    """A loop that takes tokens in an order, and projects each by itself before it enters the state."""

    def __init__(self, pick: Pick, order: list[int], has_matrices: bool) -> None:
        super().__init__()
        self.pick, self.order, self.project = pick, order, nn.Linear(C, 4 * D)
        self.run = self.run_matrices if has_matrices else self.run_vectors

    def forward(self, x: Tensor) -> Tensor:
        pick = self.pick(x)
        return torch.stack([*self.run(self.project(pick(i)).chunk(4, -1) for i in self.order)], 1)

    def run_vectors(self, tokens):
        h = torch.zeros(B, D)
        for w, _, k, _ in tokens:
            h = w.sigmoid() * h + k
            yield h

    def run_matrices(self, tokens):
        state = torch.zeros(B, D, D)
        for w, q, k, v in tokens:
            state = w.sigmoid().unsqueeze(-1) * state + k.unsqueeze(-1) * v.unsqueeze(-2)
            yield (q.unsqueeze(-2) @ state).squeeze(-2)


FORMS = [(has_matrices, one) for has_matrices in (False, True) for one in PICKS]


@pytest.mark.parametrize(("has_matrices", "name"), FORMS)
def test_a_loop_over_tokens_in_their_order_is_read(name, has_matrices):
    model, x = Loop(PICKS[name], FORWARD, has_matrices), torch.randn(B, T, C)
    recording, output = record_and_compare(nn.Sequential(model), lambda model: model(x))
    product = recording.map(0, kind="implicit") @ recording.values(0, kind="implicit")
    assert_equal(product.squeeze(1) if has_matrices else product.squeeze(-1).mT, output.detach())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("has_matrices", "name"), FORMS)
def test_a_loop_whose_pieces_pass_a_module_in_another_order_is_missed(name, has_matrices, order):
    model = nn.Sequential(Loop(PICKS[name], ORDERS[order], has_matrices))
    recording, _ = record_and_compare(model, lambda model: model(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [("0", BACKWARDS if has_matrices else LOOP)]


@pytest.mark.parametrize("has_matrices", [False, True])
def test_a_loop_over_tokens_that_the_module_flipped_before_is_missed(has_matrices):
    model = nn.Sequential(Loop(lambda x: PICKS["an integer"](x.flip(1)), FORWARD, has_matrices))
    recording, _ = record_and_compare(model, lambda model: model(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [("0", BACKWARDS if has_matrices else LOOP)]


class BothWays(Loop):
    """The loop in the order of the tokens and, over the same pieces, backwards."""

    def forward(self, x: Tensor) -> Tensor:
        pieces, orders = x.unbind(1), (FORWARD, FORWARD[::-1])
        outputs = [torch.stack([*self.run(self.project(pieces[i]).chunk(4, -1) for i in order)], 1) for order in orders]
        return torch.stack(outputs)


def test_a_loop_backwards_is_missed_beside_one_over_the_same_pieces_in_their_order():
    model, x = BothWays(lambda x: x, [], True), torch.randn(B, T, C)
    recording, output = record_and_compare(nn.Sequential(model), lambda model: model(x), missing=True)
    assert [one.reason for one in recording.missed] == [BACKWARDS]
    product = recording.map(0, kind="implicit") @ recording.values(0, kind="implicit")
    assert_equal(product.squeeze(1), output[0].detach())


class Queries(nn.Module):
    """A loop whose writes are in the order of the tokens, and whose queries are projected from the last token on."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self.query = nn.Linear(C, 3 * D), nn.Linear(C, D)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = torch.zeros(B, D, D), []
        for i in range(T):
            w, k, v = self.write(x[:, i]).chunk(3, -1)
            state = w.sigmoid().unsqueeze(-1) * state + k.unsqueeze(-1) * v.unsqueeze(-2)
            outputs.append((self.query(x[:, T - 1 - i]).unsqueeze(-2) @ state).squeeze(-2))
        return torch.stack(outputs, 1)


def test_a_loop_whose_queries_are_of_tokens_in_another_order_is_missed():
    recording, _ = record_and_compare(nn.Sequential(Queries()), lambda model: model(torch.randn(B, T, C)), missing=True)
    assert [one.reason for one in recording.missed] == [BACKWARDS]

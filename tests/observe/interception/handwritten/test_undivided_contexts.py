"""Exponentials that are divided before the values, after them, by more than their sums, or not at all."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from observe.interception.handwritten.handwritten_attention import CAUSAL, B, C, D, H, Own, T, scores
from observe.recording_checks import EQUAL, record_and_compare
from regard.observe.interception.handwritten.undivided_contexts import DIVIDED

pytestmark = pytest.mark.usefixtures("in_float64")


def exponentials(q: Tensor, k: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~CAUSAL, -torch.inf).exp()


def total(e: Tensor) -> Tensor:
    return e.sum(-1, keepdim=True)


def divide_in_place(e: Tensor, v: Tensor) -> Tensor:
    context = e @ v
    context /= total(e)
    return context


DIVIDED_BY_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "before": lambda e, v: (e / total(e)) @ v,
    "after": lambda e, v: (e @ v) / total(e),
    "in place": divide_in_place,
    "by their reciprocals": lambda e, v: (e @ v) * total(e).reciprocal(),
    "reciprocals first": lambda e, v: (1 / total(e)) * (e @ v),
    "by a product with ones": lambda e, v: (e @ v) / (e @ torch.ones_like(v[..., :1])),
    "with heads side by side": lambda e, v: ((e @ v).transpose(1, 2) / total(e).transpose(1, 2)).transpose(1, 2),
    "repeated for each entry": lambda e, v: (e @ v).contiguous() / total(e).expand(*e.shape[:-1], v.shape[-1]),
}
NOT_DIVIDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "at all": lambda e, v: e @ v,
    "by one more, after": lambda e, v: (e @ v) / (1 + total(e)),
    "by twice their sums": lambda e, v: (e @ v) / (2 * total(e)),
    "by the number of keys": lambda e, v: (e / T) @ v,
    "by means": lambda e, v: (e / e.mean(-1, keepdim=True)) @ v,
    "by roots": lambda e, v: (e / total(e).sqrt()) @ v,
    "by sums of all queries": lambda e, v: (e / e.sum((-1, -2), keepdim=True)) @ v,
    "with the sums divided by the context": lambda e, v: total(e) / (e @ v),
    "by sums of other rows": lambda e, v: (e @ v) / total(e).roll(1, -2),
}


def record_exponentials(divide: Callable[[Tensor, Tensor], Tensor]) -> tuple[regard.Recording, Own, Tensor]:
    part = Own(lambda q, k, v: divide(exponentials(q, k), v))
    torch.manual_seed(5)
    recording, output = record_and_compare(nn.Sequential(part, nn.Identity()), lambda m: m(torch.randn(B, T, C)))
    return recording, part, output


@pytest.mark.parametrize("divide", DIVIDED_BY_SUMS.values(), ids=DIVIDED_BY_SUMS)
def test_those_divided_by_their_sums_are_a_softmax(divide):
    recording, part, output = record_exponentials(divide)
    torch.testing.assert_close(recording.map(0).dense() @ part.values, output, rtol=0, atol=EQUAL)
    assert not recording.notes


@pytest.mark.parametrize("divide", NOT_DIVIDED.values(), ids=NOT_DIVIDED)
def test_those_divided_by_anything_else_have_a_note(divide):
    recording, *_ = record_exponentials(divide)
    assert recording.notes == [f"0: {DIVIDED}"]
    torch.testing.assert_close(recording.map(0).dense().sum(-1), torch.ones(B, H, T), rtol=0, atol=EQUAL)


class Both(nn.Module):
    """A layer that divides by the sums, after one that does not."""

    def __init__(self) -> None:
        super().__init__()
        ways = NOT_DIVIDED["at all"], DIVIDED_BY_SUMS["after"]
        self.parts = nn.ModuleList(Own(lambda q, k, v, way=way: way(exponentials(q, k), v)) for way in ways)

    def forward(self, x: Tensor, which: slice) -> Tensor:
        return sum(part(x) for part in self.parts[which])


def test_each_layer_and_each_forward_is_noted_by_itself():
    model = Both()
    with torch.no_grad(), regard.record(model) as recording:
        model(torch.randn(B, T, C), slice(1, 2))
        assert not recording.notes
        model(torch.randn(B, T, C), slice(2))
    assert recording.notes == [f"parts.0: {DIVIDED}"]


@given(st.floats(1e-6, 1e3), st.booleans(), st.integers(0, 99))
def test_a_number_added_to_the_sums_is_a_sink(added, shifted, seed):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        numbers = scores(q, k).masked_fill(~CAUSAL, -torch.inf)
        most = numbers.amax(-1, keepdim=True) if shifted else torch.zeros(())
        e = (numbers - most).exp()
        return (e / (added * (-most).exp() + total(e))) @ v

    part = Own(attend)
    torch.manual_seed(seed)
    recording, output = record_and_compare(nn.Sequential(part, nn.Identity()), lambda m: m(torch.randn(B, T, C)))
    torch.testing.assert_close(recording.map(0).dense() @ part.values, output, rtol=0, atol=EQUAL)
    assert not recording.notes


class Exponentials(nn.Module):
    """A layer of one head with projections."""

    def __init__(self, divide: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))
        self.divide = divide

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        numbers = self.q_proj(x) @ self.k_proj(x).mT / D**0.5
        numbers = numbers.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        return self.out_proj(self.divide((numbers - numbers.amax(-1, keepdim=True)).exp(), self.v_proj(x)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["at all", "by one more, after"])
def test_examine_finds_that_rows_do_not_sum_to_one(name):
    assert "not normalised" in [one.kind for one in regard.examine(Exponentials(NOT_DIVIDED[name])).findings]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["before", "after"])
def test_examine_finds_nothing_where_they_are_divided(name):
    assert not regard.examine(Exponentials(DIVIDED_BY_SUMS[name])).findings

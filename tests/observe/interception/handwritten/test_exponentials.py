"""A softmax that code writes out of exponentials: divided before the values, after them, by more than their sums, or never."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from observe.interception.handwritten.handwritten_attention import CAUSAL, B, C, D, H, Own, T, scores
from observe.recording_checks import EQUAL, record_and_compare
from regard.observe.interception.handwritten.softmax.undivided_contexts import BY_MORE, DIVIDED, UNFOLLOWED

pytestmark = pytest.mark.usefixtures("in_float64")


def exponentials(q: Tensor, k: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~CAUSAL, -torch.inf).exp()


def total(e: Tensor) -> Tensor:
    return e.sum(-1, keepdim=True)


def divide_in_place(e: Tensor, v: Tensor) -> Tensor:
    context = e @ v
    context /= total(e)
    return context


def divide_by_last(context: Tensor) -> Tensor:
    return context[..., :-1] / context[..., -1:]


def divide_by_a_channel(e: Tensor, v: Tensor) -> Tensor:
    context, sums = (e @ torch.cat([v, torch.ones_like(v[..., :1])], -1)).split([D, 1], -1)
    return context / sums


def divide_in_the_shape_of_the_context(e: Tensor, v: Tensor) -> Tensor:
    context = e @ v
    return context / total(e).expand_as(context).type_as(context)


def inspect(context: Tensor) -> Tensor:
    assert torch.isfinite(context).all()
    assert not context.isnan().any()
    assert context.abs().max() < 1e9
    assert context.mean(-1).std() >= 0
    return context


DIVIDED_BY_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "before": lambda e, v: (e / total(e)) @ v,
    "after": lambda e, v: (e @ v) / total(e),
    "in place": divide_in_place,
    "by their reciprocals": lambda e, v: (e @ v) * total(e).reciprocal(),
    "reciprocals first": lambda e, v: (1 / total(e)) * (e @ v),
    "by a product with ones": lambda e, v: (e @ v) / (e @ torch.ones_like(v[..., :1])),
    "with heads side by side": lambda e, v: ((e @ v).transpose(1, 2) / total(e).transpose(1, 2)).transpose(1, 2),
    "with a column of ones": lambda e, v: divide_by_last(e @ torch.cat([v, torch.ones_like(v[..., :1])], -1)),
    "with a channel of ones": divide_by_a_channel,
    "in the shape of the context": divide_in_the_shape_of_the_context,
    "after it was inspected": lambda e, v: inspect(e @ v) / total(e),
    "in blocks of rows": lambda e, v: torch.cat([rows @ v for rows in e.split(2, -2)], -2) / total(e),
    "head by head": lambda e, v: torch.stack([c / s for c, s in zip((e @ v).unbind(1), total(e).unbind(1), strict=True)], 1),
}
NOT_DIVIDED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {  # and what the only note says
    "at all": (lambda e, v: e @ v, DIVIDED),
    "but inspected": (lambda e, v: inspect(e @ v), DIVIDED),
    "by twice their sums": (lambda e, v: (e @ v) / (2 * total(e)), DIVIDED),
    "by the number of keys": (lambda e, v: (e / T) @ v, DIVIDED),
    "by roots": (lambda e, v: (e / total(e).sqrt()) @ v, DIVIDED),
    "by sums of all queries": (lambda e, v: (e / e.sum((-1, -2), keepdim=True)) @ v, DIVIDED),
    "by sums of other rows": (lambda e, v: (e @ v) / total(e).roll(1, -2), DIVIDED),
    "by more": (lambda e, v: (e @ v) / (1 + total(e)), BY_MORE),
    "by einsum": (lambda e, v: torch.einsum("bhtd,bht->bhtd", e @ v, 1 / e.sum(-1)), UNFOLLOWED.format("einsum")),
    "before a function changes the context": (lambda e, v: (e @ v).tanh() / total(e), UNFOLLOWED.format("tanh")),
}


def record_exponentials(divide: Callable[[Tensor, Tensor], Tensor]) -> tuple[regard.Recording, Own, Tensor]:
    part = Own(lambda q, k, v: divide(exponentials(q, k), v))
    torch.manual_seed(5)
    with torch.no_grad():
        recording, output = record_and_compare(nn.Sequential(part, nn.Identity()), lambda m: m(torch.randn(B, T, C)))
    return recording, part, output


@pytest.mark.parametrize("divide", DIVIDED_BY_SUMS.values(), ids=DIVIDED_BY_SUMS)
def test_those_divided_by_their_sums_are_a_softmax(divide):
    recording, part, output = record_exponentials(divide)
    assert not recording.notes
    if len(recording.calls) == 1:  # else of blocks of rows
        torch.testing.assert_close(recording.map(0).dense() @ part.values, output, rtol=0, atol=EQUAL)


@pytest.mark.parametrize("name", NOT_DIVIDED)
def test_those_divided_by_anything_else_have_a_note(name):
    divide, note = NOT_DIVIDED[name]
    recording, *_ = record_exponentials(divide)
    assert recording.notes == [f"0: {note}"]
    torch.testing.assert_close(total(recording.map(0).dense()), torch.ones(B, H, T, 1), rtol=0, atol=EQUAL)


@pytest.mark.parametrize("after", [False, True])
def test_a_small_number_beside_the_sums_has_a_note_of_how_small(after):
    def divide(e: Tensor, v: Tensor) -> Tensor:
        sums = total(e) + 1e-5 * torch.arange(T).view(T, 1)  # no sink, which would be the same for all queries
        return (e @ v) / sums if after else (e / sums) @ v

    recording, part, output = record_exponentials(divide)
    (note,) = recording.notes
    assert note.startswith("0: the rows of its weights sum to 1 up to ")
    torch.testing.assert_close(recording.map(0).dense() @ part.values, output, rtol=1e-3, atol=1e-3)


class Both(nn.Module):
    """A layer that divides by the sums, after one that does not."""

    def __init__(self) -> None:
        super().__init__()
        ways = NOT_DIVIDED["at all"][0], DIVIDED_BY_SUMS["after"]
        self.parts = nn.ModuleList(Own(lambda q, k, v, way=way: way(exponentials(q, k), v)) for way in ways)

    def forward(self, x: Tensor, which: slice) -> Tensor:
        return sum(part(x) for part in self.parts[which])


def test_each_layer_and_each_forward_is_noted_by_itself():
    model = Both()
    with torch.no_grad(), regard.record(model) as recording:
        model(torch.randn(B, T, C), slice(1, 2))
        assert not recording.notes
        model(torch.randn(B, T, C), slice(2))
    assert recording.notes[0] == f"parts.0: {DIVIDED}"
    assert "are one layer" in recording.notes[1]
    with torch.no_grad(), regard.record(model, layers=["parts.1"]) as recording:
        model(torch.randn(B, T, C), slice(2))
    assert recording.names == ["parts.1"]
    assert not recording.notes


def test_a_forward_that_raised_before_it_divided_has_no_note():
    def fail(e: Tensor, v: Tensor) -> Tensor:
        contexts.append(e @ v)
        raise RuntimeError("stopped")

    contexts: list[Tensor] = []
    model = nn.Sequential(Own(lambda q, k, v: fail(exponentials(q, k), v)))
    with torch.no_grad(), regard.record(model) as recording, pytest.raises(RuntimeError, match="stopped"):
        model(torch.randn(B, T, C))
    assert contexts
    assert not recording.notes


@given(st.floats(1e-6, 1e3), st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_number_added_to_the_sums_is_a_sink_of_each_head_also_where_a_query_sees_nothing(added, shifted, is_blind, seed):
    sinks = added * torch.tensor([1.0, 0.3, 2.0]).view(H, 1, 1)
    hidden = torch.zeros(B, 1, T, T, dtype=torch.bool)
    hidden[0, :, :2] = is_blind

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        numbers = scores(q, k).masked_fill(~CAUSAL | hidden, -torch.inf)
        most = numbers.amax(-1, keepdim=True) if shifted and not is_blind else torch.zeros(())
        e = (numbers - most).exp()
        return (e / (sinks * (-most).exp() + total(e))) @ v

    part = Own(attend)
    torch.manual_seed(seed)
    recording, output = record_and_compare(nn.Sequential(part, nn.Identity()), lambda m: m(torch.randn(B, T, C)))
    torch.testing.assert_close(recording.map(0).dense() @ part.values, output, rtol=0, atol=EQUAL)
    assert not recording.notes


def test_the_distances_of_single_numbers_are_scores():
    class KernelRegression(nn.Module):
        """Averages of the values of points by their distances, each a single number."""

        def forward(self, points: Tensor, values: Tensor, queries: Tensor) -> Tensor:
            kernel = torch.exp(-((points.reshape(-1, 1) - queries.reshape(1, -1)) ** 2) / 2)
            self.weights = kernel / kernel.sum(0)
            return values @ self.weights

    part = KernelRegression()
    recording, _ = record_and_compare(part, lambda m: m(torch.randn(T), torch.randn(T), torch.randn(D)))
    torch.testing.assert_close(recording.map(0).dense()[0, 0], part.weights.mT, rtol=0, atol=EQUAL)


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


EXAMINED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {  # whether rows sum to one
    "at all": (NOT_DIVIDED["at all"][0], False),
    "by twice their sums": (NOT_DIVIDED["by twice their sums"][0], False),
    "before": (DIVIDED_BY_SUMS["before"], True),
    "after": (DIVIDED_BY_SUMS["after"], True),
    "with an epsilon": (lambda e, v: (e @ v) / (total(e) + 1e-5), True),
    "with a sink": (lambda e, v: (e @ v) / (total(e) + 0.7), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMINED)
def test_examine_finds_whether_rows_sum_to_one(name):
    divide, sums_to_one = EXAMINED[name]
    kinds = [finding.kind for finding in regard.examine(Exponentials(divide)).findings]
    assert ("not normalised" in kinds) != sums_to_one

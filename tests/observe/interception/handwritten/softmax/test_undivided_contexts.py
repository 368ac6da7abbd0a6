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
from regard.observe.interception.handwritten.softmax.undivided_contexts import BY_MORE, DIVIDED, UNFOLLOWED
from regard.observe.interception.thread_state import STATE

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


DIVIDED_BY_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "before": lambda e, v: (e / total(e)) @ v,
    "after": lambda e, v: (e @ v) / total(e),
    "in place": divide_in_place,
    "by their reciprocals": lambda e, v: (e @ v) * total(e).reciprocal(),
    "reciprocals first": lambda e, v: (1 / total(e)) * (e @ v),
    "by a product with ones": lambda e, v: (e @ v) / (e @ torch.ones_like(v[..., :1])),
    "with heads side by side": lambda e, v: ((e @ v).transpose(1, 2) / total(e).transpose(1, 2)).transpose(1, 2),
    "with a column of ones": lambda e, v: divide_by_last(e @ torch.cat([v, torch.ones_like(v[..., :1])], -1)),
    "written into a tensor": lambda e, v: torch.empty_like(v).copy_(e @ v) / total(e),
    "by einsum": lambda e, v: torch.einsum("bhtd,bht->bhtd", e @ v, 1 / e.sum(-1)),
    "by einsum of a list": lambda e, v: torch.einsum(
        "bhtd,bht->bhtd", [torch.einsum("bhqk,bhkd->bhqd", [e, v]), 1 / e.sum(-1)]
    ),
    "by addcdiv": lambda e, v: torch.addcdiv(torch.zeros(()), e @ v, total(e)),
    "by addcdiv in place": lambda e, v: torch.zeros_like(v).addcdiv_(e @ v, total(e)),
    "by addcmul": lambda e, v: torch.addcmul(torch.zeros(()), 1 / total(e), e @ v),
    "repeated for each entry": lambda e, v: (e @ v).contiguous() / total(e).expand(*e.shape[:-1], v.shape[-1]),
}
NOT_DIVIDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "at all": lambda e, v: e @ v,
    "by twice their sums": lambda e, v: (e @ v) / (2 * total(e)),
    "by the number of keys": lambda e, v: (e / T) @ v,
    "by means": lambda e, v: (e / e.mean(-1, keepdim=True)) @ v,
    "by roots": lambda e, v: (e / total(e).sqrt()) @ v,
    "by sums of all queries": lambda e, v: (e / e.sum((-1, -2), keepdim=True)) @ v,
    "by addcdiv with twice their sums": lambda e, v: torch.addcdiv(torch.zeros(()), e @ v, 2 * total(e)),
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


def inspect(context: Tensor) -> Tensor:
    assert torch.isfinite(context).all()
    assert not context.isnan().any()
    assert context.abs().max() < 1e9
    assert context.norm() > 0
    assert context.mean(-1).std() >= 0
    return context


def test_contexts_that_are_only_inspected_are_noted_as_they_are_divided():
    recording, *_ = record_exponentials(lambda e, v: inspect(e @ v))
    assert recording.notes == [f"0: {DIVIDED}"]
    recording, *_ = record_exponentials(lambda e, v: inspect(e @ v) / total(e))
    assert not recording.notes


def expand(e: Tensor, v: Tensor) -> Tensor:
    context = e @ v
    return context / total(e).expand_as(context).type_as(context)


def test_a_divisor_that_takes_its_shape_from_the_context_is_followed():
    recording, *_ = record_exponentials(expand)
    assert not recording.notes


def test_what_is_made_of_a_context_and_then_divided_has_the_note_of_the_function_that_made_it():
    recording, *_ = record_exponentials(lambda e, v: inspect(e @ v).tanh() / total(e))
    assert recording.notes == [f"0: {UNFOLLOWED.format('tanh')}"]


class Both(nn.Module):
    """A layer that divides by the sums, after one that does not."""

    def __init__(self) -> None:
        super().__init__()
        ways = NOT_DIVIDED["at all"], DIVIDED_BY_SUMS["after"]
        self.parts = nn.ModuleList(Own(lambda q, k, v, way=way: way(exponentials(q, k), v)) for way in ways)

    def forward(self, x: Tensor, which: slice) -> Tensor:
        return sum(part(x) for part in self.parts[which])


def test_contexts_that_are_joined_before_the_division_have_no_note():
    recording, *_ = record_exponentials(lambda e, v: torch.cat([rows @ v for rows in e.split(2, -2)], -2) / total(e))
    assert not recording.notes


def divide_by_a_channel(e: Tensor, v: Tensor, split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    context, sums = split(e @ torch.cat([v, torch.ones_like(v[..., :1])], -1))
    return context / sums


def divide_heads(context: Tensor, sums: Tensor) -> Tensor:
    return torch.stack([context.select(1, n) / sums.select(1, n) for n in range(H)], 1)


def write_rows(e: Tensor, v: Tensor, copies: bool) -> Tensor:
    contexts = torch.empty_like(v)
    for start in range(0, T, 2):
        rows = slice(start, start + 2)
        if copies:
            contexts[:, :, rows].copy_(e[:, :, rows] @ v)
        else:
            contexts[:, :, rows] = e[:, :, rows] @ v
    return contexts / total(e)


def join_into(e: Tensor, v: Tensor) -> Tensor:
    contexts = torch.empty_like(v)
    torch.cat([rows @ v for rows in e.split(2, -2)], -2, out=contexts)
    return contexts / total(e)


PARTS = {
    "split": lambda e, v: divide_by_a_channel(e, v, lambda x: x.split([D, 1], -1)),
    "narrow": lambda e, v: divide_by_a_channel(e, v, lambda x: (x.narrow(-1, 0, D), x.narrow(-1, D, 1))),
    "heads": lambda e, v: torch.stack([one / sums for one, sums in zip((e @ v).unbind(1), total(e).unbind(1), strict=True)], 1),
    "selected": lambda e, v: divide_heads(e @ v, total(e)),
    "filled": lambda e, v: (e @ v).nan_to_num(0).masked_fill(torch.eye(T, D).bool(), 0) / total(e),
    "stacked rows": lambda e, v: torch.vstack([e[n : n + 1] @ v[n : n + 1] for n in range(B)]) / total(e),
    "written rows": lambda e, v: write_rows(e, v, False),
    "copied rows": lambda e, v: write_rows(e, v, True),
    "joined into a tensor": join_into,
    "joined by keyword": lambda e, v: torch.cat(tensors=[rows @ v for rows in e.split(2, -2)], dim=-2) / total(e),
}


@pytest.mark.parametrize("divide", PARTS.values(), ids=PARTS)
def test_contexts_that_are_split_or_written_before_the_division_have_no_note(divide):
    with torch.no_grad():
        recording, *_ = record_exponentials(divide)
    assert recording.calls
    assert not recording.notes


def test_a_sum_with_more_after_the_values_has_a_note_of_its_own():
    recording, *_ = record_exponentials(lambda e, v: (e @ v) / (1 + total(e)))
    assert recording.notes == [f"0: {BY_MORE}"]


@pytest.mark.parametrize("after", [False, True])
def test_a_small_number_beside_the_sums_has_a_note_of_how_small(after):
    def divide(e: Tensor, v: Tensor) -> Tensor:
        sums = total(e) + 1e-5 * torch.arange(T).view(T, 1)  # no sink, which would be the same for all queries
        return (e @ v) / sums if after else (e / sums) @ v

    recording, part, output = record_exponentials(divide)
    assert len(recording.notes) == 1
    assert recording.notes[0].startswith("0: the rows of its weights sum to 1 up to ")
    torch.testing.assert_close(recording.map(0).dense() @ part.values, output, rtol=1e-3, atol=1e-3)


def test_a_module_that_is_not_selected_has_no_note():
    model = Both()
    with torch.no_grad(), regard.record(model, layers=["parts.1"]) as recording:
        model(torch.randn(B, T, C), slice(2))
    assert recording.names == ["parts.1"]
    assert not recording.notes


def test_nothing_of_a_forward_that_raised_is_left():
    def fail(e: Tensor, v: Tensor) -> Tensor:
        contexts.append(e @ v)
        raise RuntimeError("stopped")

    contexts: list[Tensor] = []
    model = nn.Sequential(Own(lambda q, k, v: fail(exponentials(q, k), v)))
    with torch.no_grad(), regard.record(model) as recording:
        with pytest.raises(RuntimeError, match="stopped"):
            model(torch.randn(B, T, C))
        assert contexts
        assert not STATE.mode.undivided.notes
    assert not recording.notes


def test_a_learned_sink_is_found_also_where_a_query_sees_nothing():
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0])[:H].view(H, 1, 1)
    hidden = torch.zeros(B, 1, T, T, dtype=torch.bool)
    hidden[0, :, :2] = True

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = scores(q, k).masked_fill(~CAUSAL | hidden, -torch.inf).exp()
        return (e / (total(e) + sinks.exp())) @ v

    part = Own(attend)
    recording, output = record_and_compare(nn.Sequential(part, nn.Identity()), lambda m: m(torch.randn(B, T, C)))
    torch.testing.assert_close(recording.map(0).dense() @ part.values, output, rtol=0, atol=EQUAL)
    assert not recording.notes


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
@pytest.mark.parametrize("name", ["at all", "by twice their sums"])
def test_examine_finds_that_rows_do_not_sum_to_one(name):
    assert "not normalised" in [one.kind for one in regard.examine(Exponentials(NOT_DIVIDED[name])).findings]


RIGHT = {
    **{name: DIVIDED_BY_SUMS[name] for name in ("before", "after")},
    "with an epsilon": lambda e, v: (e @ v) / (total(e) + 1e-5),
    "with a sink": lambda e, v: (e @ v) / (total(e) + 0.7),
}


@pytest.mark.slow
@pytest.mark.parametrize("divide", RIGHT.values(), ids=RIGHT)
def test_examine_finds_nothing_where_they_are_divided(divide):
    assert "not normalised" not in [one.kind for one in regard.examine(Exponentials(divide)).findings]

"""A loop whose first state is a parameter or a constant is recorded as what its tokens add; a note names that state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from observe.recording_checks import EQUAL, assert_equal, record_and_compare
from regard import CutEdges, intervene
from regard.observe.interception.handwritten.recurrences.learned_starts import FROM_WEIGHTS, READ_FIRST, UNCHANGED
from regard.observe.recorded_runs.run_tracker import UNKNOWN_STATE

pytestmark = pytest.mark.usefixtures("in_float64")

STARTS = {
    "parameter": lambda model, b: model.start.expand(b, -1, -1),
    "copied parameter": lambda model, b: model.start.repeat(b, 1, 1),
    "part of a parameter": lambda model, b: model.starts[1].expand(b, -1, -1),
    "constant": lambda model, b: torch.eye(len(model.start)).expand(b, -1, -1),
}
TOKEN_STARTS = {
    "matmul": lambda start, tokens: start.expand_as(tokens) @ tokens,
    "copy_": lambda start, tokens: torch.empty(tokens.shape).copy_(tokens),
    "add_": lambda start, tokens: torch.ones_like(start.expand_as(tokens)).add_(tokens),
    "setitem": lambda start, tokens: set_first_row(torch.zeros(tokens.shape), tokens),
    "cat": lambda start, tokens: torch.cat([start[:3].expand(len(tokens), -1, -1), tokens[:, 3:]], 1),
    "lerp": lambda start, tokens: torch.lerp(start.expand_as(tokens), tokens, 0.5),
}
DECAYS = {
    "none": lambda gates: [1.0] * gates.shape[1],
    "number": lambda gates: [0.9] * gates.shape[1],
    "of each feature": lambda gates: [gate.unsqueeze(2) for gate in gates.unbind(1)],
    "of each token": lambda gates: [gate[:, :1].unsqueeze(2) for gate in gates.unbind(1)],
}


def set_first_row(x: Tensor, tokens: Tensor) -> Tensor:
    x[:, 0] = tokens[:, 0]
    return x


class LearnedStart(nn.Module):
    """Linear attention x (b, t, c) with a state that starts from weights and decays; a given state goes on from a call."""

    def __init__(self, start: str, decay: str, width: int = 4) -> None:
        super().__init__()
        self.how, self.decay = start, decay
        self.q, self.k, self.v, self.gate = (nn.Linear(6, width) for _ in range(4))
        self.start, self.starts = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(2, width, width))
        self.register_buffer("held", torch.randn(width, width))

    def forward(self, x: Tensor, state: Tensor | None = None, *, is_empty: bool = False) -> tuple[Tensor, Tensor]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if state is None:
            state = STARTS[self.how](self, len(x))
        state = torch.zeros_like(state) if is_empty else state
        rows = []
        for t, decay in enumerate(DECAYS[self.decay](self.gate(x).sigmoid())):
            state = state * decay + k[:, t].unsqueeze(2) * v[:, t].unsqueeze(1)
            rows.append((q[:, t].unsqueeze(1) @ state).squeeze(1))
        return torch.stack(rows, 1), state


class ReadFirst(nn.Module):
    """A delta rule, whose keys read the parameter that its state starts from."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 4) for _ in range(3))
        self.start = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), nn.functional.normalize(self.k(x), dim=-1), self.v(x)
        state, rows = self.start.expand(len(x), -1, -1), []
        for t in range(x.shape[1]):
            key = k[:, t].unsqueeze(2)
            state = state + key * (v[:, t] - (key.mT @ state).squeeze(1)).unsqueeze(1)
            rows.append((q[:, t].unsqueeze(1) @ state).squeeze(1))
        return torch.stack(rows, 1)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("start", STARTS)
@settings(max_examples=3, deadline=None)
@given(b=st.integers(1, 3), t=st.integers(2, 7), seed=st.integers(0, 99))
def test_the_map_is_that_of_the_same_loop_from_an_empty_state(start, decay, b, t, seed):
    torch.manual_seed(seed)
    model, x = LearnedStart(start, decay), torch.randn(b, t, 6)
    recording, _ = record_and_compare(model, lambda model: model(x)[0])
    assert not recording.missed
    assert [FROM_WEIGHTS in str(note) for note in recording.notes] == [True]
    (call,) = recording.calls
    with torch.no_grad():
        expected, values = model(x, is_empty=True)[0], model.v(x)
    entries = call.map.dense()
    assert_equal(entries[:, 0] @ values, expected)
    assert call.map.certificate().error < EQUAL


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("decay", DECAYS)
def test_a_copy_of_a_parameter_that_tokens_are_added_to_in_place_is_such_a_state(decay, has_gradients):
    class InPlace(LearnedStart):
        def forward(self, x: Tensor, *, is_empty: bool = False) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            state, rows = self.start.expand(len(x), -1, -1).clone() * (not is_empty), []
            for t, gate in enumerate(DECAYS[self.decay](self.gate(x).sigmoid())):
                state = state * gate
                state += k[:, t].unsqueeze(2) * v[:, t].unsqueeze(1)
                rows.append((q[:, t].unsqueeze(1) @ state).squeeze(1))
            return torch.stack(rows, 1)

    model, x = InPlace("parameter", decay), torch.randn(3, 5, 6)
    with torch.set_grad_enabled(has_gradients):
        recording, _ = record_and_compare(model, lambda model: model(x))
    assert [FROM_WEIGHTS in str(note) for note in recording.notes] == [True]
    with torch.no_grad():
        assert_equal(recording.calls[0].map.dense()[:, 0] @ model.v(x), model(x, is_empty=True))


def test_steps_that_continue_are_without_what_the_state_started_from():
    model, x = LearnedStart("parameter", "of each feature"), torch.randn(2, 6, 6)
    with torch.no_grad(), regard.record(model) as recording:
        _, state = model(x[:, :4])
        _, state = model(x[:, 4:5], state)
        model(x[:, 5:], state)
        model(x)
    assert not recording.missed
    assert [len(run.calls) for run in recording.runs] == [3, 1]
    assert all(call.map.certificate().error < EQUAL for run in recording.runs for call in run.calls)
    joined, whole = (run.implicit_histories[key].build_map() for run in recording.runs for key in run.implicit_histories)
    assert_equal(joined.dense(), whole.dense())


@pytest.mark.filterwarnings("ignore:not recorded")
def test_a_state_in_a_buffer_may_be_one_that_a_call_has_left():
    model, x = LearnedStart("parameter", "number"), torch.randn(2, 5, 6)
    with torch.no_grad(), regard.record(model) as recording:
        model(x, model.held.expand(2, -1, -1))
    assert [one.reason for one in recording.missed] == [UNKNOWN_STATE]


@pytest.mark.filterwarnings("ignore:not recorded")
@pytest.mark.parametrize("form", TOKEN_STARTS)
def test_a_state_that_tokens_were_joined_with_does_not_start_from_weights(form):
    class Joined(LearnedStart):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            means = x.mean(1)
            tokens = self.k(means).unsqueeze(2) * self.v(means).unsqueeze(1) + self.q(means).unsqueeze(2)
            return super().forward(x, TOKEN_STARTS[form](self.start, tokens))

    with torch.no_grad(), regard.record(model := Joined("parameter", "of each feature")) as recording:
        model(torch.randn(2, 5, 6))
    assert not recording.calls
    assert not recording.notes
    assert [one.reason for one in recording.missed] == [UNKNOWN_STATE]


@pytest.mark.filterwarnings("ignore:not recorded")
def test_a_delta_rule_that_reads_its_first_state_is_missed():
    model, x = ReadFirst(), torch.randn(2, 5, 6)
    with torch.no_grad(), regard.record(model) as recording:
        model(x)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [READ_FIRST]


def test_interventions_leave_rows_that_read_the_first_state():
    model, x = LearnedStart("parameter", "number"), torch.randn(2, 5, 6)
    with torch.no_grad():
        expected = model(x)[0]
        with pytest.warns(UserWarning, match=UNCHANGED), intervene(model, CutEdges([3], [1], layer=0, kind="implicit")):
            found = model(x)[0]
    assert torch.equal(found, expected)

"""Linear attention in chunks is one recurrence over all tokens, or is missed with the reason."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from observe.interception.handwritten import chunk_forms
from observe.interception.handwritten.chunk_forms import (
    CHUNK,
    FORMS,
    ChunkLayer,
    Form,
    Tokens,
    compute_matrix,
    gate_features,
    gate_heads,
    gate_in_a_loop,
    scan_dually,
    sum_up,
)
from observe.recording_checks import EQUAL, assert_equal, assert_same_mechanism, record_and_compare
from regard.observe.interception.handwritten.linear.chunk_states import FEW
from regard.observe.interception.handwritten.linear.chunked_attention import CARRIED
from regard.observe.recorded_runs.run_tracker import UNKNOWN_STATE

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=8, deadline=None)
@given(b=st.integers(1, 3), h=st.integers(1, 3), t=st.integers(9, 17), e=st.integers(3, 5), seed=st.integers(0, 99))
@example(b=2, h=2, t=16, e=4, seed=0)  # as many heads as batch rows, and values as wide as the chunks are long
@example(b=CHUNK, h=2, t=16, e=5, seed=0)  # chunks as long as the batch
def test_the_map_of_chunks_is_the_matrix_of_all_tokens_by_its_definition(form, b, h, t, e, seed):
    torch.manual_seed(seed)
    function, decays = FORMS[form]
    model, x = nn.Sequential(nn.Linear(6, 6), ChunkLayer(function, h, 3, e)), torch.randn(b, t, 6)
    recording, _ = record_and_compare(model, lambda model: model(x))
    assert [call.name for call in recording.calls] == ["1"]
    found = recording.map(0, kind="implicit")
    with torch.no_grad():
        tokens = model[1].project(model[0](x))
        output = model[1].mix(tokens)
    assert found.shape == (b, h, t, t)
    assert torch.equal(recording.values(0, kind="implicit"), tokens.v)
    assert_equal(found @ tokens.v, output)
    assert found.certificate().error < EQUAL
    if decays != "rows":
        with torch.no_grad():
            assert_equal(found.dense(), compute_matrix(tokens, decays))


@pytest.mark.parametrize(("b", "h"), [(2, 3), (1, 3), (3, 1), (1, 1), (5, 2), (2, 5)])
@pytest.mark.parametrize("form", [one for one in FORMS if one != "dual"])
def test_chunks_of_one_token_have_the_term_of_the_token_itself(form, b, h, monkeypatch):
    monkeypatch.setattr(chunk_forms, "CHUNK", 1)
    function, decays = FORMS[form]
    model, x = nn.Sequential(nn.Linear(6, 6), ChunkLayer(function, h, 3, 4)), torch.randn(b, 7, 6)
    recording, _ = record_and_compare(model, lambda model: model(x))
    assert [call.name for call in recording.calls] == ["1"]
    with torch.no_grad():
        tokens = model[1].project(model[0](x))
        if decays != "rows":
            assert_equal(recording.map(0, kind="implicit").dense(), compute_matrix(tokens, decays))
        assert_equal(recording.map(0, kind="implicit") @ tokens.v, model[1].mix(tokens))


@pytest.mark.parametrize("other", [1.0, 0.5])
def test_tokens_whose_own_term_is_added_to_a_scaled_read_are_recorded_if_the_state_decays_alike(other):
    def scale_reads(x: Tokens) -> Tensor:
        state, outputs = torch.zeros(*x.q.shape[:2], x.q.shape[3], x.v.shape[3]), []
        for i in range(x.q.shape[2]):
            q, k, v, gamma = (y[:, :, i : i + 1] for y in (x.q, x.k, x.v, x.logs.exp().unsqueeze(3)))
            outputs.append((q @ state) * gamma + (q @ k.mT) @ v)
            state = other * gamma * state + k.mT @ v
        return torch.cat(outputs, 2)

    layer, x = ChunkLayer(scale_reads, 2, 3, 4), torch.randn(3, 7, 6)
    recording, _ = record_and_compare(layer, lambda model: model(x), missing=other != 1)
    if other != 1:
        assert not recording.calls
        assert [one.reason for one in recording.missed] == [CARRIED.format(FEW)]
        return
    with torch.no_grad():
        tokens = layer.project(x)
        assert_equal(recording.map(0, kind="implicit").dense(), compute_matrix(tokens, "heads"))


def test_scores_of_each_token_with_itself_are_no_chunks_unless_they_are_added_to_a_product():
    def weigh_own(x: Tokens) -> Tensor:
        q, k, v = (y.unsqueeze(3) for y in (x.q, x.k, x.v))
        return x.v + (q @ k.mT * torch.full((1, 1), 0.5) @ v).squeeze(3)

    recording, _ = record_and_compare(ChunkLayer(weigh_own, 2, 3, 4), lambda m: m(torch.randn(2, 7, 6)))
    assert not recording.calls


def test_what_a_loop_adds_to_its_reads_is_left_out_unless_it_is_of_the_same_values():
    def read(x: Tokens, own: Tensor) -> Tensor:
        state, outputs = torch.zeros(*x.q.shape[:2], x.q.shape[3], x.v.shape[3]), []
        for i in range(x.q.shape[2]):
            q, k, v = (y[:, :, i : i + 1] for y in (x.q, x.k, x.v))
            outputs.append(q @ state + own[:, :, i : i + 1])
            state = state + k.mT @ v
        return torch.cat(outputs, 2)

    layer, x = ChunkLayer(lambda x: read(x, x.v.flip(-1)), 2, 3, 4), torch.randn(3, 7, 6)
    recording, _ = record_and_compare(layer, lambda model: model(x))
    with torch.no_grad():
        tokens = layer.project(x)
        assert_equal(recording.map(0, kind="implicit").dense(), (tokens.q @ tokens.k.mT).tril(-1))
        assert_equal(recording.map(0, kind="implicit") @ tokens.v, read(tokens, torch.zeros_like(tokens.v)))


@pytest.mark.parametrize("form", FORMS)
def test_rows_times_values_are_the_output_in_float32(form):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), ChunkLayer(FORMS[form][0], 3, 5, 7)).float()
    x = torch.randn(2, 30, 6, dtype=torch.float32)
    recording, _ = record_and_compare(model, lambda model: model(x))
    with torch.no_grad():
        tokens = model[1].project(model[0](x))
        output = model[1].mix(tokens)
    product = recording.map(0, kind="implicit") @ tokens.v
    assert (product - output).abs().max() < 1e-5 * output.abs().max()


def count_bytes(t: int) -> int:
    recording, _ = record_and_compare(ChunkLayer(scan_dually, 2, 3, 3), lambda model: model(torch.randn(1, t, 6)))
    found = recording.map(0, kind="implicit")
    return sum(x.nbytes for x in (found.values, *found.mechanism.tensors.values()))


def test_what_is_stored_grows_with_the_tokens_and_not_with_their_square():
    assert count_bytes(80) == 4 * count_bytes(20)


def test_a_saved_map_of_chunks_is_the_same(tmp_path):
    recording, _ = record_and_compare(ChunkLayer(gate_features, 2, 3, 3), lambda model: model(torch.randn(2, 12, 6)))
    recording.save(tmp_path / "recording")
    found, loaded = (one.map(0, kind="implicit") for one in (recording, regard.load(tmp_path / "recording")))
    assert_same_mechanism(loaded, found)


@pytest.mark.parametrize("form", ["dual", "decays of heads", "in a loop", "decays of features"])
def test_strong_decays_do_not_hide_the_rest(form):
    """Where a state has decayed to nothing, what it decays by is not known and does not matter."""
    layer, x = ChunkLayer(FORMS[form][0], 2, 3, 4), torch.randn(2, 14, 6)
    with torch.no_grad():
        layer.decays.weight *= 30
        layer.features.weight[2 * 3 :: 3] *= 5
    recording, _ = record_and_compare(layer, lambda model: model(x))
    with torch.no_grad():
        tokens = layer.project(x)
        assert_equal(recording.map(0, kind="implicit") @ tokens.v, layer.mix(tokens))


def add_later(x: Tokens) -> Tensor:
    """With the state of the chunk itself, which has later tokens."""
    q, k, v, *_ = x.split()
    return ((q @ k.mT).tril() @ v + q @ (k.mT @ v).cumsum(2)).flatten(2, 3)


def add_residual(x: Tokens) -> Tensor:
    q, k, v, *_ = x.split()
    return ((q @ k.mT).tril() @ v + v).flatten(2, 3)


def start_with_a_state(x: Tokens) -> Tensor:
    return scan_dually(x, torch.ones(1))


def transform_states(x: Tokens) -> Tensor:
    """With states that a matrix changes from chunk to chunk."""
    q, k, v, *_ = x.split()
    state, outputs, turn = 0, [], torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))[0]
    for i in range(q.shape[2]):
        outputs.append((q[:, :, i] @ k[:, :, i].mT).tril() @ v[:, :, i] + q[:, :, i] @ (state + torch.zeros(3, v.shape[-1])))
        state = turn @ (state + k[:, :, i].mT @ v[:, :, i])
    return torch.stack(outputs, 2).flatten(2, 3)


@pytest.mark.parametrize("form", [add_later, add_residual, start_with_a_state, transform_states])
def test_chunks_whose_sum_is_another_one_are_missed_with_the_difference(form: Form):
    recording, _ = record_and_compare(ChunkLayer(form, 2, 3, 4), lambda model: model(torch.randn(2, 16, 6)), missing=True)
    assert not recording.calls
    start = CARRIED.format("its formula differs from its output by ")
    assert [one.reason.startswith(start) for one in recording.missed] == [True]


def test_chunks_with_too_few_outputs_for_their_decays_are_missed():
    layer = ChunkLayer(gate_features, 2, 3 * CHUNK, 1)
    recording, _ = record_and_compare(layer, lambda model: model(torch.randn(2, 16, 6)), missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [CARRIED.format(FEW)]


def test_heads_are_not_taken_for_chunks_of_which_none_reads_an_earlier_one():
    """Nothing is computed for the last token, so that the others are not all tokens; heads times chunks may be."""

    def leave_out_the_last(x: Tokens) -> Tensor:
        q, k, v, logs, feature_logs = (y[:, :, :-1] for y in (x.q, x.k, x.v, x.logs, x.feature_logs))
        return torch.cat([gate_in_a_loop(Tokens(q, k, v, logs, feature_logs)), x.v[:, :, -1:]], 2)

    layer = ChunkLayer(leave_out_the_last, 3, 3, 3)
    recording, _ = record_and_compare(layer, lambda m: m(torch.randn(1, 9, 6)), missing=True)
    assert not recording.calls


class Two(nn.Module):
    """A layer with two mixtures in chunks, of which the second reads what the first makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = ChunkLayer(gate_heads, 2, 3, 3), ChunkLayer(sum_up, 2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one.mix(self.one.project(x)).transpose(1, 2).flatten(2)
        return self.other.mix(self.other.project(y))


def test_two_mixtures_in_chunks_of_one_module_are_two_calls():
    model, x = Two(), torch.randn(2, 12, 6)
    recording, output = record_and_compare(model, lambda model: model(x))
    first, second = (call.map for call in recording.calls)
    with torch.no_grad():
        tokens = model.one.project(x)
        y = model.one.mix(tokens)
        assert_equal(first @ tokens.v, y)
        assert_equal(second @ model.other.project(y.transpose(1, 2).flatten(2)).v, output)


def test_a_loop_of_chunks_whose_values_a_layer_makes_of_another_loop_is_no_delta_rule():
    model, x = Two(), torch.randn(2, 12, 6)
    model.one, model.other = ChunkLayer(gate_in_a_loop, 2, 3, 3), ChunkLayer(gate_in_a_loop, 2, 3, 5)
    recording, output = record_and_compare(model, lambda model: model(x))
    first, second = (call.map for call in recording.calls)
    with torch.no_grad():
        tokens = model.one.project(x)
        y = model.one.mix(tokens)
        assert_equal(first.dense(), compute_matrix(tokens, "heads"))
        assert_equal(second @ model.other.project(y.transpose(1, 2).flatten(2)).v, output)


def test_a_loop_of_chunks_inside_a_training_step_leaves_the_gradients():
    layer, x = ChunkLayer(gate_in_a_loop, 2, 3, 4), torch.randn(2, 14, 6)

    def step(model: nn.Module) -> Tensor:
        model.zero_grad()
        model(x).square().sum().backward()
        return torch.cat([one.grad.flatten() for one in model.parameters()])

    recording, _ = record_and_compare(layer, step)
    assert len(recording.calls) == 1


class Continued(ChunkLayer):
    """The minimal listing of Mamba-2, which is given a state (b, h, e, d)."""

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.out(scan_dually(self.project(x), state.unsqueeze(1)).transpose(1, 2).flatten(2))

    def compute_state(self, x: Tensor) -> Tensor:
        """Compute the state that the tokens of an input (b, t, width) leave, by its definition."""
        tokens = self.project(x)
        reach = (tokens.logs.sum(2, keepdim=True) - tokens.logs.cumsum(2)).exp()
        return torch.einsum("bht,bhte,bhtd->bhed", reach, tokens.v, tokens.k)


@pytest.mark.parametrize("second", [8, 11])
def test_a_scan_that_is_given_the_state_of_the_one_before_continues_its_map(second):
    layer, x = Continued(scan_dually, 2, 3, 5), torch.randn(2, 12 + second, 6)

    def run(model: nn.Module) -> Tensor:
        first = model(x[:, :12], torch.zeros(2, 2, 5, 3))
        return torch.cat([first, model(x[:, 12:], model.compute_state(x[:, :12]))], 1)

    with torch.no_grad():
        recording, _ = record_and_compare(layer, run)
        tokens = layer.project(x)
        found = recording.map(0, kind="implicit")
        assert_equal(found.dense(), compute_matrix(tokens, "heads"))
        assert_equal(found @ tokens.v, scan_dually(tokens))


def test_a_scan_that_starts_from_a_state_that_no_call_has_left_is_missed_with_this_reason():
    layer, x = Continued(scan_dually, 2, 3, 5), torch.randn(2, 12, 6)
    recording, _ = record_and_compare(layer, lambda m: m(x, torch.ones(2, 2, 5, 3)), missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [UNKNOWN_STATE]

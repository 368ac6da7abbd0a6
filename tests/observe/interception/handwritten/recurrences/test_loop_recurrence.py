"""A loop over tokens that a model writes out is recorded as the matrix of its definition, whatever it is called."""

import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from observe.interception.handwritten.state_loop_forms import (
    FORMS,
    LoopLayer,
    SelectiveLayer,
    Tokens,
    compute_matrix,
    gate,
    hold_first,
    write_in_place,
)
from observe.recording_checks import EQUAL, assert_equal, assert_same_mechanism, record_and_compare
from regard.observe import record
from regard.observe.interception.handwritten.recurrences.loop_check import COARSE, OTHERWISE
from regard.observe.interception.handwritten.recurrences.loop_recurrence import CHUNKS, EARLY_RULE, GROWS, TIMES
from regard.observe.interception.handwritten.recurrences.own_terms import SCALED, WRITES_READ
from regard.observe.interception.handwritten.recurrences.state_loop import CHANGED
from regard.observe.interception.handwritten.recurrences.token_joiner import BACKWARDS
from regard.observe.recorded_runs.run_tracker import UNKNOWN_STATE

pytestmark = pytest.mark.usefixtures("in_float64")


def define(form: str, tokens: Tokens) -> Tensor:
    settings = dict(FORMS[form][1])
    decay = settings.pop("decay", "given")
    tokens.a = hold_first(tokens.a) if decay == "constant" else torch.ones_like(tokens.a) if decay == "none" else tokens.a
    return compute_matrix(tokens, **settings)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=6, deadline=None)
@given(
    b=st.integers(1, 3),
    h=st.integers(1, 3),
    t=st.integers(2, 9),
    d=st.integers(2, 4),
    e=st.integers(2, 5),
    seed=st.integers(0, 99),
)
@example(b=2, h=1, t=2, d=4, e=5, seed=46)  # the products of a bonus add up to nearly 0
def test_the_map_of_a_loop_is_the_matrix_of_its_definition(form, b, h, t, d, e, seed):
    torch.manual_seed(seed)
    model, x = nn.Sequential(nn.Linear(6, 6), LoopLayer(FORMS[form][0], h, d, e)), torch.randn(b, t, 6)
    recording, output = record_and_compare(model, lambda model: model(x))
    assert [call.name for call in recording.calls] == ["1"]
    found = recording.map(0, kind="implicit")
    with torch.no_grad():
        tokens = model[1].project(model[0](x))
        expected = define(form, tokens)
    assert found.shape == expected.shape
    assert (found.dense() - expected).abs().max() < EQUAL * expected.abs().max()
    assert torch.equal(recording.values(0, kind="implicit"), tokens.v)
    product = (found @ tokens.v).transpose(1, 2).flatten(2)
    assert (product - output).abs().max() < EQUAL * output.abs().max()
    assert found.certificate().error < EQUAL


HEAD_ORDERS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {  # to heads, back, the axis of tokens
    "(b, h, t, d)": (lambda x, h: x.unflatten(-1, (h, -1)).transpose(1, 2), lambda y, h: y.transpose(1, 2).flatten(2), 2),
    "(h, b, t, d)": (
        lambda x, h: x.unflatten(-1, (h, -1)).permute(2, 0, 1, 3),
        lambda y, h: y.permute(1, 2, 0, 3).flatten(2),
        2,
    ),
    "(h, b, t, d) by stack": (lambda x, h: torch.stack(x.chunk(h, -1)), lambda y, h: torch.cat([*y], -1), 2),
    "(h b, t, d)": (lambda x, h: torch.cat(x.chunk(h, -1), 0), lambda y, h: torch.cat(y.chunk(h, 0), -1), 1),
    "(b h, t, d)": (
        lambda x, h: x.unflatten(-1, (h, -1)).transpose(1, 2).flatten(0, 1),
        lambda y, h: y.unflatten(0, (-1, h)).transpose(1, 2).flatten(2),
        1,
    ),
}


class OrderedLoop(nn.Module):
    """A gated loop over tokens whose heads are in an order of axes; their number is stated or not."""

    def __init__(self, order: str, h: int, is_stated: bool) -> None:
        super().__init__()
        self.order, self.h, self.one, self.gates = order, h, nn.Linear(6, 3 * h * 4), nn.Linear(6, h)
        if is_stated:
            self.num_heads = h

    def forward(self, x: Tensor) -> Tensor:
        split, join, axis = HEAD_ORDERS[self.order]
        (q, k, v), gates = self.one(x).chunk(3, -1), self.gates(x).sigmoid()
        sums = gates.transpose(1, 2).log().cumsum(-1)
        decays = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).exp().tril()
        own = (one.unflatten(-1, (self.h, -1)).transpose(1, 2) for one in (q, k))
        self.expected = (torch.matmul(*(one if n == 0 else one.mT for n, one in enumerate(own))) * decays).detach()
        tokens = zip(*(split(one, self.h).unbind(axis) for one in (q, k, v, gates)), strict=True)
        state, outputs = 0, []
        for query, key, value, gate_of_token in tokens:
            state = state * gate_of_token.unsqueeze(-1) + key.unsqueeze(-1) * value.unsqueeze(-2)
            outputs.append((query.unsqueeze(-2) @ state).squeeze(-2))
        return join(torch.stack(outputs, axis), self.h)


@pytest.mark.parametrize("order", HEAD_ORDERS)
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 4), st.booleans())
def test_heads_of_a_loop_may_stand_before_the_batch(order, b, h, t, is_stated):
    model = nn.Sequential(OrderedLoop(order, h, is_stated))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(b, t, 6)))
    found = recording.map(0, kind="implicit").dense()
    torch.testing.assert_close(found, model[0].expected, rtol=0, atol=EQUAL)


class Mamba(SelectiveLayer):
    """A selective scan with the loop of mamba-minimal, or of mamba.py, whose states are read after it."""

    def __init__(self, reads_at_the_end: bool, c: int = 7, n: int = 3):
        super().__init__(c, n)
        self.reads_at_the_end = reads_at_the_end

    def forward(self, x: Tensor) -> Tensor:
        u, delta, a, b, c = self.project(x)
        if self.reads_at_the_end:
            decays = torch.exp(delta.unsqueeze(-1) * a)
            written = (delta.unsqueeze(-1) * b.unsqueeze(2)) * u.unsqueeze(-1)
        else:
            decays = torch.exp(torch.einsum("bld,dn->bldn", delta, a))
            written = torch.einsum("bld,bln,bld->bldn", delta, b, u)
        state, found = torch.zeros(len(x), *a.shape), []
        for i in range(x.shape[1]):
            state = decays[:, i] * state + written[:, i]
            found.append(state if self.reads_at_the_end else torch.einsum("bdn,bn->bd", state, c[:, i, :]))
        y = torch.stack(found, dim=1)
        y = (y @ c.unsqueeze(-1)).squeeze(3) if self.reads_at_the_end else y
        return y + u * self.d


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("reads_at_the_end", [False, True])
def test_the_loop_of_mamba_has_a_matrix_for_each_channel_and_factors_that_grow_with_the_tokens(b, reads_at_the_end):
    model, x = Mamba(reads_at_the_end), torch.randn(b, 11, 5)
    recording, _ = record_and_compare(model, lambda model: model(x))
    found = recording.map(0, kind="implicit")
    with torch.no_grad():
        expected, (u, delta, _, _, _) = model.define(x), model.project(x)
    assert (found.dense() - expected).abs().max() < EQUAL
    assert torch.equal(recording.values(0, kind="implicit").squeeze(-1), u.mT)
    assert torch.equal(found.mechanism.decay.squeeze(-1), delta.mT)
    assert found.mechanism.decay.data_ptr() == found.mechanism.key_scale.data_ptr()
    assert found.mechanism.rates.shape == (1, 7, 1, 3)
    assert found.certificate().error < EQUAL


class ConstantStateSpace(nn.Module):
    """A state space whose decays, keys and queries are weights, as S4D is. https://arxiv.org/abs/2206.11893"""

    def __init__(self, c: int = 6, n: int = 4):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.rand(c, n)) for _ in range(3))

    def forward(self, u: Tensor) -> Tensor:
        decay, state, outputs = torch.exp(-self.a), torch.zeros(len(u), *self.a.shape), []
        for i in range(u.shape[1]):
            state = decay * state + self.b * u[:, i, :, None]
            outputs.append((state * self.c).sum(-1))
        return torch.stack(outputs, 1)


class LeakyIntegrator(nn.Module):
    """Constant decays, and a constant readout."""

    def __init__(self):
        super().__init__()
        self.tau, self.o = nn.Parameter(torch.rand(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = x.new_zeros(*x[:, 0].shape, 5), []
        for i in range(x.shape[1]):
            state = self.tau * state + (1 - self.tau) * x[:, i, :, None]
            outputs.append(state @ self.o)
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("model", [ConstantStateSpace(), LeakyIntegrator()], ids=lambda model: type(model).__name__)
def test_a_loop_in_which_no_token_decides_any_weight_has_the_matrix_of_its_derivative(model):
    """It mixes tokens as a convolution does."""
    x = torch.randn(3, 9, 6)
    recording, output = record_and_compare(model.double(), lambda model: model(x))
    found = recording.map(0, kind="implicit")
    expected = torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x).diagonal(0, 1, 4).permute(1, 3, 0, 2)
    assert (found.dense().expand(-1, 6, -1, -1) - expected).abs().max() < EQUAL
    product = torch.einsum("bhij,bjh->bih", found.dense().expand(-1, 6, -1, -1), x)
    assert (product - output).abs().max() < EQUAL * output.abs().max()


@pytest.mark.parametrize("t", [8, 10])
def test_a_loop_with_constant_weights_over_something_else_than_tokens_is_left_out(t):
    class Integrator(ConstantStateSpace):
        def forward(self, u: Tensor) -> Tensor:
            return super().forward(u.repeat(1, 2, 1)[:, :t])

    recording, _ = record_and_compare(Integrator().double(), lambda model: model(torch.randn(3, 9, 6)))
    assert not recording.calls


class Cell(nn.Module):
    def forward(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        state = a.unsqueeze(-1) * state + k.unsqueeze(-1) * v.unsqueeze(-2)
        return (q.unsqueeze(-2) @ state).squeeze(-2), state


class StatefulLayer(LoopLayer):
    """A layer that goes on from a state, one token after the other, in a module of its own or in its forward."""

    def __init__(self, has_cell: bool):
        super().__init__(gate, heads=3, d=2, e=4)
        self.cell = Cell() if has_cell else Cell().forward

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        tokens, outputs = self.project(x), []
        state = tokens.zeros if state is None else state
        for i in range(x.shape[1]):
            output, state = self.cell(state, *(y[:, :, i] for y in (tokens.q, tokens.k, tokens.v, tokens.a)))
            outputs.append(output)
        return torch.stack(outputs, 2), state


def test_a_loop_that_calls_a_module_for_each_token_is_one_map_of_the_module_that_loops():
    model, x = nn.Sequential(StatefulLayer(has_cell=True)), torch.randn(2, 7, 6)
    recording, _ = record_and_compare(model, lambda model: model(x))
    assert [call.name for call in recording.calls] == ["0"]
    with torch.no_grad():
        expected = compute_matrix(model[0].project(x))
    assert (recording.map(0, kind="implicit").dense() - expected).abs().max() < EQUAL


@pytest.mark.parametrize("lengths", [(7, 1, 1, 1), (2, 5, 1, 3)])
def test_calls_that_continue_a_state_form_the_map_of_one_call(lengths):
    model, x = StatefulLayer(has_cell=False), torch.randn(2, sum(lengths), 6)
    with record(model) as recording, torch.no_grad():
        state = None
        for part in x.split(lengths, 1):
            output, state = model(part, state)
    assert not recording.missed
    assert len(recording.runs) == 1
    with torch.no_grad():
        tokens = model.project(x)
    found, expected = recording.map(0, kind="implicit"), compute_matrix(tokens)
    assert (found.dense() - expected).abs().max() < EQUAL
    assert ((found @ tokens.v)[:, :, -lengths[-1] :] - output).abs().max() < EQUAL


@pytest.mark.parametrize("lengths", [(5, 1, 1), (3, 4)])
@pytest.mark.parametrize("has_cell", [False, True])
@pytest.mark.parametrize("copy", [Tensor.clone, Tensor.detach, lambda x: x.view(x.shape), lambda x: x.flip(0)])
def test_calls_that_continue_a_copy_of_a_state_or_its_rows_in_another_order_form_one_map(copy, has_cell, lengths):
    model, x = StatefulLayer(has_cell), torch.randn(2, sum(lengths), 6)
    with record(model) as recording, torch.no_grad():
        state = None
        for part in x.split(lengths, 1):
            _, state = model(part, None if state is None else copy(state))
    assert not recording.missed
    rows, parts = torch.arange(2), []  # of the last call, which go on with those of the calls before
    for part in x.split(lengths, 1)[::-1]:
        parts.insert(0, part[rows])
        rows = copy(torch.arange(2.0))[rows].long()
    with torch.no_grad():
        expected = compute_matrix(model.project(torch.cat(parts, 1)))
    assert (recording.map(0, kind="implicit").dense() - expected).abs().max() < EQUAL


@pytest.mark.parametrize("has_cell", [False, True])
def test_a_call_that_is_given_another_state_than_a_recorded_one_has_left_is_missed_by_its_reason(has_cell):
    model, x = StatefulLayer(has_cell), torch.randn(2, 7, 6)
    recording, _ = record_and_compare(model, lambda model: (model(x), model(x, torch.ones(2, 3, 2, 4)))[1][0], missing=True)
    with torch.no_grad():
        expected = compute_matrix(model.project(x))
    assert (recording.runs[0].calls[0].map.dense() - expected).abs().max() < EQUAL
    assert [one.reason for one in recording.missed] == [UNKNOWN_STATE]


def test_a_loop_inside_vmap_is_neither_recorded_nor_missed():
    class Mapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def read(x: Tensor) -> Tensor:
                state, outputs = torch.zeros(6, 6), []
                for one in x.unbind(0):
                    state = state + one.unsqueeze(-1) * one
                    outputs.append(one @ state)
                return torch.stack(outputs)

            return torch.vmap(read)(x)

    recording, _ = record_and_compare(Mapped(), lambda model: model(torch.randn(2, 5, 6)))
    assert not recording.calls


def test_what_was_added_to_a_tensor_is_freed_with_it():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            added.append(weakref.ref((a := self.a(x.mean(1))).untyped_storage()))
            return x + a.unsqueeze(1) * self.b(x.mean(2)).unsqueeze(2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
                assert not any(one() is not None for one in added)
            return x

    added: list[object] = []
    with torch.no_grad():
        record_and_compare(Net(), lambda model: model(torch.randn(2, 6, 6)))


def test_a_product_that_is_flattened_is_not_made_again():
    class Flat(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x.unsqueeze(2) * y.unsqueeze(1)).reshape(len(x), -1).sum(-1)

    model, x = Flat(), torch.randn(3, 64)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as plain:
        model(x, x)
    with record(model), torch.no_grad(), torch.profiler.profile(profile_memory=True) as seen:
        model(x, x)
    most = x.numel() * 64 * x.element_size()
    made = [[event for event in one.events() if event.name == "aten::empty"] for one in (plain, seen)]
    counts = [sum(event.cpu_memory_usage >= most for event in events) for events in made]
    assert counts[0] == counts[1]


def test_a_state_from_before_the_recording_is_missed_by_its_reason():
    model, x = StatefulLayer(has_cell=False), torch.randn(2, 9, 6)
    with torch.no_grad():
        _, state = model(x[:, :4])
        with pytest.warns(UserWarning, match="enter record before the prompt"), record(model) as recording:
            model(x[:, 4:], state)
    assert not recording.calls
    assert len(recording.missed) == 1


@pytest.mark.parametrize("heads", [(), (3,)])
def test_a_loop_that_is_given_a_state_of_zeros_is_that_of_no_state(heads):
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(6, (*heads, 1)[0] * 13)

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            q, k, v, a = self.project(x).unflatten(-1, (*heads, 13)).movedim(1, -2).split((4, 4, 4, 1), -1)
            a, outputs = a.sigmoid(), []
            for i in range(x.shape[1]):
                state = state * a[..., i, :, None] + k[..., i, :, None] * v[..., i, None, :]
                outputs.append((q[..., i, :, None] * state).sum(-2))
            self.values, self.output = v.detach(), torch.stack(outputs, -2).detach()
            return self.output

    model = Given()
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(2, 5, 6), torch.zeros(2, *heads, 4, 4)))
    found = recording.map(0, kind="implicit").dense()
    product = (found @ model.values.view(2, -1, 5, 4)).view_as(model.output)
    assert (product - model.output).abs().max() < EQUAL * model.output.abs().max()


@pytest.mark.parametrize("form", ["a bonus", "a delta rule"])
def test_a_saved_map_of_a_loop_is_the_same(form, tmp_path):
    model = nn.Sequential(LoopLayer(FORMS[form][0], 2, 3, 4))
    recording, _ = record_and_compare(model, lambda model: model(torch.randn(2, 5, 6)))
    recording.save(tmp_path / "recording")
    found, loaded = (one.map(0, kind="implicit") for one in (recording, regard.load(tmp_path / "recording")))
    assert_same_mechanism(loaded, found)
    assert max(one.certificate().error for one in (loaded, found)) < EQUAL


def see(x: Tokens) -> Tensor:
    """A mask of padding (b, 1, t, 1)."""
    return ((torch.arange(x.q.shape[2]) + torch.arange(len(x.q)).unsqueeze(1)) % 3 != 1)[:, None, :, None]


def choose(x: Tokens) -> Tensor:
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        new = x.a[:, :, i, :, None] * state + x.k[:, :, i, :, None] * x.v[:, :, i, None]
        state = torch.where(see(x)[:, :, i, :, None], new, state)
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs, 2)


def multiply_by_mask(x: Tokens) -> Tensor:
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        seen = see(x)[:, :, i, :, None].to(state.dtype)
        state = (1 - seen) * state + seen * (x.a[:, :, i, :, None] * state + x.k[:, :, i, :, None] * x.v[:, :, i, None])
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs, 2)


def interpolate(x: Tokens) -> Tensor:
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        state = torch.lerp(state, x.k[:, :, i, :, None] * x.v[:, :, i, None], 1 - x.a[:, :, i, :, None])
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs, 2)


def mix(tokens: Tokens, form: Callable[[Tokens], Tensor]) -> Tokens:
    """Return the tokens with the decays and keys of the definition of a form whose states are mixed."""
    a, k, seen = tokens.a, tokens.k, see(tokens)
    tokens.a, tokens.k = (a, (1 - a) * k) if form is interpolate else (torch.where(seen, a, 1), seen * k)
    return tokens


@pytest.mark.parametrize("form", [choose, multiply_by_mask, interpolate])
def test_the_map_of_a_loop_whose_states_are_mixed_is_the_matrix_of_its_definition(form):
    model, x = nn.Sequential(LoopLayer(form, 2, 3, 4)), torch.randn(3, 7, 6)
    recording, output = record_and_compare(model, lambda model: model(x))
    with torch.no_grad():
        tokens = mix(model[0].project(x), form)
        expected = compute_matrix(tokens)
    found = recording.map(0, kind="implicit")
    assert (found.dense() - expected).abs().max() < EQUAL * expected.abs().max()
    assert ((found @ tokens.v).transpose(1, 2).flatten(2) - output).abs().max() < EQUAL * output.abs().max()


@pytest.mark.parametrize("form", [choose, multiply_by_mask, interpolate])
def test_an_edge_of_a_loop_whose_states_are_mixed_is_left_out_with_gradients(form):
    model, x = nn.Sequential(LoopLayer(form, 2, 3, 4)), torch.randn(3, 7, 6, requires_grad=True)
    with regard.intervene(model, regard.CutEdges(6, 2, layer=0, kind="implicit")):
        found = model(x)
    tokens, hidden = mix(model[0].project(x), form), torch.zeros(7, 7, dtype=torch.bool)
    hidden[6, 2] = True
    expected = (compute_matrix(tokens).masked_fill(hidden, 0) @ tokens.v).transpose(1, 2).flatten(2)
    assert_equal(found, expected)
    assert_equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)))


def read_what_is_masked(x: Tokens) -> Tensor:
    """With outputs of states before a mask is applied, which no single matrix of the states after it has."""
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        new = x.a[:, :, i, :, None] * state + x.k[:, :, i, :, None] * x.v[:, :, i, None]
        outputs.append((x.q[:, :, i, None] @ new).squeeze(2))
        state = torch.where(see(x)[:, :, i, :, None], new, state)
    return torch.stack(outputs, 2)


def test_a_loop_that_reads_its_states_before_a_mask_is_missed():
    model = nn.Sequential(LoopLayer(read_what_is_masked, 2, 3, 4))
    recording, _ = record_and_compare(model, lambda model: model(torch.randn(3, 7, 6)), missing=True)
    assert not recording.calls
    assert recording.missed


def grow(x: Tokens) -> Tensor:
    x.a = 1 + x.a
    return write_in_place(x)


def read_by_several_queries(x: Tokens) -> Tensor:
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        state = x.a[:, :, i, :, None] * state + x.k[:, :, i, :, None] * x.v[:, :, i, None]
        outputs.append(x.q @ state)
    return sum(outputs)


def read_twice(x: Tokens) -> Tensor:
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        state = x.a[:, :, i, :, None] * state + x.k[:, :, i, :, None] * x.v[:, :, i, None]
        outputs += [(x.q[:, :, i, None] @ state).squeeze(2)] * 2 if i else []
        outputs[-1:] = [(x.k[:, :, i, None] @ state).squeeze(2)]
    return torch.stack(outputs, 2)


def add_to_scaled(x: Tokens) -> Tensor:
    """Chunks of a single token, whose own term is added to what it reads of the states before times a decay."""
    gamma, state, outputs = x.a[:1, :, :1, :1], x.zeros, []
    for i in range(x.q.shape[2]):
        q, k, v = (y[:, :, i : i + 1] for y in (x.q, x.k, x.v))
        outputs.append((q @ state) * gamma + (q * k).sum(-1, keepdim=True) * v)
        state = gamma * state + k.mT @ v
    return torch.cat(outputs, 2)


def run_backwards(x: Tokens) -> Tensor:
    """With later tokens first, which would be the first rows of a map."""
    state, outputs = x.zeros, []
    for i in reversed(range(x.q.shape[2])):
        state = x.a[:, :, i, :, None] * state + x.k[:, :, i, :, None] * x.v[:, :, i, None]
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs[::-1], 2)


def write_values_that_are(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tokens], Tensor]:
    """Return a loop that writes what a function makes of each value but the first, the last output and the state before."""

    def form(x: Tokens) -> Tensor:
        state, outputs = x.zeros, list[Tensor]()
        for i in range(x.q.shape[2]):
            value = change(x.v[:, :, i], outputs[-1], state) if outputs else x.v[:, :, i]
            state = x.a[:, :, i, :, None] * state + x.k[:, :, i, :, None] * value.unsqueeze(2)
            outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
        return torch.stack(outputs, 2)

    return form


def mix_with_what_keys_read(x: Tokens) -> Tensor:
    """As fast weights, which write the difference of a mixture from what the key has read. https://arxiv.org/abs/2102.11174"""
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        old = (x.k[:, :, i, :, None] * state).sum(2)
        new = torch.lerp(old, x.v[:, :, i], x.beta[:, :, i, None])
        state = state + x.k[:, :, i, :, None] * (new - old).unsqueeze(2)
        outputs.append((x.q[:, :, i, :, None] * state).sum(2))
    return torch.stack(outputs, 2)


def decay_by_what_was_read(x: Tokens) -> Tensor:
    state, outputs = x.zeros, [torch.zeros_like(x.v[:, :, 0])]
    for i in range(x.q.shape[2]):
        gate = (x.a[:, :, i] + outputs[-1].mean(2, keepdim=True)).sigmoid()
        state = gate.unsqueeze(3) * state + x.k[:, :, i, :, None] * x.v[:, :, i, None]
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs[1:], 2)


def correct_after_reads(x: Tokens) -> Tensor:
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        q, k, v = (y[:, :, i] for y in (x.q, x.k, x.v))
        outputs.append((q[..., None] * state).sum(2))
        value = x.beta[:, :, i, None] * (v - (k[..., None] * state).sum(2))
        state = state + k[..., None] * value.unsqueeze(2)
    return torch.stack(outputs, 2)


REASONS = [
    (correct_after_reads, EARLY_RULE),
    (grow, GROWS),
    (mix_with_what_keys_read, WRITES_READ),
    (write_values_that_are(lambda value, output, state: value + 0.5 * output), WRITES_READ),
    (write_values_that_are(lambda value, output, state: value + state.mean(2)), WRITES_READ),
    (decay_by_what_was_read, WRITES_READ),
    (read_by_several_queries, CHUNKS),
    (read_twice, TIMES.format(5, 9)),
    (run_backwards, BACKWARDS),
    (add_to_scaled, SCALED),
]


@pytest.mark.parametrize(("form", "reason"), REASONS)
def test_a_loop_that_is_not_read_is_missed_by_its_reason(form, reason):
    model, x = nn.Sequential(LoopLayer(form, 2, 3, 4)), torch.randn(2, 5, 6)
    recording, _ = record_and_compare(model, lambda model: model(x), missing=True)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [("0", reason)]


class OwnGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.x, self.h = nn.Linear(6, 12), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = torch.zeros(len(x), 4), []
        for i in range(x.shape[1]):
            (a, b, c), (d, e, f) = self.x(x[:, i]).chunk(3, -1), self.h(state).chunk(3, -1)
            z = torch.sigmoid(b + e)
            state = (1 - z) * torch.tanh(c + torch.sigmoid(a + d) * f) + z * state
            outputs.append(state)
        return torch.stack(outputs, 1)


class SquashedMemory(LoopLayer):
    """A state of products of keys with values that a nonlinear function changes at each token."""

    def forward(self, x: Tensor) -> Tensor:
        tokens, outputs = self.project(x), []
        state = tokens.zeros
        for i in range(x.shape[1]):
            state = torch.tanh(state + tokens.k[:, :, i, :, None] * tokens.v[:, :, i, None])
            outputs.append((tokens.q[:, :, i, None] @ state).squeeze(2))
        return torch.stack(outputs, 2)


@pytest.mark.parametrize(
    "model", [nn.GRU(6, 4), nn.LSTM(6, 4, batch_first=True), nn.RNN(6, 4), OwnGRU(), SquashedMemory(gate, 2, 3, 4)], ids=repr
)
def test_recurrent_networks_whose_states_are_no_sums_over_tokens_are_neither_recorded_nor_missed(model):
    recording, _ = record_and_compare(nn.Sequential(model.double()), lambda model: model(torch.ones(2, 5, 6)))
    assert not recording.calls


def test_layers_that_start_from_the_same_zeros_are_apart():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(StatefulLayer(has_cell=False) for _ in range(2))

        def forward(self, x: Tensor) -> list[Tensor]:
            zeros = self.layers[0].project(x).zeros
            return [layer(x, zeros)[0] for layer in self.layers]

    model, x = Stack(), torch.randn(2, 5, 6)
    recording, _ = record_and_compare(model, lambda model: model(x))
    assert recording.layers("implicit") == ["layers.0", "layers.1"]
    for n, layer in enumerate(model.layers):
        with torch.no_grad():
            expected = compute_matrix(layer.project(x))
        assert (recording.map(n, kind="implicit").dense() - expected).abs().max() < EQUAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_are_rounded_are_recorded(dtype):
    model, x = nn.Sequential(LoopLayer(gate, 2, 16, 16)).to(dtype), torch.randn(2, 150, 6, dtype=dtype)
    recording, _ = record_and_compare(model, lambda model: model(x))
    assert recording.map(0, kind="implicit").certificate().error < 150 * torch.finfo(dtype).eps


def return_states(x: Tokens, pass_on: Callable[[Tensor], Tensor]) -> Tensor:
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        state = pass_on(x.a[:, :, i, :, None] * state + x.k[:, :, i, :, None] * x.v[:, :, i, None])
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs, 2)


def write_to_out(x: Tokens) -> Tensor:
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        torch.mul(x.a[:, :, i, :, None], state, out=state)
        torch.add(x.k[:, :, i, :, None] * x.v[:, :, i, None], state, out=state)
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs, 2)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: return_states(x, Tensor.contiguous),
        lambda x: return_states(x, lambda state: state.to(state.dtype)),
        lambda x: return_states(x, Tensor.clone),
        write_to_out,
    ],
)
def test_states_that_a_function_returns_as_they_are_or_writes_to_out_are_followed(form):
    model, x = nn.Sequential(LoopLayer(form, 2, 3, 4)), torch.randn(2, 7, 6)
    with torch.no_grad():
        recording, _ = record_and_compare(model, lambda model: model(x))
        expected = compute_matrix(model[0].project(x))
    assert (recording.map(0, kind="implicit").dense() - expected).abs().max() < EQUAL


def change_queries_after(x: Tokens) -> Tensor:
    output = write_in_place(x)
    x.q.masked_fill_((torch.arange(len(x.q)) == 3).view(-1, 1, 1, 1), 0)
    return output


def change_keys_after(x: Tokens) -> Tensor:
    output = write_in_place(x)
    x.k[3] = 0
    return output


def change_keys_to_nan(x: Tokens) -> Tensor:
    output = write_in_place(x)
    x.k[3] = torch.nan
    return output


def reuse_keys(x: Tokens) -> Tensor:
    state, outputs, k = x.zeros, [], torch.empty_like(x.k[:, :, 0])
    for i in range(x.q.shape[2]):
        k.copy_(x.k[:, :, i])
        state = x.a[:, :, i, :, None] * state + k.unsqueeze(-1) * x.v[:, :, i, None]
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs, 2)


def change_states(x: Tokens, change: Callable[[Tensor], object]) -> Tensor:
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        state = x.a[:, :, i, :, None] * state + x.k[:, :, i, :, None] * x.v[:, :, i, None]
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
        if i == 3:
            change(state)
    return torch.stack(outputs, 2)


def reset_row(x: Tokens) -> Tensor:
    return change_states(x, lambda state: state.select(0, 3).zero_())


def reset_row_of_view(x: Tokens) -> Tensor:
    return change_states(x, lambda state: state.view(len(state), -1)[3].zero_())


@pytest.mark.parametrize("runs_in_inference_mode", [False, True])
@pytest.mark.parametrize(
    "form", [change_queries_after, change_keys_after, change_keys_to_nan, reuse_keys, reset_row, reset_row_of_view]
)
def test_a_loop_whose_tensors_are_written_into_is_missed_by_its_reason(form, runs_in_inference_mode):
    model, x = nn.Sequential(LoopLayer(form, 2, 3, 4)), torch.randn(20, 7, 6)
    with torch.inference_mode() if runs_in_inference_mode else torch.no_grad():
        recording, _ = record_and_compare(model, lambda model: model(x), missing=True)
    assert not recording.calls
    (missed,) = recording.missed
    assert missed.reason.startswith(OTHERWISE[:19] if runs_in_inference_mode else CHANGED)


@pytest.mark.parametrize("tokens", [16, 150, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_loop_of_rounded_states_with_other_keys_is_not_recorded(dtype, tokens):
    model, x = nn.Sequential(LoopLayer(reuse_keys, 1, 8, 8)).to(dtype), torch.randn(1, tokens, 6, dtype=dtype)
    with torch.inference_mode():
        recording, _ = record_and_compare(model, lambda model: model(x), missing=True)
    assert not recording.calls
    assert recording.missed[0].reason.startswith((OTHERWISE[:19], COARSE[:20]))


def join_sparse(x: Tensor) -> None:
    torch.cat([torch.eye(1, x.shape[-1]).to_sparse(), x[0, 0].to_sparse()])


def join_batched(x: Tensor) -> None:
    torch.vmap(lambda one: torch.cat([one[0, :1], one[0, :-1]]))(x)


@pytest.mark.parametrize("join", [join_sparse, join_batched])
def test_a_loop_that_joins_tensors_without_memory_of_their_own_is_recorded_in_inference_mode(join):
    model, x = nn.Sequential(LoopLayer(lambda x: change_states(x, lambda _: join(x.k)), 2, 3, 4)), torch.randn(2, 5, 6)
    with torch.inference_mode():
        recording, _ = record_and_compare(model, lambda model: model(x))
    assert len(recording.calls) == 1

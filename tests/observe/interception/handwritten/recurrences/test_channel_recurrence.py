"""Loops and scans over vectors have a matrix for each channel, or one for all, which times the values is what they compute."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard
from observe.interception.handwritten.unread.test_unread_recurrences import Loops, Rounds, Scans
from observe.recording_checks import EQUAL, assert_equal, assert_same_mechanism, record_and_compare
from regard.observe.interception.handwritten.recurrences import channel_scans
from regard.observe.interception.handwritten.recurrences.state_scans import is_scan
from regard.observe.interception.handwritten.unread.unread_recurrences import LOOP, ROUNDS

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D = 2, 11, 5, 3


def project(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return model.project(x).chunk(4, -1)


def differentiate(run: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """The matrix (b, c, t, t) of outputs (b, t, c) of which each channel is linear in that of the values."""
    found = torch.autograd.functional.jacobian(lambda x: run(x).sum(0), values)  # (t, c, b, t, c)
    return found.diagonal(0, 1, 4).permute(1, 3, 0, 2)


LINEAR: dict[str, int] = {
    "sum_exponentials": 3,
    "smooth": 2,
    "gate": 2,
    "gate_in_place": 2,
    "gate_by_numbers": 2,
    "decay_by_numbers": 2,
}


@pytest.mark.parametrize("style", LINEAR)
def test_the_map_of_a_loop_over_vectors_is_its_derivative(style):
    """Of which the place of the values among its arguments is known."""
    model, x, place = Loops(style), torch.randn(B, T, C), LINEAR[style]
    recording, output = record_and_compare(nn.Sequential(model), lambda model: model(x))
    (call,) = recording.calls
    with torch.no_grad():
        parts = [*project(model, x)]
    expected = differentiate(lambda values: getattr(model, style)(*parts[:place], values, *parts[place + 1 :]), parts[place])
    found, values = recording.map(0, kind="implicit"), recording.values(0, kind="implicit")
    has_one_head = style.endswith("by_numbers")
    assert found.shape == (B, 1 if has_one_head else D, T, T)
    assert_equal(found.dense().expand(-1, D, -1, -1), expected.detach())
    assert_equal((values.squeeze(1) if has_one_head else values.squeeze(-1).mT), parts[place])
    product = found @ values
    assert_equal(product.squeeze(1) if has_one_head else product.squeeze(-1).mT, output.detach())
    assert call.map.certificate().error < EQUAL


SEEN = (torch.arange(T) + torch.arange(B).unsqueeze(1)) % 4 != 2  # (b, t), as a mask of padding


class Mixed(Loops):
    """Loops whose states begin with the first token, or are mixed with what a token adds, or by a mask."""

    def begin_with_first(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        states = [k[:, 0]]
        for i in range(1, T):
            states.append(w[:, i].sigmoid() * states[-1] + k[:, i])
        return torch.stack(states, 1)

    def begin_with_first_of_unbind(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, *others = k.unbind(1)
        states = [h]
        for x, z in zip(others, w.sigmoid().unbind(1)[1:], strict=True):
            h = torch.addcmul((1 - z) * h, z, x)
            states.append(h)
        return torch.stack(states, 1)

    def lerp_from_first(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        states = [k[:, 0]]
        for i in range(1, T):
            states.append(torch.lerp(states[-1], k[:, i], w[:, i].sigmoid()))
        return torch.stack(states, 1)

    def lerp(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), torch.empty(B, T, D)
        for i in range(T):
            h = h.lerp(k[:, i], w[:, i].sigmoid())
            outputs[:, i] = h
        return outputs

    def lerp_to_state(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            h = torch.lerp(k[:, i], h, w[:, i].sigmoid())
            outputs.append(h)
        return torch.stack(outputs, 1)

    def correct_from_zeros(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            h = h + w[:, i].sigmoid() * (k[:, i] - h)
            outputs.append(h)
        return torch.stack(outputs, 1)

    def choose(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            h = torch.where(SEEN[:, i, None], w[:, i].sigmoid() * h + k[:, i], h)
            outputs.append(h)
        return torch.stack(outputs, 1)

    def choose_state(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            z = w[:, i].sigmoid()
            h = h.where(~SEEN[:, i, None], (1 - z) * h + z * k[:, i])
            outputs.append(h)
        return torch.stack(outputs, 1)

    def multiply_by_mask(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            seen = SEEN[:, i, None].to(k.dtype)
            h = seen * (w[:, i].sigmoid() * h + k[:, i]) + (1 - seen) * h
            outputs.append(h)
        return torch.stack(outputs, 1)


MIXED = [name for name, one in vars(Mixed).items() if callable(one) and not name.startswith("_")]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("style", MIXED)
def test_the_map_of_a_loop_that_begins_with_a_token_or_mixes_states_is_its_derivative(style, grad):
    model, x = Mixed(style), torch.randn(B, T, C)
    with torch.set_grad_enabled(grad):
        recording, output = record_and_compare(nn.Sequential(model), lambda model: model(x))
    with torch.no_grad():
        parts = [*project(model, x)]
    expected = differentiate(lambda k: getattr(model, style)(*parts[:2], k, parts[3]), parts[2])
    found, values = recording.map(0, kind="implicit"), recording.values(0, kind="implicit").squeeze(-1).mT
    assert_equal(found.dense(), expected.detach())
    assert_equal(values, parts[2])
    assert_equal((found @ values.mT.unsqueeze(-1)).squeeze(-1).mT, output.detach())
    assert found.certificate().error < EQUAL


@torch.no_grad()
@pytest.mark.parametrize("style", [one for one in MIXED if one != "lerp"])  # which writes its states to a tensor
def test_an_edge_of_a_loop_that_begins_with_a_token_or_mixes_states_is_left_out(style):
    model, x = nn.Sequential(Mixed(style)), torch.randn(B, T, C)
    with regard.record(model, keep="values") as recording:
        plain = model(x)
    matrix, values = recording.map(0, kind="implicit").dense(), recording.values(0, kind="implicit")
    matrix[:, :, 4, 2] = 0
    with regard.intervene(model, regard.CutEdges(4, 2, layer=0, kind="implicit")):
        found = model(x)
    assert_equal(found, (matrix @ values).squeeze(-1).mT)
    assert not torch.equal(found[:, 4], plain[:, 4])


@pytest.mark.parametrize("grad", [False, True])
def test_an_average_with_constant_decays_that_begins_with_a_token_has_what_tokens_add_as_values(grad):
    model, x = Loops("average_from_first"), torch.randn(B, T, C)
    with torch.set_grad_enabled(grad):
        recording, output = record_and_compare(nn.Sequential(model), lambda model: model(x))
    with torch.no_grad():
        k = project(model, x)[2]
        added = torch.cat([k[:, :1], (1 - model.u) * k[:, 1:]], 1)
        assert_equal(recording.map(0, kind="implicit").dense(), define(model.u.expand(1, T, D)).expand(B, -1, -1, -1))
        assert_equal(recording.values(0, kind="implicit").squeeze(-1).mT, added)
        product = recording.map(0, kind="implicit").dense() @ recording.values(0, kind="implicit")
        assert_equal(product.squeeze(-1).mT, output)


def test_rwkv_4_without_a_running_maximum_is_the_same_average():
    class Plain(Loops):
        def divide(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
            numerator, denominator, decay, outputs = torch.zeros(B, D), torch.zeros(B, D), torch.exp(-self.u.exp()), []
            for i in range(T):
                bonus, weight = torch.exp(self.u + k[:, i]), torch.exp(k[:, i])
                outputs.append(r[:, i].sigmoid() * (numerator + bonus * v[:, i]) / (denominator + bonus))
                numerator = decay * numerator + weight * v[:, i]
                denominator = decay * denominator + weight
            return torch.stack(outputs, 1)

    x, one = torch.randn(B, T, C), Plain("divide")
    ours, _ = record_and_compare(nn.Sequential(one), lambda model: model(x))
    one.style = "sum_exponentials"
    theirs, _ = record_and_compare(nn.Sequential(one), lambda model: model(x))
    found, expected = (each.map(0, kind="implicit").dense() for each in (ours, theirs))
    assert_equal(found, expected)
    with torch.no_grad():
        gates = project(one, x)[0].sigmoid().mT
    assert_equal(found.sum(-1), gates)  # an average, times the receptance


STATES: dict[str, tuple[type[nn.Module], Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]]] = {
    "sum_logarithms": (Scans, lambda w, k, v: (w.neg().sigmoid(), w.sigmoid() * k.exp())),
    "divide_by_decays": (Scans, lambda w, k, v: (w.neg().sigmoid(), k * v)),
    "divide_by_products": (Scans, lambda w, k, v: (w.sigmoid(), k)),
    "double_steps": (Rounds, lambda w, k, v: (w.sigmoid(), k * v)),
    "double_in_place": (Rounds, lambda w, k, v: (torch.exp(-w * w), k)),
    "shift": (Rounds, lambda w, k, v: (w.sigmoid(), k)),
    "shift_parts": (Rounds, lambda w, k, v: (w.sigmoid(), k * v)),
    "shift_states_first": (Rounds, lambda w, k, v: (w.sigmoid(), k * v)),
    "join_zeros": (Rounds, lambda w, k, v: (w.sigmoid(), k * v)),
    "join_odd_and_even": (Rounds, lambda w, k, v: (w.sigmoid(), k * v)),
    "sweep_up_and_down": (Rounds, lambda w, k, v: (w.sigmoid(), k * v)),
    "decay": (Rounds, lambda w, k, v: (torch.full_like(w, torch.nan), k * v)),
}


def define(decays: Tensor) -> Tensor:
    """The matrix (b, c, t, t) of decays (b, t, c), Π_{s=j+1..i} a_s."""
    b, t, c = decays.shape
    found = torch.zeros(b, c, t, t, dtype=decays.dtype)
    for i in range(t):
        found[:, :, i] = found[:, :, i - 1] * decays[:, i, :, None] if i else found[:, :, i]
        found[:, :, i, i] = 1
    return found


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("style", STATES)
def test_the_map_of_a_scan_over_vectors_is_the_product_of_its_decays(style, grad):
    kind, read = STATES[style]
    model, x = kind(style), torch.randn(B, T, C)
    with torch.set_grad_enabled(grad):
        recording, _ = record_and_compare(nn.Sequential(model), lambda model: model(x))
    with torch.no_grad():
        _, w, k, v = project(model, x)
        decays, written = read(w, k, v)
        decays = torch.where(decays.isnan(), model.u, decays)
    found = recording.map(0, kind="implicit")
    assert_equal(found.dense(), define(decays))
    assert_equal(recording.values(0, kind="implicit").squeeze(-1).mT, written)
    assert found.certificate().error < EQUAL


@pytest.mark.parametrize("style", ["shift_states_first", "join_zeros", "roll"])
def test_rounds_of_as_many_tokens_as_they_double_are_not_passed_over(style, monkeypatch):
    """The first round joins states by decays that nothing has moved before, and the last one moves none."""
    monkeypatch.setattr("observe.interception.handwritten.unread.test_unread_recurrences.T", 16)
    model, x = Rounds(style), torch.randn(B, 16, C)
    recording, output = record_and_compare(nn.Sequential(model), lambda model: model(x), missing=style == "roll")
    if style == "roll":
        assert [one.reason for one in recording.missed] == [ROUNDS]
        return
    product = recording.map(0, kind="implicit").dense() @ recording.values(0, kind="implicit")
    assert_equal(product.squeeze(-1).mT, output.detach())


@pytest.mark.parametrize("style", ["sum_exponentials", "gate"])
@pytest.mark.parametrize("t", [T, 4 * T])
def test_rows_times_values_are_the_output_in_float32(style, t, monkeypatch):
    monkeypatch.setattr("observe.interception.handwritten.unread.test_unread_recurrences.T", t)
    model, x = Loops(style).float(), torch.randn(B, t, C, dtype=torch.float32)
    torch.set_default_dtype(torch.float32)
    recording, output = record_and_compare(nn.Sequential(model), lambda model: model(x))
    product = (recording.map(0, kind="implicit") @ recording.values(0, kind="implicit")).squeeze(-1).mT
    assert (product - output).abs().max() < 1e-5 * output.abs().max()


def test_a_saved_map_of_vectors_is_the_same(tmp_path):
    recording, _ = record_and_compare(nn.Sequential(Loops("sum_exponentials")), lambda model: model(torch.randn(B, T, C)))
    recording.save(tmp_path / "recording")
    found, loaded = (one.map(0, kind="implicit") for one in (recording, regard.load(tmp_path / "recording")))
    assert_same_mechanism(loaded, found)


class Wrong(Loops):
    """Loops whose reads or decays are others."""

    def grow(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            h = w[:, i].exp() * h + k[:, i]
            outputs.append(h)
        return torch.stack(outputs, 1)

    def skip_a_read(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The first state is read for each of the first two tokens."""
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            h = w[:, i].sigmoid() * h + k[:, i]
            outputs.append(outputs[0] if i == 1 else h * 1)
        return torch.stack(outputs, 1)

    def change_in_place(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs, gates = torch.zeros(B, D), [], w.sigmoid()
        for i in range(T):
            gate = gates[:, i].clone()
            h = gate * h + k[:, i]
            gate.mul_(0.5)
            outputs.append(h)
        return torch.stack(outputs, 1)

    def run_backwards(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), torch.empty(B, T, D)
        for i in reversed(range(T)):
            h = w[:, i].sigmoid() * h + k[:, i]
            outputs[:, i] = h
        return outputs

    def run_inside_backwards(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), []
        for i in range(T - 1, -1, -1):
            z, new = self.inner(k[:, i]).chunk(2, -1)
            h = z.sigmoid() * h + new
            outputs.append(h)
        return torch.stack(outputs[::-1], 1)

    def swap_two(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), torch.empty(B, T, D)
        for i in (0, 2, 1, *range(3, T)):
            h = w[:, i].sigmoid() * h + k[:, i]
            outputs[:, i] = h
        return outputs

    def swap_two_inside(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs, tokens = torch.zeros(B, D), [], k.unbind(1)
        for i in (0, 2, 1, *range(3, T)):
            z, new = self.inner(tokens[i]).chunk(2, -1)
            h = z.sigmoid() * h + new
            outputs.append(h)
        return torch.stack(outputs, 1)

    def write_elsewhere(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), torch.empty(B, T, D)
        for i, place in enumerate((0, 2, 1, *range(3, T))):
            h = w[:, i].sigmoid() * h + k[:, i]
            outputs[:, place] = h
        return outputs


UNREAD = ["grow", "skip_a_read", "change_in_place", "run_backwards", "run_inside_backwards", "swap_two", "swap_two_inside"]


@pytest.mark.parametrize("style", [*UNREAD, "write_elsewhere"])
def test_a_loop_over_vectors_of_another_form_is_missed(style):
    recording, _ = record_and_compare(nn.Sequential(Wrong(style)), lambda model: model(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [("0", LOOP)]


SWAPPED = torch.tensor([0, 2, 1, *range(3, T)])
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(1),
    "index": lambda x: x[:, SWAPPED],
    "list": lambda x: x[:, SWAPPED.tolist()],
    "index_select": lambda x: x.index_select(1, SWAPPED),
    "gather": lambda x: x.gather(1, SWAPPED[:, None].expand_as(x)),
    "take_along_dim": lambda x: torch.take_along_dim(x, SWAPPED.view(1, T, 1), 1),
}


class Moved(Scans, Rounds):
    """Scans over tokens in another order, of their decays too or of what they write alone."""

    def __init__(self, style: str, move: Callable[[Tensor], Tensor], all_too: bool) -> None:
        super().__init__(style)
        self.move, self.all_too = move, all_too

    def forward(self, x: Tensor) -> Tensor:
        r, w, k, v = self.project(x).chunk(4, -1)
        return getattr(self, self.style)(r, self.move(w) if self.all_too else w, *map(self.move, (k, v)))


@pytest.mark.parametrize("all_too", [False, True])
@pytest.mark.parametrize("style", ["divide_by_products", "double_steps", "sum_logarithms"])
@pytest.mark.parametrize("name", MOVES)
def test_a_scan_of_tokens_in_another_order_is_missed(name, style, all_too):
    model = nn.Sequential(Moved(style, MOVES[name], all_too))
    recording, _ = record_and_compare(model, lambda model: model(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert [one.module for one in recording.missed] == ["0"]


def test_a_scan_of_tokens_that_an_index_leaves_in_their_order_is_read():
    model, x = nn.Sequential(Moved("divide_by_products", lambda x: x[:, torch.arange(T)], True)), torch.randn(B, T, C)
    recording, _ = record_and_compare(model, lambda model: model(x))
    with torch.no_grad():
        _, w, k, _ = project(model[0], x)
    assert_equal(recording.map(0, kind="implicit").dense(), define(w.sigmoid()))
    assert_equal(recording.values(0, kind="implicit").squeeze(-1).mT, k)


@pytest.mark.parametrize(("kind", "style"), [(Loops, "gate"), (Rounds, "double_steps")])
def test_an_intervention_says_that_a_loop_or_a_scan_over_vectors_stays_unchanged(kind, style):
    whole, knock_out = nn.Sequential(kind(style)), regard.KnockOut(layer=0, head=0, kind="implicit")
    with pytest.warns(UserWarning, match="stays unchanged"), regard.intervene(whole, knock_out):
        whole(torch.randn(B, T, C))


class RGLRU(Loops):  # a name that says that it mixes tokens
    pass


@pytest.mark.parametrize(
    ("kind", "style"), [(Loops, "gate"), (RGLRU, "gate"), (Scans, "sum_logarithms"), (Rounds, "double_steps")]
)
def test_each_call_of_a_layer_has_its_map_in_one_forward_and_in_several(kind, style):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.back = kind(style), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(self.back(self.mix(x)))

    model, one, other = Twice(), *torch.randn(2, B, T, C)
    with regard.record(model) as recording:
        model(one)
        model(other)
    assert not recording.missed
    assert [len(run.calls) for run in recording.runs] == [2, 2]
    for run, x in zip(recording.runs, (one, other), strict=True):
        with regard.record(model.mix) as alone:
            model.mix(x)
        assert torch.equal(run.calls[0].map.dense(), alone.map(0, kind="implicit").dense())


def test_gates_of_heads_make_a_map_for_each_head():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values, self.gates = nn.Linear(C, 4 * D), nn.Linear(C, 4)

        def forward(self, x: Tensor) -> Tensor:
            v, gates = self.values(x).view(B, T, 4, D), self.gates(x).sigmoid().unsqueeze(-1)
            h, outputs = torch.zeros(B, 4, D), []
            for i in range(T):
                h = gates[:, i] * h + v[:, i]
                outputs.append(h)
            return torch.stack(outputs, 1)

    model, x = Heads(), torch.randn(B, T, C)
    recording, output = record_and_compare(nn.Sequential(model), lambda model: model(x))
    found = recording.map(0, kind="implicit")
    assert found.shape == (B, 4, T, T)
    with torch.no_grad():
        assert_equal(found.dense(), define(model.gates(x).sigmoid()))
        assert_equal((found @ model.values(x).view(B, T, 4, D).transpose(1, 2)).transpose(1, 2), output)


def test_a_gated_recurrent_network_has_no_map():
    class Gated(Loops):
        def read_states(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
            h, outputs = torch.zeros(B, D), []
            for i in range(T):
                z, new = (self.inner(h) + torch.cat([w[:, i], k[:, i]], -1)).chunk(2, -1)
                h = (1 - z.sigmoid()) * h + z.sigmoid() * new.tanh()
                outputs.append(h)
            return torch.stack(outputs, 1)

    recording, _ = record_and_compare(nn.Sequential(Gated("read_states")), lambda model: model(torch.randn(B, T, C)))
    assert not recording.calls
    assert not recording.missed


class Gated(nn.Module):
    """Products of parts of two tensors, of their features or of their tokens, and other functions of as many entries."""

    def __init__(self, of_tokens: bool) -> None:
        super().__init__()
        self.project, self.of_tokens = nn.Linear(C, 4 * D), of_tokens

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.project(x).clone(), self.project(x).sigmoid()
        parts = (slice(None), slice(1, None)) if self.of_tokens else (..., slice(2 * D))
        product = one[parts] * other[parts]
        for _ in range(100):
            one, other = one * 1.01, other + 1
        return torch.cat([one[:, :1], product], 1) if self.of_tokens else one * other + product.sum()


@pytest.mark.parametrize("of_tokens", [False, True])
def test_products_of_parts_that_are_no_scan_cost_few_comparisons(of_tokens, monkeypatch):
    compared: list[bool] = []
    monkeypatch.setattr(channel_scans, "is_scan", lambda *given: compared.append(is_scan(*given)) or compared[-1])
    record_and_compare(nn.Sequential(Gated(of_tokens)), lambda model: model(torch.randn(B, T, C)))
    assert not any(compared)
    assert len(compared) <= (2 * channel_scans.MAX_TRIES if of_tokens else 0)
    assert bool(compared) is of_tokens

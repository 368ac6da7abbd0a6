"""A changed loop over tokens equals the matrix of its definition with heads or entries left out, times the values."""

import pytest
import torch
from torch import nn

from observe.interception.handwritten.state_loop_forms import FORMS, LoopLayer, compute_matrix, hold_first
from observe.recording_checks import EQUAL, assert_equal
from regard import CutEdges, KnockOut, Patch, intervene, record

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, T, D, E = 2, 3, 7, 3, 5
QUERIES, KEYS = [3, 5, 6], [1, 3]


def build(form):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), LoopLayer(FORMS[form][0], H, D, E), nn.Linear(H * E, 6)), torch.randn(B, T, 6)


def compute_entries(model, x, form):
    """The matrix of the definition of a loop and its values."""
    options = dict(FORMS[form][1])
    decay, tokens = options.pop("decay", "given"), model[1].project(model[0](x))
    tokens.a = hold_first(tokens.a) if decay == "constant" else torch.ones_like(tokens.a) if decay == "none" else tokens.a
    return compute_matrix(tokens, **options), tokens.v


def finish(model, context):
    return model[2](context.transpose(1, 2).flatten(2))


def mark_entries(axes):
    marks = [torch.zeros(n, dtype=torch.bool).index_fill(0, torch.tensor(places), True) for n, places in axes]
    return marks[0][:, None, None] & marks[1][:, None] & marks[2]


HIDDEN = mark_entries([(H, [0, 2]), (T, QUERIES), (T, KEYS)])


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_heads_and_entries_of_a_loop_are_left_out(form):
    model, x = build(form)
    matrix, v = compute_entries(model, x, form)
    plain = model(x)
    assert_equal(plain, finish(model, matrix @ v))
    context = matrix.masked_fill(HIDDEN, 0) @ v
    context[:, 1] = 0
    changes = CutEdges(QUERIES, KEYS, layer=0, head=[0, 2], kind="implicit"), KnockOut(0, 1, kind="implicit")
    with intervene(model, *changes), record(model) as recording:
        found = model(x)
    assert_equal(found, finish(model, context))
    assert not torch.allclose(found, plain)
    assert not recording.missed
    assert (recording.map(0, kind="implicit").dense() - matrix).abs().max() < EQUAL * matrix.abs().max()


CHANGES = {  # with the context of the head from the matrix and values of this input, and those of another
    "a mean": (
        lambda source: KnockOut(0, 1, "mean", kind="implicit"),
        lambda matrix, v, *_: (matrix @ v).mean(0, keepdim=True),
    ),
    "a sample of the source": (
        lambda source: KnockOut(0, 1, "resample", source, kind="implicit"),
        lambda matrix, v, other, values: other @ values,
    ),
    "a patched output": (
        lambda source: Patch(recording=source, layer=0, head=1, of="output", kind="implicit"),
        lambda matrix, v, other, values: other @ values,
    ),
    "patched weights": (
        lambda source: Patch(recording=source, layer=0, head=1, kind="implicit"),
        lambda matrix, v, other, values: other @ v,
    ),
}


@pytest.mark.parametrize("lengths", [[T], [4, 1, 2]], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_head_of_a_loop_is_replaced(change, lengths):
    model, x = build_stateful()
    x = x.requires_grad_()
    matrix, v = compute_entries(model, x, "gated, by einsum")
    with record(model, keep="values") as source, torch.no_grad():
        run_in_pieces(model, x.flip(0, 1), [T])
        other, values = compute_entries(model, x.flip(0, 1), "gated, by einsum")
    make, compute = CHANGES[change]
    context = matrix @ v
    context = torch.where((torch.arange(H) == 1).view(H, 1, 1), compute(matrix, v, other, values), context)
    expected = finish(model, context)
    with intervene(model, make(source)):
        found = run_in_pieces(model, x, lengths)
    assert_equal(found, expected)
    assert_same_gradients(list_gradients(found, model, x), list_gradients(expected, model, x))


class Stateful(LoopLayer):
    """A loop that starts from the state that an earlier call has left; `join` makes its output of the rows."""

    def __init__(self, join):
        super().__init__(None, H, D, E)
        self.join, self.state, self.is_detached = join, None, False

    def forward(self, x):
        tokens, rows = self.project(x), []
        state = tokens.zeros if self.state is None else self.state.detach() if self.is_detached else self.state
        for i in range(x.shape[1]):
            state = tokens.a[:, :, i, :, None] * state + tokens.k[:, :, i, :, None] * tokens.v[:, :, i, None]
            rows.append(torch.einsum("bhd,bhde->bhe", tokens.q[:, :, i], state))
        self.state = state
        return self.join(rows).transpose(1, 2).flatten(2)


def build_stateful(join=lambda rows: torch.stack(rows, 2)):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), Stateful(join), nn.Linear(H * E, 6)), torch.randn(B, T, 6)


def run_in_pieces(model, x, lengths):
    model[1].state = None
    return torch.cat([model(part) for part in x.split(lengths, 1)], 1)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[T], [4, 3], [2, 1, 1, 3]], ids=str)
def test_entries_of_earlier_calls_are_left_out_of_a_loop_that_goes_on(lengths):
    model, x = build_stateful()
    matrix, v = compute_entries(model, x, "gated, by einsum")
    expected = finish(model, matrix.masked_fill(HIDDEN, 0) @ v)
    with intervene(model, CutEdges(QUERIES, KEYS, layer=0, head=[0, 2], kind="implicit")):
        found = run_in_pieces(model, x, lengths)
    assert_equal(found, expected)


@torch.no_grad()
def test_a_loop_that_is_not_recorded_stays():
    model, x = build_stateful()
    plain = run_in_pieces(model, x, [1] * T)
    change = CutEdges(QUERIES, KEYS, layer=0, kind="implicit")
    with pytest.warns(UserWarning, match="was not applied"), intervene(model, change):
        assert torch.equal(run_in_pieces(model, x, [1] * T), plain)


JOINS = {
    "concatenated": lambda rows: torch.cat([row.unsqueeze(2) for row in rows], 2),
    "stacked in another order": lambda rows: torch.stack([row.transpose(1, 2) for row in rows], 1).permute(0, 3, 1, 2),
    "reversed": lambda rows: torch.stack(rows[::-1], 2).flip(2),
    "in a list of copies": lambda rows: torch.stack([row.clone() for row in rows], -1).movedim(-1, 2),
}


@torch.no_grad()
@pytest.mark.parametrize("join", JOINS)
def test_rows_may_be_joined_in_any_layout(join):
    model, x = build_stateful(JOINS[join])
    matrix, v = compute_entries(model, x, "gated, by einsum")
    with intervene(model, CutEdges(QUERIES, KEYS, layer=0, head=[0, 2], kind="implicit")):
        assert_equal(run_in_pieces(model, x, [T]), finish(model, matrix.masked_fill(HIDDEN, 0) @ v))


def use_one(rows):
    return torch.stack(rows, 2) + rows[0].tanh().unsqueeze(2)


def use_before(rows):
    total = rows[0] + rows[1]
    return torch.stack(rows, 2) + total.unsqueeze(2)


UNCHANGED = {
    "a row is used before": (use_before, r"one by one \(add\)"),
    "the rows are normed": (lambda rows: torch.stack([row / row.norm() for row in rows], 2), "not joined to one tensor"),
    "all but one": (lambda rows: torch.cat([torch.stack(rows[:-1], 2), rows[-1].unsqueeze(2).clone() * 1], 2), "not joined"),
    "a list": (lambda rows: sum(rows).unsqueeze(2), "not joined to one tensor|one by one"),
}


@torch.no_grad()
@pytest.mark.parametrize("why", UNCHANGED)
def test_a_loop_whose_rows_are_used_otherwise_stays_and_says_why(why):
    join, reason = UNCHANGED[why]
    model, x = build_stateful(join)
    plain = run_in_pieces(model, x, [T])
    for change in (KnockOut(0, 1, kind="implicit"), CutEdges(QUERIES, KEYS, kind="implicit")):
        with pytest.warns(UserWarning, match=f"was not applied: .*{reason}"), intervene(model, change):
            assert torch.equal(run_in_pieces(model, x, [T]), plain)


@torch.no_grad()
@pytest.mark.parametrize("form", ["gated, by einsum", "in place", "read at the end"])
def test_a_change_that_changes_nothing_leaves_every_bit_of_a_loop(form):
    model, x = build(form)
    plain = model(x)
    for change in (CutEdges([], [], kind="implicit"), KnockOut(head=[], kind="implicit"), CutEdges(2, 5, kind="implicit")):
        with intervene(model, change):
            assert torch.equal(model(x), plain)


class Vectors(nn.Module):
    """A gated loop whose state is a vector, h = a h + w v, with a gate for each channel or for each token."""

    def __init__(self, has_gates_of_channels, join):
        super().__init__()
        self.join, self.gates, self.values = join, nn.Linear(6, 5 if has_gates_of_channels else 1), nn.Linear(6, 5)

    def compute_entries(self, x):
        """The matrix (b, 5 or 1, t, t), and the values (b, h, t, e)."""
        a, v = self.gates(x).sigmoid(), self.values(x)
        sums = a.log().cumsum(1).mT
        decays = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).exp().tril()
        return decays * (1 - a).mT.unsqueeze(2), v.mT.unsqueeze(3) if a.shape[2] > 1 else v.unsqueeze(1)

    def forward(self, x):
        a, v = self.gates(x).sigmoid(), self.values(x)
        state, rows = torch.zeros(len(x), 5), []
        for i in range(x.shape[1]):
            state = a[:, i] * state + (1 - a[:, i]) * v[:, i]
            rows.append(state)
        return self.join(rows)


VECTOR_JOINS = {
    "stacked": lambda rows: torch.stack(rows, 1),
    "stacked last": lambda rows: torch.stack(rows, -1).mT,
    "concatenated": lambda rows: torch.cat([row.unsqueeze(1) for row in rows], 1),
}


@torch.no_grad()
@pytest.mark.parametrize("join", VECTOR_JOINS)
@pytest.mark.parametrize("has_gates_of_channels", [True, False])
def test_channels_and_entries_of_a_loop_over_vectors_are_left_out(has_gates_of_channels, join):
    torch.manual_seed(3)
    model, x = nn.Sequential(Vectors(has_gates_of_channels, VECTOR_JOINS[join]), nn.Linear(5, 6)), torch.randn(B, T, 6)
    matrix, v = model[0].compute_entries(x)
    hidden = mark_entries([(len(matrix[0]), [0]), (T, QUERIES), (T, KEYS)])
    changes = [CutEdges(QUERIES, KEYS, layer=0, head=0, kind="implicit")]
    context = matrix.masked_fill(hidden, 0) @ v
    if has_gates_of_channels:
        changes.append(KnockOut(0, 3, kind="implicit"))
        context[:, 3] = 0
    context = context.squeeze(3).mT if has_gates_of_channels else context.squeeze(1)
    with intervene(model, *changes), record(model) as recording:
        assert_equal(model(x), model[1](context))
    assert not recording.missed
    assert (recording.map(0, kind="implicit").dense() - matrix).abs().max() < EQUAL


def test_a_loop_over_vectors_stays_where_there_are_gradients():
    model, x = nn.Sequential(Vectors(True, VECTOR_JOINS["stacked"]), nn.Linear(5, 6)), torch.randn(B, T, 6)
    plain = model(x)
    told = pytest.warns(UserWarning, match="was not applied: .*without gradients alone")
    with told, intervene(model, KnockOut(0, 1, kind="implicit")):
        assert torch.equal(model(x), plain)


def list_gradients(output, model, x):
    return torch.autograd.grad(output.square().sum(), [x, *model.parameters()], allow_unused=True)


def assert_same_gradients(one, other):
    for own, theirs in zip(one, other, strict=True):
        assert (own is None) == (theirs is None)
        if own is not None:
            assert_equal(own, theirs)


@pytest.mark.parametrize("form", [one for one in FORMS if one not in ("in place", "written back")])  # which have none
def test_gradients_of_a_changed_loop_are_those_of_its_matrix(form):
    model, x = build(form)
    x = x.requires_grad_()
    matrix, v = compute_entries(model, x, form)
    context = matrix.masked_fill(HIDDEN, 0) @ v * (torch.arange(H) != 1).view(H, 1, 1)
    expected = list_gradients(finish(model, context), model, x)
    changes = CutEdges(QUERIES, KEYS, layer=0, head=[0, 2], kind="implicit"), KnockOut(0, 1, kind="implicit")
    with intervene(model, *changes):
        found = list_gradients(model(x), model, x)
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("lengths", [[T], [4, 3], [2, 1, 1, 3]], ids=str)
def test_gradients_of_a_loop_in_pieces_flow_to_those_whose_state_has_them(lengths, is_detached):
    model, x = build_stateful()
    x = x.requires_grad_()
    tokens = model[1].project(model[0](x))
    rows, piece = [], torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    for query in range(T):
        entries = 0
        for part in piece[: query + 1].unique():
            own = [
                y.detach().where((piece < piece[query]).view(T, *[1] * (y.dim() - 3)), y) if is_detached else y
                for y in (tokens.q, tokens.k, tokens.v, tokens.a)
            ]
            keys = piece == part
            one = compute_matrix(type(tokens)(*own[:2], own[2], own[3], tokens.beta, tokens.u))
            entries = entries + ((one.masked_fill(HIDDEN, 0) * keys) @ own[2])[:, :, query]
        rows.append(entries)
    expected = list_gradients(finish(model, torch.stack(rows, 2)), model, x)
    model[1].is_detached = is_detached
    with intervene(model, CutEdges(QUERIES, KEYS, layer=0, head=[0, 2], kind="implicit")):
        found = run_in_pieces(model, x, lengths)
    assert_same_gradients(list_gradients(found, model, x), expected)


@torch.no_grad()
def test_a_loop_that_goes_on_from_a_copy_of_its_state_is_warned_of():
    model, x = build_stateful()

    def run():
        model(x[:, :4])
        model[1].state = model[1].state.clone()
        model(x[:, 4:])

    change = CutEdges(QUERIES, KEYS, layer=0, kind="implicit")
    with pytest.warns(UserWarning, match="A part of the output of 1 was not changed: .* a copy"), intervene(model, change):
        run()


class Given(Stateful):
    """A loop that starts from the state that it is given, and returns the one that it leaves."""

    def forward(self, x, state=None):
        self.state = state
        return super().forward(x), self.state


@pytest.mark.parametrize("copy", [torch.clone, lambda x: x.flip(0)], ids=["a copy", "its rows in another order"])
def test_a_loop_that_is_given_a_copy_of_its_state_is_changed_with_gradients(copy):
    torch.manual_seed(3)
    model, x, first = Given(lambda rows: torch.stack(rows, 2)), torch.randn(B, T, 6, requires_grad=True), 4
    rows = copy(torch.arange(B).double()).long()
    tokens = model.project(torch.cat([x[rows, :first], x[:, first:]], 1))
    context = compute_matrix(tokens).masked_fill(HIDDEN, 0) @ tokens.v
    with intervene(model, CutEdges(QUERIES, KEYS, layer=0, head=[0, 2], kind="implicit")):
        _, state = model(x[:, :first])
        found, _ = model(x[:, first:], copy(state))
    expected = context[:, :, first:].transpose(1, 2).flatten(2)
    assert_equal(found, expected)
    assert_same_gradients(list_gradients(found, model, x), list_gradients(expected, model, x))


class Resetting(Stateful):
    """A loop whose state is multiplied by 0 before some tokens, as where documents are packed."""

    def project(self, x):
        tokens = super().project(x)
        tokens.a = tokens.a * (torch.arange(T) % 3 > 0).view(T, 1)
        return tokens


def test_gradients_of_a_changed_loop_whose_state_is_reset_are_those_of_its_matrix():
    torch.manual_seed(3)
    model, x = Resetting(lambda rows: torch.stack(rows, 2)), torch.randn(B, T, 6, requires_grad=True)
    tokens = model.project(x)
    expected = (compute_matrix(tokens).masked_fill(HIDDEN, 0) @ tokens.v).transpose(1, 2).flatten(2)
    with intervene(model, CutEdges(QUERIES, KEYS, layer=0, head=[0, 2], kind="implicit")):
        found = model(x)
    assert_equal(found, expected)
    assert_same_gradients(list_gradients(found, model, x), list_gradients(expected, model, x))

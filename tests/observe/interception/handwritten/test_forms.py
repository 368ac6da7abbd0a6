"""Forms of attention written out by hand that a grammar does not have are recorded as what they compute, or are in missed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from default_dtype import use_default_dtype
from observe.interception.handwritten.handwritten_attention import (
    CAUSAL,
    MODULES,
    ORDER,
    B,
    C,
    D,
    H,
    Own,
    Separate,
    T,
    list_batched_forms,
    list_unbatched_forms,
    scores,
)
from observe.recording_checks import EQUAL, record_and_compare
from regard import Recording
from regard.observe import record
from regard.observe.interception.handwritten import detection

FORMS = {f"(t, d): {name}": (form, (T, C)) for name, form in list_unbatched_forms().items()}
FORMS |= {f"(b, h, t, d): {name}": (form, (B, T, C)) for name, form in list_batched_forms().items()}
MISSED = {f"(t, d): {name}" for name in ("loops over pairs", "a loop over keys", "multi_dot")}
JOINS = {f"(t, d): {name}" for name in ("a loop over queries", "growing prefixes", "into a buffer")}  # calls to one map
JOINS |= {"(b, h, t, d): a loop over the batch"}
STORED = {  # without a formula of q and k, with a table of which keys were picked, or with a factor of the weights
    f"(t, d): {name}"
    for name in (
        *("vecdot", "cdist", "squared distances", "cosine", "pow", "gumbel", "a mask of weights"),
        *("stack", "top k into zeros", "weights to a power", "mean"),
    )
} | {
    f"(b, h, t, d): {name}"
    for name in ("talking heads", "of the mean over heads", "two hops", "two hops of two softmaxes", "an Nyström form")
}
JOINED = {  # of the weights (..., q, k) as a whole, in the order of the calls
    "(t, d): growing prefixes": lambda w: torch.cat([row[: n + 1] for n, row in enumerate(w)]),
    "(b, h, t, d): a loop over heads": lambda w: w.transpose(0, 1),
    "(b, h, t, d): of the mean over heads": lambda w: w[:, :1],
}
OUTPUTS = {  # of the output as (..., t, d)
    "(t, d): einsum of the transposed": lambda y: y.mT,
    "(b, h, t, d): a loop over heads": lambda y: y.unflatten(-1, (H, D)).transpose(1, 2),
    "(b, h, t, d): one query, summed": lambda y: y.unsqueeze(-2),
}
OTHER_MATRICES = ("over channels", "local windows", "an Nyström form", "with keys and values alike")  # of more than tokens
ROUNDED = {"(t, d): in float32": torch.finfo(torch.float32).eps}


@pytest.fixture(autouse=True)
def default_dtype():
    """Compute in float64, also what the forms make themselves."""
    with use_default_dtype(torch.float64):
        yield


def build_model(part: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Linear(C, C), nn.ModuleDict({"own": part})).double()
    model.forward = lambda x: model[1]["own"](model[0](x))
    return model


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_recorded_as_the_weights_that_its_output_has_of_its_values(name):
    torch.manual_seed(3)
    form, shape = FORMS[name]
    part, x = Own(form), torch.randn(shape)
    recording, output = record_and_compare(build_model(part), lambda m: m(x), missing=name in MISSED)
    assert {call.name for call in recording.calls} | {call.module for call in recording.missed} == {"1.own"}
    if name not in MISSED and name.split(": ")[1] not in OTHER_MATRICES:
        output = OUTPUTS.get(name, lambda y: y)(output)
        weights = output @ torch.linalg.pinv(part.values)  # each value has more numbers than there are values
        weights = JOINED.get(name, lambda w: w)(weights)
        maps = torch.cat([call.map.dense().flatten() for call in recording.calls])
        torch.testing.assert_close(maps, weights.flatten(), rtol=0, atol=ROUNDED.get(name, EQUAL))
    assert bool(recording.notes) == (name in STORED | JOINS), recording.notes


def attend_by_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.empty(B, H, T, T, dtype=q.dtype)
    for i, row in enumerate(scores(q, k).unbind(-2)):
        weights[:, :, i] = row.softmax(-1)
    return weights @ v


def attend_causally_in_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~CAUSAL, -torch.inf).index_select(-2, ORDER).softmax(-1) @ v


MOVED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # entry by entry, on the way to the product
    "rolled and back": lambda q, k, v: scores(q, k).roll(1, -1).softmax(-1).roll(-1, -1) @ v,
    "rolled": lambda q, k, v: scores(q, k).roll(1, -1).softmax(-1) @ v.roll(1, -2),
    "flipped": lambda q, k, v: scores(q, k).flip(-2).softmax(-1) @ v,
    "gathered": lambda q, k, v: scores(q, k).softmax(-1).gather(-1, ORDER.expand(B, H, T, T)) @ v[:, :, ORDER],
    "selected": lambda q, k, v: scores(q, k).index_select(-1, ORDER).softmax(-1) @ v[:, :, ORDER],
    "taken along": lambda q, k, v: (
        torch.take_along_dim(scores(q, k), ORDER.expand(1, 1, 1, T), -1).softmax(-1) @ v[:, :, ORDER]
    ),
    "cut": lambda q, k, v: scores(q, k)[..., 1:, :3].softmax(-1) @ v[:, :, :3],
    "heads in another order": lambda q, k, v: scores(q, k)[:, [2, 0, 1]].softmax(-1) @ v[:, [2, 0, 1]],
    "padded and cut": lambda q, k, v: F.pad(scores(q, k), (1, 2), value=3.0)[..., 1:-2].softmax(-1) @ v,
    "split and joined": lambda q, k, v: torch.cat([part.softmax(-1) for part in scores(q, k).split(2, -2)], -2) @ v,
    "unbound and stacked": lambda q, k, v: torch.stack([row.softmax(-1) for row in scores(q, k).unbind(-2)], -2) @ v,
    "iterated": lambda q, k, v: torch.stack([one.softmax(-1) for one in scores(q, k)]) @ v,
    "written by rows": attend_by_rows,
    "causal, in another order": attend_causally_in_order,
    "dropped": lambda q, k, v: F.dropout(scores(q, k).flip(-2).softmax(-1), 0.0).flip(-2) @ v,
}


class DenseGraph(nn.Module):
    """Two layers whose scores of all pairs of nodes lose those without edges, as pyGAT has it."""

    def __init__(self, hide: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(C, width) for width in (C, 1, 1)) for _ in range(2))
        self.hide = hide

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        self.weights = []
        for project, sender, receiver in self.layers:
            values = project(x)
            weights = self.hide(F.leaky_relu(receiver(values) + sender(values).mT, 0.2), edges).softmax(-1)
            self.weights.append(weights.detach())
            x = weights @ values
        return x


@pytest.mark.parametrize(
    "hide",
    [lambda s, edges: torch.where(edges > 0, s, -9e15 * torch.ones_like(s)), lambda s, edges: s + edges],
    ids=["where", "added as it is"],
)
def test_layers_that_share_a_table_of_hidden_keys_are_no_routers(hide):
    model, x = DenseGraph(hide), torch.randn(T, C)
    edges = (torch.randn(T, T) + 3 * torch.eye(T) > 0).double()
    recording, _ = record_and_compare(model, lambda m: m(x, edges))
    for call, weights in zip(recording.calls, model.weights, strict=True):
        torch.testing.assert_close(call.map.dense()[0, 0], weights, rtol=0, atol=EQUAL)


def record_values(form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Recording:
    """A recording whose map times its values is the output of a form of q, k and v (b, h, t, d)."""
    x = torch.randn(B, T, C)
    with torch.no_grad():
        recording, output = record_and_compare(build_model(Own(form)), lambda m: m(x), keep="values")
    torch.testing.assert_close(recording.map(0).dense() @ recording.values(0), output, rtol=0, atol=EQUAL)
    return recording


@pytest.mark.parametrize("name", MOVED)
def test_a_formula_stays_known_where_entries_are_moved(name):
    recording = record_values(MOVED[name])
    assert recording.notes == []
    assert recording.calls[0].stored.bias is None


def change_a_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = [row.softmax(-1) for row in scores(q, k).unbind(-2)]
    rows[3] = rows[3].flip(-1)
    return torch.stack(rows, -2) @ v


def choose_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    largest, where = scores(q, k).topk(3)
    return torch.zeros(B, H, T, T, dtype=q.dtype).scatter(-1, where, largest.softmax(-1)) @ v


def add_a_term(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    term, s = torch.linspace(0, 9, D * T).sin().view(D, T), scores(q, k)
    return (s + (q @ term).flatten(2).reshape_as(s)).softmax(-1) @ v


class BiasOfPositions(nn.Module):
    """Scores with a bias of each head added, as RelPosBias of timm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, T, T))

    def forward(self, s: Tensor) -> Tensor:
        return s + self.table


NOTED = {  # forms of q, k and v, and what the only note says
    "a row that was changed after it was moved": (change_a_row, "its weights are stored as they are"),
    "top-k attention": (choose_keys, "it is top-k attention"),
    "a term in the shape of the scores": (add_a_term, "is stored as it is, for each query and key"),
    "a bias in a module of its own": (
        (lambda q, k, v, add: add(scores(q, k)).softmax(-1) @ v, BiasOfPositions()),
        "made by BiasOf",
    ),
    "a factor of each query": (
        lambda q, k, v: (scores(q, k).softmax(-1) * q.mean(-1, keepdim=True).sigmoid()) @ v,
        "multiplied by a gate",
    ),
    "a boolean mask that is added": (lambda q, k, v: (scores(q, k) + CAUSAL).softmax(-1) @ v, "it adds a boolean mask"),
    "a number that larger scores reach": (
        lambda q, k, v: (50_000 * scores(q, k)).masked_fill(~CAUSAL, -5_000).softmax(-1) @ v,
        "it fills scores with -5000, which does not hide a key beside scores up to",
    ),
    "a bound that scores reach": (lambda q, k, v: scores(q, k).clamp(-0.1, 0.1).softmax(-1) @ v, "its weights are stored"),
    "exponentials of two logarithms": (
        lambda q, k, v: ((w := (scores(q, k).log_softmax(-1) + scores(k, q)).exp()) @ v) / w.sum(-1, keepdim=True),
        "in the map they are divided by their sums",
    ),
}


@pytest.mark.parametrize("name", NOTED)
def test_a_map_that_has_no_formula_alone_has_a_note_that_says_why(name):
    form, why = NOTED[name]
    torch.manual_seed(3)
    part, x = Own(form), torch.randn(B, T, C)
    with torch.no_grad():
        recording, output = record_and_compare(build_model(part), lambda m: m(x))
    if name == "a factor of each query":
        assert "multiplied by a gate" in recording.notes[0]
        return
    torch.testing.assert_close(recording.map(0).dense() @ part.values, output, rtol=0, atol=EQUAL)
    (note,) = recording.notes
    assert why in note


def divide(s: Tensor, most: Tensor, extra: bool) -> Tensor:
    e = (s - most).exp()
    return e / (e.sum(-1, keepdim=True) + (-most).exp() * extra) if extra else e / e.sum(-1, keepdim=True)


def hide_later(s: Tensor) -> Tensor:
    return s.masked_fill(~CAUSAL, -torch.inf)


BOUNDED: dict[str, Callable[[Tensor], Tensor]] = {  # weights of scores
    "clamped": lambda s: hide_later(s.clamp(-50, 50)).softmax(-1),
    "clipped after the mask": lambda s: hide_later(s).clip(max=50).softmax(-1),
    "less the largest, 0 at least": lambda s: divide(hide_later(s), hide_later(s).amax(-1, keepdim=True).clamp(min=0), False),
    "softmax1": lambda s: divide(hide_later(s), hide_later(s).amax(-1, keepdim=True), True),
    "softmax1, 0 at least": lambda s: divide(hide_later(s), hide_later(s).amax(-1, keepdim=True).clamp_min(0), True),
    "a number that does not hide keys beside larger scores": lambda s: (50_000 * s - 5_000.0 * ~CAUSAL).softmax(-1),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_that_no_score_reaches_and_one_more_in_the_sums_leave_the_formula(name):
    torch.manual_seed(3)
    part, x = Own(lambda q, k, v: BOUNDED[name](scores(q, k)) @ v), torch.randn(B, T, C)
    recording, output = record_and_compare(build_model(part), lambda m: m(x))
    assert not recording.notes
    torch.testing.assert_close(recording.map(0).dense() @ part.values, output, rtol=0, atol=EQUAL)


@pytest.mark.parametrize("size", [1e7, 1e31])
def test_a_number_that_scores_can_reach_hides_no_key_however_large_both_are(size):
    """Only a row that is not compared with the model's has scores below what is filled in."""
    row, count = 5, 16  # rows 0, 4, 8, 12 and 15 are compared
    q, k = torch.ones(count, 2), -torch.ones(count, 2)
    q[row] = size
    hidden = torch.ones(count, count).triu(1).bool()

    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ((x * q) @ (x * k).mT).masked_fill(hidden, -size).softmax(-1) @ x

    recording, _ = record_and_compare(nn.Sequential(Filled()), lambda m: m(torch.ones(count, 2)))
    weights = recording.map(0).dense()[0, 0]
    torch.testing.assert_close(weights[row, row + 1 :].sum(), torch.tensor(1.0), rtol=0, atol=EQUAL)
    assert "it fills scores with" in recording.notes[0]


def test_rows_of_nan_where_a_query_sees_no_key_do_not_hide_the_formula():
    hidden = ~CAUSAL.tril(-1)  # the first query sees no key, and has NaN
    part, x = Own(lambda q, k, v: scores(q, k).masked_fill(hidden, -torch.inf).softmax(-1) @ v), torch.randn(B, T, C)
    recording, output = record_and_compare(build_model(part), lambda m: m(x))
    assert output[:, :, 0].isnan().all()
    assert not recording.notes
    context = recording.calls[0].map.dense() @ part.values
    torch.testing.assert_close(context[:, :, 1:], output[:, :, 1:], rtol=0, atol=EQUAL)


def add(s: Tensor, hidden: Tensor, low: float) -> Tensor:
    return s + torch.zeros(hidden.shape, dtype=s.dtype).masked_fill(hidden, low)


PADDED = (torch.arange(T) < torch.tensor([2, 0])[:, None]).view(B, 1, 1, T)  # on the left
BLIND: dict[str, Callable[[Tensor, float], Tensor]] = {  # of the scores and the smallest number
    "filled, then added, as GPT-Neo": lambda s, low: add(torch.where(CAUSAL, s, torch.tensor(low, dtype=s.dtype)), PADDED, low),
    "added, then filled": lambda s, low: add(s, PADDED, low).masked_fill(~CAUSAL, low),
    "added twice": lambda s, low: add(add(s, ~CAUSAL, low), PADDED, low),
    "filled twice": lambda s, low: s.masked_fill(~CAUSAL, low).masked_fill(PADDED, low),
    "filled, then added -inf": lambda s, low: add(s.masked_fill(~CAUSAL, low), PADDED, -torch.inf),
}


@pytest.mark.parametrize("form", BLIND.values(), ids=BLIND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_from_which_several_masks_hide_all_keys_has_the_weights_of_the_model(form, dtype):
    weights = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights.append(form(scores(q, k), torch.finfo(q.dtype).min).softmax(-1))
        return weights[-1] @ v

    with use_default_dtype(torch.float32):
        torch.manual_seed(7)
        model, x = build_model(Own(attend)).to(dtype), torch.randn(B, T, C, dtype=dtype)
        recording, _ = record_and_compare(model, lambda m: m(x))
    tolerance = EQUAL if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(recording.map(0).dense(), weights[-1].nan_to_num(), rtol=0, atol=tolerance)
    assert not recording.notes


class Softmaxes(TorchFunctionMode):
    """Collects the results of every softmax."""

    def __init__(self) -> None:
        self.results: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "softmax":
            self.results.append(result.detach())
        return result


@pytest.mark.parametrize("part", MODULES, ids=lambda part: part.__name__)
def test_every_module_with_scores_of_another_kind_is_recorded_as_its_softmax(part):
    model, x = build_model(part()), torch.randn(B, T, C)
    recording, _ = record_and_compare(model, lambda m: m(x))
    with Softmaxes() as softmaxes:
        model(x)
    assert len(recording.calls) in (1, 2)
    assert set(recording.names) == {"1.own"}
    for call in recording.calls:
        entries = call.map.dense().flatten().sort().values  # in whatever order the module has its axes
        same = [result for result in softmaxes.results if result.numel() == entries.numel()]
        assert any((result.double().flatten().sort().values - entries).abs().max() < 1e-6 for result in same)


def test_the_names_of_modules_are_those_that_multiply_with_the_values():
    recording, _ = record_and_compare(build_model(Separate()), lambda m: m(torch.ones(B, T, C)))
    assert recording.names == ["1.own"]


def test_a_bias_that_layers_multiply_by_numbers_of_their_own_keeps_the_formula():
    bias = -torch.arange(T).flip(0).expand(T, T).clone()

    class Sloped(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return ((x @ x.mT + bias) * self.factor).softmax(-1) @ x

    x = torch.randn(2, T, D)
    recording, _ = record_and_compare(nn.Sequential(*map(Sloped, (1.0, 0.5, 0.25))), lambda m: m(x))
    assert not recording.notes


SINKS = torch.tensor([0.3, -1.1, 2.0])


@pytest.mark.parametrize("shift", [False, True], ids=["as they are", "after the largest was subtracted"])
def test_a_column_beside_the_scores_is_a_sink_of_each_head(shift):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        joined = torch.cat(tensors=[scores(q, k), SINKS.to(q).view(1, H, 1, 1).expand(B, H, T, 1)], dim=-1)
        joined = joined - joined.max(-1, keepdim=True).values if shift else joined
        return joined.softmax(-1)[..., :-1] @ v

    recording = record_values(attend)
    torch.testing.assert_close(recording.calls[0].stored.sinks, SINKS.double(), rtol=0, atol=EQUAL)


def test_weights_with_a_sink_that_differs_from_query_to_query_are_stored():
    part = Own(lambda q, k, v: torch.cat([q.sum(-1, keepdim=True), scores(q, k)], -1).softmax(-1)[..., 1:] @ v)
    x = torch.randn(B, T, C)
    recording, output = record_and_compare(build_model(part), lambda m: m(x))
    torch.testing.assert_close(recording.map(0, kind="implicit").dense() @ part.values, output, rtol=0, atol=EQUAL)
    assert "differs from query to query" in recording.notes[0]


def test_dropout_is_undone_where_entries_are_moved():
    x = torch.randn(B, T, C)
    recording, _ = record_and_compare(
        Own(lambda q, k, v: F.dropout(scores(q, k).softmax(-1), 0.5).flip(-2) @ v).double(), lambda m: m(x)
    )
    torch.testing.assert_close(recording.map(0).dense().sum(-1), torch.ones(B, H, T), rtol=0, atol=EQUAL)
    assert recording.notes == []


RAW = {
    "logarithms of weights": lambda q, k, v: (q @ k.mT).softmax(-1).log1p() @ v,
    "cosines of scores": lambda q, k, v: (q @ k.mT).cos() @ v,
    "scores in another order": lambda q, k, v: (q @ k.mT).flip(-1) @ v,
}


@pytest.mark.parametrize("form", RAW.values(), ids=RAW)
def test_scores_that_are_multiplied_with_values_without_a_softmax_are_missed_in_a_module_called_attention(form):
    model, x = nn.ModuleDict({"attn": Own(form)}), torch.randn(B, T, C)
    model.forward = lambda x: model["attn"](x)
    recording, _ = record_and_compare(model, lambda m: m(x), missing=True)
    assert not recording.runs
    assert [(call.kernel, call.module) for call in recording.missed] == [("Own", "attn")]


class WeightedValues(nn.Module):
    """Attention of one head whose weights and values are multiplied entry by entry, and summed by a function."""

    def __init__(self, add: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.project, self.add = nn.Linear(C, 3 * C), add

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        self.weights = (q @ k.mT).softmax(-1).detach()
        return self.add((q @ k.mT).softmax(-1).unsqueeze(-1) * v.unsqueeze(1))


ADDED = {
    "as they are": lambda x: x.sum(2),
    "in another order": lambda x: x.permute(3, 0, 2, 1).contiguous().sum(2).permute(1, 2, 0),
    "with one more axis": lambda x: x[..., None].sum(2),
}
CHANGED = {
    "some keys": lambda x: x[:, :, 1:].sum(2),
    "query by query": lambda x: torch.stack([x[:, n].sum(1) for n in range(T)], 1),
    "other queries": lambda x: x.roll(1, 1).sum(2),
    "a function of entries": lambda x: x.relu().sum(2),
}


@pytest.mark.parametrize("add", ADDED.values(), ids=ADDED)
def test_weighted_values_may_get_another_layout_before_their_sum(add):
    module = WeightedValues(add)
    recording, _ = record_and_compare(nn.Sequential(module), lambda m: m(torch.randn(B, T, C)))
    torch.testing.assert_close(recording.map(0).dense()[:, 0], module.weights, rtol=0, atol=EQUAL)


@pytest.mark.parametrize("add", CHANGED.values(), ids=CHANGED)
def test_weighted_values_that_are_changed_before_their_sum_are_missed(add):
    model = nn.Sequential(WeightedValues(add))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)), missing=True)
    assert {call.module for call in recording.missed} == {"0"}
    assert not recording.calls


class Tagged(Tensor):
    """A subclass of tensors."""


class Measured(nn.Module):
    """Attention whose weights are measured on the way by a function that takes keywords alone."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.mT).softmax(-1)
        torch.linalg.vector_norm(x=weights)
        return weights @ x


@pytest.mark.parametrize("kind", [Tensor, Tagged])
def test_weights_of_a_subclass_of_tensor_and_those_that_a_function_measures_are_followed(kind):
    recording, _ = record_and_compare(Measured(), lambda m: m(torch.randn(B, T, C).as_subclass(kind)))
    assert len(recording.calls) == 1


def test_attention_by_hand_in_another_model_is_not_recorded():
    other, model, x = Measured(), nn.Linear(C, C), torch.randn(B, T, C)
    recording, _ = record_and_compare(model, lambda m: (m(x), other(x)))
    assert not recording.calls


INTEGERS = torch.arange(12).view(4, 3)


@pytest.mark.parametrize(
    "look_up",
    [lambda: torch.embedding(INTEGERS, torch.tensor(2)), lambda: F.embedding(torch.tensor([2, 0]), weight=INTEGERS)],
)
def test_a_table_that_is_read_in_an_unusual_way_stops_no_model(look_up):
    class Lookup(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + look_up().sum()

    record_and_compare(Lookup(), lambda m: m(torch.ones(3)))


def test_numbers_of_several_tensors_that_are_joined_and_expanded_do_not_stop_the_model():
    class Matches(nn.Module):
        """Scores of two pictures' points, beside numbers that were made with them, as in SuperGlue's optimal transport."""

        def forward(self, x: Tensor) -> Tensor:
            s = x @ x.mT
            count = (T * x.new_tensor(1)).to(s)
            margin = torch.cat([(-count.log()).expand(T), count.log()[None]])[None].expand(B, -1)
            return s.logsumexp(-1) + torch.zeros_like(margin)[:, :T]

    record_and_compare(nn.Sequential(Matches()), lambda m: m(torch.randn(B, T, D)))


def test_a_failure_while_scores_are_followed_is_reported_and_does_not_stop_the_model(monkeypatch):
    model, x = nn.Sequential(Own(MOVED["rolled"])), torch.randn(B, T, C)
    expected = model(x)
    monkeypatch.setattr(detection, "settle_all", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="not recorded"), record(model) as recording:
        assert torch.equal(model(x), expected)
    (reason,) = {call.reason for call in recording.missed}
    assert "scores were followed until an operation could not be: its arguments could not be read (ZeroDivisionError" in reason

"""Every form of attention written out by hand is recorded as what it computes, or is in missed by the name of its module."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from default_dtype import use_default_dtype
from observe.interception.handwritten import modules_without_attention
from observe.interception.handwritten.handwritten_attention import (
    CAUSAL,
    MODULES,
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
from regard.observe import record

FORMS = {f"(t, d): {name}": (form, (T, C)) for name, form in list_unbatched_forms().items()}
FORMS |= {f"(b, h, t, d): {name}": (form, (B, T, C)) for name, form in list_batched_forms().items()}
LOOPS_OVER_KEYS = ["loops over pairs", "a loop over keys", "a product with ones", "multi_dot"]
SCRIPTED = ["a scripted product", "scripted as a whole"]
MISSED = {f"(t, d): {name}" for name in (*LOOPS_OVER_KEYS, *SCRIPTED)}
STORED = {  # without a formula of q and k, with a table of which keys were picked, or with a factor of the weights
    f"(t, d): {name}"
    for name in (
        *("vecdot", "cdist", "squared distances", "norm", "cosine", "pow", "relu before", "sparsemax", "gumbel"),
        *("a mask of weights", "rolls", "one query", "a scripted softmax", "a scripted mask", "stack", "top k into zeros"),
        *("weights to a power", "sort", "top k", "mean"),
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
    "(b, h, t, d): bmm": lambda y: y.unflatten(0, (B, H)),
    "(b, h, t, d): a loop over heads": lambda y: y.unflatten(-1, (H, D)).transpose(1, 2),
    "(b, h, t, d): one query, summed": lambda y: y.unsqueeze(-2),
}
OTHER_MATRICES = {  # not of tokens and their values (..., q, k) alone
    *("over channels", "local windows", "an Nyström form", "neighbours", "rolls", "with keys and values alike"),
}


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
    assert {call.name for call in recording.calls} | {one.module for one in recording.missed} == {"1.own"}
    if name not in MISSED and name.split(": ")[1] not in OTHER_MATRICES:
        output = OUTPUTS.get(name, lambda y: y)(output)
        weights = output @ torch.linalg.pinv(part.values)  # each value has more numbers than there are values
        weights = JOINED.get(name, lambda w: w)(weights)
        found = torch.cat([call.map.dense().flatten() for call in recording.calls])
        torch.testing.assert_close(found, weights.flatten(), rtol=0, atol=EQUAL)
    assert bool(recording.notes) == (name in STORED), recording.notes


def test_rows_of_nan_where_a_query_sees_no_key_do_not_hide_the_formula():
    hidden = ~CAUSAL.tril(-1)  # the first query sees no key, and has NaN
    part, x = Own(lambda q, k, v: scores(q, k).masked_fill(hidden, -torch.inf).softmax(-1) @ v), torch.randn(B, T, C)
    model = build_model(part)
    with record(model) as recording:
        output = model(x)
    assert output[:, :, 0].isnan().all()
    assert not recording.notes
    found = recording.calls[0].map.dense() @ part.values
    torch.testing.assert_close(found[:, :, 1:], output[:, :, 1:], rtol=0, atol=EQUAL)


def test_a_number_that_is_added_beside_larger_scores_hides_no_key():
    hidden = ~CAUSAL

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (50_000 * scores(q, k) - 5_000.0 * hidden).softmax(-1) @ v

    torch.manual_seed(3)
    part, x = Own(attend), torch.randn(B, T, C)
    recording, output = record_and_compare(build_model(part), lambda m: m(x))
    found = recording.map(0).dense()
    assert found[:, :, hidden].max() > 0.5  # where a score is larger by more than what was added
    torch.testing.assert_close(found @ part.values, output, rtol=0, atol=EQUAL)
    assert not recording.notes


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


def test_exponentials_of_a_log_softmax_are_divided_by_their_sums_with_a_note():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (scores(q, k).log_softmax(-1) + scores(k, q)).exp()
        return (weights @ v) / weights.sum(-1, keepdim=True)

    part, x = Own(attend), torch.randn(B, T, C)
    recording, output = record_and_compare(build_model(part), lambda m: m(x))
    torch.testing.assert_close(recording.map(0).dense() @ part.values, output, rtol=0, atol=EQUAL)
    assert "in the map they are divided by their sums" in recording.notes[0]


def test_a_number_that_is_filled_in_beside_larger_negative_scores_is_noted_as_hiding_no_key():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (50_000 * scores(q, k)).masked_fill(~CAUSAL, -5_000).softmax(-1) @ v

    torch.manual_seed(3)
    part, x = Own(attend), torch.randn(B, T, C)
    recording, output = record_and_compare(build_model(part), lambda m: m(x))
    torch.testing.assert_close(recording.map(0).dense() @ part.values, output, rtol=0, atol=EQUAL)
    assert "it fills scores with -5000, which does not hide a key beside scores up to" in recording.notes[0]


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
    with Softmaxes() as said:
        model(x)
    assert len(recording.calls) in (1, 2)
    for call in recording.calls:
        found = call.map.dense().flatten().sort().values  # in whatever order the module has its axes
        same = [one for one in said.results if one.numel() == found.numel()]
        assert any((one.double().flatten().sort().values - found).abs().max() < 1e-6 for one in same)


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum of a list": lambda q, k: torch.einsum("bqd,bkd->bqk", [q, k]) / 3,
    "addcdiv to a mask": lambda q, k: torch.addcdiv(MASK, q @ k.mT, torch.tensor(3.0)),
    "a product added in place": lambda q, k: (q @ k.mT).addcmul_(MASK, torch.tensor(2.0), value=0.5),
    "addcmul to a mask": lambda q, k: torch.addcmul(MASK, torch.tensor(0.3), q @ k.mT, value=0.5),
    "a product added": lambda q, k: torch.addcmul(q @ k.mT, MASK, torch.tensor(2.0)),
    "a quotient added": lambda q, k: torch.addcdiv(q @ k.mT, MASK, torch.tensor(0.5)),
    "a quotient by a number of lower precision": lambda q, k: q @ k.mT / torch.tensor(3.0, dtype=torch.float32),
}
MASK = torch.zeros(T, T, dtype=torch.float64).masked_fill(torch.ones(T, T).triu(1).bool(), -1e9)


class Stepwise(nn.Module):
    """Scores that one function scales and masks."""

    def __init__(self, score: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.score, self.weights = nn.Linear(C, C), nn.Linear(C, C), score, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.score(self.q(x), self.k(x)).softmax(-1)
        self.weights = weights.detach()
        return weights @ x


@pytest.mark.parametrize("score", STEPS)
def test_steps_that_one_function_makes_of_scores_are_part_of_the_formula(score):
    part = Stepwise(STEPS[score])
    with torch.no_grad():
        recording, _ = record_and_compare(nn.Sequential(part, nn.Identity()), lambda m: m(torch.randn(B, T, C)))
    assert not recording.notes
    torch.testing.assert_close(recording.map(0).dense().squeeze(1), part.weights, rtol=0, atol=EQUAL)


def test_a_join_by_keyword_is_the_same_as_by_place():
    torch.manual_seed(3)
    recordings = []
    for join in (lambda *parts: torch.cat(parts, -1), lambda *parts: torch.cat(tensors=parts, dim=-1)):
        part = Stepwise(lambda q, k, join=join: join(q @ k.mT, torch.zeros(B, T, 1)))
        part.forward = lambda x, part=part: part.score(part.q(x), part.k(x)).softmax(-1)[..., :-1] @ x
        recordings.append(record_and_compare(nn.Sequential(part, nn.Identity()), lambda m: m(torch.randn(B, T, C)))[0])
    assert [[(call.kind, call.map.shape) for call in one.calls] for one in recordings] == [[("self", (B, 1, T, T))]] * 2
    assert recordings[0].notes == recordings[1].notes


NUMPY_NAMES = {
    "softmax": lambda scores, x: scores.softmax(axis=-1) @ x,
    "softmax over queries": lambda scores, x: scores.mT.softmax(axis=-2).mT @ x,
    "quotient": lambda scores, x: (scores.exp() / scores.exp().sum(axis=-1, keepdims=True)) @ x,
    "sum": lambda scores, x: (scores.softmax(-1)[..., None] * x[:, None]).sum(axis=2),
}


@pytest.mark.parametrize("attend", NUMPY_NAMES)
def test_arguments_may_have_the_names_that_numpy_has(attend):
    part = Stepwise(lambda q, k: q @ k.mT)
    part.forward = lambda x: NUMPY_NAMES[attend](part.score(part.q(x), part.k(x)), x)
    recording, _ = record_and_compare(nn.Sequential(part, nn.Identity()), lambda m: m(torch.randn(B, T, C)))
    assert not recording.notes
    assert [(call.kind, call.map.shape) for call in recording.calls] == [("self", (B, 1, T, T))]


class BothDirections(nn.Module):
    """Scores that are the same from a token to another and back."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).mT
        self.weights = (scores + scores.mT).softmax(-1)
        return self.weights @ x


def test_the_names_of_modules_are_those_that_multiply_with_the_values():
    recording, _ = record_and_compare(build_model(Separate()), lambda m: m(torch.ones(B, T, C)))
    assert recording.names == ["1.own"]


def test_scores_and_their_transpose_are_added_as_they_are():
    own = BothDirections()
    recording, _ = record_and_compare(build_model(own), lambda m: m(torch.randn(B, T, C)))
    assert (recording.map(0).dense()[:, 0] - own.weights).abs().max() < EQUAL


@pytest.mark.parametrize("name", modules_without_attention.list_modules())
def test_softmaxes_and_products_that_are_no_attention_are_not_recorded(name):
    model = nn.Sequential(
        nn.Linear(modules_without_attention.C, modules_without_attention.C),
        modules_without_attention.list_modules()[name],
    )
    x = torch.randn(modules_without_attention.B, modules_without_attention.T, modules_without_attention.C)
    for _ in range(2):
        recording, _ = record_and_compare(model, lambda m: m(x))
        assert len(recording.calls) == (name == "Rotary")  # whose kernel is recorded


class GroupsFirst(nn.Module):
    """Four heads of queries share two of keys, with the axis of groups before that of heads in every product."""

    def __init__(self):
        super().__init__()
        self.query_heads = 4
        self.to_q, self.to_k = nn.Linear(C, 4 * 3), nn.Linear(C, 2 * 3)

    def split(self, x):
        return self.to_q(x).unflatten(-1, (2, 2, 3)).permute(0, 3, 2, 1, 4), self.to_k(x).unflatten(-1, (2, 3)).transpose(1, 2)

    def forward(self, x):
        q, k = self.split(x)  # (b, g, h, q, d) and (b, h, k, d)
        scores = torch.einsum("bghqd,bhkd->bghqk", q, k) / 3**0.5
        return torch.einsum("bghqk,bhkd->bqhgd", scores.softmax(-1), k).flatten(2)


def test_heads_that_share_keys_are_heads_and_no_batch_if_groups_come_first():
    torch.manual_seed(3)
    part, x = GroupsFirst(), torch.randn(B, T, C)
    model = build_model(part)
    recording, _ = record_and_compare(model, lambda m: m(x))
    q, k = part.split(model[0](x))
    weights = (q.transpose(1, 2).flatten(1, 2) @ k.repeat_interleave(2, 1).mT / 3**0.5).softmax(-1)
    (call,) = recording.calls
    torch.testing.assert_close(call.map.dense(), weights.detach(), rtol=0, atol=EQUAL)


class Grouped(nn.Module):
    """Heads in groups that share keys, in an axis behind that of the groups; no attribute states a number of heads."""

    def __init__(self, groups: int, of: int) -> None:
        super().__init__()
        self.shape = groups, of
        self.q, self.k = nn.Linear(C, groups * of * 3), nn.Linear(C, groups * 3)
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (*self.shape, 3)).permute(0, 2, 3, 1, 4)
        k = self.k(x).unflatten(-1, (-1, 3)).transpose(1, 2)[:, :, None]
        weights = (q @ k.mT / 3**0.5).softmax(-1)
        self.weights = weights.flatten(1, 2).detach()
        return (weights @ k).flatten(1, 2).transpose(1, 2).flatten(2)


@given(st.integers(1, 3), st.integers(2, 3), st.integers(2, 3), st.integers(1, 5))
def test_groups_before_their_heads_are_heads_and_no_batch(rows, groups, of, t):
    part = Grouped(groups, of)
    recording, _ = record_and_compare(nn.Sequential(part, nn.Identity()), lambda m: m(torch.randn(rows, t, C)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)


class HeadsFirst(nn.Module):
    """Heads in the axis before that of the batch."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.count, self.q, self.k = heads, nn.Linear(C, heads * 3), nn.Linear(C, heads * 3)
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (part(x).unflatten(-1, (self.count, 3)).permute(2, 0, 1, 3) for part in (self.q, self.k))
        weights = (q @ k.mT / 3**0.5).softmax(-1)
        self.weights = weights.transpose(0, 1).detach()
        return (weights @ k).permute(1, 2, 0, 3).flatten(2)


@pytest.mark.parametrize(("rows", "heads"), [(2, 3), (3, 2), (4, 2)])
def test_heads_before_the_batch_are_heads_where_the_input_tells_their_sizes_apart(rows, heads):
    part = HeadsFirst(heads)
    recording, _ = record_and_compare(nn.Sequential(part, nn.Identity()), lambda m: m(torch.randn(rows, 5, C)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)


class Plane(nn.Module):
    """Queries and keys that are patches of a picture, in two axes each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.weights = nn.Linear(C, 12), nn.Linear(C, 12), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        b = len(x)
        q, k = (part(x).view(b, 2, 5, 3, 4).permute(0, 3, 1, 2, 4) for part in (self.q, self.k))
        weights = torch.einsum("bhxyd,bhijd->bhxyij", q, k).flatten(-2).softmax(-1)
        self.weights = weights.flatten(2, 3).detach()
        return torch.einsum("bhxyij,bhijd->bhxyd", weights.view(b, 3, 2, 5, 2, 5), k).flatten(1)


@pytest.mark.parametrize("rows", [1, 2])
def test_queries_in_two_axes_are_rows_of_one_map(rows):
    part = Plane()
    recording, _ = record_and_compare(nn.Sequential(part, nn.Identity()), lambda m: m(torch.randn(rows, 10, C)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)


CONVERSIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to": lambda weights, values: weights.to(values.dtype),
    "type_as": lambda weights, values: weights.type_as(values),
    "complex": lambda weights, values: torch.complex(weights, torch.zeros_like(weights)),
    "a product": lambda weights, values: weights * torch.exp(1j * torch.ones(T)),
}

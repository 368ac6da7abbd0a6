"""Layers that repeat an earlier one, in a recording or in one before, are recorded as they are where each layer is followed."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from default_dtype import use_default_dtype
from observe.interception.handwritten.handwritten_attention import C, H, Own
from observe.interception.handwritten.test_forms import FORMS
from observe.recording_checks import are_equal
from regard.observe import Recording, record
from regard.observe.interception.repeated import kept_forms, layer_steps, repeated_layers
from regard.observe.interception.repeated.kept_forms import KEPT_FORMS
from regard.observe.interception.thread_state import InterceptionPause
from run_limits import limit_examples

pytestmark = pytest.mark.filterwarnings("ignore:not recorded")


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Compute in float64."""
    with use_default_dtype(torch.float64):
        yield


class Stack(nn.Module):
    """Layers of the same input."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers).double()

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def record_once(model: nn.Module, x: Tensor, is_followed: bool = False, **options: object) -> tuple[Recording, object, int]:
    """A recording, its output, and how many modules were repeated in it: none where each layer is followed."""
    repeated, repeat = [], repeated_layers.RepeatedLayers.repeat
    with pytest.MonkeyPatch.context() as patch:
        if is_followed:
            patch.setattr(layer_steps, "MOST_STEPS", 0)
            patch.setattr(KEPT_FORMS, "modules", {})
            patch.setattr(repeated_layers.RepeatedLayers, "makes_no_scores", lambda *_: False)
        patch.setattr(repeated_layers.RepeatedLayers, "repeat", lambda *call: repeated.append(repeat(*call)) or repeated[-1])
        torch.manual_seed(7)
        with record(model, **options) as recording:
            output = model(x)
    return recording, output, sum(repeated)


def describe(call) -> tuple[object, ...]:
    return call.name, call.kind, call.map.shape, repr(call.map), call.step


def compare_recordings(recording: Recording, followed: Recording) -> None:
    """A recording is the same as one for which each layer was followed."""
    assert recording.missed == followed.missed
    assert recording.notes == followed.notes
    assert [*map(describe, recording.calls)] == [*map(describe, followed.calls)]
    for call, other in zip(recording.calls, followed.calls, strict=True):
        assert are_equal(call.map.dense(), other.map.dense())
        assert are_equal(*(getattr(one.stored, "v", None) for one in (call, other)))


def record_twice(model: nn.Module, x: Tensor, **options: object) -> tuple[Recording, int, int]:
    """A recording, and how many modules it and one after it repeated; both are the same as where each layer is followed."""
    followed, expected, _ = record_once(model, x, is_followed=True, **options)
    counts = []
    for _ in range(2):
        recording, output, count = record_once(model, x, **options)
        assert are_equal(output, expected)
        compare_recordings(recording, followed)
        counts.append(count)
    return recording, *counts


@pytest.mark.parametrize("name", FORMS)
def test_layers_of_each_form_are_recorded_as_those_that_are_followed(name):
    torch.manual_seed(3)
    form, shape = FORMS[name]
    _, before, after = record_twice(Stack([Own(form) for _ in range(2)]), torch.randn(shape))
    assert after in (before, before + 1)


@settings(max_examples=limit_examples(10))
@given(st.lists(st.sampled_from(sorted(FORMS)), min_size=2, max_size=5), st.integers(0, 99))
def test_layers_of_different_forms_are_recorded_as_those_that_are_followed(names, seed):
    torch.manual_seed(seed)
    dims = len(FORMS[names[0]][1])
    names = [name for name in names if len(FORMS[name][1]) == dims]
    layers = [Own(FORMS[name][0]) for name in names for _ in range(2)]
    with torch.no_grad():
        record_twice(Stack(layers), torch.randn(FORMS[names[0]][1]), keep="values")


class Layer(nn.Module):
    """Causal attention with a switch for each way in which one layer may differ from another."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.qkv, self.way, self.held = nn.Linear(C, 3 * C), way, None
        self.register_buffer("mask", torch.ones(99, 99).triu(1 if way != "mask" else 2).bool())
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, H, -1).transpose(1, 2) for y in self.qkv(x).split(c, -1))
        if self.way == "queries":
            q = q.roll(1, 2)
        scores = (q @ k.mT * (0.3 if self.way == "scale" else 0.5)).masked_fill(self.mask[:t, :t], -torch.inf)
        if self.way == "in place":
            scores[..., 1, 0] += 1
        if self.way == "by numpy":  # which no function of torch shows
            scores.detach().numpy()[..., 0] += 1
        if self.way == "rectified":
            F.relu(scores[:, :, 3:4], inplace=True)
        weights = (scores / self.temperature if self.way == "temperature" else scores).softmax(-1)
        if self.way == "exchanged":
            k, v = v, k
        if self.way == "dropped":
            weights = weights * (torch.arange(t) % 2)
        if self.way == "vmap":
            v = torch.vmap(lambda one: one * 2)(v)
        y = weights @ v
        if self.way == "twice":
            y = y + weights @ k
        if self.way == "in a pause":
            with BaseTorchFunctionMode(), InterceptionPause():
                y = y + weights @ k
        if self.way == "held":
            self.held = weights
        if self.way == "error":
            raise ValueError("this layer fails")
        y = y.transpose(1, 2).reshape(b, t, c)
        return (y, weights) if self.way == "returned" else y


WAYS = [
    *("mask", "temperature", "queries", "scale", "in place", "by numpy", "rectified", "exchanged", "dropped", "vmap", "twice"),
    *("in a pause", "held", "returned"),
]


@pytest.mark.parametrize(("way", "place"), [(way, n % 3) for n, way in enumerate(WAYS)])
def test_a_layer_that_differs_is_followed(way, place):
    torch.manual_seed(1)
    layers = [Layer() for _ in range(4)]
    layers[place] = Layer(way)
    with torch.no_grad():
        record_twice(Stack(layers), torch.randn(2, 33, C), keep="values")


def test_equal_layers_and_layers_in_turn_are_repeated_and_none_is_followed_in_a_later_recording():
    x = torch.randn(2, 5, C)
    assert record_twice(Stack([Layer() for _ in range(4)]), x)[1:] == (3, 4)
    assert record_twice(Stack([Layer("scale" if n % 2 else "") for n in range(6)]), x)[1:] == (4, 6)
    assert record_twice(Stack([Layer("rectified") for _ in range(3)]), torch.randn(1, 33, C))[1] == 0


def test_masks_of_other_bits_are_inferred_again_also_in_a_row_that_is_not_sampled():
    layers = [Layer() for _ in range(3)]
    layers[1].mask[3, 1] = True
    recording, repeated, _ = record_twice(Stack(layers), torch.randn(1, 33, C))
    assert repeated == 1
    assert recording.map(1).dense()[0, 0, 3, 1] == 0 != recording.map(2).dense()[0, 0, 3, 1]


class Held(nn.Module):
    """Attention of a form with a tensor that the layer holds."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], held: Tensor) -> None:
        super().__init__()
        self.qk, self.form, self.held = nn.Linear(C, 2 * C), form, held

    def forward(self, x: Tensor) -> Tensor:
        return self.form(*self.qk(x).chunk(2, -1), x, self.held)


def change_entry(x: Tensor, amount: float) -> Tensor:
    return x.index_put((torch.tensor(3), torch.tensor(4)), x.new_tensor(amount))


ZEROS, ONES = torch.zeros(33, 33).double(), torch.ones(33, 33).double()
HELD = {  # form of q, k, x and what is held, and what two layers hold
    "values": (
        lambda q, k, x, held: (q @ k.mT).softmax(-1) @ held,
        torch.randn(33, C).double(),
        torch.randn(2, 33, C).double()[0],
    ),
    "clamp": (lambda q, k, x, held: (q @ k.mT - held).clamp(max=50).softmax(-1) @ x, ZEROS, change_entry(ZEROS, -99.0)),
    "product": (lambda q, k, x, held: ((q @ k.mT).softmax(-1) * held) @ x, ONES, change_entry(ONES, 0.0)),
    "twice": (lambda q, k, x, held: (w := (q @ k.mT).softmax(-1)) @ x + w @ held, *torch.randn(2, 33, C).double()),
    "a sign of sums": (
        lambda q, k, x, held: ((s := q.mean(-1, keepdim=True) * 0.1 + held) / s.sum(1, keepdim=True) * x).sum(1, keepdim=True),
        *torch.tensor([0.0, 9.0]).double(),
    ),
}


@pytest.mark.parametrize("way", HELD)
def test_what_depends_on_the_numbers_of_a_layer_is_not_taken_from_another_one(way):
    form, first, other = HELD[way]
    record_twice(Stack([Held(form, held) for held in (first, first, other, first)]), torch.randn(2, 33, C) / 4)


class Attend(nn.Module):
    """The scaled product of queries and keys, as many write it: a module without weights."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return weights @ v, weights


class Pairs(nn.Module):
    """A part of two tensors that cannot attend by itself: it adds them, or pairs of their tokens."""

    def __init__(self, is_paired: bool) -> None:
        super().__init__()
        self.linear, self.is_paired = nn.Linear(C, 1), is_paired

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(F.leaky_relu(x.unsqueeze(2) + y.unsqueeze(1) if self.is_paired else x + y))


class Around(nn.Module):
    """Attention that leaves a step of it to a part."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.q, self.kv, self.attend, self.way = nn.Linear(C, C), nn.Linear(C, 2 * C), Attend(), way
        self.pairs, self.memory = Pairs(way == "paired scores"), torch.randn(2, 5, C)

    def forward(self, x: Tensor) -> Tensor:
        source = {"flipped": x.flip(1), "cross": self.memory}.get(self.way, x)
        if self.way == "a list that is changed":
            parts = [self.memory * 1.0, self.memory * 2.0]
            source = torch.cat(parts, 1)
            parts.clear()
        q, (k, v) = self.q(x), self.kv(source).chunk(2, -1)
        if self.way == "paired scores":
            return self.pairs(q, k).squeeze(-1).softmax(-1) @ v
        if self.way == "sums beside it":
            return (q @ k.mT).softmax(-1) @ v * self.pairs(q, k)
        y, weights = self.attend(q, k, v)
        return y + weights @ q if self.way == "twice" else y


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("way", ["flipped", "cross", "twice", "a list that is changed", "paired scores", "sums beside it"])
def test_modules_that_are_given_queries_and_keys_are_repeated_by_what_is_around_them(way, place):
    torch.manual_seed(1)
    layers = [Around() for _ in range(4)]
    layers[place] = Around(way)
    recording, *_ = record_twice(Stack(layers), torch.randn(2, 5, C))
    is_cross = way in ("cross", "a list that is changed")
    assert [call.kind == "cross" for call in recording.calls] == [is_cross and n == place for n in range(4)]
    assert bool(recording.notes) == (way in ("twice", "paired scores"))


class TwoWeights(nn.Module):
    """Attention that returns its weights and values, and other weights that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (y.clone() for y in self.qkv(x).chunk(3, -1))
        weights, others = (q @ k.mT).softmax(-1), (k @ q.mT * 2).softmax(-1)
        if MADE is not None:
            MADE.extend(map(weakref.ref, (q, k, weights)))
        return weights @ v, weights, others


MADE: list[weakref.ref[Tensor]] | None = None


class UsesBoth(nn.Module):
    """A layer that multiplies both weights of a part with values."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.v = TwoWeights(), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y, weights, others = self.part(x)
        v = self.v(x)
        return y + others @ v + weights @ v


def test_several_weights_that_a_repeated_layer_returns_are_used_each_for_itself():
    _, before, after = record_twice(Stack([UsesBoth() for _ in range(4)]), torch.randn(2, 9, C))
    assert after > before == 3


def test_no_tensor_of_a_layer_outlives_the_forward(monkeypatch):
    made: list[weakref.ref[Tensor]] = []
    monkeypatch.setattr(f"{__name__}.MADE", made)
    model = Stack([TwoWeights() for _ in range(3)])
    for _ in range(2):
        with torch.no_grad(), record(model, keep="bfloat16"):
            model(torch.randn(1, 5, C))
            assert made
            assert not any(tensor() is not None for tensor in made)


def test_the_tensors_of_a_repeated_layer_are_freed_when_it_ends():
    class Watched(Layer):
        def forward(self, x: Tensor) -> Tensor:
            freed.extend(tensor() is None for tensor in alive)
            alive.append(weakref.ref(weights := self.qkv(x)))
            return super().forward(x) + weights.mean()

    freed, alive = [], []
    with torch.no_grad():
        assert record_once(Stack([Watched() for _ in range(3)]), torch.randn(1, 5, C))[2] == 2
    assert freed
    assert all(freed)


def test_what_ran_before_an_error_is_recorded():
    model = Stack([Layer(), Layer(), Layer("error")])
    with record(model) as recording, pytest.raises(ValueError, match="this layer fails"):
        model(torch.randn(1, 5, C))
    assert [call.name for call in recording.calls] == ["layers.0", "layers.1", "layers.2"]


class Calls(nn.Module):
    """Attention, after which the layer calls a function with the number of the layer."""

    def __init__(self, number: int, call: Callable[[int], object] = int) -> None:
        super().__init__()
        self.qkv, self.number, self.call = nn.Linear(C, 3 * C), number, call

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        y = (q @ k.mT).softmax(-1) @ v
        self.call(self.number)
        return y * 2.0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_recordings_that_end_or_begin_within_a_layer_have_what_ran_in_them(place):
    later: list[Recording] = []
    with ExitStack() as first, ExitStack() as second:
        model = Stack([Calls(n, lambda n: switch() if n == place else None) for n in range(3)])

        def switch() -> None:
            first.close()
            later.append(second.enter_context(record(model)))

        recording = first.enter_context(record(model))
        model(torch.randn(1, 5, C))
    assert [call.name for call in recording.calls] == [f"layers.{n}" for n in range(place + 1)]
    assert [call.name for call in later[0].calls] == [f"layers.{n}" for n in range(place + 1, 3)]


def test_forward_hooks_read_the_calls_of_their_layers():
    model, seen = Stack([Calls(n) for n in range(4)]), []
    with record(model) as recording:
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: seen.append(len(recording.calls)))
        model(torch.randn(1, 5, C))
    assert seen == [1, 2, 3, 4]


def test_modes_of_the_user_see_the_functions_of_the_model_alone():
    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    counts, model = [], Stack([Calls(n) for n in range(3)])
    for is_followed in (True, False):
        seen: list[object] = []
        with Counting():
            record_once(model, torch.ones(1, 5, C), is_followed)
        counts.append(seen.count(Tensor.softmax) + seen.count(Tensor.matmul))
    assert counts[0] == counts[1]


class Changed(nn.Module):
    """A layer that is changed between two recordings."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.factor = nn.Linear(C, 3 * C), 1.0
        self.register_buffer("mask", torch.ones(9, 9).triu(1).bool())
        self.register_buffer("bias", torch.linspace(-1, 1, 81).sin().view(9, 9))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return ((q @ k.mT * self.factor + self.bias).masked_fill(self.mask, -torch.inf)).softmax(-1) @ v


CHANGES = {
    "an entry of the mask": lambda layer: layer.mask[5, 1].fill_(True),
    "the bias": lambda layer: layer.bias.mul_(2),
    "a number": lambda layer: setattr(layer, "factor", 0.5),
    "the weights": lambda layer: nn.init.normal_(layer.qkv.weight),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("inference", [False, True])
def test_a_model_that_was_changed_is_recorded_as_it_is(change, inference):
    torch.manual_seed(1)
    model, x = Stack([Changed() for _ in range(2)]), torch.randn(2, 9, C)
    with torch.inference_mode(inference):
        before, *_ = record_once(model, x)
        maps = [call.map.dense().clone() for call in before.calls]
        for layer in model.layers:
            change(layer)
        record_twice(model, x)
        for weights, call in zip(maps, before.calls, strict=True):
            assert torch.equal(weights, call.map.dense())  # of the model as it was


def test_a_recording_with_gradients_takes_nothing_of_one_in_inference_mode():
    model, x = Stack([Changed() for _ in range(2)]), torch.randn(2, 9, C)
    with torch.inference_mode():
        assert record_once(model, x)[2] == 1
    assert record_twice(model, x)[1:] == (1, 2)


def test_forms_of_a_few_lengths_are_kept_until_their_module_is_freed():
    model = Stack([Layer() for _ in range(2)])
    for t in range(3, 3 + kept_forms.MOST_KEYS + 2):
        record_once(model, torch.randn(1, t, C))
    assert record_once(model, torch.randn(1, t, C))[2] == 2
    assert record_once(model, torch.randn(1, 3, C))[2] == 1
    module, number = weakref.ref(model.layers[0]), id(model.layers[0])
    assert len(KEPT_FORMS.modules[number][1]) == kept_forms.MOST_KEYS
    del model
    gc.collect()
    assert module() is None
    assert number not in KEPT_FORMS.modules

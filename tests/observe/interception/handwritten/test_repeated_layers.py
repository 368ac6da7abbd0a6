"""Layers that repeat an earlier one are recorded as they are where each layer is followed."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from default_dtype import use_default_dtype
from observe.interception.handwritten.handwritten_attention import C, H, Own
from observe.interception.handwritten.test_forms import FORMS
from observe.recording_checks import are_equal
from regard.observe import Recording, record
from regard.observe.interception.function_mode import AttentionFunctionMode
from regard.observe.interception.repeated import layer_steps, repeated_layers
from regard.observe.interception.repeated.layer_forms import FollowedTensor
from regard.observe.interception.thread_state import InterceptionPause

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


def record_both(model: nn.Module, *given: Tensor, **options: object) -> tuple[Recording, int]:
    """A recording and how many layers were repeated in it; it is the same as one for which each layer was followed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_steps, "MOST_STEPS", 0)
        torch.manual_seed(7)
        with record(model, **options) as followed:
            expected = model(*given)
    repeated, repeat = [], repeated_layers.RepeatedLayers.repeat
    with pytest.MonkeyPatch.context() as patch:
        layers = repeated_layers.RepeatedLayers
        patch.setattr(layers, "repeat", lambda *call: repeated.append(repeat(*call)) or repeated[-1])
        torch.manual_seed(7)
        with record(model, **options) as recording:
            found = model(*given)
    assert are_equal(found, expected)
    compare_recordings(recording, followed)
    return recording, sum(repeated)


def compare_recordings(recording: Recording, followed: Recording) -> None:
    """A recording is the same as one for which each layer was followed."""
    assert recording.missed == followed.missed
    assert recording.notes == followed.notes
    assert [*map(describe, recording.calls)] == [*map(describe, followed.calls)]
    for call, other in zip(recording.calls, followed.calls, strict=True):
        assert are_equal(call.map.dense(), other.map.dense())
        assert are_equal(*(getattr(one.stored, "v", None) for one in (call, other)))


def describe(call) -> tuple[object, ...]:
    return call.name, call.kind, call.map.shape, repr(call.map), call.step


@pytest.mark.parametrize("name", FORMS)
def test_three_layers_of_a_form_are_recorded_as_three_that_are_followed(name):
    torch.manual_seed(3)
    form, shape = FORMS[name]
    record_both(Stack([Own(form) for _ in range(3)]), torch.randn(shape))


@pytest.mark.parametrize(("most", "count"), [(2**25, 2), (2**22, 0)])
def test_layers_of_512_tokens_repeat_the_first_unless_they_are_too_large_to_be_held(monkeypatch, most, count):
    if most != layer_steps.MOST_ENTRIES:
        for module in (layer_steps, repeated_layers):
            monkeypatch.setattr(module, "MOST_ENTRIES", most)
    repeat, found = repeated_layers.RepeatedLayers.repeat, list[bool]()
    monkeypatch.setattr(repeated_layers.RepeatedLayers, "repeat", lambda *call: found.append(repeat(*call)) or found[-1])
    torch.manual_seed(3)
    model, x = Stack([Own(lambda q, k, v: (q @ k.mT).softmax(-1) @ v) for _ in range(3)]), torch.randn(4, 512, C)
    with torch.no_grad(), record(model) as recording:
        model(x)
    assert (len(recording.calls), sum(found)) == (3, count)


@given(st.lists(st.sampled_from(sorted(FORMS)), min_size=3, max_size=6), st.integers(0, 99))
def test_layers_of_different_forms_are_recorded_as_those_that_are_followed(names, seed):
    torch.manual_seed(seed)
    dims = len(FORMS[names[0]][1])
    names = [name for name in names if len(FORMS[name][1]) == dims]
    record_both(Stack([Own(FORMS[name][0]) for name in names for _ in range(2)]), torch.randn(FORMS[names[0]][1]))


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
        weights = (scores / self.temperature if self.way == "temperature" else scores).softmax(-1)
        if self.way == "exchanged":
            k, v = v, k
        if self.way == "dropped":
            weights = weights * (torch.arange(t) % 2)
        y = weights @ v
        if self.way == "twice":
            y = y + weights @ k
        if self.way == "held":
            self.held = weights
        if self.way == "error":
            raise ValueError("this layer fails")
        y = y.transpose(1, 2).reshape(b, t, c)
        return (y, weights) if self.way == "returned" else y


WAYS = ("mask", "temperature", "queries", "scale", "in place", "exchanged", "dropped", "twice", "held", "returned")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_layer_that_differs_is_followed(way, place):
    torch.manual_seed(1)
    layers = [Layer() for _ in range(4)]
    layers[place] = Layer(way)
    record_both(Stack(layers), torch.randn(2, 5, C), keep="values")


def test_equal_layers_are_repeated_and_layers_in_turn_too():
    x = torch.randn(2, 5, C)
    assert record_both(Stack([Layer() for _ in range(4)]), x)[1] == 3
    assert record_both(Stack([Layer("scale" if n % 2 else "") for n in range(6)]), x)[1] == 4


def test_masks_of_other_bits_are_inferred_again():
    recording, repeated = record_both(Stack([Layer(), Layer("mask"), Layer(), Layer("mask")]), torch.randn(1, 6, C))
    maps = [repr(call.map) for call in recording.calls]
    assert maps[0] == maps[2] != maps[1] == maps[3]
    assert repeated == 2


def test_a_mask_of_other_bits_in_a_row_that_is_not_sampled_is_inferred_again():
    layers = [Layer() for _ in range(3)]
    layers[1].mask[3, 1] = True
    recording, repeated = record_both(Stack(layers), torch.randn(1, 33, C))
    assert repeated == 1
    assert recording.map(1).dense()[0, 0, 3, 1] == 0 != recording.map(2).dense()[0, 0, 3, 1]


class Unseen(nn.Module):
    """Attention whose scores numpy changes, which no function of torch shows."""

    def __init__(self, amount: float) -> None:
        super().__init__()
        self.qkv, self.amount = nn.Linear(C, 3 * C), amount

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT
        scores.detach().numpy()[..., 0] += self.amount
        return scores.softmax(-1) @ v


def test_weights_that_are_not_those_of_the_scores_are_not_repeated():
    recording, repeated = record_both(Stack([Unseen(0), Unseen(0), Unseen(1)]), torch.randn(1, 5, C))
    assert repeated == 1
    assert len(recording.notes) == 1


def test_attention_that_is_passed_over_is_not_missed():
    class CrossAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            return x

    recording, repeated = record_both(Stack([CrossAttention() for _ in range(3)]), torch.randn(1, 5, C))
    assert repeated == 2
    assert not recording.missed


class Scores(nn.Module):
    """The scores of one part of a layer, whose weights another part makes."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(C, 2 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.qk(x).chunk(2, -1))
        return q @ k.mT


class Parts(nn.Module):
    """Attention that leaves its scores to a part."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.values = Scores(), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        v = self.values(x).unflatten(-1, (H, -1)).transpose(1, 2)
        return (self.scores(x).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_scores_that_a_repeated_part_returns_are_followed_further():
    recording, repeated = record_both(Stack([Parts() for _ in range(3)]), torch.randn(2, 5, C))
    assert repeated == 2
    assert len(recording.calls) == 3


class Attend(nn.Module):
    """The scaled product of queries and keys, as many write it: a module without weights."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return weights @ v, weights


class Around(nn.Module):
    """Self attention or cross attention of a module that computes it, and another product of its weights."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.q, self.kv, self.attend, self.way = nn.Linear(C, C), nn.Linear(C, 2 * C), Attend(), way
        self.memory = torch.randn(2, 5, C)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x), self.kv({"flipped": x.flip(1), "cross": self.memory}.get(self.way, x)).chunk(2, -1)
        y, weights = self.attend(q, k, v)
        return y + weights @ q if self.way == "twice" else y


@pytest.mark.parametrize("way", ["", "flipped", "cross", "twice"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_modules_that_are_given_queries_and_keys_are_repeated_by_what_is_around_them(way, place):
    layers = [Around() for _ in range(4)]
    layers[place] = Around(way)
    recording, repeated = record_both(Stack(layers), torch.randn(2, 5, C))
    assert repeated == 3
    assert [call.kind == "cross" for call in recording.calls] == [way == "cross" and n == place for n in range(4)]
    assert bool(recording.notes) == (way == "twice")


class Rectified(nn.Module):
    """Attention whose scores a function or a module makes positive in place, in one row after the product was taken."""

    def __init__(self, rectify) -> None:
        super().__init__()
        self.qkv, self.rectify = nn.Linear(C, 3 * C), rectify

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT
        self.rectify(scores[:, 3:4])
        return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    "rectify", [lambda x: nn.functional.relu(x, inplace=True), nn.ReLU(inplace=True), nn.Sequential(nn.ReLU(inplace=True))]
)
def test_scores_that_are_written_into_are_followed(rectify):
    _, repeated = record_both(Stack([Rectified(rectify) for _ in range(3)]), torch.randn(1, 33, C))
    assert repeated == 0


def test_what_ran_before_an_error_is_recorded():
    model = Stack([Layer(), Layer(), Layer("error")])
    with record(model) as recording, pytest.raises(ValueError, match="this layer fails"):
        model(torch.randn(1, 5, C))
    assert [call.name for call in recording.calls] == ["layers.0", "layers.1", "layers.2"]


def test_the_tensors_of_a_repeated_layer_are_freed_when_it_ends():
    class Watched(Layer):
        alive: list[weakref.ref[Tensor]]

        def forward(self, x: Tensor) -> Tensor:
            freed.extend(one() is None for one in alive)
            alive.append(weakref.ref(weights := self.qkv(x)))
            return super().forward(x) + weights.mean()

    freed, alive = [], []
    with torch.no_grad():
        _, repeated = record_both(Stack([Watched() for _ in range(3)]), torch.randn(1, 5, C))
    assert repeated == 2
    assert all(freed)
    assert freed


def test_weights_that_end_with_their_layer_are_not_followed_in_one_that_repeats_it(monkeypatch):
    followed, build = [], FollowedTensor.build_trace
    monkeypatch.setattr(FollowedTensor, "build_trace", lambda *call: followed.append(call[0]) or build(*call))
    with torch.no_grad():
        _, repeated = record_both(Stack([Layer() for _ in range(3)]), torch.randn(1, 5, C))
    assert repeated == 2
    assert not followed


class Given(nn.Module):
    """Attention whose weights, scores or values involve a tensor that the layer holds."""

    def __init__(self, way: str, held: Tensor) -> None:
        super().__init__()
        self.qk, self.way, self.held = nn.Linear(C, 2 * C), way, held

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        if self.way == "values":
            return (q @ k.mT).softmax(-1) @ self.held
        if self.way == "clamp":
            return (q @ k.mT - self.held).clamp(max=50).softmax(-1) @ x
        weights = (q @ k.mT).softmax(-1)
        return weights @ x + weights @ self.held if self.way == "twice" else (weights * self.held) @ x


def change_entry(x: Tensor, amount: float) -> Tensor:
    return x.index_put((torch.tensor(3), torch.tensor(4)), x.new_tensor(amount))


HELD = {
    "values": (torch.randn(33, C).double(), nn.Parameter(torch.randn(2, 33, C).double())[0]),
    "clamp": (torch.zeros(33, 33).double(), change_entry(torch.zeros(33, 33).double(), -99.0)),
    "product": (torch.ones(33, 33).double(), change_entry(torch.ones(33, 33).double(), 0.0)),
    "twice": (torch.ones(33, C).double(), torch.randn(33, C).double()),
}


@pytest.mark.parametrize("way", HELD)
def test_what_depends_on_the_numbers_of_a_layer_is_not_taken_from_another_one(way):
    first, other = HELD[way]
    record_both(Stack([Given(way, held) for held in (first, first, other, first)]), torch.randn(2, 33, C) / 4)


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
def test_what_ran_in_a_layer_before_its_recording_ends_is_recorded(place):
    with ExitStack() as stack:
        model = Stack([Calls(n, lambda n: stack.close() if n == place else None) for n in range(3)])
        recording = stack.enter_context(record(model))
        model(torch.randn(1, 5, C))
    assert [call.name for call in recording.calls] == [f"layers.{n}" for n in range(place + 1)]


def test_what_ran_in_a_layer_before_a_recording_starts_is_not_recorded():
    later = []
    with ExitStack() as stack:
        model = Stack(
            [Calls(n, lambda n: later.append(stack.enter_context(record(model))) if n == 2 else None) for n in range(4)]
        )
        with record(model) as recording:
            model(torch.randn(1, 5, C))
    assert len(recording.calls) == 4
    assert [call.name for call in later[0].calls] == ["layers.3"]


class Paused(nn.Module):
    """Attention with another product of its weights in a pause, below a mode of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT).softmax(-1)
        with BaseTorchFunctionMode(), InterceptionPause():
            other = weights @ k
        return weights @ v + other


def test_what_runs_in_a_pause_is_not_followed_later():
    recording, _ = record_both(Stack([Paused() for _ in range(4)]), torch.randn(2, 5, C))
    assert len(recording.calls) == 4
    assert not recording.notes


def test_forward_hooks_read_the_calls_of_their_layers():
    model, seen = Stack([Calls(n) for n in range(4)]), []
    with record(model) as recording:
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: seen.append(len(recording.calls)))
        model(torch.randn(1, 5, C))
    assert seen == [1, 2, 3, 4]


class Transformed(nn.Module):
    """Attention of which a part runs in autocast or in vmap."""

    def __init__(self, way: str, factor: float) -> None:
        super().__init__()
        self.qkv, self.way, self.factor = nn.Linear(C, 3 * C), way, factor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.way == "vmap":
            v = torch.vmap(lambda one: one * 2 + one.sum(-1, keepdim=True))(v)
            return (q @ k.mT).softmax(-1) @ v * self.factor
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (q.float() @ k.float().mT).softmax(-1) @ v.float() * self.factor


@pytest.mark.parametrize("way", ["vmap", "autocast"])
def test_layers_with_a_transform_inside_are_followed(way):
    record_both(Stack([Transformed(way, factor) for factor in (1.0, 1.0, 2.0, 1.0)]), torch.randn(2, 9, C))


class TwoWeights(nn.Module):
    """Attention that returns its weights, and others that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights, others = (q @ k.mT).softmax(-1), (k @ q.mT * 2).softmax(-1)
        return weights @ v, weights, others


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
    _, repeated = record_both(Stack([UsesBoth() for _ in range(4)]), torch.randn(2, 9, C))
    assert repeated == 3


def test_no_tensor_of_a_layer_is_kept_after_the_forward():
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = nn.Linear(C, 2 * C)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, k = (y.clone() for y in self.qk(x).chunk(2, -1))
            made.extend(map(weakref.ref, (q, k)))
            weights = (q @ k.mT).softmax(-1)
            return weights @ x, weights

    made, model = [], Stack([Kept() for _ in range(3)])
    with torch.no_grad(), record(model, keep="bfloat16"):
        model(torch.randn(1, 5, C))
        assert made
        assert not any(one() is not None for one in made)


def test_modes_of_the_user_see_the_functions_of_the_model_alone():
    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Written(Calls):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.add_(1) if self.number == 2 else y

    model, x = Stack([Written(n) for n in range(3)]), torch.randn(1, 5, C)
    counts = []
    for most in (0, 256):
        seen: list[object] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_steps, "MOST_STEPS", most)
            with Counting(), record(model):
                model(x)
                counts.append(len(seen))
    assert counts[0] == counts[1]


def test_a_list_that_a_layer_changes_after_a_function_is_followed_as_it_was():
    class Joined(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.q, self.kv, self.factor, self.memory = nn.Linear(C, C), nn.Linear(C, 2 * C), factor, torch.randn(2, 4, C)

        def forward(self, x: Tensor) -> Tensor:
            parts = [self.memory * 1.0, self.memory * 2.0]
            k, v = self.kv(torch.cat(parts, 1)).chunk(2, -1)
            parts.clear()
            return (self.q(x) @ k.mT).softmax(-1) @ v * self.factor

    recording, _ = record_both(Stack([Joined(factor) for factor in (1.0, 1.0, 2.0, 1.0)]), torch.randn(2, 9, C))
    assert {call.kind for call in recording.calls} == {"cross"}


class Joint(nn.Module):
    """A part of two tensors that cannot attend by itself: it adds them, as the end of a layer, or pairs of their tokens."""

    def __init__(self, pairs: bool = False) -> None:
        super().__init__()
        self.linear, self.pairs = nn.Linear(C, 1), pairs

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.pairs:
            x, y = x.unsqueeze(2), y.unsqueeze(1)
        return self.linear(F.leaky_relu(x + y))


class Joined(nn.Module):
    """A layer whose weights are a softmax of what such a part makes of pairs of tokens, if it does, and else of a product."""

    def __init__(self, pairs: bool = False) -> None:
        super().__init__()
        self.qkv, self.part, self.weights = nn.Linear(C, 3 * C), Joint(pairs), None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        joined = self.part(q, k)
        scores = joined.squeeze(-1) if self.part.pairs else q @ k.mT
        weights = scores.softmax(-1)
        self.weights = weights.detach()
        return weights @ v * (1 if self.part.pairs else joined)


def test_parts_of_two_tensors_that_make_no_scores_are_followed_once(monkeypatch):
    seen, run = [], AttentionFunctionMode.__torch_function__
    monkeypatch.setattr(AttentionFunctionMode, "__torch_function__", lambda *call: seen.append(call[1]) or run(*call))
    model = Stack([Joined() for _ in range(4)])
    with record(model) as recording:
        model(torch.randn(2, 5, C))
    assert len(recording.calls) == 4
    assert seen.count(F.leaky_relu) == 1


def record_parts(model: nn.Module) -> Recording:
    """A recording with the weights of the layers; it is the same as one for which each part of two tensors was followed."""
    x, recordings = torch.randn(2, 5, C), []
    for are_followed in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if are_followed:
                patch.setattr(repeated_layers.RepeatedLayers, "makes_no_scores", lambda *_: False)
            with record(model) as recording:
                model(x)
        recordings.append(recording)
    followed, recording = recordings
    assert recording.missed == followed.missed
    assert recording.notes == followed.notes
    assert [*map(describe, recording.calls)] == [*map(describe, followed.calls)]
    layers = [layer for layer in model.layers if layer.weights is not None]
    for call, layer in zip(recording.calls, layers, strict=True):
        assert (call.map.dense()[:, 0] - layer.weights).abs().max() < 1e-12
    return recording


@pytest.mark.parametrize("place", range(4))
def test_a_part_of_two_tensors_that_makes_scores_is_followed(place):
    torch.manual_seed(1)
    record_parts(Stack([Joined(pairs=n == place) for n in range(4)]))


class Sum(nn.Module):
    """A part that adds two tensors."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.leaky_relu(x + y, 1.0)


class Added(nn.Module):
    """A layer that adds a table to its scores by such a part, or to other tensors of their shape."""

    def __init__(self, has_scores: bool) -> None:
        super().__init__()
        self.qk, self.part, self.has_scores, self.weights = nn.Linear(C, 2 * C), Sum(), has_scores, None
        self.register_buffer("table", torch.randn(1, 5, 5))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        added = self.part(q @ k.mT if self.has_scores else x[..., :5], self.table.expand(2, 5, 5))
        if not self.has_scores:
            return added
        weights = added.softmax(-1)
        self.weights = weights.detach()
        return weights @ x


def test_a_part_of_two_tensors_that_is_given_scores_is_followed():
    recording = record_parts(Stack([Added(has_scores) for has_scores in (False, False, True, False, True)]))
    assert [call.name for call in recording.calls] == ["layers.2", "layers.4"]


class DividedScores(nn.Module):
    """A layer that divides scores by their sums: weights, unless some are negative."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(C, 1), nn.Linear(C, C)
        nn.init.constant_(self.score.bias, bias)
        nn.init.constant_(self.score.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x)
        return (scores / scores.sum(1, keepdim=True) * self.value(x)).sum(1, keepdim=True)


def test_scores_of_each_layer_decide_whether_they_are_weights():
    with record(model := Stack([DividedScores(bias) for bias in (0, 9, 0, 9, 9)])) as recording:
        model(torch.randn(2, 5, C))
    assert [found.module for found in recording.other_weights] == ["layers.1", "layers.3", "layers.4"]

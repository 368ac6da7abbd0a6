"""A later recording of a model takes what an earlier one found in its layers, and is the same as if each was followed."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from default_dtype import use_default_dtype
from observe.interception.handwritten.handwritten_attention import C, Own
from observe.interception.handwritten.test_forms import FORMS
from observe.interception.handwritten.test_repeated_layers import (
    WAYS,
    Around,
    Layer,
    Parts,
    Stack,
    TwoWeights,
    UsesBoth,
    compare_recordings,
)
from regard.observe import Recording, record
from regard.observe.interception.repeated import kept_forms, layer_steps, repeated_layers
from regard.observe.interception.repeated.kept_forms import KEPT_FORMS

pytestmark = pytest.mark.filterwarnings("ignore:not recorded")


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Compute in float64."""
    with use_default_dtype(torch.float64):
        yield


def record_once(model: nn.Module, *given: Tensor, keep: str | None = "values") -> tuple[Recording, int]:
    """A recording, with values or in a forward with gradients, and how many modules were repeated in it."""
    repeated, repeat = [], repeated_layers.RepeatedLayers.repeat
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_layers.RepeatedLayers, "repeat", lambda *call: repeated.append(repeat(*call)) or repeated[-1])
        torch.manual_seed(7)
        with torch.set_grad_enabled(keep is None), record(model, keep=keep) as recording:
            model(*given)
    return recording, sum(repeated)


def record_followed(model: nn.Module, *given: Tensor, keep: str | None = "values") -> Recording:
    """A recording for which each layer is followed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_steps, "MOST_STEPS", 0)
        patch.setattr(KEPT_FORMS, "modules", {})
        return record_once(model, *given, keep=keep)[0]


def record_again(model: nn.Module, *given: Tensor) -> tuple[int, int]:
    """How many modules were repeated in a recording and in another one; both are the same as one that was followed."""
    followed = record_followed(model, *given)
    recordings, counts = zip(*(record_once(model, *given) for _ in range(2)), strict=True)
    for recording in recordings:
        compare_recordings(recording, followed)
    return counts


@pytest.mark.parametrize("name", FORMS)
def test_layers_of_a_form_are_recorded_again_as_those_that_are_followed(name):
    torch.manual_seed(3)
    form, shape = FORMS[name]
    before, after = record_again(Stack([Own(form) for _ in range(2)]), torch.randn(shape))
    assert after in (before, before + 1)


@given(st.lists(st.sampled_from(sorted(FORMS)), min_size=2, max_size=5), st.integers(0, 99))
def test_layers_of_different_forms_are_recorded_again_as_those_that_are_followed(names, seed):
    torch.manual_seed(seed)
    dims = len(FORMS[names[0]][1])
    names = [name for name in names if len(FORMS[name][1]) == dims]
    record_again(Stack([Own(FORMS[name][0]) for name in names for _ in range(2)]), torch.randn(FORMS[names[0]][1]))


def test_no_layer_of_a_later_recording_is_followed():
    assert record_again(Stack([Layer() for _ in range(4)]), torch.randn(2, 5, C)) == (3, 4)
    assert record_again(Stack([Layer("scale" if n % 2 else "") for n in range(6)]), torch.randn(2, 5, C)) == (4, 6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [0, 1])
def test_layers_that_differ_are_recorded_again_as_those_that_are_followed(way, place):
    torch.manual_seed(1)
    layers = [Layer() for _ in range(3)]
    layers[place] = Layer(way)
    record_again(Stack(layers), torch.randn(2, 5, C))


MODELS = {
    "scores that a part returns": lambda: Parts(),
    "weights that a part returns": lambda: UsesBoth(),
    "queries and keys that a part is given": lambda: Around(),
    "another product outside of the part": lambda: Around("twice"),
    "keys of a memory": lambda: Around("cross"),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=list(MODELS))
def test_what_outlives_a_layer_is_followed_further_in_a_later_recording(build):
    torch.manual_seed(1)
    before, after = record_again(Stack([build() for _ in range(3)]), torch.randn(2, 5, C))
    assert after > before


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
    "the mask": lambda layer: layer.mask.copy_(torch.ones(9, 9).triu(2)),
    "an entry of the mask": lambda layer: layer.mask[5, 1].fill_(True),
    "the bias": lambda layer: layer.bias.mul_(2),
    "a number": lambda layer: setattr(layer, "factor", 0.5),
    "the weights": lambda layer: nn.init.normal_(layer.qkv.weight),
    "nothing": lambda layer: None,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("inference", [False, True])
def test_a_model_that_was_changed_is_recorded_as_it_is(change, inference):
    torch.manual_seed(1)
    model, x = Stack([Changed() for _ in range(2)]), torch.randn(2, 9, C)
    with torch.inference_mode(inference):
        before, _ = record_once(model, x)
        maps = [call.map.dense().clone() for call in before.calls]
        for layer in model.layers:
            change(layer)
        after, _ = record_once(model, x)
        compare_recordings(after, record_followed(model, x))
        for one, call in zip(maps, before.calls, strict=True):
            assert torch.equal(one, call.map.dense())  # of the model as it was


def test_a_recording_with_gradients_takes_nothing_of_one_in_inference_mode():
    model, x = Stack([Changed() for _ in range(2)]), torch.randn(2, 9, C)
    with torch.inference_mode():
        assert record_once(model, x)[1] == 1
    recording, repeated = record_once(model, x, keep=None)
    assert repeated == 1
    compare_recordings(recording, record_followed(model, x, keep=None))
    assert record_once(model, x, keep=None)[1] == 2


def test_forms_are_freed_with_the_module_in_which_they_were_found():
    model = Stack([Layer() for _ in range(2)])
    module, number = weakref.ref(model.layers[0]), id(model.layers[0])
    record_once(model, torch.randn(2, 5, C))
    assert number in KEPT_FORMS.modules
    del model
    gc.collect()
    assert module() is None
    assert number not in KEPT_FORMS.modules


def test_forms_of_a_few_lengths_are_kept():
    model = Stack([Layer() for _ in range(2)])
    for t in range(3, 3 + kept_forms.MOST_KEYS + 2):
        record_once(model, torch.randn(1, t, C))
    assert len(KEPT_FORMS.modules[id(model.layers[0])][1]) == kept_forms.MOST_KEYS
    assert record_once(model, torch.randn(1, t, C))[1] == 2
    assert record_once(model, torch.randn(1, 3, C))[1] == 1


def test_no_tensor_of_a_layer_is_kept():
    class Kept(TwoWeights):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = (y.clone() for y in self.qkv(x).chunk(3, -1))
            scores = q @ k.mT
            weights = scores.softmax(-1)
            made.extend(map(weakref.ref, (q, k, v, scores, weights)))
            return weights @ v, weights, v

    made, model = [], Stack([Kept() for _ in range(2)])
    for _ in range(2):
        record_once(model, torch.randn(1, 5, C))
    assert id(model.layers[0]) in KEPT_FORMS.modules
    assert not any(one() is not None for one in made)


def test_forms_with_large_masks_are_not_kept(monkeypatch):
    monkeypatch.setattr(kept_forms, "MOST_BYTES", 24)
    assert record_again(Stack([Layer() for _ in range(3)]), torch.randn(2, 5, C)) == (2, 2)

"""Modules whose code cannot attend run without interception; attention is recorded however a module reaches it."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import record_and_compare
from regard.observe.interception.skippable import find_skippable

C = 6
X = torch.randn(2, 5, C)


def attend_to_itself(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def double_numbers(x: Tensor) -> Tensor:
    return 2 * x


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return double_numbers(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Attend(Double):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return attend_to_itself(x)


class AttendInApply(Double):
    @classmethod
    def apply(cls, x: Tensor) -> Tensor:
        return attend_to_itself(x)


class AttendByDefault(Double):
    @staticmethod
    def forward(ctx, x: Tensor, *, function=attend_to_itself) -> Tensor:
        return function(x)


class Helper:
    """No module, with a method that attends, and a function that it holds."""

    def __init__(self) -> None:
        self.function = attend_to_itself

    def mix(self, x: Tensor) -> Tensor:
        return attend_to_itself(x)


class Feed(nn.Module):
    """What a block has beside its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.grow, self.shrink, self.drop = nn.Linear(C, 3 * C), nn.Linear(3 * C, C), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.shrink(F.gelu(self.grow(x)).mul(math.sqrt(2)).clamp(min=-1)))


class Steps(nn.Module):
    """A method, a function beside the class, and a property, each of which is read."""

    @property
    def power(self) -> float:
        return 0.5

    def transform(self, x: Tensor) -> Tensor:
        return double_numbers(x) ** self.power

    def forward(self, x: Tensor) -> Tensor:
        return torch.nan_to_num(self.transform(x))


class ByMethod(Steps):
    def transform(self, x: Tensor) -> Tensor:
        return attend_to_itself(x)


class ByProperty(Steps):
    @property
    def power(self) -> Tensor:
        return attend_to_itself(X).mean()


class ByDefault(nn.Module):
    def forward(self, x: Tensor, function=attend_to_itself) -> Tensor:
        return function(x)


class Overridden(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return attend_to_itself(x)

    def forward(self, x: Tensor) -> Tensor:
        return x


class WithMethod(nn.Module):
    """Cannot attend when it is called, and has a method that does."""

    def mix(self, x: Tensor) -> Tensor:
        return attend_to_itself(x)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class ReadsStates(nn.Module):
    """A gated recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), C)
        for i in range(x.shape[1]):
            z = (self.gates(h) + x[:, i]).sigmoid()
            h = (1 - z) * h + z * x[:, i].tanh()
        return h


def define(forward: Callable[..., Tensor], held: object = None) -> nn.Module:
    """A module of a class of its own with this forward, which holds an object."""
    module = type("Own", (nn.Module,), {"forward": forward})()
    module.held = held
    return module


def call_on(x: Tensor, function) -> Tensor:
    return function.apply(x)


FUNCTIONS = (double_numbers, attend_to_itself)
HARMLESS = {
    "a feedforward layer": Feed(),
    "a squeezed gate": define(lambda self, x: x * self.held(F.gelu(x.mean(1, keepdim=True))), nn.Linear(C, C)),
    "methods and properties": Steps(),
    "a function with a gradient of its own": define(lambda self, x: Double.apply(double_numbers(x))),
    "layers in a row": nn.Sequential(Feed(), nn.GELU(), nn.LayerNorm(C)),
    "an embedding": nn.Embedding(3, C),
    "a function that it holds": define(lambda self, x: self.held(x), F.gelu),
    "sizes that it holds": define(
        lambda self, x: F.pad(x, self.held[0]) * self.held[1]["factor"] + self.held[2].dim,
        [(1, 2), {"factor": 3.0}, SimpleNamespace(dim=4)],
    ),
    "a recurrent network": ReadsStates(),
}
ATTENDS: dict[str, nn.Module] = {
    "a method": ByMethod(),
    "a property": ByProperty(),
    "a function": define(lambda self, x: double_numbers(attend_to_itself(x))),
    "a default": ByDefault(),
    "a tuple of functions": define(lambda self, x: FUNCTIONS[-1](x)),
    "a generator": define(lambda self, x: torch.cat([*(F.scaled_dot_product_attention(y, y, y) for y in x.split(1))])),
    "a function with a gradient": define(lambda self, x: Attend.apply(x)),
    "its apply": define(lambda self, x: AttendInApply.apply(x)),
    "a default of it": define(lambda self, x: AttendByDefault.apply(x)),
    "one of two of them": define(lambda self, x: (Attend if self.training else Double).apply(x)),
    "one that is handed over": define(lambda self, x: call_on(x, Attend)),
    "a call of its own": Overridden(),
    "an import": define(lambda self, x: __import__("torch").nn.functional.scaled_dot_product_attention(x, x, x)),
    "a decorator": define(torch.no_grad()(lambda self, x: attend_to_itself(x))),
    "a function that it holds": define(lambda self, x: self.held(x), attend_to_itself),
    "a function in a list that it holds": define(lambda self, x: self.held[-1](x), [[], attend_to_itself]),
    "a module in a tuple that it holds": define(
        lambda self, x: self.held[-1](x), (define(lambda self, x: attend_to_itself(x)),)
    ),
    "a method of an object": define(lambda self, x: self.held.mix(x), Helper()),
    "a function of an object": define(lambda self, x: self.held.function(x), Helper()),
    "another method of a module": define(lambda self, x: self.held.mix(x), WithMethod()),
    "torch's function": define(lambda self, x: self.held(x, x, x), F.scaled_dot_product_attention),
    "a layer behind another": nn.Sequential(Feed(), define(lambda self, x: attend_to_itself(x))),
    "torch's attention": define(lambda self, x: self.held(x, x, x)[0], nn.MultiheadAttention(C, 2, batch_first=True)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_module_whose_code_can_be_read_to_its_end_runs_without_interception(name):
    modules = [*HARMLESS[name].modules()]
    assert set(find_skippable(modules)) == {id(part) for part in modules}


@pytest.mark.parametrize("name", ATTENDS)
def test_attention_is_recorded_however_a_module_reaches_it(name):
    recording, _ = record_and_compare(nn.Sequential(nn.LayerNorm(C), ATTENDS[name]), lambda model: model(X))
    assert recording.calls


CHANGES: dict[str, Callable[[Feed], object]] = {
    "a hook": lambda module: module.register_forward_hook(lambda _, __, y: attend_to_itself(y)),
    "a hook of a part": lambda module: module.shrink.register_forward_pre_hook(lambda _, args: (attend_to_itself(args[0]),)),
    "a forward of the instance": lambda module: setattr(module, "forward", attend_to_itself),
    "another part": lambda module: setattr(module, "shrink", define(lambda self, x: attend_to_itself(x))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_before_a_recording_is_intercepted(change):
    model = nn.Sequential(Feed()).eval()
    change(model[0])
    recording, _ = record_and_compare(model, lambda model: model(X))
    assert recording.calls


def test_a_hook_that_is_hung_on_during_a_recording_is_intercepted():
    def run(model: nn.Module) -> Tensor:
        with CHANGES["a hook"](model[0]):
            return model(X)

    recording, _ = record_and_compare(nn.Sequential(Feed()).eval(), run)
    assert [call.name for call in recording.calls] == ["0"]


def test_a_function_that_is_replaced_after_a_recording_is_read_anew(monkeypatch):
    model = nn.Sequential(define(lambda self, x: double_numbers(x)))
    assert not record_and_compare(model, lambda model: model(X))[0].calls
    monkeypatch.setattr(f"{__name__}.double_numbers", attend_to_itself)
    assert record_and_compare(model, lambda model: model(X))[0].calls


def test_what_a_module_holds_of_itself_ends():
    loop: list[object] = [3]
    loop.append(loop)
    module = define(lambda self, x: x * self.held[0], loop)
    assert id(module) in find_skippable(module.modules())


class Model(nn.Module):
    """Attention inside what harmless modules call, or around what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.feed, self.drop = define(lambda self, x, function: function(x)), Feed(), nn.Dropout(0.0)

    def forward(self, x: Tensor, way: str) -> Tensor:
        if way == "given":
            return self.given(self.feed(x), attend_to_itself)
        weights = self.drop((x @ self.feed(x).mT).softmax(-1))
        return self.drop(weights) @ x


@pytest.mark.parametrize("way", ["given", "weights"])
def test_functions_that_a_skippable_module_is_handed_and_weights_that_pass_through_it_are_followed(way):
    recording, _ = record_and_compare(Model().eval(), lambda model: model(X, way))
    assert recording.names == ["given" if way == "given" else ""]

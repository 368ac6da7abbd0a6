"""Modules that cannot attend are told by their code, and what they make of weights is still followed."""

import math
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


def double_in_forward(x: Tensor) -> Tensor:
    return 2 * x


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return double_in_forward(x)

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


FUNCTIONS = (double_numbers, attend_to_itself)


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
        return X.softmax(-1).mean()


class ByFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return double_numbers(attend_to_itself(x))


class WithGradient(nn.Module):
    """A function with a gradient of its own, and one whose name is that of a forward."""

    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(double_in_forward(x))


class ByGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Attend.apply(x)


class ByGradientInApply(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return AttendInApply.apply(x)


class ByGradientByDefault(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return AttendByDefault.apply(x)


class ByOneOfTwoGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (Attend if self.training else Double).apply(x)


class ByDefault(nn.Module):
    def forward(self, x: Tensor, function=attend_to_itself) -> Tensor:
        return function(x)


class ByTuple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return FUNCTIONS[-1](x)


class ByHandedGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return call_on(x, Attend)


def call_on(x: Tensor, function) -> Tensor:
    return function.apply(x)


class InAList(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*(F.scaled_dot_product_attention(y, y, y) for y in x.split(1))])


class Excite(Feed):
    """A gate by the mean of the tokens, as squeeze and excitation."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.shrink(F.gelu(self.grow(x.mean(1, keepdim=True))))


class Foreign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return pytest.importorskip("numpy").asarray(x)


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


class ByClosure(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x


class ByImport(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        import observe

        return x + len(observe.__name__)


class Overridden(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return attend_to_itself(x)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Held(nn.Module):
    """Calls a function that it holds."""

    def __init__(self, function) -> None:
        super().__init__()
        self.act = function

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class HeldInAList(Held):
    def forward(self, x: Tensor) -> Tensor:
        return self.act[-1](x)


class HeldObject(Held):
    def forward(self, x: Tensor) -> Tensor:
        return self.act.mix(x)


class HeldFunctionOfAnObject(Held):
    def forward(self, x: Tensor) -> Tensor:
        return self.act.function(x)


class WithMethod(nn.Module):
    """Cannot attend when it is called, and has a method that does."""

    def mix(self, x: Tensor) -> Tensor:
        return attend_to_itself(x)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class HeldSizes(Held):
    """Calls a function of torch with sizes from a list, a dictionary and an object."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.act[0]) * self.act[1]["factor"] + self.act[2].dim


class Recurrence(nn.Module):
    """A state for each token, of what layers have made before the loop or make in it."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.news = nn.Linear(C, C), nn.Linear(C, C)


class ReadsStates(Recurrence):
    """A gated recurrent network."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), C)
        for i in range(x.shape[1]):
            z = (self.gates(h) + x[:, i]).sigmoid()
            h = (1 - z) * h + z * x[:, i].tanh()
        return h


class ReadsStatesByFunction(ReadsStates):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), C)
        for i in range(x.shape[1]):
            z = (F.linear(h, self.gates.weight) + x[:, i]).sigmoid()
            h = (1 - z) * h + z * x[:, i].tanh()
        return h


class ReadsStatesByMethod(ReadsStates):
    def gate(self, h: Tensor) -> Tensor:
        return self.gates(h).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), C)
        for i in range(x.shape[1]):
            z = self.gate(h)
            h = (1 - z) * h + z * x[:, i].tanh()
        return h


class AddsAlone(ReadsStates):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(len(x), C)
        for one in x.unbind(1):
            y = y + one
        return y


HARMLESS = [
    *(ReadsStates(), ReadsStatesByFunction(), ReadsStatesByMethod(), AddsAlone()),
    Feed(),
    Excite(),
    Steps(),
    WithGradient(),
    nn.Linear(C, C),
    nn.LayerNorm(C),
    nn.Sequential(Feed(), nn.GELU()),
    nn.Embedding(3, C),
    Held(F.gelu),
    HeldSizes([(1, 2), {"factor": 3.0}, SimpleNamespace(dim=4)]),
]
OTHERS = [
    *(
        ByMethod(),
        ByProperty(),
        ByFunction(),
        ByGradient(),
        ByHandedGradient(),
        InAList(),
        Foreign(),
        Pairs(),
        ByClosure(),
        ByImport(),
        Overridden(),
        Held(attend_to_itself),
    ),
    *(ByGradientInApply(), ByGradientByDefault(), ByOneOfTwoGradients(), ByDefault(), ByTuple()),
    *(HeldInAList([attend_to_itself]), HeldInAList((ByFunction(),)), HeldInAList([[], attend_to_itself])),
    *(HeldObject(Helper()), HeldFunctionOfAnObject(Helper()), HeldObject(WithMethod())),
    *(Held(F.softmax), Held(F.scaled_dot_product_attention), nn.Softmax(-1), nn.MultiheadAttention(C, 2), nn.ModuleList()),
    *(nn.TransformerEncoderLayer(C, 2), nn.Sequential(Feed(), ByFunction())),
]


@pytest.mark.parametrize("module", HARMLESS, ids=lambda module: type(module).__name__)
def test_a_module_whose_code_can_be_read_to_its_end_cannot_attend(module):
    assert set(find_skippable(module.modules())) == {id(part) for part in module.modules()}


@pytest.mark.parametrize("module", OTHERS, ids=lambda module: type(module).__name__)
def test_a_module_that_attends_or_cannot_be_read_is_intercepted(module):
    assert id(module) not in find_skippable(module.modules())


def test_hooks_and_a_forward_of_the_instance_are_intercepted():
    for change in (
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.shrink.register_forward_pre_hook(lambda *_: None),
        lambda module: setattr(module, "forward", attend_to_itself),
        lambda module: setattr(module, "shrink", ByFunction()),
    ):
        module = Feed()
        change(module)
        assert id(module) not in find_skippable(module.modules())


class ByReplaced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return double_numbers(x)


def test_a_function_that_is_replaced_after_a_recording_is_read_anew(monkeypatch):
    module = ByReplaced()
    assert id(module) in find_skippable(module.modules())
    monkeypatch.setattr(f"{__name__}.double_numbers", attend_to_itself)
    assert id(module) not in find_skippable(module.modules())


def test_what_a_module_holds_of_itself_ends():
    loop: list[object] = [3]
    loop.append(loop)
    module = HeldInAList(loop)
    assert id(module) in find_skippable(module.modules())


class Given(nn.Module):
    """Calls what it is handed."""

    def forward(self, x: Tensor, function) -> Tensor:
        return function(x)


class Model(nn.Module):
    """Attention inside what harmless modules call, or around what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.feed, self.drop = Given(), Feed(), nn.Dropout(0.0)

    def forward(self, x: Tensor, way: str) -> Tensor:
        if way == "given":
            return self.given(self.feed(x), attend_to_itself)
        weights = self.drop((x @ self.feed(x).mT).softmax(-1))
        return self.drop(weights) @ x


def test_a_function_that_a_skippable_module_is_handed_is_intercepted():
    recording, _ = record_and_compare(Model().eval(), lambda model: model(X, "given"))
    assert [call.name for call in recording.calls] == ["given"]


def test_weights_that_pass_through_a_skippable_module_are_still_weights():
    recording, _ = record_and_compare(Model().eval(), lambda model: model(X, "weights"))
    assert recording.names == [""]


@pytest.mark.slow
def test_a_hook_that_is_hung_on_inside_the_block_is_intercepted():
    model = Model().eval()

    def forward(model: nn.Module) -> Tensor:
        hook = model.feed.register_forward_hook(lambda module, args, out: attend_to_itself(out))
        try:
            return model.feed(X)
        finally:
            hook.remove()

    recording, _ = record_and_compare(model, forward)
    assert [call.name for call in recording.calls] == ["feed"]

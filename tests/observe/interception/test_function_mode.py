"""The door of functions: regard's own attention, and kernels that are called by themselves."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from observe.recording_checks import EQUAL, assert_map, compute_weights, distance, record_and_compare
from regard import Causal, Window
from regard.observe import record

B, H, T, D, C = 2, 3, 7, 4, 12


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "simple": regard.SimpleSelfAttention(),
        "self": regard.SelfAttention(C, C),
        "bare": regard.layers.BareSelfAttention(C, C),
        "causal": regard.CausalAttention(C, C, 11, 0.3),
        "stacked": regard.StackedHeads(C, D, 11, 0.3, H),
        "multi head": regard.MultiHeadAttention(C, C, 11, 0.3, H),
    }


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", layers())
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_our_own_layers_are_recorded_before_their_dropout(name, training, batched):
    layer = layers()[name].train(training)
    x = torch.randn(B, T, C) if batched else torch.randn(T, C)
    recording, _ = record_and_compare(layer, lambda m: m(x))
    weights = layer.steps(x).weights
    weights = weights if name in ("stacked", "multi head") else weights.unsqueeze(-3)
    assert len(recording.layers()) == 1
    assert distance(recording.map(0), weights if batched else weights[None]) < EQUAL


class Own(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, **self.settings)


@pytest.mark.usefixtures("in_float64")
def test_every_setting_of_our_own_attention_is_in_the_map():
    torch.manual_seed(0)
    q, k, v = torch.randn(B, H, T, D), torch.randn(B, 1, T, D), torch.randn(B, 1, T, D)
    settings = {"softcap": 2.0, "bias": torch.randn(H, T, T), "sinks": torch.randn(H), "scale": 0.7, "offset": 1}
    rule = Causal() & Window(3)
    recording, _ = record_and_compare(Own(mask=rule, **settings), lambda m: m(q, k, v))
    assert distance(recording.map(0), regard.attend(q, k, v, rule, **settings).weights) < EQUAL


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.usefixtures("in_float64")
def test_what_our_own_attention_was_handed_may_be_written_to_afterwards(mode):
    q, k, v = (torch.randn(B, H, T, D) for _ in range(3))
    given = {"bias": torch.randn(H, T, T), "sinks": torch.randn(H), "offset": torch.arange(B)}
    with mode():
        expected = regard.attend(q, k, v, Causal(), **given).weights
        recording, _ = record_and_compare(Own(mask=Causal(), **given), lambda m: m(q, k, v))
        for x in (q, k, v, *given.values()):
            x.add_(1)
    assert distance(recording.map(0), expected) < EQUAL


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.usefixtures("in_float64")
def test_a_bias_of_our_own_attention_may_be_written_to_between_layers(mode):
    q, bias = torch.randn(B, H, T, D), torch.randn(H, T, T)
    first, second, given = Own(bias=bias), Own(bias=bias), torch.randn(2, H, T, T)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([first, second])

        def forward(self) -> list[Tensor]:
            return [part(q, q, q) for part, one in zip(self.parts, given, strict=True) if bias.copy_(one) is bias]

    with mode():
        recording, _ = record_and_compare(Both(), lambda m: m())
    for name, one in zip(recording.names, given, strict=True):
        assert distance(recording.map(name), regard.attend(q, q, q, bias=one).weights) < EQUAL


def test_a_wrong_call_of_our_own_attention_raises_as_it_did():
    model = Own(offset=0)
    with record(model) as recording, pytest.raises(regard.errors.ShapeError, match="its d is 5"):
        model(torch.randn(B, H, T, D), torch.randn(B, H, T, 5), torch.randn(B, H, T, D))
    assert not recording.missed


class Calls(nn.Module):
    def __init__(self, kernel: object) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, q: Tensor) -> Tensor:
        out = self.kernel(q)
        return out[0] if isinstance(out, tuple) else out


@torch.library.custom_op("regard_tests::flash_attn_forward", mutates_args=())
def flash_attn_forward(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q):
        return flash_attn_forward(q)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (lambda q: FUSED(q, q, q), "_scaled_dot_product_flash_attention_for_cpu"),
        (lambda q: FUSED.default(q, q, q, 0.0, True), "_scaled_dot_product_flash_attention_for_cpu"),
        (lambda q: torch._scaled_dot_product_attention_math(q, q, q), "_scaled_dot_product_attention_math"),
        (lambda q: torch.ops.aten._scaled_dot_product_attention_math(q, q, q), "_scaled_dot_product_attention_math"),
        (flash_attn_forward, "flash_attn_forward"),
        (Function.apply, "flash_attn_forward"),
    ],
)
def test_a_kernel_called_by_itself_is_missed_once(kernel, name):
    model, q = nn.Sequential(Calls(kernel), Calls(kernel)), torch.randn(B, H, T, D)
    recording, _ = record_and_compare(model, lambda m: m(m(q)), missing=True)
    assert [(one.kernel, one.module) for one in recording.missed] == [(name, "0"), (name, "1")]
    assert not recording.calls


class Step(nn.Module):
    """A block as one trains it."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.project, self.out = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.drop, self.checkpointed = nn.Dropout(0.3), checkpointed

    def inner(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.project(self.norm(x)).chunk(3, -1))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        return self.drop(self.out(context.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is None:
            return x + self.inner(x)
        return x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.checkpointed)


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_a_training_step_is_the_same_to_the_bit_and_is_recorded_once(checkpointed):
    model = nn.Sequential(Step(checkpointed), Step(checkpointed)).train()
    x = torch.randn(B, T, C, requires_grad=True)

    def step(m):
        m.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        gradients = [p.grad.clone() for p in m.parameters()]
        given, x.grad = x.grad, None
        return loss, given, gradients

    recording, _ = record_and_compare(model, step)
    assert [call.name for call in recording.calls] == ["0", "1"]
    q, k, _ = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in model[0].project(model[0].norm(x)).chunk(3, -1))
    assert_map(recording.map(0), compute_weights(q, k, torch.ones(T, T).tril().bool()), q, k)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_of_torch_is_recorded_once(reentrant):
    layer = nn.TransformerEncoderLayer(C, H, 11, dropout=0.2, batch_first=True)
    x = torch.randn(B, T, C, requires_grad=True)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=reentrant)

    def step(m):
        m.zero_grad()
        m(x).square().mean().backward()
        given, x.grad = x.grad, None
        return given, [p.grad.clone() for p in m.parameters()]

    recording, _ = record_and_compare(Checkpointed(), step)
    assert [call.name for call in recording.calls] == ["layer.self_attn"]


def test_a_second_derivative_is_the_same():
    model = Step().eval().double()
    x = torch.randn(B, T, C, dtype=torch.float64, requires_grad=True)

    def twice(m):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (first,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)

    recording, _ = record_and_compare(model, twice)
    assert len(recording.calls) == 1


class Tagged(Tensor):
    """A subclass of tensors."""


@pytest.mark.slow
def test_our_own_attention_takes_part_in_torchs_protocol():
    q = torch.randn(B, H, T, D)
    expected, seen = regard.attention(q, q, q, Causal()), []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        watched = regard.attention(q, q, q, Causal())
    assert seen == [regard.attention]
    assert torch.equal(watched, expected)
    tagged = regard.attention(q.as_subclass(Tagged), q, q, Causal())
    assert type(tagged) is Tagged
    assert torch.equal(tagged.as_subclass(Tensor), expected)
    model = Own(mask=Causal())
    with record(model) as recording, Mode():
        out = model(q.as_subclass(Tagged), q, q)
    assert type(out) is Tagged
    assert_map(recording.map(0), compute_weights(q, q, torch.ones(T, T).tril().bool()), q, q)

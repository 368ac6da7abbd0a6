"""Tensors that are not what they seem: without numbers, wrapped, of another type. No error of ours comes of them."""

import warnings
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from observe.recording_checks import EQUAL, are_identical, assert_map, compute_weights, record_and_compare
from regard.observe import record

B, H, T, C = 2, 3, 5, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.mask = nn.Linear(C, 3 * C), torch.ones(T, T).tril().bool()

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.unflatten(-1, (H, -1)).transpose(-2, -3) for y in self.project(x).chunk(3, -1))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask if self.mask.device == x.device else None
        return F.scaled_dot_product_attention(*self.split(x), attn_mask=mask).transpose(-2, -3).flatten(-2)


X = torch.randn(B, T, C)


def run_unrecorded(model: nn.Module, run, match: str) -> Tensor:
    with warnings.catch_warnings(record=True) as said, record(model) as recording:
        warnings.simplefilter("always")
        out = run(model)
    assert len([one for one in said if "not recorded" in str(one.message)]) == 1
    assert not recording.calls
    assert match in recording.missed[0].reason
    return out


def test_the_meta_device_has_no_numbers():
    out = run_unrecorded(Attention().to("meta"), lambda m: m(X.to("meta")), "meta device")
    assert out.is_meta
    assert out.shape == X.shape


def test_fake_tensors_have_no_numbers():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = Attention()
    with mode:
        x = torch.randn(B, T, C)
        out = run_unrecorded(model, lambda m: m(x), "FakeTensor")
    assert out.shape == X.shape
    with FakeTensorMode(allow_non_fake_inputs=True):
        run_unrecorded(Attention(), lambda m: m(torch.randn(B, T, C)), "FakeTensor")


class Sums(nn.Module):
    """Attention by hand, beside the sum of a nested tensor: a dense one, of no dense tensor."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[0, :2], x[0, :3]], layout=torch.jagged)
        return (x @ x.mT).softmax(-1) @ x + rows.sum(1).sum()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_sum_of_a_nested_tensor_ends_no_following():
    recording, _ = record_and_compare(Sums(), lambda m: m(X))
    assert not recording.missed
    assert recording.map(0).shape == (B, 1, T, T)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_stands_for_many_and_is_missed():
    model = Attention().double()
    many = torch.randn(3, B, T, C, dtype=torch.float64)
    out = run_unrecorded(model, lambda m: vmap(m)(many), "vmap")
    torch.testing.assert_close(out, torch.stack([model(x) for x in many]), rtol=0, atol=EQUAL)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_the_transform_grad_is_recorded():
    model = Attention()
    weights = dict(model.named_parameters())

    def loss(weights, x):
        return functional_call(model, weights, x).square().sum()

    recording, _ = record_and_compare(model, lambda m: grad(loss)(weights, X))
    q, k, _ = model.split(X)
    assert_map(recording.map(0), compute_weights(q, k, model.mask), q, k)
    many = vmap(grad(loss), in_dims=(None, 0))
    run_unrecorded(model, lambda m: many(weights, X), "vmap")


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(T, T))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.bias * 2)


def test_a_bias_that_is_differentiated_is_stored_as_numbers():
    model, x = Biased(), torch.randn(B, H, T, C)
    weights = dict(model.named_parameters())
    recording, _ = record_and_compare(model, lambda m: grad(lambda w: functional_call(m, w, x).square().sum())(weights))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(recording.map(0).planes.request.bias)
    bias = model.bias.detach().double() * 2
    assert_map(recording.map(0), compute_weights(x, x, bias=bias), x, x, bias=bias)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_forward_derivatives_are_recorded():
    model = Attention()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        recording, _ = record_and_compare(model, lambda m: jvp(m, (X,), (torch.ones_like(X),)))
    assert len(recording.calls) == 1


class Tagged(Tensor):
    """A subclass that looks on at functions."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Tagged.seen.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_of_tensor_is_recorded_and_sees_what_it_saw():
    model, x = Attention(), X.as_subclass(Tagged)
    Tagged.seen.clear()
    model(x)
    before = list(Tagged.seen)
    Tagged.seen.clear()
    with record(model) as recording:
        out = model(x)
    assert type(out) is Tagged
    assert Tagged.seen == before
    q, k, _ = model.split(X)
    assert_map(recording.map(0), compute_weights(q, k, model.mask), q, k)
    assert type(recording.map(0).dense()) is Tensor


class Logged(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [True, False])
def test_a_mode_of_dispatch_sees_what_it_saw(inside):
    model = Attention()
    with Logged() as before:
        expected = model(X)
    log = Logged()
    if inside:
        with record(model) as recording, log:
            out = model(X)
    else:
        with log, record(model) as recording:
            out = model(X)
    assert log.seen == before.seen
    assert are_identical(out, expected)
    assert len(recording.calls) == 1


def test_a_mask_that_is_no_tensor_is_the_models_own_error():
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=[1])

    with pytest.raises(TypeError, match="attn_mask"), record(model := Wrong()) as recording:
        model(X)
    assert not recording.missed

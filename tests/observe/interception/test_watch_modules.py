"""watch_modules entered and left: nested recordings, and the modes of others around them, inside them and across them."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from observe.interception.conftest import ours
from observe.recording_checks import are_identical, assert_map, compute_weights, record_and_compare
from regard.observe import record

B, H, T, C = 2, 3, 5, 12
X = torch.randn(B, T, C)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(C, 3 * C)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.split(x)).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.ModuleDict({"attn": Attention()})

    def forward(self, x: Tensor) -> Tensor:
        return self.block["attn"](x)


class Watching(TorchFunctionMode):
    """Another program's mode."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def stack() -> list[object]:
    return list(torch.overrides._get_current_function_mode_stack())


def test_two_models_and_blocks_that_end_in_another_order():
    one, other = Model(), Model()
    first, second = record(one), record(other)
    a, b = first.__enter__(), second.__enter__()
    one(X), other(X)
    first.__exit__(None, None, None)
    one(X), other(X)
    second.__exit__(None, None, None)
    one(X), other(X)
    assert (len(a.calls), len(b.calls)) == (1, 2)


def test_a_model_inside_a_model_is_recorded_by_both():
    inner = Model()
    outer = nn.Sequential(inner, nn.Linear(C, C))
    with record(outer) as a, record(inner) as b:
        outer(X)
        inner(X)
    assert [call.name for call in a.calls] == ["0.block.attn"] * 2
    assert [call.name for call in b.calls] == ["block.attn"] * 2


def record_with_mode(model, call, around):
    """What a call recorded with a mode around the block, or inside it, gives; and the mode."""
    mode = Watching()
    if around:
        with mode, record(model) as recording:
            out = call(model)
    else:
        with record(model) as recording, mode:
            out = call(model)
    return recording, out, mode


@pytest.mark.parametrize("around", [True, False])
def test_a_mode_around_or_inside_sees_what_it_saw(around):
    model = Model()
    with Watching() as before:
        expected = model(X)
    recording, out, mode = record_with_mode(model, lambda m: m(X), around)
    assert mode.seen == before.seen
    assert are_identical(out, expected)
    q, k, _ = model.block["attn"].split(X)
    assert_map(recording.map(0), compute_weights(q, k), q, k)


@pytest.mark.parametrize(
    "module", [nn.MultiheadAttention(C, H, batch_first=True), nn.TransformerEncoderLayer(C, 4, 11, batch_first=True)]
)
@pytest.mark.parametrize("around", [True, False])
def test_a_mode_beside_modules_of_torch(module, around):
    module.eval().requires_grad_(False)
    call = (lambda m: m(X, X, X)[0]) if isinstance(module, nn.MultiheadAttention) else (lambda m: m(X))
    with Watching() as before:
        expected = call(module)
    recording, out, mode = record_with_mode(module, call, around)
    assert are_identical(out, expected)
    assert mode.seen == before.seen
    assert len(recording.calls) == 1


def test_a_mode_that_is_entered_inside_and_left_after_the_block():
    model, mode = Model(), Watching()
    with record(model) as recording:
        mode.__enter__()
        model(X)
    assert stack() == [mode]
    mode.__exit__(None, None, None)
    assert stack() == []
    assert len(recording.calls) == 1


def test_a_mode_that_is_entered_before_and_left_inside_the_block():
    model, mode = Model(), Watching()
    mode.__enter__()
    with record(model):
        model(X)
        mode.__exit__(None, None, None)  # takes whatever is uppermost, as torch's modes do
    assert stack() in ([], [mode])
    while stack():
        torch.overrides._pop_mode()


@pytest.mark.parametrize("inside", [True, False])
def test_a_device_context(inside):
    model = Model()
    with torch.device("cpu"), record(model) as recording:
        model(X)
    assert len(recording.calls) == 1
    if inside:
        with record(model) as recording, torch.device("cpu"):
            model(X)
        assert len(recording.calls) == 1


def test_a_default_device_set_inside_the_block():
    model = Model()
    with record(model) as recording:
        torch.set_default_device("cpu")
        model(X)
    assert len(recording.calls) == 1
    assert all(type(mode).__name__ == "DeviceContext" for mode in stack())
    torch.set_default_device(None)
    assert stack() == []


def test_names_are_what_the_program_made_of_them_inside_the_block():
    was = vars(nn.Module)["__call__"]

    def mine(self, *args, **kwargs):
        return was(self, *args, **kwargs)

    with record(Model()):
        nn.Module.__call__ = mine
    found = vars(nn.Module)["__call__"]
    nn.Module.__call__ = was
    assert found is mine


@pytest.mark.slow
def test_the_mode_is_on_for_the_whole_block_or_for_each_forward_in_a_generator_and_off_after_it():
    model = Model()
    heights = []
    model.block["attn"].register_forward_hook(lambda *_: heights.append(len(stack())))

    def enter():
        with record(model):
            yield len(stack())
            model(X)
            yield len(stack())

    with record(model):
        assert len(stack()) == 1
        model(X)
        assert len(stack()) == 1
        assert vars(nn.Module)["__call__"].__module__.startswith("regard")
        assert any(name.endswith("_maybe_set_eval_frame") for name in ours())
    assert list(enter()) == [0, 0]
    assert heights == [1, 1]
    assert stack() == ours() == []


IMPORTS = """
import sys
import regard
assert "torch._dynamo" not in sys.modules, "importing regard imports torch._dynamo"
import torch
from regard.observe import record
with record(torch.nn.Linear(2, 3)):
    pass
assert "torch._dynamo" not in sys.modules, "record imports torch._dynamo"
"""


@pytest.mark.slow
def test_neither_the_import_nor_a_recording_brings_the_compiler():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=300)


def test_a_block_without_attention():
    recording, _ = record_and_compare(nn.Linear(C, C), lambda m: m(X))
    assert not recording.calls

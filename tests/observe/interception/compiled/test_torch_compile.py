"""torch.compile, torch.jit and torch.export around a recording: observed, refused, or told, and never changed."""

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import MambaConfig, MambaModel

import regard
from observe.recording_checks import record_and_compare
from regard.errors import ConfigError
from regard.observe import record

B, T, C = 2, 5, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(y[0], y[1], y[2]).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn, self.mlp = Attention(), nn.Sequential(nn.Linear(C, C), nn.GELU())
        self.activation = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return self.activation(x + self.mlp(x))


X = torch.randn(B, T, C)


@pytest.fixture(autouse=True)
def dynamo_reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_missed(recording, module: str = "") -> None:
    assert [(one.kernel, one.module) for one in recording.missed] == [("torch.compile", module)]
    assert "bypasses the hooks" in recording.missed[0].reason
    assert not recording.calls


@pytest.mark.parametrize("part", ["", "attn", "mlp"])
def test_a_model_with_a_compiled_part_is_refused(part):
    model = Model()
    model.get_submodule(part).compile(backend="eager")
    with pytest.raises(ConfigError, match=f"{part or 'the model'} is compiled"), record(model):
        pass
    with pytest.raises(ConfigError, match="compiled"), record(torch.compile(Model(), backend="eager")):
        pass


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, X)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_is_refused(make):
    model = nn.Sequential(nn.Linear(C, C), make(Attention()))
    with pytest.raises(ConfigError, match="1 is"), record(model):
        pass


FORMS = {
    "a function that calls the model": lambda m, backend: torch.compile(lambda x: m(x), backend=backend),
    "a function that calls it deep inside": lambda m, backend: torch.compile(outer(m), backend=backend),
    "the model's own forward": lambda m, backend: torch.compile(m.forward, backend=backend),
    "the model": lambda m, backend: torch.compile(m, backend=backend),
    "a function that has the model as a default": lambda m, backend: torch.compile(lambda x, m=m: m(x), backend=backend),
    "a function that is handed the model": lambda m, backend: bind_module(m, torch.compile(call, backend=backend)),
}


def outer(m):
    class Holder:
        def __init__(self) -> None:
            self.inside = {"model": m}

    holder = Holder()

    def inner(x):
        return holder.inside["model"](x)

    return lambda x: inner(x) + 1


def call(m, x):
    return m(x)


def bind_module(m, compiled):
    return lambda x: compiled(m, x)


@pytest.mark.parametrize("form", [*FORMS][::2])
def test_code_compiled_before_is_reported_and_not_compiled_anew(form):
    model, counter = Model(), torch._dynamo.testing.CompileCounter()
    function = FORMS[form](model, counter)
    function(X)
    frames = counter.frame_count
    recording, _ = record_and_compare(model, lambda m: function(X), missing=True)
    assert_missed(recording)
    function(X)
    assert counter.frame_count == frames


@pytest.mark.parametrize("form", FORMS)
def test_code_compiled_in_the_block_is_recorded_and_not_compiled_anew_after_it(form):
    model, counter = Model(), torch._dynamo.testing.CompileCounter()
    function = FORMS[form](model, counter)
    expected = model(X)
    with record(model) as recording:
        outputs = [function(X) for _ in range(2)]
    frames = counter.frame_count
    assert all(torch.equal(out, function(X)) for out in outputs)
    assert counter.frame_count == frames
    assert_equal_to_eager(recording, model, runs=2)
    assert torch.equal(outputs[0], expected + 1 if "deep" in form else expected)
    again, _ = record_and_compare(model, lambda m: function(X))  # the op is still there
    assert_equal_to_eager(again, model)


def assert_equal_to_eager(recording, model, runs: int = 1) -> None:
    with record(model) as eager:
        model(X)
    assert not recording.missed
    assert [(one.name, one.kind) for one in recording.calls] == runs * [(one.name, one.kind) for one in eager.calls]
    assert len(recording.runs) == runs
    for run in recording.runs:
        for name in eager.names:
            assert torch.equal(run.map(name).dense(), eager.map(name).dense())


@pytest.mark.parametrize("part", ["", "attn"])
def test_a_model_compiled_in_place_inside_the_block_is_recorded(part):
    model = Model()
    expected = model(X)
    with record(model) as recording:
        model.get_submodule(part).compile(backend="eager")
        assert torch.equal(model(X), expected)
    model.get_submodule(part)._compiled_call_impl = None
    assert_equal_to_eager(recording, model)


@pytest.mark.slow
def test_training_in_compiled_code_has_the_same_gradients():
    model = Model()
    gradients = []
    for is_recorded in (False, True):
        torch._dynamo.reset()
        model.zero_grad()
        with record(model) if is_recorded else contextlib.nullcontext():
            torch.compile(model, backend="aot_eager")(X).square().mean().backward()
        gradients.append([one.grad.clone() for one in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_compiled_functions_without_attention_change_nothing():
    model, counter = Model().requires_grad_(False), torch._dynamo.testing.CompileCounter()
    model.activation = torch.compile(lambda x: torch.tanh(x) * x, backend=counter)
    loss = torch.compile(lambda y: y.square().mean(), backend=counter)
    loss(model(X))
    frames = counter.frame_count
    recording, _ = record_and_compare(model, lambda m: loss(m(X)))
    assert [one.name for one in recording.calls] == ["attn"]
    assert counter.frame_count == frames


def test_a_compiled_function_that_computes_attention_is_reported_with_its_module():
    model = nn.Sequential(nn.Linear(C, C), Held()).requires_grad_(False)
    recording, _ = record_and_compare(model, lambda m: m(X), missing=True)
    assert_missed(recording, "1")


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x)


def test_a_stance_that_compiles_nothing_is_recorded():
    model = Model()
    function = torch.compile(lambda x: model(x), backend="eager")
    with torch.compiler.set_stance("force_eager"):
        recording, _ = record_and_compare(model, lambda m: function(X))
    assert [one.name for one in recording.calls] == ["attn"]


def test_an_error_in_compiled_code_leaves_the_rest_of_the_block_recorded():
    model = Model()

    def fails(x):
        raise ValueError("no")

    function = torch.compile(fails, backend="eager")
    with record(model) as recording:
        with pytest.raises(ValueError, match="no"):
            function(X)
        model(X)
    assert [one.name for one in recording.calls] == ["attn"]


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.query(x) @ self.key(x).mT, -1) @ x


class SelfAttention(ByHand):
    """The same by another name."""


class MultiHead(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(C, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Runs(nn.Module):
    """Runs a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def attend_after_break(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return attend(x)


KERNEL = "scaled_dot_product_attention"
PARTS = {  # what is beside a kernel, and what of it is missed, in the module "0"
    "a layer": (lambda: nn.Linear(C, C), []),
    "written out by hand": (ByHand, []),
    "written out by hand in a module called attention": (SelfAttention, ["SelfAttention"]),
    "nn.MultiheadAttention": (MultiHead, ["compiled multi_head_attention_forward"]),
    "flex_attention": (lambda: Runs(lambda x: flex_attention(*3 * [x[:, None]])[:, 0]), ["compiled flex_attention"]),
    "a checkpoint": (lambda: Runs(lambda x: checkpoint(attend, x, use_reentrant=False)), [f"compiled {KERNEL}"]),
    "a branch": (lambda: Runs(lambda x: torch.cond(x.sum() > 0, attend, torch.sin, (x,))), [f"compiled {KERNEL}"]),
    "a graph break": (lambda: Runs(attend_after_break), ["torch.compile"]),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:not recorded")
@torch.no_grad()
def test_what_no_op_observes_is_missed_where_its_name_says_that_it_attends(part):
    make, missed = PARTS[part]
    model = nn.Sequential(make(), Attention())
    compiled = torch.compile(lambda x: model(x), backend="eager")
    expected = model(X)
    for _ in range(2):
        with record(model) as recording:
            assert torch.equal(compiled(X), expected)
        assert recording.names == ([""] if part == "a graph break" else ["1"])  # its graphs do not state their modules
        assert [one.kernel for one in recording.missed] == missed
        assert all(one.module in ("", "0") and "bypasses the hooks" in one.reason for one in recording.missed)


@pytest.mark.parametrize("part", [Attention, SelfAttention, MultiHead])
def test_interventions_in_compiled_code_say_why_they_change_nothing(part):
    model = nn.Sequential(part())
    expected = model(X)
    with pytest.warns(UserWarning, match="not applied: 0: .* bypasses"), regard.intervene(model, regard.KnockOut(0, 1)):
        assert torch.equal(torch.compile(model, backend="eager")(X), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not recorded", "ignore:Dynamo detected a call to a `functools.lru_cache`")
@torch.no_grad()
def test_a_recurrence_that_is_known_by_its_name_is_missed():
    model = MambaModel(MambaConfig(num_hidden_layers=2, hidden_size=C, state_size=5, vocab_size=50)).eval()
    with record(model) as recording:
        torch.compile(model, backend="eager")(torch.randint(0, 50, (B, T)), use_cache=False)
    assert [one.module for one in recording.missed] == ["layers.0.mixer", "layers.1.mixer"]


def test_attribution_of_compiled_code_says_that_it_is_recorded_without_gradients():
    model = Model()
    with record(model, keep="values") as recording:
        output = torch.compile(model, backend="eager")(X)
    with pytest.raises(ConfigError, match="Compiled code is recorded without gradients"):
        recording.attribute(output.sum())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_gives_the_same_bits_with_and_without_a_recording(dtype):
    model, x = nn.Sequential(Model(), Model()).eval().to(dtype), X.to(dtype)
    with torch.no_grad():
        expected = torch.compile(model)(x)
        torch._dynamo.reset()
        with record(model) as recording:
            output = torch.compile(model)(x)
    assert torch.equal(output, expected)
    assert recording.names == ["0.attn", "1.attn"]
    assert not recording.missed


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_the_model_inside_the_block_is_no_run_of_it(strict):
    model = Model().eval()
    expected = torch.export.export(model, (X,), strict=strict)
    with warnings.catch_warnings(), record(model) as recording:
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (X,), strict=strict)
    assert not recording.calls
    assert strict or "traced" in recording.missed[0].reason
    assert [str(node.target) for node in program.graph.nodes] == [str(node.target) for node in expected.graph.nodes]


def test_an_exported_program_is_recorded():
    program = torch.export.export(Model().eval(), (X,)).module()
    recording, _ = record_and_compare(program, lambda m: m(X))
    assert len(recording.calls) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_the_model_inside_the_block_adds_nothing_to_the_graph():
    model = Model().eval()
    expected = torch.jit.trace(model, X, check_trace=False)
    with warnings.catch_warnings(), record(model) as recording:
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, X, check_trace=False)
    assert [node.kind() for node in traced.inlined_graph.nodes()] == [node.kind() for node in expected.inlined_graph.nodes()]
    assert not recording.calls
    assert "traced" in recording.missed[0].reason


def test_a_graph_module_of_fx_is_recorded():
    model = torch.fx.symbolic_trace(nn.Sequential(Attention(), nn.GELU()))
    recording, _ = record_and_compare(model, lambda m: m(X))
    assert len(recording.calls) == 1
    with warnings.catch_warnings(), record(source := Attention()) as recording:
        warnings.simplefilter("ignore")
        torch.fx.symbolic_trace(source)
    assert not recording.calls
    assert "forward was called" in recording.missed[0].reason


LAZY = """
import sys, torch, warnings
from torch import nn
from regard.observe import record
assert "torch._dynamo" not in sys.modules
class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)
model, x, compiler = Attention(), torch.randn(2, 3, 5, 7), torch.compile
with warnings.catch_warnings(record=True), record(model) as recording:
    torch.compile(lambda x: model(x), backend="eager")(x)
assert len(recording.calls) == 1 and not recording.missed, recording.missed
assert torch.compile is compiler
import torch._dynamo.eval_frame as found
assert found._maybe_set_eval_frame.__module__.startswith("torch"), found._maybe_set_eval_frame
model.function = __import__("torch.nn.attention.flex_attention", fromlist=["flex_attention"]).flex_attention
"""


@pytest.mark.slow
def test_where_torch_compile_is_first_called_inside_the_block():
    subprocess.run([sys.executable, "-c", LAZY], check=True, timeout=300)


IMPORTING = """
import importlib, sys, threading, time, torch
from importlib.machinery import PathFinder
from torch import nn
from regard.observe import record
class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)
model, x = Attention(), torch.randn(2, 3, 5, 7)
with record(model):  # what a first recording imports
    model(x)
name = "torch._dynamo.eval_frame"
assert name not in sys.modules
has_begun = threading.Event()
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != name:
            return None
        spec = super().find_spec(fullname, path, target)
        execute = spec.loader.exec_module
        def exec_module(module):
            has_begun.set()
            time.sleep(0.5)  # a recording begins now, and waits
            execute(module)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder)
other = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
other.start()
has_begun.wait()
assert not hasattr(sys.modules[name], "_maybe_set_eval_frame")  # this test is of an import that has begun
with record(model) as recording:
    model(x)
assert len(recording.calls) == 1 and not recording.missed, recording.missed
other.join()
assert hasattr(sys.modules[name], "_maybe_set_eval_frame")
"""


@pytest.mark.slow
def test_recording_begins_while_another_thread_imports_dynamo():
    subprocess.run([sys.executable, "-c", IMPORTING], check=True, timeout=300)

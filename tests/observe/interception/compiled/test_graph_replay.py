"""Compiled graphs with attention that no op observes run again uncompiled, and every kind of attention in them is recorded."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import GPTNeoConfig, GPTNeoModel, LlamaConfig, LlamaModel, MambaConfig, MambaModel

import regard
from bounds import assert_within
from regard.observe import record
from regard.observe.interception.compiled.graph_inputs import WriteGuard
from regard.observe.interception.compiled.graph_nodes import find_written_inputs
from regard.observe.interception.compiled.graph_replay import GraphReplay, ModuleInterpreter, are_equal_outputs
from regard.observe.interception.plain_tensors import UnreadableError

B, T, C, H, D = 2, 7, 12, 3, 4
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of inductor
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def dynamo_reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Projected(nn.Module):
    """A norm and the projections of q, k and v (b, h, t, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(C), nn.Linear(C, 3 * C)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.project(self.norm(x)).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).unbind(0)


class ByHand(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = (q @ k.mT / 2).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


class InPlace(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        scores *= 0.3
        scores.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Kernel(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.split(x), is_causal=True).transpose(1, 2).flatten(2)


class Flex(Projected):
    def forward(self, x: Tensor) -> Tensor:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu")
        q, k, v = (F.pad(one, (0, 12)) for one in self.split(x))  # the compiled kernel takes 16 at least
        biased = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j), block_mask=block_mask)
        return biased[..., :D].transpose(1, 2).flatten(2)


class MultiHead(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(C, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Linear(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        total = q @ k.sum(-2).unsqueeze(-1)
        return (q @ (k.mT @ v) / total).transpose(1, 2).flatten(2)


class Checkpointed(ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Layers(nn.Module):
    """Layers that are not modules of torch, two of each kind, and one that is called twice."""

    def __init__(self, *parts) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([part() for part in parts for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x + self.layers[0](x)


PARTS = [ByHand, InPlace, Flex, MultiHead, Linear, Checkpointed]


def compile_and_record(model, *args, backend="eager", **given):
    """The output of a compiled model without a recording and in one, the recording, and that of the model itself."""
    expected = torch.compile(model, backend=backend)(*args, **given)
    torch._dynamo.reset()
    with record(model) as recording:
        output = torch.compile(model, backend=backend)(*args, **given)
    with record(model) as plain:
        model(*args, **given)
    return expected, output, recording, plain


def assert_same_maps(recording, plain, distance=0.0):
    assert not recording.missed
    assert [(one.name, one.kind) for one in recording.calls] == [(one.name, one.kind) for one in plain.calls]
    assert plain.calls or plain.runs[-1].implicit_names
    assert recording.notes == plain.notes
    for kind in ("self", "implicit"):
        for layer in range(count_layers(plain, kind)):
            assert_within(recording.map(layer, kind=kind).dense(), plain.map(layer, kind=kind).dense(), distance)


def count_layers(recording, kind):
    count = 0
    while True:
        try:
            recording.map(count, kind=kind)
        except regard.RegardError:
            return count
        count += 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_attention_of_every_kind_is_recorded_and_the_bits_do_not_change(part, backend):
    is_single = part is Flex and backend == "inductor"  # whose kernel takes no float64
    dtype = torch.float32 if is_single else torch.float64
    model, x = Layers(part, Kernel).to(dtype).eval(), torch.randn(B, T, C, dtype=dtype)
    expected, output, recording, plain = compile_and_record(model, x, backend=backend)
    assert torch.equal(output, expected)
    assert_same_maps(recording, plain, 0.0 if backend == "eager" else 1e-12)


@pytest.mark.slow
@torch.no_grad()
def test_a_model_of_transformers_is_recorded_as_without_a_compiler():
    torch.manual_seed(0)
    sizes = {"hidden_size": C, "num_heads": H, "intermediate_size": 13, "vocab_size": 50, "window_size": 3}
    model = GPTNeoModel(GPTNeoConfig(num_layers=2, attention_types=[[["global", "local"], 1]], **sizes)).double().eval()
    ids = torch.randint(0, 50, (B, T))
    expected, output, recording, plain = compile_and_record(model, ids, use_cache=False)
    assert torch.equal(output[0], expected[0])
    assert_same_maps(recording, plain)


@pytest.mark.slow
@torch.no_grad()
def test_recurrences_whose_function_the_graph_does_not_have_are_reported():
    torch.manual_seed(0)
    model = MambaModel(MambaConfig(num_hidden_layers=2, hidden_size=C, state_size=5, vocab_size=50)).double().eval()
    ids = torch.randint(0, 50, (B, T))
    expected = torch.compile(model, backend="eager")(ids, use_cache=False)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="not recorded"), record(model) as recording:
        output = torch.compile(model, backend="eager")(ids, use_cache=False)
    assert torch.equal(output[0], expected[0])
    assert [one.module for one in recording.missed] == ["layers.0.mixer", "layers.1.mixer"]
    assert all("without a softmax" in one.reason for one in recording.missed)


class Undivided(Projected):
    """Weights times values, divided by their sums and a number."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.mT / 2).exp()
        return (weights @ v / (weights.sum(-1, keepdim=True) + 1)).transpose(1, 2).flatten(2)


FORMS = {
    "a function that calls the model": lambda m: torch.compile(lambda x: m(x) + 1, backend="eager"),
    "the model's own forward": lambda m: torch.compile(m.forward, backend="eager"),
    "each of its layers in place": lambda m: [one.compile(backend="eager") for one in m.layers] and m,
}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_what_is_compiled_may_be_a_function_or_a_part(form):
    model, x = Layers(ByHand, Linear, Undivided, MultiHead).eval(), torch.randn(B, T, C)
    expected = model(x) + ("calls" in form)
    with record(model) as plain:
        model(x)
    with record(model) as recording:
        compiled = FORMS[form](model)
        assert torch.equal(compiled(x), expected)
        assert torch.equal(compiled(x), expected)
    assert not recording.missed
    assert recording.notes == plain.notes
    assert len(recording.runs) == 2
    for run in recording.runs:
        for kind in ("self", "implicit"):
            assert run.layers(kind) == plain.last.layers(kind)
            for layer in range(len(plain.last.layers(kind))):
                assert torch.equal(run.map(layer, kind=kind).dense(), plain.map(layer, kind=kind).dense())


def test_gradients_are_those_of_compiled_code_without_a_recording():
    model, x, slopes = Layers(ByHand, MultiHead), torch.randn(B, T, C), []
    for is_recorded in (False, True):
        torch._dynamo.reset()
        model.zero_grad()
        compiled = torch.compile(model, backend="aot_eager")
        if is_recorded:
            with record(model) as recording:
                compiled(x).square().mean().backward()
        else:
            compiled(x).square().mean().backward()
        slopes.append([one.grad.clone() for one in model.parameters()])
    assert all(map(torch.equal, *slopes))
    assert len(recording.calls) == 5
    assert not recording.missed


class Cached(Projected):
    """Writes its keys into a buffer, counts its calls, and has statistics of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(C)
        self.register_buffer("keys", torch.zeros(B, H, T, D))
        self.register_buffer("calls", torch.zeros(()))
        self.shift = nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shift[:3].add_(0.5)
        q, k, v = self.split(self.statistics(x.mT).mT + self.shift)
        self.keys.mul_(0.5)
        self.keys.add_(k)
        return (torch.softmax(q @ self.keys.mT, -1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_tensors_that_a_graph_writes_are_written_once(backend):
    x, states, outputs = torch.randn(B, T, C), [], []
    for is_recorded in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Cached().train()
        compiled = torch.compile(model, backend=backend)
        if is_recorded:
            with record(model) as recording:
                outputs.append([compiled(x) for _ in range(3)])
        else:
            outputs.append([compiled(x) for _ in range(3)])
        states.append(model.state_dict())
    assert all(map(torch.equal, *outputs))
    assert all(torch.equal(one, states[1][name]) for name, one in states[0].items())
    assert float(states[1]["calls"]) == 3
    assert not recording.missed
    assert len(recording.calls) == 3
    plain_model = Cached().train()
    plain_model.load_state_dict(states[1])
    with record(plain_model) as plain:
        plain_model(x)
    with record(model) as again:
        compiled(x)
    assert torch.equal(again.map(0).dense(), plain.map(0).dense()) or backend != "eager"


def test_inputs_that_a_graph_writes_are_found_through_views_and_no_others():
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def write(a, b, c, d, e, f):
        a[:, 1:].mT[0] = 1
        b += 1
        torch.add(c, 1, out=d)
        (e * 2).add_(1)
        return F.relu(f, True) + a.sum()

    torch.compile(write, backend=keep)(*(torch.randn(2, 3) for _ in range(6)))
    names = [node.name for node in graphs[0].graph.find_nodes(op="placeholder")]
    assert {names[n] for n in find_written_inputs(graphs[0])} == {"l_a_", "l_b_", "l_d_", "l_f_"}


@torch._dynamo.allow_in_graph
def halve(x):
    x.mul_(0.5)
    return x


class Looked(nn.Module):
    """A table whose rows are made shorter when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((5, C), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.embedding_bag(torch.arange(2)[None], self.table, max_norm=1.0)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        self.shift[:3].add_(0.5)
        return x + self.shift


class Normed(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(C)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class Write(nn.Module):
    """Runs a function that writes into its input."""

    def __init__(self, write) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return x


WRITERS = {
    "a module whose function has inplace by position": lambda: nn.LeakyReLU(0.5, inplace=True),
    "dropout in place": lambda: nn.Dropout(0.4, inplace=True),
    "a view of an argument by its name": lambda: Write(lambda x: torch.transpose(input=x, dim0=1, dim1=2).mul_(0.5)),
    "the second result of a function": lambda: Write(lambda x: torch.broadcast_tensors(torch.zeros(1), x)[1].mul_(0.5)),
    "a function that is not traced": lambda: Write(halve),
    "a list": lambda: Write(lambda x: torch._foreach_mul_([x], 0.5)),
    "statistics": Normed,
    "rows of a table": Looked,
    "a view of a parameter": Shifted,
}


@pytest.mark.parametrize("writer", WRITERS)
@torch.no_grad()
def test_inputs_buffers_and_parameters_are_as_a_compiled_run_without_a_recording_leaves_them(writer):
    """The input is also given as a view of itself, which shares its memory."""
    ends, recordings = [], []
    for kind in ("compiled", "recorded", "not compiled"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, memory = nn.Sequential(WRITERS[writer](), ByHand()).train(), torch.randn(B, T + 1, C)
        function = (lambda x, y, m=model: m(x) + y.sum()) if kind == "not compiled" else None
        function = function or torch.compile(lambda x, y, m=model: m(x) + y.sum(), backend="eager")
        torch.manual_seed(1)
        if kind == "compiled":
            output = function(memory[:, 1:], memory)
        else:
            with record(model) as recording:
                output = function(memory[:, 1:], memory)
            recordings.append(recording)
        ends.append([output, memory, *model.state_dict().values(), torch.rand(2)])
    for other in ends[1:]:
        assert all(map(torch.equal, ends[0], other))
    assert_same_maps(*recordings)


@torch.no_grad()
def test_a_write_into_a_parameter_that_was_not_seen_in_time_is_refused_and_reported(monkeypatch):
    monkeypatch.setattr("regard.observe.interception.compiled.graph_replay.find_written_inputs", lambda gm: set())
    model, x = nn.Sequential(Shifted(), ByHand()), torch.randn(B, T, C)
    with pytest.warns(UserWarning, match="writes into a tensor that has no copy"), record(model) as recording:
        torch.compile(model, backend="eager")(x)
    assert float(model[0].shift[0]) == 0.5
    assert not recording.calls


WRITES = {
    "in place": lambda y: y.add_(1),
    "a view": lambda y: y[:, 1:].mT.zero_(),
    "out": lambda y: torch.add(y, 1, out=y),
    "data": lambda y: y.data.add_(1),
    "a list": lambda y: torch._foreach_add_([y], 1),
    "statistics": lambda y: F.batch_norm(torch.randn(5, 3), y[0], y[0] + 1, training=True),
    "rows": lambda y: F.embedding(torch.arange(2), y, max_norm=0.1),
    "by position": lambda y: F.leaky_relu(y, 0.5, True),
}


@pytest.mark.parametrize("write", WRITES)
def test_the_guard_refuses_writes_but_into_what_is_free_or_made_in_it(write):
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    before = y.clone()
    with WriteGuard([x]):
        WRITES[write](x[:])
        WRITES[write](torch.ones(2, 3) * y)
        with pytest.raises(UnreadableError, match="has no copy"):
            WRITES[write](y)
    assert torch.equal(y, before)


class Retention(nn.Module):
    """Retention in chunks of c tokens with a table of decays, which is a buffer of (c, c)."""

    def __init__(self, chunk: int = 4) -> None:
        super().__init__()
        self.project, self.chunk = nn.Linear(C, 3 * C), chunk
        decays = 0.9 ** torch.arange(chunk, dtype=torch.float64)
        self.register_buffer("decays", decays)
        self.register_buffer("table", (decays[:, None] / decays).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        state, outputs = torch.zeros(len(x), C, C, dtype=x.dtype), []
        for one in range(0, x.shape[1], self.chunk):
            a, b, c = (part[:, one : one + self.chunk] for part in (q, k, v))
            outputs.append((a @ b.mT * self.table) @ c + (a * self.decays[:, None] * 0.9) @ state)
            state = state * 0.9**self.chunk + (b * (self.decays[-1] / self.decays)[:, None]).mT @ c
        return torch.cat(outputs, 1)


class Gated(nn.Module):
    """A loop over tokens with a gate of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(C, 2 * C)

    def forward(self, x: Tensor) -> Tensor:
        gates, values = self.project(x).chunk(2, -1)
        gates, state, states = gates.sigmoid(), torch.zeros_like(values[:, 0]), []
        for one in range(x.shape[1]):
            state = gates[:, one] * state + (1 - gates[:, one]) * values[:, one]
            states.append(state)
        return torch.stack(states, 1)


class Scanned(Gated):
    """The same without a loop."""

    def forward(self, x: Tensor) -> Tensor:
        gates, values = self.project(x).chunk(2, -1)
        totals = gates.sigmoid().cumprod(1)
        return totals * (values / totals).cumsum(1)


class Doubled(Gated):
    """The same in rounds."""

    def forward(self, x: Tensor) -> Tensor:
        gates, states = self.project(x).chunk(2, -1)
        gates, states = gates.sigmoid(), (1 - gates.sigmoid()) * states
        for n in (1, 2, 4):
            states = torch.cat([states[:, :n], states[:, n:] + gates[:, n:] * states[:, :-n]], 1)
            gates = torch.cat([gates[:, :n], gates[:, n:] * gates[:, :-n]], 1)
        return states


class BesideKernel(nn.Module):
    """A recurrence of vectors beside F.scaled_dot_product_attention, in a module of its own or in the same forward."""

    def __init__(self, part: type[Gated], is_inside: bool) -> None:
        super().__init__()
        self.own = part()
        self.run = self.own if is_inside else self.own.forward

    def forward(self, x: Tensor) -> Tensor:
        y = x.unsqueeze(1)
        return F.scaled_dot_product_attention(y, y, y).squeeze(1) + self.run(x)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("part", [Gated, Scanned, Doubled])
@torch.no_grad()
def test_recurrences_of_vectors_beside_a_kernel_are_recorded_as_without_a_compiler(part, is_inside):
    torch.manual_seed(0)
    model, x = nn.Sequential(BesideKernel(part, is_inside)).double(), torch.randn(B, 8, C, dtype=torch.float64)
    expected, output, recording, plain = compile_and_record(model, x)
    assert torch.equal(output, expected)
    assert_same_maps(recording, plain)
    assert [call.kind for call in recording.calls] == ["self", "implicit"]
    found = recording.map(0, kind="implicit") @ recording.values(0, kind="implicit")
    assert_within(found.squeeze(-1).mT, model[0].own(x), 1e-12)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("part", [Retention, Gated, Scanned])
@torch.no_grad()
def test_recurrences_are_recorded_as_without_a_compiler_in_the_model_itself_and_in_a_part(part, is_inside):
    torch.manual_seed(0)
    model, x = part().double(), torch.randn(B, 8, C, dtype=torch.float64)
    model = nn.Sequential(model) if is_inside else model
    expected, output, recording, plain = compile_and_record(model, x)
    assert torch.equal(output, expected)
    assert_same_maps(recording, plain)
    assert recording.map(0, kind="implicit").shape[-2:] == (8, 8)


@torch.no_grad()
def test_a_compiled_function_of_a_part_has_the_lengths_of_its_arguments():
    class Inside(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.run = lambda x: Gated.forward(self, x)

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x * 2)

    torch.manual_seed(0)
    model, x = nn.Sequential(Inside()).double(), torch.randn(B, 8, C, dtype=torch.float64)
    with record(model) as plain:
        expected = model(x)
    with record(model) as recording:
        model[0].run = torch.compile(model[0].run, backend="eager")
        assert torch.equal(model(x), expected)
    assert_same_maps(recording, plain)


class Dropped(ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.4, self.training))


def test_random_numbers_go_on_as_without_a_recording_and_the_graph_draws_the_same_again():
    model, x, outputs = Layers(Dropped).train(), torch.randn(B, T, C), []
    for is_recorded in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        torch.manual_seed(5)
        if is_recorded:
            with record(model) as recording:
                outputs.append((compiled(x), torch.rand(3)))
        else:
            outputs.append((compiled(x), torch.rand(3)))
    assert all(map(torch.equal, *outputs))
    torch.manual_seed(5)
    with record(model) as plain:
        model(x)
    assert_same_maps(recording, plain)


@pytest.mark.slow
def test_compiled_code_that_draws_other_random_numbers_is_reported_and_not_recorded():
    model, x = Layers(Dropped).train(), torch.randn(B, T, C)
    with pytest.warns(UserWarning, match="random numbers"), record(model) as recording:
        torch.compile(model, backend="inductor")(x)
    assert not recording.calls
    assert [(one.kernel, one.module) for one in recording.missed] == [("torch.compile", "")]


def test_a_backend_whose_outputs_differ_is_reported_and_not_recorded():
    def wrong(gm, inputs):
        return lambda *args: [x * 1.001 for x in gm.forward(*args)]

    model, x = Layers(ByHand), torch.randn(B, T, C)
    with pytest.warns(UserWarning, match="other outputs"), record(model) as recording:
        torch.compile(model, backend=wrong)(x)
    assert not recording.calls
    assert len(recording.missed) == 1


def test_outputs_agree_to_half_of_their_digits_and_integers_to_the_last():
    x = torch.randn(5, 7)
    assert are_equal_outputs(x, x * (1 + 1e-5), False)
    assert not are_equal_outputs(x, x * (1 + 1e-5), True)
    assert not are_equal_outputs(x, x * (1 + 1e-3), False)
    assert not are_equal_outputs(x.double(), x.double() * (1 + 1e-5), False)
    assert are_equal_outputs(x.bfloat16(), x.bfloat16() * (1 + 1e-2), False)
    assert not are_equal_outputs(x, x.where(x > 0, torch.nan), False)
    assert not are_equal_outputs(torch.arange(3), torch.arange(3) + 1, False)
    assert not are_equal_outputs(x, x[:3], False)


def test_an_error_of_the_second_run_is_reported_and_the_model_goes_on(monkeypatch):
    model, x = Layers(ByHand), torch.randn(B, T, C)

    def fail(*args):
        raise RuntimeError("no")

    monkeypatch.setattr("regard.observe.interception.compiled.graph_replay.are_equal_outputs", fail)
    expected = model(x)
    with pytest.warns(UserWarning, match="could not be run again"), record(model) as recording:
        output = torch.compile(model, backend="eager")(x)
    assert torch.equal(output, expected)
    assert not recording.calls


def test_the_graph_runs_again_inside_a_recording_and_not_outside(monkeypatch):
    model, x, runs, run = Layers(ByHand), torch.randn(B, T, C), [], ModuleInterpreter.run_in_modules
    monkeypatch.setattr(ModuleInterpreter, "run_in_modules", lambda self, args: runs.append(self) or run(self, args))
    with record(model):
        compiled = torch.compile(model, backend="eager")
        compiled(x)
        compiled(x)
    compiled(x)
    assert len(runs) == 2


@torch.no_grad()
def test_a_graph_of_kernels_alone_does_not_run_again_though_it_has_rotary_positions(monkeypatch):
    monkeypatch.setattr(GraphReplay, "replay", lambda *_: pytest.fail("the graph ran again"))
    sizes = {"hidden_size": C, "num_attention_heads": H, "intermediate_size": 13, "vocab_size": 50}
    model, ids = LlamaModel(LlamaConfig(num_hidden_layers=2, **sizes)).eval(), torch.randint(0, 50, (B, T))
    with record(model) as recording:
        torch.compile(model, backend="eager")(ids, use_cache=False)
    assert not recording.missed
    assert len(recording.calls) == 2


def test_an_intervention_is_told_that_a_compiled_graph_is_not_changed_and_a_recording_inside_has_its_maps():
    model, x = Layers(ByHand), torch.randn(B, T, C)
    expected = model(x)
    with record(model) as plain:
        model(x)
    with warnings.catch_warnings(), record(model) as recording:
        warnings.simplefilter("ignore")
        with regard.intervene(model, regard.KnockOut(layer=0, head=1)):
            assert torch.equal(torch.compile(model, backend="eager")(x), expected)
    assert_same_maps(recording, plain)
    with pytest.warns(UserWarning, match="was not applied"), regard.intervene(model, regard.KnockOut(layer=0, head=1)):
        assert torch.equal(torch.compile(model, backend="eager")(x), expected)


def test_an_intervention_does_not_warn_of_compiled_code_that_cannot_attend():
    class Activated(ByHand):
        def __init__(self) -> None:
            super().__init__()
            self.activate = torch.compile(lambda x: torch.tanh(x) * x, backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.activate(super().forward(x))

    model, x = Layers(Activated).requires_grad_(False), torch.randn(B, T, C)
    expected = model(x)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as told, regard.intervene(model, regard.KnockOut(layer=0, head=1)):
        assert not torch.equal(model(x), expected)
    assert not [one for one in told if "not changed" in str(one.message)]


@pytest.mark.parametrize("part", [ByHand, Kernel])
def test_attribution_of_compiled_code_says_that_it_is_recorded_without_gradients(part):
    model, x = Layers(part), torch.randn(B, T, C)
    with record(model, keep="values") as recording:
        output = torch.compile(model, backend="eager")(x)
    with pytest.raises(regard.ConfigError, match="Compiled code is recorded without gradients"):
        recording.attribute(output.sum())


class Selected(nn.Module):
    """Attention in a branch that the graph holds, of which one runs."""

    def forward(self, x: Tensor) -> Tensor:
        def attend(q, k):
            return torch.softmax(q @ k, -1) @ q

        return torch.cond(x.sum() > 0, attend, lambda q, k: q + 0, (x, x.mT + 0))


def test_attention_in_a_branch_of_the_graph_is_reported():
    model, x = nn.Sequential(Selected(), ByHand()), torch.randn(B, T, C).abs()
    with pytest.warns(UserWarning, match="function of its own"), record(model) as recording:
        torch.compile(model, backend="eager")(x)
    assert recording.names == ["1"]
    assert [one.module for one in recording.missed] == ["0"]


def test_a_compiled_function_without_attention_is_not_reported():
    model = nn.Sequential(nn.Linear(C, C), nn.GELU())
    with record(model) as recording:
        torch.compile(model, backend="eager")(torch.randn(B, C))
    assert not recording.missed

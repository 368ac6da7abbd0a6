"""implied_map: the matrix of a layer that is linear in its values, by running it with other values."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import regard
from observe.family import Widened
from observe.recurrent_models import RECURRENT

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, WIDTH, HEADS = 2, 11, 12, 3
CAUSAL = torch.ones(T, T, dtype=torch.float64).tril()


def draw_tokens(*shape: int) -> Tensor:
    return torch.randn(shape or (B, T, WIDTH), generator=torch.Generator().manual_seed(2))


def split_heads(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Projected(nn.Module):
    """Queries, keys and values of tokens by layers of their own or by one, and a projection of the output."""

    def __init__(self, fused: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.qkv(x).chunk(3, -1) if self.fused else (self.query(x), self.key(x), self.value(x))
        return tuple(map(split_heads, found))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(*self.project(x)).transpose(1, 2).flatten(2))

    def weigh(self, x: Tensor) -> Tensor:
        """The matrix that `mix` is meant to be, from its formula."""
        raise NotImplementedError


class Softmax(Projected):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def weigh(self, x: Tensor) -> Tensor:
        q, k, _ = self.project(x)
        return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(CAUSAL == 0, -torch.inf).softmax(-1)


class LinearAttention(Projected):
    """Keys times values first, in running sums, as in linear transformers."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        states = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
        return (q.unsqueeze(-2) @ states).squeeze(-2) / (q * k.cumsum(2)).sum(-1, keepdim=True)

    def weigh(self, x: Tensor) -> Tensor:
        q, k, _ = self.project(x)
        scores = ((functional.elu(q) + 1) @ (functional.elu(k) + 1).mT) * CAUSAL
        return scores / scores.sum(-1, keepdim=True)


class Loop(Projected):
    """Retention as a loop of plain Python over the tokens."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, rows = q.new_zeros(len(q), HEADS, q.shape[-1], v.shape[-1]), []
        for i in range(q.shape[2]):
            state = self.rates() * state + k[:, :, i, :, None] * v[:, :, i, None]
            rows.append((q[:, :, i, None] @ state)[:, :, 0])
        return torch.stack(rows, 2)

    def rates(self) -> Tensor:
        return torch.tensor([0.5, 0.8, 0.9]).view(HEADS, 1, 1)

    def weigh(self, x: Tensor) -> Tensor:
        q, k, _ = self.project(x)
        distance = (torch.arange(T).unsqueeze(1) - torch.arange(T)).clamp(min=0)
        return q @ k.mT * self.rates() ** distance * CAUSAL


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [Softmax, LinearAttention, Loop])
def test_the_matrix_of_a_layer_of_ones_own_is_found(kind, fused):
    layer, x = kind(fused), draw_tokens()
    found = regard.implied_map(layer, x)
    assert found.shape == (B, HEADS, T, T)
    assert_close(found.dense(), layer.weigh(x).detach())
    assert_close(found.values, layer.project(x)[2].detach())
    assert found.certificate().error < 1e-14
    assert found.title == ("qkv (part 3 of 3) -> out:input" if fused else "value -> out:input")


FAMILIES = {
    "mamba": ("Mixer", "mamba_selective_scan:hidden_states"),
    "mamba2": ("Mixer", "mamba2_chunk_scan:hidden_states"),
    "qwen3_next": ("GatedDeltaNet", "torch_chunk_gated_delta_rule:value"),
    "rwkv": ("SelfAttention", "rwkv_linear_attention:value"),
    "recurrent_gemma": ("RecurrentBlock", "rg_lru._rnn_scan:hidden_states"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_transformers_have_the_matrix_that_the_named_readers_have(name, monkeypatch):
    ending, values = FAMILIES[name]
    model = next(family for family in RECURRENT if family.name == name).build().double()
    layer = next(one for one in model.modules() if type(one).__name__.endswith(ending))
    inputs = [draw_tokens(B, T, model.config.hidden_size)]
    if name == "recurrent_gemma":
        inputs += [torch.arange(T).expand(B, T), None, False]
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # in the code of transformers, and in the readers
    with Widened(), torch.no_grad():
        with regard.record(layer) as recording:
            layer(*inputs)
        found = regard.implied_map(layer, *inputs, values=values)
    theirs = recording.map(0, kind="implicit")
    assert found.shape == theirs.shape
    assert_close(found.dense(), theirs.dense(), atol=1e-12, rtol=1e-9)


def test_values_that_heads_share_are_those_of_each():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            weights = (split_heads(self.scores(x)) @ split_heads(self.scores(x)).mT).tanh()
            return (weights @ self.value(x).unsqueeze(1)).transpose(1, 2).flatten(2)

    layer, x = Shared(), draw_tokens()
    found = regard.implied_map(layer, x)
    scores = split_heads(layer.scores(x))
    assert_close(found.dense(), (scores @ scores.mT).tanh().detach())
    assert_close(found.values, layer.value(x).detach().unsqueeze(1).expand(B, HEADS, T, 5))


@pytest.mark.parametrize(
    ("values", "output"), [(("qkv", lambda x: x[..., 2 * WIDTH :]), "out:input"), ("mix:v", None), ("mix:v", "mix")]
)
def test_values_are_named_by_part_function_and_argument(values, output):
    layer, x = Softmax(fused=True), draw_tokens()
    assert_close(regard.implied_map(layer, x, values=values, output=output).dense(), layer.weigh(x).detach())


def scan(u: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Running sums with a decay, (b, c, t), and the last of them."""
    rows = [u[..., 0]]
    for i in range(1, u.shape[-1]):
        rows.append(decay * rows[-1] + u[..., i])
    return torch.stack(rows, -1), rows[-1]


def test_a_function_that_the_code_of_a_layer_calls_is_read_and_left_as_it_was():
    class Scan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scan(x.exp().mT, 0.7)[0].mT.exp()

    before = scan
    found = regard.implied_map(Scan(), draw_tokens(), values="scan:u")
    assert found.shape == (B, 1, T, T)  # all channels have the same decay
    distance = torch.arange(T).unsqueeze(1) - torch.arange(T)
    assert_close(found.dense(), (0.7 ** distance.clamp(min=0) * CAUSAL).expand(B, 1, T, T))
    assert scan is before


class Mixer(nn.Module):
    """Tokens that a fixed matrix mixes, beside their residual stream and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.mixer = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(T, T))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer @ self.value(x) + 3


@pytest.mark.parametrize("shape", [(B, T, WIDTH), (T, WIDTH)], ids=["a batch", "no batch"])
def test_an_offset_is_left_out(shape):
    layer = Mixer()
    found = regard.implied_map(layer, draw_tokens(*shape))
    assert_close(found.dense(), layer.mixer.detach().expand(B if len(shape) > 2 else 1, 1, T, T))


class OfValues(nn.Module):
    """A layer that computes a function of values."""

    def __init__(self, function) -> None:
        super().__init__()
        self.value, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.value(x))


REFUSED = {
    "positive parts": (lambda v: (CAUSAL @ v).relu(), "-2 v does not give -2 y, by up to .* at row"),
    "keys that are values": (lambda v: functional.scaled_dot_product_attention(v, v, v), "-2 v does not give -2 y"),
    "signs of two tokens": (lambda v: CAUSAL @ v * (v[:, :1] * v[:, 1:2]).sign(), "u and v do not give the sum"),
    "channels that are mixed": (lambda v: (CAUSAL @ v).cumsum(-1), "is made of several channels or rows of the values"),
    "rows that are mixed": (lambda v: (CAUSAL @ v).flip(0), "mixes the rows of the batch"),
    "values that are not used": (lambda v: torch.ones_like(v), "does not depend on the values"),
    "other numbers each time": (lambda v: CAUSAL @ v * next(NUMBERS), "another output in a second run"),
}
NUMBERS = iter(range(1, 1000))


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("named", [{}, {"values": "value", "output": ""}], ids=["searched", "named"])
def test_what_is_no_matrix_times_values_is_refused_with_the_reason(case, named):
    function, reason = REFUSED[case]
    with pytest.raises(regard.ConfigError, match=reason):
        regard.implied_map(OfValues(function), draw_tokens(), **named)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"values": "nowhere"}, "no part or method 'nowhere'"),
        ({"values": "value:nothing"}, "no argument 'nothing'"),
        ({"values": 3}, "must be 'part'"),
        ({"output": "nowhere:v"}, "no part or method 'nowhere'"),
        ({"values": ("value", lambda x: x.mT[..., :5])}, "0 axes of its shape"),
    ],
)
def test_places_that_are_not_there_are_refused(given, reason):
    with pytest.raises(regard.ConfigError, match=reason):
        regard.implied_map(OfValues(lambda v: CAUSAL @ v), draw_tokens(), **given)


def test_as_many_channels_as_tokens_are_refused_since_either_may_be_the_tokens():
    with pytest.raises(regard.ConfigError, match="2 axes of its shape"):
        regard.implied_map(OfValues(lambda v: v.cumsum(1)), draw_tokens(B, WIDTH, WIDTH))


class Stateful(nn.Module):
    """A layer that counts, keeps a cache, writes into its input and drops some of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.count, self.cache, self.last = nn.Linear(WIDTH, WIDTH), 0, [], None
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        v = self.value(x)
        y = functional.dropout(CAUSAL, 0.5, self.training) @ v * (1 + self.mean[0]) * (1 + self.count + len(self.cache))
        self.mean.add_(x.mean())
        self.count, self.last = self.count + 1, x
        self.cache.append(x)
        x.zero_()
        return y


def test_the_state_of_a_module_its_inputs_and_the_random_numbers_are_as_before():
    layer, x = Stateful().train(), draw_tokens()
    layer(draw_tokens())
    before, given, last, number = layer.mean.clone(), x.clone(), layer.last, torch.get_rng_state()
    found = regard.implied_map(layer, x)
    assert torch.equal(torch.get_rng_state(), number)
    assert torch.equal(x, given)
    assert torch.equal(layer.mean, before)
    assert (layer.count, len(layer.cache), layer.training) == (1, 1, True)
    assert layer.last is last
    assert "forward" not in vars(layer.value)
    kept = functional.dropout(CAUSAL, 0.5) * (1 + before[0]) * 3  # the same weights are dropped in each run
    assert_close(found.dense(), kept.expand(B, 1, T, T))


def test_a_recording_around_it_has_nothing_of_it():
    layer, x = Softmax(), draw_tokens()
    with regard.record(layer) as recording:
        regard.implied_map(layer, x)
    assert not recording.runs
    assert not recording.missed

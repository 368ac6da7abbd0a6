"""torch's own modules: recorded on every path they take, none of which is changed."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bounds import assert_within, sum_bound
from observe.recording_checks import EQUAL, are_equal, assert_map, compute_weights, distance, record_and_compare
from regard import AttentionMap, KnockOut, intervene

B, T, S, C, H = 2, 7, 5, 12, 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.usefixtures("in_float64"),  # the door projects once more, and is to find what the module computed
]


def draw_parameters(model: nn.Module) -> nn.Module:
    """The model with weights and biases far from where they begin, which need no gradient."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.requires_grad_(False).add_(0.3 * torch.randn_like(p))
    return model.eval()


def padding(keys: int) -> Tensor:
    hidden = torch.zeros(B, keys, dtype=torch.bool)
    hidden[1, keys - 2 :] = True
    return hidden


def masks(queries: int, keys: int) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(0)
    hidden = torch.ones(queries, keys).triu(1).bool()
    each = torch.rand(B * H, queries, keys) > 0.7
    each[..., 0] = False
    added = torch.randn(queries, keys)
    return {
        "none": {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": added},
        "-inf": {"attn_mask": torch.zeros(queries, keys).masked_fill(hidden, -torch.inf)},
        "for each head": {"attn_mask": each},
        "float for each head": {"attn_mask": torch.randn(B * H, queries, keys)},
        "padding": {"key_padding_mask": padding(keys)},
        "float padding": {"key_padding_mask": torch.zeros(B, keys).masked_fill(padding(keys), -torch.inf)},
        "both": {"attn_mask": hidden, "key_padding_mask": padding(keys)},
        "both float": {"attn_mask": added, "key_padding_mask": torch.zeros(B, keys).masked_fill(padding(keys), -torch.inf)},
    }


KINDS = {
    "plain": {},
    "without bias": {"bias": False},
    "added keys": {"add_bias_kv": True},
    "a zero key": {"add_zero_attn": True},
    "both added": {"add_bias_kv": True, "add_zero_attn": True},
    "other widths": {"kdim": 5, "vdim": 3},
    "other widths, added keys": {"kdim": 5, "vdim": 3, "add_bias_kv": True},
    "odd heads": {"num_heads": 3},
}


def multi_head(first: bool = True, dropout: float = 0.0, **settings: object) -> nn.MultiheadAttention:
    heads = settings.pop("num_heads", H)
    return draw_parameters(nn.MultiheadAttention(C, heads, batch_first=first, dropout=dropout, **settings))


def inputs(model: nn.MultiheadAttention, crosses: bool) -> list[Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(B, T, C), torch.randn(B, S, model.kdim)
    key = y if crosses or model.kdim != C else x
    value = torch.randn(B, key.shape[1], model.vdim) if model.vdim != C else key
    given = [x, key, value]
    return given if model.batch_first else [{id(y): y.transpose(0, 1) for y in given}[id(y)] for y in given]


def weights_of(model: nn.MultiheadAttention, given: list[Tensor], **options: object) -> Tensor:
    """The weights that the module gives where it is asked for them, in evaluation."""
    training = model.training
    _, weights = model.eval()(*given, **options, need_weights=True, average_attn_weights=False)
    model.train(training)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["weights", "their mean", "nothing"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("mask", masks(T, T))
def test_multi_head_attention_is_what_it_says_of_itself(asked, first, training, crosses, mask):
    model = multi_head(first, dropout=0.3)
    given = inputs(model, crosses)
    options = masks(T, S if crosses else T)[mask]
    expected = weights_of(model, given, **options)
    asking = {"need_weights": asked != "nothing", "average_attn_weights": asked == "their mean"}
    recording, _ = record_and_compare(model.train(training), lambda m: m(*given, **options, **asking))
    assert [call.kind for call in recording.calls] == ["cross" if crosses else "self"]
    assert distance(recording.map(0, kind=recording.calls[0].kind), expected) < EQUAL


@pytest.mark.parametrize(
    ("kind", "mask", "asked"),
    [
        (kind, mask, (n + m) % 2 == 0)
        for n, kind in enumerate(KINDS)
        for m, mask in enumerate(("bool", "padding", "both float"))
    ],
)
def test_every_kind_of_multi_head_attention(kind, asked, mask):
    model = multi_head(**KINDS[kind])
    given = inputs(model, crosses=False)
    options = masks(T, given[1].shape[1])[mask]
    expected = weights_of(model, given, **options)
    recording, _ = record_and_compare(model, lambda m: m(*given, **options, need_weights=asked))
    call = recording.calls[0]
    assert len(recording.calls) == 1
    assert distance(call.map, expected) < EQUAL


@pytest.mark.parametrize("asked", [True, False])
def test_input_without_a_batch(asked):
    model = multi_head()
    x = torch.randn(T, C)
    expected = weights_of(model, [x, x, x])
    recording, _ = record_and_compare(model, lambda m: m(x, x, x, need_weights=asked))
    assert distance(recording.map(0), expected[None]) < EQUAL


@pytest.mark.parametrize("asked", [True, False])
def test_a_causal_hint(asked):
    model, hidden = multi_head(), masks(T, T)["bool"]
    x = torch.randn(B, T, C)
    expected = weights_of(model, [x, x, x], **hidden)
    recording, _ = record_and_compare(model, lambda m: m(x, x, x, **hidden, is_causal=True, need_weights=asked))
    assert distance(recording.map(0), expected) < EQUAL


@pytest.mark.parametrize("asked", [True, False])
def test_positions_added_to_queries_and_keys_do_not_cross(asked):
    model = nn.ModuleDict({"attn": multi_head()})

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = model["attn"]

        def forward(self, x: Tensor, p: Tensor, r: Tensor) -> Tensor:
            return self.attn(x + p, x + r, x, need_weights=asked)[0]

    x, p, r = torch.randn(B, T, C), torch.randn(T, C), torch.randn(T, C)
    recording, _ = record_and_compare(Detector(), lambda m: m(x, p, r))
    assert [call.kind for call in recording.calls] == ["self"]


class Subclass(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("first", [True, False])
def test_a_subclass(first):
    model = draw_parameters(Subclass(C, H, batch_first=first))
    x = torch.randn(B, T, C)
    recording, _ = record_and_compare(model, lambda m: m(x))
    q, k, _ = (
        F.linear(x if first else x.transpose(0, 1), model.in_proj_weight, model.in_proj_bias)
        .unflatten(-1, (3, H, -1))
        .permute(2, 0, 3, 1, 4)
    )
    assert distance(recording.map(0), compute_weights(q, k)) < EQUAL


class Pool(nn.Module):
    """The attention pooling of CLIP's convolutional towers: the function called by itself, with projections of their own."""

    def __init__(self, asked: bool, bound: bool) -> None:
        super().__init__()
        self.asked, self.function = asked, F.multi_head_attention_forward if bound else None
        self.q, self.k, self.v, self.out = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        function = self.function or F.multi_head_attention_forward
        bias = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        return function(
            *(x[:1], x, x, C, H, None, bias, None, None, False, 0.0, self.out.weight, self.out.bias),
            use_separate_proj_weight=True,
            q_proj_weight=self.q.weight,
            k_proj_weight=self.k.weight,
            v_proj_weight=self.v.weight,
            training=self.training,
            need_weights=self.asked,
        )


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("bound", [True, False])
def test_the_function_called_by_itself(asked, bound):
    model, x = draw_parameters(Pool(asked, bound)), torch.randn(T, B, C)
    recording, _ = record_and_compare(model, lambda m: m(x))
    q, k = (p(y).transpose(0, 1).unflatten(-1, (H, -1)).transpose(1, 2) for p, y in ((model.q, x[:1]), (model.k, x)))
    assert len(recording.calls) == 1
    assert distance(recording.calls[0].map, compute_weights(q, k)) < EQUAL


def encoder(layers: int = 2, first: bool = True, nested: bool = True, **settings: object) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(C, H, 11, dropout=0.2, batch_first=first, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return draw_parameters(nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(C), enable_nested_tensor=nested))


def project_queries_and_keys(layer: nn.TransformerEncoderLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    x = layer.norm1(x) if layer.norm_first else x
    attn = layer.self_attn
    q, k, _ = F.linear(x, attn.in_proj_weight, attn.in_proj_bias).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    return q, k


CAUSAL = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
MASKED = {
    "none": {},
    "causal": {"mask": torch.ones(T, T).triu(1).bool()},
    "-inf": {"mask": CAUSAL},
    "hinted": {"mask": CAUSAL, "is_causal": True},
    "padding": {"src_key_padding_mask": padding(T)},
    "both": {"mask": torch.ones(T, T).triu(1).bool(), "src_key_padding_mask": padding(T)},
}


def visible(name: str) -> Tensor:
    seen = torch.ones(B, 1, T, T, dtype=torch.bool)
    if name in ("causal", "-inf", "hinted", "both"):
        seen &= torch.ones(T, T).tril().bool()
    if name in ("padding", "both"):
        seen &= ~padding(T)[:, None, None]
    return seen


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in MASKED),
        *((name, one) for name in ("both", "padding") for one in ({"norm_first": True}, {"nested": False}, {"first": False})),
    ],
)
def test_an_encoder_in_evaluation_keeps_its_fast_path(name, settings):
    model, x = encoder(**settings), torch.randn(B, T, C)
    given = x if settings.get("first", True) else x.transpose(0, 1)
    recording, _ = record_and_compare(model, lambda m: m(given, **MASKED[name]))
    assert [call.name for call in recording.calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    expected = compute_weights(*project_queries_and_keys(model.layers[0], x), visible(name))
    real = slice(T - 2) if name == "padding" else slice(None)  # a nested tensor holds no queries in the padding
    assert float((recording.map(0)[1, :, real] - expected[1, :, real]).abs().max()) < EQUAL
    assert distance(recording.map(0).select(batch=[0]), expected[:1]) < EQUAL


@pytest.mark.parametrize("name", ["none", "causal", "padding", "both"])
def test_an_encoder_in_training(name):
    model, x = encoder().train().requires_grad_(), torch.randn(B, T, C)

    def step(m):
        m.zero_grad()
        m(x, **MASKED[name]).square().sum().backward()
        return [p.grad for p in m.parameters()]

    recording, _ = record_and_compare(model, step)
    expected = compute_weights(*project_queries_and_keys(model.layers[0], x), visible(name))
    assert distance(recording.map(0), expected) < EQUAL


DISTANCES = -0.5 * (torch.arange(T) - torch.arange(T)[:, None]).abs().double()
RELATIVE = torch.randn(B * H, T, T, generator=torch.Generator().manual_seed(0)).double() * (torch.arange(T) % 3 > 0)
PADS = padding(T).double()
NUMBERS = {  # a mask and a padding of numbers, and whether a softmax with them gives weight to keys that they hide
    "distances": (DISTANCES, None, True),
    "for each head": (RELATIVE, None, True),
    "padding": (None, -3 * PADS, True),
    "both": (DISTANCES * (torch.arange(T) > 3), -3 * PADS, True),
    "-1e9": (CAUSAL.clamp(-1e9), None, False),
    "padding of -1e9": (None, -1e9 * PADS, False),
    "both of -1e9": (CAUSAL.clamp(-1e9), -1e9 * PADS, False),
    "the least number": (CAUSAL.clamp(torch.finfo(torch.float64).min), None, False),
    "a row of -1e9": (CAUSAL.clamp(-1e9).index_fill(0, torch.tensor(2), -1e9), None, True),
}


def complete(model: nn.TransformerEncoder, x: Tensor, weights: Tensor) -> Tensor:
    """The output of an encoder of one layer whose attention has these weights."""
    layer, attn = model.layers[0], model.layers[0].self_attn
    entered = layer.norm1(x) if layer.norm_first else x
    v = F.linear(entered, attn.in_proj_weight[2 * C :], attn.in_proj_bias[2 * C :]).unflatten(-1, (H, -1)).transpose(1, 2)
    y = x + attn.out_proj((weights @ v).transpose(1, 2).flatten(2))
    y = y if layer.norm_first else layer.norm1(y)
    y = y + layer.linear2(layer.activation(layer.linear1(layer.norm2(y) if layer.norm_first else y)))
    return model.norm(y if layer.norm_first else layer.norm2(y))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("settings", [{}, {"norm_first": True, "activation": "gelu"}])
def test_every_number_of_a_mask_but_0_hides_on_the_fast_path(name, settings):
    model, x, (mask, pads, is_unread) = encoder(1, **settings), torch.randn(B, T, C), NUMBERS[name]
    numbers = torch.zeros(B, H, T, T) + (0 if mask is None else mask.view(-1, *(H, T, T)[mask.dim() == 2 :]))
    numbers = numbers + (0 if pads is None else pads[:, None, None])
    given = {"mask": mask, "src_key_padding_mask": pads}
    recording, output = record_and_compare(model, lambda m: m(x, **given), keep=("values", "residual"))
    weights = compute_weights(*project_queries_and_keys(model.layers[0], x), numbers == 0)
    is_nested = mask is None and not settings
    sees = (numbers == 0).any(-1).all(1) & (~padding(T) if is_nested else True)  # the others are NaN, or were left out
    assert float((recording.map(0).dense() - weights)[sees[:, None].expand(B, H, T)].abs().max()) < EQUAL
    assert float((complete(model, x, weights) - output)[sees].abs().max()) < EQUAL
    assert any("does not add" in note for note in recording.notes) == is_unread
    with intervene(model):
        assert are_equal(model(x, **given), output)
    with intervene(model, KnockOut(0, 1)):
        changed = model(x, **given)
    weights[:, 1] = 0
    assert float((complete(model, x, weights) - changed)[sees].abs().max()) < EQUAL
    assert are_equal(changed[~sees], output[~sees])


@pytest.mark.parametrize("training", [False, True])
def test_a_transformer_has_an_encoder_a_decoder_and_crossings(training):
    model = draw_parameters(nn.Transformer(C, H, 2, 3, 11, batch_first=True)).train(training)
    x, y = torch.randn(B, T, C), torch.randn(B, S, C)
    hidden = nn.Transformer.generate_square_subsequent_mask(S)
    recording, _ = record_and_compare(
        model, lambda m: m(x, y, tgt_mask=hidden, tgt_is_causal=True, memory_key_padding_mask=padding(T))
    )
    assert len(recording.layers(part="encoder")) == 2
    assert len(recording.layers(part="decoder")) == len(recording.layers("cross")) == 3
    assert recording.map(0, part="encoder").shape == (B, H, T, T)
    assert recording.map(0).shape == (B, H, S, S)
    assert recording.map(0).dense().triu(1).eq(0).all()
    crossing = recording.map(2, kind="cross")
    assert crossing.shape == (B, H, S, T)
    assert crossing[1, :, :, T - 2 :].eq(0).all()


def test_a_decoder_of_equal_lengths_still_crosses():
    model = draw_parameters(nn.TransformerDecoder(nn.TransformerDecoderLayer(C, H, 11, batch_first=True), 2))
    x, y = torch.randn(B, T, C), torch.randn(B, T, C)
    recording, _ = record_and_compare(model, lambda m: m(x, y))
    assert [call.kind for call in recording.calls] == ["self", "cross"] * 2


class Custom(nn.Module):
    """A layer of one's own among torch's."""

    def __init__(self, bound: bool) -> None:
        super().__init__()
        self.kernel = F.scaled_dot_product_attention if bound else None
        self.self_attn, self.project = nn.MultiheadAttention(C, H, batch_first=True), nn.Linear(C, 3 * C)

    def forward(self, x: Tensor, src_mask=None, is_causal=False, src_key_padding_mask=None) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return (self.kernel or F.scaled_dot_product_attention)(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("bound", [False, True])
def test_a_layer_of_ones_own_in_an_encoder_of_torch_is_seen(bound):
    model = draw_parameters(nn.TransformerEncoder(Custom(bound), 2, enable_nested_tensor=False))
    x = torch.randn(B, T, C)
    recording, _ = record_and_compare(model, lambda m: m(x))
    q, k, _ = model.layers[0].project(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    assert [call.name for call in recording.calls] == ["layers.0", "layers.1"]
    assert distance(recording.map(0), compute_weights(q, k)) < EQUAL


def test_attention_of_others_inside_the_block_is_not_ours():
    model, other, x = multi_head(), encoder(), torch.randn(B, T, C)
    recording, _ = record_and_compare(model, lambda m: (m(x, x, x), other(x)))
    assert len(recording.calls) == 1


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_half_precision_single_and_double(asked, dtype):
    model, x = multi_head().to(dtype), torch.randn(B, T, C, dtype=dtype)
    recording, _ = record_and_compare(model, lambda m: m(x, x, x, need_weights=asked))
    assert_projected(recording.map(0), model, x, dtype)


def assert_projected(found: AttentionMap, model: nn.MultiheadAttention, x: Tensor, dtype: torch.dtype) -> None:
    """Fail unless a map is of the projections of x, rounded to a dtype, and has the weights of what it is of."""
    weight, bias, x = (y.double() for y in (model.in_proj_weight.to(dtype), model.in_proj_bias.to(dtype), x.to(dtype)))
    q, k = found.planes.request.q, found.planes.request.k
    exact, size = split(x, weight, bias), split(x.abs(), weight.abs(), bias.abs())
    for one, expected, terms in zip((q, k), exact, size, strict=True):
        assert one.dtype == dtype
        rounded = sum_bound(torch.promote_types(dtype, torch.float32), C + 1, terms)
        assert_within(one, expected, rounded + sum_bound(dtype, 2, terms))  # the product, and the bias added to it
    assert_map(found, compute_weights(q, k), q, k)


def split(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The projections q and k of x, (b, h, t, d) each."""
    q, k, _ = F.linear(x, weight, bias).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    return q, k


@pytest.mark.parametrize("asked", [True, False])
def test_under_autocast(asked):
    model, x = multi_head().float(), torch.randn(B, T, C, dtype=torch.float32)

    def run(m):
        with torch.autocast("cpu", torch.bfloat16):
            return m(x, x, x, need_weights=asked)

    recording, _ = record_and_compare(model, run)
    assert_projected(recording.map(0), model, x, torch.bfloat16)

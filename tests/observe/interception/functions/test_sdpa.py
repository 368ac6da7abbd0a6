"""The door of F.scaled_dot_product_attention: every shape and setting it takes, and models that keep their own cache."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported

from observe.recording_checks import EQUAL, assert_map, compute_weights, distance, record_and_compare
from regard import AttentionMap, Causal, Everything, Given, KnockOut, intervene
from regard.mechanism import Mask
from regard.observe import record

B, H, G, Q, K, D, E = 2, 6, 3, 5, 7, 4, 3


class Kernel(nn.Module):
    """Calls the kernel on what it is handed."""

    def __init__(self, kernel: Callable[..., Tensor] = imported, **settings: object) -> None:
        super().__init__()
        self.kernel, self.settings = kernel, settings

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.kernel(q, k, v, **self.settings)


class ByName(Kernel):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.settings)


def rule(m: AttentionMap) -> Mask:
    return m.planes.request.mask


def qkv(*lead: int, g: int = H, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    heads = (*lead, H), (*lead, g), (*lead, g)
    shapes = [(*one, *rest) for one, rest in zip(heads, ((Q, D), (K, D), (K, E)), strict=True)]
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


@pytest.mark.parametrize("build", [Kernel, ByName, lambda: Kernel(torch.ops.aten.scaled_dot_product_attention)])
def test_the_kernel_is_intercepted_by_whatever_name_it_is_called(build):
    q, k, v = qkv(B)
    recording, _ = record_and_compare(build(), lambda m: m(q, k, v))
    assert_map(recording.map(0), compute_weights(q, k), q, k)


@pytest.mark.parametrize("shape", [(B, H, 0, D), (0, H, Q, D), (2, 3, H, 0, D)])
def test_a_call_without_tokens_or_rows_is_left_out_with_a_note(shape):
    model, x = Kernel(), torch.randn(3, *shape)
    with record(model) as recording:
        assert torch.equal(model(*x), imported(*x))
    assert (recording.calls, recording.missed, len(recording.notes)) == ([], [], 1)


@pytest.mark.parametrize("lead", [(), (B,), (B, 3), (2, 1, 3)])
def test_any_number_of_axes_of_batch(lead):
    q, k, v = qkv(*lead)
    recording, _ = record_and_compare(Kernel(), lambda m: m(q, k, v))
    assert_map(recording.map(0), compute_weights(q, k).view(-1, H, Q, K), q, k)


class Merged(nn.Module):
    """Heads in the axis of batch, as some write them."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.project = heads, nn.Linear(H * D, 3 * H * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1) for y in (q, k, v))
        return imported(q, k, v)


@pytest.mark.parametrize("heads", [1, H])
def test_heads_that_are_joined_with_the_batch_are_distinguished(heads):
    model, x = Merged(heads), torch.randn(B, Q, H * D)
    recording, _ = record_and_compare(model, lambda m: m(x))
    q, k, _ = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in model.project(x).chunk(3, -1))
    assert_map(recording.map(0), compute_weights(q, k), q, k)


@pytest.mark.parametrize("shape", [(Q, K), (1, K), (Q, 1), (H, Q, K), (B, 1, Q, K), (B, H, Q, K), (1, 1, 1, K)])
@pytest.mark.parametrize("floating", [False, True])
def test_every_shape_of_a_mask(shape, floating):
    q, k, v = qkv(B)
    visible = torch.rand(shape) > 0.4
    bias = torch.randn(shape).masked_fill(~visible, -torch.inf) if floating else None
    recording, _ = record_and_compare(Kernel(attn_mask=bias if floating else visible), lambda m: m(q, k, v))
    added = None if bias is None else bias.nan_to_num(neginf=0)
    assert_map(recording.map(0), compute_weights(q, k, visible, added), q, k, bias=added)


@pytest.mark.parametrize("shape", [(Q, K), (3, 1, Q, K), (B, 1, 1, Q, K), (B, 3, H, Q, K)])
def test_a_mask_beside_several_axes_of_batch(shape):
    q, k, v = qkv(B, 3)
    visible = torch.rand(shape) > 0.4
    recording, _ = record_and_compare(Kernel(attn_mask=visible), lambda m: m(q, k, v))
    expected = compute_weights(q, k, visible.expand(B, 3, H, Q, K)).view(-1, H, Q, K)
    assert_map(recording.map(0), expected, q, k)


def test_is_causal_is_aligned_to_the_first_key():
    q, k, v = qkv(B)
    recording, _ = record_and_compare(Kernel(is_causal=True), lambda m: m(q, k, v))
    assert rule(recording.map(0)) == Causal()
    expected = compute_weights(q, k, torch.ones(Q, K).tril().bool())
    assert expected[..., Q:].eq(0).all()  # what no query sees is not kept
    assert_map(recording.map(0), expected[..., :Q], q, k)


@pytest.mark.parametrize(("bias", "diagonal"), [(causal_upper_left, 0), (causal_lower_right, K - Q)])
def test_a_causal_bias_of_torch(bias, diagonal):
    q, k, v = qkv(B)
    recording, _ = record_and_compare(Kernel(attn_mask=bias(Q, K)), lambda m: m(q, k, v))
    expected = compute_weights(q, k, torch.ones(Q, K).tril(diagonal).bool())
    assert_map(recording.map(0), expected[..., : Q + diagonal], q, k)


def test_a_mask_of_a_plain_rule_is_that_rule():
    q, _, v = qkv(B)
    recording, _ = record_and_compare(Kernel(attn_mask=torch.ones(Q, Q).tril().bool()), lambda m: m(q, q, v[..., :Q, :]))
    assert rule(recording.map(0)) == Causal()
    recording, _ = record_and_compare(Kernel(attn_mask=torch.ones(Q, Q).bool()), lambda m: m(q, q, v[..., :Q, :]))
    assert rule(recording.map(0)) == Everything()


def test_a_query_that_sees_nothing_has_weights_zero():
    q, k, v = qkv(B)
    visible = torch.rand(Q, K) > 0.4
    visible[2] = False
    recording, _ = record_and_compare(Kernel(attn_mask=visible), lambda m: m(q, k, v))
    assert recording.map(0)[:, :, 2].eq(0).all()


def test_grouped_heads_are_stored_once_for_their_group():
    q, k, v = qkv(B, g=G)
    recording, _ = record_and_compare(Kernel(enable_gqa=True), lambda m: m(q, k, v))
    assert_map(recording.map(0), compute_weights(q, k), q, k)
    assert recording.map(0).nbytes == 4 * (q.numel() + k.numel())


@pytest.mark.parametrize("one", [0, 1, 2])
def test_what_is_broadcast_along_the_batch(one):
    tensors = list(qkv(B))
    tensors[one] = tensors[one][:1]
    recording, _ = record_and_compare(Kernel(), lambda m: m(*tensors))
    assert_map(recording.map(0), compute_weights(*tensors[:2]), *tensors[:2])


def test_dropout_is_drawn_as_if_nobody_watched_and_the_map_is_before_it():
    q, k, v = qkv(B)
    recording, _ = record_and_compare(Kernel(dropout_p=0.4), lambda m: m(q, k, v))
    assert_map(recording.map(0), compute_weights(q, k), q, k)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_map_is_of_the_numbers_that_the_kernel_saw(dtype):
    q, k, v = qkv(B, dtype=dtype)
    recording, _ = record_and_compare(Kernel(), lambda m: m(q, k, v))
    assert_map(recording.map(0), compute_weights(q, k), q, k)


def test_under_autocast_the_map_is_of_the_rounded_numbers():
    q, k, v = qkv(B)

    def run(m):
        with torch.autocast("cpu", torch.bfloat16):
            return m(q, k, v)

    recording, _ = record_and_compare(Kernel(), run)
    q, k = q.bfloat16(), k.bfloat16()
    assert_map(recording.map(0), compute_weights(q, k), q, k)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans())
def test_any_call_is_its_own_matrix(b, h, q, k, causal, shared):
    torch.manual_seed(q * 7 + k)
    query, key, value = torch.randn(b, h, q, D), torch.randn(b, 1 if shared else h, k, D), torch.randn(b, h, k, E)
    recording, _ = record_and_compare(Kernel(is_causal=causal), lambda m: m(query, key, value))
    visible = torch.ones(q, k).tril().bool() if causal else None
    expected = compute_weights(query, key.expand(-1, h, -1, -1), visible)
    assert_map(recording.map(0), expected[..., :q] if causal else expected, query, key)


def test_a_wrong_call_raises_what_it_raised():
    q, k, v = qkv(B)
    with record(Kernel(is_causal=True, attn_mask=torch.ones(Q, K).bool())) as recording, pytest.raises(RuntimeError):
        Kernel(is_causal=True, attn_mask=torch.ones(Q, K).bool())(q, k, v)
    model = Kernel(nonsense=1)
    with record(model) as recording, pytest.raises(TypeError, match="nonsense"):
        model(q, k, v)
    assert not recording.missed
    assert not recording.calls


class Decoder(nn.Module):
    """A little decoder with a cache of its own."""

    def __init__(self, cache: str, window: int = 100) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(17, H * D), nn.ModuleList(Layer(cache, window) for _ in range(3))

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, start)
        return x


class Layer(nn.Module):
    def __init__(self, cache: str, window: int) -> None:
        super().__init__()
        self.cache, self.window, self.project = cache, window, nn.Linear(H * D, 3 * H * D)
        self.register_buffer("keys", torch.zeros(B, H, window, D))
        self.register_buffer("values", torch.zeros(B, H, window, D))

    def forward(self, x: Tensor, start: int) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        t = x.shape[1]
        i, j = torch.arange(start, start + t)[:, None], torch.arange(start + t)
        visible = (j <= i) & (j > i - self.window)
        if self.cache == "dynamic":
            self.keys, self.values = (k, v) if start == 0 else (torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2))
            k, v = self.keys, self.values
        elif self.cache == "static":
            self.keys[:, :, start : start + t], self.values[:, :, start : start + t] = k, v
            k, v = self.keys, self.values
            visible = F.pad(visible, (0, self.window - start - t))
        else:
            for y, buffer in ((k, self.keys), (v, self.values)):
                buffer.copy_(torch.cat([buffer, y], 2)[:, :, -self.window :])
            k, v = (y[:, :, -min(self.window, start + t) :] for y in (self.keys, self.values))
            visible = visible[:, -k.shape[2] :]
        return imported(q, k, v, visible).transpose(1, 2).flatten(2)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("cache", "window", "prompt"),
    [("dynamic", 100, 1), ("static", 100, 4), ("rolled", 5, 1), ("rolled", 5, 4), ("dynamic", 5, 4)],
)
def test_tokens_one_by_one_are_the_whole_text(cache, window, prompt):
    model, ids = Decoder(cache, window), torch.randint(0, 17, (B, 11))

    def step_by_step(m):
        for buffer in m.buffers():
            buffer.zero_()
        parts = [m(ids[:, :prompt])] + [m(ids[:, n : n + 1], n) for n in range(prompt, 11)]
        return torch.cat(parts, 1)

    with torch.no_grad():
        recording, _ = record_and_compare(model, step_by_step)
        whole, _ = record_and_compare(Decoder("dynamic", window), lambda m: m(ids))
    assert len(recording.runs) == 1
    assert recording.layers() == ["layers.0", "layers.1", "layers.2"]
    for layer in range(3):
        assert recording.map(layer).shape == (B, H, 11, 11)
        assert distance(recording.map(layer), whole.map(layer).dense()) < EQUAL
        assert rule(recording.map(layer)) == rule(whole.map(layer))


class Normalised(Kernel):
    """Normalises what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return imported(self.norm(q), self.norm(k), v)


STYLES = ["modules", "functional", "normalised", "rotated", "in a module of its own", "normalised in a module of its own"]


class Attend(nn.Module):
    """Attends to another sequence, or to its own; rotated, normalised or not, in one module or two."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.q, self.k, self.v = (nn.Linear(H * D, H * D) for _ in range(3))
        self.norm, self.kernel = nn.LayerNorm(D), Normalised() if style == "normalised in a module of its own" else Kernel()

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = x if context is None else context
        if self.style == "functional":
            q, k, v = F.linear(x, self.q.weight), F.linear(y, self.k.weight), F.linear(y, self.v.weight)
        else:
            q, k, v = self.q(x), self.k(y), self.v(y)
        q, k, v = (z.unflatten(-1, (H, D)).transpose(1, 2) for z in (q, k, v))
        if self.style == "normalised":
            q, k = self.norm(q), self.norm(k)
        if self.style == "rotated":
            q, k = apply_rotary(q), apply_rotary(k)
        return (self.kernel if "of its own" in self.style else imported)(q, k, v)


def apply_rotary(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[2])[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


@pytest.mark.parametrize("style", STYLES)
def test_cross_attention_is_determined_by_what_it_is_made_from_not_by_lengths(style):
    model, x, y = Attend(style), torch.randn(B, Q, H * D), torch.randn(B, Q, H * D)
    recording, _ = record_and_compare(model, lambda m: m(x, y))
    assert [call.kind for call in recording.calls] == ["cross"]
    recording, _ = record_and_compare(model, lambda m: m(x))
    assert [call.kind for call in recording.calls] == ["self"]
    recording, _ = record_and_compare(model, lambda m: (m(x), m(x, y)))
    assert [call.kind for call in recording.calls] == ["self", "cross"]


def test_positions_added_to_queries_and_keys_make_no_crossing():
    model, x, p, r = Attend("modules"), torch.randn(B, Q, H * D), torch.randn(Q, H * D), torch.randn(Q, H * D)
    recording, _ = record_and_compare(nn.ModuleList([model]), lambda m: Outer(m[0])(x, p, r))
    assert [call.kind for call in recording.calls] == ["self"]


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return self.inner(x + p, x + r)


def test_what_is_stored_is_detached_and_safe_against_writing_in_place():
    q, k, v = (x.requires_grad_() for x in qkv(B))
    model = Kernel()
    with record(model) as recording:
        out = model(q, k, v)
    with torch.no_grad():
        expected = compute_weights(q, k)
        q.zero_(), k.zero_()
    out.sum().backward()
    assert_map(recording.map(0), expected, q, k)
    assert not recording.map(0).dense().requires_grad


def test_a_given_mask_may_change_afterwards():
    q, k, v = qkv(B)
    visible = torch.rand(B, H, Q, K) > 0.4
    expected = compute_weights(q, k, visible)
    with record(model := Kernel(attn_mask=visible)) as recording:
        model(q, k, v)
    visible.fill_(True)
    assert isinstance(rule(recording.map(0)), Given)
    assert_map(recording.map(0), expected, q, k)


WRITING = {
    "in place": lambda x, y: x.copy_(y),
    "by an index": lambda x, y: x.__setitem__(slice(None), y),
    "as data": lambda x, y: x.data.copy_(y),
    "through numpy": lambda x, y: np.copyto(x.numpy(), y.numpy()),
    "through a view": lambda x, y: x[:].copy_(y),
}


class Rewriting(nn.Module):
    """Two layers, between which the memory of their one mask is written to."""

    def __init__(self, kernel, write, *masks):
        super().__init__()
        self.first, self.second = Kernel(**kernel), Kernel(**kernel)
        self.write, self.masks = write, masks

    def forward(self, q, k, v, name="attn_mask"):
        mask = self.masks[0].clone()
        self.first.settings[name] = self.second.settings[name] = mask.expand(B, H, Q, K)
        first = self.first(q, k, v)
        self.write(mask, self.masks[1])
        return first, self.second(q, k, v)


@pytest.mark.parametrize(
    ("write", "floating", "mode"),
    [
        (write, floating, (torch.inference_mode, torch.no_grad, torch.enable_grad)[(n + floating) % 3])
        for n, write in enumerate(WRITING.values())
        for floating in (False, True)
    ],
)
def test_one_mask_that_is_written_to_between_layers_is_two_masks(write, floating, mode):
    q, k, v = qkv(B)
    one, other = torch.rand(Q, K) > 0.4, torch.rand(Q, K) > 0.4
    masks = [torch.zeros(Q, K).masked_fill(~seen, -torch.inf) if floating else seen for seen in (one, other)]
    with mode():
        recording, _ = record_and_compare(Rewriting({}, write, *masks), lambda m: m(q, k, v))
    for name, seen in zip(recording.names, (one, other), strict=True):
        assert_map(recording.map(name), compute_weights(q, k, seen), q, k)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("write", [WRITING["in place"], WRITING["by an index"]])
def test_a_mask_on_a_gpu_that_is_written_to_between_layers_is_two_masks(write, mode):
    q, k, v = (x.cuda() for x in qkv(B))
    one, other = torch.rand(Q, K).cuda() > 0.4, torch.rand(Q, K).cuda() > 0.4
    with mode():
        recording, _ = record_and_compare(Rewriting({}, write, one, other), lambda m: m(q, k, v))
    for name, seen in zip(recording.names, (one, other), strict=True):
        assert_map(recording.map(name), compute_weights(q, k, seen), q, k)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_kernel_on_a_gpu():
    q, k, v = (x.cuda() for x in qkv(B))
    recording, _ = record_and_compare(Kernel(is_causal=True), lambda m: m(q, k, v))
    weights = compute_weights(q, k, torch.ones(Q, K, device="cuda").tril().bool())
    assert_map(recording.map(0), weights[..., :Q], q, k)


def test_heads_beside_the_batch_are_split_off_where_a_mask_comes_before_the_tokens():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(6, 18)

        def forward(self, mask, x):
            b, t, _ = x.shape
            q, k, v = self.qkv(x).reshape(b, t, 3, 3, 2).permute(2, 0, 3, 1, 4).reshape(3, b * 3, t, 2).unbind(0)
            return F.scaled_dot_product_attention(q, k, v, mask[0])

    with torch.no_grad(), record(model := Masked()) as recording:
        model(torch.ones(1, 1, 7, 7).bool().tril(), torch.randn(5, 7, 6))
    assert recording.map(0).shape == (5, 3, 7, 7)


class Blocks(nn.Module):
    """Attention in blocks of 5 tokens, which stand behind the heads, as in NesT and Hiera of timm."""

    def __init__(self, num_heads: int, is_masked: bool = False):
        super().__init__()
        self.num_heads, self.is_masked, self.knocked_out = num_heads, is_masked, slice(0)
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, 2, t // 2, 3, self.num_heads, -1).permute(3, 0, 4, 1, 2, 5)
        mask = torch.arange(2 * t // 2 * t // 2).view(2, t // 2, t // 2) % 3 != 1 if self.is_masked else torch.ones(()).bool()
        self.weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf).softmax(-1).transpose(1, 2).flatten(0, 1)
        out = F.scaled_dot_product_attention(q, k, v, mask if self.is_masked else None).clone()
        out[:, self.knocked_out] = 0
        return self.proj(out.permute(0, 2, 3, 1, 4).reshape(x.shape))


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_heads_before_blocks_of_tokens_are_heads(heads, is_masked):
    model, x = nn.Sequential(Blocks(heads, is_masked)).double(), torch.randn(3, 10, 12).double()
    with torch.no_grad():
        recording, _ = record_and_compare(model, lambda m: m(x))
    assert recording.map(0).shape == (6, heads, 5, 5)
    torch.testing.assert_close(recording.map(0).dense(), model[0].weights, rtol=0, atol=EQUAL)


def test_a_head_before_blocks_of_tokens_is_knocked_out():
    model, x = nn.Sequential(Blocks(3)).double(), torch.randn(3, 10, 12).double()
    with torch.no_grad():
        with intervene(model, KnockOut(layer=0, head=1)):
            changed = model(x)
        model[0].knocked_out = slice(1, 2)
        torch.testing.assert_close(changed, model(x), rtol=0, atol=EQUAL)

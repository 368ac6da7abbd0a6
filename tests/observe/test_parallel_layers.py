"""Heads that are modules of their own are one layer, and towers beside each other are no chain of layers."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import CLIPConfig, CLIPModel

import regard
from regard import ConfigError, MissingNameError, load
from regard.layers import StackedHeads
from regard.observe import record

B, H, T, D, C = 2, 3, 5, 4, 13


class Head(nn.Module):
    """One head; `kernel` states what computes it."""

    def __init__(self, kernel: str, width: int = D) -> None:
        super().__init__()
        self.kernel, self.project = kernel, nn.Linear(C, 3 * width)
        self.inner = nn.MultiheadAttention(C, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel == "module":
            return self.inner(x, x, x, need_weights=False)[0]
        q, k, v = self.project(x).chunk(3, -1)
        if self.kernel in ("fused", "not causal"):
            return sdpa(3 * q[:, None], 3 * k[:, None], v[:, None], is_causal=self.kernel == "fused")[:, 0]
        return (9 * q @ k.mT).softmax(-1) @ v


class Block(nn.Module):
    """A residual block of heads that are modules of their own, which read the same tensor or copies of it."""

    def __init__(self, *kernels: str, copies: bool = False, width: int = D) -> None:
        super().__init__()
        self.copies, self.norm = copies, nn.LayerNorm(C)
        self.heads = nn.ModuleList(Head(kernel, D + n * (width - D)) for n, kernel in enumerate(kernels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        contexts = [head(y.clone() if self.copies else y) for head in self.heads]
        return x + torch.cat(contexts, -1).mean(-1, keepdim=True)


def multiply(matrices: list[Tensor], residual: float = 0.5) -> Tensor:
    """The product of the means over heads (b, h, t, t) with the identity, from the last to the first."""
    product = torch.eye(T, dtype=torch.float64)
    for weights in matrices:
        product = ((1 - residual) * weights.mean(1) + residual * torch.eye(T)) @ product
    return product


def collect_weights(recording: regard.Recording, block: int) -> Tensor:
    """The weights of the heads of a block, each of its own call."""
    names = [name for name in recording if name.startswith(f"{block}.heads.")]
    return torch.cat([recording[name][0].map.dense() for name in names], 1)


@pytest.mark.parametrize("kernels", [("fused",) * H, ("by hand",) * H, ("module",) * H, ("fused", "not causal", "fused")])
def test_heads_that_are_modules_of_their_own_are_one_layer_also_from_a_file(kernels, tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(*kernels), Block(*kernels)).double(), torch.randn(B, T, C, dtype=torch.float64)
    with record(model, keep="values") as recording:
        y = model(x)
    recording.save(tmp_path / "heads.rgd")
    weights = [collect_weights(recording, block) for block in (0, 1)]
    for found in (recording, load(tmp_path / "heads.rgd")):
        assert found.layers() == ["0.heads", "1.heads"]
        assert found.heads(0) == tuple(range(H))
        assert torch.equal(found.map(1).dense(), weights[1])
        assert found.values("0.heads").shape[:3] == (B, H, T)
        torch.testing.assert_close(regard.rollout(found), multiply(weights), rtol=0, atol=1e-12)
        assert any(note.startswith("1.heads: ") for note in found.notes)
    pull = recording.attribute(y[0, -1, 0])
    own = [[pull.map(name).dense() for name in recording if name.startswith(f"{block}.")] for block in (0, 1)]
    product = torch.eye(T, dtype=torch.float64)
    for parts in own:
        product = product + torch.cat(parts, 1).clamp(min=0).mean(1) @ product
    torch.testing.assert_close(pull.relevance(slice(None)), product, rtol=0, atol=1e-12)
    assert [(row.layer, row.head) for row in regard.heads(recording)] == [(n, h) for n in (0, 1) for h in range(H)]
    regard.page(recording, tmp_path / "page.html")


def test_a_layer_of_heads_that_are_modules_has_the_output_of_none_as_its_stream():
    model = nn.Sequential(Block(*["fused"] * H), Block(*["fused"] * H))
    with record(model, keep="residual") as recording:
        model(torch.randn(B, T, C))
    with pytest.raises(ConfigError, match=r"the residual stream after 0\.heads was not kept"):
        recording.residual(0)


def test_a_layer_number_counts_heads_that_are_modules_once():
    model, x = nn.Sequential(Block(*["fused"] * H), Block(*["fused"] * H)), torch.randn(B, T, C)
    with torch.no_grad(), record(model, layers=[1]) as recording:
        model(x)
    assert recording.names == [f"1.heads.{n}" for n in range(H)]
    with (
        pytest.raises(ConfigError, match=r"layer 0 is both 0\.heads\.0 and 0\.heads\.1"),
        regard.intervene(model, regard.KnockOut(0)),
    ):
        model(x)


def test_stacked_heads_and_visits_of_one_module_are_one_layer():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.core, self.weights = Weighted(), nn.Parameter(torch.randn(2 * H, C, C))

        def forward(self, x):
            x = x + sum(self.core(x, weight) for weight in self.weights[:H])
            return x + sum(self.core(x, weight) for weight in self.weights[H:])

    class Weighted(nn.Module):
        def forward(self, x, weight):
            return sdpa((x @ weight)[:, None], x[:, None], x[:, None])[:, 0]

    x = torch.randn(B, T, C, dtype=torch.float64)
    for model, count in ((StackedHeads(C, D, T, 0.0, H), 1), (Loop(), 2)):
        model = model.double().eval()
        with torch.no_grad(), record(model) as recording:
            model(x)
        calls = torch.cat([call.map.dense() for call in recording.calls], 1).split(H, 1)
        torch.testing.assert_close(regard.rollout(recording), multiply(list(calls)), rtol=0, atol=1e-12)
        assert len(recording.layers()) == count


class InPlace(nn.Module):
    """Residual heads of one list that write into the stream that they all read: layers after each other."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head("fused", C) for _ in range(H))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for head in self.heads:
            x += head(x)
        return x


def test_layers_that_write_into_what_they_read_are_no_heads_in_inference_mode():
    model, x = InPlace().double(), torch.randn(B, T, C, dtype=torch.float64)
    with torch.inference_mode(), record(model) as recording:
        model(x)
    assert recording.last.layers() == [f"heads.{n}" for n in range(H)]
    expected = multiply([recording[f"heads.{n}"][0].map.dense() for n in range(H)])
    assert torch.allclose(regard.rollout(recording), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", [{"copies": True}, {"width": D + 1}])
def test_modules_beside_each_other_that_may_be_no_heads_of_one_layer_have_no_product(block, tmp_path):
    model = nn.Sequential(Block("fused", "fused", **block), Block("fused", "fused", **block)).double()
    with record(model, keep="values") as recording:
        number = model(torch.randn(B, T, C, dtype=torch.float64))[0, 0, 0]
    recording.save(tmp_path / "heads.rgd")
    for ask in (recording, load(tmp_path / "heads.rgd")):
        with pytest.raises(ConfigError, match=r"not known that 0\.heads\.1 reads what 0\.heads\.0 wrote"):
            regard.rollout(ask)
    with pytest.raises(ConfigError, match="is not known that"):
        recording.attribute(number).relevance()
    chain = ["0.heads.1", "1.heads.0"]
    expected = multiply([recording.map(name).dense() for name in chain])
    torch.testing.assert_close(regard.rollout(recording, layers=chain), expected, rtol=0, atol=1e-12)


def build_clip():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    vision = sizes | {"image_size": 16, "patch_size": 8}
    text = sizes | {"vocab_size": 32, "max_position_embeddings": T, "bos_token_id": 1, "eos_token_id": 2}
    return CLIPModel(CLIPConfig(vision_config=vision, text_config=text)).double().eval()


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("separately", [False, True])
def test_towers_have_products_of_their_own(wraps, separately, tmp_path):
    torch.manual_seed(0)
    clip, pixels, ids = build_clip(), torch.randn(1, 3, 16, 16).double(), torch.randint(3, 32, (1, T))
    model = nn.ModuleDict({"inner": clip}) if wraps else clip
    with torch.no_grad(), record(model) as recording:
        if separately:
            clip.vision_model(pixels)
            clip.text_model(ids)
        else:
            clip(input_ids=ids, pixel_values=pixels)
    recording.save(tmp_path / "towers.rgd")
    path = "inner." if wraps else ""
    for found in (recording, load(tmp_path / "towers.rgd")):
        with pytest.raises(ConfigError, match="part= one of vision_model, text_model"):
            regard.rollout(found)
        for tower in ("vision", "text"):
            names = [name for name in found if name.startswith(f"{path}{tower}_model")]
            expected = multiply([found.map(name).dense() for name in names])
            for part in (tower, f"{tower}_model", f"{path}{tower}_model", f"{path}{tower}_model.encoder"):
                torch.testing.assert_close(regard.rollout(found, part=part), expected, rtol=0, atol=1e-12)
        for part in ("encoder", "layers", "self_attn", "visio"):
            with pytest.raises(MissingNameError, match="The parts are: vision_model, text_model"):
                regard.rollout(found, part=part)


def test_streams_that_alternate_have_products_of_their_own():
    class Streams(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.sounds = (nn.ModuleList(Block("fused") for _ in range(2)) for _ in range(2))

        def forward(self, x, y):
            for word, sound in zip(self.words, self.sounds, strict=True):
                x, y = word(x), sound(y)
            return x + y

    model, inputs = Streams().double(), torch.randn(2, B, T, C, dtype=torch.float64)
    with torch.no_grad(), record(model) as recording:
        model(*inputs)
    with pytest.raises(ConfigError, match="part= one of words, sounds"):
        regard.rollout(recording)
    expected = multiply([recording.map(f"sounds.{n}.heads.0").dense() for n in range(2)])
    torch.testing.assert_close(regard.rollout(recording, part="sounds"), expected, rtol=0, atol=1e-12)

"""Which pixels a word was drawn in: what DAAM's formula gives of the weights that an eager model computes, step by step."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.handwritten_families import OwnWeights
from observe.recording_checks import EQUAL
from regard import ConfigError, OutOfRangeError, PatchGrid, ShapeError
from regard.observe import record
from regard.observe.token_places.diffusion import word_heat_map

B, H, D, WORDS, HEIGHT, WIDTH = 2, 3, 4, 5, 8, 12


class CrossAttention(nn.Module):
    """Pixels of a picture that is `factor` times smaller attend to words."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.q, self.k, self.v = (nn.Linear(7, H * D) for _ in range(3))
        self.out = nn.Linear(H * D, 7)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        small = F.avg_pool2d(x, self.factor).flatten(2).mT
        q, k, v = (
            part(y).unflatten(-1, (H, D)).transpose(1, 2) for part, y in ((self.q, small), (self.k, words), (self.v, words))
        )
        self.weights = (q @ k.mT * D**-0.5).softmax(-1)
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mT
        return x + F.interpolate(y.unflatten(-1, (HEIGHT // self.factor, -1)), scale_factor=self.factor)


class UNet(nn.Module):
    """Two blocks down and up, and one in the middle, which does not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.down_blocks = nn.ModuleList([CrossAttention(1), CrossAttention(2)])
        self.mid_block = CrossAttention(4)
        self.up_blocks = nn.ModuleList([CrossAttention(2)])

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        for block in (*self.down_blocks, self.mid_block, *self.up_blocks):
            x = block(x, words)
        return x


def join_by_daam(steps: list[list[Tensor]], row: int, word: int, size: tuple[int, int]) -> Tensor:
    """The formula of the paper, of the weights (b, h, q, k) of each layer in each step."""
    total = torch.zeros(size, dtype=torch.float64)
    for layer in zip(*steps, strict=True):
        for head in range(layer[0].shape[1]):
            summed = sum(weights[row, head, :, word] for weights in layer)
            rows = round((len(summed) * size[0] / size[1]) ** 0.5)
            picture = summed.reshape(1, 1, rows, -1).double()
            total += F.interpolate(picture, size=size, mode="bicubic").clamp(min=0)[0, 0]
    return total


@pytest.mark.parametrize("row", [-1, 0])
def test_a_word_is_where_daam_finds_it(row):
    model, steps = UNet().double(), []
    words = torch.randn(B, WORDS, 7, dtype=torch.float64)
    x = torch.randn(B, 7, HEIGHT, WIDTH, dtype=torch.float64)
    with torch.no_grad(), record(model) as recording:
        for _ in range(3):
            x = x - 0.3 * model(x, words)
            steps.append([block.weights for block in (*model.down_blocks, *model.up_blocks)])
    for size in ((HEIGHT, WIDTH), (2 * HEIGHT, 2 * WIDTH)):
        found = word_heat_map(recording, 2, size, row)
        torch.testing.assert_close(found, join_by_daam(steps, row, 2, size), rtol=0, atol=100 * EQUAL)  # sums of 27 weights
    with pytest.raises(ShapeError, match="no picture with the proportions of 8 x 8"):
        word_heat_map(recording, 2, (8, 8))


@pytest.mark.parametrize("batches", [(2, 1), (1, 2)])
def test_the_last_sequence_is_that_of_each_step_if_guidance_begins_or_ends_midway(batches):
    model, steps = UNet().double(), []
    with torch.no_grad(), record(model) as recording:
        for b in batches:
            model(torch.randn(b, 7, HEIGHT, WIDTH, dtype=torch.float64), torch.randn(b, WORDS, 7, dtype=torch.float64))
            steps.append([block.weights for block in (*model.down_blocks, *model.up_blocks)])
    size = HEIGHT, WIDTH
    torch.testing.assert_close(word_heat_map(recording, 2, size), join_by_daam(steps, -1, 2, size), rtol=0, atol=100 * EQUAL)
    with pytest.raises(OutOfRangeError, match="the batch"):
        word_heat_map(recording, 2, size, row=1)  # which one of the steps lacks


class SlicedCrossAttention(CrossAttention):
    """Cross attention that computes one row of the batch after the other, as attention slicing does."""

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        q, k, v = self.q(x.flatten(2).mT), self.k(words), self.v(words)
        rows = [F.scaled_dot_product_attention(q[n, None], k[n, None], v[n, None]) for n in range(len(x))]
        return x + self.out(torch.cat(rows)).mT.reshape_as(x)


def test_a_layer_that_calls_attention_several_times_in_a_forward_has_no_heat_map():
    model = UNet().double()
    model.down_blocks[0] = SlicedCrossAttention(1).double()
    x, words = (torch.randn(*size, dtype=torch.float64) for size in ((B, 7, HEIGHT, WIDTH), (B, WORDS, 7)))
    with torch.no_grad(), record(model) as recording:
        model(x, words)
    with pytest.raises(ConfigError, match=r"down_blocks\.0 calls attention several times in one forward"):
        word_heat_map(recording, 2, (HEIGHT, WIDTH))


def test_a_model_without_cross_attention_has_no_heat_map():
    with torch.no_grad(), record(model := nn.Sequential(nn.Linear(7, 7))) as recording:
        model(torch.randn(2, 7))
    with pytest.raises(ConfigError, match="no cross attention to the words"):
        word_heat_map(recording, 0, (8, 8))


class JointAttention(nn.Module):
    """Pixels and words attend to both, as one sequence."""

    def __init__(self, words_first: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words_first = words_first
        self.qkv, self.out = nn.Linear(7, 3 * H * D), nn.Linear(H * D, 7)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        pixels = x.flatten(2).mT
        joint = torch.cat([words, pixels] if self.words_first else [pixels, words], 1)
        q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv(joint).chunk(3, -1))
        self.weights = (q @ k.mT * D**-0.5).softmax(-1)
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + y[:, WORDS:].mT.reshape_as(x) if self.words_first else x + y[:, :-WORDS].mT.reshape_as(x)


class JointModel(nn.Module):
    """Two layers of words and pixels, and one of pixels alone between them."""

    def __init__(self, words_first: bool) -> None:
        super().__init__()
        self.joint = nn.ModuleList(JointAttention(words_first) for _ in range(2))
        self.pixels = JointAttention(words_first)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = self.joint[0](x, words)
        q = x.flatten(2).mT[:, None]
        x = x + F.scaled_dot_product_attention(q, q, q)[:, 0].mT.reshape_as(x)
        return self.joint[1](x, words)


@pytest.mark.parametrize("words_first", [False, True])
@torch.no_grad()
def test_a_word_in_one_sequence_with_the_pixels_is_where_these_look_at_it(words_first):
    model, steps = JointModel(words_first).double(), []
    words = torch.randn(B, WORDS, 7, dtype=torch.float64)
    x = torch.randn(B, 7, HEIGHT, WIDTH, dtype=torch.float64)
    pixels, texts = (slice(WORDS, None), slice(WORDS)) if words_first else (slice(-WORDS), slice(-WORDS, None))
    with record(model) as recording:
        for _ in range(3):
            x = x - 0.3 * model(x, words)
            steps.append([layer.weights[:, :, pixels, texts] for layer in model.joint])
    recording.places = None
    with pytest.raises(ConfigError, match=r"set recording\.places"):
        word_heat_map(recording, 2, (HEIGHT, WIDTH))
    recording.places = {"joint": PatchGrid(HEIGHT, WIDTH, start=WORDS if words_first else 0), "": PatchGrid(HEIGHT, WIDTH)}
    for word in (2, -1):
        expected = join_by_daam(steps, -1, word % WORDS, (2 * HEIGHT, 2 * WIDTH))
        found = word_heat_map(recording, word, (2 * HEIGHT, 2 * WIDTH))
        torch.testing.assert_close(found, expected, rtol=0, atol=100 * EQUAL)
    with pytest.raises(OutOfRangeError, match="word"):
        word_heat_map(recording, WORDS, (HEIGHT, WIDTH))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what diffusers itself imports
@torch.no_grad()
def test_a_unet_of_diffusers_with_random_weights():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(3)
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=24,
        attention_head_dim=4,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    model = model.eval().double()
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=50)
    scheduler.set_timesteps(3)
    x, words = torch.randn(1, 4, 16, 16, dtype=torch.float64), torch.randn(2, 7, 24, dtype=torch.float64)

    def denoise(x: Tensor) -> Tensor:
        for time in scheduler.timesteps:
            without, prompt = model(torch.cat([x, x]), time, words).sample
            x = scheduler.step((without + 7.5 * (prompt - without))[None], time, x).prev_sample
        return x

    expected = denoise(x)
    with record(model) as recording:
        assert torch.equal(denoise(x), expected)
    assert not recording.missed

    steps: list[list[Tensor]] = []

    class Eager(diffusers.models.attention_processor.AttnProcessor):
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
            if encoder_hidden_states is not None and not attn.is_middle:
                q, k = (
                    attn.head_to_batch_dim(attn.to_q(hidden_states)),
                    attn.head_to_batch_dim(attn.to_k(encoder_hidden_states)),
                )
                steps[-1].append(attn.get_attention_scores(q, k).unflatten(0, (2, -1)))
            return super().__call__(attn, hidden_states, encoder_hidden_states, **kwargs)

    for name, module in model.named_modules():
        module.is_middle = "mid_block" in name
    model.set_attn_processor(Eager())
    model.register_forward_pre_hook(lambda *_: steps.append([]))
    denoise(x)
    assert len(steps) == 3
    assert len(steps[0]) == 3
    torch.testing.assert_close(
        word_heat_map(recording, 4, (16, 16)), join_by_daam(steps, -1, 4, (16, 16)), rtol=0, atol=100 * EQUAL
    )


SIZES = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 16,
}
JOINT = {"joint_attention_dim": 24, "caption_projection_dim": 16, "pooled_projection_dim": 6, "pos_embed_max_size": 8}
CROSS = {"cross_attention_dim": 16, "caption_channels": 24, "norm_num_groups": 4}
TRANSFORMERS = {"SD3Transformer2DModel": {**SIZES, **JOINT}, "PixArtTransformer2DModel": {**SIZES, **CROSS, "out_channels": 8}}
NO_SIZES = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what diffusers itself imports
@pytest.mark.parametrize("name", TRANSFORMERS)
@torch.no_grad()
def test_a_diffusion_transformer_with_random_weights(name):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(3)
    model = getattr(diffusers, name)(**TRANSFORMERS[name]).eval().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    is_joint = name.startswith("SD3")
    x, words = torch.randn(2, 4, 16, 16, dtype=torch.float64), torch.randn(2, 7, 24, dtype=torch.float64)
    given = {"pooled_projections": torch.randn(2, 6, dtype=torch.float64)} if is_joint else NO_SIZES

    def denoise(x: Tensor) -> Tensor:
        for time in (9, 5, 2):
            change = model(x, encoder_hidden_states=words, timestep=torch.tensor([time, time]), **given).sample
            x = x - 0.1 * change[:, :4]
        return x

    expected = denoise(x)
    with OwnWeights() as own:
        denoise(x)
    with record(model) as recording:
        assert torch.equal(denoise(x), expected)
    assert not recording.missed
    layers = [one[:, :, :64, 64:] if is_joint else one for one in own.found if one.shape[-1] == (71 if is_joint else 7)]
    assert len(layers) == 6
    found = word_heat_map(recording, 4, (16, 16))
    torch.testing.assert_close(
        found, join_by_daam([layers[n : n + 2] for n in (0, 2, 4)], -1, 4, (16, 16)), rtol=0, atol=100 * EQUAL
    )


class Block(nn.Module):
    """A residual block of convolutions, as UNets have it."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(3, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.short = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.short(x) + self.conv(F.silu(self.norm(x)))


class Transformer(nn.Module):
    """Self-attention of the latents and their cross attention to words, as in diffusers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = (
            nn.GroupNorm(3, channels),
            nn.Conv2d(channels, channels, 1),
            nn.Linear(channels, channels),
        )
        self.attn1, self.attn2 = Attends(channels, channels), Attends(channels, 7)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        b, c, rows, columns = x.shape
        y = self.into(self.norm(x)).permute(0, 2, 3, 1).reshape(b, rows * columns, c)
        y = y + self.attn1(y, y)
        y = self.out(y + self.attn2(y, words))
        return x + y.reshape(b, rows, columns, c).permute(0, 3, 1, 2).contiguous()


class Attends(nn.Module):
    def __init__(self, channels: int, other: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(channels, 6), nn.Linear(other, 6), nn.Linear(other, channels)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, -1)).transpose(1, 2) for part in (self.q(x), self.k(y), self.v(y)))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class SkippingUNet(nn.Module):
    """Three resolutions down and up, with strided convolutions, nearest or bilinear enlargement, and skip connections."""

    def __init__(self, upsamples_in_module: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv_in = nn.Conv2d(4, 6, 3, padding=1)
        self.down_blocks = nn.ModuleList(
            nn.ModuleDict({"res": Block(6, 6), "attn": Transformer(6), "down": nn.Conv2d(6, 6, 3, 2, 1)}) for _ in range(3)
        )
        self.mid_block = Block(6, 6)
        self.up_blocks = nn.ModuleList(
            nn.ModuleDict({"res": Block(15, 6), "attn": Transformer(6), "up": nn.Conv2d(6, 9, 3, padding=1)}) for _ in range(3)
        )
        self.enlarge = nn.Upsample(scale_factor=2) if upsamples_in_module else None

    def forward(self, sample: Tensor, words: Tensor) -> Tensor:
        x, skips = self.conv_in(sample), []
        for block in self.down_blocks:
            x = block["attn"](block["res"](x), words)
            skips.append(x)
            x = block["down"](x)
        x = self.mid_block(x)
        for block in self.up_blocks:
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear") if self.enlarge is None else self.enlarge(x)
            x = block["attn"](block["res"](torch.cat([block["up"](x), skips.pop()], 1)), words)
        return x[:, :4]


@pytest.mark.parametrize("upsamples_in_module", [False, True])
@torch.no_grad()
def test_the_latents_of_a_unet_have_their_places_as_queries_of_cross_attention_too(upsamples_in_module):
    model, words = SkippingUNet(upsamples_in_module).double(), torch.randn(2, WORDS, 7, dtype=torch.float64)
    with record(model) as recording:
        model(torch.randn(2, 4, 2 * HEIGHT, 2 * WIDTH, dtype=torch.float64), words)
    sizes = {"down_blocks": [(16, 24), (8, 12), (4, 6)], "up_blocks": [(4, 6), (8, 12), (16, 24)]}
    assert not recording.missed
    for part, expected in sizes.items():
        for n, sides in enumerate(expected):
            for kind, layer in (("self", "attn1"), ("cross", "attn2")):
                queries, keys = recording.axis_places(f"{part}.{n}.attn.{layer}", kind)
                found = [(one.rows, one.columns, one.order, one.start) for one in queries]
                assert found == [(*sides, None, 0)], (part, n, kind)
                assert keys == (queries if kind == "self" else [])
    word_heat_map(recording, 2, (HEIGHT, WIDTH))
    with pytest.raises(ShapeError, match=r"the 16 x 24 queries of down_blocks\.0\.attn\.attn2 are no picture"):
        word_heat_map(recording, 2, (2 * WIDTH, 2 * HEIGHT))

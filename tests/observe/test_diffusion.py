"""Which pixels a word was drawn in: what DAAM's formula gives of the weights that an eager model computes, step by step."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL
from regard import ConfigError, ShapeError
from regard.observe import record
from regard.observe.diffusion import word_heat_map

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

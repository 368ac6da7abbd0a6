"""`MultiHeadAttention` against torch's, the lectures' written-out class, and four linear layers round a bare kernel."""

from functools import partial

import torch
import torch.nn.functional as F
from tests import lectures_classes
from torch import Tensor, nn

from benchmarks.tables import Table
from benchmarks.timing import forward_and_backward, time_contenders
from regard import MultiHeadAttention
from regard.mechanism import heads

WIDTH, HEADS, BATCH = 768, 12, 1
TITLE = "MultiHeadAttention, width 768, 12 heads, batch 1, float32, causal, without dropout"


class FourLinears(nn.Module):
    """The least there can be: three projections, the kernel, one projection."""

    def __init__(self, like: MultiHeadAttention) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = like.W_query, like.W_key, like.W_value, like.out_proj

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads.split(layer(x), HEADS) for layer in (self.q, self.k, self.v))
        return self.out(heads.join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Torch(nn.Module):
    """nn.MultiheadAttention, causal, with the weights of ours."""

    def __init__(self, like: MultiHeadAttention) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.inner.in_proj_weight.data = (
            torch.cat([like.W_query.weight, like.W_key.weight, like.W_value.weight]).detach().clone()
        )
        self.inner.in_proj_bias.data = torch.cat([like.W_query.bias, like.W_key.bias, like.W_value.bias]).detach().clone()
        self.inner.out_proj.load_state_dict(like.out_proj.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.inner(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


def contenders(t: int) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    ours = MultiHeadAttention(WIDTH, WIDTH, t, 0.0, HEADS, qkv_bias=True)
    written = lectures_classes.MultiHeadAttention(WIDTH, WIDTH, t, 0.0, HEADS, qkv_bias=True)
    written.load_state_dict({**ours.state_dict(), "mask": written.mask})
    return {"four linears": FourLinears(ours), "torch": Torch(ours), "lectures": written, "regard": ours}


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of each, and ours against the best of the others."""
    times = ["four linears ms", "torch ms", "lectures ms", "regard ms"]
    table = Table(TITLE, ["T", "pass", *times, "ratio to the best", "share of peak"])
    for t in (256, 512, 1024, 2048, 4096):
        modules = contenders(t)
        x = torch.randn(BATCH, t, WIDTH, requires_grad=True)
        work = BATCH * (2 * 4 * t * WIDTH**2 + 4 * t * t * WIDTH / 2)
        evaluating = {name: partial(run_module, module.eval(), x.detach()) for name, module in modules.items()}
        add(table, t, "forward", time_contenders(evaluating, 1e-5).medians, work, peak)
        training = {name: forward_and_backward(partial(module.train(), x), [x]) for name, module in modules.items()}
        add(table, t, "both", time_contenders(training, 1e-4).medians, 0, peak)
    return table


@torch.no_grad()
def run_module(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def add(table: Table, t: int, which: str, medians: dict[str, float], work: float, peak: dict[torch.dtype, float]) -> None:
    ours = medians["regard"]
    best = min(time for name, time in medians.items() if name != "regard")
    share = work / (ours / 1e3) / 1e9 / peak[torch.float32] if work else None
    table.add(t, which, *medians.values(), ours / best, share)

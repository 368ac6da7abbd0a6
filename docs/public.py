"""Attention layers of other projects, as pip installs them: how each is made, and what examine is told of it.

All but torch-multi-head-attention come with `pip install ".[bench]"`; that one asks for torchvision, which it does not import:
`pip install --no-deps torch-multi-head-attention`.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor, nn

from regard import Causal, Everything, Padding, Window
from regard.examination import Report, examine

WIDTH, HEADS, LENGTHS = 24, 4, (3, 6)


@dataclass(frozen=True, eq=False)
class Public:
    """A layer of a package, in words, how it is made, and what examine is told."""

    package: str
    says: str
    make: Callable[[], nn.Module]
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str | None:
        """The version that is installed; None where none is."""
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(self.package)
        return None

    def report(self) -> Report:
        """What is found of it, with seeded weights."""
        torch.manual_seed(5)
        return examine(self.make(), **self.told)


def crossed(**settings: Any) -> nn.Module:
    """x-transformers' attention."""
    return import_module("x_transformers.x_transformers").Attention(WIDTH, heads=HEADS, dim_head=6, causal=True, **settings)


def local() -> nn.Module:
    """local-attention's, for q, k and v, with a window of four."""
    made: nn.Module = import_module("local_attention").LocalAttention(
        window_size=4, causal=True, exact_windowsize=True, use_rotary_pos_emb=False
    )
    return made


def efficient(**settings: Any) -> nn.Module:
    """memory-efficient-attention-pytorch's."""
    return import_module("memory_efficient_attention_pytorch").Attention(
        dim=WIDTH, heads=HEADS, dim_head=6, causal=True, **settings
    )


def unmasked() -> nn.Module:
    """torch-multi-head-attention's, without a mask and without the relu that it has after each projection."""
    return import_module("torch_multi_head_attention").MultiHeadAttention(WIDTH, HEADS, activation=None)


class Masked(nn.Module):
    """The same, handed a mask (b, q, k) of 0 and 1, as it asks for one."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.attention, self.padded = unmasked(), padded

    def forward(self, x: Tensor) -> Tensor:
        mask = self.attention.gen_history_mask(x)
        if self.padded:
            real = torch.arange(x.shape[1]) < torch.tensor(LENGTHS)[:, None]
            mask = real[:, None, :].expand(*x.shape[:2], -1).to(x)
        return self.attention(x, x, x, mask)


def drawn(*shape: int) -> Tensor:
    """A sample."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def near(left: int) -> dict[str, Any]:
    """What examine is told of a window, and q, k and v of three such windows."""
    return {"expects": Causal() & Window(left), "sample": tuple(drawn(2, 3, 12, 8) for _ in range(3))}


CROSSED, LOCAL, EFFICIENT, PLAIN = (
    "x-transformers",
    "local-attention",
    "memory-efficient-attention-pytorch",
    "torch-multi-head-attention",
)
FOUR = "`LocalAttention(window_size=4, exact_windowsize=True)` without rotary positions"
DROPPED = {"memory_efficient": True, "dropout": 0.3}
PUBLIC = [
    Public(CROSSED, "`Attention(causal=True)`", crossed),
    Public(CROSSED, "`Attention(causal=True, flash=True, dropout=0.3)`", partial(crossed, flash=True, dropout=0.3)),
    Public(CROSSED, "`Attention(causal=True, one_kv_head=True)`", partial(crossed, one_kv_head=True)),
    Public(CROSSED, "`Attention(causal=True, kv_heads=2)`", partial(crossed, kv_heads=2)),
    Public(LOCAL, f"{FOUR}, `expects=Causal() & Window(3)`: four keys, as its README says", local, near(3)),
    Public(LOCAL, f"{FOUR}, `expects=Causal() & Window(4)`", local, near(4)),
    Public(EFFICIENT, "`Attention(causal=True)`", efficient),
    Public(EFFICIENT, "`Attention(causal=True, memory_efficient=True, dropout=0.3)`", partial(efficient, **DROPPED)),
    Public(PLAIN, "`MultiHeadAttention(activation=None)`, `expects=Everything()`", unmasked, {"expects": Everything()}),
    Public(PLAIN, "the same, with its own `gen_history_mask`", partial(Masked, padded=False)),
    Public(
        PLAIN,
        "the same, with a mask of padded keys, `expects=Padding((3, 6))`",
        partial(Masked, padded=True),
        {"expects": Padding(LENGTHS), "sample": drawn(2, 6, WIDTH)},
    ),
]

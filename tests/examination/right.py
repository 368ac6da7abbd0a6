"""Right layers of every sort, of which nothing may be found."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lectures_classes as lectures
import regard
from examination import right_plain as plain
from examination.right_designs import DESIGNS
from examination.right_families import FAMILIES
from examination.right_kernels import KERNELS
from examination.right_variants import VARIANTS
from regard import Causal, Documents, Everything, Given, Padding, Prefix, Window, layers

C, H, T = 24, 4, 6


@dataclass(frozen=True, eq=False)
class Right:
    """How a layer is made, and the arguments of examine."""

    name: str
    make: Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    slow: bool = False

    def subject(self) -> Any:
        """The layer, with weights of its own."""
        torch.manual_seed(5)
        return self.make()


ALL = {"expects": Everything()}
X = torch.randn(2, T, C, generator=torch.Generator().manual_seed(3))
LENGTHS = (3, 6)


def list_own_layers() -> Iterator[Right]:
    """All of regard's own."""
    yield Right("SimpleSelfAttention", layers.SimpleSelfAttention, ALL)
    yield Right("SelfAttention", lambda: layers.SelfAttention(14, 6), ALL)
    yield Right("SelfAttention with biases", lambda: layers.SelfAttention(14, 6, qkv_bias=True), ALL)
    yield Right("BareSelfAttention", lambda: layers.BareSelfAttention(14, 6), ALL)
    yield Right("CausalAttention", lambda: layers.CausalAttention(14, 6, 17, 0.2))
    yield Right("StackedHeads", lambda: layers.StackedHeads(14, 5, 17, 0.2, 3))
    yield Right("MultiHeadAttention", lambda: layers.MultiHeadAttention(14, 30, 17, 0.2, 5, qkv_bias=True))
    yield Right("MultiHeadAttention of one token at most", lambda: layers.MultiHeadAttention(14, 30, 1, 0.0, 5))
    yield Right("AdditiveAttention", lambda: layers.AdditiveAttention(14, 14, 9), ALL)
    for name, function in (("attention", regard.attention), ("attend", regard.attend)):
        for mask in (Causal(), Everything(), Causal() & Window(2), Prefix(2) | Causal(), Window(1, 2)):
            yield Right(f"{name} with {mask}", bind_settings(function, mask=mask), {"expects": mask})
        yield Right(f"{name} with a softcap", bind_settings(function, mask=Causal(), softcap=5.0))
        yield Right(f"{name} with sinks", bind_settings(function, mask=Causal(), sinks=torch.tensor([0.3, -1.0, 2.0])))
        yield Right(f"{name} with a bias", lambda function=function: functools.partial(sloping, function))
        yield Right(f"{name} with a stated scale", bind_settings(function, mask=Causal(), scale=0.7), {"scale": 0.7})
        yield Right(f"{name} while decoding", bind_settings(function, mask=Causal(), offset=4), {"offset": 4})


def sloping(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Farther keys count less, in each head otherwise."""
    back = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    return function(q, k, v, mask=Causal(), bias=-back * torch.linspace(0.1, 1, q.shape[1], dtype=q.dtype).view(-1, 1, 1))


def bind_settings(function: Callable[..., Any], **settings: Any) -> Callable[[], Any]:
    return lambda: functools.partial(function, **settings)


def list_lecture_classes() -> Iterator[Right]:
    """The classes of the lectures, written out."""
    yield Right("lectures' SelfAttention_v1", lambda: lectures.SelfAttentionV1(14, 6), ALL)
    yield Right("lectures' CausalAttention", lambda: lectures.CausalAttention(14, 6, T, 0.2))
    yield Right("lectures' MultiHeadAttentionWrapper", lambda: lectures.MultiHeadAttentionWrapper(14, 5, T, 0.2, 3))
    yield Right("lectures' MultiHeadAttention", lambda: lectures.MultiHeadAttention(14, 30, 17, 0.2, 5))
    yield Right("lectures' MultiHeadAttention with biases", lambda: lectures.MultiHeadAttention(14, 30, 17, 0.0, 5, True))


def list_torch_modules() -> Iterator[Right]:
    """torch's modules and kernels, with masks."""
    for first in (True, False):
        named = "batch first" if first else "batch second"
        for mask in (Causal(), Everything(), Causal() & Window(2)):
            yield Right(
                f"nn.MultiheadAttention, {named}, {mask}",
                lambda first=first: nn.MultiheadAttention(C, H, dropout=0.1, batch_first=first),
                {"expects": mask},
            )
        yield Right(
            f"nn.TransformerEncoderLayer, {named}",
            lambda first=first: nn.TransformerEncoderLayer(C, H, 2 * C, batch_first=first),
        )
    yield Right("nn.MultiheadAttention without bias", lambda: nn.MultiheadAttention(C, H, bias=False, batch_first=True))
    padded = {"expects": Padding(LENGTHS), "sample": X}
    yield Right("nn.MultiheadAttention with padding", lambda: nn.MultiheadAttention(C, H, batch_first=True), padded)
    norm_first = lambda: nn.TransformerEncoderLayer(C, H, 2 * C, batch_first=True, norm_first=True, activation="gelu")  # noqa: E731
    yield Right("nn.TransformerEncoderLayer, norm first", norm_first)
    stack = lambda: nn.TransformerEncoder(norm_first(), 2, enable_nested_tensor=False)  # noqa: E731
    yield Right("nn.TransformerEncoder", stack, ALL)
    yield Right("F.scaled_dot_product_attention", lambda: F.scaled_dot_product_attention, ALL)
    yield Right(
        "F.scaled_dot_product_attention, causal", lambda: functools.partial(F.scaled_dot_product_attention, is_causal=True)
    )
    grouped = tuple(torch.randn(2, heads, T, 8) for heads in (6, 2, 2))
    yield Right(
        "F.scaled_dot_product_attention, grouped",
        lambda: functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
        {"sample": grouped},
    )


def list_handwritten_layers() -> Iterator[Right]:
    """Layers as people write them."""
    for make, arguments in plain.LAYERS:
        yield Right(make.__name__, make, arguments)
    for function, arguments in plain.FUNCTIONS:
        yield Right(function.__name__, lambda function=function: function, arguments)
    yield Right("with padding of its own", lambda: plain.Padded(LENGTHS), {"expects": Padding(LENGTHS), "sample": X})
    rows = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    both = Given((rows[:, :, None] & rows[:, None, :]).unsqueeze(1))
    yield Right("with rows that see nothing", lambda: plain.Padded(LENGTHS, blind=True), {"expects": both, "sample": X})
    packed = Causal() & Documents([0, 0, 0, 1, 1, 1])
    yield Right("with documents", lambda: plain.Packed((0, 0, 0, 1, 1, 1)), {"expects": packed, "sample": X})


def list_layers_in_other_dtypes() -> Iterator[Right]:
    """Layers in other precisions than float32."""
    made = {
        "lectures' MultiHeadAttention": lambda: lectures.MultiHeadAttention(14, 30, 17, 0.2, 5),
        "MultiHeadAttention": lambda: layers.MultiHeadAttention(14, 30, 17, 0.2, 5),
        "CausalAttention": lambda: layers.CausalAttention(14, 6, 17, 0.0),
        "Fused": plain.Fused,
        "Rotary": plain.Rotary,
        "Grouped": plain.Grouped,
        "nn.MultiheadAttention": lambda: nn.MultiheadAttention(C, H, batch_first=True),
        "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(C, H, 2 * C, batch_first=True),
    }
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        for name, make in made.items():
            yield Right(f"{name} in {str(dtype)[6:]}", lambda make=make, dtype=dtype: make().to(dtype))
    for dtype in (torch.bfloat16, torch.float16):
        sample = tuple(torch.randn(2, 3, T, 8, dtype=dtype) for _ in range(3))
        causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        yield Right(f"F.scaled_dot_product_attention in {str(dtype)[6:]}", lambda causal=causal: causal, {"sample": sample})


def list_compiled_layers() -> Iterator[Right]:
    """What torch.compile makes of right layers."""
    yield Right("compiled Fused", lambda: torch.compile(plain.Fused()), slow=True)
    yield Right(
        "compiled lectures' MultiHeadAttention",
        lambda: torch.compile(lectures.MultiHeadAttention(14, 30, 17, 0.2, 5)),
        slow=True,
    )


def list_designs() -> Iterator[Right]:
    """Designs that depart from the common one."""
    for name, make, arguments in DESIGNS:
        yield Right(name, make, arguments)


def list_variants() -> Iterator[Right]:
    """Layers as people write them, each in a way of its own."""
    for make, arguments in VARIANTS:
        yield Right(make.__name__, make, arguments)


def list_kernels() -> Iterator[Right]:
    """Kernels that go block by block."""
    for name, make in KERNELS:
        yield Right(name, make)


def list_family_layers() -> Iterator[Right]:
    """Small random layers of Hugging Face."""
    for family in FAMILIES:
        yield Right(family.name, family.layer, family.arguments, slow=not family.quick)


RIGHT = [
    one
    for some in (
        list_own_layers,
        list_lecture_classes,
        list_torch_modules,
        list_handwritten_layers,
        list_designs,
        list_variants,
        list_kernels,
        list_layers_in_other_dtypes,
        list_compiled_layers,
        list_family_layers,
    )
    for one in some()
]

"""Attention layers of other projects, as pip installs them: how each is made, and the arguments of examine.

The first three come with `pip install ".[bench]"`. torch-multi-head-attention asks for torchvision, which it does not import:
`pip install --no-deps torch-multi-head-attention`. The others: `pip install` with the names of this table. Some want versions
that exclude each other: `pip install --no-deps`, and what they import. torchvision's wheel on PyPI is built for CUDA: beside
torch for CPUs, install the one for CPUs, or define the operator `torchvision::nms`, which only its import needs.
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
    """A layer of a package, in words, how it is made, and the arguments of examine."""

    package: str
    says: str
    make: Callable[[], nn.Module]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str | None:
        """The version that is installed; None where none is."""
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(self.package)
        return None

    def report(self) -> Report:
        """What is found of it, with seeded weights."""
        torch.manual_seed(5)
        return examine(self.make(), **self.arguments)


def make_x_attention(**settings: Any) -> nn.Module:
    """x-transformers' attention."""
    return import_module("x_transformers.x_transformers").Attention(WIDTH, heads=HEADS, dim_head=6, causal=True, **settings)


def make_local_attention() -> nn.Module:
    """local-attention's, for q, k and v, with a window of four."""
    made: nn.Module = import_module("local_attention").LocalAttention(
        window_size=4, causal=True, exact_windowsize=True, use_rotary_pos_emb=False
    )
    return made


def make_memory_efficient_attention(**settings: Any) -> nn.Module:
    """memory-efficient-attention-pytorch's."""
    return import_module("memory_efficient_attention_pytorch").Attention(
        dim=WIDTH, heads=HEADS, dim_head=6, causal=True, **settings
    )


def make_layer_without_mask() -> nn.Module:
    """torch-multi-head-attention's, without a mask and without the relu that it has after each projection."""
    return import_module("torch_multi_head_attention").MultiHeadAttention(WIDTH, HEADS, activation=None)


class Masked(nn.Module):
    """The same, handed a mask (b, q, k) of 0 and 1, as it asks for one."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.attention, self.padded = make_layer_without_mask(), padded

    def forward(self, x: Tensor) -> Tensor:
        mask = self.attention.gen_history_mask(x)
        if self.padded:
            real = torch.arange(x.shape[1]) < torch.tensor(LENGTHS)[:, None]
            mask = real[:, None, :].expand(*x.shape[:2], -1).to(x)
        return self.attention(x, x, x, mask)


def draw_sample(*shape: int) -> Tensor:
    """A sample."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def expect_window(left: int) -> dict[str, Any]:
    """The expectation for a window, and q, k and v of three such windows."""
    return {"expects": Causal() & Window(left), "sample": tuple(draw_sample(2, 3, 12, 8) for _ in range(3))}


CROSSED, LOCAL, EFFICIENT, PLAIN = (
    "x-transformers",
    "local-attention",
    "memory-efficient-attention-pytorch",
    "torch-multi-head-attention",
)
FOUR = "`LocalAttention(window_size=4, exact_windowsize=True)` without rotary positions"
DROPPED = {"memory_efficient": True, "dropout": 0.3}


def import_class(place: str, name: str, *sizes: Any, **settings: Any) -> Callable[[], nn.Module]:
    """Returns how a class of a module is made."""
    return lambda: getattr(import_module(place), name)(*sizes, **settings)


def make_litgpt(name: str) -> nn.Module:
    """litgpt's model of a family, small."""
    small = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": 2, "head_size": 8, "intermediate_size": 40}
    config = import_module("litgpt").Config.from_name(name, padded_vocab_size=101, **small)
    found: nn.Module = import_module("litgpt").GPT(config)
    return found


def make_torchtune_attention() -> nn.Module:
    """torchtune's attention with rotary positions and two key heads."""
    modules = import_module("torchtune.modules")
    projections = {f"{name}_proj": nn.Linear(WIDTH, n * 6, bias=False) for name, n in (("q", 4), ("k", 2), ("v", 2))}
    found: nn.Module = modules.MultiHeadAttention(
        embed_dim=WIDTH,
        num_heads=HEADS,
        num_kv_heads=2,
        head_dim=6,
        **projections,
        output_proj=nn.Linear(WIDTH, WIDTH, bias=False),
        pos_embeddings=modules.RotaryPositionalEmbeddings(6, max_seq_len=512),
        attn_dropout=0.0,
    )
    return found


def make_torchtune_model(name: str) -> nn.Module:
    """torchtune's model of a family, small."""
    make = getattr(import_module(f"torchtune.models.{name}"), name)
    sizes = {"vocab_size": 101, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 512}
    found: nn.Module = make(**sizes, intermediate_dim=40)
    return found


def make_swin_v2() -> nn.Module:
    """torchvision's Swin of version 2, whose scores are cosines, small."""
    swin = import_module("torchvision.models.swin_transformer")
    v2 = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    found: nn.Module = swin.SwinTransformer([4, 4], WIDTH, [2, 2], [3, 6], [4, 4], num_classes=3, **v2)
    return found


ALL: dict[str, Any] = {"expects": Everything()}
PICTURE, GRID = {**ALL, "sample": draw_sample(2, 3, 32, 32)}, {**ALL, "sample": draw_sample(2, 16, WIDTH)}
CONTEXT = {**ALL, "sample": {"x": draw_sample(2, 6, WIDTH), "context": draw_sample(2, 7, 30)}}
STATES = {**ALL, "sample": {"hidden_states": draw_sample(2, 6, WIDTH), "encoder_hidden_states": draw_sample(2, 7, 30)}}
HEADED = {"heads": HEADS, "dim_head": 6}
VIT, TIMM, DIFFUSERS, PERCEIVER = "vit-pytorch", "timm", "diffusers", "perceiver-pytorch"
EVERY = "`expects=Everything()`"
MORE = [
    Public(VIT, f"`vit.Attention`, {EVERY}", import_class("vit_pytorch.vit", "Attention", WIDTH, **HEADED), ALL),
    Public(VIT, f"`deepvit.Attention`, {EVERY}", import_class("vit_pytorch.deepvit", "Attention", WIDTH, **HEADED), ALL),
    Public(VIT, f"`cait.Attention`, {EVERY}", import_class("vit_pytorch.cait", "Attention", WIDTH, **HEADED), ALL),
    Public(
        VIT,
        f"`vit_for_small_dataset.LSA`, {EVERY}",
        import_class("vit_pytorch.vit_for_small_dataset", "LSA", WIDTH, **HEADED),
        ALL,
    ),
    Public(VIT, f"`na_vit.Attention`, {EVERY}", import_class("vit_pytorch.na_vit", "Attention", WIDTH, **HEADED), ALL),
    Public(
        PERCEIVER,
        f"`Attention`, {EVERY}, with a context",
        import_class("perceiver_pytorch.perceiver_pytorch", "Attention", WIDTH, 30, **HEADED),
        CONTEXT,
    ),
    Public(TIMM, f"`AttentionRope`, {EVERY}", import_class("timm.layers", "AttentionRope", WIDTH, num_heads=HEADS), ALL),
    Public(TIMM, f"`DiffAttention`, {EVERY}", import_class("timm.layers", "DiffAttention", WIDTH, num_heads=HEADS), ALL),
    Public(
        TIMM,
        f"`swin_transformer.WindowAttention`, {EVERY}",
        import_class("timm.models.swin_transformer", "WindowAttention", WIDTH, num_heads=HEADS, window_size=(4, 4)),
        GRID,
    ),
    Public(
        TIMM,
        f"`swin_transformer_v2.WindowAttention`, {EVERY}",
        import_class("timm.models.swin_transformer_v2", "WindowAttention", WIDTH, num_heads=HEADS, window_size=(4, 4)),
        GRID,
    ),
    Public(
        TIMM,
        f"`levit.Attention`, {EVERY}",
        import_class("timm.models.levit", "Attention", WIDTH, 6, num_heads=HEADS, resolution=(4, 4)),
        GRID,
    ),
    Public(
        TIMM,
        f"`vit_tiny_patch16_224` of two layers, pixels, {EVERY}",
        import_class("timm", "create_model", "vit_tiny_patch16_224", img_size=32, num_classes=3, depth=2),
        PICTURE,
    ),
    Public(
        DIFFUSERS,
        f"`Attention`, {EVERY}",
        import_class("diffusers.models.attention_processor", "Attention", WIDTH, **HEADED),
        ALL,
    ),
    Public(
        DIFFUSERS,
        f"`BasicTransformerBlock`, {EVERY}, with encoder states",
        import_class("diffusers.models.attention", "BasicTransformerBlock", WIDTH, HEADS, 6, cross_attention_dim=30),
        STATES,
    ),
    Public("litgpt", "`GPT` of Qwen3, two layers", partial(make_litgpt, "Qwen3-0.6B")),
    Public("litgpt", "`GPT` of Gemma 2, two layers", partial(make_litgpt, "Gemma-2-2b")),
    Public(
        "open-clip-torch",
        f"`ResidualAttentionBlock`, {EVERY}",
        import_class("open_clip.transformer", "ResidualAttentionBlock", WIDTH, HEADS),
        ALL,
    ),
    Public(
        "open-clip-torch",
        f"`Attention`, {EVERY}",
        import_class("open_clip.transformer", "Attention", WIDTH, num_heads=HEADS),
        ALL,
    ),
    Public(
        "segment-anything",
        f"`transformer.Attention`, {EVERY}",
        import_class("segment_anything.modeling.transformer", "Attention", WIDTH, HEADS),
        ALL,
    ),
    Public("axial-attention", f"`SelfAttention`, {EVERY}", import_class("axial_attention", "SelfAttention", WIDTH, HEADS), ALL),
    Public(
        "linformer",
        f"`LinformerSelfAttention`, {EVERY}",
        import_class("linformer", "LinformerSelfAttention", WIDTH, seq_len=6, heads=HEADS, k=5),
        {**ALL, "sample": draw_sample(2, 6, WIDTH)},
    ),
    Public("conformer", f"`Attention`, {EVERY}", import_class("conformer.conformer", "Attention", WIDTH, **HEADED), ALL),
]

SIZES = ("dim", "heads", "dim_head", "num_heads")  # settings that the table does not show


def list_layer(package: str, place: str, name: str, *sizes: Any, arguments: dict[str, Any], **settings: Any) -> Public:
    """A class of a module, made with settings, and the arguments of examine; the words are made of them."""
    shown = ", ".join(f"{key}={value!r}" for key, value in settings.items() if key not in SIZES)
    words = [f"`{name}({shown})`" if shown else f"`{name}`"]
    words += [f"`expects={arguments['expects']}`"] if "expects" in arguments else []
    named = arguments.get("sample")
    words += [f"with {' and '.join(named)}"] if isinstance(named, dict) else []
    return Public(package, ", ".join(words), import_class(place, name, *sizes, **settings), arguments)


def make_bert() -> nn.Module:
    """pytorch-pretrained-bert's attention, small; its mask hides nothing."""
    modeling = import_module("pytorch_pretrained_bert.modeling")
    config = modeling.BertConfig(100, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=40)
    found: nn.Module = modeling.BertSelfAttention(config)
    return found


def make_family(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Returns how a family of transformers is made, small."""

    def make() -> nn.Module:
        transformers = import_module("transformers")
        found: nn.Module = getattr(transformers, model)(getattr(transformers, config)(vocab_size=101, **sizes))
        return found

    return make


class TokensFirst(nn.Module):
    """A layer of x (t, b, c), handed x (b, t, c)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.transpose(0, 1))
        first: Tensor = y if isinstance(y, Tensor) else y[0]
        return first.transpose(0, 1)


def make_esm() -> nn.Module:
    """fair-esm's block with rotary positions."""
    return TokensFirst(import_class("esm.modules", "TransformerLayer", WIDTH, 40, HEADS, use_rotary_embeddings=True)())


def make_clip() -> nn.Module:
    """clip-anytorch's block."""
    return TokensFirst(import_class("clip.model", "ResidualAttentionBlock", WIDTH, HEADS)())


TALL = {**ALL, "sample": draw_sample(2, WIDTH, 4, 4)}  # (b, c, h, w)
LONG, EIGHT = draw_sample(2, 16, WIDTH), draw_sample(2, 8, WIDTH)
BOTH = {**ALL, "sample": {"x": draw_sample(2, 6, WIDTH), "context": draw_sample(2, 7, WIDTH)}}
NONE: dict[str, Any] = {}
FURTHER = [
    list_layer("performer-pytorch", "performer_pytorch", "SelfAttention", WIDTH, **HEADED, arguments=ALL),
    list_layer(
        "reformer-pytorch",
        "reformer_pytorch.reformer_pytorch",
        "LSHSelfAttention",
        WIDTH,
        heads=HEADS,
        bucket_size=4,
        causal=True,
        arguments={"sample": LONG},
    ),
    list_layer(
        "sinkhorn-transformer",
        "sinkhorn_transformer.sinkhorn_transformer",
        "SinkhornSelfAttention",
        WIDTH,
        4,
        16,
        heads=HEADS,
        causal=True,
        arguments={"sample": LONG},
    ),
    list_layer(
        "linear-attention-transformer",
        "linear_attention_transformer.linear_attention_transformer",
        "SelfAttention",
        WIDTH,
        HEADS,
        dim_head=6,
        arguments=ALL,
    ),
    list_layer(
        "linear-attention-transformer",
        "linear_attention_transformer.linear_attention_transformer",
        "SelfAttention",
        WIDTH,
        HEADS,
        dim_head=6,
        causal=True,
        arguments=NONE,
    ),
    list_layer(
        "native-sparse-attention-pytorch",
        "native_sparse_attention_pytorch.transformer",
        "Attention",
        WIDTH,
        **HEADED,
        arguments=NONE,
    ),
    list_layer(
        "native-sparse-attention-pytorch",
        "native_sparse_attention_pytorch.transformer",
        "Attention",
        WIDTH,
        **HEADED,
        kv_heads=2,
        arguments=NONE,
    ),
    list_layer("colt5-attention", "colt5_attention.transformer_block", "SelfAttention", WIDTH, **HEADED, arguments=ALL),
    list_layer(
        "agent-attention-pytorch",
        "agent_attention_pytorch.agent_attention_pytorch",
        "AgentSelfAttention",
        WIDTH,
        **HEADED,
        num_agent_tokens=5,
        arguments=ALL,
    ),
    list_layer(
        "block-recurrent-transformer-pytorch",
        "block_recurrent_transformer_pytorch.block_recurrent_transformer_pytorch",
        "Attend",
        causal=True,
        arguments=NONE,
    ),
    list_layer(
        "recurrent-memory-transformer-pytorch",
        "recurrent_memory_transformer_pytorch.recurrent_memory_transformer",
        "Attention",
        dim=WIDTH,
        **HEADED,
        causal=True,
        arguments=NONE,
    ),
    list_layer(
        "mega-pytorch",
        "mega_pytorch.mega_pytorch",
        "SingleHeadedAttention",
        dim=WIDTH,
        dim_qk=6,
        dim_value=WIDTH,
        causal=True,
        arguments=NONE,
    ),
    list_layer(
        "taylor-series-linear-attention",
        "taylor_series_linear_attention.attention",
        "TaylorSeriesLinearAttn",
        WIDTH,
        **HEADED,
        arguments=ALL,
    ),
    list_layer("nystrom-attention", "nystrom_attention", "NystromAttention", WIDTH, **HEADED, num_landmarks=3, arguments=ALL),
    list_layer(
        "h-transformer-1d",
        "h_transformer_1d.h_transformer_1d",
        "CausalHAttention1D",
        WIDTH,
        **HEADED,
        max_seq_len=16,
        block_size=2,
        arguments={"sample": LONG},
    ),
    list_layer(
        "coca-pytorch", "coca_pytorch.coca_pytorch", "CrossAttention", WIDTH, **HEADED, context_dim=30, arguments=CONTEXT
    ),
    list_layer(
        "flamingo-pytorch",
        "flamingo_pytorch.flamingo_pytorch",
        "PerceiverAttention",
        dim=WIDTH,
        **HEADED,
        arguments={**ALL, "sample": {"x": draw_sample(2, 1, 6, WIDTH), "latents": draw_sample(2, 1, 5, WIDTH)}},
    ),
    list_layer("itransformer", "iTransformer.iTransformer", "Attention", WIDTH, **HEADED, arguments=ALL),
    list_layer(
        "infini-transformer-pytorch",
        "infini_transformer_pytorch.infini_transformer",
        "CausalAttention",
        WIDTH,
        **HEADED,
        arguments=NONE,
    ),
    list_layer("stam-pytorch", "stam_pytorch.stam", "Attention", WIDTH, **HEADED, arguments=ALL),
    list_layer("make-a-video-pytorch", "make_a_video_pytorch.make_a_video", "Attention", WIDTH, **HEADED, arguments=ALL),
    list_layer(
        "bidirectional-cross-attention",
        "bidirectional_cross_attention",
        "BidirectionalCrossAttention",
        dim=WIDTH,
        **HEADED,
        context_dim=30,
        arguments=CONTEXT,
    ),
    list_layer("isab-pytorch", "isab_pytorch.isab_pytorch", "Attention", WIDTH, **HEADED, arguments=BOTH),
    list_layer("slot-attention", "slot_attention.slot_attention", "SlotAttention", 3, WIDTH, arguments=ALL),
    list_layer("transformer-in-transformer", "transformer_in_transformer.tnt", "Attention", dim=WIDTH, **HEADED, arguments=ALL),
    list_layer(
        "halonet-pytorch", "halonet_pytorch", "HaloAttention", dim=WIDTH, **HEADED, block_size=2, halo_size=1, arguments=TALL
    ),
    list_layer(
        "bottleneck-transformer-pytorch",
        "bottleneck_transformer_pytorch.bottleneck_transformer_pytorch",
        "Attention",
        dim=WIDTH,
        **HEADED,
        fmap_size=(4, 4),
        arguments=TALL,
    ),
    list_layer(
        "tranception-pytorch",
        "tranception_pytorch.tranception_pytorch",
        "Attention",
        dim=WIDTH,
        **HEADED,
        causal=True,
        arguments=NONE,
    ),
    list_layer("pause-transformer", "pause_transformer.pause_transformer", "CausalAttention", WIDTH, **HEADED, arguments=NONE),
    list_layer("bert-pytorch", "bert_pytorch.model.attention.multi_head", "MultiHeadedAttention", HEADS, WIDTH, arguments=ALL),
    list_layer(
        "swin-transformer-pytorch",
        "swin_transformer_pytorch.swin_transformer",
        "WindowAttention",
        WIDTH,
        HEADS,
        6,
        False,
        4,
        True,
        arguments={**ALL, "sample": draw_sample(2, 8, 8, WIDTH)},
    ),
    list_layer("openai-whisper", "whisper.model", "MultiHeadAttention", WIDTH, HEADS, arguments=ALL),
    list_layer("openai-whisper", "whisper.model", "ResidualAttentionBlock", WIDTH, HEADS, arguments=ALL),
    list_layer(
        "rtdl-revisiting-models",
        "rtdl_revisiting_models",
        "MultiheadAttention",
        d_embedding=WIDTH,
        n_heads=HEADS,
        dropout=0.1,
        arguments=ALL,
    ),
    list_layer(
        "grouped-query-attention-pytorch", "grouped_query_attention_pytorch.attention", "MultiheadGQA", 64, 4, 2, arguments=ALL
    ),
    list_layer(
        "enformer-pytorch",
        "enformer_pytorch.modeling_enformer",
        "Attention",
        WIDTH,
        num_rel_pos_features=12,
        heads=HEADS,
        dim_key=6,
        dim_value=6,
        arguments=ALL,
    ),
    list_layer(
        "tab-transformer-pytorch",
        "tab_transformer_pytorch.tab_transformer_pytorch",
        "Attention",
        WIDTH,
        **HEADED,
        arguments=ALL,
    ),
    list_layer(
        "simple-hierarchical-transformer",
        "simple_hierarchical_transformer.simple_hierarchical_transformer",
        "Attention",
        WIDTH,
        **HEADED,
        arguments=NONE,
    ),
    list_layer(
        "muse-maskgit-pytorch", "muse_maskgit_pytorch.muse_maskgit_pytorch", "Attention", WIDTH, **HEADED, arguments=ALL
    ),
    list_layer("x-clip", "x_clip.x_clip", "Attention", WIDTH, **HEADED, causal=True, arguments=NONE),
    list_layer(
        "denoising-diffusion-pytorch",
        "denoising_diffusion_pytorch.denoising_diffusion_pytorch",
        "Attention",
        WIDTH,
        **HEADED,
        arguments=TALL,
    ),
    list_layer(
        "video-diffusion-pytorch",
        "video_diffusion_pytorch.video_diffusion_pytorch",
        "Attention",
        WIDTH,
        **HEADED,
        arguments=ALL,
    ),
    list_layer("parti-pytorch", "parti_pytorch.parti_pytorch", "Attention", WIDTH, **HEADED, causal=True, arguments=NONE),
    list_layer("hiera-transformer", "hiera.hiera", "MaskUnitAttention", WIDTH, WIDTH, HEADS, arguments=ALL),
    list_layer("self-attention-cv", "self_attention_cv", "MultiHeadSelfAttention", WIDTH, HEADS, arguments=ALL),
    list_layer("transfusion-pytorch", "transfusion_pytorch.transfusion", "Attention", WIDTH, **HEADED, arguments=ALL),
    list_layer(
        "memory-transformer-xl",
        "memory_transformer_xl.memory_transformer_xl",
        "SelfAttention",
        WIDTH,
        16,
        0,
        0,
        heads=HEADS,
        arguments=NONE,
    ),
    Public(
        "pytorch-pretrained-bert",
        f"`BertSelfAttention`, {EVERY}, with a mask of zeros",
        make_bert,
        {**ALL, "sample": {"hidden_states": draw_sample(2, 6, WIDTH), "attention_mask": torch.zeros(2, 1, 1, 6)}},
    ),
    Public(
        "transformers",
        "`LlamaForCausalLM`, two layers",
        make_family(
            "LlamaForCausalLM",
            "LlamaConfig",
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=40,
        ),
    ),
    list_layer("torch", "torch.nn", "MultiheadAttention", WIDTH, HEADS, batch_first=True, arguments=ALL),
    list_layer("torch", "torch.nn", "TransformerEncoderLayer", WIDTH, HEADS, batch_first=True, arguments=ALL),
    list_layer(
        "fast-transformer-pytorch",
        "fast_transformer_pytorch.fast_transformer_pytorch",
        "FastAttention",
        WIDTH,
        **HEADED,
        max_seq_len=8,
        arguments={**ALL, "sample": {"x": EIGHT, "mask": torch.ones(2, 8, dtype=torch.bool)}},
    ),
    list_layer("palm-rlhf-pytorch", "palm_rlhf_pytorch.palm", "ParallelTransformerBlock", WIDTH, **HEADED, arguments=NONE),
    list_layer("yet-another-retnet", "yet_another_retnet.retention", "MultiScaleRetention", 32, HEADS, arguments=NONE),
    list_layer(
        "torchvision",
        "torchvision.models.swin_transformer",
        "ShiftedWindowAttention",
        WIDTH,
        window_size=[4, 4],
        shift_size=[2, 2],
        num_heads=HEADS,
        arguments={**ALL, "sample": draw_sample(2, 8, 8, WIDTH)},
    ),
    Public(
        "torchvision",
        f"`SwinTransformer` of two stages, pixels, {EVERY}",
        import_class(
            "torchvision.models.swin_transformer", "SwinTransformer", [4, 4], WIDTH, [2, 2], [3, 6], [4, 4], num_classes=3
        ),
        PICTURE,
    ),
    Public("torchvision", f"`SwinTransformer` of version 2, pixels, {EVERY}", make_swin_v2, PICTURE),
    list_layer(
        "torchvision", "torchvision.models.vision_transformer", "EncoderBlock", HEADS, WIDTH, 40, 0.0, 0.0, arguments=ALL
    ),
    Public(
        "torchvision",
        f"`VisionTransformer` of two layers, pixels, {EVERY}",
        import_class("torchvision.models", "VisionTransformer", 32, 8, 2, HEADS, WIDTH, 40, num_classes=3),
        PICTURE,
    ),
    list_layer(
        "torchvision",
        "torchvision.models.maxvit",
        "RelativePositionalMultiHeadAttention",
        WIDTH,
        6,
        16,
        arguments={**ALL, "sample": draw_sample(2, 3, 16, WIDTH)},
    ),
    Public("torchtune", "`MultiHeadAttention` with rotary positions and two key heads", make_torchtune_attention),
    Public("torchtune", "`llama3_1`, two layers", partial(make_torchtune_model, "llama3_1")),
    Public("torchtune", "`qwen2`, two layers", partial(make_torchtune_model, "qwen2")),
    Public("fair-esm", f"`TransformerLayer(use_rotary_embeddings=True)`, tokens first, {EVERY}", make_esm, ALL),
    Public("clip-anytorch", f"`ResidualAttentionBlock`, tokens first, {EVERY}", make_clip, ALL),
]


PUBLIC = [
    Public(CROSSED, "`Attention(causal=True)`", make_x_attention),
    Public(CROSSED, "`Attention(causal=True, flash=True, dropout=0.3)`", partial(make_x_attention, flash=True, dropout=0.3)),
    Public(CROSSED, "`Attention(causal=True, one_kv_head=True)`", partial(make_x_attention, one_kv_head=True)),
    Public(CROSSED, "`Attention(causal=True, kv_heads=2)`", partial(make_x_attention, kv_heads=2)),
    Public(
        LOCAL, f"{FOUR}, `expects=Causal() & Window(3)`: four keys, as its README says", make_local_attention, expect_window(3)
    ),
    Public(LOCAL, f"{FOUR}, `expects=Causal() & Window(4)`", make_local_attention, expect_window(4)),
    Public(EFFICIENT, "`Attention(causal=True)`", make_memory_efficient_attention),
    Public(
        EFFICIENT,
        "`Attention(causal=True, memory_efficient=True, dropout=0.3)`",
        partial(make_memory_efficient_attention, **DROPPED),
    ),
    Public(
        PLAIN,
        "`MultiHeadAttention(activation=None)`, `expects=Everything()`",
        make_layer_without_mask,
        {"expects": Everything()},
    ),
    Public(PLAIN, "the same, with its own `gen_history_mask`", partial(Masked, padded=False)),
    Public(
        PLAIN,
        "the same, with a mask of padded keys, `expects=Padding((3, 6))`",
        partial(Masked, padded=True),
        {"expects": Padding(LENGTHS), "sample": draw_sample(2, 6, WIDTH)},
    ),
    *MORE,
    *FURTHER,
]

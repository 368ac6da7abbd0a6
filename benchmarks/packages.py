"""Packages outside transformers: how far the recorded maps are from the softmaxes that the same models compute.

Small models with random weights in float64, as pip installs the packages: `pip install` with the names of the table, some with
--no-deps, since they want versions that exclude each other. Those that are not installed have a row without numbers.
torchvision's wheel on PyPI is built for CUDA: beside torch for CPUs, install the one for CPUs.
"""

import math
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from benchmarks.tables import Table
from observe.eager_weights import are_equal
from observe.handwritten_families import OwnWeights, find_largest_difference
from regard.observe import record

TITLE = "Packages: largest difference of a recorded map from the same model's own softmax, float64"
COLUMNS = ["package", "model", "maps", "difference", "missed, or notes"]
WIDTH, HEADS, TOKENS, VOCABULARY = 24, 3, 32, 64
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": HEADS, "num_classes": 5}
WINDOWS = {"img_size": 32, "patch_size": 2, "depths": (2, 2), "num_heads": (2, 3), "embed_dim": 12, "window_size": 4}
PLAIN = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": WIDTH, "depth": 2, "heads": HEADS, "mlp_dim": 32}
LAYERS = {"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": 8}
PYRAMID = {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4), "depths": (1, 1, 1, 1)}
TEXT = {"context_length": 12, "vocab_size": VOCABULARY, "width": WIDTH, "heads": HEADS, "layers": 2}
PICTURE = {"layers": 2, "width": WIDTH, "head_width": 8, "patch_size": 8, "image_size": 32}
SIZES = {"hidden_size": WIDTH, "mlp_dim": 32, "num_layers": 2, "num_heads": HEADS}
IMAGE = {"in_channels": 3, "img_size": (32, 32), "patch_size": (8, 8), "spatial_dims": 2, **SIZES}
FEATURES = {"depth": 2, "categories": (5, 7, 5), "num_continuous": 4}
STAGES = {"num_classes": 5, "depth": (1, 1), "dim_head": 8}
STRIDES = {"stride_q": ((1, 1), (2, 2)), "stride_kv": ((4, 4), (2, 2))}
POOLING = {"depths": (1, 1), "embed_dim": (12, 24), "num_heads": (1, 2), **STRIDES}
MAXVIT = {
    "stem_channels": 16,
    "partition_size": 4,
    "block_channels": [16, 32],
    "block_layers": [1, 1],
    "head_dim": 8,
    "stochastic_depth_prob": 0.0,
}
LITGPT = {"n_layer": 2, "n_embd": WIDTH, "n_head": HEADS, "block_size": TOKENS, "vocab_size": VOCABULARY}


class Part(NamedTuple):
    """An argument that a class of a package makes: its path, and the arguments."""

    path: str
    arguments: dict[str, Any]


class Model(NamedTuple):
    """A model of a package: the path of its class, its arguments, and what it is called with."""

    package: str
    path: str
    arguments: dict[str, Any]
    feed: Callable[[nn.Module], Any]
    says: str = ""


def draw(*shape: int) -> Tensor:
    """Return random numbers, the same for each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def draw_ids(tokens: int = TOKENS) -> Tensor:
    """Return token ids (2, tokens)."""
    return torch.randint(0, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(3))


def see_picture(size: int = 32) -> Callable[[nn.Module], Any]:
    """Return a function that calls a model with two pictures."""
    return lambda model: model(draw(2, 3, size, size))


def read_ids(model: nn.Module) -> Any:
    """Call a model with token ids."""
    return model(draw_ids())


def read_vectors(model: nn.Module) -> Any:
    """Call a model with vectors."""
    return model(draw(2, TOKENS, WIDTH))


def wrap_layers(name: str = "Decoder", **arguments: Any) -> dict[str, Any]:
    """Return the arguments of x-transformers' TransformerWrapper for layers of a class."""
    layers = Part(f"x_transformers.{name}", {**LAYERS, **arguments})
    return {"num_tokens": VOCABULARY, "max_seq_len": TOKENS, "attn_layers": layers}


def boot_bridge() -> nn.Module:
    """Return GPT-2 with random weights in TransformerLens, which asks for a tokenizer and finds it by its folder."""
    from tokenizers import Tokenizer, models
    from transformer_lens import TransformerBridge
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=HEADS, n_embd=WIDTH, vocab_size=VOCABULARY, **ends))
    with TemporaryDirectory() as folder:
        words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=words, bos_token="a", eos_token="a", pad_token="a").save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        bridge: nn.Module = TransformerBridge.boot_transformers("gpt2", hf_model=model, tokenizer=tokenizer, device="cpu")
    return bridge


def list_models() -> list[Model]:
    """Return all models; parts of their arguments are made with them."""
    timm: list[tuple[str, dict[str, Any], int]] = [
        *((name, VIT, 32) for name in ("VisionTransformer", "VisionTransformerRelPos", "Cait", "Xcit")),
        *((name, WINDOWS, 32) for name in ("SwinTransformer", "SwinTransformerV2")),
        ("Beit", {**VIT, "use_rel_pos_bias": True}, 32),
        ("Eva", {**VIT, "use_rot_pos_emb": True, "use_abs_pos_emb": False}, 32),
        ("Levit", {"img_size": 64, "embed_dim": (16, 32), "key_dim": 8, "depth": (2, 2), "num_heads": (2, 3)}, 64),
        ("PyramidVisionTransformerV2", {**PYRAMID, "sr_ratios": (4, 2, 2, 1)}, 64),
        ("Twins", {**PYRAMID, "img_size": 64, "depths": (2, 2, 2, 2), "sr_ratios": (8, 4, 2, 1), "wss": (7, 7, 7, 7)}, 64),
        ("Hiera", {"img_size": (64, 64), "embed_dim": 12, "num_heads": 1, "stages": (1, 1, 1, 1)}, 64),
        ("DaVit", {"depths": (1, 1), "embed_dims": (12, 24), "num_heads": (2, 3), "window_size": 4}, 32),
        ("mvitv2.MultiScaleVit", {"cfg": Part("timm.models.mvitv2.MultiScaleVitCfg", POOLING), "img_size": (64, 64)}, 64),
        ("maxxvit.MaxxVit", {"cfg": Part("timm.models.maxxvit.MaxxVitCfg", GRIDS), "img_size": 64}, 64),
    ]
    torchvision: list[tuple[str, dict[str, Any], Callable[[nn.Module], Any]]] = [
        ("swin_t", {}, see_picture(64)),
        ("swin_v2_t", {}, see_picture(64)),
        ("MaxVit", {"input_size": (64, 64), **MAXVIT}, see_picture(64)),
        ("video.MViT", {"spatial_size": (32, 32), **MVIT}, lambda model: model(draw(2, 3, 4, 32, 32))),
    ]
    vit_pytorch: list[tuple[str, dict[str, Any], int]] = [
        *(("vit.ViT", PLAIN, 32), ("simple_vit.SimpleViT", PLAIN, 32), ("deepvit.DeepViT", PLAIN, 32)),
        ("cait.CaiT", {**PLAIN, "cls_depth": 1}, 32),
        ("nest.NesT", {**drop(PLAIN, "mlp_dim", "depth"), "patch_size": 4, "num_hierarchies": 2, "block_repeats": (1, 1)}, 32),
        ("sep_vit.SepViT", {**STAGES, "dim": 16, "heads": (1, 2), "window_size": 7}, 112),
        ("max_vit.MaxViT", {**STAGES, "dim": 16, "dim_conv_stem": 8, "window_size": 4}, 64),
    ]
    heads = {"dim": WIDTH, "heads": HEADS, "dim_head": 8}
    return [
        *(Model("timm", f"timm.models.{name}", arguments, see_picture(size)) for name, arguments, size in timm),
        *(Model("vit-pytorch", f"vit_pytorch.{name}", arguments, see_picture(size)) for name, arguments, size in vit_pytorch),
        *(Model("torchvision", f"torchvision.models.{name}", arguments, feed) for name, arguments, feed in torchvision),
        Model(
            *("open_clip_torch", "open_clip.model.CLIP", {"embed_dim": 16, "vision_cfg": PICTURE, "text_cfg": TEXT}),
            lambda model: model(draw(2, 3, 32, 32), draw_ids(12)),
        ),
        *(
            Model("x-transformers", "x_transformers.TransformerWrapper", wrap_layers(**layers), read_ids, says)
            for says, layers in {
                "Decoder": {},
                "Encoder": {"name": "Encoder"},
                "Decoder, flash": {"attn_flash": True},
                "Decoder, rotary": {"rotary_pos_emb": True},
                "Decoder, ALiBi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
                "Decoder, T5's bias": {"rel_pos_bias": True},
                "Decoder, one key head": {"attn_one_kv_head": True},
                "Decoder, talking heads before": {"attn_pre_talking_heads": True},
                "Decoder, sparse top-k": {"attn_sparse_topk": 4},
            }.items()
        ),
        *(Model("diffusers", f"diffusers.{name}", arguments, feed) for name, (arguments, feed) in DIFFUSERS.items()),
        Model("litgpt", "litgpt.model.GPT", {"config": Part("litgpt.config.Config", LITGPT)}, read_ids),
        Model("transformer-lens", "benchmarks.packages.boot_bridge", {}, read_ids, "`TransformerBridge` of GPT-2"),
        Model("local-attention", "local_attention.LocalMHA", {**heads, "window_size": 8}, read_vectors),
        Model("memory-efficient-attention-pytorch", "memory_efficient_attention_pytorch.Attention", heads, read_vectors),
        Model("nystrom-attention", "nystrom_attention.Nystromformer", {**heads, "depth": 2, "num_landmarks": 8}, read_vectors),
        Model("conformer", "conformer.Conformer", {**heads, "depth": 2, "conv_kernel_size": 7}, read_vectors),
        Model("perceiver-pytorch", "perceiver_pytorch.PerceiverIO", PERCEIVER, lambda model: model(draw(2, 24, 8))),
        Model("monai", "monai.networks.nets.vit.ViT", IMAGE, lambda model: model(draw(2, 3, 32, 32))[0]),
        Model(
            *("tab-transformer-pytorch", "tab_transformer_pytorch.FTTransformer", {**heads, **FEATURES}),
            lambda model: model(draw_ids(3) % 5, draw(2, 4)),
        ),
    ]


GRIDS = {
    "embed_dim": (16, 32),
    "depths": (1, 1),
    "block_type": ("M", "M"),
    "stem_width": 16,
    "transformer_cfg": Part(
        "timm.models.maxxvit.MaxxVitTransformerCfg", {"dim_head": 8, "window_size": (4, 4), "grid_size": (4, 4)}
    ),
}
POOLED = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3], "stride_q": [1, 1, 1], "stride_kv": [1, 2, 2]}
BLOCKS = [
    Part(
        "torchvision.models.video.mvit.MSBlockConfig",
        {"num_heads": heads, "input_channels": 16 * heads, "output_channels": 32, **POOLED},
    )
    for heads in (1, 2)
]
MVIT = {
    "temporal_size": 4,
    "block_setting": BLOCKS,
    "residual_pool": True,
    "residual_with_cls_embed": False,
    "rel_pos_embed": True,
    "proj_after_attn": True,
}
LATENTS = {"sample_size": 8, "in_channels": 4, "out_channels": 4}
PATCHES = {**LATENTS, "patch_size": 2, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
UNET = {
    **LATENTS,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "cross_attention_dim": 12,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
JOINT = {"joint_attention_dim": 12, "caption_projection_dim": 16, "pooled_projection_dim": 6, "pos_embed_max_size": 8}


def denoise(model: nn.Module, **more: Any) -> Any:
    """Call a diffusion model with two pictures of 8 x 8 latents, five words and a time."""
    times = torch.tensor([3, 3])
    return model(draw(2, 4, 8, 8), encoder_hidden_states=draw(2, 5, 12), timestep=times, return_dict=False, **more)[0]


DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[nn.Module], Any]]] = {
    "UNet2DConditionModel": (UNET, denoise),
    "PixArtTransformer2DModel": (
        {**PATCHES, "out_channels": 8, "cross_attention_dim": 16, "caption_channels": 12, "norm_num_groups": 4},
        partial(denoise, added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
    ),
    "SD3Transformer2DModel": ({**PATCHES, **JOINT}, lambda model: denoise(model, pooled_projections=draw(2, 6))),
}
PERCEIVER = {"dim": 8, "queries_dim": 12, "depth": 2, "num_latents": 7, "latent_dim": WIDTH, "latent_heads": HEADS}


def drop(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return arguments without those of some names."""
    return {name: value for name, value in arguments.items() if name not in names}


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row a model: the number of maps, their largest difference, and what was not recorded or has a note."""
    table = Table(TITLE, COLUMNS)
    for one in list_models():
        says = (
            one.says
            if one.path.startswith("benchmarks.")
            else ", ".join(filter(None, (f"`{one.path.rpartition('.')[2]}`", one.says)))
        )
        try:
            package = f"{one.package} {metadata.version(one.package)}"
            model = build(one)
        except (ImportError, RuntimeError) as error:
            table.add(one.package, says, "", "", f"not installed: {type(error).__name__}")
            continue
        maps, difference, reasons = measure(model, one.feed)
        table.add(package, says, maps, difference, "; ".join(dict.fromkeys(reasons)))
    return table


def build(one: Model) -> nn.Module:
    """Return a model with random weights; those that are 0 at the start, which hide their layer, are drawn too."""
    torch.manual_seed(0)
    model: nn.Module = make_part(one.path, one.arguments).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.numel() > 1 and not weight.any():
                weight.normal_(std=0.05)
    return model


def make_part(path: str, arguments: dict[str, Any]) -> Any:
    """Return what a class or function of a package makes, of arguments of which some are parts, or lists of these."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)(**{key: make_argument(value) for key, value in arguments.items()})


def make_argument(value: Any) -> Any:
    """Return an argument, made where it is a part or a list of parts."""
    if isinstance(value, list):
        return [make_argument(one) for one in value]
    return make_part(*value) if isinstance(value, Part) else value


def measure(model: nn.Module, feed: Callable[[nn.Module], Any]) -> tuple[int, float, list[str]]:
    """Return the number of maps, their largest difference from the model's own weights, and what has a reason or a note.

    Weights without a softmax are held against the layer's output.
    """
    with torch.no_grad():
        torch.manual_seed(1)
        plain = feed(model)
        torch.manual_seed(1)
        with warnings.catch_warnings(), record(model) as recording:
            warnings.simplefilter("ignore")
            output = feed(model)
        assert are_equal(plain, output), type(model).__name__
        torch.manual_seed(1)
        with OwnWeights() as own:
            feed(model)
    differences = [compare(call, own.found) for call in recording.calls]
    reasons = [one.reason for one in recording.missed] + [shorten(note) for note in recording.notes]
    return len(differences), max(differences, default=math.nan), reasons


def shorten(note: str) -> str:
    """Return a note without the name of its module and the number of bytes."""
    return note.partition(": ")[2].partition(", so its weights")[0]


def compare(call: Any, found: list[Tensor]) -> float:
    """Return how far a map is from the nearest of the softmaxes of its size, in the order of either axes or of all entries."""
    if call.kind == "implicit":
        return float(call.map.certificate().error)
    weights = call.map.dense().double()
    alike = [x.double() for x in found if x.numel() == weights.numel()]
    orders = [x.reshape(weights.shape) for x in alike] + [
        x.transpose(1, 2).reshape(weights.shape) for x in alike if x.dim() == 5
    ]
    direct = min((find_largest_difference(x.reshape(weights.shape), weights) for x in orders), default=math.inf)
    if direct < 1e-9:
        return direct
    values = weights.flatten().sort().values
    return min((find_largest_difference(x.flatten().sort().values, values) for x in alike), default=direct)


if __name__ == "__main__":
    print(run({}).markdown())

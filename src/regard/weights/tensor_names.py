"""The names of a GPT-2's tensors in other libraries' checkpoints, and regard's names.

transformers and OpenAI store query, key and value side by side in one tensor, and their matrices are (in, out); nanoGPT and
minGPT use transformers' names with transposed matrices; the lectures' GPT has one tensor for each of regard's.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from regard.errors import WeightsError

Shapes = Mapping[str, tuple[int, ...]]
WRAPPERS = re.compile(r"^(_orig_mod\.|module\.)+")  # prefixes added by torch.compile and DistributedDataParallel
QKV = ("attention.W_query", "attention.W_key", "attention.W_value")


@dataclass(frozen=True)
class TensorMapping:
    """A tensor of a checkpoint, and the tensors of regard that it holds side by side; turned if it is (in, out)."""

    theirs: str
    ours: tuple[str, ...]
    is_transposed: bool = False

    def fill_block_number(self, block: int) -> "TensorMapping":
        """Return the line of the given block."""
        return TensorMapping(self.theirs.format(block), tuple(ours.format(block) for ours in self.ours), self.is_transposed)


@dataclass(frozen=True)
class NamingScheme:
    """The names of the tensors in one kind of checkpoint."""

    title: str
    once: tuple[TensorMapping, ...]
    block: tuple[TensorMapping, ...]  # {} is the number of the block
    head: TensorMapping
    biasless: tuple[str, ...] = ()  # endings of optional biases

    def iterate_mappings(self, layers: int, tied: bool) -> Iterator[TensorMapping]:
        """Yield every tensor of a model."""
        yield from self.once
        yield from (line.fill_block_number(number) for number in range(layers) for line in self.block)
        if not tied:
            yield self.head

    def find_block_number(self, name: str) -> str | None:
        """Return the number of the block that a tensor belongs to, None if it belongs to none."""
        found = re.match(re.escape(self.block[0].theirs).partition(r"\{\}")[0] + r"(\d{1,6})\b", name)
        return found and found[1]


def map_modules(
    modules: Mapping[str, tuple[str, ...]], matrix: str, norm: str, turned: bool = False
) -> tuple[TensorMapping, ...]:
    """Return the lines of modules with a weight and a bias; matrix and norm are the name endings of these two."""
    found = []
    for theirs, ours in modules.items():
        normal = "norm" in ours[0]
        endings = (norm if normal else matrix).split()
        found.append(TensorMapping(theirs + endings[0], tuple(f"{one}.weight" for one in ours), turned and not normal))
        found.append(TensorMapping(theirs + endings[1], tuple(f"{one}.bias" for one in ours)))
    return tuple(found)


def prefix_block_modules(modules: Mapping[str, tuple[str, ...]], prefix: str) -> dict[str, tuple[str, ...]]:
    """Return the modules of a block with the full names of both sides."""
    return {prefix + theirs: tuple(f"blocks.{{}}.{one}" for one in ours) for theirs, ours in modules.items()}


TRANSFORMERS_MODULES = {  # of transformers, and with slashes those of OpenAI
    "ln_1": ("norm_attention",),
    "attn.c_attn": QKV,
    "attn.c_proj": ("attention.out_proj",),
    "ln_2": ("norm_feed",),
    "mlp.c_fc": ("up",),
    "mlp.c_proj": ("down",),
}
LECTURE_MODULES = {  # of the lectures
    "norm1": ("norm_attention",),
    **{f"att.{name.rpartition('.')[2]}": (name,) for name in (*QKV, "attention.out_proj")},
    "norm2": ("norm_feed",),
    "ff.layers.0": ("up",),
    "ff.layers.2": ("down",),
}
PLAIN = ".weight .bias"
TRANSFORMERS = NamingScheme(
    "transformers",
    (
        TensorMapping("wte.weight", ("tokens.weight",)),
        TensorMapping("wpe.weight", ("positions.weight",)),
        *map_modules({"ln_f": ("norm",)}, PLAIN, PLAIN),
    ),
    map_modules(prefix_block_modules(TRANSFORMERS_MODULES, "h.{}."), PLAIN, PLAIN, turned=True),
    TensorMapping("lm_head.weight", ("head.weight",)),
)
NANOGPT = replace(
    TRANSFORMERS,
    title="nanoGPT or minGPT",
    block=map_modules(prefix_block_modules(TRANSFORMERS_MODULES, "h.{}."), PLAIN, PLAIN),
    biasless=(".bias",),
)
OPENAI = NamingScheme(
    "OpenAI",
    (
        TensorMapping("model/wte", ("tokens.weight",)),
        TensorMapping("model/wpe", ("positions.weight",)),
        *map_modules({"model/ln_f": ("norm",)}, "/w /b", "/g /b"),
    ),
    map_modules(
        prefix_block_modules({name.replace(".", "/"): ours for name, ours in TRANSFORMERS_MODULES.items()}, "model/h{}/"),
        "/w /b",
        "/g /b",
        turned=True,
    ),
    TensorMapping("model/lm_head", ("head.weight",)),
)
LECTURES = NamingScheme(
    "the lectures",
    (
        TensorMapping("tok_emb.weight", ("tokens.weight",)),
        TensorMapping("pos_emb.weight", ("positions.weight",)),
        *map_modules({"final_norm": ("norm",)}, PLAIN, ".scale .shift"),
    ),
    map_modules(prefix_block_modules(LECTURE_MODULES, "trf_blocks.{}."), PLAIN, ".scale .shift"),
    TensorMapping("out_head.weight", ("head.weight",)),
    biasless=("W_query.bias", "W_key.bias", "W_value.bias"),
)
MASKS = re.compile(r"(^|\.)(attn\.(bias|masked_bias)|att\.mask)$")  # buffers of the causal mask


def strip_prefixes(name: str) -> str:
    """Return a name without the prefixes of wrappers and of the model under a head."""
    return WRAPPERS.sub("", name).removeprefix("transformer.")


def recognize_scheme(shapes: Shapes, source: object) -> NamingScheme:
    """Return the dialect of these names; raise WeightsError if there is none."""
    for dialect in (TRANSFORMERS, OPENAI, LECTURES):
        if dialect.once[0].theirs in shapes:
            width = shapes[dialect.once[0].theirs][-1:]
            first = shapes.get("h.0.attn.c_attn.weight", ())
            return NANOGPT if dialect is TRANSFORMERS and first[1:] == width and first[:1] != width else dialect
    raise WeightsError(
        f"{source} holds {shorten_names(shapes)}, which are not the names of a GPT-2 as transformers, OpenAI, "
        "nanoGPT, minGPT or "
        "the lectures write them."
    )


def get_tensor_shape(ours: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape that a tensor of regard must have."""
    c, inner = sizes["width"], sizes["inner"]
    module, _, kind = ours.rpartition(".")
    if kind == "bias":
        return (inner,) if module.endswith(".up") else (c,)
    if module in ("tokens", "head", "positions"):
        return sizes["context" if module == "positions" else "vocabulary"], c
    if "norm" in module:
        return (c,)
    return {"up": (inner, c), "down": (c, inner)}.get(module.rpartition(".")[2], (c, c))


def get_stored_shape(line: TensorMapping, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape that a tensor of a checkpoint must have."""
    first = get_tensor_shape(line.ours[0], sizes)
    joined = (len(line.ours) * first[0], *first[1:])
    return joined[::-1] if line.is_transposed else joined


def shorten_names(names: Iterable[str]) -> str:
    """List a few of many names."""
    some = sorted(names)
    return ", ".join(some[:4]) + (f" and {len(some) - 4} more" if len(some) > 4 else "") or "no tensors"

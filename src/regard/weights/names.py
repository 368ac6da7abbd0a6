"""What others call the tensors of a GPT-2, and what this house calls them.

transformers and OpenAI keep query, key and value side by side in one tensor, and their matrices are (in, out); nanoGPT and
minGPT keep transformers' names and turn the matrices; the lectures' GPT has one tensor for each of ours.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from regard.errors import WeightsError

Shapes = Mapping[str, tuple[int, ...]]
WRAPPERS = re.compile(r"^(_orig_mod\.|module\.)+")  # what torch.compile and DistributedDataParallel put before a name
QKV = ("attention.W_query", "attention.W_key", "attention.W_value")


@dataclass(frozen=True)
class Line:
    """One of their tensors, and ours that lie in it side by side; turned where theirs is (in, out)."""

    theirs: str
    ours: tuple[str, ...]
    turned: bool = False

    def of(self, block: int) -> "Line":
        """The line of a block, by its number."""
        return Line(self.theirs.format(block), tuple(ours.format(block) for ours in self.ours), self.turned)


@dataclass(frozen=True)
class Dialect:
    """How one kind of checkpoint calls its tensors."""

    title: str
    once: tuple[Line, ...]
    block: tuple[Line, ...]  # {} is the number of the block
    head: Line
    biasless: tuple[str, ...] = ()  # endings of the biases that a model may do without

    def lines(self, layers: int, tied: bool) -> Iterator[Line]:
        """Every tensor of a model."""
        yield from self.once
        yield from (line.of(number) for number in range(layers) for line in self.block)
        if not tied:
            yield self.head

    def number(self, name: str) -> str | None:
        """The number of the block that a tensor belongs to."""
        found = re.match(re.escape(self.block[0].theirs).partition(r"\{\}")[0] + r"(\d{1,6})\b", name)
        return found and found[1]


def translated(modules: Mapping[str, tuple[str, ...]], matrix: str, norm: str, turned: bool = False) -> tuple[Line, ...]:
    """The lines of modules that have a weight and a bias; matrix and norm say what follows a module's name."""
    found = []
    for theirs, ours in modules.items():
        normal = "norm" in ours[0]
        endings = (norm if normal else matrix).split()
        found.append(Line(theirs + endings[0], tuple(f"{one}.weight" for one in ours), turned and not normal))
        found.append(Line(theirs + endings[1], tuple(f"{one}.bias" for one in ours)))
    return tuple(found)


def blocks(modules: Mapping[str, tuple[str, ...]], prefix: str) -> dict[str, tuple[str, ...]]:
    """The modules of a block, their whole names and ours."""
    return {prefix + theirs: tuple(f"blocks.{{}}.{one}" for one in ours) for theirs, ours in modules.items()}


COLUMNS = {  # of transformers, and with slashes of OpenAI
    "ln_1": ("norm_attention",),
    "attn.c_attn": QKV,
    "attn.c_proj": ("attention.out_proj",),
    "ln_2": ("norm_feed",),
    "mlp.c_fc": ("up",),
    "mlp.c_proj": ("down",),
}
ONE_EACH = {  # of the lectures
    "norm1": ("norm_attention",),
    **{f"att.{name.rpartition('.')[2]}": (name,) for name in (*QKV, "attention.out_proj")},
    "norm2": ("norm_feed",),
    "ff.layers.0": ("up",),
    "ff.layers.2": ("down",),
}
PLAIN = ".weight .bias"
TRANSFORMERS = Dialect(
    "transformers",
    (
        Line("wte.weight", ("tokens.weight",)),
        Line("wpe.weight", ("positions.weight",)),
        *translated({"ln_f": ("norm",)}, PLAIN, PLAIN),
    ),
    translated(blocks(COLUMNS, "h.{}."), PLAIN, PLAIN, turned=True),
    Line("lm_head.weight", ("head.weight",)),
)
KARPATHY = replace(
    TRANSFORMERS,
    title="nanoGPT or minGPT",
    block=translated(blocks(COLUMNS, "h.{}."), PLAIN, PLAIN),
    biasless=(".bias",),
)
OPENAI = Dialect(
    "OpenAI",
    (
        Line("model/wte", ("tokens.weight",)),
        Line("model/wpe", ("positions.weight",)),
        *translated({"model/ln_f": ("norm",)}, "/w /b", "/g /b"),
    ),
    translated(
        blocks({name.replace(".", "/"): ours for name, ours in COLUMNS.items()}, "model/h{}/"), "/w /b", "/g /b", turned=True
    ),
    Line("model/lm_head", ("head.weight",)),
)
LECTURES = Dialect(
    "the lectures",
    (
        Line("tok_emb.weight", ("tokens.weight",)),
        Line("pos_emb.weight", ("positions.weight",)),
        *translated({"final_norm": ("norm",)}, PLAIN, ".scale .shift"),
    ),
    translated(blocks(ONE_EACH, "trf_blocks.{}."), PLAIN, ".scale .shift"),
    Line("out_head.weight", ("head.weight",)),
    biasless=("W_query.bias", "W_key.bias", "W_value.bias"),
)
MASKS = re.compile(r"(^|\.)(attn\.(bias|masked_bias)|att\.mask)$")  # buffers that say who sees whom: causal, as everywhere


def plain(name: str) -> str:
    """A name without what wrappers put before it, and without the prefix of the model that a head stands on."""
    return WRAPPERS.sub("", name).removeprefix("transformer.")


def recognise(shapes: Shapes, source: object) -> Dialect:
    """The dialect of these names, or WeightsError."""
    for dialect in (TRANSFORMERS, OPENAI, LECTURES):
        if dialect.once[0].theirs in shapes:
            width = shapes[dialect.once[0].theirs][-1:]
            first = shapes.get("h.0.attn.c_attn.weight", ())
            return KARPATHY if dialect is TRANSFORMERS and first[1:] == width and first[:1] != width else dialect
    raise WeightsError(
        f"{source} holds {shortened(shapes)}, which are not the names of a GPT-2 as transformers, OpenAI, nanoGPT, minGPT or "
        "the lectures write them."
    )


def shape(ours: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that one of our tensors must have."""
    c, inner = sizes["width"], sizes["inner"]
    module, _, kind = ours.rpartition(".")
    if kind == "bias":
        return (inner,) if module.endswith(".up") else (c,)
    if module in ("tokens", "head", "positions"):
        return sizes["context" if module == "positions" else "vocabulary"], c
    if "norm" in module:
        return (c,)
    return {"up": (inner, c), "down": (c, inner)}.get(module.rpartition(".")[2], (c, c))


def whole_shape(line: Line, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that one of their tensors must have."""
    first = shape(line.ours[0], sizes)
    joined = (len(line.ours) * first[0], *first[1:])
    return joined[::-1] if line.turned else joined


def shortened(names: Iterable[str]) -> str:
    """A few of many names."""
    some = sorted(names)
    return ", ".join(some[:4]) + (f" and {len(some) - 4} more" if len(some) > 4 else "") or "no tensors"

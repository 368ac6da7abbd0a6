"""Find which parameters of a module make q, k, v and the output: by name if names tell, else by shape and by trial."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.examination.identify.affine import Affine, concatenate_outputs, find_matrices, is_norm

MOST = 8  # matrices; with more, a module is not one attention layer and no layout is tried
TOKENS = {
    "q": {"q", "wq", "qs", "query", "queries", "toq", "qw", "qlin"},
    "k": {"k", "wk", "ks", "key", "keys", "tok", "kw", "klin"},
    "v": {"v", "wv", "vs", "value", "values", "val", "tov", "vw", "vlin"},
    "qkv": {"qkv", "wqkv", "toqkv", "attn", "inproj", "qvk", "kqv", "kvq", "vqk", "vkq", "allprojection"},
    "kv": {"kv", "wkv", "tokv"},
    "o": {"o", "wo", "out", "output", "proj", "projection", "dense", "fc", "unify", "unifyheads", "final", "linear", "merge"},
}
STRIDED = ("3dh", "d3h", "dh3")  # orders in which the columns of a head are not neighbors


@dataclass(frozen=True, eq=False)
class ProjectionLayout:
    """The matrices that make q, k, v (and the output) of x; None is x itself, or no output projection.

    `heads` is the number of them if the parameters give it. `whole` is one matrix that makes them together, divided when the
    number of heads is known. `joined` is the order of heads and width in the columns of the context.
    """

    says: str
    made: tuple[str, ...] = ()  # the names of the matrices that make q, k and v
    q: Affine | None = None
    k: Affine | None = None
    v: Affine | None = None
    output: Affine | None = None
    heads: int | None = None
    has_separate_heads: bool = False  # each head is a separate module
    has_known_roles: bool = True  # whether names and shapes say which of the matrices makes q and which k
    whole: Affine | None = None  # the fused matrix of q, k and v
    order: str = ""  # the column order of the whole: of 3, h and d; "" if it is not fused
    roles: str = "qkv"  # the order of q, k and v in the whole
    joined: str = "hd"
    plain: bool = True  # whether this is the usual layout of these parameters


def find_layouts(module: nn.Module | None, width: int, out: int) -> Iterator[ProjectionLayout]:
    """Yield the layouts that a module's parameters may have, the likeliest first; `width` of its input, `out` of its output."""
    found = [] if module is None else list(find_matrices(module, width))
    if module is None or not found:
        yield ProjectionLayout("no parameters: q = k = v = x")
        return
    stacked = find_head_list(module, width)
    if stacked is not None:
        heads, rest = stacked
        for each in itertools.islice(zip(*(find_matrix_layouts(head, width) for head in heads), strict=True), 6):
            if each[0].whole is None:
                yield from add_output_projections(join_layouts(list(each)), rest, out)
    if len(found) <= MOST:
        for layout in find_matrix_layouts(found, width):
            yield from add_output_projections(layout, [one for one in found if one.name not in layout.made], out)


def has_extra_layers(module: nn.Module, width: int) -> bool:
    """Return whether a module is more than attention: it normalizes, or has more matrices than q, k, v and an output."""
    stacked = find_head_list(module, width)
    single = list(find_matrices(module, width)) if stacked is None else stacked[1]  # besides the heads in a list
    return len(single) > 4 or any(is_norm(part) for part in module.modules())


def add_output_projections(layout: ProjectionLayout, rest: list[Affine], out: int) -> Iterator[ProjectionLayout]:
    """Yield a layout with each matrix that may be its output projection, those named so first, and without one if none is."""
    fit = sorted((one for one in rest if one.out_features == out), key=lambda one: parse_matrix_role(one.name) != "o")
    yield from (replace(layout, output=one) for one in fit[:3])
    if not fit or parse_matrix_role(fit[0].name) != "o":
        yield layout


def find_matrix_layouts(found: list[Affine], width: int) -> Iterator[ProjectionLayout]:
    """Yield the layouts of some matrices, without their output projection."""
    inner = [one for one in found if one.in_features == width]
    named: dict[str, Affine] = {}
    for one in inner:
        named.setdefault(parse_matrix_role(one.name), one)
    if {"q", "k"} <= set(named):
        values = [named["v"]] if "v" in named else [*([named[""]] if "" in named else []), None, named["k"]]
        yield from (make_separate_layout(named["q"], named["k"], v) for v in values)
    elif "q" in named and "kv" in named:
        yield from list_half_fused_layouts(named["q"], named["kv"])
    elif "qkv" in named:
        yield from list_fused_layouts(named["qkv"])
    else:
        yield from guess_layouts(inner)


def make_separate_layout(
    q: Affine, k: Affine, v: Affine | None, has_known_roles: bool = True, plain: bool = True
) -> ProjectionLayout:
    """Return the layout of q, k and v by matrices of their own; v is x if there is none for it."""
    made = tuple(dict.fromkeys(one.name for one in (q, k, v) if one is not None))
    says = ", ".join(made) if len(made) > 1 else f"{made[0]} for q, k and v alike"
    return ProjectionLayout(says, made, q, k, v, heads=q.heads or k.heads, has_known_roles=has_known_roles, plain=plain)


def guess_layouts(inner: list[Affine]) -> Iterator[ProjectionLayout]:
    """Yield the layouts of matrices whose names do not tell: in the order held, then in every other; one for all, or fused."""
    alike = [one for one in inner if one.out_features == inner[0].out_features]
    for n, (q, k, v) in enumerate(itertools.permutations(alike[:4], 3)):
        yield make_separate_layout(q, k, v, has_known_roles=False, plain=n == 0)
    if len(inner) > 2:
        return
    for one in inner:
        if one.out_features % 3 == 0:
            yield from list_fused_layouts(one)
        yield make_separate_layout(one, one, one, has_known_roles=False)
    if len(alike) == 2:
        first, second = alike
        for q, k, last in ((first, second, None), (second, first, None), (first, second, second), (first, first, second)):
            yield make_separate_layout(q, k, last, has_known_roles=False, plain=False)


def list_fused_layouts(whole: Affine) -> Iterator[ProjectionLayout]:
    """Yield the layouts of one matrix for q, k and v: thirds or groups, in the orders that its columns may have per head.

    Heads whose columns are not neighbors may be joined as they were split, or in blocks.
    """
    both = ProjectionLayout(f"{whole.name} for q, k and v", (whole.name,), whole=whole)
    orders = [(order, "hd") for order in ("3hd", "h3d", "grouped", "hd3", *STRIDED)] + [(order, "dh") for order in STRIDED]
    for order, joined in orders:
        for roles in ("qkv", "kqv", "qvk", "kvq", "vqk", "vkq"):
            plain = roles == "qkv" and order in ("3hd", "h3d", "grouped")
            has_known_roles = roles == "qkv"  # any other order may be right too, but whether it is meant is unknown
            yield replace(both, order=order, roles=roles, has_known_roles=has_known_roles, plain=plain, joined=joined)


def list_half_fused_layouts(q: Affine, kv: Affine) -> Iterator[ProjectionLayout]:
    """Yield the layouts of one matrix for q and one for k and v: in halves, or for each head."""
    for order in ("2gd", "g2d"):
        for roles in ("kv", "vk"):
            says, both, made = f"{q.name}, {kv.name} for k and v", concatenate_outputs([q, kv]), (q.name, kv.name)
            yield ProjectionLayout(says, made, whole=both, order=order, roles=f"q{q.out_features}{roles}", plain=roles == "kv")


def split_columns(layout: ProjectionLayout, heads: int) -> dict[str, Tensor] | None:
    """Return which columns of the whole are q's, k's and v's with this many heads, each in the order (h, d).

    None if the widths do not allow it.
    """
    assert layout.whole is not None
    total = layout.whole.out_features
    if layout.order in ("2gd", "g2d"):
        return split_half_fused_columns(layout, heads, total)
    if layout.order == "grouped":
        return split_grouped_columns(layout, heads, total)
    if total % (3 * heads):
        return None
    sizes = {"3": 3, "h": heads, "d": total // 3 // heads}
    place = torch.arange(total).reshape([sizes[axis] for axis in layout.order])
    thirds = place.permute([layout.order.index(axis) for axis in "3hd"])
    return {letter: thirds[n].flatten() for n, letter in enumerate(layout.roles)}


def split_half_fused_columns(layout: ProjectionLayout, heads: int, total: int) -> dict[str, Tensor] | None:
    """Return the columns if q has a matrix of its own and k and v share one; None if the widths do not allow it."""
    wide = int(layout.roles[1:-2])
    d = wide // heads
    if wide % heads or not d or (total - wide) % (2 * d):
        return None
    groups = (total - wide) // (2 * d)
    place = torch.arange(wide, total)
    two = place.view(2, groups, d) if layout.order == "2gd" else place.view(groups, 2, d).transpose(0, 1)
    return {"q": torch.arange(wide), **{letter: two[n].flatten() for n, letter in enumerate(layout.roles[-2:])}}


def split_grouped_columns(layout: ProjectionLayout, heads: int, total: int) -> dict[str, Tensor] | None:
    """Return the columns of h heads of queries and then fewer of keys and of values; queries are as wide as the output's input.

    None if the widths do not allow it.
    """
    if layout.output is None or layout.output.in_features % heads:
        return None
    wide = layout.output.in_features
    d, rest = wide // heads, total - wide
    if rest <= 0 or rest % (2 * d) or rest == 2 * wide or layout.roles != "qkv":
        return None
    half = rest // 2
    return {"q": torch.arange(wide), "k": torch.arange(wide, wide + half), "v": torch.arange(wide + half, total)}


def find_head_list(module: nn.Module, width: int) -> tuple[list[list[Affine]], list[Affine]] | None:
    """Return the matrices of each of several heads that a module holds in a list, and the rest; None without such a list."""
    for path, part in module.named_modules():
        children = list(part.children()) if isinstance(part, nn.ModuleList) else []
        each = [list(find_matrices(child, width)) for child in children]
        if len(each) > 1 and all(len(one) >= 2 and len(one) == len(each[0]) for one in each):
            return each, [one for one in find_matrices(module, width) if not one.name.startswith(f"{path}.")]
    return None


def join_layouts(heads: list[ProjectionLayout]) -> ProjectionLayout:
    """Join the layouts of separate heads into one of many heads."""
    first = heads[0]

    def join_matrices(name: str) -> Affine | None:
        parts = [getattr(head, name) for head in heads]
        return None if parts[0] is None else concatenate_outputs(parts)

    q, k, v = (join_matrices(name) for name in "qkv")
    return replace(first, says=f"{len(heads)} heads of {first.says}", q=q, k=k, v=v, heads=len(heads), has_separate_heads=True)


def parse_matrix_role(name: str) -> str:
    """Return what a matrix is for by its name: q, k, v, qkv, kv, o, or an empty string."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    last = next((part for part in reversed(parts) if part not in ("weight", "linear")), parts[-1] if parts else "")
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", last).lower()
    words = [word for word in re.split(r"[_\d]+", snake) if word]
    if "".join(words) in ("querykeyvalue", "qkvproj", "inproj", "inprojweight"):
        return "qkv"
    if words[:2] == ["key", "value"] or words[:2] == ["keys", "values"]:
        return "kv"
    if words == ["c", "proj"] or words[:2] == ["to", "out"]:
        return "o"
    for kind in ("qkv", "kv", "q", "k", "v", "o"):
        if TOKENS[kind] & set(words):
            return kind
    return ""


def list_head_counts(module: nn.Module | None, width: int) -> list[int]:
    """Return the numbers of heads that divide a width: those that the module states first, then the usual."""
    stated = [] if module is None else list(find_head_numbers(module))
    divisors = [
        n for n in range(1, width + 1) if width % n == 0 and (width < 256 or n == 1 or n in stated or 8 <= width // n <= 256)
    ]
    return sorted(divisors, key=lambda n: (n not in stated, width // n < 2, abs(width // n - 64) if width >= 256 else n))


def find_head_numbers(module: nn.Module) -> Iterator[int]:
    """Yield integer attributes of a module and its parts whose name means a number of heads."""
    for part in module.modules():
        for name, one in vars(part).items():
            if isinstance(one, int) and not isinstance(one, bool) and re.search(r"head|groups|^h$|^n$", name):
                yield one

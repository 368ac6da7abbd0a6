"""Check that every weight that requires a gradient gets one, and that all weights are registered."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.examination.case import Case
from regard.examination.identify.affine import is_norm
from regard.examination.identify.projection_layouts import parse_matrix_role
from regard.examination.report import UNUSED_HEADS, Checked, Finding, Unknown
from regard.examination.subject.adapters import SubjectError

SEEDS = 3
MORE_SEEDS, LARGE = 16, 4.0  # and the size of inputs, before heads count as unused
CUT = (
    "Compute with the weight itself: no .detach(), .data, .item() or torch.no_grad() between it and the output; call every "
    "projection that __init__ creates."
)
NAN = (
    "The gradient of the softmax of a row of only -inf is NaN, even if its weights are set to 0 afterwards: give such rows "
    "finite scores before the softmax, scores.masked_fill(~mask.any(-1, keepdim=True), 0)."
)
SOURCE = re.compile(r"context|memory|cross|encoder|source|src|cond|key|value|kv|other|image|text|^y$|^z$|^xa$")
ASIDE = re.compile(r"mask|cache|past|bias|pos|weight|len")
JOINT = re.compile(  # the whole name of a projection of several roles
    r"(to_?|w_?|linear_)?(qkv|kv|in_proj|c_attn|query_key_value|key_value|q_k_v|k_v)"
    r"(_?(proj|projection|linear|layer|weight|w))*",
    re.IGNORECASE,
)
LEAST_GROUP = 1 / 8  # of a joint projection, for the keys of grouped queries: fewer may be spare
ZERO = "Initialize one of the two with random numbers, as LoRA does with A, or neither can ever change."
LIST = "Keep modules in nn.ModuleList and tensors in nn.Parameter or nn.ParameterList: self.heads = nn.ModuleList(heads)."


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check for weights that are not registered, get no gradient, or get one that is NaN."""
    module = case.subject.module
    if module is None:
        return
    unknown = list(find_unregistered(module))
    if unknown:
        evidence = f"{format_names(unknown)} in a plain list or attribute: missing from parameters()"
        yield Finding("not trainable", evidence, LIST, 1.0, "gradient")
    asking = {name: weight for name, weight in module.named_parameters() if weight.requires_grad and weight.is_floating_point()}
    if not asking:
        return
    if any(weight.is_inference() for weight in asking.values()):
        yield Unknown("whether every weight gets a gradient", "a layer that was not created in torch.inference_mode()")
        return
    try:
        found = compute_weight_gradients(case, list(asking.values()))
    except SubjectError as error:  # such as a kernel without a gradient
        yield Unknown("whether every weight gets a gradient", f"a backward pass that runs; it {error.did}")
        return
    if found is None:
        evidence = f"none of its {len(asking)} weights with requires_grad=True gets a gradient from the output"
        yield Finding("not trainable", evidence, CUT, 1.3, "gradient")
        return
    got = dict(zip(asking, found, strict=True))
    broken = [name for name, slope in got.items() if slope is not None and not slope.isfinite().all()]
    without = [name for name, slope in got.items() if slope is None and has_trained_neighbor(module, name, got)]
    if broken and case.compute_context(*case.make_usual_inputs(80)).detach().isfinite().all():
        evidence = f"the gradient of {format_names(broken)} is NaN, though every output is finite"
        yield Finding("not trainable", evidence, NAN, 1.2, "gradient")
    elif stuck := find_stuck_pairs(got, asking):
        evidence = f"{format_names(stuck)} are zero, and so is the gradient of each: they stay zero"
        yield Finding("not trainable", evidence, ZERO, 1.1, "gradient")
    elif without and (spare := find_unused_source(case)):
        yield Unknown(
            f"whether {format_names(without)} gets a gradient: it may be used only with `{spare}`",
            f"a function that passes `{spare}`",
        )
    elif without:
        yield Finding("not trainable", f"no gradient reaches {format_names(without)}", CUT, 1.1, "gradient")
    elif (cut := find_cut_rows(case, got)) is not None:
        yield Finding("not trainable", f"no gradient reaches {cut}", CUT, 1.1, "gradient")
    elif (heads := find_cut_heads(case, got)) is not None:
        yield make_head_result(case, heads)
    elif not unknown and not broken:
        yield check_reached_weights(got)


def check_reached_weights(got: Mapping[str, Tensor | None]) -> Checked:
    """Return that every weight gets a gradient, or all but those of parts that may be for other inputs or outputs."""
    others = [name for name, slope in got.items() if slope is None]
    count = f"{len(got) - len(others)} weights"
    if not others:
        return Checked("every weight with requires_grad=True gets a gradient", count)
    what = f"weights with requires_grad=True get a gradient, all but those of {format_names(others)}"
    return Checked(what, f"{count}; a part for other inputs or outputs needs none")


def find_stuck_pairs(got: Mapping[str, Tensor | None], weights: Mapping[str, Tensor]) -> list[str]:
    """Return the matrices that are zero with a gradient of zero, if there are two: each multiplies the other."""
    tables = {name: slope for name, slope in got.items() if slope is not None and slope.dim() > 1}
    stuck = [name for name, slope in tables.items() if not slope.any() and not weights[name].any()]
    return stuck if len(stuck) > 1 and len(stuck) < len(tables) else []


def find_cut_rows(case: Case, got: Mapping[str, Tensor | None]) -> str | None:
    """Describe the outputs of a joint projection of queries, keys and values that get no gradient, as after k.detach()."""
    module = case.subject.module
    if module is None or not has_several_keys(case):
        return None  # the weight of a single key is 1, whatever its score
    for name, slope in got.items():
        axis = None if slope is None or slope.dim() != 2 else find_output_axis(module, name, slope)
        if slope is None or axis is None or has_zero_row(module.get_parameter(name), axis):
            continue  # keys get no gradient where the projection of the queries begins with zeros
        cut, n = (slope == 0).all(1 - axis).nonzero().flatten().tolist(), slope.shape[axis]
        if cut and is_whole_part(cut, n):
            return f"outputs {cut[0]} to {cut[-1]} of the {n} of {format_names([name])}"
    return None


def has_several_keys(case: Case) -> bool:
    """Return whether any query may see more than one key."""
    return bool((case.get_expected_visibility(*case.make_usual_inputs()).sum(-1) > 1).any())


class CutHeads(NamedTuple):
    """The weight of a projection, and its outputs that get no gradient, in words; `n` outputs in heads of width d."""

    name: str
    outputs: str
    n: int
    d: int

    def __str__(self) -> str:
        return f"outputs {self.outputs} of the {self.n} of {format_names([self.name])}"


def find_cut_heads(case: Case, got: Mapping[str, Tensor | None]) -> CutHeads | None:
    """Return the heads of a projection that get no gradient, for larger inputs and other ones neither; None if none."""
    module, d = case.subject.module, find_head_width(case)
    if module is None or not has_several_keys(case):
        return None
    if any(has_zero_row(one, end) for one in module.parameters() if one.dim() == 2 for end in (0, 1)):
        return None
    for name, slope in got.items():
        axis = None if slope is None or slope.dim() != 2 else find_head_axis(module, name, slope)
        if slope is None or axis is None or not list_cut_heads(slope, axis, d):
            continue
        try:
            more = compute_weight_gradients(case, [module.get_parameter(name)], range(90, 90 + MORE_SEEDS), LARGE)
        except SubjectError:  # refusing large numbers is allowed
            more = None
        if more is not None and more[0] is not None:
            slope = slope.abs() + more[0].abs()
        if heads := list_cut_heads(slope, axis, d):
            return CutHeads(name, " and ".join(heads), slope.shape[axis], d)
    return None


def make_head_result(case: Case, heads: CutHeads) -> Finding | Unknown:
    """Return that heads are not used, or that this is not known where the module may select them."""
    selection = find_head_selection(case, heads)
    if selection:
        what = f"whether a gradient reaches {heads}: whole heads, which {selection} may switch off"
        return Unknown(what, "a sample for which every head is used")
    return Finding("not trainable", f"no gradient reaches {heads}: whole heads, which are not used", CUT, 1.1, UNUSED_HEADS)


def find_head_selection(case: Case, heads: CutHeads) -> str:
    """Return the name of a matrix with an output for each head, as of a router, or of factors of which one is 0; or ""."""
    counts = {heads.n // heads.d // parts for parts in (1, 2, 3)}
    counts |= {x.shape[1] for one in case.inner_calls for x in (one.call.q, one.call.k)}
    for path, part in case.subject.module.named_modules() if case.subject.module is not None else ():
        for name, one in {**vars(part), **part._buffers, **part._parameters}.items():
            place = f"{path}.{name}".lstrip(".")
            if not isinstance(one, Tensor) or place == heads.name:
                continue
            outputs = one.shape[:1] if isinstance(part, nn.Linear) else one.shape
            is_router = one.dim() == 2 and not counts.isdisjoint(outputs)
            if is_router or (one.numel() in counts and not bool(one.all())):
                return format_names([place])
    return ""


def find_head_width(case: Case) -> int:
    """Return the width of the heads; 0 if it is not known."""
    widths = [one.width for one in case.inner_calls] if case.match is None else [case.match.width]
    return widths[0] if widths else 0


def list_cut_heads(slope: Tensor, axis: int, d: int) -> list[str]:
    """Return the first and the last of outputs without gradient in each run of them; empty if not all are whole heads."""
    cut = (slope == 0).all(1 - axis).nonzero().flatten().tolist()
    every = set(cut)
    runs = list(zip((n for n in cut if n - 1 not in every), (n for n in cut if n + 1 not in every), strict=True))
    is_whole = d > 1 and all(first % d == 0 and (last + 1) % d == 0 for first, last in runs)
    return [f"{first} to {last}" for first, last in runs] if is_whole else []


def find_output_axis(module: nn.Module, name: str, weight: Tensor) -> int | None:
    """Return the axis of the outputs of a joint projection; None if it is unknown or the weight is of something else."""
    owner = module.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.Embedding) or not JOINT.fullmatch(name.removesuffix(".weight").rpartition(".")[2]):
        return None
    if isinstance(owner, nn.Linear):
        return 0
    if type(owner).__name__ == "Conv1D":  # of GPT-2: (inputs, outputs)
        return 1
    return None if weight.shape[0] == weight.shape[1] else int(weight.shape[1] > weight.shape[0])


def find_head_axis(module: nn.Module, name: str, weight: Tensor) -> int | None:
    """Return the axis of the outputs of a projection of queries, keys or values, or of a joint one; None as above."""
    joint = find_output_axis(module, name, weight)
    is_linear = isinstance(module.get_submodule(name.rpartition(".")[0]), nn.Linear)
    return 0 if joint is None and is_linear and parse_matrix_role(name) in ("q", "k", "v") else joint


def has_zero_row(weight: Tensor, axis: int) -> bool:
    """Return whether all weights of an output are zero."""
    return bool((weight == 0).all(1 - axis).any())


def is_whole_part(cut: list[int], n: int) -> bool:
    """Return whether outputs are whole thirds or halves of n, or the queries or the keys of grouped queries."""
    first, size = cut[0], len(cut)
    rest = n - first - size
    if size in (1, n) or cut[-1] - first + 1 != size:
        return False  # a single one may be a dead unit
    if any(n % parts == 0 and size % (n // parts) == 0 and first % (n // parts) == 0 for parts in (2, 3)):
        return True
    if first == 0:  # queries, followed by as many keys as values
        return rest > 2 and rest % 2 == 0 and size % (rest // 2) == 0
    return size == rest and first % size == 0 and size >= LEAST_GROUP * n  # keys, followed by as many values


def compute_weight_gradients(
    case: Case, weights: list[Tensor], seeds: Iterable[int] = range(80, 80 + SEEDS), size: float = 1.0
) -> list[Tensor | None] | None:
    """Return the gradient of each weight, summed over some inputs, None for a weight that the output does not depend on.

    None for all if no output has a gradient.
    """
    total: list[Tensor | None] = [None] * len(weights)
    connected = False
    for seed in seeds:
        with torch.enable_grad():
            y = compute_differentiable_context(case, seed, size)
            if not y.requires_grad:
                continue
            rows = (
                case.get_expected_visibility(*case.make_usual_inputs()).any(-1).to(y.device)
            )  # rows that see nothing may hold anything
            draw = torch.Generator().manual_seed(seed)
            direction = torch.randn(y.shape[-1], generator=draw, dtype=torch.float64).to(y.device, y.dtype)
            slopes = compute_gradients((y @ direction)[rows].sum(), weights)
        connected = connected or any(slope is not None for slope in slopes)
        total = [new if old is None else old if new is None else old + new for old, new in zip(total, slopes, strict=True)]
    return total if connected else None


def compute_differentiable_context(case: Case, seed: int, size: float = 1.0) -> Tensor:
    """Return the context of inputs that require gradients too, as torch.utils.checkpoint needs; of plain ones if it raises."""
    try:
        return case.compute_context(
            *(x.requires_grad_().clone() for x in case.make_usual_inputs(seed, size))
        )  # clones may be changed in place
    except SubjectError:
        return case.compute_context(*case.make_usual_inputs(seed, size))


def compute_gradients(value: Tensor, weights: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Compute the gradient of a number on each weight. Raises SubjectError if the backward pass raises."""
    try:
        slopes = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
    except Exception as error:  # a kernel without a gradient, or a user's own backward
        raise SubjectError("the backward pass", error) from error
    return slopes if all(slope is not None for slope in slopes) else accumulate_gradients(value, weights)


def accumulate_gradients(value: Tensor, weights: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Compute gradients by .backward(), the only way with torch.utils.checkpoint(use_reentrant=True); restores weight.grad."""
    kept = [weight.grad for weight in weights]
    try:
        for weight in weights:
            weight.grad = None
        value.backward()
        return tuple(weight.grad for weight in weights)
    except Exception as error:
        raise SubjectError("the backward pass", error) from error
    finally:
        for weight, grad in zip(weights, kept, strict=True):
            weight.grad = grad


def find_unused_source(case: Case) -> str:
    """Return a module's unused argument that may be another source of keys and values; "" if there is none."""
    module = case.subject.module
    if module is None or case.subject.form != "x":
        return ""
    spare = [one.name for one in inspect.signature(module.forward).parameters.values() if one.default is None]
    return next((name for name in spare if SOURCE.search(name) and not ASIDE.search(name)), "")


def has_trained_neighbor(module: nn.Module, name: str, got: dict[str, Tensor | None]) -> bool:
    """Return whether a weight without gradient is a projection in the module of others which have one, or a norm beside them.

    What a model holds for other inputs or outputs, such as an embedding or a pooler, is a part of its own.
    """
    path = name.rpartition(".")[0]
    part = module.get_submodule(path)
    if isinstance(part, nn.Embedding):
        return False
    trained = [other for other, slope in got.items() if slope is not None]
    if is_norm(part) and path:
        beside = path.rpartition(".")[0]
        return any(get_owner_path(module, other) == beside and has_projection(module, other) for other in trained)
    return any(get_owner_path(module, other) == get_owner_path(module, name) for other in trained)


def has_projection(module: nn.Module, name: str) -> bool:
    """Return whether the module that holds a weight of this name is a linear layer."""
    return isinstance(module.get_submodule(name.rpartition(".")[0]), nn.Linear)


def get_owner_path(module: nn.Module, name: str) -> str:
    """Return the path of the module that holds a weight, or that holds the weight's linear layer."""
    owner = name.rpartition(".")[0]
    return owner.rpartition(".")[0] if owner and isinstance(module.get_submodule(owner), nn.Linear) else owner


def find_unregistered(module: nn.Module) -> Iterator[str]:
    """Yield the names of modules and weights that are held outside the registers of nn.Module."""
    known = {id(part) for part in module.modules()} | {id(weight) for weight in module.parameters()}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name.startswith("_"):
                continue
            held = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
            if any(is_trainable(one) and id(one) not in known for one in held):
                yield f"{path}.{name}" if path else name


def is_trainable(one: object) -> bool:
    """Return whether an object is a weight that requires a gradient, or a module with one."""
    if isinstance(one, nn.Module):
        return any(weight.requires_grad for weight in one.parameters())
    return isinstance(one, Tensor) and one.requires_grad and one.is_leaf


def format_names(names: list[str]) -> str:
    """Format names as `a`, `a and b`, `a, b, c and 9 more`; a layer by its name, for weight and bias alike."""
    parts = list(dict.fromkeys(name.removesuffix(".weight").removesuffix(".bias") for name in names))
    shown = parts if len(parts) <= 4 else [*parts[:3], f"{len(parts) - 3} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"

"""Record the attention calls that a module makes in one forward, and the projections that their queries and keys come from."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.examination.call_reading.changed_sources import find_changed_source, find_decayed_sources, find_mixed_source
from regard.examination.call_reading.late_norms import LateNorm, NormCall, find_late_norm
from regard.examination.call_reading.output_reading import AbsorbedQueries, OutputReading, read_absorbed_queries, read_output
from regard.examination.call_reading.projection_source import (
    ModuleOutput,
    ProjectionSource,
    arrange_tokens,
    find_shift,
    find_source,
)
from regard.examination.identify.affine import is_norm
from regard.examination.report import Finding
from regard.examination.subject.attention_output import list_parts
from regard.examination.subject.call_conventions import parse_qkv
from regard.examination.subject.localize import hook_parts
from regard.map.scored_matrix import ScoredMatrix
from regard.map.stored_matrix import StoredMatrix
from regard.observe import interception
from regard.observe.interception.attention_call import AttentionCall, CallAdapter, MissedCall
from regard.observe.interception.function_roles import NORMALISES
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall
from regard.observe.interception.thread_state import Watcher
from regard.observe.record import refuse_compiled

SCALE_NAMES = ("scaling", "scale", "softmax_scale", "attn_scale", "sm_scale")
SQUARE_NAMES = ("query_pre_attn_scalar", "attention_scores_scalar")  # of a configuration: the scale is 1 / √ of it
FEW = 4  # numbers of a bias that is a mask, right or wrong
MOST_NUMBERS = 2**22  # of a module's output that is kept
MOST_OUTPUTS = 100  # of modules in which changed queries and keys are looked for
BY_HAND = "by hand"  # how the kernel of a handwritten call begins, which is recorded at its product with the values


@dataclass(frozen=True, eq=False)
class InnerCall:
    """An attention call in the module of this name, and where its q and k come from; None if that is not known.

    `q_named`, `k_named` and `v_named` are the outputs (b, h, t, d) of projections with names of these roles. `stated` is the
    scale that an attribute of the module states, None without one. `widths` are the numbers of weights of the modules that q
    and k come from. `shifts` are the tokens by which q, k and v were shifted after their projections. `late_norms` are norms
    after a rotation. `mixed` names the weights to which the heads of this softmax were mixed, "" if they were not mixed.
    """

    name: str
    call: AttentionCall
    q_source: ProjectionSource | None
    k_source: ProjectionSource | None
    q_named: Tensor | None = None
    k_named: Tensor | None = None
    stated: float | None = None
    widths: tuple[int, int] = (0, 0)
    module: nn.Module | None = None
    absorbed: AbsorbedQueries | None = None
    v_source: ProjectionSource | None = None
    output: OutputReading | None = None
    mixed: str = ""
    shifts: tuple[int, int, int] = (0, 0, 0)
    late_norms: tuple[LateNorm, ...] = ()
    v_named: Tensor | None = None

    @property
    def width(self) -> int:
        """The width d of each head, of latent attention before its queries were absorbed."""
        return self.call.q.shape[-1] if self.absorbed is None else self.absorbed.width

    @property
    def is_stored_as_weights(self) -> bool:
        """Whether only the weights are known, not the queries and keys that they come from."""
        return self.call.q.shape[-1] == 1 and self.call.bias is not None and not self.call.q.any()

    @property
    def has_positions(self) -> bool:
        """Whether q or k were rotated after their projections, or the scores have a bias of more than a few numbers."""
        pairs = ((self.call.q, self.q_source), (self.call.k, self.k_source))
        has_bias = self.call.bias is not None and not self.is_stored_as_weights
        return (has_bias and self.call.bias is not None and self.call.bias.unique().numel() > FEW) or any(
            source is not None and not source.is_viewed and not source.is_equal_to(x) for x, source in pairs
        )

    def report(self, kind: str, does: str, cure: str, strength: float, cause: str) -> Finding:
        """Return the finding of a mistake in the module of this call."""
        return Finding(kind, f"in {self.name or 'the layer'} {does}", cure, strength, cause, self.name)

    @property
    def cosine_factor(self) -> float | None:
        """The factor on the cosines of queries and keys whose norms are the same for all tokens; None for other norms."""
        if self.is_stored_as_weights or self.call.q.shape[2] < 3:
            return None
        factor: float = self.call.q.shape[-1] ** -0.5 if self.call.scale is None else self.call.scale
        for x in (self.call.q, self.call.k):
            norms = x.double().norm(dim=-1).transpose(1, 2).flatten(0, 1)  # (b t, h)
            norms = norms[(norms > 0).all(1)]  # others are of pads
            if len(norms) < 3 or not float((norms / norms[:1] - 1).abs().max()) < 1e-4:
                return None
            factor *= float(norms.mean())
        return factor

    @property
    def scale(self) -> float | None:
        """The factor on the scores of the projections' outputs; None if it is not known.

        Rotations and permutations change no norm, so they do not change it.
        """
        own: float = self.call.q.shape[-1] ** -0.5 if self.call.scale is None else self.call.scale
        if self.absorbed is not None:
            return own
        if self.call.weight is not None or self.is_stored_as_weights or self.q_source is None or self.k_source is None:
            return None
        return own * self.q_source.factor * self.k_source.factor


class WeightMatrix(NamedTuple):
    """Weights (b, h, q, k) in the module of this name that are no softmax, in float64, and how they are made, in words.

    `mixing` are the factors of each head on the softmaxes that its weights are made of, (b or 1, h, n); None without any.
    `softmaxes` are those whose heads were mixed to these weights; empty if they are not known.
    """

    name: str
    title: str
    weights: Tensor
    mixing: Tensor | None
    softmaxes: tuple[InnerCall, ...] = ()


class RecordedCalls(NamedTuple):
    """The attention calls of a run, weights that are no softmax, and what could not be read.

    `unstored` are the names of the modules whose weights are no softmax and are not stored, as of linear attention.
    """

    calls: list[InnerCall]
    missed: list[MissedCall]
    matrices: list[WeightMatrix]
    unstored: Sequence[str] = ()


NOTHING = RecordedCalls([], [], [])


class NormalizationWatcher(TorchFunctionMode):
    """A torch function mode that counts the outputs that existed when a softmax or an exponential last ran."""

    def __init__(self, outputs: Sequence[ModuleOutput] = ()) -> None:
        super().__init__()
        self.outputs, self.count = outputs, -1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and count the outputs before a softmax or an exponential."""
        if getattr(func, "__name__", "") in NORMALISES:
            self.count = len(self.outputs)
        return func(*args, **(kwargs or {}))

    def count_earlier_outputs(self, kernel: str) -> int:
        """Return how many outputs came before the weights of the call that is being recorded."""
        return self.count if self.count >= 0 and kernel.startswith(BY_HAND) else len(self.outputs)


def select_earlier(outputs: Sequence[ModuleOutput], count: int) -> list[ModuleOutput]:
    """Return the first `count` outputs, and later ones that are projections of a module's inputs, known when it has run."""
    return [*outputs[:count], *(one for one in outputs[count:] if one.is_of_inputs)]


@contextlib.contextmanager
def watch_projections(module: nn.Module, keep: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `keep` in the block with the name of a linear part and what F.linear computes by its weight without calling it."""
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    mode = LinearFunctionMode({id(part.weight): name for name, part in linear.items()}, keep)
    hooks = [part.register_forward_pre_hook(mode.forget_weight) for part in linear.values()]
    try:
        with mode:
            yield
    finally:
        for one in hooks:
            one.remove()


class LinearFunctionMode(TorchFunctionMode):
    """Hands on each output of F.linear by one of some weights, by their ids."""

    def __init__(self, names: dict[int, str], keep: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.names, self.keep = names, keep

    def forget_weight(self, part: nn.Linear, _: object) -> None:
        """Ignore the weight of a part that is called, whose output a hook sees."""
        self.names.pop(id(part.weight), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and hand on its output."""
        output = func(*args, **(kwargs or {}))
        name = self.names.get(id(args[1])) if func is F.linear and len(args) > 1 else None
        if name is not None:
            self.keep(name, output)
        return output


class CallCollector(Watcher):
    """A watcher that keeps every attention call of the modules that it watches."""

    def __init__(self, modules: dict[str, nn.Module], order: NormalizationWatcher | None = None) -> None:
        self.names = {id(module): name for name, module in modules.items()}
        self.order: NormalizationWatcher = order or NormalizationWatcher()
        self.copies: dict[int, AttentionCall] = {}  # by the id of the call, of which the latest counts
        self.calls: list[tuple[str, AttentionCall, int]] = []  # with the number of outputs before its weights
        self.missed: list[MissedCall] = []
        self.matrices: list[tuple[WeightMatrix, list[AttentionCall], int]] = []
        self.unstored: list[str] = []

    def handle_call(self, call: AttentionCall, adapter: CallAdapter, name: str, proceed: Callable[..., Any]) -> Any:
        """Run a call unchanged and keep it."""
        self.copies[id(call)] = copy = keep_copy(call)
        self.calls.append((name, copy, self.order.count_earlier_outputs(call.kernel)))
        return proceed(call, adapter)

    def handle_recurrence(self, call: RecurrenceCall, name: str) -> None:
        """Keep weights that are computed by hand and are no softmax; ignore a recurrence, which has no scale."""
        if not call.kernel.startswith("by hand"):
            return
        mechanism = call.read().mechanism
        b, h, t = mechanism.shape
        if isinstance(mechanism, (StoredMatrix, ScoredMatrix)) and b * h * mechanism.rows * t <= MOST_NUMBERS:
            queries = torch.arange(mechanism.rows)
            rows = [mechanism.build_plane(*at).compute_rows(queries, 0, t) for at in itertools.product(range(b), range(h))]
            weights = torch.stack(rows).unflatten(0, (b, h))
            mixing = mechanism.mixing if isinstance(mechanism, ScoredMatrix) else None
            softmaxes = [keep_copy(one) for one in call.read_softmaxes()]
            made = WeightMatrix(name, mechanism.title, weights.double(), mixing)
            self.matrices.append((made, softmaxes, self.order.count_earlier_outputs(call.kernel)))
        else:
            self.unstored.append(name)

    def handle_division(self, call: AttentionCall, note: str, name: str) -> None:
        """Add to the copy of a call what its context was divided by in place of the sums of its weights."""
        self.copies[id(call)].note = note

    def report_missed(self, missed: MissedCall) -> None:
        """Keep a call that could not be read."""
        self.missed.append(missed)


def keep_copy(call: AttentionCall) -> AttentionCall:
    """Return a call with copies of its queries, keys and values, which may be changed in place later."""
    v = None if call.v is None else call.v.detach().clone()
    return replace(call, q=call.q.detach().clone(), k=call.k.detach().clone(), v=v)


def record_inner_calls(module: nn.Module, run: Callable[[], object]) -> RecordedCalls:
    """Return the attention calls that a module makes while it runs, and those that could not be read.

    Raises what the module raises, and ConfigError for a module that torch.compile or torch.jit made.
    """
    modules = dict(module.named_modules())
    refuse_compiled(modules)
    outputs, norms = list[ModuleOutput](), list[NormCall]()
    order: NormalizationWatcher = NormalizationWatcher(outputs)
    collector = CallCollector(modules, order)

    def keep_output(name: str, part: nn.Module, inputs: tuple[Any, ...], _: object, output: object) -> None:
        outputs.extend(ModuleOutput(name, one.detach().clone()) for one in list_tensors(output))  # it may be changed in place
        outputs.extend(project_inputs(name, part, inputs))
        if is_norm(part):
            norms.extend(copy_norm_call(name, inputs, output))

    returned = list[ModuleOutput]()  # not among the outputs that queries and keys may come from

    def keep_own(part: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        outputs.extend(project_inputs("", part, inputs))
        returned.extend(ModuleOutput("", one.detach()) for one in list_tensors(output))

    def keep_projection(name: str, output: Tensor) -> None:
        outputs.extend(ModuleOutput(name, one.detach().clone()) for one in list_tensors(output))

    own = module.register_forward_hook(keep_own)
    try:
        with (
            hook_parts(module, keep_output),
            watch_projections(module, keep_projection),
            order,
            interception.watch_modules(collector, modules),
            torch.no_grad(),
        ):
            run()
    finally:
        own.remove()

    def trace(name: str, call: AttentionCall, count: int) -> InnerCall:
        traced = trace_sources(name, call, outputs, select_earlier(outputs, count))
        return add_module(add_late_norms(traced, norms, outputs), modules, outputs, returned)

    matrices = []
    for one, softmaxes, count in collector.matrices:
        traced = tuple(replace(trace(one.name, call, count), mixed=one.title) for call in softmaxes)
        matrices.append(one._replace(softmaxes=traced))
    return RecordedCalls([trace(*one) for one in collector.calls], collector.missed, matrices, collector.unstored)


def copy_norm_call(name: str, inputs: tuple[Any, ...], output: object) -> list[NormCall]:
    """Return copies of the heads, in four axes, that a norm was given and made; empty for anything else."""
    given, made = list_tensors(inputs[:1]), list_tensors(output)
    is_of_heads = len(given) == len(made) == 1 and given[0].dim() == 4 and given[0].shape == made[0].shape
    return [NormCall(name, given[0].detach().clone(), made[0].detach().clone())] if is_of_heads else []


def add_late_norms(one: InnerCall, norms: Sequence[NormCall], outputs: Sequence[ModuleOutput]) -> InnerCall:
    """Return a call with the norms of its queries and keys that come after their rotation."""
    inside = select_inside(outputs, one.name)
    sides = (("queries", one.call.q, one.q_source), ("keys", one.call.k, one.k_source))
    found = (find_late_norm(who, x, source, norms, inside) for who, x, source in sides)
    return replace(one, late_norms=tuple(late for late in found if late is not None))


def add_module(
    one: InnerCall, modules: dict[str, nn.Module], outputs: Sequence[ModuleOutput], returned: Sequence[ModuleOutput]
) -> InnerCall:
    """Return a call with its module, the scale that this states, and the sizes of the modules that q and k come from.

    `returned` is what the whole module returned.
    """
    module = modules[one.name]
    inside = select_inside(outputs, one.name)
    if one.k_source is None:
        one = replace(one, k_source=find_mixed_source(one.call.k, inside, dict(module.named_parameters(recurse=False))))
    q, k = (0 if source is None else count_vector(modules.get(source.name)) for source in (one.q_source, one.k_source))
    is_known = one.q_source is not None or one.is_stored_as_weights
    absorbed = None if is_known else read_absorbed_queries(one.call, module, inside)
    output = None
    if not one.is_stored_as_weights and not (absorbed is not None and absorbed.wrong):
        own = [other for other in (*outputs, *returned) if other.name == one.name]
        output = read_output(one.call, module, one.name, [*inside, *own], 0 if absorbed is None else absorbed.latent)
    stated = get_stated_scale(module)
    return replace(one, module=module, stated=stated, widths=(q, k), absorbed=absorbed, output=output)


def count_vector(part: object) -> int:
    """Return the number of weights of a part with one vector of them, as a norm has; 0 for anything else."""
    weight = getattr(part, "weight", None)
    return weight.numel() if isinstance(weight, Tensor) and weight.dim() == 1 else 0


def get_stated_scale(module: nn.Module) -> float | None:
    """Return the scale in an attribute of a module, or in its configuration, by its name; None without one."""
    found = [getattr(module, name, None) for name in SCALE_NAMES]
    config = getattr(module, "config", None)
    squares = [getattr(config, name, None) for name in SQUARE_NAMES]
    found += [one**-0.5 for one in squares if isinstance(one, (int, float)) and one > 0]
    return next((float(one) for one in found if isinstance(one, (int, float)) and not isinstance(one, bool)), None)


def project_inputs(name: str, part: nn.Module, inputs: tuple[Any, ...]) -> list[ModuleOutput]:
    """Return the first inputs of a module times each matrix that it holds itself, as nn.MultiheadAttention uses them."""
    if isinstance(part, (nn.Linear, nn.Embedding)):
        return []
    given = {id(x): x for x in inputs[:3] if isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()}
    own = dict(part.named_parameters(recurse=False))
    found = []
    for x, (one, weight) in itertools.product(given.values(), own.items()):
        if weight.dtype != x.dtype:
            continue
        place = f"{name}.{one}".lstrip(".")
        if weight.dim() in (3, 4) and weight.numel() <= MOST_NUMBERS:  # with an axis of heads, as of einsum
            matrices = [weight.movedim(n, 0).flatten(1) for n, size in enumerate(weight.shape) if size == x.shape[2]]
            found += [ModuleOutput(place, (x @ matrix).detach(), is_of_inputs=True) for matrix in matrices]
        if weight.dim() != 2:
            continue
        if weight.shape[1] == x.shape[2]:
            bias = own.get(one.replace("weight", "bias"))
            has_bias = bias is not None and bias.shape == weight.shape[:1]
            found.append(ModuleOutput(place, F.linear(x, weight, bias if has_bias else None).detach(), is_of_inputs=True))
        if weight.shape[0] == x.shape[2]:
            found.append(ModuleOutput(place, (x @ weight).detach(), is_of_inputs=True))
    return found


def list_tensors(output: object) -> list[Tensor]:
    """Return the floating tensors in a module's output that are small enough to be kept."""
    parts = (one for one in list_parts(output) if isinstance(one, Tensor))
    return [one for one in parts if one.is_floating_point() and one.dim() > 1 and one.numel() <= MOST_NUMBERS]


def trace_sources(
    name: str, call: AttentionCall, outputs: Sequence[ModuleOutput], earlier: Sequence[ModuleOutput]
) -> InnerCall:
    """Return a call with the outputs of its own module's parts, or else of a module around it, that its q and k come from.

    `earlier` are the outputs before the call's weights: those of its q and k, but values may be made later.
    """
    q_source, k_source = find_sources(call, earlier, name)
    own = select_inside(outputs, name)
    q_named, k_named = find_named_output(call.q, own, "q"), find_named_output(call.k, own, "k")
    v_source = None if call.v is None else find_source(call.v, own)
    v_named = None if call.v is None else find_named_output(call.v, own, "v")
    sides = ((call.q, q_source), (call.k, k_source), (call.v, v_source))
    q_shift, k_shift, v_shift = (0 if x is None else find_shift(x, source, own) for x, source in sides)
    shifts = (q_shift, k_shift, v_shift)
    return InnerCall(name, call, q_source, k_source, q_named, k_named, v_named=v_named, v_source=v_source, shifts=shifts)


def find_sources(
    call: AttentionCall, outputs: Sequence[ModuleOutput], name: str
) -> tuple[ProjectionSource | None, ProjectionSource | None]:
    """Return the sources of q and k in the module of this name, or else in one around it, None for each that is not found."""
    place = name
    while True:
        inside = select_inside(outputs, place)
        q, k = (find_source(x, inside) for x in (call.q, call.k))
        if not (q and k) and len(inside) <= MOST_OUTPUTS:
            q = q or find_changed_source(call.q, inside)
            k = k or find_changed_source(call.k, inside)
            q, k = (q, k) if q and k else find_decayed_sources(call.q, call.k, inside) or (q, k)
        if (q and k) or not place:
            return q, k
        place = place.rpartition(".")[0]


def select_inside(outputs: Sequence[ModuleOutput], place: str) -> list[ModuleOutput]:
    """Return the outputs of the parts of the module at a place."""
    return [one for one in outputs if not place or one.name.startswith(f"{place}.")]


def find_named_output(x: Tensor, outputs: Sequence[ModuleOutput], role: str) -> Tensor | None:
    """Return the first output of a part whose name states a role, in the heads of x (b, h, t, d); None without one."""
    for one in outputs:
        y = arrange_tokens(one.output, x) if parse_qkv(one.name.rpartition(".")[2]) == role else None
        if y is not None and y.shape[-1] == x.shape[1] * x.shape[-1]:
            split: Tensor = y.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2)
            return split
    return None

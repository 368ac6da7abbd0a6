"""Record the attention calls that a module makes in one forward, and the projections that their queries and keys come from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.examination.attention_output import list_parts
from regard.examination.call_conventions import parse_role
from regard.examination.localize import hook_parts
from regard.examination.projection_source import ModuleOutput, ProjectionSource, arrange_tokens, find_source
from regard.observe import interception
from regard.observe.interception.attention_call import AttentionCall, CallAdapter, MissedCall
from regard.observe.record import refuse_compiled

SCALE_NAMES = ("scaling", "scale", "softmax_scale", "attn_scale", "sm_scale")
FEW = 4  # numbers of a bias that is a mask, right or wrong
MOST_NUMBERS = 2**22  # of a module's output that is kept


@dataclass(frozen=True, eq=False)
class InnerCall:
    """An attention call in the module of this name, and where its q and k come from; None if that is not known.

    `q_named` and `k_named` are the outputs (b, h, t, d) of projections with names of these roles, where norms do not agree.
    `stated` is the scale that an attribute of the module states, None without one.
    """

    name: str
    call: AttentionCall
    q_source: ProjectionSource | None
    k_source: ProjectionSource | None
    q_named: Tensor | None = None
    k_named: Tensor | None = None
    stated: float | None = None

    @property
    def width(self) -> int:
        """The width d of each head."""
        return self.call.q.shape[-1]

    @property
    def is_stored_as_weights(self) -> bool:
        """Whether only the weights are known, not the queries and keys that they come from."""
        return self.width == 1 and self.call.bias is not None and not self.call.q.any()

    @property
    def has_positions(self) -> bool:
        """Whether q or k were rotated after their projections, or the scores have a bias of more than a few numbers."""
        pairs = ((self.call.q, self.q_source), (self.call.k, self.k_source))
        has_bias = self.call.bias is not None and not self.is_stored_as_weights
        return (has_bias and self.call.bias is not None and self.call.bias.unique().numel() > FEW) or any(
            source is not None and not source.is_viewed and not source.is_equal_to(x) for x, source in pairs
        )

    @property
    def scale(self) -> float | None:
        """The factor on the scores of the projections' outputs; None if it is not known.

        Rotations and permutations change no norm, so they do not change it.
        """
        if self.call.weight is not None or self.is_stored_as_weights or self.q_source is None or self.k_source is None:
            return None
        own: float = self.width**-0.5 if self.call.scale is None else self.call.scale
        return own * self.q_source.factor * self.k_source.factor


class CallCollector:
    """A watcher that keeps every attention call of the modules that it watches."""

    can_change_calls, needs_graph = False, False

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.names = {id(module): name for name, module in modules.items()}
        self.calls: list[tuple[str, AttentionCall]] = []
        self.missed: list[MissedCall] = []

    def start_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Ignore the start of a forward."""

    def handle_generation(self, module: nn.Module, sequences: Tensor, prompts: int) -> None:
        """Ignore generated tokens."""

    def handle_call(self, call: AttentionCall, adapter: CallAdapter, name: str, proceed: Callable[..., Any]) -> Any:
        """Run a call unchanged and keep it."""
        self.calls.append((name, replace(call, q=call.q.detach().clone(), k=call.k.detach().clone())))
        return proceed(call, adapter)

    def handle_recurrence(self, call: object, name: str) -> None:
        """Ignore a recurrence, which has no scale."""

    def handle_recurrent_module(self, module: nn.Module) -> None:
        """Ignore the end of a recurrent module."""

    def report_missed(self, missed: MissedCall) -> None:
        """Keep a call that could not be read."""
        self.missed.append(missed)


def record_inner_calls(module: nn.Module, run: Callable[[], object]) -> tuple[list[InnerCall], list[MissedCall]]:
    """Return the attention calls that a module makes while it runs, and the calls that could not be read.

    Raises what the module raises, and ConfigError for a module that torch.compile or torch.jit made.
    """
    modules = dict(module.named_modules())
    refuse_compiled(modules)
    collector, outputs = CallCollector(modules), list[ModuleOutput]()

    def keep_output(name: str, part: nn.Module, inputs: tuple[Any, ...], _: object, output: object) -> None:
        outputs.extend(ModuleOutput(name, one.detach()) for one in list_tensors(output))
        outputs.extend(project_inputs(name, part, inputs))

    own = module.register_forward_hook(lambda part, inputs, _: outputs.extend(project_inputs("", part, inputs)))
    try:
        with hook_parts(module, keep_output), interception.watch_modules(collector, modules), torch.no_grad():
            run()
    finally:
        own.remove()
    calls = [trace_sources(name, call, outputs) for name, call in collector.calls]
    return [replace(one, stated=get_stated_scale(modules[one.name])) for one in calls], collector.missed


def get_stated_scale(module: nn.Module) -> float | None:
    """Return the number in an attribute of a module that is named as a scale; None without one."""
    found = (getattr(module, name, None) for name in SCALE_NAMES)
    return next((float(one) for one in found if isinstance(one, (int, float)) and not isinstance(one, bool)), None)


def project_inputs(name: str, part: nn.Module, inputs: tuple[Any, ...]) -> list[ModuleOutput]:
    """Return the first input of a module times each matrix that it holds itself, as nn.MultiheadAttention uses them."""
    x = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
    if x is None or isinstance(part, (nn.Linear, nn.Embedding)) or x.dim() != 3 or not x.is_floating_point():
        return []
    own = dict(part.named_parameters(recurse=False))
    found = []
    for one, weight in own.items():
        if weight.dim() == 2 and weight.shape[1] == x.shape[2] and weight.dtype == x.dtype:
            bias = own.get(one.replace("weight", "bias"))
            has_bias = bias is not None and bias.shape == weight.shape[:1]
            found.append(ModuleOutput(f"{name}.{one}".lstrip("."), F.linear(x, weight, bias if has_bias else None).detach()))
        if weight.dim() == 2 and weight.shape[0] == x.shape[2] and weight.dtype == x.dtype:
            found.append(ModuleOutput(f"{name}.{one}".lstrip("."), (x @ weight).detach()))
    return found


def list_tensors(output: object) -> list[Tensor]:
    """Return the floating tensors in a module's output that are small enough to be kept."""
    parts = (one for one in list_parts(output) if isinstance(one, Tensor))
    return [one for one in parts if one.is_floating_point() and one.dim() > 1 and one.numel() <= MOST_NUMBERS]


def trace_sources(name: str, call: AttentionCall, outputs: Sequence[ModuleOutput]) -> InnerCall:
    """Return a call with the outputs of its own module's parts, or else of a module around it, that its q and k come from."""
    place = name
    while True:
        inside = select_inside(outputs, place)
        q_source, k_source = (find_source(x, inside) for x in (call.q, call.k))
        if (q_source and k_source) or not place:
            break
        place = place.rpartition(".")[0]
    own = select_inside(outputs, name)
    q_named = None if q_source else find_named_output(call.q, own, "q")
    return InnerCall(name, call, q_source, k_source, q_named, None if k_source else find_named_output(call.k, own, "k"))


def select_inside(outputs: Sequence[ModuleOutput], place: str) -> list[ModuleOutput]:
    """Return the outputs of the parts of the module at a place."""
    return [one for one in outputs if not place or one.name.startswith(f"{place}.")]


def find_named_output(x: Tensor, outputs: Sequence[ModuleOutput], role: str) -> Tensor | None:
    """Return the output of the projection whose name states a role, in the heads of x (b, h, t, d); None without one."""
    for one in reversed(outputs):
        y = arrange_tokens(one.output, x) if parse_role(get_last_name(one.name)) == role else None
        if y is not None and y.shape[-1] == x.shape[1] * x.shape[-1]:
            split: Tensor = y.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2)
            return split
    return None


def get_last_name(path: str) -> str:
    """Return the last name of a module's path."""
    return path.rpartition(".")[2]

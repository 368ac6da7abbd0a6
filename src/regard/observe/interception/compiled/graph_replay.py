"""A compiled graph that runs a second time, uncompiled, so that attention of every kind in it is recorded.

torch.compile's graph has the functions that the model called, without its Python: it writes nothing but tensors, and its nodes
state the modules that they were traced in. The compiled code runs unchanged. Then the graph runs twice on the same inputs: once
as it is, to compare its outputs with those of the compiled code, and if they agree once inside the modules' frames.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import _current_graph_task_id as backward
from torch._C import _push_on_torch_function_stack as push
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_leaves

from regard.observe.interception.call_dispatch import explain_error, report_missed
from regard.observe.interception.compiled.graph_inputs import WriteGuard, copy_inputs, list_held
from regard.observe.interception.compiled.graph_nodes import (
    find_written_inputs,
    get_stack,
    has_attention,
    list_graphs,
    multiplies_tokens,
)
from regard.observe.interception.functions import flex
from regard.observe.interception.module_calls import FAST, call_in_frame, wrap_call
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.thread_state import STATE, Watcher, pop_mode

KERNEL = "torch.compile"
BREAK = "the graph breaks here, so that attention between its parts would not be observed"
NESTED = "it is in a part of the graph that is run by a function of its own, which may run it again or not at all"
RUN_ONCE = {"tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap"}  # run the graph they are given, once
UNLIKE = (
    "the graph was run again uncompiled to record it, and gave other outputs than the compiled code, as it does where random "
    "numbers are drawn (dropout): record the model before it is compiled"
)
FAILED = "the graph could not be run again uncompiled to record it: {}"
CHANGED = "it is compiled, and interventions do not change compiled code"


class GraphReplay:
    """A compiled graph with a copy of its operations, which run again whenever it is called inside a recording."""

    def __init__(self, gm: fx.GraphModule, is_part: bool) -> None:
        self.graph = fx.GraphModule(gm, copy_graph(gm))  # a backend may change its own
        self.written, self.is_part = find_written_inputs(self.graph), is_part
        self.may_attend = any(has_attention(one) or multiplies_tokens(one) for one in list_graphs([self.graph]))

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled code as a function that also replays the graph while something is recorded."""

        def run_and_replay(*args: Any) -> Any:
            call = STATE.compiled_call
            if call is None or not STATE.frames or backward() != -1:
                return compiled(*args)
            call.replayed = True
            if self.is_part:
                report_missed(KERNEL, BREAK)
            changers = [one for one in STATE.watchers if one.can_change_calls and self.may_attend]
            recorders = [one for one in STATE.watchers if not one.can_change_calls]
            report_missed(KERNEL, CHANGED, watchers=changers)
            try:
                copies, states = copy_inputs(args, self.written), save_random_states(args)
            except Exception as error:  # what cannot run again must not stop the model
                report_missed(KERNEL, FAILED.format(explain_error(error)), watchers=recorders)
                return compiled(*args)
            output = compiled(*args)
            if recorders:
                self.replay(call.modules, args, copies, states, tree_leaves(output), recorders)
            return output

        return run_and_replay

    def replay(
        self,
        modules: dict[int, nn.Module],
        args: Sequence[Any],
        copies: list[Any],
        states: dict[torch.device, Tensor],
        outputs: list[Any],
        recorders: list[Watcher],
    ) -> None:
        """Run the graph again on copies of its inputs: to compare its outputs, and to record it if they agree."""
        try:
            again = copy_inputs(copies)
            free = [x for x, original in zip(again, args, strict=True) if isinstance(x, Tensor) and x is not original]
            with torch.no_grad(), restore_random_states(states), WriteGuard(free):
                expected = tree_leaves(self.graph(*again))
                draws = any(not torch.equal(get_random_state(one), state) for one, state in states.items())
            if not all(are_equal_outputs(x, y, draws) for x, y in zip(outputs, expected, strict=True)):
                report_missed(KERNEL, UNLIKE, watchers=recorders)
                return
            del expected, again, free
            with torch.no_grad(), restore_random_states(states), resume_interception(recorders):
                originals = {id(copy): id(x) for x, copy in zip(args, copies, strict=True)}
                interpreter = ModuleInterpreter(self.graph, modules, originals)
                interpreter.run_as_root(STATE.frames[-1], copies)
                if len(STATE.frames) == 1:
                    STATE.mode.report_undivided()
        except Exception as error:  # what cannot run again must not stop the model
            report_missed(KERNEL, FAILED.format(explain_error(error)), watchers=recorders)


def copy_graph(gm: fx.GraphModule) -> fx.Graph:
    """Return a copy of a graph, with what its nodes state of their modules."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(gm.graph, {}))
    return copy


def are_equal_outputs(x: Any, y: Any, draws: bool) -> bool:
    """Return whether an output of compiled code is the same as that of its operations, to half of the digits of its dtype.

    It has to be the same to the bit where the operations draw random numbers.
    """
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and (not isinstance(x, bool | int | float) or x == y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = x.detach(), y.detach()
    if draws or not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    finite, wide = x.isfinite(), torch.complex128 if x.is_complex() else torch.float64
    if not torch.equal(finite, y.isfinite()):
        return False
    apart, size = (torch.linalg.vector_norm(one.masked_fill(~finite, 0), dtype=wide) for one in (x - y, y))
    return bool(apart <= torch.finfo(x.dtype).eps ** 0.5 * size)


def get_random_state(device: torch.device) -> Tensor:
    """Return the state of a device's random numbers."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def save_random_states(args: Sequence[Any]) -> dict[torch.device, Tensor]:
    """Return the states of the random numbers of the CPU and of the devices of some tensors."""
    devices = {torch.device("cpu"), *(x.device for x in args if isinstance(x, Tensor) and x.device.type == "cuda")}
    return {device: get_random_state(device) for device in devices}


@contextmanager
def restore_random_states(states: dict[torch.device, Tensor]) -> Iterator[None]:
    """Set the states of random numbers in the context, and afterwards those that were before it."""
    with torch.random.fork_rng([one for one in states if one.type == "cuda"]):
        for device, state in states.items():
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(device).set_rng_state(state, device)
        yield


@contextmanager
def resume_interception(recorders: list[Watcher]) -> Iterator[None]:
    """Intercept calls in the context for these watchers alone, though the call of compiled code pauses it."""
    watchers, names = STATE.watchers.copy(), ("pause_depth", "is_in_skippable", "is_in_fast_path", "compiled_call")
    before, frames = {name: getattr(STATE, name) for name in names}, len(STATE.frames)
    STATE.watchers[:], STATE.pause_depth = recorders, 0
    STATE.is_in_skippable = STATE.is_in_fast_path = False
    STATE.compiled_call = None  # ops in the graph have no call to observe
    push(STATE.mode)
    try:
        yield
    finally:
        del STATE.frames[frames:]
        pop_mode()
        STATE.watchers[:] = watchers
        vars(STATE).update(before)


class ModuleInterpreter(fx.Interpreter):
    """Runs the operations of a graph inside frames of the modules that they were traced in."""

    def __init__(
        self, gm: fx.GraphModule, modules: dict[int, nn.Module], originals: dict[int, int], path: tuple[str, ...] = ()
    ) -> None:
        super().__init__(gm)
        self.modules, self.path, self.result = modules, path, None
        self.originals = originals  # the ids of the graph's inputs in the model, by those of their copies

    def run_as_root(self, frame: ModuleFrame, args: Sequence[Any]) -> None:
        """Run the graph on its inputs as a call of a frame's module, with the frame's arguments and the rest of the inputs."""
        copies = {self.originals[id(x)]: x for x in args if isinstance(x, Tensor)}
        outside = self.find_arguments(args, [*frame.module.modules(), *self.modules.values()])
        inputs = {id(x): x for x in [*(copies.get(id(x), x) for x in frame.given_tensors), *outside]}
        self.call(call_in_frame, frame.module, lambda *_: self.run_in_modules(args), *inputs.values())

    def find_arguments(self, values: Iterable[Any], modules: Iterable[nn.Module]) -> list[Any]:
        """Return those of some values that may be arguments of modules: no parameters, and no tensors that the modules hold."""
        held = list_held(modules)
        return [x for x in values if not isinstance(x, nn.Parameter) and self.originals.get(id(x)) not in held]

    def run_in_modules(self, args: Sequence[Any]) -> Any:
        """Run the graph on its inputs, and return its outputs."""
        self.args_iter = iter(args)
        nodes = list(self.graph.nodes)
        self.run_nodes(node for node in nodes if node.op in ("placeholder", "get_attr"))
        self.run_parts([node for node in nodes if node.op not in ("placeholder", "get_attr")])
        return self.result

    def run_parts(self, nodes: list[fx.Node]) -> None:
        """Run nodes, each run of those inside a child of the running module as a call of it."""

        def find_child(node: fx.Node) -> str:
            stack = get_stack(node)
            return stack[len(self.path)] if stack[: len(self.path)] == self.path and len(stack) > len(self.path) else ""

        for child, group in groupby(nodes, find_child):
            if child:
                self.run_child(child, list(group))
            else:
                self.run_nodes(group)

    def run_nodes(self, nodes: Iterable[fx.Node]) -> None:
        """Run nodes in the running module."""
        for node in nodes:
            self.env[node] = result = self.run_node(node)
            if node.op == "output":
                self.result = result
            for used in self.user_to_last_uses.get(node, ()):
                del self.env[used]

    def run_child(self, child: str, nodes: list[fx.Node]) -> None:
        """Run the nodes of a child module, as a call of it if it is watched."""
        own, path = set(nodes), self.path
        module = self.modules.get(int(child.split("@")[0])) if child.split("@")[0].isdigit() else None
        given = dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in own)
        inputs = self.find_arguments((self.env[one] for one in given), () if module is None else module.modules())
        made = [node for node in nodes if any(user not in own for user in node.users)]

        def run(*_: Any) -> Any:
            self.path = (*path, child)
            try:
                self.run_parts(nodes)
            finally:
                self.path = path
            outputs = tuple(self.env[node] for node in made if node in self.env)
            return outputs[0] if len(outputs) == 1 else outputs

        if module is None:
            run()
        else:
            self.call(lambda call, *args: wrap_call(call)(*args), module, run, *inputs)

    def call(self, observe: Callable[..., Any], module: nn.Module, run: Callable[..., Any], *inputs: Any) -> None:
        """Run a part of the graph as a call of a module; `observe` has the watchers see it."""

        def run_in_mode(*args: Any) -> Any:
            STATE.is_in_fast_path = False
            return run(*args)

        # in a fast path the mode is popped and names are patched, but the functions of a graph are not looked up by name
        before, STATE.is_in_fast_path = STATE.is_in_fast_path, isinstance(module, FAST)
        try:
            observe(run_in_mode, module, *inputs)
        finally:
            STATE.is_in_fast_path = before

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; one that runs a graph is intercepted, or the graph runs here, or its attention is reported."""
        if not isinstance(target, HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        name = target.name()
        if name == "flex_attention":
            return flex.intercept_flex(lambda *_: target(*args, **kwargs), *bind_buffers(*args, **kwargs))
        if name in RUN_ONCE and args and isinstance(args[0], fx.GraphModule):
            return ModuleInterpreter(args[0], self.modules, self.originals, self.path).run_in_modules(args[1:])
        if any(has_attention(part) for part in list_graphs(args)):
            report_missed(f"compiled {name}", NESTED)
        return target(*args, **kwargs)


def bind_buffers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Any,
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> tuple[Any, ...]:
    """Return the arguments of flex_attention, of those that it has in a graph, where its functions are given their tensors."""

    def change_scores(*args: Any) -> Any:
        return score_mod(*args, *score_buffers)

    def is_seen(*args: Any) -> Any:
        return block_mask[-1](*args, *mask_buffers)

    return query, key, value, change_scores, (*block_mask[:-1], is_seen), scale

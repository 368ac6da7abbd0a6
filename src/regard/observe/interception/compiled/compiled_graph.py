"""Graphs that torch.compile makes while something is recorded: the op regard::observe is added beside each attention call.

What a graph attends without an op is reported whenever it runs, as far as its name says so.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import _current_graph_task_id as backward

from regard.observe.interception.call_dispatch import report_missed
from regard.observe.interception.compiled.observer_op import define_op
from regard.observe.interception.functions.function_wrappers import classify_function
from regard.observe.interception.functions.sdpa import SDPA
from regard.observe.interception.recurrent.token_mixers import COMPILED, can_mix_tokens, report_token_mixer
from regard.observe.interception.thread_state import STATE

TARGETS = (SDPA, torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
PARAMETERS = {  # of F.scaled_dot_product_attention, with their defaults
    "query": None,
    "key": None,
    "value": None,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}
RESUMED = "torch_dynamo_resume_in"  # the name of code after a graph break begins with it
KERNEL = "torch.compile"
Kernel = tuple[str, int]  # the name of a function and the id of the module that it was traced in, 0 if that is unknown


def wrap_compiler(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return dynamo's call of a backend, wrapped so that each graph has ops, and reports what these do not observe."""

    def call_user_compiler(self: Any, gm: fx.GraphModule, example_inputs: Any) -> Any:
        if STATE.compiled_call is None or not STATE.watchers:
            return original(self, gm, example_inputs)
        kernels = [(KERNEL, 0)] if is_part_of_code(self) else []
        kernels, module_ids = [*kernels, *add_op(gm)], list_module_ids(gm)
        compiled = original(self, gm, example_inputs)
        is_stored = getattr(self, "package", None) is not None  # of which no wrapper may be

        def run_and_report(*args: Any) -> Any:
            output = compiled(*args)
            report_unobserved(kernels, module_ids)
            return output

        return compiled if is_stored else run_and_report

    return call_user_compiler


def is_part_of_code(output: Any) -> bool:
    """Return whether a graph of dynamo is only a part of the compiled code, which a graph break divides."""
    reason = getattr(output, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False)) or output.root_tx.f_code.co_name.startswith(RESUMED)


def add_op(gm: fx.GraphModule) -> list[Kernel]:
    """Add the op after each call of F.scaled_dot_product_attention; return the other kernels of the graph.

    Before the call, it would make torch.compile choose other layouts, and so give other bits. In a module with ops already, of
    attn_implementation="regard", kernels are observed. Graphs inside the graph get no op: they may run again, or not at all.
    """
    define_op()
    ops = torch.ops.regard.observe, torch.ops.regard.observe.default
    observed_ids = {node.args[-1] for node in list_nodes(gm) if node.target in ops}
    kernels: list[Kernel] = []
    for node in [*list_nodes(gm)]:
        module = find_module_id(node)
        name = find_kernel(node)
        if not name or module in observed_ids:
            continue
        if node.graph is gm.graph and node.target in TARGETS:
            with gm.graph.inserting_after(node):
                gm.graph.call_function(torch.ops.regard.observe, (*build_arguments(node), module))
        else:
            kernels.append((f"compiled {name}", module))
    gm.recompile()
    return kernels


def list_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a graph and of the graphs inside it."""
    for graph in gm.modules():
        yield from graph.graph.nodes if isinstance(graph, fx.GraphModule) else ()


def list_module_ids(gm: fx.GraphModule) -> list[int]:
    """Return the ids of the modules that a graph runs, parts before the modules that they are in."""
    depths: dict[int, int] = {}
    for node in list_nodes(gm):
        depths |= {module: depth for depth, module in enumerate(list_stack(node)) if module not in depths}
    return sorted(depths, key=depths.__getitem__, reverse=True)


def list_stack(node: fx.Node) -> list[int]:
    """Return the ids of the modules that a node was traced in, the outermost first.

    The keys of dynamo's stack are these, with @ and a number for each call after the first.
    """
    keys = [str(key).split("@")[0] for key in node.meta.get("nn_module_stack") or ()]
    return [int(key) for key in keys if key.isdigit()]


def find_module_id(node: fx.Node) -> int:
    """Return the id of the innermost module that a node was traced in; 0 if it is unknown."""
    return next(reversed(list_stack(node)), 0)


def find_kernel(node: fx.Node) -> str:
    """Return the name of the function of attention that a node calls; empty if it calls none that is known by its name."""
    if node.op not in ("call_function", "call_method"):
        return ""
    target = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
    wrapper, name, is_kernel, _ = classify_function(target)
    return name if wrapper is not None or is_kernel else ""


def build_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of regard::observe for a node of F.scaled_dot_product_attention, but for its module."""
    arguments = PARAMETERS | dict(zip(PARAMETERS, node.args, strict=False)) | node.kwargs
    q, k, v, mask, *settings = arguments.values()
    return q, k, v, mask, None, *settings, None, None


def report_unobserved(kernels: list[Kernel], module_ids: list[int]) -> None:
    """Report the kernels of a graph that ran without an op, and the modules called attention of which nothing is recorded."""
    call = STATE.compiled_call
    if call is None or backward() != -1:
        return
    call.is_reported = True
    for kernel, module in kernels:
        report_missed(kernel, COMPILED, module=call.modules.get(module))
    changers = [one for one in STATE.watchers if one.can_change_calls]
    for module in filter(can_mix_tokens, (call.modules[one] for one in module_ids if one in call.modules)):
        report_token_mixer(module, reason=COMPILED)
        report_missed(KERNEL, COMPILED, changers, module)

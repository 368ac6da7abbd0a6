"""Graphs that torch.compile makes while something is recorded: the op regard::observe is added beside each attention call.

A graph with other attention, or with none that is known, is replayed instead.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from regard.observe.interception.compiled.graph_nodes import (
    carries_state,
    find_module_id,
    get_name,
    has_attention,
    is_attention,
    list_subgraphs,
    multiplies_tokens,
)
from regard.observe.interception.compiled.graph_replay import BREAK, GraphReplay
from regard.observe.interception.compiled.observer_op import define_ops
from regard.observe.interception.functions.sdpa import SDPA
from regard.observe.interception.recurrent.recurrences import is_recurrent_name
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
BESIDE = "{} is not observed beside the op of attn_implementation='regard': record the model before it is compiled"


def wrap_compiler(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return dynamo's call of a backend, wrapped so that the graph is observed: by ops that are added to it, or by a replay."""

    def call_user_compiler(self: Any, gm: fx.GraphModule, example_inputs: Any) -> Any:
        if STATE.compiled_call is None or not STATE.watchers:
            return original(self, gm, example_inputs)
        is_part, is_stored = is_part_of_code(self), getattr(self, "package", None) is not None  # of which no wrapper may be
        replay = None if add_ops(gm, is_part) or is_stored else GraphReplay(gm, is_part)
        compiled = original(self, gm, example_inputs)
        return compiled if replay is None else replay.wrap(compiled)

    return call_user_compiler


def is_part_of_code(output: Any) -> bool:
    """Return whether a graph of dynamo is only a part of the compiled code, which a graph break divides."""
    reason = getattr(output, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False)) or output.root_tx.f_code.co_name.startswith(RESUMED)


def add_ops(gm: fx.GraphModule, is_part: bool) -> bool:
    """Add an op after each call of F.scaled_dot_product_attention; return False if these do not observe all of a graph.

    Before the call, it would make torch.compile choose other layouts, and so give other bits. A graph that has ops already, of
    attn_implementation="regard", is not replayed, or its attention would be recorded twice: the rest of it is reported.
    """
    define_ops()
    ops = torch.ops.regard.observe, torch.ops.regard.observe.default
    observed_ids = {node.args[-1] for node in gm.graph.nodes if node.target in ops}
    new_nodes: list[tuple[fx.Node, Any, tuple[Any, ...]]] = []
    for node in gm.graph.nodes:
        module = find_module_id(node)
        if node.target in ops or module in observed_ids:
            continue
        if node.op == "call_function" and node.target in TARGETS:
            new_nodes.append((node, torch.ops.regard.observe, (*build_arguments(node), module)))
        elif is_attention(node) or any(map(has_attention, list_subgraphs(gm, node))):
            if not observed_ids:
                return False
            reason = BESIDE.format(get_name(node))
            new_nodes.append((node, torch.ops.regard.report, (f"compiled {get_name(node)}", reason, module)))
    has_more = multiplies_tokens(gm) or carries_state(gm) or any(map(is_recurrent, gm.graph.nodes))
    if not observed_ids and (not new_nodes or has_more):
        return False
    if is_part:
        first_node = next(node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr"))
        new_nodes.insert(0, (first_node, torch.ops.regard.report, ("torch.compile", BREAK, 0)))
    for node, op, args in new_nodes:
        with gm.graph.inserting_before(node) if node.op == "output" else gm.graph.inserting_after(node):
            gm.graph.call_function(op, args)
    if new_nodes:
        gm.recompile()
    return True


def is_recurrent(node: fx.Node) -> bool:
    """Return whether a node was traced in a module whose class is named after a recurrence."""
    return any(is_recurrent_name(kind.__name__) for _, kind in (node.meta.get("nn_module_stack") or {}).values())


def build_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of regard::observe for a node of F.scaled_dot_product_attention, but for its module."""
    arguments = PARAMETERS | dict(zip(PARAMETERS, node.args, strict=False)) | node.kwargs
    q, k, v, mask, *settings = arguments.values()
    return q, k, v, mask, None, *settings, None, None

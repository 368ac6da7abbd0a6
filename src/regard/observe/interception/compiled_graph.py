"""Graphs that torch.compile makes while something is recorded: the op regard::observe is added beside each attention call.

Other attention, or that in a part of the graph that may run again or not at all, gets the op regard::report.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from regard.observe.interception.function_roles import MULTIPLIES, Role
from regard.observe.interception.function_wrappers import classify_function
from regard.observe.interception.observer_op import define_ops
from regard.observe.interception.sdpa import SDPA
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
BY_HAND = "attention that is written out by hand is not observed in compiled code: record the model before it is compiled"
OTHER = "{} is not observed in compiled code, only F.scaled_dot_product_attention is: record the model before it is compiled"
NESTED = "it is in a part of the graph that is run by a function of its own, such as activation checkpointing"
BREAK = "the graph breaks here, so that attention between its parts would not be observed"
STEPS = 6  # most functions between a softmax and the product with the values
ENDS = (Role.ADD, Role.SUM, Role.PRODUCT, Role.CONVOLUTION, Role.NONLINEAR)  # functions whose results are no weights


def wrap_compiler(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return dynamo's call of a backend, wrapped so that the ops are added to the graph before it is compiled."""

    def call_user_compiler(self: Any, gm: fx.GraphModule, example_inputs: Any) -> Any:
        if STATE.compiled_call is not None and STATE.watchers:
            add_ops(gm, is_part_of_code(self))
        return original(self, gm, example_inputs)

    return call_user_compiler


def is_part_of_code(output: Any) -> bool:
    """Return whether a graph of dynamo is only a part of the compiled code, which a graph break divides."""
    reason = getattr(output, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False)) or output.root_tx.f_code.co_name.startswith(RESUMED)


def add_ops(gm: fx.GraphModule, is_part: bool) -> None:
    """Add an op after each attention call of a graph.

    Before the call, it would make torch.compile choose other layouts, and so give other bits.
    """
    define_ops()
    ops = torch.ops.regard.observe, torch.ops.regard.observe.default
    observed_ids = {node.args[-1] for node in gm.graph.nodes if node.target in ops}  # by attn_implementation="regard"
    new_nodes: list[tuple[fx.Node, Any, tuple[Any, ...]]] = []
    if is_part:
        first_node = next(node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr"))
        new_nodes.append((first_node, torch.ops.regard.report, ("torch.compile", BREAK, 0)))
    for node in gm.graph.nodes:
        module = find_module_id(node)
        if node.target in ops or module in observed_ids:
            continue
        if node.op == "call_function" and node.target in TARGETS:
            new_nodes.append((node, torch.ops.regard.observe, (*build_arguments(node), module)))
        elif is_attention(node):
            reason = BY_HAND if classify_node(node)[3] is Role.SOFTMAX else OTHER.format(get_name(node))
            new_nodes.append((node, torch.ops.regard.report, (f"compiled {get_name(node)}", reason, module)))
        elif any(is_attention(one) for part in list_subgraphs(gm, node) for one in part.graph.nodes):
            new_nodes.append((node, torch.ops.regard.report, (f"compiled {get_name(node)}", NESTED, module)))
    for node, op, args in new_nodes:
        with gm.graph.inserting_before(node) if node.op == "output" else gm.graph.inserting_after(node):
            gm.graph.call_function(op, args)
    if new_nodes:
        gm.recompile()


def build_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of regard::observe for a node of F.scaled_dot_product_attention, but for its module."""
    arguments = PARAMETERS | dict(zip(PARAMETERS, node.args, strict=False)) | node.kwargs
    q, k, v, mask, *settings = arguments.values()
    return q, k, v, mask, None, *settings, None, None


def find_module_id(node: fx.Node) -> int:
    """Return the id of the innermost module that a node was traced in, which dynamo keys its stack with; 0 if it is unknown."""
    keys = [str(key).split("@")[0] for key in node.meta.get("nn_module_stack") or ()]  # @ and the number of an earlier call
    return int(keys[-1]) if keys and keys[-1].isdigit() else 0


def list_subgraphs(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    """Yield the graphs that a node runs, and those inside them."""
    for one in node.args if node.op == "call_function" else ():
        part = getattr(gm, str(one.target), None) if isinstance(one, fx.Node) and one.op == "get_attr" else None
        if isinstance(part, fx.GraphModule):
            yield from (inner for inner in part.modules() if isinstance(inner, fx.GraphModule))


def is_attention(node: fx.Node) -> bool:
    """Return whether a node attends: a kernel, or a softmax whose result is multiplied by other tensors."""
    if node.op not in ("call_function", "call_method"):
        return False
    wrapper, name, is_kernel, role = classify_node(node)
    if "flex_attention" in name or wrapper is not None or is_kernel:
        return True
    return role is Role.SOFTMAX and reaches_product(node)


def reaches_product(node: fx.Node) -> bool:
    """Return whether a product uses a node, or what a few functions make of it."""
    nodes = {node}
    for _ in range(STEPS):
        users = {user for source in nodes for user in source.users if user.op in ("call_function", "call_method")}
        if any(classify_node(user)[1] in MULTIPLIES for user in users):
            return True
        nodes = {user for user in users if classify_node(user)[3] not in ENDS}
    return False


def classify_node(node: fx.Node) -> tuple[Any, str, bool, Role | None]:
    """Return the wrapper, name, kernel flag and role of a node's function."""
    target = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
    return classify_function(target)


def get_name(node: fx.Node) -> str:
    """Return the name of a node's function."""
    return classify_node(node)[1] or str(node.target)

"""What the nodes of torch.compile's graphs are: attention, calls in a module, and functions that write into inputs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from regard.observe.interception.function_roles import MULTIPLIES, Role
from regard.observe.interception.function_wrappers import classify_function
from regard.observe.interception.provenance import is_in_place

STEPS = 6  # most functions between a softmax and the product with the values
ENDS = (Role.ADD, Role.SUM, Role.PRODUCT, Role.CONVOLUTION, Role.NONLINEAR)  # functions whose results are no weights
WRITE_STATISTICS = {"batch_norm", "instance_norm"}  # into their arguments, in training
OPERATORS = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor", "matmul")}


def get_stack(node: fx.Node) -> tuple[str, ...]:
    """Return the keys of the modules that a node was traced in, the outermost first.

    A key is the id of the module, with @ and a number for each call after the first.
    """
    return tuple(map(str, node.meta.get("nn_module_stack") or ()))


def find_module_id(node: fx.Node) -> int:
    """Return the id of the innermost module that a node was traced in, which dynamo keys its stack with; 0 if it is unknown."""
    keys = [key.split("@")[0] for key in get_stack(node)]
    return int(keys[-1]) if keys and keys[-1].isdigit() else 0


def list_graphs(values: Any) -> Iterator[fx.GraphModule]:
    """Yield the graphs among some values, and those inside them."""
    for one in values:
        if isinstance(one, fx.GraphModule):
            yield from (inner for inner in one.modules() if isinstance(inner, fx.GraphModule))


def list_subgraphs(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    """Yield the graphs that a node runs, and those inside them."""
    inputs = node.all_input_nodes if node.op == "call_function" else ()
    yield from list_graphs(getattr(gm, str(one.target), None) for one in inputs if one.op == "get_attr")


def has_attention(gm: fx.GraphModule) -> bool:
    """Return whether a node of a graph attends."""
    return any(map(is_attention, gm.graph.nodes))


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


def multiplies_tokens(gm: fx.GraphModule) -> bool:
    """Return whether a graph multiplies two tensors that both are made of inputs with parameters, as scores are.

    The tables of rotary positions have no parameters, and a layer's weights no inputs.
    """
    made_of: dict[fx.Node, set[bool]] = {}  # whether of parameters, of inputs
    for node in gm.graph.nodes:
        is_input = node.op in ("placeholder", "get_attr")
        sources = [made_of[one] for one in node.all_input_nodes]
        made_of[node] = {isinstance(node.meta.get("example_value"), nn.Parameter)} if is_input else set().union(*sources)
        is_product = node.op in ("call_function", "call_method") and classify_node(node)[1] in MULTIPLIES
        if is_product and sources and sum(len(one) > 1 for one in sources) >= min(2, len(sources)):
            return True
    return False


def classify_node(node: fx.Node) -> tuple[Any, str, bool, Role | None]:
    """Return the wrapper, name, kernel flag and role of a node's function."""
    target = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
    return classify_function(target)


def get_name(node: fx.Node) -> str:
    """Return the name of a node's function."""
    return classify_node(node)[1] or str(node.target)


def find_written_inputs(gm: fx.GraphModule) -> set[int]:
    """Return the numbers of a graph's inputs that it may write: those that are written, or of which a view may be.

    A view is made of a function's first argument.
    """
    inputs = {node: number for number, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    written, visited = [one for node in gm.graph.nodes for one in list_written(gm, node)], set[fx.Node]()
    while written:
        node = written.pop()
        if node in visited:
            continue
        visited.add(node)
        first = node.args[:1] if node.op in ("call_function", "call_method") else ()
        fx.map_arg(first, written.append)
    return {number for node, number in inputs.items() if node in visited}


def list_written(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node may write into."""
    if node.op == "call_module":
        return node.all_input_nodes
    if node.op not in ("call_function", "call_method"):
        return []
    name = get_name(node)
    schemas = list_schemas(node.target)
    parts = list(list_subgraphs(gm, node))
    if name in WRITE_STATISTICS or any(list_written(part, one) for part in parts for one in part.graph.nodes):
        return node.all_input_nodes
    if any(argument.is_write for schema in schemas for argument in schema.arguments) or node.kwargs.get("inplace"):
        return node.all_input_nodes
    found: list[fx.Node] = []
    if is_in_place(name) or name in OPERATORS or name == "setitem":
        fx.map_arg(node.args[:1], found.append)
    if name == "embedding" and len(node.all_input_nodes) > 1:  # max_norm changes the rows that are looked up
        found += node.all_input_nodes[1:] if node.kwargs.get("max_norm") is not None or (node.args[3:4] or (None,))[0] else []
    fx.map_arg(node.kwargs.get("out"), found.append)
    return found


def list_schemas(target: Any) -> list[Any]:
    """Return the schemas of a function of a library, which state what it writes; none for any other function."""
    if isinstance(target, torch._ops.OpOverload):
        return [target._schema]
    return list(target._schemas.values()) if isinstance(target, torch._ops.OpOverloadPacket) else []

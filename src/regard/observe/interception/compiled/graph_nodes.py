"""What the nodes of torch.compile's graphs are: attention, calls in a module, and inputs that are written."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from regard.observe.interception.function_roles import MULTIPLIES, Role, strip_affixes
from regard.observe.interception.functions.function_wrappers import classify_function
from regard.observe.interception.handwritten.products.score_form import COPIES, PERMUTES, VIEWS
from regard.observe.interception.lookups import JOINS_PARTS, RUNNING

MIN_STEPS = 3  # of a state, fewer of which are a layer that scales and shifts
MOVES = VIEWS | PERMUTES | COPIES
KEEPS_STATE = MOVES | JOINS_PARTS
STEPS = 6  # most functions between a softmax and the product with the values
ENDS = (Role.ADD, Role.SUM, Role.PRODUCT, Role.CONVOLUTION, Role.NONLINEAR)  # functions whose results are no weights


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


def carries_state(gm: fx.GraphModule) -> bool:
    """Return whether a graph sums up along an axis, or multiplies and adds to one tensor several times, as a recurrence does.

    Between a product, a sum and the next product there are views, copies, parts and joined parts alone.
    """
    steps: dict[fx.Node, int] = {}  # sums, each of a product of the one before
    multiplied: dict[fx.Node, int] = {}  # the steps of what a product multiplies
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        _, name, _, role = classify_node(node)
        core, sources = strip_affixes(name), node.all_input_nodes
        made = node.meta.get("example_value")
        if core in RUNNING and isinstance(made, Tensor) and made.is_floating_point():
            return True
        before, products = (max((found[one] for one in sources if one in found), default=-1) for found in (steps, multiplied))
        if core in ("addcmul", "lerp"):
            steps[node] = max(before, products, 0) + 1
        elif role is Role.ADD:
            steps[node] = max(before, products + 1, 0)
        elif role is Role.MULTIPLY:
            multiplied[node] = max(before, products, 0)
        elif core in KEEPS_STATE:
            steps |= {node: before} if before >= 0 else {}
            multiplied |= {node: products} if products >= 0 else {}
        if steps.get(node, 0) >= MIN_STEPS:
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
    """Return the numbers of the inputs that torch.compile wrote into while it traced a graph, of which it counts the versions.

    Not all are found: batch_norm's statistics, tensors in inference mode, and kernels of Triton are not counted.
    """
    examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    return {n for n, x in enumerate(examples) if isinstance(x, Tensor) and not x.is_inference() and x._version}

"""Functions compiled by torch.jit: no torch function inside them is intercepted, so their graph is read instead."""

import re
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from regard.observe.interception.call_dispatch import report_missed
from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.tensor_arguments import find_tensors
from regard.observe.interception.thread_state import STATE

FUNCTION = torch.jit.ScriptFunction
STEP = re.compile(r"aten::(\w+)")
UNPACKS = {"prim::TupleUnpack", "prim::ListUnpack"}
BY_ENTRY = {Role.MULTIPLY, Role.ADD, None}
SCRIPTED = (
    "this function, compiled by torch.jit, contains a softmax and a product, which is attention that record cannot read: call "
    "torch.nn.functional.scaled_dot_product_attention or regard.attention instead"
)
READ: "weakref.WeakKeyDictionary[Any, set[Role | None]]" = weakref.WeakKeyDictionary()


def build_patches() -> list[AttributePatch]:
    """Return the attribute patch for the call of a scripted function."""
    call = vars(FUNCTION)["__call__"]

    def call_scripted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(self, *args, **kwargs)
        if STATE.is_active and STATE.frames:
            STATE.frames[-1].release_steps()
            with torch._C.DisableTorchFunction():
                follow_scripted(self, args, kwargs, result)
        return result

    return [(FUNCTION, "__call__", call_scripted)]


def follow_scripted(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Follow a scripted function; report it as missed if it contains whole attention."""
    roles = find_roles(function)
    if {Role.SOFTMAX, Role.PRODUCT} <= roles and find_tensors(args, kwargs):
        report_missed(function.name, SCRIPTED)
    else:
        first = (Role.PRODUCT, Role.SOFTMAX, Role.LOG_SOFTMAX, Role.NONLINEAR)
        role = next((one for one in first if one in roles), None)
        found = STATE.mode.tracker.follow_function(
            STATE.frames, function, f"torch.jit {function.name}", role, args, kwargs, result
        )
        if found is not None:
            STATE.mode.intercept_handwritten(found, result)
    if roles <= BY_ENTRY and not any(isinstance(x, torch.Tensor) for x in (*args, *kwargs.values())):
        with suppress(Exception):  # of a graph of another form
            for name, tensors, y in list_steps(function, args, result):
                STATE.frames[-1].log_operation(tensors, {}, y, name)
            return
    STATE.frames[-1].log_operation(args, kwargs, result, "matmul" if Role.PRODUCT in roles else function.name)


def list_steps(function: Any, args: Any, result: Any) -> Iterator[tuple[str, list[torch.Tensor], torch.Tensor]]:
    """Generate the functions of tensors in a scripted function of pairs of these, as of the operator of an associative scan.

    Each has a name, its tensors and its result: an empty one where the function does not return it.
    """
    graph = function.inlined_graph
    (output,) = graph.outputs()
    returned = [*output.node().inputs()] if isinstance(result, tuple | list) else [output]
    made = zip(returned, result if isinstance(result, tuple | list) else [result], strict=True)
    values: dict[str, Any] = {value.debugName(): x for value, x in (*zip(graph.inputs(), args, strict=False), *made)}
    for node in graph.nodes():
        given, outputs = ([one.debugName() for one in ends] for ends in (node.inputs(), node.outputs()))
        if node.kind() == "prim::Constant":
            values[outputs[0]] = next(node.outputs()).toIValue()
        elif node.kind() == "prim::TupleIndex":
            values[outputs[0]] = values[given[0]][values[given[1]]]
        elif node.kind() in UNPACKS:
            values.update(zip(outputs, values[given[0]], strict=True))
        elif step := STEP.fullmatch(node.kind()):
            y = values.setdefault(outputs[0], torch.empty(0))
            yield step[1], [x for name in given if isinstance(x := values.get(name), torch.Tensor)], y


def find_roles(function: Any) -> "set[Role | None]":
    """Return the roles of a scripted function's steps; an entrywise product with a sum counts as a PRODUCT."""
    if function not in READ:
        found = {infer_role(name) for name in STEP.findall(str(function.inlined_graph)) if name != "linear"}
        READ[function] = found | ({Role.PRODUCT} if found >= {Role.MULTIPLY, Role.SUM} else set())
    return READ[function]

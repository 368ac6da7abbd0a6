"""Compiled code: the ops of observer_op observe its attention; without them it is reported.

The torch function mode is popped while it runs: otherwise torch.compile would recompile the code and hold references to the
mode.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from regard.observe.interception.attention_call import MissedCall
from regard.observe.interception.call_dispatch import explain_error, report_missed
from regard.observe.interception.compiled.compiled_graph import wrap_compiler
from regard.observe.interception.compiled.observer_op import IMPLEMENTATION, CompiledCall
from regard.observe.interception.functions import flex
from regard.observe.interception.patching import AttributePatch, wait_for_import
from regard.observe.interception.recurrent.recurrences import is_recurrent_name
from regard.observe.interception.recurrent.token_mixers import COMPILED
from regard.observe.interception.thread_state import STATE, InterceptionPause, Watcher, find_name, pop_frame, push_frame

PACKAGE, MODULE = "torch._dynamo", "torch._dynamo.eval_frame"
SWITCH = "_maybe_set_eval_frame"  # called when a compiled function starts and when it ends
GRAPHS, COMPILER = "torch._dynamo.output_graph", "call_user_compiler"  # called with each graph, before it is compiled
INLINED = "torch._dynamo.external_utils"
WORDS = ("attention", "attn", "softmax")
HOLDERS = (nn.Module, FunctionType, MethodType, dict, list)
MAX_VISITED = 10_000  # values visited


def build_patches(add: Callable[[list[AttributePatch]], None]) -> list[AttributePatch]:
    """Return the attribute patches for dynamo, or for torch.compile, which imports it."""
    wait_for_import(PACKAGE)
    if MODULE in sys.modules:
        return patch_dynamo()
    compile = torch.compile

    @functools.wraps(compile)
    def compile_and_patch(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo import eval_frame

        if vars(eval_frame)[SWITCH].__module__ != __name__:
            add(patch_dynamo())
        return compile(*args, **kwargs)

    return [(torch, "compile", compile_and_patch)]


def patch_dynamo() -> list[AttributePatch]:
    """Return the attribute patches for dynamo's switch of compiled functions and its call of a backend."""
    eval_frame, graph_class = sys.modules[MODULE], getattr(sys.modules.get(GRAPHS), "OutputGraph", None)
    compiler_patches = [] if graph_class is None else [(graph_class, COMPILER, wrap_compiler(vars(graph_class)[COMPILER]))]
    return [(eval_frame, SWITCH, wrap_switch(vars(eval_frame)[SWITCH])), *compiler_patches]


def wrap_switch(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the switch: observe compiled code that starts, and keep the torch function mode popped until it ends."""

    def maybe_set_eval_frame(callback: Any) -> Any:
        caller = sys._getframe(1)
        if STATE.watchers and caller.f_code.co_name == "compile_wrapper":
            if STATE.compiled_frame is None and callback is not None:
                STATE.compiled_frame = id(caller), start_compiled_call(caller.f_locals)
            elif STATE.compiled_frame is not None and STATE.compiled_frame[0] == id(caller):
                context, STATE.compiled_frame = STATE.compiled_frame[1], None
                context.close()
        return original(callback)

    return maybe_set_eval_frame


def start_compiled_call(caller_locals: dict[str, Any]) -> ExitStack:
    """Return an entered context in which the attention of a compiled function is observed, and reported if it is not.

    The torch function mode and the patched names of flex_attention are absent meanwhile. A compiled flex_attention is
    intercepted instead.
    """
    stack = ExitStack()
    function, args, kwargs = caller_locals.get("fn"), caller_locals.get("args", ()), caller_locals.get("kwargs", {})
    if STATE.is_active and not flex.intercept_compiled(function, args, kwargs):
        stack.enter_context(observe_compiled_call(function, args, kwargs))
    stack.enter_context(InterceptionPause())
    stack.enter_context(flex.FLEX_PATCHES.suspend())
    return stack


@contextmanager
def observe_compiled_call(function: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Hold a CompiledCall of the function while it runs; then report the attention that was not observed."""
    words: set[str] = set()
    try:
        reachable_modules = list(find_modules([function, args, kwargs], words))
    except Exception as error:  # an unreadable object must not stop the program
        report_missed("torch.compile", explain_error(error))
        yield
        return
    mentions_attention = any(word in one.lower() for one in words for word in WORDS)
    watched_ids = set().union(*(watcher.names for watcher in STATE.watchers))
    modules = {id(one): one for module in reachable_modules for one in module.modules() if id(one) in watched_ids}
    call = STATE.compiled_call = CompiledCall(modules)
    frame = push_frame(find_outermost(modules), args, kwargs) if modules else None
    try:
        yield
    finally:
        STATE.compiled_call = None
        for watcher in STATE.watchers:
            for name in find_unobserved(call, watcher, mentions_attention):
                watcher.report_missed(MissedCall("torch.compile", name, COMPILED))
        if frame is not None:
            pop_frame(frame)


def find_outermost(modules: dict[int, nn.Module]) -> nn.Module:
    """Return the watched module, among some by id, whose path is the shortest."""
    paths = [(len(path), one) for watcher in STATE.watchers for one, path in watcher.names.items() if one in modules]
    return modules[min(paths)[1]]


def find_unobserved(call: CompiledCall, watcher: Watcher, mentions_attention: bool) -> Iterator[str]:
    """Yield the names of a watcher's modules that ran in a compiled function, may attend, and have no op."""
    own_modules = {watcher.names[one]: module for one, module in call.modules.items() if one in watcher.names}
    if call.is_reported:
        return
    if not call.op_ids:
        running = find_name(watcher)
        if own_modules or (mentions_attention and running is not None):
            yield min(own_modules, key=len) if own_modules else str(running)
        return
    for name, module in own_modules.items():
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", IMPLEMENTATION)
        is_other_model = hasattr(module, "_supports_sdpa") and implementation not in (None, IMPLEMENTATION)
        is_unobserved = 0 not in call.op_ids and call.op_ids.isdisjoint(map(id, module.modules()))
        if is_recurrent_name(type(module).__name__) or (is_other_model and is_unobserved):
            yield name


def find_modules(values: list[Any], words: set[str]) -> Iterator[nn.Module]:
    """Yield the modules reachable from values through functions, methods and containers.

    Adds the names in the code of those functions to `words`.
    """
    queue, visited_ids = list(values), set[int]()
    while queue and len(visited_ids) < MAX_VISITED:
        value = queue.pop()
        if id(value) in visited_ids:
            continue
        visited_ids.add(id(value))
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, FunctionType) and (is_inlined(value) or not str(value.__module__).startswith("torch.")):
            code_names = set(find_code_names(value.__code__))
            words |= code_names
            queue += inspect.getclosurevars(value).nonlocals.values()
            queue += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            queue += [value.__globals__[name] for name in code_names if name in value.__globals__]
        elif isinstance(value, MethodType):
            queue += [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            queue += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, list | tuple | set):
            queue += value
        elif isinstance(value, dict):
            queue += value.values()
        elif type(value).__module__.split(".")[0] not in ("builtins", "torch", "numpy") and hasattr(value, "__dict__"):
            queue += [attribute for attribute in vars(value).values() if isinstance(attribute, HOLDERS)]


def is_inlined(function: FunctionType) -> bool:
    """Return whether a function of torch holds a compiled module of torch.nn, such as nn.Sequential."""
    return function.__globals__.get("__name__") == INLINED


def find_code_names(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code and in the code of its nested functions."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from find_code_names(one)

"""Compiled code: it runs unintercepted, and is reported where it may contain attention.

The torch function mode is popped while it runs: otherwise torch.compile would recompile the code and hold references to the
mode.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from regard.observe.interception import flex
from regard.observe.interception.attention_call import MissedCall
from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.thread_state import STATE, InterceptionPause, explain_error, find_name, report_missed

MODULE = "torch._dynamo.eval_frame"
SWITCH = "_maybe_set_eval_frame"  # called when a compiled function starts and when it ends
REASON = "torch.compile bypasses the hooks of record: record the model before it is compiled"
WORDS = ("attention", "attn", "softmax")
HOLDERS = (nn.Module, FunctionType, MethodType, dict, list)
MAX_VISITED = 10_000  # values visited


def build_patches(add: Callable[[list[AttributePatch]], None]) -> list[AttributePatch]:
    """Return the attribute patch for dynamo's switch of compiled functions, or for torch.compile, which imports it."""
    found = sys.modules.get(MODULE)
    if found is not None:
        return [(found, SWITCH, wrap_switch(vars(found)[SWITCH]))]
    compile = torch.compile

    @functools.wraps(compile)
    def compile_and_patch(*args: Any, **kwargs: Any) -> Any:
        import torch._dynamo.eval_frame as found

        if vars(found)[SWITCH].__module__ != __name__:
            add([(found, SWITCH, wrap_switch(vars(found)[SWITCH]))])
        return compile(*args, **kwargs)

    return [(torch, "compile", compile_and_patch)]


def wrap_switch(was: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the switch: report compiled code that starts, and keep the torch function mode popped until it ends."""

    def maybe_set_eval_frame(callback: Any) -> Any:
        caller = sys._getframe(1)
        if STATE.watchers and caller.f_code.co_name == "compile_wrapper":
            if STATE.compiled_frame is None and callback is not None:
                handle_compiled_call(caller.f_locals)
                STATE.compiled_frame = id(caller), suspend_hooks()
            elif STATE.compiled_frame is not None and STATE.compiled_frame[0] == id(caller):
                context, STATE.compiled_frame = STATE.compiled_frame[1], None
                context.__exit__(None, None, None)
        return was(callback)

    return maybe_set_eval_frame


def suspend_hooks() -> ExitStack:
    """Return an entered context without the torch function mode and without the patched names of flex_attention."""
    stack = ExitStack()
    stack.enter_context(InterceptionPause())
    stack.enter_context(flex.FLEX_PATCHES.suspend())
    return stack


def handle_compiled_call(called: dict[str, Any]) -> None:
    """Intercept a compiled flex_attention that starts; report any other compiled function that may contain attention."""
    function, args, kwargs = called.get("fn"), called.get("args", ()), called.get("kwargs", {})
    if not STATE.is_active or flex.intercept_compiled(function, args, kwargs):
        return
    words: set[str] = set()
    try:
        modules = list(find_modules([function, args, kwargs], words))
    except Exception as error:  # an unreadable object must not stop the program
        report_missed("torch.compile", explain_error(error))
        return
    speaks = any(word in one.lower() for one in words for word in WORDS)
    for watcher in STATE.watchers:
        own = [watcher.names[id(one)] for module in modules for one in module.modules() if id(one) in watcher.names]
        running = find_name(watcher)
        if own or (speaks and running is not None):
            watcher.report_missed(MissedCall("torch.compile", min(own, key=len) if own else str(running), REASON))


def find_modules(values: list[Any], words: set[str]) -> Iterator[nn.Module]:
    """Yield the modules reachable from values through functions, methods and containers.

    Adds the names in the code of those functions to `words`.
    """
    waiting, seen = list(values), set[int]()
    while waiting and len(seen) < MAX_VISITED:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, FunctionType) and not str(value.__module__).startswith("torch."):
            named = set(find_code_names(value.__code__))
            words |= named
            waiting += inspect.getclosurevars(value).nonlocals.values()
            waiting += [value.__globals__[name] for name in named if name in value.__globals__]
        elif isinstance(value, MethodType):
            waiting += [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif type(value).__module__.split(".")[0] not in ("builtins", "torch", "numpy") and hasattr(value, "__dict__"):
            waiting += [one for one in vars(value).values() if isinstance(one, HOLDERS)]


def find_code_names(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code and in the code of its nested functions."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from find_code_names(one)

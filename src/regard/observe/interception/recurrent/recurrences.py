"""Interception of recurrences: the functions by which Hugging Face's models attend without a softmax.

transformers is never imported here. In each of its modelling modules that the program has imported, the functions and methods
of `recurrence_readers` are replaced by wrappers, which call them unchanged and read their arguments and results.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from regard.observe.interception.attention_call import AttentionCall, CallAdapter, build_plain_call
from regard.observe.interception.call_dispatch import change_recurrence, dispatch_recurrence, explain_error, report_missed
from regard.observe.interception.patching import AttributePatch, wait_for_import
from regard.observe.interception.plain_tensors import disable_modes
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall
from regard.observe.interception.recurrent.recurrence_readers import FUNCTIONS, FUSED, METHODS, RecurrenceReader
from regard.observe.interception.thread_state import STATE, InterceptionPause, is_inside_watched

MODELLING = re.compile(r"transformers\.models\.\w+\.modeling_\w+")
FUSED_REASON = "a fused kernel ran from the projections to the output, which no map is read from: record it in evaluation"
MIXERS = re.compile(  # ends of the names of classes whose tokens mix by a recurrence
    r"(Mamba[2-9]?(Block)?|(Mamba\w*|Bamba|FalconH1)Mixer|Mamba2?Layer|DeltaNet\d*|DeltaAttention|LinearAttention|LightningAttention"
    r"|Retention|R(wkv|WKV)\w*(Attention|TimeMix|Tmix\w*)|R[Gg][Ll][Rr][Uu]|ShortConv(olution)?|[msx]LSTM(Layer|Cell)|NeuralMemory)$"
)
ENDINGS = tuple(ending for ending, _ in METHODS)
CLASSES = 1024  # cached classes and modules; bounded, so that classes made at run time can be freed


def build_patches() -> list[AttributePatch]:
    """Return the attribute patches for the recurrences of the modelling modules that are imported."""
    names = list_modelling_names(len(sys.modules), next(reversed(sys.modules)))
    for name in names:
        wait_for_import(name)
    return [patch for name in names if name in sys.modules for patch in iterate_patches(sys.modules[name])]


@lru_cache(1)
def list_modelling_names(count: int, last: str) -> list[str]:  # an import changes the number or the last name
    """Return the names of the modelling modules that are imported, found anew after each import."""
    return [name for name in list(sys.modules) if MODELLING.fullmatch(name)]


def iterate_patches(module: ModuleType) -> Iterator[AttributePatch]:
    """Yield the patches of one modelling module."""
    for name in list_recurrence_names(module):
        value = getattr(module, name)
        if name in FUNCTIONS and callable(value):
            yield module, name, wrap_recurrence(value, FUNCTIONS[name], name)
        elif name in FUSED and callable(value):
            yield module, name, wrap_fused(value, name)
        elif isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__:
            for (ending, method), reader in METHODS.items():
                if name.endswith(ending) and method in vars(value):
                    yield value, method, wrap_recurrence(vars(value)[method], reader, f"{name}.{method}")


@lru_cache(CLASSES)
def list_recurrence_names(module: ModuleType) -> list[str]:
    """Return the names of a modelling module that may hold a recurrence, found once for all recordings."""
    return [name for name in vars(module) if name in FUNCTIONS or name in FUSED or name.endswith(ENDINGS)]


def wrap_recurrence(function: Callable[..., Any], reader: RecurrenceReader, kernel: str) -> Callable[..., Any]:
    """Return a wrapper that calls the function unchanged and passes what it computed to the watchers."""
    signature = inspect.signature(function)

    @wraps(function)
    def call_and_read(*args: Any, **kwargs: Any) -> Any:
        if not STATE.is_active or not is_inside_watched(kernel):
            return function(*args, **kwargs)
        return intercept_recurrence(partial(function, *args, **kwargs), signature, reader, kernel)

    return call_and_read


def wrap_fused(function: Callable[..., Any], kernel: str) -> Callable[..., Any]:
    """Return a wrapper that reports a fused kernel as missed if it ran; without the kernel it returns None."""

    @wraps(function)
    def call_and_report(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if result is not None and STATE.is_active and is_inside_watched(kernel):
            report_missed(kernel, FUSED_REASON)
        return result

    return call_and_report


def intercept_recurrence(run: "partial[Any]", signature: inspect.Signature, reader: RecurrenceReader, kernel: str) -> Any:
    """Run a recurrence and pass it to the watchers; if its arguments cannot be read, it is reported as missed."""
    try:
        with disable_modes():
            arguments = bind_arguments(signature, run)
            is_layer = reader.can_read(arguments)
            initial = reader.read_state(arguments) if is_layer else None
    except Exception as error:  # an unreadable call must not stop the model
        result = run()
        report_missed(kernel, explain_error(error))
        return result
    if not is_layer:
        return run()
    with InterceptionPause(), reader.capture(arguments):
        result = run()
        call = RecurrenceCall(kernel, initial, partial(reader.read, arguments, result))
        if any(watcher.can_change_calls for watcher in STATE.watchers):
            call, adapter = change_recurrence(call, adapt_result(reader, arguments, result, call))
            result = adapter.run()
        output = result[0] if isinstance(result, tuple) else result
        dispatch_recurrence(replace(call, result=output if isinstance(output, Tensor) else None))
    return result


def adapt_result(reader: RecurrenceReader, arguments: dict[str, Any], result: Any, call: RecurrenceCall) -> CallAdapter:
    """Return how the result of a recurrence converts to outputs (b, h, q, e) and back; it cannot if it has other numbers."""
    adapter = CallAdapter(lambda: result)
    with suppress(Exception):  # the watchers that record it report why it cannot be read
        found, output = call.read(), result[0] if isinstance(result, tuple) else result
        plain = build_plain_call(found.outputs, found.values, kernel=call.kernel, can_use_cache=False)
        if reader.finish is not None:
            return adapt_finished(partial(reader.finish, arguments), found.outputs, result, plain)
        if found.outputs.untyped_storage().data_ptr() != output.untyped_storage().data_ptr():
            return adapter
        adapter.plain_call = plain

        def write(new: Tensor, out: Any) -> Any:
            copied = (out[0].clone(), *out[1:]) if isinstance(out, tuple) else out.clone()
            reader.read(arguments, copied).outputs.copy_(new)
            return copied

        adapter.context, adapter.result = lambda out: reader.read(arguments, out).outputs, write
    return adapter


def adapt_finished(finish: Callable[[Tensor], Tensor], outputs: Tensor, result: Any, plain: AttentionCall) -> CallAdapter:
    """Return how a result that a function finished of its outputs (b, h, q, e) converts to these and back.

    It cannot be changed if they give another result when they are finished again.
    """
    if not torch.equal(finish(outputs), result[0]):
        return CallAdapter(lambda: result)
    written = [outputs]

    def write(new: Tensor, out: Any) -> Any:
        written.append(new)
        return (finish(new), *out[1:])

    return CallAdapter(lambda: result, lambda _: written[-1], write, plain_call=plain)


def bind_arguments(signature: inspect.Signature, run: "partial[Any]") -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults, and those of **kwargs among them."""
    bound = signature.bind(*run.args, **run.keywords)
    bound.apply_defaults()
    bound_arguments = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound_arguments.update(bound_arguments.pop(name))
    return bound_arguments


@lru_cache(CLASSES)
def is_recurrent_name(name: str) -> bool:
    """Return whether the modules of a class of this name mix tokens by a recurrence."""
    return MIXERS.search(name) is not None

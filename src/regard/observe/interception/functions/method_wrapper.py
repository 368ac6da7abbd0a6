"""A method of a model's own class that attends: it runs unchanged, and its call is read from what it was given and did."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from inspect import signature
from typing import Any

from regard.observe.interception.call_dispatch import dispatch_call
from regard.observe.interception.thread_state import STATE, InterceptionPause


def wrap_method(
    original: Callable[..., Any], read: Callable[..., Any], kernel: str, watch: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """Return a wrapper of a method that attends: it runs unchanged, and its call is read afterwards.

    read gets the kernel's name, the module, its arguments by name, what `watch` collected meanwhile, and the result.
    """

    @wraps(original)
    def intercept(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not STATE.is_active:
            return original(self, *args, **kwargs)
        with InterceptionPause(), watch() as seen:
            result = original(self, *args, **kwargs)
        given = signature(original).bind(self, *args, **kwargs).arguments
        return dispatch_call(kernel, lambda: result, partial(read, kernel, self, given, seen, result))

    return intercept

"""Modules that mix tokens, as their names state: recurrences, and attention with queries. One that is not read is missed.

That is how a kernel is noticed that no hook sees, as an extension in C++, and an algorithm that is no product of weights with
values, as that of Autoformer.
"""

import re
from functools import lru_cache

from torch import nn

from regard.observe.interception.recurrent.recurrences import CLASSES, is_recurrent_name
from regard.observe.interception.thread_state import STATE

ATTENTION = re.compile("att(entio)?n|attend", re.IGNORECASE)
QUERIES = re.compile(r"(^|_)w?(q|qk|qkv|query|queries)(_|$)|^(in_proj|c_attn)", re.IGNORECASE)  # names of their projections


def is_token_mixer(module: nn.Module) -> bool:
    """Return whether a module mixes tokens: it is a recurrence, or is called attention and projects queries itself."""
    name = type(module).__name__
    return is_recurrent_name(name) or (is_attention_name(name) and any(map(QUERIES.search, list_own_names(module))))


def list_own_names(module: nn.Module) -> list[str]:
    """Return the names of a module's own children and parameters."""
    return [name for own in (module._modules, module._parameters) for name, value in own.items() if value is not None]


@lru_cache(CLASSES)
def is_attention_name(name: str) -> bool:
    """Return whether a class of this name is called attention."""
    return ATTENTION.search(name) is not None


def report_token_mixer(module: nn.Module) -> None:
    """Tell the watchers of a module that mixes tokens that it ran, so that one that was not read is not left out."""
    for watcher in STATE.watchers:
        if id(module) in watcher.names:
            watcher.handle_token_mixer(module)

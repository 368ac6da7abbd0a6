"""Modules that mix tokens, as their names or products state: recurrences, and attention. One that is not read is missed.

That is how a kernel is noticed that no hook sees, as an extension in C++, and an algorithm that is no product of weights with
values, as that of Autoformer.
"""

import re
from functools import lru_cache

from torch import nn

from regard.observe.interception.recurrent.recurrences import CLASSES, is_recurrent_name
from regard.observe.interception.thread_state import STATE

UNREAD = "it mixes tokens without a softmax, by code that regard does not know"
UNFOLLOWED = "it is called attention and projects queries, but no known kernel and no product of weights with values was seen"
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


def report_token_mixer(module: nn.Module, multiplies_scores: bool = False) -> None:
    """Tell the watchers of a module that mixes tokens that it ran, so that one that was not read is not left out.

    One that multiplies scores with values as they are need only be called attention, by its class or by its place in the model.
    """
    class_name = type(module).__name__
    reason = UNREAD if multiplies_scores or is_recurrent_name(class_name) else UNFOLLOWED
    for watcher in STATE.watchers:
        path = watcher.names.get(id(module))
        names = class_name, "" if path is None else path.rpartition(".")[2]
        if path is not None and (is_token_mixer(module) or any(map(is_attention_name, names))):
            watcher.handle_token_mixer(module, reason)

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


def can_mix_tokens(module: nn.Module) -> bool:
    """Return whether a module is a recurrence, or projects queries itself, and so attends if it is called attention."""
    return is_recurrent_name(type(module).__name__) or have_queries((*module._modules, *module._parameters))


@lru_cache(CLASSES)
def have_queries(names: tuple[str, ...]) -> bool:
    """Return whether one of the names of a module's own children and parameters is that of a projection of queries."""
    return any(map(QUERIES.search, names))


@lru_cache(CLASSES)
def is_attention_name(name: str) -> bool:
    """Return whether a class of this name is called attention."""
    return ATTENTION.search(name) is not None


def report_token_mixer(module: nn.Module, multiplies_scores: bool = False) -> None:
    """Tell the watchers of a module that mixes tokens that it ran, so that one that was not read is not left out.

    It is a recurrence, or called attention by its class or by its place in the model. One that is called attention projects
    queries itself, or multiplies scores with values as they are.
    """
    class_name = type(module).__name__
    is_recurrent = is_recurrent_name(class_name)
    reason = UNREAD if multiplies_scores or is_recurrent else UNFOLLOWED
    for watcher in STATE.watchers:
        path = watcher.names.get(id(module))
        names = class_name, "" if path is None else path.rpartition(".")[2]
        if path is not None and (is_recurrent or any(map(is_attention_name, names))):
            watcher.handle_token_mixer(module, reason)

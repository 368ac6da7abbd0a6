"""Modules that mix tokens, as their names or products state: recurrences, and attention. One that is not read is missed.

That is how a kernel is noticed that no hook sees, as an extension in C++, and an algorithm that is no product of weights with
values, as that of Autoformer.
"""

import re
from functools import lru_cache

from torch import nn

from regard.observe.interception.attention_call import MissedCall
from regard.observe.interception.recurrent.recurrences import CLASSES, is_recurrent_name
from regard.observe.interception.thread_state import STATE

UNREAD = "it is called a recurrence, and no function of it is known: see regard.implied_map"
UNSEEN = "it is called attention, and no attention of it was seen: name its weights with regard.attends"
COMPILED = (  # of whatever attends in compiled code without being recorded
    "torch.compile bypasses the hooks of record, but for F.scaled_dot_product_attention in a graph that is compiled inside "
    "record: record the model before it is compiled"
)
ATTENTION = re.compile("att(entio)?n|attend", re.IGNORECASE)
ATTENTION_PLACE = re.compile(r"((self|cross|linear)_?)?(attn|attention)\d*", re.IGNORECASE)  # the whole last name of a path
QUERIES = re.compile(r"(^|_)w?(q|qk|qkv|query|queries)(_|$)|^(in_proj|c_attn)", re.IGNORECASE)  # names of their projections


def can_mix_tokens(module: nn.Module) -> bool:
    """Return whether a module is a recurrence, or projects queries itself, and so attends if it is called attention."""
    if is_recurrent_name(type(module).__name__):
        return True
    return have_queries((*module._modules, *module._parameters)) and have_queries(list_own_names(module))  # the first is quick


def list_own_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's own children and parameters."""
    return tuple(name for own in (module._modules, module._parameters) for name, value in own.items() if value is not None)


@lru_cache(CLASSES)
def have_queries(names: tuple[str, ...]) -> bool:
    """Return whether one of the names of a module's own children and parameters is that of a projection of queries."""
    return any(map(QUERIES.search, names))


@lru_cache(CLASSES)
def is_attention_name(name: str) -> bool:
    """Return whether a class of this name is called attention."""
    return ATTENTION.search(name) is not None


def is_attention_place(name: str, module: nn.Module, multiplies_scores: bool) -> bool:
    """Return whether a module is attention by the last name of its path and by its projections.

    One that multiplies scores with values needs one of the two; else the whole name counts. `in_proj` may be the first layer of
    a gated MLP.
    """
    own = tuple(one for one in list_own_names(module) if not one.startswith("in_proj"))
    if multiplies_scores:
        return is_attention_name(name) or have_queries(own)
    return ATTENTION_PLACE.fullmatch(name) is not None and have_queries(own)


def report_token_mixer(module: nn.Module, multiplies_scores: bool = False, reason: str = "") -> None:
    """Tell the watchers of a module that mixes tokens that it ran, so that one that was not read is not left out.

    It is a recurrence, or called attention by its class or by its place in the model. One that is called attention projects
    queries itself, or multiplies scores with values as they are.
    """
    class_name = type(module).__name__
    is_recurrent = is_recurrent_name(class_name)
    is_named = is_recurrent or is_attention_name(class_name)
    reason = reason or (UNREAD if is_recurrent else UNSEEN)
    for watcher in STATE.watchers:
        path = watcher.names.get(id(module))
        if path is not None and (is_named or is_attention_place(path.rpartition(".")[2], module, multiplies_scores)):
            watcher.handle_token_mixer(module, reason)


def is_part_of_attention(missed: MissedCall, name: str) -> bool:
    """Return whether a missed module may only compute queries and keys for attention in the module of this name, its parent.

    Only its place calls it attention.
    """
    is_part = missed.module != name and missed.module.rpartition(".")[0] == name
    return is_part and missed.reason in (UNSEEN, COMPILED) and not is_attention_name(missed.kernel)

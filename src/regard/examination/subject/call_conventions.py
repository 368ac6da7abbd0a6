"""Ways of calling a subject, chosen by its type and its signature: x -> y, or (q, k, v) -> context."""

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from regard.errors import ConfigError
from regard.examination.subject.attention_output import AttentionOutput, extract_output, stack_outputs
from regard.mechanism import EVERYTHING, Mask
from regard.mechanism.arguments import check_instance, check_sequence
from regard.mechanism.mask_algebra import Offset

Form = Literal["x", "qkv"]
AttentionFunction = Callable[..., AttentionOutput]
PLAIN = "x (b, t, c)"  # the usual way
ROLE_NAMES = {"q": "queries", "k": "keys", "v": "values"}  # of the letters that parse_qkv returns
WORDS = (("q", "quer"), ("k", "key"), ("v", "val"))
SOURCES = ("y", "context", "memory", "kv", "key_value", "encoder_hidden_states")  # arguments for what keys are made from
LETTER = re.compile(r"(?:^|_)(?:x|in|inputs?)?([qkv])s?(?=_|\d|$)")


class CallConvention(NamedTuple):
    """A way of calling; `make` turns a module or function into a call."""

    form: Form
    rank: int
    note: str
    make: Callable[[Any], AttentionFunction]
    has_key_heads: bool = True  # whether keys and values have an axis of heads if queries have one


def list_torch_conventions(plain: Any, expects: Mask, offset: Offset) -> list[CallConvention]:
    """Return the ways of calling torch's own modules, which take a mask; empty for anything else.

    The mask is what `expects` hides, or what a partial passes. Raises ConfigError for an nn.MultiheadAttention whose keys or
    values have a width of their own.
    """
    inner = plain if isinstance(plain, nn.Module) else None
    held = plain.func if isinstance(plain, functools.partial) else plain
    if isinstance(held, nn.MultiheadAttention) and type(held).forward is nn.MultiheadAttention.forward:
        if (held.kdim, held.vdim) != (held.embed_dim,) * 2:
            raise ConfigError(
                "examine calls nn.MultiheadAttention with query = key = value = x, and this one takes keys of width "
                f"{held.kdim}, values of {held.vdim}. Pass them: examine(lambda x: layer(x, keys, values), sample=x)."
            )
        if inner is None:
            return [
                CallConvention(
                    "x", 3, "query = key = value = x", functools.partial(make_self_attention_call, first=held.batch_first)
                )
            ]
        return [
            CallConvention(
                "x",
                3,
                describe_inputs("query = key = value = x", "attn_mask", expects),
                pass_mask(make_multihead_call, expects, offset),
            )
        ]
    if isinstance(inner, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
        name = "src_mask" if isinstance(inner, nn.TransformerEncoderLayer) else "mask"
        return [CallConvention("x", 3, describe_inputs("x", name, expects), pass_mask(make_encoder_call, expects, offset))]
    return []


def list_signature_conventions(plain: Any, module: nn.Module | None, name: str) -> list[CallConvention]:
    """Return the ways in which a module or function may be called, by its signature. Raises ConfigError if there is none."""
    needed = list_required_arguments(plain)
    order = None if needed is None or len(needed) != 3 else parse_roles(needed)
    of_x = [CallConvention("x", 3, PLAIN, make_x_call), CallConvention("x", 2, "x (t, c)", unbatch_calls(make_x_call))]
    of_three = [
        CallConvention("x", 3, "query = key = value = x", make_self_attention_call),
        CallConvention("x", 2, "query = key = value = x (t, c)", unbatch_calls(make_self_attention_call)),
    ]
    of_qkv = [
        CallConvention("qkv", rank, f"q, k, v with {rank} axes", reorder_arguments(make, order))
        for rank, make in ((4, make_qkv_call), (3, make_headless_call), (2, make_unbatched_call))
    ]
    shared = reorder_arguments(make_shared_keys_call, order)
    of_qkv.insert(1, CallConvention("qkv", 4, "q (b, h, t, d), k and v (b, t, d)", shared, has_key_heads=False))
    weighted = module is not None and any(True for _ in itertools.chain(module.parameters(), module.buffers()))
    if needed is None:
        return of_qkv if module is None else of_x
    if len(needed) == 1:
        return pass_by_name([*of_x, *list_source_conventions(plain)], needed)
    if len(needed) == 3 and (order is not None or not weighted):
        return pass_by_name([*of_three, *of_qkv] if weighted else of_qkv, needed)
    takes = f"takes {', '.join(needed)}" if needed else "takes no required argument"
    raise ConfigError(
        f"examine calls x -> y or (q, k, v) -> context, but {name} {takes}. Pass the others as kwargs={{...}}, or in a "
        f"function: examine(lambda x: layer(x, ...)), or of token ids examine(lambda ids: model(sources, ids), sample=ids)."
    )


def list_source_conventions(plain: Any) -> list[CallConvention]:
    """Return the call with x as the source of keys and values, if they have an optional argument, as torchtune's y."""
    parameters = inspect.signature(get_signature_owner(plain)).parameters.values()
    name = next((one.name for one in parameters if one.name in SOURCES and one.default is None), None)
    if name is None:
        return []
    return [CallConvention("x", 3, f"x, {name} = x", lambda f: make_x_call(lambda x: f(x, **{name: x})))]


def pass_by_name(ways: list[CallConvention], needed: list[str]) -> list[CallConvention]:
    """Return ways of calling that pass keyword-only arguments, those of `needed` that end with =, by their names."""
    named = [one.removesuffix("=") for one in needed if one.endswith("=")]
    if not named:
        return ways
    first = len(needed) - len(named)

    def make_with_names(make: Callable[[Any], AttentionFunction]) -> Callable[[Any], AttentionFunction]:
        return lambda f: make(lambda *given: f(*given[:first], **dict(zip(named, given[first:], strict=True))))

    return [way._replace(make=make_with_names(way.make)) for way in ways]


def bind_arguments(subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a subject with further arguments of its call: `args` follow x, or query, key and value, and `kwargs` have names.

    Raises ConfigError if there are more arguments than it takes, and for anything but a sequence and a mapping.
    """
    args = check_sequence("args", args)
    named = dict(check_instance("kwargs", kwargs, Mapping))  # type: ignore[type-abstract]
    if not args and not named:
        return subject
    if args:
        parameters = list(inspect.signature(get_signature_owner(subject)).parameters.values())
        names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD and one.name not in named]
        first = 3 if len(names) >= 3 and parse_roles(names[:3]) else 1
        if len(args) > len(names) - first:
            taken = ", ".join(names[first:]) or "none"
            raise ConfigError(f"args are the arguments that follow its input, {taken}; got {len(args)}.")
        named |= dict(zip(names[first:], args, strict=False))
    return functools.partial(subject, **named)


def parse_roles(names: Sequence[str]) -> str | None:
    """Return the order of q, k and v in argument names, such as "kqv"; None if the names do not give all three."""
    found = "".join(map(parse_qkv, names))
    return found if sorted(found) == ["k", "q", "v"] else None


def parse_qkv(name: str) -> str:
    """Return the role that a name states: q, k or v; "" if it states none, or several, as "key_value" does."""
    roles = {role for role, word in WORDS if word in name.lower()} or set(LETTER.findall(name.lower()))
    return roles.pop() if len(roles) == 1 else ""


# Makers: each turns a module or function into a call.


def make_x_call(f: Callable[..., Any]) -> AttentionFunction:
    """Make the call f(x)."""
    return lambda x: extract_output(f(x), x.shape[-2], x.shape[:-1])


def make_self_attention_call(f: Callable[..., Any], first: bool = True) -> AttentionFunction:
    """Make the call f(x, x, x), x as query, key and value; if `first` is False, f takes and returns (t, b, c)."""
    if first:
        return lambda x: extract_output(f(x, x, x), x.shape[-2], x.shape[:-1])

    def call(x: Tensor) -> AttentionOutput:
        turned = x.transpose(0, 1)
        context, weights = f(turned, turned, turned)
        return AttentionOutput(context.transpose(0, 1), weights)

    return call


def reorder_arguments(make: Callable[[Any], AttentionFunction], order: str | None) -> Callable[[Any], AttentionFunction]:
    """Return a maker of calls of q, k and v that passes them in `order`, such as "kqv"."""
    if order is None or order == "qkv":
        return make

    def make_reordered_call(f: Any) -> AttentionFunction:
        return make(lambda q, k, v: f(*({"q": q, "k": k, "v": v}[role] for role in order)))

    return make_reordered_call


def unbatch_calls(make: Callable[[Any], AttentionFunction]) -> Callable[[Any], AttentionFunction]:
    """Return a maker of calls that pass the sequences of a batch one after the other, for what takes (t, c)."""

    def make_sequential_call(f: Any) -> AttentionFunction:
        one = make(f)
        return lambda *inputs: stack_outputs([one(*each) for each in zip(*inputs, strict=True)])

    return make_sequential_call


def make_qkv_call(f: Callable[..., Any]) -> AttentionFunction:
    """Make the call f(q, k, v), each (b, h, t, d)."""
    return lambda q, k, v: extract_output(f(q, k, v), q.shape[-2], q.shape[:-1], k.shape[-2])


def make_shared_keys_call(f: Callable[..., Any]) -> AttentionFunction:
    """Make the call f(q, k, v), q (b, h, t, d), k and v (b, t, d): all heads share one head of keys."""
    return lambda q, k, v: extract_output(f(q, k[:, 0], v[:, 0]), q.shape[-2], q.shape[:-1], k.shape[-2])


def make_headless_call(f: Callable[..., Any]) -> AttentionFunction:
    """Make the call f(q, k, v), each (b, t, d): one head."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput:
        context, weights = make_qkv_call(f)(q[:, 0], k[:, 0], v[:, 0])
        return AttentionOutput(context.unsqueeze(1), weights)

    return call


def make_unbatched_call(f: Callable[..., Any]) -> AttentionFunction:
    """Make the call f(q, k, v), each (t, d): one head and one sequence."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput:
        context, weights = stack_outputs([make_qkv_call(f)(*each) for each in zip(q[:, 0], k[:, 0], v[:, 0], strict=True)])
        return AttentionOutput(context.unsqueeze(1), weights)

    return call


def pass_mask(make: Callable[..., AttentionFunction], expects: Mask, offset: Offset) -> Callable[[Any], AttentionFunction]:
    """Return a maker of calls that pass the expectation as the mask, for modules that take a mask and hold none."""
    return lambda module: make(module, expects, offset)


def make_multihead_call(module: nn.MultiheadAttention, expects: Mask, offset: Offset) -> AttentionFunction:
    """Make the call of an nn.MultiheadAttention, by its own batch_first."""

    def call(x: Tensor) -> AttentionOutput:
        mask = make_torch_mask(expects, x, module.num_heads, offset)
        x = x if module.batch_first else x.transpose(0, 1)
        context, weights = module(x, x, x, attn_mask=mask, average_attn_weights=False)
        return AttentionOutput(context if module.batch_first else context.transpose(0, 1), weights)

    return call


def make_encoder_call(
    module: nn.TransformerEncoderLayer | nn.TransformerEncoder, expects: Mask, offset: Offset
) -> AttentionFunction:
    """Make the call of torch's encoder layer or encoder, by its attention's batch_first."""
    first: Any = module.layers[0] if isinstance(module, nn.TransformerEncoder) else module
    attention = first.self_attn

    def call(x: Tensor) -> AttentionOutput:
        mask = make_torch_mask(expects, x, attention.num_heads, offset)
        context = module(x if attention.batch_first else x.transpose(0, 1), mask)
        return AttentionOutput(context if attention.batch_first else context.transpose(0, 1))

    return call


def make_torch_mask(expects: Mask, x: Tensor, heads: int, offset: Offset) -> Tensor | None:
    """Return an expectation as torch's modules take it: True = hidden, (t, t) or (b · heads, t, t); None if all is seen."""
    if expects == EVERYTHING:
        return None
    b, t, _ = x.shape
    table = ~expects.table(t, t, offset).to(x.device)
    return table if table.dim() == 2 else table.expand(b, heads, t, t).reshape(b * heads, t, t)


def list_required_arguments(plain: Any) -> list[str] | None:
    """Return the names of required arguments, keyword-only ones as `mask=`; None if unknown, as for C functions and *args."""
    try:
        signature = inspect.signature(get_signature_owner(plain))
    except (TypeError, ValueError):
        return None
    parameters = signature.parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return None
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one for one in parameters if one.kind not in optional and one.default is one.empty]
    return [f"{one.name}=" if one.kind is one.KEYWORD_ONLY else one.name for one in needed]


def get_signature_owner(plain: Any) -> Any:
    """Return the object that has the signature: of a module its forward, in a partial too."""
    if isinstance(plain, functools.partial) and isinstance(plain.func, nn.Module):
        return functools.partial(plain.func.forward, *plain.args, **plain.keywords)
    return plain.forward if isinstance(plain, nn.Module) else plain


def describe_inputs(inputs: str, name: str, expects: Mask) -> str:
    """Describe how a subject that takes a mask is called."""
    return inputs if expects == EVERYTHING else f"{inputs}, {name} = the mask of {expects}"

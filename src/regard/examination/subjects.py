"""What can be examined, and how it is called."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.mechanism import EVERYTHING, Mask
from regard.mechanism.rule import Offset

Form = Literal["x", "qkv"]
ROWS = 1e-2  # how far a row of weights may be from one, in half precision too
PLAIN = "x (b, t, c)"  # how most are called, in words
CONTEXTS = ("hidden_states", "last_hidden_state", "context", "attn_output", "attention_output", "output", "out")
WORDS = (("q", "quer"), ("k", "key"), ("v", "val"))
LETTER = re.compile(r"(?:^|_)(?:x|in|inputs?)?([qkv])s?(?:_|\d|$)")


class Answer(NamedTuple):
    """What a subject gives: the context as it is, and its weights, (b, q, k) or (b, h, q, k), where it returns them."""

    context: Tensor
    weights: Tensor | None = None


Call = Callable[..., Answer]


@dataclass(frozen=True, eq=False)
class Subject:
    """Something that can be asked: call(x), x (b, t, c), or call(q, k, v), each (b, h, t, d), gives its answer.

    `module` holds its weights and its mode, None where there is none. `again` makes the call of a copy of that module, None
    where the module cannot be exchanged. `rank` is that of x, or of q, k and v, as the subject itself takes them.
    """

    name: str
    module: nn.Module | None
    form: Form
    dtype: torch.dtype
    device: torch.device
    call: Call
    again: Callable[[nn.Module], Call] | None = None
    rank: int = 3
    note: str = ""  # how it is called, in words
    compiled: Call | None = None  # the call of what torch.compile made of it; `call` is that of the original

    @property
    def batched(self) -> bool:
        """Whether it takes several sequences at once."""
        return self.rank > 2


class AskedError(Exception):
    """A subject raised when it was asked: what it was given, and what it raised."""

    def __init__(self, given: str, error: Exception) -> None:
        line = (str(error).strip().splitlines() or ["it says nothing"])[0]
        super().__init__(f"{type(error).__name__} on {given}: {line}")


class Way(NamedTuple):
    """A way of calling: of a module or function it makes a call."""

    form: Form
    rank: int
    note: str
    make: Callable[[Any], Call]


def subjects(asked: object, expects: Mask, offset: Offset = 0) -> Iterator[Subject]:
    """A subject for each way in which it may be meant to be called, the likeliest first; ConfigError where there is none."""
    if isinstance(asked, type):
        raise ConfigError(
            f"examine takes a layer or a function, got the class {asked.__name__}. Make one: {asked.__name__}(...)."
        )
    if not callable(asked):
        raise ConfigError(f"examine takes a module or a function, got {type(asked).__name__}.")
    plain = uncompiled(asked)
    module = holder(plain)
    dtype, device = kind_of(module)
    for form, rank, note, make in ways(plain, module, expects, offset):
        again = functools.partial(again_with, plain, make) if exchangeable(plain, module) else None
        compiled = None if plain is asked else make(asked)
        yield Subject(name_of(plain), module, form, dtype, device, make(plain), again, rank, note, compiled)


def ways(plain: Any, module: nn.Module | None, expects: Mask, offset: Offset) -> list[Way]:
    """How something may be called, by what it is and by what its signature asks for."""
    return handed(plain, expects, offset) or signed(plain, module)


def handed(plain: Any, expects: Mask, offset: Offset) -> list[Way]:
    """How torch's own are called, which take a mask: with what the expectation hides, or with what a partial gives them."""
    inner = plain if isinstance(plain, nn.Module) else None
    held = plain.func if isinstance(plain, functools.partial) else plain
    if isinstance(held, nn.MultiheadAttention) and type(held).forward is nn.MultiheadAttention.forward:
        if (held.kdim, held.vdim) != (held.embed_dim,) * 2:
            raise ConfigError(
                "examine calls nn.MultiheadAttention with query = key = value = x, and this one takes keys of width "
                f"{held.kdim}, values of {held.vdim}. Say what they are: examine(lambda x: layer(x, keys, values), sample=x)."
            )
        if inner is None:
            return [Way("x", 3, "query = key = value = x", functools.partial(thrice, first=held.batch_first))]
        return [Way("x", 3, told("query = key = value = x", "attn_mask", expects), with_mask(multihead, expects, offset))]
    if isinstance(inner, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
        name = "src_mask" if isinstance(inner, nn.TransformerEncoderLayer) else "mask"
        return [Way("x", 3, told("x", name, expects), with_mask(encoder, expects, offset))]
    return []


def signed(plain: Any, module: nn.Module | None) -> list[Way]:
    """How something may be called, by what its signature asks for."""
    needed = required(plain)
    order = None if needed is None or len(needed) != 3 else roles(needed)
    of_x = [Way("x", 3, PLAIN, of_one), Way("x", 2, "x (t, c)", one_by_one(of_one))]
    of_three = [
        Way("x", 3, "query = key = value = x", thrice),
        Way("x", 2, "query = key = value = x (t, c)", one_by_one(thrice)),
    ]
    of_qkv = [
        Way("qkv", rank, f"q, k, v with {rank} axes", by_name(make, order))
        for rank, make in ((4, of_each), (3, headless), (2, bare))
    ]
    weighted = module is not None and any(True for _ in module.parameters())
    if needed is None:
        return of_qkv if module is None else of_x
    if len(needed) == 1:
        return of_x
    if len(needed) == 3 and (order is not None or not weighted):
        return [*of_three, *of_qkv] if weighted else of_qkv
    takes = f"takes {', '.join(needed)}" if needed else "takes no argument that must be given"
    raise ConfigError(
        f"examine calls x -> y or (q, k, v) -> context, but {name_of(plain)} {takes}. Say what the others are: "
        f"examine(lambda x: layer(x, ...)), or of token ids examine(lambda ids: model(sources, ids), sample=ids)."
    )


def roles(names: Sequence[str]) -> str | None:
    """Which of q, k and v each name says, as "kqv"; None where names do not say all three."""
    found = ""
    for name in names:
        letter = LETTER.search(name.lower())
        word = next((role for role, word in WORDS if word in name.lower()), "")
        found += word or (letter.group(1) if letter else "")
    return found if sorted(found) == ["k", "q", "v"] else None


# ways of calling: from a module or function to a call


def of_one(f: Callable[..., Any]) -> Call:
    """f(x)."""
    return lambda x: answered(f(x), x.shape[-2], x.shape[:-1])


def thrice(f: Callable[..., Any], first: bool = True) -> Call:
    """f(x, x, x): an attention of query, key and value, each token to the others; x with its tokens before its sequences."""
    if first:
        return lambda x: answered(f(x, x, x), x.shape[-2], x.shape[:-1])

    def call(x: Tensor) -> Answer:
        turned = x.transpose(0, 1)
        context, weights = f(turned, turned, turned)
        return Answer(context.transpose(0, 1), weights)

    return call


def by_name(make: Callable[[Any], Call], order: str | None) -> Callable[[Any], Call]:
    """A way of q, k and v, in the order in which the arguments' names have them: "kqv", say."""
    if order is None or order == "qkv":
        return make

    def made(f: Any) -> Call:
        return make(lambda q, k, v: f(*({"q": q, "k": k, "v": v}[role] for role in order)))

    return made


def one_by_one(make: Callable[[Any], Call]) -> Callable[[Any], Call]:
    """The sequences of a batch one after the other, for what takes (t, c)."""

    def made(f: Any) -> Call:
        one = make(f)
        return lambda *inputs: stacked([one(*each) for each in zip(*inputs, strict=True)])

    return made


def of_each(f: Callable[..., Any]) -> Call:
    """f(q, k, v), each (b, h, t, d)."""
    return lambda q, k, v: answered(f(q, k, v), q.shape[-2], q.shape[:-1], k.shape[-2])


def headless(f: Callable[..., Any]) -> Call:
    """f(q, k, v), each (b, t, d): of one head."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        context, weights = of_each(f)(q[:, 0], k[:, 0], v[:, 0])
        return Answer(context.unsqueeze(1), weights)

    return call


def bare(f: Callable[..., Any]) -> Call:
    """f(q, k, v), each (t, d): of one head and one sequence."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        context, weights = stacked([of_each(f)(*each) for each in zip(q[:, 0], k[:, 0], v[:, 0], strict=True)])
        return Answer(context.unsqueeze(1), weights)

    return call


def with_mask(make: Callable[..., Call], expects: Mask, offset: Offset) -> Callable[[Any], Call]:
    """A way whose subject is handed the expectation as its mask: it takes one and holds none."""
    return lambda module: make(module, expects, offset)


def multihead(module: nn.MultiheadAttention, expects: Mask, offset: Offset) -> Call:
    """The call of nn.MultiheadAttention, by its own batch_first."""

    def call(x: Tensor) -> Answer:
        mask = hidden(expects, x, module.num_heads, offset)
        x = x if module.batch_first else x.transpose(0, 1)
        context, weights = module(x, x, x, attn_mask=mask, average_attn_weights=False)
        return Answer(context if module.batch_first else context.transpose(0, 1), weights)

    return call


def encoder(module: nn.TransformerEncoderLayer | nn.TransformerEncoder, expects: Mask, offset: Offset) -> Call:
    """The call of torch's own encoder layer, or of several, by its attention's batch_first."""
    first: Any = module.layers[0] if isinstance(module, nn.TransformerEncoder) else module
    attention = first.self_attn

    def call(x: Tensor) -> Answer:
        mask = hidden(expects, x, attention.num_heads, offset)
        context = module(x if attention.batch_first else x.transpose(0, 1), mask)
        return Answer(context if attention.batch_first else context.transpose(0, 1))

    return call


def hidden(expects: Mask, x: Tensor, heads: int, offset: Offset) -> Tensor | None:
    """An expectation as torch's modules take it: True = hidden, (t, t) or (b · heads, t, t)."""
    if expects == EVERYTHING:
        return None
    b, t, _ = x.shape
    table = ~expects.table(t, t, offset).to(x.device)
    return table if table.dim() == 2 else table.expand(b, heads, t, t).reshape(b * heads, t, t)


# what a subject returns


def answered(returned: object, queries: int, place: Sequence[int] = (), keys: int | None = None) -> Answer:
    """The context and the weights in what a subject returned: a tensor, or a record or tuple that holds one.

    The context is the first of shape (*place, c), and no table of weights if there is another; the weights are of shape
    (b, q, k) or (b, h, q, k), and the first whose rows add to one if there are several.
    """
    named = fields_of(returned) or {}
    first = [named[name] for name in CONTEXTS if name in named]
    parts = [one for one in (*first, *parts_of(returned)) if isinstance(one, Tensor)]
    if not parts:
        raise ConfigError(f"a subject returns its context, or (context, weights); this one returned {type(returned).__name__}.")
    fits = [one for one in parts if one.is_floating_point() and one.shape[:-1] == torch.Size(place or parts[0].shape[:-1])]
    square = (queries, keys or queries)
    context = next((one for one in fits if len(fits) == 1 or not weighing(one, square)), (fits or parts)[0])
    tables = [one for one in parts if one is not context and is_table(one, context, square)]
    return Answer(context, next((one for one in tables if weighing(one, square)), tables[0] if tables else None))


def parts_of(returned: object) -> list[object]:
    """What a record or a tuple holds, or the thing itself."""
    named = fields_of(returned)
    if named is not None:
        return list(named.values())
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def fields_of(returned: object) -> dict[str, object] | None:
    """The named parts of a record; None of what has none."""
    if isinstance(returned, Mapping):
        return {str(name): one for name, one in returned.items()}
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    if isinstance(returned, tuple) and hasattr(returned, "_fields"):
        return dict(zip(returned._fields, returned, strict=True))
    return None


def is_table(one: Tensor, context: Tensor, square: tuple[int, int]) -> bool:
    """Whether a tensor has the shape of weights beside a context, (b, q, k) or (b, h, q, k); without b beside (t, c)."""
    axes = (2, 3) if context.dim() == 2 else (3, 4)
    batched = context.dim() == 2 or (one.dim() > 0 and len(one) == len(context))
    return one.is_floating_point() and one.dim() in axes and one.shape[-2:] == square and batched


def weighing(one: Tensor, square: tuple[int, int]) -> bool:
    """Whether a tensor's rows, as long as there are keys, add to one, with nothing below 0."""
    if one.shape[-2:] != square:
        return False
    table = one.detach().float()
    return bool((table >= 0).all() and ((table.sum(-1) - 1).abs() < ROWS).all())


def stacked(answers: list[Answer]) -> Answer:
    """The answers to several sequences as that to a batch."""
    weights = [one.weights for one in answers if one.weights is not None]
    return Answer(torch.stack([one.context for one in answers]), torch.stack(weights) if weights else None)


# what a subject is made of


def uncompiled(asked: Any) -> Any:
    """What torch.compile was given, or the subject itself."""
    original = getattr(asked, "_orig_mod", None) or getattr(asked, "_torchdynamo_orig_callable", None)
    return asked if original is None else original


def holder(plain: Any) -> nn.Module | None:
    """The module that a callable is or calls, in a partial, behind a bound method, in a closure; None where there is none."""
    if isinstance(plain, nn.Module):
        return plain
    if isinstance(plain, functools.partial):
        return holder(plain.func)
    held = [
        getattr(plain, "__self__", None),
        *(cell.cell_contents for cell in getattr(plain, "__closure__", None) or () if filled(cell)),
    ]
    called = getattr(plain, "__code__", None)
    if called is not None:
        held += [plain.__globals__.get(name) for name in called.co_names]
    modules = [one for one in held if isinstance(one, nn.Module)]
    return nn.ModuleList(modules) if len(modules) > 1 else modules[0] if modules else None


def filled(cell: Any) -> bool:
    """Whether a closure's variable has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def exchangeable(plain: Any, module: nn.Module | None) -> bool:
    """Whether another module can stand in its place."""
    return module is not None and (plain is module or (isinstance(plain, functools.partial) and plain.func is module))


def again_with(plain: Any, make: Callable[[Any], Call], module: nn.Module) -> Call:
    """The call of another module, with what a partial holds."""
    return make(functools.partial(module, *plain.args, **plain.keywords) if isinstance(plain, functools.partial) else module)


def kind_of(module: nn.Module | None) -> tuple[torch.dtype, torch.device]:
    """The dtype and device of a module's first floating parameter or buffer; torch's default where there is none."""
    held = [*module.parameters(), *module.buffers()] if module is not None else []
    first = next((one for one in held if one.is_floating_point()), None)
    return (torch.get_default_dtype(), torch.device("cpu")) if first is None else (first.dtype, first.device)


def name_of(plain: Any) -> str:
    """A name for the report."""
    if isinstance(plain, functools.partial):
        return name_of(plain.func)
    return type(plain).__name__ if isinstance(plain, nn.Module) else getattr(plain, "__qualname__", type(plain).__name__)


def indexed(path: str) -> str:
    """A module's path as it is written: blocks[0].attention."""
    return re.sub(r"\.(\d+)", r"[\1]", path)


def required(plain: Any) -> list[str] | None:
    """The arguments that must be given, those by name as `mask=`; None where there is no telling, as of functions in C."""
    try:
        signature = inspect.signature(signed_as(plain))
    except (TypeError, ValueError):
        return None
    parameters = signature.parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return None
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one for one in parameters if one.kind not in optional and one.default is one.empty]
    return [f"{one.name}=" if one.kind is one.KEYWORD_ONLY else one.name for one in needed]


def signed_as(plain: Any) -> Any:
    """What has the signature: a module's is that of its forward, in a partial too."""
    if isinstance(plain, functools.partial) and isinstance(plain.func, nn.Module):
        return functools.partial(plain.func.forward, *plain.args, **plain.keywords)
    return plain.forward if isinstance(plain, nn.Module) else plain


def told(inputs: str, name: str, expects: Mask) -> str:
    """How a subject that takes a mask is called."""
    return inputs if expects == EVERYTHING else f"{inputs}, {name} = what {expects} hides"

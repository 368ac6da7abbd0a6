"""Models that take token ids, or vectors in their place: the tokens to try, and the outputs of a model."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.examination import dependency
from regard.examination.subject.adapters import SubjectError, find_module, get_subject_name, get_uncompiled
from regard.examination.subject.attention_output import list_parts
from regard.examination.subject.inplace_writes import InplaceWrites
from regard.examination.subject.restore_state import preserve_state

TOKENS, FEWER, BATCH = 8, (6, 4, 3, 2, 1), 2
MORE = "Pass sample=, ids (b, t) that it takes; or if it takes more: examine(lambda ids: model(sources, ids), sample=ids)."
MOST = 256  # tokens of a sample to examine
SPARE = 2  # tokens beyond those that show a rule, which show one that is nearly the same
COPIED = 2**25  # numbers of a model to copy, to restore them if they change
ID_NAMES = ("decoder_input_ids", "input_ids")  # of arguments, where several hold integers
VECTOR_NAMES = ("decoder_inputs_embeds", "inputs_embeds")


@dataclass(frozen=True, eq=False)
class TokenModel:
    """A callable of ids (b, t), the module in it, and the ids; `sample_length` is how many tokens the sample had.

    In place of ids there may be vectors (b, t, c). Of a sample with other tensors beside them, the number is `is_fixed`.
    """

    name: str
    call: Callable[[Tensor], Any]
    module: nn.Module
    ids: Tensor
    sample_length: int
    writes: InplaceWrites | None = None  # detects changes of the ids
    is_sampled: bool = False  # whether the ids are a caller's sample, so that no more tokens may be tried
    is_fixed: bool = False  # whether other arguments fit this number of sequences and tokens alone

    def run(self, ids: Tensor | None = None) -> Tensor | None:
        """Return the outputs (b, t, n), None if there is none for each token. Raises SubjectError if the model raises."""
        ids = self.ids if ids is None else ids
        with torch.no_grad():
            try:
                returned = self.call(ids.clone()) if self.writes is None else self.writes.watch(self.call, "ids")(ids)
            except Exception as error:  # a user's model may raise anything
                raise SubjectError(f"{self.tokens} {tuple(ids.shape)}", error) from error
        return find_outputs(returned, ids)

    @property
    def tokens(self) -> str:
        """What its tokens are, in words."""
        return "vectors" if self.ids.is_floating_point() else "token ids"

    @cached_property
    def size(self) -> int:
        """The number of its parameters."""
        return sum(one.numel() for one in self.module.parameters())

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's first floating parameter, float32 if there is none."""
        return next((one.dtype for one in self.module.parameters() if one.is_floating_point()), torch.float32)

    def estimate_noise(self, outputs: Tensor) -> float:
        """Return the change of an output that may be rounding."""
        return dependency.estimate_rounding(self.dtype) * float(outputs.abs().max())


def make_token_model(subject: object, sample: Any = None, tokens: int = TOKENS, batch: int = BATCH) -> TokenModel | None:
    """Return a subject as a model of token ids, those of the sample or ids found by trial; None if it is not one.

    A sample may be ids, or the arguments of a call, of which one holds ids, or vectors in their place. Raises ConfigError for a
    sample of ids that is not (b, t) or (t,).
    """
    plain: Any = get_uncompiled(subject)
    module = find_module(subject)
    if module is None or (sample is None and module is not plain):
        return None
    name = get_subject_name(plain)
    if sample is None:
        found = find_token_ids(module, tokens, batch)
        return None if found is None else TokenModel(name, module, module, found, found.shape[1])
    if isinstance(sample, (Mapping, tuple, list)):
        ids = find_sampled_tokens(plain, module, sample)
        others = [one for one in iterate_values(sample) if one is not ids]
        if ids is None:
            return None
        is_fixed = any(isinstance(one, Tensor) and one.dim() > 0 for one in others)
        first = list(inspect.signature(module.forward).parameters)[:1]
        is_alone = plain is module and not others and (not isinstance(sample, Mapping) or list(sample) == first)
        call = module if is_alone else make_call(plain, sample, ids)
        return TokenModel(name, call, module, ids.detach(), ids.shape[1], is_sampled=True, is_fixed=is_fixed)
    if not isinstance(sample, Tensor) or sample.is_floating_point():
        return None
    ids = sample.detach() if sample.dim() == 2 else sample.detach().unsqueeze(0)
    if ids.dim() != 2 or not ids.numel():
        raise ConfigError(f"a sample of token ids must be (b, t) or (t,), got {tuple(sample.shape)}.")
    return TokenModel(name, plain, module, ids[:, : max(MOST, tokens)], ids.shape[1], is_sampled=True)


def make_vector_model(subject: Any, x: Tensor, is_sampled: bool) -> TokenModel:
    """Return a module x -> y, or a function around it, as a model whose tokens are the vectors x (b, t, c)."""
    plain, module = get_uncompiled(subject), find_module(subject)
    assert module is not None
    return TokenModel(get_subject_name(plain), plain, module, x, x.shape[1], is_sampled=is_sampled)


def iterate_values(sample: Any) -> list[Any]:
    """Return the arguments of a sample."""
    return list(sample.values()) if isinstance(sample, Mapping) else list(sample)


def make_call(plain: Any, sample: Any, tokens: Tensor) -> Callable[[Tensor], Any]:
    """Return a call with the arguments of a sample and other tokens in place of its own."""
    if isinstance(sample, Mapping):
        return lambda ids: plain(**{name: ids if one is tokens else one for name, one in sample.items()})
    return lambda ids: plain(*(ids if one is tokens else one for one in sample))


def find_sampled_tokens(plain: Any, module: nn.Module, sample: Any) -> Tensor | None:
    """Return the ids (b, t) among the arguments of a sample, or vectors in their place; None if it is not clear which they are.

    Ids are those of an argument that transformers calls so, or the only integers that an embedding looks up.
    """
    named = sample if isinstance(sample, Mapping) else {}
    for name in (*ID_NAMES, *VECTOR_NAMES):
        one = named.get(name)
        if isinstance(one, Tensor) and one.dim() == 2 + (name in VECTOR_NAMES) and one.numel():
            return one
    found = []
    for one in iterate_values(sample):
        if (
            isinstance(one, Tensor)
            and one.dim() == 2
            and one.numel()
            and not (one.is_floating_point() or one.dtype == torch.bool)
        ):
            with record_lookups(module, one) as looked_up, torch.no_grad(), contextlib.suppress(Exception):
                make_call(plain, sample, one)(one.clone())  # a user's model may raise anything
            found += [one] if looked_up else []
    return found[0] if len(found) == 1 else None


def find_token_ids(module: nn.Module, tokens: int = TOKENS, batch: int = BATCH) -> Tensor | None:
    """Return ids (b, t) that a module takes, below the size of one of its embeddings; None if it takes none.

    Raises ConfigError if a module looks ids up and then raises for all that are tried.
    """
    sizes = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    taken, wrong = None, ""
    for size in dict.fromkeys(size for size in sizes if size > 3):
        for t in dict.fromkeys((tokens, max(tokens - SPARE, 1), TOKENS, *FEWER)):
            if t == 1 and taken is not None:
                break  # the last token's logits alone would look like those of every token
            ids = torch.randint(size // 2, size, (batch, t), generator=torch.Generator().manual_seed(t)).to(device)
            with record_lookups(module, ids) as found:
                try:
                    with torch.no_grad():
                        fits = find_outputs(module(ids.clone()), ids) is not None  # the module may write to its ids
                except Exception as error:  # a user's model may raise anything for ids that it does not take
                    wrong = wrong or (str(SubjectError(f"token ids {tuple(ids.shape)}", error)) if found else "")
                    continue
            if fits:
                return ids
            taken = ids if taken is None and found else taken  # a classifier, or the last token's logits alone
    if taken is None and wrong:
        raise ConfigError(f"{get_subject_name(module)} looks up token ids, and raised {wrong}. {MORE}")
    return taken


@contextlib.contextmanager
def record_lookups(module: nn.Module, ids: Tensor) -> Iterator[list[bool]]:
    """Collect a True for each time an embedding of the module looks up exactly these ids in the block."""
    found: list[bool] = []

    def hook(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if given and isinstance(given[0], Tensor) and torch.equal(given[0], ids):
            found.append(True)

    hooks = [part.register_forward_hook(hook) for part in module.modules() if isinstance(part, nn.Embedding)]
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()


def find_outputs(returned: Any, ids: Tensor) -> Tensor | None:
    """Return the first floating (b, t, n) in what a model returned: a tensor, a tuple, a mapping or a dataclass; else None."""
    if isinstance(returned, Tensor):
        fits = returned.dim() == 3 and returned.shape[:2] == ids.shape[:2] and returned.is_floating_point()
        return (returned.double() if returned.dtype == torch.float64 else returned.float()).cpu() if fits else None
    parts = [part for part in list_parts(returned) if part is not returned]
    return next((one for part in parts if (one := find_outputs(part, ids)) is not None), None)


@contextlib.contextmanager
def use_evaluation_mode(subject: object) -> Iterator[None]:
    """Put a model into evaluation mode in the block and restore it afterwards; weights of large models are not copied."""
    with preserve_state(find_module(subject), COPIED):
        yield

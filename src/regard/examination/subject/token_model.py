"""Models that take token ids: the ids to try, and the outputs of a model."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.examination import dependency
from regard.examination.subject.adapters import SubjectError, find_held_module, get_subject_name, get_uncompiled
from regard.examination.subject.attention_output import list_parts
from regard.examination.subject.inplace_writes import InplaceWrites
from regard.examination.subject.restore_state import preserve_state

TOKENS, FEWER, BATCH = 8, (6, 4, 3, 2, 1), 2
MORE = "Pass sample=, ids (b, t) that it takes; or if it takes more: examine(lambda ids: model(sources, ids), sample=ids)."
MOST = 256  # tokens of a sample to examine
COPIED = 2**25  # numbers of a model to copy, to restore them if they change


@dataclass(frozen=True, eq=False)
class TokenModel:
    """A callable of ids (b, t), the module in it, and the ids; `sample_length` is how many tokens the sample had."""

    name: str
    call: Callable[[Tensor], Any]
    module: nn.Module
    ids: Tensor
    sample_length: int
    writes: InplaceWrites | None = None  # detects changes of the ids
    is_sampled: bool = False  # whether the ids are a caller's sample, so that no more tokens may be tried

    def run(self, ids: Tensor | None = None) -> Tensor | None:
        """Return the outputs (b, t, n), None if there is none for each token. Raises SubjectError if the model raises."""
        ids = self.ids if ids is None else ids
        with torch.no_grad():
            try:
                returned = self.call(ids.clone()) if self.writes is None else self.writes.watch(self.call, "ids")(ids)
            except Exception as error:  # a user's model may raise anything
                raise SubjectError(f"token ids {tuple(ids.shape)}", error) from error
        return find_outputs(returned, ids)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's first floating parameter, float32 if there is none."""
        return next((one.dtype for one in self.module.parameters() if one.is_floating_point()), torch.float32)

    def estimate_noise(self, outputs: Tensor) -> float:
        """Return the change of an output that may be rounding."""
        return dependency.estimate_rounding(self.dtype) * float(outputs.abs().max())


def make_token_model(subject: object, sample: Any = None, most: int = MOST) -> TokenModel | None:
    """Return a subject as a model of token ids, those of the sample or ids found by trial; None if it is not one.

    Raises ConfigError for a sample of ids that is not (b, t) or (t,).
    """
    plain: Any = get_uncompiled(subject)
    module = find_held_module(plain) if callable(plain) and not isinstance(plain, type) else None
    if module is None or (sample is None and module is not plain):
        return None
    if sample is None:
        found = find_token_ids(module)
        return None if found is None else TokenModel(get_subject_name(plain), module, module, found, found.shape[1])
    if not isinstance(sample, Tensor) or sample.is_floating_point():
        return None
    ids = sample.detach() if sample.dim() == 2 else sample.detach().unsqueeze(0)
    if ids.dim() != 2 or not ids.numel():
        raise ConfigError(f"a sample of token ids must be (b, t) or (t,), got {tuple(sample.shape)}.")
    return TokenModel(get_subject_name(plain), plain, module, ids[:, :most], ids.shape[1], is_sampled=True)


def find_token_ids(module: nn.Module) -> Tensor | None:
    """Return ids (b, t) that a module takes, below the size of one of its embeddings; None if it takes none.

    Raises ConfigError if a module looks ids up and then raises for all that are tried.
    """
    sizes = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    taken, wrong = None, ""
    for size in dict.fromkeys(size for size in sizes if size > 3):
        for t in (TOKENS, *FEWER):
            if t == 1 and taken is not None:
                break  # the last token's logits alone would look like those of every token
            ids = torch.randint(size // 2, size, (BATCH, t), generator=torch.Generator().manual_seed(t)).to(device)
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
        fits = returned.dim() == 3 and returned.shape[:2] == ids.shape and returned.is_floating_point()
        return (returned.double() if returned.dtype == torch.float64 else returned.float()).cpu() if fits else None
    parts = [part for part in list_parts(returned) if part is not returned]
    return next((one for part in parts if (one := find_outputs(part, ids)) is not None), None)


@contextlib.contextmanager
def use_evaluation_mode(subject: object) -> Iterator[None]:
    """Put a model into evaluation mode in the block and restore it afterwards; weights of large models are not copied."""
    plain = get_uncompiled(subject)
    with preserve_state(find_held_module(plain) if callable(plain) and not isinstance(plain, type) else None, COPIED):
        yield

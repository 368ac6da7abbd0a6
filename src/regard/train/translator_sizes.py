"""TranslatorSizes: the kind of translator that a run trains, and all its constructor arguments."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

import torch

from regard.errors import ConfigError
from regard.models.translator import KINDS, Translator

MOST, MOST_LAYERS = 1 << 24, 1 << 10  # largest size, and most layers: each is created in order to count its parameters
GPT2_KIND = "gpt2"  # the default kind


@dataclass(frozen=True)
class TranslatorSizes:
    """A kind of translator and its arguments, missing ones set to their defaults; validated on creation.

    A vocabulary of 0 stands for the vocabulary of the sentence pairs.
    """

    kind: str
    sizes: Mapping[str, Any]

    def __post_init__(self) -> None:
        known = list_arguments(self.kind)
        defaults = {name: default for name, (_, default) in known.items()}
        object.__setattr__(self, "sizes", {**defaults, **self.sizes})
        for name, value in self.sizes.items():
            most = MOST_LAYERS if name == "layers" else MOST
            if isinstance(value, int) and value > most:
                raise ConfigError(f"model.{name} must be {most:,} at most; got {value}.")
        try:
            self.count_parameters()
        except (TypeError, RuntimeError, OverflowError) as error:
            raise ConfigError(f"a size in [model] is invalid for a {self.kind} translator: {error}.") from None

    def count_parameters(self) -> int:
        """Return the number of parameters, with a vocabulary of 1 if that of the pairs is not known."""
        with torch.device("meta"):  # takes no memory
            model = KINDS[self.kind](**{**self.sizes, "vocabulary": self.vocabulary or 1})
        return sum(one.numel() for one in model.parameters())

    @property
    def vocabulary(self) -> int:
        """The number of tokens; 0 if it was not given."""
        return int(self.sizes["vocabulary"])

    def make_translator(self) -> Translator:
        """Create a translator of these sizes with its initial weights."""
        return KINDS[self.kind](**self.sizes)

    def to_table(self) -> dict[str, Any]:
        """Return the kind and the arguments, without those that are None, which TOML cannot represent."""
        return {"kind": self.kind, **{name: value for name, value in self.sizes.items() if value is not None}}


@cache
def list_arguments(kind: str) -> dict[str, tuple[Any, Any]]:
    """Return the arguments of a kind of translator: the type and the default of each."""
    if kind not in KINDS:
        raise ConfigError(f"model.kind must be one of {', '.join((GPT2_KIND, *KINDS))}; got {kind!r}.")
    constructor = KINDS[kind].__init__
    hints = get_type_hints(constructor)
    named = [one for one in inspect.signature(constructor).parameters.values() if one.name != "self"]
    found = {one.name: (strip_optional(hints[one.name]), one.default) for one in named}
    return {**found, "vocabulary": (int, 0)}


def strip_optional(hint: Any) -> Any:
    """Return the type of an argument without None."""
    kinds = [one for one in get_args(hint) if one is not type(None)]
    return kinds[0] if kinds else hint

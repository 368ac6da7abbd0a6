"""The selection of layers and heads that a recording keeps."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, MissingNameError
from regard.mechanism.arguments import check_whole, describe


@dataclass(frozen=True)
class Chosen:
    """The selected layers and heads; None selects all."""

    numbers: frozenset[int] | None
    paths: tuple[str, ...]
    heads: list[int] | None

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module], layers: Iterable[int | str] | None, heads: Iterable[int] | None) -> "Chosen":
        """Build a selection from record's arguments. Raises ConfigError for a path that is not a module's."""
        given = None if layers is None else [layers] if isinstance(layers, int | str) else items("layers", layers)
        paths = tuple(one for one in given or () if isinstance(one, str))
        for path in paths:
            if path not in modules:
                near = [name for name in modules if name.endswith(path.rsplit(".", 1)[-1])][:3]
                raise MissingNameError(
                    f"layers names {describe(path)}, which is no module of the model."
                    f"{' Near: ' + ', '.join(near) + '.' if near else ''}"
                )
        numbers = None
        if given is not None:
            numbers = frozenset(
                check_whole("a layer", one, " or the path of a module") for one in given if not isinstance(one, str)
            )
        kept = None if heads is None else [heads] if isinstance(heads, int) else items("heads", heads)
        return cls(numbers, paths, None if kept is None else [check_whole("a head", one) for one in kept])

    def layer(self, name: str, number: Callable[[], int]) -> bool:
        """Return whether a module is selected, by its path or by its number; `number` is called only if it matters."""
        return (
            self.numbers is None
            or number() in self.numbers
            or any(name == path or name.startswith(f"{path}.") for path in self.paths)
        )


def items(name: str, given: Any) -> list[Any]:
    """Return a value as a list. Raises ConfigError if it is not one: text, a number, a tensor of several axes."""
    if isinstance(given, Tensor) and given.dim() == 1 and given.layout is torch.strided and not given.is_nested:
        given = given.tolist()
    if isinstance(given, (str, bytes, Tensor, Mapping)) or not isinstance(given, Iterable):
        raise ConfigError(f"{name} must be a list, got {describe(given)}.")
    return list(given)

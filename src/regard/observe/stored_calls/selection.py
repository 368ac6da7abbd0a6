"""The selection of layers and heads that a recording keeps."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, MissingNameError
from regard.mechanism.arguments import check_integer, describe_value


@dataclass(frozen=True)
class Selection:
    """The selected layers and heads; None selects all."""

    numbers: frozenset[int] | None
    paths: tuple[str, ...]
    heads: list[int] | None

    @classmethod
    def from_arguments(
        cls, modules: Mapping[str, nn.Module], layers: Iterable[int | str] | None, heads: Iterable[int] | None
    ) -> "Selection":
        """Build a selection from record's arguments. Raises ConfigError for a path that is not a module's."""
        given = None if layers is None else [layers] if isinstance(layers, int | str) else require_list("layers", layers)
        paths = tuple(one for one in given or () if isinstance(one, str))
        for path in paths:
            if path not in modules:
                near = [name for name in modules if name.endswith(path.rsplit(".", 1)[-1])][:3]
                raise MissingNameError(
                    f"layers contains {describe_value(path)}, which is not a module of the model."
                    f"{' Similar: ' + ', '.join(near) + '.' if near else ''}"
                )
        numbers = None
        if given is not None:
            numbers = frozenset(
                check_integer("a layer", one, alternative=" or the path of a module")
                for one in given
                if not isinstance(one, str)
            )
        kept = None if heads is None else [heads] if isinstance(heads, int) else require_list("heads", heads)
        return cls(numbers, paths, None if kept is None else [check_integer("a head", one) for one in kept])

    @property
    def counts_from_end(self) -> bool:
        """Whether a layer is selected by a number below 0: which one that is shows only once all layers have run."""
        return any(number < 0 for number in self.numbers or ())

    def find_heads(self, count: int) -> list[int]:
        """Return the selected heads of `count`. Raises ConfigError for one that there is not, or that is named twice."""
        named = range(count) if self.heads is None else self.heads
        wrong = next((head for head in named if not -count <= head < count), None)
        if wrong is not None:
            raise ConfigError(f"head {wrong} is out of range: the heads are 0 to {count - 1}.")
        found = [head % count for head in named]
        if len(set(found)) < len(found):
            twice = next(head for n, head in enumerate(found) if head in found[:n])
            raise ConfigError(f"heads names head {twice} twice: {self.heads} of {count} heads. Name each once.")
        return found

    def has_layer(self, name: str, numbers: Callable[[], Set[int | None]]) -> bool:
        """Return whether a layer is selected, by its path or by one of its numbers; `numbers` is called only if they matter."""
        return (
            self.numbers is None
            or not self.numbers.isdisjoint(numbers())
            or any(name == path or name.startswith(f"{path}.") for path in self.paths)
        )


def require_list(name: str, given: Any) -> list[Any]:
    """Return a value as a list. Raises ConfigError if it is not one: text, a number, a tensor of several axes."""
    if isinstance(given, Tensor) and given.dim() == 1 and given.layout is torch.strided and not given.is_nested:
        given = given.tolist()
    if isinstance(given, (str, bytes, Tensor, Mapping)) or not isinstance(given, Iterable):
        raise ConfigError(f"{name} must be a list, got {describe_value(given)}.")
    return list(given)

"""Which layers and heads of a model a recording keeps."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from regard.errors import ConfigError


@dataclass(frozen=True)
class Chosen:
    """Which layers and heads are kept; None is all."""

    numbers: frozenset[int] | None
    paths: tuple[str, ...]
    heads: list[int] | None

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module], layers: Iterable[int | str] | None, heads: Iterable[int] | None) -> "Chosen":
        """The choice, or ConfigError for a path that is no module's."""
        given = None if layers is None else [layers] if isinstance(layers, int | str) else list(layers)
        paths = tuple(one for one in given or () if isinstance(one, str))
        for path in paths:
            if path not in modules:
                near = [name for name in modules if name.endswith(path.rsplit(".", 1)[-1])][:3]
                raise ConfigError(
                    f"layers names {path!r}, which is no module of the model.{' Near: ' + ', '.join(near) if near else ''}"
                )
        numbers = None if given is None else frozenset(int(one) for one in given if not isinstance(one, str))
        return cls(numbers, paths, None if heads is None else [heads] if isinstance(heads, int) else list(heads))

    def layer(self, name: str, number: Callable[[], int]) -> bool:
        """Whether a module is kept, by its path, or by its number among its kind and place; that is asked if it matters."""
        return (
            self.numbers is None
            or number() in self.numbers
            or any(name == path or name.startswith(f"{path}.") for path in self.paths)
        )

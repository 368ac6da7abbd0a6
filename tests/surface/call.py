"""A public call with arguments that it takes, and what is wrong for each of its parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surface.wrong import Wrong


@dataclass(frozen=True)
class Call:
    """A public name, a function that makes arguments with which it works, and by parameter what it must refuse."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], Mapping[str, Any]]
    refuses: Mapping[str, Wrong]

    def run(self, **changed: Any) -> Any:
        """The call with some arguments changed, by keyword; those of `*` by position."""
        arguments = {**self.arguments(), **changed}
        places = arguments.pop("*", ())
        return self.function(*(places if isinstance(places, tuple) else (places,)), **arguments)


def method(name: str, make: Callable[[], Any], arguments: Callable[[], Mapping[str, Any]], /, **refuses: Wrong) -> Call:
    """The call of a method of what `make` makes; the name is Class.method."""
    return Call(name, lambda *places, **given: getattr(make(), name.rsplit(".", 1)[-1])(*places, **given), arguments, refuses)

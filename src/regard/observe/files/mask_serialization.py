"""Masks in a file: their serialization to lists of a class and its arguments, and the masks of such lists."""

import json
from typing import Any

from torch import Tensor

from regard.errors import ConfigError
from regard.mechanism.masks import CLASSES, Given, Mask
from regard.observe.files.header_values import require_list

LARGEST = 2**30  # entries of the table of a user-defined mask
DEEPEST = 64  # nesting of combined masks


def serialize_mask(mask: Mask, q: int, k: int, offset: Any, packed: Any) -> list[Any]:
    """Return a mask as a list: the name of its class, then its arguments; a user-defined mask becomes a table.

    Raises ConfigError if that table would have more than LARGEST entries.
    """
    mask = mask.for_keys(k)
    name = type(mask).__name__
    if CLASSES.get(name) is type(mask):
        return [name, *(serialize_argument(one, q, k, offset, packed) for one in mask.arguments)]
    if q * k * mask.batch * mask.heads > LARGEST:
        raise ConfigError(
            f"{name} is a mask of your own, which a file holds as a table, and a table of {q:,} x {k:,} is too large. "
            "Save a shorter run, or compose the mask of regard's own."
        )
    return ["Given", packed.add(Given(mask.table(q, k, offset)).given)]


def serialize_argument(argument: Any, q: int, k: int, offset: Any, packed: Any) -> Any:
    """Return an argument of a mask as a plain value: a mask as a list, a tensor by its name, a tuple as a list."""
    if isinstance(argument, Mask):
        return serialize_mask(argument, q, k, offset, packed)
    if isinstance(argument, Tensor):
        return packed.add(argument)
    return list(argument) if isinstance(argument, tuple) else argument


class MaskReader:
    """The masks of a file, each built once, however many calls share it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.masks: dict[str, Mask] = {}

    def deserialize_mask(self, found: list[Any], depth: int = DEEPEST) -> Mask:
        """Return the mask of a list: the name of its class, then its arguments."""
        if not depth:
            raise ValueError("masks combined too deeply")
        text = json.dumps(found)
        if text not in self.masks:
            name, *arguments = require_list(found)
            parts = (self.deserialize_argument(one, depth - 1) for one in arguments)
            self.masks[text] = CLASSES[name].from_arguments(*parts)
        return self.masks[text]

    def deserialize_argument(self, found: Any, depth: int) -> Any:
        """Return an argument of a mask: a list that starts with a name is a mask, a name by itself a tensor."""
        if isinstance(found, str):
            return self.tensors[found]
        return self.deserialize_mask(found, depth) if isinstance(found, list) and found and isinstance(found[0], str) else found

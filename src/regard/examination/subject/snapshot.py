"""Save what a module keeps from call to call besides its weights, and restore it between calls."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.examination.subject.restore_state import (
    SavedTensor,
    collect_containers,
    get_attributes,
    is_identical,
    list_values,
    refill_container,
    restore_tensor,
)

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # the attributes of every nn.Module
MAX_DEPTH = 3  # levels of nested containers


class Snapshot(NamedTuple):
    """The attributes of each part of a module, the containers in them and the tensors in both; no weights."""

    attributes: list[tuple[str, nn.Module, dict[str, Any]]]
    containers: list[tuple[Any, Any]]
    values: list[SavedTensor]

    def restore(self, numbers: bool = True) -> None:
        """Restore attributes, containers and, with `numbers`, tensor values; hooks, modes and weights stay as they are."""
        for _, part, before in self.attributes:
            for name in vars(part).keys() - MODULE_ATTRIBUTES - before.keys():
                del vars(part)[name]
            vars(part).update(before)
        for one, before in self.containers:
            refill_container(one, before)
        for value in self.values if numbers else ():
            restore_tensor(value)

    def list_changes(self) -> list[str]:
        """Return the names of the attributes and buffers that have changed."""
        numbers = {id(value.tensor): value.numbers for value in self.values}
        contents = {id(one): before for one, before in self.containers}

        def is_changed(now: Any, before: Any) -> bool:
            if now is not before:
                return True
            attributes = get_attributes(now)
            now = now if attributes is None else attributes
            held = contents.get(id(now))
            if held is not None:
                return len(held) != len(now) or any(map(is_changed, list_values(now), list_values(held)))
            value = numbers.get(id(now))
            return value is not None and not is_identical(now, value)

        return [
            f"{path}.{name}" if path else name
            for path, part, before in self.attributes
            for table, held in ((vars(part), before), (part._buffers, contents[id(part._buffers)]))
            for name in sorted((table.keys() | held.keys()) - MODULE_ATTRIBUTES)
            if is_changed(table.get(name), held.get(name))
        ]


def take_snapshot(module: nn.Module) -> Snapshot:
    """Save what a module keeps now."""
    attributes = [
        (path, part, {name: value for name, value in vars(part).items() if name not in MODULE_ATTRIBUTES})
        for path, part in module.named_modules()
    ]
    found: dict[int, tuple[Any, Any]] = {}
    for _, part, held in attributes:
        for one in (part._buffers, *held.values()):
            collect_containers(one, found, MAX_DEPTH)
    every = [x for _, _, held in attributes for x in held.values()] + [x for one, _ in found.values() for x in list_values(one)]
    tensors = {id(x): x for x in every if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)}
    values = [SavedTensor(x, x.detach().clone(), x.requires_grad, None) for x in tensors.values() if x.is_leaf]
    return Snapshot(attributes, list(found.values()), values)

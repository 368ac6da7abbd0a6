"""What ran in a module as lists that can be compared: its functions, their arguments, and which tensors are the same."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.observe.interception.lookups import IS_TENSOR
from regard.observe.interception.module_weights import is_part_of_parameter, list_weights
from regard.observe.interception.tensor_arguments import PLAIN

LayerStep = tuple[Any, Any, Any, Any]  # a function or a child module that ran, its args, its kwargs, its result
NAMES = (str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.memory_format, torch.layout)
VALUES = PLAIN | {int, float, bool, complex, *NAMES}  # classes of arguments without entries
BOUNDS, STRIDED = {int, type(None)}, {torch.strided}
READ_SHAPE, READ_DTYPE, READ_LAYOUT = (vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "dtype", "layout"))


class UnknownArgumentError(Exception):
    """An argument is of a type that is not compared."""


@dataclass
class StepDescription:
    """What ran in a module, with its tensors by number, in the order in which the steps name them.

    Entries of tuples and lists follow these. What is not described follows from the rest, as the strides of results do.
    """

    runs: list[Any] = field(default_factory=list)  # functions, and for a child module its class and mode
    lengths: list[Any] = field(default_factory=list)  # numbers of arguments and results of each step, and names of arguments
    kinds: list[Any] = field(default_factory=list)  # classes of arguments and results
    values: list[Any] = field(default_factory=list)  # of these, a tensor's number, or what else they are
    shapes: list[torch.Size] = field(default_factory=list)  # of results
    dtypes: list[torch.dtype] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)  # what the tensors are that the module did not make

    def __len__(self) -> int:
        return len(self.runs)


class StepDescriber:
    """Describes the steps of a module, some at a time, and numbers their tensors, which it does not keep."""

    def __init__(self, module: nn.Module, inputs: list[Tensor]) -> None:
        self.module, self.inputs = module, inputs
        self.description = StepDescription()
        self.tensors: list[weakref.ref[Tensor]] = []
        self.numbers: dict[int, int] = {}  # by the id of a tensor
        self.given: list[int] = []  # the numbers of tensors that the module did not make
        self.size = 0  # entries of results

    def describe(self, steps: Sequence[LayerStep]) -> None:
        """Describe further steps, whose tensors are alive, all at once: a call of Python for each argument takes longer.

        Raises UnknownArgumentError for arguments of a type that is not compared.
        """
        found, flat, made, places = self.description, list[Any](), list[Any](), list[int]()
        for run, args, kwargs, result in steps:
            found.runs.append((type(run), run.training, vars(run).get("p")) if isinstance(run, nn.Module) else run)
            flat += args if VALUES.issuperset(map(type, args)) else list_entries(args)
            if kwargs:
                flat += list_entries(kwargs.values())
            results = (result,) if isinstance(result, Tensor) else result
            places += range(len(flat), len(flat) + len(results))
            flat += results
            made += results
            found.lengths.append((len(args), len(results), *kwargs))
        if not (PLAIN.issuperset(map(type, made)) and STRIDED.issuperset(map(READ_LAYOUT, made))):
            raise UnknownArgumentError
        self.number_tensors(flat, {*places})
        found.kinds += map(type, flat)
        found.values += [self.numbers[id(x)] if type(x) in PLAIN else x for x in flat]
        found.shapes += map(READ_SHAPE, made)
        found.dtypes += map(READ_DTYPE, made)

    def number_tensors(self, flat: list[Any], places: set[int]) -> None:
        """Give the tensors among some values numbers, if they have none; those at `places` are results."""
        first = dict(zip(map(id, reversed(flat)), range(len(flat) - 1, -1, -1), strict=True))  # where each value stands first
        tensors = [*filter(IS_TENSOR, flat)]
        if self.tensors:
            tensors = [x for x in tensors if self.find_number(x) is None]
        new = dict(zip(map(id, tensors), tensors, strict=True))
        start = len(self.tensors)
        self.numbers.update(zip(new, range(start, start + len(new)), strict=True))
        self.tensors += map(weakref.ref, new.values())
        given = [x for key, x in new.items() if first[key] not in places]
        if given:
            weights = {*map(id, list_weights(self.module))}
            self.given += [self.numbers[id(x)] for x in given]
            self.description.given += [self.describe_given(x, weights) for x in given]
        self.size += sum(map(Tensor.numel, new.values())) - sum(map(Tensor.numel, given))

    def describe_given(self, x: Tensor, weights: set[int]) -> Any:
        """Return what a tensor is that the module was given or holds."""
        if x.layout is not torch.strided or x.is_nested:
            raise UnknownArgumentError
        place = next((n for n, one in enumerate(self.inputs) if one is x), -1)
        return is_part_of_parameter(x), id(x) in weights, place, x.shape, x.stride(), x.dtype, x.device

    def find_number(self, x: Tensor) -> int | None:
        """Return the number of a tensor; None if it has none."""
        number = self.numbers.get(id(x))
        return number if number is not None and self.tensors[number]() is x else None

    def list_tensors(self) -> list[Tensor | None]:
        """Return the tensors by number, None for those that were freed."""
        return [one() for one in self.tensors]


def list_entries(values: Iterable[Any]) -> list[Any]:
    """Return values, with the entries of tuples, lists, slices and dictionaries behind their class and number or names.

    Raises UnknownArgumentError for a value of another type than are compared.
    """
    found: list[Any] = []
    for x in values:
        kind = type(x)
        if kind in VALUES or isinstance(x, NAMES):
            found.append(x)
        elif kind is slice:
            bounds = x.start, x.stop, x.step
            found += (x,) if BOUNDS.issuperset(map(type, bounds)) else (kind, *list_entries(bounds))
        elif isinstance(x, tuple | list):
            found += (kind, len(x)), *list_entries(x)
        elif kind is dict:
            found += (kind, *x), *list_entries(x.values())
        else:
            raise UnknownArgumentError
    return found

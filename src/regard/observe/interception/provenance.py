"""Provenance of tensors: what each tensor of a running module was made from, to distinguish cross attention from self."""

import weakref
from functools import cache
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.lookups import (
    IS_TENSOR,
    SHAPED,
    Indices,
    Layout,
    Shapes,
    find_shapes,
    put_table_first,
)
from regard.observe.interception.module_weights import is_part_of_parameter, is_stack_of_matrices, is_weight
from regard.observe.interception.operation_details import GATHERS, NO_DETAILS, has_details, read_details
from regard.observe.interception.plain_tensors import is_readable
from regard.observe.interception.tensor_arguments import PLAIN, find_tensors, list_entries

JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "copy_", "index_copy_"}  # of all arguments
PROJECTS = {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d"}
NESTED = JOINS | {"einsum", "linalg_multi_dot"}  # whose tensors may be in lists
FRESH = {  # results with the shape of a tensor, but not its numbers
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
}
LIKE_ANOTHER = {"reshape_as", "view_as", "expand_as", "type_as", "to"}  # take a shape or a dtype from a second tensor
PARAMETRIZES = "parametrize"  # the name of the call of a module that computes a weight, as that of a normalized one
CONSTANT, WEIGHT, LEARNED, TOKEN = range(4)  # what a tensor holds; LEARNED: tokens computed from weights alone
SERIAL = count()
NOTHING: frozenset[int] = frozenset()
TensorOrRef = Tensor | weakref.ref[Tensor]  # a reference to one that may have been freed


class TensorSources(NamedTuple):
    """A tensor, the sources in its frame that it was made from, and whether a module or matrix product was on the way.

    `is_passed` states that an argument of the module is among the sources.
    """

    tensor: "weakref.ref[Tensor]"
    sources: frozenset[int]
    projected: bool = False
    is_passed: bool = False


NO_SOURCES = TensorSources(weakref.ref(Tensor()), NOTHING)


class Operation(NamedTuple):
    """An operation: a function or child module, its argument tensors, their numbers of entries, and its results."""

    name: str
    child: type[nn.Module] | None  # the class of the module
    given: "list[weakref.ref[Tensor]]"
    sizes: list[int]
    results: "list[weakref.ref[Tensor]]"
    lookup: Indices | None = None  # of a gather
    along: tuple[int, tuple[int, ...]] | None = None  # the axis of a pick or a running sum, and the shape of what it was given
    layout: Layout | None = None  # of a function that rearranges axes
    shapes: Shapes | None = None  # of a product, a slice or a module


class ModuleFrame:
    """A running module, the watchers notified of it, and the operations that ran directly in it.

    Operations are only logged while the model runs; provenance is computed when it is queried.
    """

    __slots__ = (
        "__weakref__",
        "args",
        "contents",
        "ids",
        "kwargs",
        "made",
        "makers",
        "module",
        "multiplies_scores",
        "noted",
        "resolved",
        "settled",
        "watchers",
    )

    def __init__(self, module: nn.Module, watchers: tuple[Any, ...], args: Any, kwargs: Any) -> None:
        self.module, self.watchers, self.args, self.kwargs = module, watchers, args, kwargs
        self.multiplies_scores = False  # whether scores of pairs of tokens were multiplied with values as they are
        self.ids: list[Tensor] = []  # token ids that were looked up as embeddings in it and in the modules that it called
        self.noted: list[Operation] = []
        self.made: dict[int, TensorSources] = {}  # by the id of the tensor's weak reference, which is unique
        self.settled: list[Operation] = []  # resolved in `made`, not yet in the two below
        self.resolved: list[Operation] = []  # in all of them
        self.contents: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # what tensors hold, by the same id
        self.makers: dict[int, list[Operation]] = {}  # by the same id; includes in-place writes

    @property
    def has_operations(self) -> bool:
        """Whether a function or a child module has run in it."""
        return bool(self.noted or self.made)

    @property
    def operation_count(self) -> int:
        """The number of operations that ran in it."""
        return len(self.resolved) + len(self.settled) + len(self.noted)

    def list_operations(self) -> list[Operation]:
        """Return the operations that ran in it, in order."""
        return [*self.resolved, *self.settled, *self.noted]

    @property
    def given_tensors(self) -> list[Tensor]:
        """The tensors among the module's arguments."""
        return find_tensors(self.args, self.kwargs)

    @property
    def input_tensors(self) -> list[Tensor]:
        """The tensors among the module's arguments that have a shape, as nested ones have not."""
        return [x for x in self.given_tensors if not x.is_nested]

    def find_sources(self, x: TensorOrRef) -> TensorSources | None:
        """Return the sources of a tensor, which may have been freed; None if it does not occur in this frame."""
        self.resolve_sources()
        return self.made.get(id(weakref.ref(x) if isinstance(x, Tensor) else x))

    def find_contents(self, x: "weakref.ref[Tensor]") -> int:
        """Return what a tensor holds: CONSTANT, WEIGHT, LEARNED or TOKEN."""
        self.resolve_contents()
        return self.get_contents(x)

    def find_makers(self, x: "weakref.ref[Tensor]") -> list[Operation]:
        """Return the operations that made a tensor here or wrote into it; none for an argument of the module."""
        self.resolve_contents()
        return self.makers.get(id(x), [])

    def resolve_contents(self) -> None:
        """Compute the contents and makers of all results logged since the last call."""
        self.resolve_sources()
        for maker in self.settled:
            holds = self.infer_contents(maker)
            for y in maker.results:
                self.contents[id(y)] = y, holds
                self.makers.setdefault(id(y), []).append(maker)
        self.resolved += self.settled
        self.settled.clear()

    def log_operation(self, args: Any, kwargs: Any, result: Any, name: str = "", child: type[nn.Module] | None = None) -> None:
        """Log that a function or a child module computed a result from its arguments."""
        if child is not None and not kwargs and len(args) == 1 and type(args[0]) is type(result) is Tensor:
            x = args[0]
            shapes = None if x.is_nested or result.is_nested else Shapes((x.shape,), result.shape)
            given, outputs = [weakref.ref(x)], [weakref.ref(result)]
            self.noted.append(Operation(name, child, given, [x.numel()], outputs, *NO_DETAILS, shapes))
            return
        details = read_details(name, args, kwargs, result) if has_details(name) else NO_DETAILS
        shapes = find_shapes(name, args, result) if child is not None or name in SHAPED else None
        if name == "embedding":
            args = put_table_first(args)
        if name in NESTED:
            args = find_tensors((*args, *kwargs.values()), {})
        elif kwargs:
            args = find_tensors(args, kwargs)
        tensors = [*filter(IS_TENSOR, args)]
        if name in LIKE_ANOTHER:
            del tensors[1:]
        if PLAIN.issuperset(map(type, tensors)):
            sizes = [*map(Tensor.numel, tensors)]
        else:
            sizes = [x.numel() if is_readable(x) else 0 for x in tensors]  # a wrapper's numel() would be traced
        results = (result,) if isinstance(result, Tensor) else [*filter(IS_TENSOR, list_entries(result))]
        outputs = [*map(weakref.ref, results)]
        if is_in_place(name) or (kwargs and kwargs.get("out") is not None):
            outputs += [weakref.ref(y._base) for y in results if y._base is not None]
        self.noted.append(Operation(name, child, [*map(weakref.ref, tensors)], sizes, outputs, *details, shapes))

    def resolve_sources(self) -> None:
        """Compute the sources of all results logged since the last call."""
        made = self.made
        for name, child, inputs, sizes, results, *_ in self.noted:
            if len(inputs) == 1:
                one = made.get(id(inputs[0])) or self.add_source(inputs[0])
            else:
                one = self.join_sources(name, inputs, sizes)
            _, sources, was_projected, is_passed = one if one.sources else NO_SOURCES
            projected = child is not None or was_projected or name in PROJECTS
            for y in results:
                made[id(y)] = TensorSources(y, sources, projected, is_passed)
        self.settled += self.noted
        self.noted.clear()

    def join_sources(self, name: str, inputs: "list[weakref.ref[Tensor]]", sizes: list[int]) -> TensorSources:
        """Return the sources of the largest of an operation's arguments, or of all that it joins.

        In a product, what the module was called with comes before larger tensors from elsewhere: they may be weights.
        """
        joins, projects = name in JOINS, name in PROJECTS
        found, most = NO_SOURCES, (False, -1)
        for x, size in zip(inputs, sizes, strict=False):
            one = self.made.get(id(x)) or self.add_source(x)
            rank = projects and one.is_passed, size
            if one.sources and joins:
                sources, is_passed = found.sources | one.sources, found.is_passed or one.is_passed
                found = TensorSources(x, sources, found.projected or one.projected, is_passed)
            elif one.sources and rank > most:
                found, most = one, rank
        return found

    def add_source(self, x: "weakref.ref[Tensor]") -> TensorSources:
        """Register a tensor from outside the frame as its own source; a parameter has none."""
        tensor = x()
        is_passed = any(tensor is one for one in self.given_tensors)
        sources = NOTHING if isinstance(tensor, nn.Parameter) else frozenset((next(SERIAL),))
        self.made[id(x)] = source = TensorSources(x, sources, is_passed=is_passed)
        return source

    def infer_contents(self, maker: Operation) -> int:
        """Return what the result of an operation holds.

        It is what the largest argument holds, or the maximum over all arguments that were joined or multiplied.
        """
        name, child, inputs, sizes, *_ = maker
        if len(inputs) == 1 and not child and keeps_contents(name):
            return self.get_contents(inputs[0])
        if name in FRESH or not (inputs or child):
            return CONSTANT
        if name == PARAMETRIZES:
            return WEIGHT
        is_product = child or infer_role(name) in (Role.PRODUCT, Role.CONVOLUTION)
        holds = [*map(self.get_contents, inputs)]
        if is_product:
            return max([LEARNED if child or max(holds) else CONSTANT, *holds])
        if name in GATHERS and is_stack_of_matrices(inputs[0]):
            return WEIGHT
        if name in GATHERS or name in JOINS or is_in_place(name):
            return max(holds)
        most = {one for one, size in zip(holds, sizes, strict=True) if size == max(sizes)}
        return WEIGHT if most >= {WEIGHT, LEARNED} and TOKEN not in most else max(most)

    def get_contents(self, x: "weakref.ref[Tensor]") -> int:
        """Return what a tensor holds; one not made in this frame is a weight or an argument of the module."""
        known = self.contents.get(id(x))
        if known is None:
            tensor = x()
            weighs = is_part_of_parameter(tensor) or is_weight(self.module, tensor)
            known = self.contents[id(x)] = x, WEIGHT if weighs else TOKEN
        return known[1]

    def find_input(self, sources: frozenset[int]) -> Tensor | None:
        """Return the tensor from outside the frame that is the first of some sources; None if it is gone."""
        first = frozenset((min(sources),)) if sources else None
        return next(
            (x for source in self.made.values() if source.sources == first and (x := source.tensor()) is not None), None
        )


@cache
def keeps_contents(name: str) -> bool:
    """Return whether the function of this name makes of one tensor another one that holds the same: no product, no look-up."""
    return name not in FRESH | GATHERS | {PARAMETRIZES} and infer_role(name) not in (Role.PRODUCT, Role.CONVOLUTION)


@cache
def is_in_place(name: str) -> bool:
    """Return whether the function of this name writes into its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith(("__iadd", "__imul"))


def has_separate_sources(frames: list[ModuleFrame], query: TensorOrRef, key: TensorOrRef) -> bool | None:
    """Return whether queries and keys were projected from different tensors; None if that was not observed.

    For tensors that a module received ready-made, the search continues in the module around it, up to four modules.
    """
    q: TensorOrRef | None = query
    k: TensorOrRef | None = key
    are_projected = [False, False]
    for n, frame in enumerate(reversed(frames[-4:])):
        one, other = (None, None) if q is None or k is None else (frame.find_sources(q), frame.find_sources(k))
        if one is None or other is None:
            continue
        if one.sources & other.sources:
            return False
        are_projected = [are_projected[0] or one.projected, are_projected[1] or other.projected]
        outer_q, outer_k = frame.find_input(one.sources), frame.find_input(other.sources)
        if all(are_projected):
            outer_frame = frames[-n - 2] if len(frames) > n + 1 else None
            is_apart = outer_frame is None or not has_common_source(outer_frame, outer_q, outer_k)
            return is_apart if one.sources | other.sources else None
        q, k = outer_q, outer_k
    return None


def has_common_source(frame: ModuleFrame, one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors are the same one with something added to it, such as positions."""
    if one is None or other is None or one.shape != other.shape:
        return False
    ours, theirs = frame.find_sources(one), frame.find_sources(other)
    shares = ours is not None and theirs is not None and bool(ours.sources & theirs.sources)
    return shares and not (one._base is not None and one._base is other._base)  # two views of one tensor are different

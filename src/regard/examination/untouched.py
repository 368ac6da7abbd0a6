"""A context that leaves no trace: modes, weights, buffers, gradients, attributes and random states are put back."""

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def untouched(module: nn.Module | None) -> Iterator[None]:
    """The block sees the module in evaluation mode and hears no warnings; after it everything is as it was found."""
    parts = list(module.modules()) if module is not None else []
    before = [(part, dict(vars(part)), {name: dict(vars(part)[name]) for name in CONTAINERS}) for part in parts]
    held = {id(x): x for _, _, tables in before for name in CONTAINERS[:2] for x in tables[name].values() if x is not None}
    values = [(x, x.detach().clone(), x.requires_grad, x.grad) for x in held.values()]
    with random_states(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for part in parts:
                part.training = False  # module.eval() may be somebody's own
            with torch.enable_grad():
                yield
        finally:
            for part, attributes, tables in before:
                restore(part, attributes, tables)
            for x, value, needs_grad, grad in values:
                put_back(x, value, needs_grad, grad)


def restore(part: nn.Module, attributes: dict[str, Any], tables: dict[str, dict[str, Any]]) -> None:
    """A module's own attributes, and the tensors and modules that it holds, by name."""
    vars(part).clear()
    vars(part).update(attributes)
    for name, table in tables.items():
        kept = vars(part)[name]
        kept.clear()
        kept.update(table)


def put_back(x: Tensor, value: Tensor, needs_grad: bool, grad: Tensor | None) -> None:
    """A tensor's numbers, only where they changed, and what belongs to its gradient."""
    same = x.dtype == value.dtype and x.shape == value.shape and torch.equal(x.detach().nan_to_num(), value.nan_to_num())
    if not same:
        with torch.no_grad():
            x.data = value
    if x.is_leaf and x.requires_grad != needs_grad:
        x.requires_grad_(needs_grad)
    x.grad = grad


def seeded(seed: int, device: torch.device) -> None:
    """Sets the generators of the CPU and of a device; torch.manual_seed would set those of all devices, used or not."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def random_states() -> Iterator[None]:
    """Whatever is drawn in the block, torch's generators, Python's and numpy's stand after it where they stood."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(drawn)

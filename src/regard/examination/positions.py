"""Positions: the numbers a module holds of where tokens stand, told by their names, and copies of it with other ones."""

import re

import torch
from torch import Tensor, nn

NAMED = re.compile(
    r"(?:^|[._])(?:pos(?:ition(?:al|s)?)?|pos_?(?:ition(?:al)?)?s?_?(?:emb|enc|bias|table)\w*|wpe|inv_freq\w*|rotary\w*|rope\w*"
    r"|alibi\w*|slopes|freqs_cis|rel(?:ative)?(?:_(?:pos|bias|attention_bias)\w*)?|(?:cos|sin)_cache\w*)(?:\.weight)?$"
)
BY_DISTANCE = re.compile(r"(?:^|[._])(?:rope|rotary|alibi|slopes|inv_freq|freqs_cis)")
ELSEWHERE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd)  # whose weights are no positions, whatever its name


def held(module: nn.Module | None) -> dict[str, Tensor]:
    """The tensors of several numbers whose names say that they are positions: parameters, buffers and attributes."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules() if module is not None else ():
        if not isinstance(part, ELSEWHERE):
            own = {**part._parameters, **part._buffers, **vars(part)}
            found |= {f"{path}.{name}".lstrip("."): one for name, one in own.items() if isinstance(one, Tensor)}
    return {name: one for name, one in found.items() if NAMED.search(name.lower()) and several(one)}


def several(one: Tensor) -> bool:
    """Whether a tensor holds numbers, and more than one of them: no indices, no truths, no factor."""
    return (one.is_floating_point() or one.is_complex()) and one.numel() > 1


def by_distance(names: dict[str, Tensor]) -> bool:
    """Whether all of them are of a sort that enters by distance alone: rotary, or ALiBi."""
    return bool(names) and all(BY_DISTANCE.search(one.lower()) for one in names)


def drawn(module: nn.Module) -> nn.Module:
    """A module whose positions, and whatever else is 0 throughout and may hide them, are normal numbers."""
    dice = torch.Generator().manual_seed(5)
    hiding = [one for one in module.parameters() if one.numel() and not one.any()]
    with torch.no_grad():
        for one in [*held(module).values(), *hiding]:
            one.copy_(torch.randn(one.shape, generator=dice, dtype=torch.float64))
    return module


def stilled(module: nn.Module) -> nn.Module:
    """A module whose positions turn nothing and add nothing."""
    with torch.no_grad():
        for name, one in held(module).items():
            one.fill_(1.0 if one.is_complex() or "cos" in name.lower() else 0.0)
    return module


def entering(module: nn.Module, output: Tensor) -> list[str]:
    """The names of the positions that an output was computed of by a way that has a gradient, be their slope 0."""
    tensors = {name: one for name, one in held(module).items() if one.requires_grad}
    if not tensors or not output.requires_grad:
        return []
    slopes = torch.autograd.grad(output.sum(), list(tensors.values()), allow_unused=True)
    return [name for name, slope in zip(tensors, slopes, strict=True) if slope is not None]


def asked_for(module: nn.Module) -> nn.Module:
    """A module whose positions ask for a gradient."""
    for one in held(module).values():
        if one.is_leaf:
            one.requires_grad_()
    return module

"""Find the position tensors of a module by their names, and set other numbers in copies of it."""

import re

import torch
from torch import Tensor, nn

NAMED = re.compile(
    r"(?:^|[._])(?:pos(?:ition(?:al|s)?)?|pos_?(?:ition(?:al)?)?s?_?(?:emb|enc|bias|table)\w*|w?pe|inv_freq\w*|rotary\w*|rope\w*"
    r"|alibi\w*|slopes|freqs_cis|rel(?:ative)?(?:_(?:pos|bias|attention_bias|key|emb|table|dist)\w*)?|(?:cos|sin)_cache\w*)(?:\.weight)?$"
)
BY_DISTANCE = re.compile(r"(?:^|[._])(?:rope|rotary|alibi|slopes|inv_freq|freqs_cis)")
ELSEWHERE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd)  # their weights are never positions


def find_position_tensors(module: nn.Module | None) -> dict[str, Tensor]:
    """Return the tensors with more than one number whose names mean positions: parameters, buffers and attributes."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules() if module is not None else ():
        if not isinstance(part, ELSEWHERE):
            own = {**part._parameters, **part._buffers, **vars(part)}
            found |= {f"{path}.{name}".lstrip("."): one for name, one in own.items() if isinstance(one, Tensor)}
    return {name: one for name, one in found.items() if NAMED.search(name.lower()) and has_several_numbers(one)}


def has_several_numbers(one: Tensor) -> bool:
    """Return whether a tensor holds more than one real or complex number: no indices, no booleans, no single factor."""
    return (one.is_floating_point() or one.is_complex()) and one.numel() > 1


def is_relative_encoding(names: dict[str, Tensor]) -> bool:
    """Return whether all names are of a kind that enters by distance alone: rotary, or ALiBi."""
    return bool(names) and all(BY_DISTANCE.search(one.lower()) for one in names)


def randomize_positions(module: nn.Module) -> nn.Module:
    """Fill a module's positions, and any all-zero parameter that may hide them, with normal numbers in place."""
    dice = torch.Generator().manual_seed(5)
    hiding = [one for one in module.parameters() if one.numel() and not one.any()]
    with torch.no_grad():
        for one in [*find_position_tensors(module).values(), *hiding]:
            one.copy_(torch.randn(one.shape, generator=dice, dtype=torch.float64))
    return module


def neutralize_positions(module: nn.Module) -> nn.Module:
    """Set a module's positions in place so that they rotate nothing and add nothing."""
    with torch.no_grad():
        for name, one in find_position_tensors(module).items():
            one.fill_(1.0 if one.is_complex() or "cos" in name.lower() else 0.0)
    return module


def find_used_positions(module: nn.Module, output: Tensor) -> list[str]:
    """Return the names of the positions that an output depends on by a differentiable path, even with a gradient of 0."""
    tensors = {name: one for name, one in find_position_tensors(module).items() if one.requires_grad}
    if not tensors or not output.requires_grad:
        return []
    slopes = torch.autograd.grad(output.sum(), list(tensors.values()), allow_unused=True)
    return [name for name, slope in zip(tensors, slopes, strict=True) if slope is not None]


def require_position_gradients(module: nn.Module) -> nn.Module:
    """Make a module's positions require a gradient."""
    for one in find_position_tensors(module).values():
        if one.is_leaf:
            one.requires_grad_()
    return module

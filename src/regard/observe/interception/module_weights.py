"""Which tensors are weights: parameters, views of these, and what the modules of a model hold."""

import weakref

from torch import Tensor, nn


def is_stack_of_matrices(x: "weakref.ref[Tensor]") -> bool:
    """Return whether a tensor is a parameter of many matrices, such as experts: an entry of it is a weight."""
    table = x()
    return isinstance(table, nn.Parameter) and table.dim() > 2


def is_part_of_parameter(x: Tensor | None) -> bool:
    """Return whether a tensor is a parameter or a view of one, as the weights of an expert that a module is called with."""
    return isinstance(x, nn.Parameter) or (x is not None and isinstance(x._base, nn.Parameter))


def is_weight(module: nn.Module, x: Tensor | None) -> bool:
    """Return whether a tensor is a buffer of a module or of one of its children, or a parameter, as in torch.func too.

    torch.func.functional_call puts plain tensors in the place of parameters.
    """
    return x is not None and any(x is one for one in list_weights(module))


def list_weights(module: nn.Module) -> list[Tensor | None]:
    """Return the buffers and parameters of a module and of its children."""
    holders = [one for one in (module, *module._modules.values()) if one is not None]
    return [one for holder in holders for own in (holder._buffers, holder._parameters) for one in own.values()]

"""Mixing of the heads of scores or weights by a small matrix or a small layer, as talking heads do."""

from torch import Tensor, nn

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.handwritten.products.traces import Trace, list_parts

MAX_MIXING_ENTRIES = 4096  # entries of a matrix that mixes heads: at most 64 x 64


def mix_heads(table: AxisTable, trace: Trace, x: Tensor, y: Tensor, product: LabelledProduct | None, name: str) -> Trace:
    """Return the trace of scores or weights whose heads a small matrix mixed."""
    dims = trace.dims if x.shape == y.shape else None
    if product is not None and trace.dims is not None:
        place = product.find_place(x)
        dims = product.build_dims(table, {place: trace.dims})[2]
    return trace._replace(
        dims=dims,
        form=None,
        relative=None,
        unmixed=trace.unmixed or trace.form,
        moved=None,
        undropped=None,
        parts=list_parts(trace),
        changes=(*trace.changes, describe_mixing(strip_affixes(name), x, y)),
    )


def describe_mixing(name: str, x: Tensor, y: Tensor) -> str:
    """Return a function's name, with what it does where it mixes the heads of scores or weights x."""
    return f"{name}, which mixes the heads," if x.dim() > 2 and x.shape == y.shape else name


def has_projection(module: nn.Module) -> bool:
    """Return whether a module that cannot attend has a layer that may mix heads: others, as a bias of positions, do not."""
    return any(isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) for part in module.modules())


def is_head_mixing(x: Tensor, y: Tensor, weights: list[Tensor]) -> bool:
    """Return whether small matrices mixed the heads of scores or weights, which then keep their shape."""
    return sorted(x.shape) == sorted(y.shape) and all(one.numel() <= MAX_MIXING_ENTRIES for one in weights)

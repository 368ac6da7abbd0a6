"""States that a module is given and that its queries read, beside the scores of the tokens of a call."""

import weakref

from torch import Tensor, nn

from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.handwritten.ancestors.ancestor_search import MAX_STEPS, TensorRef, walk_back
from regard.observe.interception.handwritten.ancestors.layouts import is_layout, skip_layouts
from regard.observe.interception.provenance import TOKEN, ModuleFrame

Product = tuple[TensorRef, ...]  # its operands
READ_STATE = (
    "what its queries read from a state that the module was given is added to its output: the map is of the tokens of one call "
    "alone, as in chunks of tokens of which each is a call"
)


def reads_given_state(frame: ModuleFrame, x: Tensor, others: list[Tensor], products: list[Product]) -> bool:
    """Return whether something that x is added to is a product of tokens with a state: an argument that neither was made of.

    It is one of some tensors, or the product of the operands of one of some products.
    """
    products = [*products, *(found for y in others if (found := find_product(frame, y)) is not None)]
    for operands in products:
        arguments = [find_argument(frame, one) for one in operands]
        for n, argument in enumerate(arguments):
            state = None if argument is None else argument()
            made = [weakref.ref(x), *operands[:n], *operands[n + 1 :]]
            if state is not None and not is_made_of(frame, made, state) and bool(state.any()):
                return True
    return False


def find_product(frame: ModuleFrame, x: Tensor) -> Product | None:
    """Return the tokens, or tokens and a held state, whose product x is, up to factors of entries; None if it is none."""
    one = weakref.ref(x)
    for _ in range(MAX_STEPS):
        maker = skip_layouts(frame, one)
        if maker is None or not maker.given:
            return None
        if infer_role(maker.name) is Role.PRODUCT and maker.child is None:
            are_tokens = [frame.find_contents(given) == TOKEN for given in maker.given]
            others = [given for given, is_token in zip(maker.given, are_tokens, strict=True) if not is_token]
            return (*maker.given,) if any(are_tokens) and all(is_held(frame, given) for given in others) else None
        if infer_role(maker.name) is not Role.MULTIPLY:
            return None
        one = maker.given[maker.sizes.index(max(maker.sizes))]
    return None


def is_made_of(frame: ModuleFrame, tensors: list[TensorRef], x: Tensor) -> bool:
    """Return whether any of some tensors was made of x in a module."""
    starts = [(one, 0) for one in tensors]
    return any(one is weakref.ref(x) for _, (one, _), _ in walk_back([frame], starts, lambda *_: True))


def find_argument(frame: ModuleFrame, x: TensorRef) -> TensorRef | None:
    """Return the argument or held state of a module that a tensor is, in any layout; None for a tensor that it has computed."""
    for _ in range(MAX_STEPS):
        makers = [maker for maker in frame.find_makers(x) if not (maker.given and maker.given[0] is x)]
        if not makers:
            return x if any(x is weakref.ref(given) for given in frame.input_tensors) or is_held(frame, x) else None
        if not is_layout(makers[-1]):
            return None
        x = makers[-1].given[0]
    return None


def is_held(frame: ModuleFrame, x: TensorRef) -> bool:
    """Return whether a tensor may be a state that a module holds from an earlier call: a matrix for each row, no parameter."""
    y = x()
    if y is None or isinstance(y, nn.Parameter) or not y.is_floating_point() or y.dim() < 3:
        return False
    return not frame.find_makers(x) and not any(x is weakref.ref(given) for given in frame.input_tensors)

"""Measure who sees whom: how strongly each output depends on each token, by gradients and by changing tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.examination.subject.adapters import SubjectError
from regard.examination.subject.restore_state import seed_generators

Context = Callable[..., Tensor]  # inputs -> (b, t, c)
Inputs = tuple[Tensor, ...]

SIZES = (1 / 64, 1 / 8, 1.0, 4.0)  # of inputs: with small ones every visible key has weight
MORE = (1.0,) * 12  # of further inputs, of which half leave out a pair
PARALLEL, FAINT = 0.99, 1e-4


@dataclass(frozen=True, eq=False)
class Dependency:
    """How much each output depends on each token: strength (b, q, b, k), relative to its row's largest; NaN if not measured.

    `own` is whether attention itself passes on each token's own value; None if that cannot be distinguished from a residual.
    """

    strength: Tensor
    threshold: float
    how: str
    passes_own_value: bool | None = None

    @property
    def visible(self) -> Tensor:
        """Who sees whom within each sequence: bool (b, q, k)."""
        return self.within_sequence > self.threshold

    @property
    def within_sequence(self) -> Tensor:
        """The strengths within each sequence, (b, q, k)."""
        return torch.stack([self.strength[b, :, b] for b in range(len(self.strength))])

    @property
    def across_sequences(self) -> Tensor:
        """The largest strength of each sequence's tokens on the outputs of each other sequence, (b, b); 0 on the diagonal."""
        largest = self.strength.nan_to_num().amax((1, 3))
        return largest.fill_diagonal_(0)

    @property
    def measured_rows(self) -> Tensor:
        """Which rows were measured, bool (b, q)."""
        return ~self.strength.isnan().any(-1).any(-1)


def measure_by_gradient(context: Context, make: Callable[[int, float], Inputs], rows: Sequence[int]) -> Tensor | None:
    """Compute the norm of each output's gradient on each token, (b, q, b, k), relative to the largest in its row.

    The result is the largest over several sizes and seeds, and over more of them if different pairs have no gradient for
    different inputs, as behind a ReLU; rows that are not in `rows` are NaN. None without a gradient.
    """
    strengths: list[Tensor] = []
    for seed, size in enumerate((*SIZES, *MORE)):
        if seed == len(SIZES) and not has_changing_zeros(strengths):
            break
        inputs = tuple(x.requires_grad_() for x in make(seed, size))
        y = context(*inputs)
        if not y.requires_grad:
            return None
        strengths.append(normalize_rows(compute_gradient_norms(y, inputs, rows, seed)))
    return take_largest(strengths)


def has_changing_zeros(strengths: Sequence[Tensor]) -> bool:
    """Return whether a mask alone does not explain which strengths are exactly 0: they differ from input to input."""
    zeros = [one == 0 for one in strengths]
    return any(not torch.equal(one, zeros[0]) for one in zeros)


def compute_gradient_norms(y: Tensor, inputs: Inputs, rows: Sequence[int], seed: int) -> Tensor:
    """Compute the norm of the gradient of each output (b, q) in a random direction on each token, (b, q, b, k).

    Sequences that do not depend on one another share a backward pass for each row.
    """
    strength = torch.full((*y.shape[:2], len(inputs[0]), inputs[-1].shape[-2]), torch.nan, dtype=torch.float64)
    along = y @ draw_direction(y, seed)
    if are_sequences_independent(along, inputs):
        strength[:, list(rows)] = 0.0
        for i in rows:
            norms = compute_token_norms(compute_token_gradients(along[:, i].sum(), inputs))
            strength[:, i].diagonal(dim1=0, dim2=1).copy_(norms.mT)
        return strength
    for b in range(len(y)):
        for i in rows:
            strength[b, i] = compute_token_norms(compute_token_gradients(along[b, i], inputs))
    return strength


def are_sequences_independent(along: Tensor, inputs: Inputs) -> bool:
    """Return whether the gradient of each sequence's outputs (b, q), at random factors, is zero on the tokens of all others."""
    factors = torch.randn(along.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(along)
    for b in range(len(along)):
        norms = compute_token_norms(compute_token_gradients(along[b] @ factors, inputs))
        if bool((norms[torch.arange(len(norms)) != b] != 0).any()):  # NaN too
            return False
    return True


def compute_token_gradients(value: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    """Compute the gradient of a number on the tokens: on x, or on keys and values; zeros where it does not depend on them.

    Raises SubjectError if the backward pass raises.
    """
    tokens = inputs if len(inputs) == 1 else inputs[1:]
    if not value.requires_grad:
        return tuple(torch.zeros_like(x) for x in tokens)
    try:
        return torch.autograd.grad(value, tokens, retain_graph=True, materialize_grads=True)
    except Exception as error:  # a kernel without a gradient, or a user's own backward
        raise SubjectError("the backward pass", error) from error


def compute_token_norms(slopes: Sequence[Tensor]) -> Tensor:
    """Compute the norm of each token's gradient, (b, k), over widths and heads."""
    total = torch.zeros(())
    for slope in slopes:
        squares = slope.detach().double().square().sum(-1)  # (b, k) or (b, g, k)
        total = total + (squares if squares.dim() == 2 else squares.sum(1))
    return total.sqrt().cpu()


def measure_by_change(context: Context, make: Callable[[int, float], Inputs], columns: Sequence[int]) -> Tensor:
    """Compute how far each output moves if a token is replaced, (b, q, b, k), relative to the farthest in its row.

    Moves that may be rounding are 0.
    """
    strengths = []
    for seed, size in ((11, 1 / 8), (12, 1.0)):
        inputs, other = make(seed, size), make(seed + 100, size)
        with torch.no_grad():
            seed_generators(seed, inputs[0].device)
            y = context(*inputs).double()
            moves = torch.full((*y.shape[:2], len(inputs[0]), inputs[-1].shape[-2]), torch.nan, dtype=torch.float64)
            for b in range(len(inputs[0])):
                for j in columns:
                    seed_generators(seed, y.device)  # the same random numbers as before
                    change = (context(*replace_token(inputs, other, b, j)).double() - y).abs().amax(-1)  # (b, q)
                    change = torch.where(y.isfinite().all(-1), change.nan_to_num(nan=torch.inf), torch.nan)
                    moves[:, :, b, j] = torch.where(
                        change > estimate_rounding(inputs[0].dtype) * y.abs().amax(-1), change, 0 * change
                    ).cpu()
        strengths.append(normalize_rows(moves))
    return take_largest(strengths)


def replace_token(inputs: Inputs, other: Inputs, b: int | slice, j: int) -> Inputs:
    """Return inputs with token j of sequence b, or of several, its x or its key and value, taken from `other`."""
    tokens = []
    for n, (x, instead) in enumerate(zip(inputs, other, strict=True)):
        if len(inputs) == 1 or n:
            x = x.clone()
            x[b, ..., j, :] = instead[b, ..., j, :]
        tokens.append(x)
    return tuple(tokens)


def measure_difference(one: Tensor, other: Tensor, dtype: torch.dtype | None = None, times: float = 1.0) -> float:
    """Return how far two contexts differ: 0 if that may be `times` a rounding in `dtype`, by default their own.

    Infinite for two shapes.
    """
    if one.shape != other.shape:
        return torch.inf
    change = float((one - other).abs().nan_to_num().max())
    noise = times * estimate_rounding(dtype or one.dtype) * float(one.abs().nan_to_num().max())
    return change if change > noise else 0.0


def estimate_rounding(dtype: torch.dtype) -> float:
    """Return the change, relative to an output's largest number, below which it may be rounding."""
    return torch.finfo(dtype).eps * (4 if torch.finfo(dtype).bits == 16 else 16)


def get_gradient_threshold(dtype: torch.dtype) -> float:
    """Return the strength, relative to the largest in its row, below which a gradient may be rounding."""
    return {torch.float64: 1e-11, torch.float32: 1e-5}.get(dtype, 0.0)


def normalize_rows(strength: Tensor) -> Tensor:
    """Divide each row by its largest number; a row of zeros stays, an infinite entry becomes 1, and NaN means not measured."""
    top = strength.flatten(2).amax(-1).clamp_min(torch.finfo(torch.float64).tiny)[..., None, None]
    infinite = strength == torch.inf
    return torch.where(infinite, 1.0, strength / top.masked_fill(top == torch.inf, 1.0))


def take_largest(measurements: Sequence[Tensor]) -> Tensor:
    """Return the largest of several measurements, ignoring NaN."""
    largest = measurements[0]
    for one in measurements[1:]:
        largest = torch.fmax(largest, one)
    return largest


def can_pass_own_value(context: Context, make: Callable[[int, float], Inputs], b: int, row: int) -> bool | None:
    """Return whether attention passes on a token's own value: its gradient is then parallel to those of other tokens.

    With small inputs the weights hardly move, and each token's gradient is its weight times a map that all tokens share; a
    residual adds something else to the own one, and only the query is left of it if attention leaves it out. None if neither is
    clear.
    """
    inputs = tuple(x.requires_grad_() for x in make(21, SIZES[0] / 16))
    y = context(*inputs)
    (slope,) = compute_token_gradients(y[b, row] @ draw_direction(y, 21), inputs)
    own, others = slope[b, row].double(), torch.cat((slope[b, :row], slope[b, row + 1 :])).double()
    if not len(others) or not own.isfinite().all():
        return None
    other = others[others.norm(dim=-1).argmax()]
    if own.norm() < FAINT * other.norm():
        return False
    return True if float(torch.cosine_similarity(own, other, 0, 1e-300)) > PARALLEL else None


def draw_direction(y: Tensor, seed: int) -> Tensor:
    """Return a random direction of outputs, (c,)."""
    draw = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(y.shape[-1], generator=draw, dtype=torch.float64).to(y.device, y.dtype)

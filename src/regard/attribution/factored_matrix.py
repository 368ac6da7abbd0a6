"""FactoredMatrix: a large matrix of small rank as the product of two factors, which is never multiplied out."""

from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.map.indexing import is_single, select_places
from regard.map.plane import BLOCK_NUMBERS
from regard.mechanism.arguments import check_count, check_floating, describe_value


@dataclass(frozen=True, eq=False)
class FactoredMatrix:
    """A = left @ right, (n, m), of which only left (n, e) and right (e, m) are stored.

    A[rows] are rows, by an int, a slice, a list or a tensor; A @ x and x @ A are products with vectors and matrices, and A @ B
    with another factored matrix is one again. Raises ShapeError for what does not fit.
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        left, right = check_floating("left", self.left), check_floating("right", self.right)
        if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0] or left.dtype != right.dtype:
            came = f"{describe_value(left)} and {describe_value(right)}"
            raise ShapeError(f"left must be (n, e) and right (e, m), of one dtype; got {came}.")

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (n, m)."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def T(self) -> "FactoredMatrix":
        """The transpose (m, n)."""
        return FactoredMatrix(self.right.T, self.left.T)

    def __getitem__(self, rows: Any) -> Tensor:
        """Return a row (m,) by an int, and rows (r, m) by a slice, a list or a tensor of ints or bools."""
        if isinstance(rows, tuple):
            raise ShapeError(f"A[rows] takes one index, of rows, got {len(rows)}: the entry (i, j) is A[i][j].")
        found = self.left[select_places("a row", rows, self.shape[0]).to(self.left.device)] @ self.right
        return found[0] if is_single(rows) else found

    def __matmul__(self, x: Union[Tensor, "FactoredMatrix"]) -> Any:
        """Compute A x, (n,) or (n, k), of x (m,) or (m, k); of a factored matrix, a factored matrix."""
        if isinstance(x, FactoredMatrix) and x.shape[0] == self.shape[1]:
            return FactoredMatrix(self.left, (self.right @ x.left.to(self.right)) @ x.right.to(self.right))
        if not isinstance(x, Tensor) or x.dim() not in (1, 2) or x.shape[0] != self.shape[1]:
            raise ShapeError(f"A @ x needs x ({self.shape[1]},) or ({self.shape[1]}, k), got {describe_value(x)}.")
        return self.left @ (self.right @ x.to(self.right))

    def __rmatmul__(self, x: Tensor) -> Tensor:
        """Compute x A, (m,) or (k, m), of x (n,) or (k, n)."""
        if not isinstance(x, Tensor) or x.dim() not in (1, 2) or x.shape[-1] != self.shape[0]:
            raise ShapeError(f"x @ A needs x ({self.shape[0]},) or (k, {self.shape[0]}), got {describe_value(x)}.")
        found: Tensor = (x.to(self.left) @ self.left) @ self.right
        return found

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compute U (n, r), S (r,) and Vh (r, m) of A = U diag(S) Vh, with r ≤ e, through QR of the factors, O((n + m) e²)."""
        (q_left, r_left), (q_right, r_right) = torch.linalg.qr(self.left), torch.linalg.qr(self.right.T)
        u, s, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
        return q_left @ u, s, vh @ q_right.T

    def eigenvalues(self) -> Tensor:
        """Compute the e eigenvalues of right @ left, complex128: those of A, whose others are 0. A must be square."""
        if self.shape[0] != self.shape[1]:
            raise ShapeError(f"only a square matrix has eigenvalues, got (n, m) = {self.shape}.")
        found: Tensor = torch.linalg.eigvals((self.right.double() @ self.left.double()).cpu())
        return found

    def top(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the n entries that are largest in size, with their signs, and their rows and columns, all (n,), largest first.

        Computes a block of rows at a time.
        """
        rows, columns = self.shape
        n = check_count("n", n, most=rows * columns)
        step = max(1, BLOCK_NUMBERS // max(1, columns))
        kept, places = self.left.new_empty(0), torch.empty(0, dtype=torch.int64, device=self.left.device)
        for start in range(0, rows, step):
            entries = (self.left[start : start + step] @ self.right).flatten()
            low, high = entries.aminmax()
            if len(kept) == n and max(-low, high) <= kept[-1].abs():
                continue
            is_smaller = entries.abs() <= kept[-1].abs() if len(kept) == n else torch.zeros_like(entries, dtype=torch.bool)
            chosen = (~is_smaller).nonzero().flatten()  # with NaN
            kept, places = torch.cat([kept, entries[chosen]]), torch.cat([places, chosen + start * columns])
            order = kept.abs().topk(min(n, len(kept))).indices
            kept, places = kept[order], places[order]
        return kept, places // columns, places % columns

    def __repr__(self) -> str:
        stored = (self.left.nbytes + self.right.nbytes) / 1e6
        return f"FactoredMatrix{self.shape}, of rank {self.left.shape[1]} at most, {stored:.3g} MB stored"

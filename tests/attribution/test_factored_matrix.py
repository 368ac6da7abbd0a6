"""Factored matrices beside the same matrices multiplied out."""

import pytest
import torch

from regard.attribution import factored_matrix
from regard.attribution.factored_matrix import FactoredMatrix
from regard.errors import ConfigError, OutOfRangeError, ShapeError
from regard.map import plane

EQUAL = {"rtol": 1e-10, "atol": 1e-10}  # float64, sums of few terms


def make(n, m, e=3):
    torch.manual_seed(n)
    return FactoredMatrix(torch.randn(n, e, dtype=torch.float64), torch.randn(e, m, dtype=torch.float64))


def multiply(a):
    return a.left @ a.right


@pytest.mark.parametrize("rows", [2, -1, slice(1, 5), [0, 6, 0], torch.tensor([3, 1]), torch.arange(7) % 2 == 0])
def test_rows_are_those_of_the_dense_matrix(rows):
    a = make(7, 11)
    torch.testing.assert_close(a[rows], multiply(a)[rows], **EQUAL)


def test_products_with_vectors_matrices_and_factored_matrices_are_those_of_the_dense_matrix():
    a, b = make(7, 11), make(11, 5, 2)
    for x in (torch.randn(11, dtype=torch.float64), torch.randn(11, 4, dtype=torch.float64)):
        torch.testing.assert_close(a @ x, multiply(a) @ x, **EQUAL)
        turned = x.T if x.dim() == 2 else x
        torch.testing.assert_close(turned @ a.T, turned @ multiply(a).T, **EQUAL)
    both = a @ b
    assert both.shape == (7, 5)
    torch.testing.assert_close(both[:], multiply(a) @ multiply(b), **EQUAL)


@pytest.mark.parametrize(("n", "m", "e"), [(7, 11, 3), (11, 7, 3), (3, 5, 7)])
def test_the_singular_value_decomposition_is_that_of_the_dense_matrix(n, m, e):
    a = make(n, m, e)
    u, s, vh = a.svd()
    rank = min(n, m, e)
    assert s.shape == (rank,)
    torch.testing.assert_close(s, torch.linalg.svdvals(multiply(a))[:rank], **EQUAL)
    torch.testing.assert_close(u * s @ vh, multiply(a), **EQUAL)
    torch.testing.assert_close(u.T @ u, torch.eye(rank, dtype=torch.float64), **EQUAL)
    torch.testing.assert_close(vh @ vh.T, torch.eye(rank, dtype=torch.float64), **EQUAL)


def test_the_eigenvalues_are_those_of_the_dense_matrix_that_are_not_zero():
    a = make(11, 11)
    dense = torch.linalg.eigvals(multiply(a))
    largest = dense[dense.abs().argsort(descending=True)[:3]]
    found = a.eigenvalues()
    distances = (found.unsqueeze(-1) - largest).abs()
    assert float(distances.amin(0).max()) < 1e-9
    assert float(distances.amin(1).max()) < 1e-9
    with pytest.raises(ShapeError, match="square"):
        make(7, 11).eigenvalues()


@pytest.mark.parametrize("block", [1, 12, 23, plane.BLOCK_NUMBERS])
@pytest.mark.parametrize("n", [1, 9, 77])
def test_the_top_entries_are_those_of_the_dense_matrix_in_blocks_of_any_size(monkeypatch, block, n):
    monkeypatch.setattr(factored_matrix, "BLOCK_NUMBERS", block)
    a = make(7, 11)
    entries, rows, columns = a.top(n)
    dense = multiply(a)
    torch.testing.assert_close(entries, dense[rows, columns], **EQUAL)
    torch.testing.assert_close(entries.abs(), dense.abs().flatten().topk(n).values, **EQUAL)
    assert len({*zip(rows.tolist(), columns.tolist(), strict=True)}) == n


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda a: FactoredMatrix(a.left, a.left), ShapeError),
        (lambda a: FactoredMatrix(a.left, a.right.float()), ShapeError),
        (lambda a: FactoredMatrix(a.left, "right"), ConfigError),
        (lambda a: a @ torch.ones(7), ShapeError),
        (lambda a: a @ 3, ShapeError),
        (lambda a: a @ a, ShapeError),
        (lambda a: torch.ones(11) @ a, ShapeError),
        (lambda a: a[7], OutOfRangeError),
        (lambda a: a["row"], ConfigError),
        (lambda a: a.top(0), ConfigError),
        (lambda a: a.top(78), ConfigError),
    ],
)
def test_what_does_not_fit_is_refused(call, error):
    with pytest.raises(error):
        call(make(7, 11))

import pytest
import torch
from torch import nn

from examination.identify.layers import C, Conv1D, PerHead
from regard.examination.identify.affine import concatenate_outputs, find_matrices

OUT, B = 7, 5


def list_matrices(module):
    return list(find_matrices(module, C))


def x():
    return torch.randn(B, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    ("module", "forward"),
    [
        (nn.Linear(C, OUT), lambda m, x: m(x)),
        (nn.Linear(C, C, bias=False), lambda m, x: m(x)),
        (Conv1D(OUT, C), lambda m, x: m(x)),
        (nn.Conv1d(C, OUT, 1), lambda m, x: m(x[..., None])[..., 0]),
    ],
)
def test_a_matrix_is_the_layer_that_holds_it(module, forward):
    (one,) = list_matrices(nn.Sequential(module.double()))
    assert one.name == "0"
    torch.testing.assert_close(one(x()), forward(module, x()))


def test_plain_parameters_are_found_either_way_round_with_their_biases():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.W_query = nn.Parameter(torch.randn(C, OUT))
            self.b_query = nn.Parameter(torch.randn(OUT))
            self.in_proj_weight = nn.Parameter(torch.randn(OUT, C))
            self.in_proj_bias = nn.Parameter(torch.randn(OUT))

    module = Bare().double()
    query, stacked = list_matrices(module)
    torch.testing.assert_close(query(x()), x() @ module.W_query + module.b_query)
    torch.testing.assert_close(stacked(x()), nn.functional.linear(x(), module.in_proj_weight, module.in_proj_bias))


def test_parameters_with_an_axis_for_heads_have_the_heads_side_by_side():
    module = PerHead().double()
    q, _, _, out = list_matrices(module)
    assert q.heads == len(module.W_Q)
    each = torch.einsum("bc,hcd->bhd", x(), module.W_Q) + module.b_Q
    torch.testing.assert_close(q(x()), each.flatten(1))
    torch.testing.assert_close(out(x()), torch.einsum("bhd,hdc->bc", x().unflatten(-1, (len(module.W_O), -1)), module.W_O))


def test_norms_and_embeddings_are_no_matrices():
    assert not list_matrices(nn.Sequential(nn.LayerNorm(C), nn.Embedding(OUT, C), nn.Dropout()))


def test_matrices_side_by_side_give_their_outputs_side_by_side():
    one, other = list_matrices(nn.Sequential(nn.Linear(C, OUT).double(), nn.Linear(C, 3, bias=False).double()))
    torch.testing.assert_close(concatenate_outputs([one, other])(x()), torch.cat((one(x()), other(x())), -1))


def test_a_matrix_is_a_copy_in_float64_outside_of_any_graph():
    module = nn.Linear(C, OUT)
    (one,) = list_matrices(nn.Sequential(module))
    assert one.weight.dtype == torch.float64
    assert not one.weight.requires_grad

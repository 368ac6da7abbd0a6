"""The slice of a projection that each head comes from is found by norms, and said to be unknown where all norms are equal."""

import torch
import torch.nn.functional as F

from regard.examination.projection_source import ModuleOutput, find_source


def test_the_slices_of_heads_are_found_in_their_order_through_a_factor():
    y = torch.randn(2, 7, 4, 5, generator=torch.Generator().manual_seed(3))
    source = find_source(3 * y.flip(2).transpose(1, 2), [ModuleOutput("k_proj", y.flatten(2))])
    assert source.slices == (3, 2, 1, 0)
    assert source.slice_count == 4
    assert abs(source.factor - 3) < 7 * 5 * torch.finfo(torch.float32).eps * 3


def test_slices_of_one_norm_are_not_told_apart():
    y = F.normalize(torch.randn(2, 7, 4, 5, generator=torch.Generator().manual_seed(3)), dim=-1)
    source = find_source(y.transpose(1, 2), [ModuleOutput("k_norm", y.flatten(2))])
    assert source.name == "k_norm"
    assert source.slice_count == 0

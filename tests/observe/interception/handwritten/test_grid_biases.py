"""Learned numbers of offsets in an image are stored by these offsets, not for each query and key."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import record_stored_bias
from regard.map.grid_bias import GridBias

B, H, D, ROWS, COLUMNS = 2, 3, 5, 8, 9
FORMS = ("windows", "class token", "absolute offsets", "absolute offsets, subsampled", "a kernel")


class OfOffsets(nn.Module):
    """Attention of an image with a number for each head and offset, with its own weights kept.

    That of windows is Swin's, with a class token BEiT's; by the sizes of offsets it is LeViT's and EfficientFormer's.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.project = form, nn.Linear(H * D, 3 * H * D)
        self.first = int(form == "class token")
        self.table = nn.Parameter(torch.randn(4 * ROWS * COLUMNS + 3, H))
        self.register_buffer("index", self.find_offsets())

    def find_offsets(self) -> Tensor:
        """The index (q, k) of the table for each pair of pixels, and of a class token before them."""
        places = torch.stack(torch.meshgrid(torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")).flatten(1)
        offsets = places.unsqueeze(1) - places.unsqueeze(2)
        if self.form.startswith("absolute"):
            offsets = offsets.abs()
        y, x = offsets + torch.tensor([ROWS, COLUMNS]).view(2, 1, 1)
        index = F.pad(y * 2 * COLUMNS + x, (self.first, 0, self.first, 0), value=4 * ROWS * COLUMNS)
        if self.first:
            index[0, 0], index[1:, 0] = 4 * ROWS * COLUMNS + 1, 4 * ROWS * COLUMNS + 2
        return index

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        index = self.index
        if self.form.endswith("subsampled"):
            q = q.unflatten(2, (ROWS, COLUMNS))[:, :, ::2, ::2].flatten(2, 3)
            index = index.unflatten(0, (ROWS, COLUMNS))[::2, ::2].flatten(0, 1)
        bias = self.table[index].permute(2, 0, 1).unsqueeze(0)
        self.weights = (q @ k.mT * D**-0.5 + bias).softmax(-1)
        if self.form == "a kernel":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        return (self.weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_offsets_are_stored_once(form, in_float64, tmp_path):
    torch.manual_seed(7)
    layer = OfOffsets(form)
    x = torch.randn(B, ROWS * COLUMNS + layer.first, H * D)
    recording = record_stored_bias(nn.Sequential(layer), x, GridBias, tmp_path)
    bias, step = recording.map(0).planes.request.bias, 1 + form.endswith("subsampled")
    offsets = (ROWS - ROWS % step + ROWS - step + ROWS % step) * (2 * COLUMNS - 1)
    assert bias.nbytes == 8 * H * (offsets + layer.first * (2 * x.shape[1] - 1))

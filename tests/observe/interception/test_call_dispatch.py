"""Reasons why calls could not be read are sentences of regard, or the beginning of another library's error."""

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import record_and_compare
from regard.observe.interception.call_dispatch import MOST_CHARACTERS, explain_error
from regard.observe.interception.plain_tensors import UnreadableError


def test_a_long_error_of_another_library_is_cut_and_one_of_regard_is_whole():
    foreign = explain_error(NotImplementedError("could not run " * 40 + "\nwith a second line"))
    assert foreign.startswith("its arguments could not be read (NotImplementedError: could not run")
    assert foreign.endswith(" ...)")
    assert len(foreign) <= len("its arguments could not be read ()") + MOST_CHARACTERS
    assert explain_error(UnreadableError("own " * 100)) == "own " * 100
    assert explain_error(ValueError("short")) == "its arguments could not be read (ValueError: short)"


class SparseWeights(nn.Module):
    """Weights that are put into a sparse tensor before they are multiplied with the values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.q(x) @ self.k(x).mT).softmax(-1).to_sparse()
        return torch.stack([torch.sparse.mm(own, values) for own, values in zip(weights, x, strict=True)])


@pytest.mark.filterwarnings("ignore:not recorded")
def test_weights_in_a_sparse_tensor_are_missed():
    recording, _ = record_and_compare(nn.Sequential(SparseWeights()), lambda m: m(torch.randn(2, 5, 8)), missing=True)
    assert [one.module for one in recording.missed] == ["0"]

"""A stream that predicts sees earlier tokens and a key of its own: its bias by spans of distances is stored by these alone."""

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import record_stored_bias
from regard.map.distance_products import DistanceProducts

B, H, D, SPANS = 2, 3, 5, (1, 2, 4, 8)


class PredictStream(nn.Module):
    """ProphetNet's: one number of each query for each span of distances, and a key of its own behind those of the text."""

    def __init__(self, hides: float) -> None:
        super().__init__()
        self.project, self.spans, self.hides = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * (len(SPANS) + 1)), hides

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        t = x.shape[1]
        q, x = q[:, :, : t // 2], x[:, : t // 2]
        places, keys = torch.arange(t // 2).unsqueeze(-1), torch.arange(t)
        distances = (places - keys % (t // 2)).abs() + (keys >= t // 2)  # of keys behind them, that of the token before
        buckets = torch.bucketize(distances, torch.tensor(SPANS), right=True)
        numbers = self.spans(x).unflatten(-1, (H, -1)).transpose(1, 2)
        bias = numbers.gather(-1, buckets.expand(B, H, -1, -1))
        hidden = torch.where(keys < t // 2, keys > places, keys != places + t // 2)
        self.weights = (q @ k.mT / D**0.5 + bias + torch.zeros(hidden.shape).masked_fill(hidden, self.hides)).softmax(-1)
        return (self.weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("hides", [-torch.inf, -1e9])
def test_the_numbers_of_a_stream_that_predicts_take_memory_that_grows_with_the_length(hides, in_float64, tmp_path):
    torch.manual_seed(7)
    kept = []
    for t in (106, 212):
        x = torch.randn(B, t, H * D)
        recording = record_stored_bias(nn.Sequential(PredictStream(hides)), x, DistanceProducts, tmp_path)
        kept.append(recording.map(0).planes.request.bias.nbytes)
    assert kept[1] <= 2 * kept[0] + 8 * 8

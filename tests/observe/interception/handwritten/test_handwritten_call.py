"""Reading calls of attention that is written out by hand costs little: what layers share is computed once."""

import torch
from torch import Tensor, nn

from observe.interception.handwritten.handwritten_attention import B, C, Own, T
from regard.mechanism.mask_algebra import Mask
from regard.observe import record


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as lecture notes write it."""
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    weights = ((q @ k.mT).masked_fill(hidden, -torch.inf) / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def make_layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(Own(attend_causally) for _ in range(count))).double()


def run_recorded(model: nn.Module) -> None:
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(B, T, C, dtype=torch.float64))
    assert not recording.missed
    assert not recording.notes


def test_layers_with_equal_masks_compute_the_keys_that_it_hides_once(monkeypatch):
    blocks = []
    block = Mask.block
    monkeypatch.setattr(Mask, "block", lambda self, *args: blocks.append(self) or block(self, *args))
    counts = []
    for layers in (1, 3):
        blocks.clear()
        run_recorded(make_layers(layers))
        counts.append(len(blocks))
    assert 0 < counts[0] == counts[1]


def attend_by_sigmoids(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Additive scores, whose sigmoids are divided by their sums: the functions of the note, among others that move axes."""
    scores = (q.unsqueeze(-2) + k.unsqueeze(-3)).tanh().sum(-1, keepdim=True).squeeze(-1).contiguous()
    gates = scores.mT.contiguous().mT.sigmoid()
    return (gates / gates.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)


def test_notes_name_no_functions_that_only_change_the_layout_of_scores():
    model = Own(attend_by_sigmoids).double()
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(B, T, C, dtype=torch.float64))
    (note,) = recording.notes
    assert "its scores are made by another function than a product and sigmoid and div, so" in note

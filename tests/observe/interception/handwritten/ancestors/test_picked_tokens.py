"""Pooling of the tokens of the largest scores has a map over all tokens, in which the others have no weight."""

import pytest
import torch
from torch import Tensor, nn

import regard
from observe.recording_checks import EQUAL, record_and_compare
from regard.observe.attention_changes import CutEdges
from regard.observe.interception.handwritten.softmax.picked_call import POOLED

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, K, EXPERTS = 3, 7, 8, 3, 5


class TopPooling(nn.Module):
    """A softmax of the largest scores weighs the tokens that have them; `weights` are those of the last forward, (b, t)."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.score, self.value = style, nn.Linear(C, 1), nn.Linear(C, C)

    def pick(self, x: Tensor, index: Tensor) -> Tensor:
        if self.style == "taken":
            return torch.take_along_dim(x, index.unsqueeze(-1), 1)
        if self.style == "pairs of indices":
            return x[torch.arange(len(x)).unsqueeze(1), index]
        return x.gather(1, index.unsqueeze(-1).expand(-1, -1, C))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        if self.style == "sorted scores":
            largest, index = scores.sort(-1)
            weights = largest.softmax(-1)
        elif self.style == "scores looked up":
            index = scores.topk(K, 1).indices
            weights = scores.gather(1, index).softmax(-1)
        elif self.style == "order of the scores":
            index = scores.argsort(-1, descending=True)[:, :K]
            weights = scores.gather(1, index).softmax(-1)
        elif self.style == "largest weights":
            largest, index = scores.softmax(-1).topk(K, dim=-1)
            weights = largest / largest.sum(-1, keepdim=True)
        else:
            largest, index = scores.topk(K, 1)
            weights = largest.softmax(-1)
        self.weights = torch.zeros(B, T).scatter(1, index, weights.detach())
        picked = self.pick(self.value(x) if self.style == "values" else x, index)
        picked = self.value(picked) if self.style == "values of the picked" else picked
        if self.style == "another order":
            picked = picked.flip(1)
        return weights.unsqueeze(1) @ picked if self.style == "product" else (weights.unsqueeze(-1) * picked).sum(1)


class TopOfBag(nn.Module):
    """The same for the instances of one bag."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(C, 1)

    def forward(self, x: Tensor) -> Tensor:
        largest, index = self.score(x).squeeze(-1).topk(K)
        self.weights = torch.zeros(1, T).scatter(1, index.unsqueeze(0), largest.softmax(0).detach().unsqueeze(0))
        return largest.softmax(0) @ x[index]


STYLES = ["gathered", "taken", "product", "values", "values of the picked", "largest weights"]
STYLES += ["sorted scores", "scores looked up", "order of the scores"]


@pytest.mark.parametrize("style", [*STYLES, "bag"])
def test_pooling_of_the_largest_scores_is_recorded_over_all_tokens(style):
    model = TopOfBag() if style == "bag" else TopPooling(style)
    x = torch.randn(T, C) if style == "bag" else torch.randn(B, T, C)
    recording, output = record_and_compare(model, lambda m: m(x))
    torch.testing.assert_close(recording.map(0).dense()[:, 0, 0], model.weights, rtol=0, atol=EQUAL)
    assert POOLED in recording.notes[0]
    values = model.value(x) if "values" in style else x
    torch.testing.assert_close((model.weights.unsqueeze(1) @ values).view(output.shape), output, rtol=0, atol=EQUAL)


@pytest.mark.parametrize("style", ["pairs of indices", "another order"])
def test_picked_tokens_whose_places_are_not_known_are_missed(style):
    recording, _ = record_and_compare(TopPooling(style), lambda m: m(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert [one.reason.partition(",")[0] for one in recording.missed] == [POOLED.partition(",")[0]]


@pytest.mark.parametrize("style", ["gathered", "largest weights"])
def test_cut_tokens_are_left_out_of_the_picked_ones(style):
    model, x = TopPooling(style), torch.randn(B, T, C)
    model(x)
    cut = int(model.weights[0].argmax())
    with torch.no_grad(), regard.intervene(model, CutEdges(queries=[0], keys=[cut])):
        found = model(x)
    left = model.weights.index_fill(1, torch.tensor([cut]), 0)
    torch.testing.assert_close(found, ((left / left.sum(1, keepdim=True)).unsqueeze(-1) * x).sum(1), rtol=0, atol=EQUAL)


class ChosenExperts(nn.Module):
    """A router's largest scores weigh the experts that have them."""

    def __init__(self, normalizes: bool) -> None:
        super().__init__()
        self.router, self.experts, self.normalizes = nn.Linear(C, EXPERTS), nn.Linear(C, EXPERTS * C), normalizes

    def forward(self, x: Tensor) -> Tensor:
        scores, outputs = self.router(x), self.experts(x).unflatten(-1, (EXPERTS, C))
        largest, index = (scores.softmax(-1) if self.normalizes else scores).topk(K, -1)
        weights = largest / largest.sum(-1, keepdim=True) if self.normalizes else largest.softmax(-1)
        return (weights.unsqueeze(-1) * outputs.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, C))).sum(2)


@pytest.mark.parametrize("normalizes", [False, True])
def test_chosen_experts_are_no_tokens(normalizes):
    recording, _ = record_and_compare(ChosenExperts(normalizes), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls

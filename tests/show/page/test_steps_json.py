"""STEPS: what the Steps view is told gives, by attend, what the head and the lectures' examples have."""

import json

import pytest
import torch
from torch import nn

import regard
from bounds import assert_within
from regard.errors import DataError
from regard.lectures.examples import EXAMPLES, build_example
from regard.mechanism import Given
from regard.models import GPT2, GPT2Config
from regard.show.page.recording_entry import HeadPlace, RecordingEntry
from regard.show.page.steps_json import MAX_ROW_KEYS, compute_head_steps, get_example_steps
from show.page.step_bounds import step_bounds

MOST = 64


def entry(tokens: int, model: nn.Module | None = None) -> RecordingEntry:
    torch.manual_seed(3)
    model = model or GPT2(GPT2Config(vocabulary=31, context=257, width=22, heads=2, layers=3))
    with regard.record(model.double().eval(), keep="values") as recording, torch.no_grad():
        model(torch.randint(31, (1, tokens)))
    recording.tokens = [f" w{n}" for n in range(tokens)]
    return RecordingEntry("r1", recording)


class Biased(nn.Module):
    """Attention with a bias, of which one entry is -inf."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.q, self.k, self.v = torch.randn(3, 1, 2, 7, 5, dtype=torch.float64, generator=generator)
        self.bias = torch.randn(7, 7, dtype=torch.float64, generator=generator)
        self.bias[4, 2] = -torch.inf
        if broken:
            self.q[0, 1, 3, 2] = torch.inf

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, attn_mask=self.bias)


def compute_steps(found: dict) -> regard.Steps:
    """The steps of what STEPS tell, by attend."""
    q, k, v = (torch.tensor(found[name], dtype=torch.float64)[None] for name in ("q", "k", "v"))
    bias = None if found["bias"] is None else torch.tensor(found["bias"], dtype=torch.float64)
    sinks = None if found["sink"] is None else torch.tensor([found["sink"]], dtype=torch.float64)
    mask = Given(torch.tensor(found["visible"]))
    return regard.attend(q, k, v, mask, scale=found["scale"], softcap=found["softcap"], bias=bias, sinks=sinks)


@pytest.mark.parametrize("model", [None, Biased()], ids=["causal", "biased"])
def test_the_steps_of_a_short_text_are_those_of_its_map(model):
    one, place = entry(7, model), HeadPlace(layer=0, head=1)
    found = compute_head_steps(one, place, None, MOST)
    torch.testing.assert_close(compute_steps(found).weights[0], one.get_map(place).dense()[0, 0], rtol=0, atol=1e-12)
    assert (found["rows"], found["columns"], found["focus"]) == (
        list(one.get_axis_words(place)[0]),
        list(one.get_axis_words(place)[1]),
        6,
    )
    json.dumps(found, allow_nan=False)


def test_a_long_text_is_shown_by_one_row_whose_weights_are_those_of_the_whole():
    one, place = entry(211), HeadPlace(layer=2, head=1)
    found = compute_head_steps(one, place, 200, MOST)
    row = one.get_map(place)[0, 0, 200]
    torch.testing.assert_close(compute_steps(found).weights[0, 0], row[found["places"]], rtol=0, atol=1e-12)
    assert set(found["places"]) == set(row.topk(MAX_ROW_KEYS).indices.tolist())
    assert found["rows"] == [" w200"]
    assert found["columns"] == [f" w{place}" for place in found["places"]]
    rest = 1 - float(row[found["places"]].sum())
    assert f"{rest:.2f}" in found["notes"][0]


def test_numbers_that_json_cannot_hold_are_refused_in_words():
    with pytest.raises(DataError, match="q of this head contains numbers that are not finite"):
        compute_head_steps(entry(7, Biased(broken=True)), HeadPlace(head=1), None, MOST)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_of_the_lectures_is_described_whole(name):
    found, known = get_example_steps(name), build_example(name)
    json.dumps(found, allow_nan=False)
    assert [one["name"] for one in found["before"] + found["after"]] == [one.name for one in known.before + known.after]
    assert found["rows"] == (list(known.words) if known.steps is not None else [])


@pytest.mark.parametrize("name", ["simple", "trainable", "causal", "dog", "heads"])
def test_the_numbers_of_an_example_give_its_steps(name):
    known = build_example(name)
    for head in range(get_example_steps(name)["heads"]):
        told = get_example_steps(name, head)
        found = compute_steps(told)
        bounds = step_bounds(told, found.weights[0])
        for part, right in known.steps.items():
            right = right if right.dim() == 2 else right[head]
            assert_within(right, getattr(found, part)[0], bounds[part], part)


def test_additive_scores_are_described_as_they_are():
    torch.manual_seed(0)
    model = regard.AdditiveAttention(5, 6, 7).double()
    with regard.record(model, keep="values") as recording, torch.no_grad():
        model(torch.randn(1, 3, 5).double(), torch.randn(1, 4, 6).double())
    one, place = RecordingEntry("r1", recording), HeadPlace(kind="cross")
    found = compute_head_steps(one, place, None, MOST)
    weights = torch.tensor(found["scores"], dtype=torch.float64).mul(found["scale"]).softmax(-1)
    torch.testing.assert_close(weights, one.get_map(place).dense()[0, 0], rtol=0, atol=1e-12)
    assert len(found["weight"]) == 7
    assert found["rows"] == ["0", "1", "2"]

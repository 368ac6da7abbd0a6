"""A single row of weights that is written into, directly or through a view, is recorded as the model has it."""

import math

import pytest
import torch
from torch import Tensor, nn

import regard
from observe.recording_checks import EQUAL, record_and_compare

B, H, T, D = 2, 3, 23, 5
ROW, KEY = 9, 4  # a row that no sample of rows holds


class Own(nn.Module):
    """Heads whose weights a function makes of scores (b, h, t, t); `seen` are the weights, `off` a head without context."""

    def __init__(self, weigh):
        super().__init__()
        self.project, self.weigh, self.off = nn.Linear(H * D, 3 * H * D), weigh, None

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        self.seen = self.weigh(q @ k.mT / math.sqrt(D))
        context = self.seen @ v
        if self.off is not None:
            context = context.index_fill(1, torch.tensor(self.off), 0.0)
        return context.transpose(1, 2).flatten(2)


def fill(x: Tensor, number: float, *index: object) -> Tensor:
    x[..., *index] = number
    return x


def mark(*index: object) -> Tensor:
    return fill(torch.zeros(T, T, dtype=torch.bool), True, *index)


def fill_base(w: Tensor) -> Tensor:
    view = w.flatten(0, 1)
    fill(w, 1 / T, ROW, slice(None))
    return view.view(w.shape)


def fill_alias(w: Tensor) -> Tensor:
    fill(w.detach(), 1 / T, ROW, slice(None))
    return w


def fill_data(w: Tensor) -> Tensor:
    fill(w.data, 1 / T, ROW, slice(None))
    return w


def subtract_from_row(w: Tensor) -> Tensor:
    row = w[:, :, ROW]
    row -= row.square()
    return w


AFTER = {
    "a row is written in place": lambda w: fill(w, 1 / T, ROW, slice(None)),
    "a weight is written": lambda w: fill(w, 0.0, ROW, KEY),
    "a weight is filled": lambda w: w.masked_fill(mark(ROW, KEY), 0.0),
    "a weight is multiplied": lambda w: w * ~mark(ROW, KEY),
    "a row is chosen": lambda w: torch.where(mark(ROW, slice(None)), 1 / T, w),
    "the largest is bounded": lambda w: w.clamp(max=float(w.amax()) - 1e-3),
    "the base of a view is written": fill_base,
    "what is detached is written": fill_alias,
    "what is detached is written before dropout that is off": lambda w: nn.functional.dropout(fill_alias(w), 0.1, False),
    "the data are written": fill_data,
    "a row is subtracted from": subtract_from_row,
}
SCORES = {
    "bounded": lambda s: s.clamp(max=float(s.amax()) - 1e-3),
    "their largest with a number": lambda s: torch.maximum(s, s.amin() + 1e-3),
    "without NaN": lambda s: s.masked_fill(mark(ROW, KEY), torch.nan).nan_to_num(3.0),
    "detached and written": fill_alias,
    "added to others that are detached and written": lambda s: s + fill_alias(s.clone()),
}
FORMS = {f"softmax, {name}": lambda s, edit=edit: edit(s.softmax(-1)) for name, edit in AFTER.items()}
FORMS |= {f"scores, {name}": lambda s, edit=edit: edit(s).softmax(-1) for name, edit in SCORES.items()}
FORMS |= {
    "a causal sigmoid": lambda s: fill(s.sigmoid().tril(), 0.0, ROW, KEY),
    "a difference": lambda s: fill(s.softmax(-1) - 0.3 * s.mT.softmax(-1), 0.0, ROW, slice(None)),
    "a part of a difference": lambda s: s.softmax(-1) - 0.3 * fill(s.mT.softmax(-1), 0.0, ROW, slice(None)),
}


def build(weigh) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(Own(weigh), nn.Identity()).double()


def run(model: nn.Module, mode=torch.no_grad) -> Tensor:
    x = torch.randn(B, T, H * D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with mode():
        return model(x)


@pytest.mark.parametrize(
    ("name", "mode"), [(name, (torch.no_grad, torch.inference_mode)[n % 2]) for n, name in enumerate(FORMS)]
)
def test_a_row_that_is_edited_is_recorded_as_the_model_has_it(name, mode):
    model = build(FORMS[name])
    recording, _ = record_and_compare(model, lambda model: run(model, mode))
    (call,) = recording.calls
    assert (call.map.dense() - model[0].seen).abs().max() < EQUAL


def test_a_gate_that_is_shut_for_one_row_is_noted_and_leaves_the_context_of_other_heads():
    model = build(lambda s: s.softmax(-1) * ~mark(ROW, slice(None)))
    recording, _ = record_and_compare(model, run)
    assert "multiplied by a gate" in recording.notes[0]
    with regard.intervene(model, regard.KnockOut(layer=0, head=1)):
        changed = run(model)
    model[0].off = [1]
    assert torch.equal(changed, run(model))


SAMPLED = {  # weights without single rows that may differ
    "dropout that is off": lambda s: nn.functional.dropout(s.softmax(-1), 0.1, False),
    "a mask filled in place": lambda s: s.masked_fill_(mark(slice(None)).triu(1), -math.inf).softmax(-1),
    "a mask chosen from a table": lambda s: torch.where(mark(slice(None)).triu(1), torch.full_like(s, -math.inf), s).softmax(
        -1
    ),
    "another dtype and layout": lambda s: s.float().softmax(-1).flatten(0, 1).to(s.dtype).view(s.shape).contiguous(),
    "hidden keys that are filled again": lambda s: s.masked_fill(mark(KEY), -math.inf).softmax(-1).masked_fill(mark(KEY), 0.0),
    "a bound that hides": lambda s: s.clamp(min=-1e4).softmax(-1),
    "numbers of all rows": lambda s: 2 * s.softmax(-1) / 2,
    "bounds that no score reaches": lambda s: s.clamp(-5e4, 5e4).softmax(-1),
    "NaN that no score is": lambda s: s.nan_to_num().softmax(-1),
    "powers": lambda s: s.relu() ** 2,
}


@pytest.mark.parametrize("name", SAMPLED)
def test_weights_without_edits_keep_the_formula(name):
    recording, _ = record_and_compare(build(SAMPLED[name]), run)
    assert len(recording.calls) == 1
    assert not recording.notes

"""Attention whose scores or weights are moved entry by entry, on the way to the product with the values."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.observe import record
from regard.observe.interception.handwritten import detection
from regard.observe.interception.handwritten.scores.score_formula import STORED

B, H, T, D = 2, 3, 5, 7
ORDER = torch.tensor([3, 0, 4, 1, 2])


class Own(nn.Module):
    """q, k and v (b, h, t, d), whose context a form computes."""

    def __init__(self, form: object) -> None:
        super().__init__()
        self.project, self.form = nn.Linear(H * D, 3 * H * D, dtype=torch.float64), form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(*self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4))


def score(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(D)


def write_rows(q, k, v):
    weights = torch.empty(B, H, T, T, dtype=q.dtype)
    for i, row in enumerate(score(q, k).unbind(-2)):
        weights[:, :, i] = row.softmax(-1)
    return weights @ v


def select_causal_rows(q, k, v):
    scores = score(q, k).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    return scores.index_select(-2, ORDER).softmax(-1) @ v


KNOWN = {  # whose formula stays known
    "rolled and back": lambda q, k, v: score(q, k).roll(1, -1).softmax(-1).roll(-1, -1) @ v,
    "rolled": lambda q, k, v: score(q, k).roll(1, -1).softmax(-1) @ v.roll(1, -2),
    "flipped": lambda q, k, v: score(q, k).flip(-2).softmax(-1) @ v,
    "gathered": lambda q, k, v: score(q, k).softmax(-1).gather(-1, ORDER.expand(B, H, T, T)) @ v[:, :, ORDER],
    "selected": lambda q, k, v: score(q, k).index_select(-1, ORDER).softmax(-1) @ v[:, :, ORDER],
    "taken along": lambda q, k, v: torch.take_along_dim(score(q, k), ORDER.expand(1, 1, 1, T), -1).softmax(-1) @ v[:, :, ORDER],
    "repeated": lambda q, k, v: score(q, k).repeat(1, 1, 1, 2).softmax(-1) @ v.repeat(1, 1, 2, 1),
    "cut": lambda q, k, v: score(q, k)[..., 1:, :3].softmax(-1) @ v[:, :, :3],
    "heads in another order": lambda q, k, v: score(q, k)[:, [2, 0, 1]].softmax(-1) @ v[:, [2, 0, 1]],
    "padded and cut": lambda q, k, v: F.pad(score(q, k), (1, 2), value=3.0)[..., 1:-2].softmax(-1) @ v,
    "split and joined": lambda q, k, v: torch.cat([part.softmax(-1) for part in score(q, k).split(2, -2)], -2) @ v,
    "unbound and stacked": lambda q, k, v: torch.stack([row.softmax(-1) for row in score(q, k).unbind(-2)], -2) @ v,
    "iterated": lambda q, k, v: torch.stack([one.softmax(-1) for one in score(q, k)]) @ v,
    "written by rows": write_rows,
    "causal, in another order": select_causal_rows,
    "dropped": lambda q, k, v: F.dropout(score(q, k).flip(-2).softmax(-1), 0.0).flip(-2) @ v,
}


def run(form: object) -> tuple[object, Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(Own(form)), torch.randn(B, T, H * D, dtype=torch.float64)
    plain = model(x)
    with record(model, keep="values") as recording:
        output = model(x)
    assert torch.equal(plain, output)
    return recording, output


def assert_gives_output(recording: object, output: Tensor) -> None:
    context = recording.map(0).dense() @ recording.values(0)
    assert not recording.missed
    assert torch.allclose(context, output, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", KNOWN)
def test_a_formula_stays_known_where_entries_are_moved(name):
    recording, output = run(KNOWN[name])
    assert_gives_output(recording, output)
    assert recording.notes == []
    assert recording.calls[0].stored.bias is None


DRAWN = torch.randn(D, T, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
TABLE = nn.Parameter(DRAWN, requires_grad=False)
TERMS = {  # of scores, and what they are given the shape or the dtype of
    "reshaped": lambda term, scores: term.flatten(2).reshape_as(scores),
    "viewed": lambda term, scores: term.flatten(2).view_as(scores),
    "expanded": lambda term, scores: term[:, :1].expand_as(scores),
    "cast": lambda term, scores: term.to(scores),
}


@pytest.mark.parametrize("name", TERMS)
def test_a_term_in_the_shape_of_the_scores_is_not_the_scores(name):
    def add_term(q, k, v):
        scores = score(q, k)
        return (scores + TERMS[name](q @ TABLE, scores)).softmax(-1) @ v

    recording, output = run(add_term)
    assert_gives_output(recording, output)
    assert recording.notes == [f"0: {STORED.format(B * H * T * T * 8)}"]


def test_dropout_is_undone_where_entries_are_moved():
    recording, _ = run_with_dropout(lambda w: w.flip(-2))
    weights = recording.map(0).dense()
    assert torch.allclose(weights.sum(-1), torch.ones(B, H, T, dtype=torch.float64), rtol=0, atol=1e-12)
    assert recording.notes == []


def run_with_dropout(move):
    torch.manual_seed(0)
    model = Own(lambda q, k, v: move(F.dropout(score(q, k).softmax(-1), 0.5)) @ v)
    x = torch.randn(B, T, H * D, dtype=torch.float64)
    with record(model) as recording:
        output = model(x)
    return recording, output


@pytest.mark.parametrize("shift", [False, True], ids=["as they are", "after the largest was subtracted"])
def test_a_column_beside_the_scores_is_a_sink_of_each_head(shift):
    sinks = torch.tensor([0.3, -1.1, 2.0], dtype=torch.float64)

    def attend(q, k, v):
        joined = torch.cat([score(q, k), sinks.view(1, H, 1, 1).expand(B, H, T, 1)], -1)
        joined = joined - joined.max(-1, keepdim=True).values if shift else joined
        return joined.softmax(-1)[..., :-1] @ v

    recording, output = run(attend)
    assert_gives_output(recording, output)
    assert torch.allclose(recording.calls[0].stored.sinks, sinks, rtol=0, atol=1e-12)


def test_weights_with_a_sink_that_differs_from_query_to_query_are_stored():
    recording, output = run(lambda q, k, v: torch.cat([q.sum(-1, keepdim=True), score(q, k)], -1).softmax(-1)[..., 1:] @ v)
    found = recording.map(0, kind="implicit")
    assert torch.allclose(found @ recording.values(0, kind="implicit"), output, rtol=0, atol=1e-12)
    assert "differs from query to query" in recording.notes[0]


def test_the_weights_are_stored_where_a_row_was_changed_after_it_was_moved():
    def attend(q, k, v):
        rows = [row.softmax(-1) for row in score(q, k).unbind(-2)]
        rows[3] = rows[3].flip(-1)
        return torch.stack(rows, -2) @ v

    recording, output = run(attend)
    assert_gives_output(recording, output)
    assert "its weights are stored as they are" in recording.notes[0]


def test_weights_that_were_cut_are_recorded_as_those_of_the_keys_that_are_left():
    torch.manual_seed(0)
    model, x = (
        Own(lambda q, k, v: score(q, k).softmax(-1)[..., :3] @ v[:, :, :3]),
        torch.randn(B, T, H * D, dtype=torch.float64),
    )
    with record(model) as recording:
        model(x)
    q, k, _ = model.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
    assert torch.allclose(recording.map(0).dense(), score(q, k[:, :, :3]).softmax(-1), rtol=0, atol=1e-12)
    assert "multiplied by a gate" in recording.notes[0]


def test_top_k_attention_over_all_keys_is_stored_as_it_is():
    def attend(q, k, v):
        found, where = score(q, k).topk(3)
        return torch.zeros(B, H, T, T, dtype=q.dtype).scatter(-1, where, found.softmax(-1)) @ v

    recording, output = run(attend)
    assert_gives_output(recording, output)
    assert "it is top-k attention" in recording.notes[0]


class Matches(nn.Module):
    """Scores of two pictures' points, beside numbers that were made with them, as in SuperGlue's optimal transport."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.mT
        count = (T * x.new_tensor(1)).to(scores)
        margin = torch.cat([(-count.log()).expand(T), count.log()[None]])[None].expand(B, -1)
        return scores.logsumexp(-1) + torch.zeros_like(margin)[:, :T]


@pytest.mark.parametrize("scatter", ["scatter_", "scatter"])
def test_weights_that_are_written_into_a_tensor_made_like_the_scores_are_recorded(scatter):
    def attend(q, k, v):
        scores = score(q, k)
        chosen, where = scores.softmax(-1).topk(2, -1)
        weights.append(getattr(torch.zeros_like(scores), scatter)(-1, where, chosen))
        return weights[-1] @ v

    weights: list[Tensor] = []
    model = nn.Sequential(Own(attend))
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(B, T, H * D, dtype=torch.float64))
    assert not recording.missed
    torch.testing.assert_close(recording.map(0, kind="implicit").dense(), weights[0], rtol=0, atol=1e-12)


def test_numbers_of_several_tensors_that_are_joined_and_expanded_do_not_stop_the_model():
    model, x = nn.Sequential(Matches()), torch.randn(B, T, D)
    expected = model(x)
    with record(model) as recording:
        assert torch.equal(model(x), expected)
    assert not recording.missed


def test_a_failure_while_scores_are_followed_is_reported_and_does_not_stop_the_model(monkeypatch):
    model, x = nn.Sequential(Own(KNOWN["rolled"])), torch.randn(B, T, H * D, dtype=torch.float64)
    expected = model(x)
    monkeypatch.setattr(detection, "settle_all", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="not recorded"), record(model) as recording:
        assert torch.equal(model(x), expected)
    (missed,) = {one.reason for one in recording.missed}
    assert "scores were followed until an operation could not be: its arguments could not be read (ZeroDivisionError" in missed

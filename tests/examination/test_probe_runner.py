"""The order of findings, and how many there are of one mistake."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examination.subjects import Layer, case_of, hiding, later
from regard.examination import examine
from regard.examination.case import Case
from regard.examination.identify import match
from regard.examination.probe_runner import rank_findings, run_probes
from regard.examination.report import Finding


def finding(kind, strength=1.0, cause=""):
    return Finding(kind, "evidence", "cure", strength, cause)


def test_the_strongest_comes_first():
    found = rank_findings([finding("future leak"), finding("mixed heads", 2.0), finding("wrong scale", 0.5)])
    assert [one.kind for one in found] == ["mixed heads", "future leak", "wrong scale"]


def test_at_most_three_findings_are_reported_of_one_cause():
    found = rank_findings([*(finding(f"{n}", n, "mask") for n in range(5)), finding("wrong scale", 0, "scale")])
    assert [one.kind for one in found] == ["4", "3", "2", "wrong scale"]


def test_one_kind_is_reported_once_for_one_cause():
    assert rank_findings([finding("future leak", 1, "mask"), finding("future leak", 2, "mask")]) == (
        finding("future leak", 2, "mask"),
    )
    assert len(rank_findings([finding("future leak", 1, "mask"), finding("future leak", 2, "heads")])) == 2


class Picky(Layer):
    """A layer that raises on some inputs: of which, `refuses` says."""

    def __init__(self, refuses):
        super().__init__(hiding(later))
        self.refuses = refuses

    def forward(self, x):
        if self.refuses(x):
            raise LookupError("no such input\nplease")
        return super().forward(x)


@pytest.mark.parametrize(
    "refuses",
    [
        lambda x: x.dtype == torch.float64,
        lambda x: x.requires_grad,
        lambda x: x.shape[1] != 6,
        lambda x: float(x.abs().max()) > 8,
        lambda x: float(x.abs().max()) < 1,
        lambda x: bool((x[0] == x[0, 0]).all()),
        lambda x: torch.equal(x, case_of(Layer(hiding(later))).make_usual_inputs(60)[0]),
    ],
)
def test_what_a_subject_raises_in_a_probe_does_not_escape(refuses):
    report = run_probes(Case(*vars_of(case_of(Picky(refuses)))))
    assert not report.findings, str(report)
    assert report.checked


def vars_of(case):
    return case.subject, case.expects, case.shapes, None, 0, match.identify_formula


def test_the_call_that_raised_is_reported():
    asked = case_of(Layer(hiding(later))).make_usual_inputs(60)[0]
    report = run_probes(Case(*vars_of(case_of(Picky(lambda x: torch.equal(x.float(), asked))))))
    (unknown,) = (one for one in report.unknown if "precision" in one.what)
    assert unknown.what == "the rest of its precision: it raised LookupError on x (2, 6, 7): no such input"


class Narrower(Layer):
    """A layer whose output is one number narrower at some of its calls, or one token shorter."""

    def __init__(self, axis, every):
        super().__init__(hiding(later))
        self.axis, self.every, self.calls = axis, every, 0

    def forward(self, x):
        self.calls += 1
        output = super().forward(x)
        return output if self.calls % self.every else output.narrow(self.axis, 0, output.shape[self.axis] - 1)


@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize(("axis", "shape"), [(2, "(2, 6, 4)"), (1, "(2, 5, 5)")])
def test_an_output_that_changes_its_shape_is_reported(axis, shape, every):
    report = run_probes(Case(*vars_of(case_of(Narrower(axis, every)))))
    told = [one.what for one in report.unknown]
    assert any(one.endswith(f"it returned {shape} on x (2, 6, 7), expected (2, 6, 5)") for one in told), told


def test_a_way_back_that_raises_is_reported():
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            raise ValueError("not written yet")

    class NoWayBack(Layer):
        def forward(self, x):
            return Backward.apply(super().forward(x))

    report = run_probes(Case(*vars_of(case_of(NoWayBack(hiding(later))))))
    assert report, str(report)
    assert any("ValueError on the backward pass: not written yet" in one.needs for one in report.unknown)


class Viewed(nn.Module):
    """Heads split or joined by a view without a transpose, which lets the future through a mask that is right."""

    def __init__(self, place, causal=True, rotary=False):
        super().__init__()
        torch.manual_seed(0)
        self.place, self.causal, self.rotary = place, causal, rotary
        self.W_query, self.W_key, self.W_value, self.out_proj = (nn.Linear(12, 12) for _ in range(4))

    def split(self, y):
        b, t, _ = y.shape
        return y.view(b, 3, t, 4) if self.place == "in" else y.view(b, t, 3, 4).transpose(1, 2)

    def rotate(self, x):
        angles = torch.arange(x.shape[2], dtype=x.dtype).unsqueeze(-1) * torch.tensor([1.0, 0.1], dtype=x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def forward(self, x):
        q, k, v = (self.split(W(x)) for W in (self.W_query, self.W_key, self.W_value))
        q, k = (self.rotate(q), self.rotate(k)) if self.rotary else (q, k)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        last = {"out": 1, "exchanged": 3}.get(self.place, 2)
        return self.out_proj(context.transpose(1, last).reshape(x.shape))


@pytest.mark.slow
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("place", ["in", "out", "exchanged", "nowhere"])
def test_a_view_without_a_transpose_stands_alone_and_its_cure_makes_the_layer_right(place, rotary):
    report = examine(Viewed(place, rotary=rotary))
    assert [one.kind for one in report.findings] == ["mixed heads"] * (place != "nowhere"), report
    assert report.ok is (place == "nowhere")


@pytest.mark.slow
def test_a_mask_that_is_missing_too_is_a_finding_of_its_own():
    kinds = [one.kind for one in examine(Viewed("out", causal=False)).findings]
    assert kinds[0] == "mixed heads"
    assert "future leak" in kinds

"""A report is true only where the probes that carry the verdict ran; else it is inconclusive and says what to pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from examination.subjects import CAUSAL, D_IN, D_OUT, Layer, hiding, later
from examination.whole_models import Still, causal
from regard import Everything

H, D = 3, 4
C = H * D


class Heads(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, is_causal=True):
        super().__init__()
        torch.manual_seed(1)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C) for _ in range(4))
        self.is_causal = is_causal

    def split(self, x):
        return [f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)]

    def forward(self, x):
        return self.o_proj(F.scaled_dot_product_attention(*self.split(x), is_causal=self.is_causal).transpose(1, 2).flatten(2))


def test_what_a_projection_of_zeros_hides_is_found():
    layer = Heads(is_causal=False)
    for weight in layer.o_proj.parameters():
        nn.init.zeros_(weight)
    report = regard.examine(layer)
    assert report.findings[0].kind == "future leak"
    assert any("in place of the zeros of o_proj.weight" in note for note in report.notes)
    assert not layer.o_proj.weight.any()


def test_a_layer_that_shows_nothing_is_inconclusive():
    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(D_IN, D_IN)

        def forward(self, x):
            return self.project(x) * 0

    report = regard.examine(Nothing())
    assert report.verdict == "Nothing: inconclusive"
    assert not report.ok
    assert report.is_inconclusive
    assert "which tokens each query sees" in str(report)
    assert "Needed: " in repr(report)
    assert report.json()["inconclusive"]
    assert regard.examine(Nothing(), strict=False)


def test_matrices_that_can_never_leave_zero_are_found():
    class Adapted(Heads):
        def __init__(self, start):
            super().__init__()
            self.lora_a, self.lora_b = nn.Parameter(torch.randn(C, 2) * start), nn.Parameter(torch.zeros(2, C))

        def split(self, x):
            return super().split(x + x @ self.lora_a @ self.lora_b)

    assert regard.examine(Adapted(1.0)).ok
    (finding,) = regard.examine(Adapted(0.0)).findings
    assert finding.kind == "not trainable"
    assert "lora_a and lora_b are zero" in finding.evidence


class Routed(Heads):
    """Only the best tokens of a sequence are attended to; with `own`, each token is chosen by a threshold."""

    def __init__(self, own=False):
        super().__init__()
        self.router, self.own = nn.Linear(C, 1), own

    def forward(self, x):
        scores = self.router(x).squeeze(-1)
        if self.own:
            best = torch.stack([scores, torch.zeros_like(scores)], -1).argmax(-1) == 0
        else:
            chosen = scores.topk(min(9, x.shape[1]), -1).indices
            best = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
        return x + super().forward(x) * (best * scores.sigmoid()).unsqueeze(-1)


@pytest.mark.parametrize("seed", range(3))
def test_a_leak_through_the_choice_of_tokens_is_found_for_any_weights(seed):
    layer = Routed()
    torch.manual_seed(seed)
    layer.router.reset_parameters()
    finding = regard.examine(layer).findings[0]
    assert finding.kind == "future leak"
    assert "topk chooses among all tokens" in finding.evidence


@pytest.mark.parametrize("block", [16, 32])
def test_a_leak_of_a_model_at_the_edge_of_a_block_is_found(block):
    def make_leaky_table(t):
        table = causal(t)
        for i in range(block - 1, t - 1, block):
            table[i, i + 1] = 0
        return table

    (finding,) = regard.examine(Still(make_leaky_table, size=512)).findings
    assert finding.kind == "future leak"
    assert finding.evidence.startswith(f"with 40 tokens attention: row {block - 1} puts ")
    assert f"on token {block}, which comes later" in finding.evidence
    assert regard.examine(Still(causal, size=512))


@pytest.mark.slow
def test_rows_and_scale_are_read_from_the_calls_of_a_layer_with_rotary_positions():
    class Rotary(Heads):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def split(self, x):
            q, k, v = super().split(x)
            angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.01])
            cos, sin = (f(angle).to(x.dtype).repeat(1, 2) for f in (torch.cos, torch.sin))
            q, k = (x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin for x in (q, k))
            return q * self.factor, k, v

    report = regard.examine(Rotary(1.0))
    assert report, str(report)
    assert any(one.what == "the scale of the scores, 0.5" for one in report.checked)
    (finding,) = regard.examine(Rotary(D**-0.5)).findings
    assert finding.kind == "wrong scale"
    assert "multiplied by 0.25, not by 1 / √4 = 0.5" in finding.evidence


def test_a_right_layer_stays_conclusive():
    assert regard.examine(CAUSAL)
    assert regard.examine(Layer(lambda scores: scores.softmax(-1)), expects=Everything())
    assert not regard.examine(Layer(hiding(lambda q, k: later(q, k, 2))))
    assert D_OUT == 5

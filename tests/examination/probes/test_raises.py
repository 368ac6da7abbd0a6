"""What torch.compile made gives what its original gives."""

import pytest
import torch

from examination.subjects import CAUSAL, case_of, kinds
from regard.examination.probes.raises import check_case, report_refusal


def compile_with(f):
    """CAUSAL as compiled by a compiler that gives f."""
    return torch.compile(CAUSAL, backend=lambda graph, inputs: f(graph))


@pytest.mark.slow
def test_a_compiled_layer_that_gives_the_same_is_checked():
    (checked,) = check_case(case_of(torch.compile(CAUSAL, backend="eager")))
    assert "compiled" in checked.what


def test_one_that_gives_something_else_is_found():
    wrong = compile_with(lambda graph: lambda *inputs: tuple(1.01 * y for y in graph(*inputs)))
    assert kinds(check_case(case_of(wrong))) == ["wrong precision"]


def test_one_that_raises_is_found():
    def failing(graph):
        raise ValueError("no kernel")

    torch._dynamo.reset()
    assert kinds(check_case(case_of(compile_with(failing)))) == ["raises"]


def test_what_was_raised_is_the_evidence():
    finding = report_refusal(["RuntimeError on x (2, 6, 7): view size", "other"])
    assert finding.kind == "raises"
    assert "view size" in finding.evidence

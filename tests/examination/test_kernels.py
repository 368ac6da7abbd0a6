"""examine_kernel finds what is wrong with a kernel's context, auxiliary outputs, gradients and dropout, and names it."""

import pytest
import torch

import regard
from examination.kernel_table import RIGHT, WRONG, with_lse


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_has_no_finding(name):
    kernel, arguments = RIGHT[name]
    report = regard.examine_kernel(kernel, **arguments)
    assert report, str(report)
    assert not report.findings
    assert any(one.what.startswith("the context is that of") for one in report.checked)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_named_with_a_cure(name):
    kernel, kind, says, arguments = WRONG[name]
    report = regard.examine_kernel(kernel, **arguments)
    assert not report
    assert report.findings[0].kind == kind, str(report)
    assert says in report.findings[0].evidence
    assert report.findings[0].cure


def test_what_is_returned_beside_the_context_is_checked():
    checked = [one.what for one in regard.examine_kernel(with_lse).checked]
    assert checked == [
        "the context is that of softmax(q kᵀ scale) v",
        "the log-sum-exp beside it",
        "the gradients of q, k and v",
    ]


def test_a_kernel_that_always_raises_is_a_finding():
    def kernel(q, k, v):
        raise RuntimeError("no such device")

    (finding,) = regard.examine_kernel(kernel).findings
    assert finding.kind == "raises"
    assert "no such device" in finding.evidence


def test_padding_and_a_given_table_are_taken_as_they_are():
    mask = regard.Padding([3, 17, 0])

    def kernel(q, k, v):
        return regard.attention(q, k, v, mask)

    report = regard.examine_kernel(kernel, expects=mask)
    assert report, str(report)
    assert not regard.examine_kernel(kernel, expects=regard.Everything())
    table = regard.Given(torch.rand(7, 7, generator=torch.Generator().manual_seed(1)) < 0.5)
    assert regard.examine_kernel(lambda q, k, v: regard.attention(q, k, v, table), expects=table)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"outputs": ("logits",)}, "one of 'lse2', 'lse', 'max', 'weights', 'entropy', 'sink'"),
        ({"outputs": ("lse", "max")}, "outputs names 2 tensors beside the context, but the kernel returned 1"),
        ({"expects": 3}, "a mask must be a Mask"),
        ({"offset": 0.5}, "offset"),
    ],
)
def test_bad_arguments_are_errors(arguments, says):
    with pytest.raises(regard.ConfigError) as error:
        regard.examine_kernel(with_lse, **arguments)
    assert says in str(error.value)


@pytest.mark.parametrize("change", [lambda lse: lse + 0.01, lambda lse: lse * 1.001])
def test_what_is_nearly_the_log_sum_exp_is_not_taken_for_a_largest_score(change):
    def nearly(q, k, v):
        context, lse = with_lse(q, k, v)
        return context, change(lse)

    (finding,) = regard.examine_kernel(nearly).findings
    assert finding.kind == "wrong log-sum-exp"
    assert "differs by" in finding.evidence
    (stated,) = regard.examine_kernel(with_lse, outputs=("max",)).findings
    assert "it is the log-sum-exp, not the largest score" in stated.evidence

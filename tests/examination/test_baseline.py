"""A baseline allows the findings that a project keeps on purpose, and no others."""

import pytest

from regard.errors import DataError
from regard.examination.baseline import Allowance, apply_allowances, format_baseline, list_allowances, read_baseline
from regard.examination.report import Finding, Report

LONG = Finding("wrong mask", "query 9 sees token 0", "Fix the bound.", layer="blocks.0")
LEAK = Finding("future leak", "row 0 sees token 1", "Hide it.")
REPORT = Report("Layer", "Causal()", (LONG, LEAK))
KEPT = Allowance("Layer", "wrong mask", "blocks.0", "the window is one longer than its docs say")


def test_only_what_is_not_allowed_is_a_finding():
    report = apply_allowances(REPORT, [KEPT])
    assert report.findings == (LEAK,)
    assert report.notes == ("allowed: wrong mask in blocks.0 (the window is one longer than its docs say)",)


def test_an_allowance_is_of_one_subject_kind_and_layer():
    others = [Allowance("Other", "wrong mask", "blocks.0"), Allowance("Layer", "wrong mask", "blocks.1")]
    report = apply_allowances(REPORT, others)
    assert report.findings == (LONG, LEAK)
    assert report.notes == ("allowed, but not found any more: wrong mask in blocks.1 (no reason)",)


def test_a_written_baseline_allows_all_that_was_found(tmp_path):
    path = tmp_path / "baseline.json"
    path.write_text(format_baseline(list_allowances(REPORT)))
    assert apply_allowances(REPORT, read_baseline(path)).ok


@pytest.mark.parametrize("text", ["[]", "{", '{"allowed": [{"kind": 3}]}', '{"allowed": [{"other": "x"}]}'])
def test_a_file_that_is_no_baseline_is_refused(tmp_path, text):
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(DataError, match="is not"):
        read_baseline(path)
    with pytest.raises(DataError, match="--write-baseline"):
        read_baseline(tmp_path / "none.json")

"""The output of `regard examine` for other programs: SARIF, and annotations of GitHub Actions."""

import json

from examination.subjects import Layer, hiding, later
from regard.cli.examine_formats import locate_subject, render_annotations, render_sarif
from regard.examination.report import Finding, Report

LAYER = Layer(hiding(later))
LEAK = Report("Layer", "Causal()", (Finding("future leak", "100% of\nrow 0", "Hide it."),))


def test_an_annotation_stands_at_the_class_and_escapes_its_text():
    (line,) = render_annotations(LEAK, LAYER).splitlines()
    file, number = locate_subject(LAYER)
    assert line.startswith(f"::error file={file},line={number},title=Layer%3A future leak::100%25 of%0Arow 0. Hide it.")
    with open(file) as stream:
        assert stream.read().splitlines()[number - 1] == "class Layer(nn.Module):"


def test_sarif_has_a_result_for_each_finding():
    (run,) = json.loads(render_sarif(LEAK, LAYER))["runs"]
    (result,) = run["results"]
    assert result["ruleId"] == "future leak"
    assert result["level"] == "error"
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == locate_subject(LAYER).line
    assert [one["id"] for one in run["tool"]["driver"]["rules"]] == ["future leak"]

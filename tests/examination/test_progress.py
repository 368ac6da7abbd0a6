"""What an examination says as it goes is its report where it comes no further."""

import json

from examination.subjects import Layer
from regard.examination.examine import examine_step_by_step
from regard.examination.progress import ExaminationProgress
from regard.examination.report import Finding
from regard.examination.time_limit import UNLIMITED

WHY = Finding("unfinished", "it stopped", "go on")


def test_lines_read_by_another_make_the_same_report():
    lines, read = [], ExaminationProgress()
    progress = ExaminationProgress(lines.append)
    report = examine_step_by_step(Layer(lambda scores: scores.tril().softmax(-1)), limit=UNLIMITED, progress=progress)
    for line in lines:
        read.apply_line(json.loads(json.dumps(line)))
    unfinished = read.make_partial_report(WHY)
    assert str(unfinished) == str(progress.make_partial_report(WHY))
    assert unfinished.findings[0] == WHY
    assert {one.kind for one in report.findings} <= {one.kind for one in unfinished.findings}
    assert set(report.checked) == set(unfinished.checked)
    assert (unfinished.subject, unfinished.expects) == (report.subject, report.expects)


def test_a_line_with_other_things_in_it_is_not_taken_for_what_was_said():
    progress = ExaminationProgress()
    progress.apply_line({"text": "a report", "code": 0})
    assert progress.said == []

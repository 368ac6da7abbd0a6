"""A report says what was found, and is true where nothing was."""

import json

import pytest
import torch

from regard.examination.report import BRIEF, Checked, Finding, Report, Unknown, Visibility

SEEN = torch.ones(3, 3, dtype=torch.bool)
LEAK = Finding("future leak", "row 0 puts 0.22 on token 2, " * 9, "Hide what comes later. " * 7)
STRENGTH = torch.tensor([[1.0, 0.5, 0.0], [0.2, 1.0, 0.0], [torch.nan] * 3])
SIGHT = Visibility(SEEN.tril(), STRENGTH > 0.1, STRENGTH, ("Your", "journey", "starts"))


def report(*findings):
    said = (Checked("every output is finite", "at 12 rows"),), (Unknown("the scale", "scale="),)
    return Report("Layer", "Causal()", findings, *said, ("x (2, 3, 7) float32",), SIGHT)


def test_a_report_is_true_where_nothing_was_found():
    assert report()
    assert report().ok


def test_a_report_with_a_finding_is_false():
    assert not report(LEAK)
    assert not report(LEAK).ok


def test_the_text_has_all_that_the_report_says():
    text = " ".join(str(report(LEAK)).split())
    for part in (
        LEAK.kind,
        *LEAK.evidence.split(),
        *LEAK.cure.split(),
        "every output is finite",
        "the scale",
        "x (2, 3, 7) float32",
    ):
        assert part in text


@pytest.mark.parametrize("width", [40, 80])
def test_every_property_begins_a_line_and_what_is_said_of_it_follows(width):
    whats = ["no query sees a later token", "every output is finite", "large scores give finite outputs"]
    said = *(Checked(what, "at 12 rows") for what in whats[:2]), Checked(whats[2], "with scores that are " + "so " * 20)
    found = Report("Layer", "Causal()", checked=said, unknown=(Unknown("the scale", "scale="),))
    table = found.format_table(width).replace("cannot tell", "").replace("checked", "")
    lines = [line.strip() for line in table.splitlines()]
    start = lines.index(f"- {whats[0]}")
    assert lines[start + 1 : start + 4] == [f"- {whats[1]}", "at 12 rows", f"- {whats[2]}"]
    assert [line.partition("- ")[2] for line in lines if line.startswith("- ")] == [*whats, "the scale"]
    assert lines[-1] == "Needed: scale="


def test_a_failed_assertion_shows_the_kind_and_where_the_evidence_begins():
    shown = repr(report(LEAK))
    assert shown.startswith("Layer: 1 finding. future leak: row 0 puts 0.22 on token 2")
    assert len(shown) <= BRIEF
    assert "\n" not in shown


def test_json_takes_all_of_it_and_gives_it_back():
    said = json.loads(json.dumps(report(LEAK).json(), allow_nan=False))
    assert said["ok"] is False
    assert said["findings"][0]["kind"] == LEAK.kind
    assert said["reach"]["expected"] == SEEN.tril().tolist()
    assert said["reach"]["strength"][2] == [None] * 3


def test_the_picture_has_a_line_for_each_query():
    lines = SIGHT.draw().splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(SIGHT.words)
    assert lines[1].split()[1:] == ["■", "·", "·", "■", "■", "·", "·", "+", "·"]
    assert lines[3].split()[1:] == ["■", "■", "■", *"??????"]


def test_control_characters_in_names_are_written_as_escapes():
    evil = "a\x1b]52;c;ZQ==\x07\nb\u202ec\ud800"
    report = Report(evil, evil, (Finding(evil, evil, evil),), (Checked(evil, evil),), (Unknown(evil, evil),), (evil,))
    for text in (str(report), repr(report)):
        text.encode("utf-8")
        assert not any(ord(letter) < 32 or ord(letter) in range(127, 160) for letter in text.replace("\n", ""))
        assert "\u202e" not in text
        assert "\\x1b]52;c" in text


@pytest.mark.parametrize("width", [31, 40, 59, 60, 79])
def test_a_report_fits_any_width_and_says_the_same(width):
    findings = LEAK, Finding("dropout in evaluation", "twice the same input", "self.training")
    table = report(*findings).format_table(width)
    assert max(map(len, table.splitlines())) <= width
    text = " ".join(table.split())
    for part in (findings[0].kind, LEAK.evidence.strip(), LEAK.cure.strip(), findings[1].kind, "the scale"):
        assert part in text


@pytest.mark.parametrize("width", [20, 40, 47, 80])
def test_a_picture_fits_the_width_and_has_every_table(width):
    tokens = 16 if width > 40 else 5
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    drawn = Visibility(seen.tril(), seen, torch.ones(tokens, tokens), tuple(f"t{i}" for i in range(tokens))).draw(width)
    assert max(map(len, drawn.splitlines())) <= width
    assert [word for word in drawn.split() if len(word) > 3] == ["expected", "found", "difference"]
    assert drawn.count("■") == tokens * (tokens + 1) // 2 + tokens**2
    assert drawn.count("+") == tokens * (tokens - 1) // 2

import json

import pytest

from regard import DataError
from regard.train.listeners.json_lines import JsonLinesFile, read_rows


def rows(*steps):
    return [{"step": step, "word": "é\n"} for step in steps]


def test_lines_are_added_one_for_each_row(tmp_path):
    lines = JsonLinesFile(tmp_path / "new" / "log.jsonl")
    for step in (1, 2, 3):
        lines.append_rows(step, rows(step, step))
    assert read_rows(tmp_path / "new" / "log.jsonl") == rows(1, 1, 2, 2, 3, 3)


def test_whoever_goes_on_cuts_off_what_is_done_again(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(1, 2, 3, 4)) + '{"step": 5, "wo')
    JsonLinesFile(path).append_rows(3, rows(3))
    assert read_rows(path) == rows(1, 2, 3)
    assert [one.name for one in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("half", ["", "{", '{"step": 2', '{"step": 2}', '{"step": 2}\n'])
def test_the_last_line_may_be_half_written(tmp_path, half):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n' + half)
    assert [row["step"] for row in read_rows(tmp_path / "log.jsonl")] == ([1, 2] if half.endswith("\n") else [1])


@pytest.mark.parametrize("line", ["{", "3", '{"word": 1}'])
def test_any_other_line_is_ours_or_an_error(tmp_path, line):
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(DataError, match=r"log\.jsonl: line 2 is not what training writes"):
        read_rows(tmp_path / "log.jsonl")

"""Numbers that no setting can be: one line that names the setting, and exit code 2."""

import re

import pytest

from regard.cli import main

WHOLE = ["-1", f"-1{30 * '0'}", f"1{30 * '0'}", 5000 * "9"]
REAL = ["nan", "inf", "-inf", "-1e308", 5000 * "9"]
GENERATE, TRANSLATE = ["generate", "ABC", "--model", "sorter"], ["translate", "A man."]
TEXT, PASSAGES = (
    ["evaluate", "--model", "sorter", "--on", "text.txt"],
    ["evaluate", "--model", "sorter", "--on", "passages.jsonl"],
)
WALK, LOOK = ["walk", "--words", "the cat sat"], ["look", "ABC", "--model", "sorter"]
TRAIN = ["train", "--text", "text.txt", "--out", "run"]
REFUSED = [
    (GENERATE, "tokens", WHOLE),
    (GENERATE, "beams", ["0", *WHOLE]),
    (GENERATE, "seed", [str(2**64), str(-(2**63) - 1), *WHOLE[1:]]),
    (GENERATE, "top", [WHOLE[0], WHOLE[1], WHOLE[3]]),
    (GENERATE, "top-k", [WHOLE[0], WHOLE[1], WHOLE[3]]),
    *((GENERATE, name, REAL) for name in ("temperature", "top-p", "min-p", "repetition-penalty")),
    *((TEXT, name, ["0", *WHOLE]) for name in ("context", "stride", "batch")),
    *((PASSAGES, name, ["0", *WHOLE]) for name in ("context", "stride", "batch")),
    (TRAIN, "seed", WHOLE[1:]),
    (TRAIN, "steps", WHOLE),
    (TRAIN, "width", ["0", *WHOLE]),
    (WALK, "heads", ["0", *WHOLE]),
    (WALK, "seed", WHOLE),
    (WALK, "rows", ["0", WHOLE[0], WHOLE[1], WHOLE[3]]),
    *((WALK, name, WHOLE) for name in ("query", "from")),
    (["serve"], "port", WHOLE),
    (LOOK, "tokens", ["0", WHOLE[0], WHOLE[1], WHOLE[3]]),
    (LOOK, "head", WHOLE),
    (LOOK, "query", WHOLE[1:]),
    (TRANSLATE, "beams", ["0", *WHOLE]),
    *(([*TRANSLATE, *more], "length-penalty", [*REAL, "33", "1e308"]) for more in ([], ["--beams", "2"])),
]
CASES = [
    pytest.param(arguments, flag, value, id=f"{arguments[0]} --{flag} {value[:32]}")
    for arguments, flag, values in REFUSED
    for value in values
]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("ABCAB", encoding="utf-8")
    (tmp_path / "passages.jsonl").write_text('{"text": "AB C"}\n', encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "flag", "value"), CASES)
def test_it_is_refused_in_one_line(capsys, arguments, flag, value):
    try:
        code = main([*arguments, f"--{flag}={value}"])
    except SystemExit as stopped:  # argparse's
        code = stopped.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith(f"regard {arguments[0]}: ")
    assert err.count("\n") == 1
    assert any(one in err for one in (flag, flag.replace("-", "_"), value[:20]))
    assert len(err) < 600  # a message has at most 500 characters


@pytest.mark.parametrize("value", ["0", "-1", str(2**63), str(2**64 - 1), str(-(2**63))])
def test_every_seed_that_torch_takes_is_taken(capsys, value):
    assert main([*GENERATE, "--tokens", "1", f"--seed={value}"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_width_that_no_machine_holds_is_refused_with_its_parameters(capsys):
    assert main([*TRAIN, f"--width={10**9}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"regard train: .* parameters.*\n", err)
    assert len(err) < 600

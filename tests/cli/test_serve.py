import pytest

import regard.cli


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "256.0.0.1"], "cannot be listened at"),  # with the pocket model
        (["nowhere.reg", "--text", "CAB"], "say which with --model"),
        (["--model", "sorter", "--port", "70000"], "below 65536"),
        (["--model", "sorter", "--text", "xyz"], "no letter of this model"),
        (["--model", "sorter", "--host", "256.0.0.1"], "cannot be listened at"),
        (["nowhere.reg"], "nowhere.reg"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_2(arguments, says, capsys):
    assert regard.cli.main(["serve", *arguments]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.count("\n") == 1
    assert not said.out

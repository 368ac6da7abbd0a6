import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.evaluate.wikitext import count_words, detokenize

FILE = Path(__file__).parents[2] / "../shared/data/eval/wiki.test.raw"
HELD = "needs ../shared/data/eval, the published texts, which this machine lacks"


@pytest.mark.parametrize(
    ("made", "written"),
    [
        (" = Robert Boulter = \n", "= Robert Boulter =\n"),
        (" = = = Fame and after = = = \n", "=== Fame and after ===\n"),
        (" a guest @-@ starring role , 1 @,@ 000 or 2 @.@ 5 . \n", "a guest-starring role, 1,000 or 2.5.\n"),
        ("the book ( of 1990 ) : why ?", "the book (of 1990): why?"),
        (' as " Craig " in " Teddy \'s Story " ; he', 'as "Craig" in "Teddy\'s Story"; he'),
        ("he did n't see the players ' own", "he didn't see the players' own"),
        ("it 's $ 5 [ or so ]", "it's $5 [or so]"),
        ('he said " so \n and " not', 'he said " so\nand " not'),  # quotes of two lines are no pair
        ("plain words stay", "plain words stay"),
        ("", ""),
    ],
)
def test_the_spacing_of_its_makers_is_taken_out(made, written):
    assert detokenize(made) == written


def remove_spaces_and_marks(text):
    return re.sub(r"\s", "", re.sub(r" @([-,.])@ ", r"\1", text))


@given(st.text(st.sampled_from("ab ()[]\"',.;:=@-\n°$")))
def test_nothing_but_spaces_and_marks_changes_and_lines_stay_lines(text):
    assert remove_spaces_and_marks(detokenize(text)) == remove_spaces_and_marks(text)
    assert detokenize(text).count("\n") == text.count("\n")


@pytest.mark.slow
@pytest.mark.skipif(not FILE.exists(), reason=HELD)
def test_wikitext_2_has_the_words_that_its_makers_count():
    text = FILE.read_text(encoding="utf-8")
    assert count_words(text) == 245_569  # Merity et al. 2016, table 1
    assert remove_spaces_and_marks(detokenize(text)) == remove_spaces_and_marks(text)
    assert " @-@ " not in detokenize(text)

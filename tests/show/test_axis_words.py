import pytest
import torch

import regard
from regard import ConfigError
from regard.show.axis_words import choose_attention_kind, find_word, get_axis_words
from regard.show.recording_views import render_row
from regard.show.terminal_colors import TerminalArea
from show.page.server_client import rows_and_keys
from show.small_recordings import WORDS


def test_a_word_is_found_at_the_last_of_its_places():
    assert find_word("the", WORDS) == (10, [3, 7, 10])
    assert find_word("saw", WORDS) == (9, [2, 9])


def test_a_word_of_several_tokens_stands_where_its_last_one_does():
    words = [" a", " jour", "ney", " to", " a", " jour", "nal", " jour", "ney"]
    assert find_word("journey", words) == (8, [2, 8])
    with pytest.raises(ConfigError, match="neither a word"):
        find_word("our", words)


@pytest.mark.parametrize("asked", ["wizard", "17", "-18", "", "he"])
def test_what_is_neither_is_refused_with_some_words_of_the_text(asked):
    with pytest.raises(ConfigError, match=r"nor a number from 0 to 16\. The first words are 'The', 'cat', 'saw'"):
        find_word(asked, WORDS)


def test_the_queries_of_cross_attention_have_their_own_words():
    model = regard.AdditiveAttention(5, 6, 7)
    with regard.record(model) as recording:
        model(torch.randn(1, 3, 5), torch.randn(1, 4, 6))
    asked = recording, 0, "cross", None, 0, (3, 4)
    assert get_axis_words(*asked) == (list("012"), list("0123"))
    recording.tokens = {"rows": list("abc"), "columns": list("defg")}
    assert get_axis_words(*asked) == (list("abc"), list("defg"))
    recording.tokens = list("defg")
    assert get_axis_words(*asked) == (list("012"), list("defg"))


def test_queries_are_the_last_of_their_keys_and_have_numbers_where_they_are_more():
    q, k = torch.randn(2, 1, 2, 5, 4)
    for queries, expected in ((k[:, :, 2:], list("cde")), (torch.cat([q, q[:, :, :2]], 2), list("0123456"))):
        recording = rows_and_keys(queries, k, regard.Everything())
        recording.tokens = list("abcde")
        assert get_axis_words(recording, 0, "self", None, 0, (queries.shape[2], 5)) == (expected, list("abcde"))
        assert len(regard.figure(recording, 0, 1).axes)
        rows = list(render_row(recording, (0, 1), "d", TerminalArea(80, 24, None), True))
        assert "token 3" in rows[0].plain
        row = recording.map(0, 1)[0, 0, 3 - max(5 - queries.shape[2], 0)]
        assert f"{float(row.max()):.3f}" in "".join(line.plain for line in rows)


def test_of_attention_without_a_softmax_it_is_said_how_to_see_it():
    class Linear(torch.nn.Module):
        def forward(self, q, k, v):
            return (torch.relu(q @ k.mT).tril()) @ v

    with regard.record(model := Linear()) as recording:
        model(*torch.randn(3, 1, 2, 5, 4))
    message = r"^this recording has no self attention\. Not drawn here: one layer attends without a softmax\. regard\.figure"
    with pytest.raises(ConfigError, match=message):
        choose_attention_kind(recording)

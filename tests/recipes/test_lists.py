import json
import random

import pytest
from recipes.pocket.lists import PLAIN, TIMES, WORDS, insert_lists, list_whole_words, make_list
from recipes.pocket.stories import get_chunk_path

from regard.models import GPT2

STORIES, EVERY = 40, 2  # of a chunk


@pytest.fixture(scope="module")
def text():
    return GPT2.load("pocket").text


def turns(tokens: list[int]) -> int:
    """How often a row says the same again."""
    period = next(n for n in range(1, len(tokens) + 1) if len(tokens) % n == 0 and tokens == tokens[:n] * (len(tokens) // n))
    return len(tokens) // period


def test_a_list_is_the_same_tokens_again_a_token_a_word(text):
    known, dice = list_whole_words(text), random.Random(0)
    assert len(known) > 1000
    for _ in range(50):
        said = make_list(known, dice)
        tokens = text.encode(said)
        assert len(tokens) == len(said.split())
        assert TIMES[0] <= turns(tokens) <= TIMES[1]
        assert WORDS[0] <= len(tokens) // turns(tokens) <= WORDS[1]


def test_the_last_stories_have_no_list_between_them_and_every_story_is_there_in_its_order(tmp_path, text):
    told = {n: [f"Once there was a cat, number {n} {m}." for m in range(STORIES)] for n in (3, 4)}
    for n, stories in told.items():
        get_chunk_path(tmp_path, n).write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    documents = list(insert_lists(tmp_path, text, range(3, 5), every=EVERY))
    assert [one for one in documents if one.startswith("Once")] == told[3] + told[4]
    plain = round(STORIES * PLAIN)
    assert documents[-plain:] == told[4][-plain:]
    assert all(turns(text.encode(one)) > 1 for one in documents[1 : -plain : 1 + EVERY])
    assert documents == list(insert_lists(tmp_path, text, range(3, 5), every=EVERY))

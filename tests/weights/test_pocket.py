import random
from pathlib import Path

import pytest
import torch
from recipes.pocket.card import score_heads
from recipes.pocket.lists import list_whole_words

from regard.evaluate import perplexity
from regard.models import GPT2
from regard.weights.gpt2 import INCLUDED_MODELS

STORY = (
    "Once upon a time, there was a little girl named Lily. She had a red ball and a small dog. One day, they went to the park "
    "to play. The dog ran after the ball and Lily was very happy."
)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_pocket_model_has_at_most_eight_megabytes_and_is_kept_in_bfloat16():
    assert size(INCLUDED_MODELS["pocket"]) <= 8_000_000
    assert GPT2.load("pocket", dtype=torch.bfloat16).tokens.weight.dtype == torch.bfloat16
    model = GPT2.load("pocket")
    assert not model.training
    weights = model.tokens.weight
    assert weights.dtype == torch.float32
    assert torch.equal(weights, weights.bfloat16().float())  # nothing is lost that was kept


def test_the_pocket_model_predicts_a_story_and_not_the_same_words_in_disorder():
    model = GPT2.load("pocket")
    words = STORY.split()
    told, mixed = (
        perplexity(model, model.text.encode(text), context=512, bytes=len(text.encode())).bits_per_byte
        for text in (STORY, " ".join(sorted(words)))
    )
    assert told < 0.7
    assert mixed > 2 * told


def draw_words(model: GPT2, count: int) -> list[int]:
    """Different words, a token each."""
    return model.text.encode("".join(random.Random(7).sample(list_whole_words(model.text), count)))


@pytest.mark.slow
def test_a_head_of_the_pocket_model_looks_at_the_previous_token_and_one_that_stands_on_it_at_what_followed_before():
    model = GPT2.load("pocket")
    table = score_heads(model, [model.get_end_settings()["end"], *draw_words(model, 60) * 2])
    previous, induction = table.select_kind("previous token").rows, table.select_kind("prefix matching").rows
    assert previous
    assert induction
    assert max(row.scores["induction"] for row in induction) > 0.6
    assert min(row.layer for row in previous) < max(row.layer for row in induction)


@pytest.mark.slow
def test_a_head_of_the_pocket_model_rests_on_the_first_token_where_nothing_comes_again():
    model = GPT2.load("pocket")
    table = score_heads(model, [model.get_end_settings()["end"], *draw_words(model, 120)])
    assert max(row.scores["sink"] for row in table.select_kind("first token").rows) > 0.6

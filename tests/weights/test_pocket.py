from pathlib import Path

import torch

import regard
from regard.evaluate import perplexity
from regard.models import GPT2
from regard.weights.gpt2 import CARRIED

STORY = (
    "Once upon a time, there was a little girl named Lily. She had a red ball and a small dog. One day, they went to the park "
    "to play. The dog ran after the ball and Lily was very happy."
)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_pocket_model_has_at_most_eight_megabytes_and_is_kept_in_bfloat16():
    assert size(CARRIED["pocket"]) <= 8_000_000
    assert GPT2.load("pocket", dtype=torch.bfloat16).tokens.weight.dtype == torch.bfloat16
    model = GPT2.load("pocket")
    assert not model.training
    weights = model.tokens.weight
    assert weights.dtype == torch.float32
    assert torch.equal(weights, weights.bfloat16().float())  # nothing is lost that was kept


def test_the_pocket_model_foretells_a_story_and_not_the_same_words_in_disorder():
    model = GPT2.load("pocket")
    words = STORY.split()
    told, mixed = (
        perplexity(model, model.text.encode(text), context=512, bytes=len(text.encode())).bits_per_byte
        for text in (STORY, " ".join(sorted(words)))
    )
    assert told < 0.7
    assert mixed > 2 * told


def test_the_pocket_model_ends_its_stories():
    model = GPT2.load("pocket")
    pieces = list(model.complete("Once upon a time", 400, temperature=0.7, top_k=40, seed=0))
    assert 20 < len(pieces) < 400


def test_heads_of_the_pocket_model_differ_in_kind():
    model = GPT2.load("pocket")
    tokens = torch.tensor([model.text.encode(STORY)])
    with torch.no_grad(), regard.record(model) as recording:
        model(tokens)
    recording.tokens = model.text.pieces(tokens[0])
    assert len({row.kind for row in regard.heads(recording)}) >= 3

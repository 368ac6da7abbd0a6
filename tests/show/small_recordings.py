"""Recordings that the tests of this room draw, of small models with random weights in float64: digits do not flip in it."""

import functools

import torch

import regard
from models.translators import make_translator, pad_sentences, sentences
from regard.models import GPT2, GPT2Config

WORDS = [
    "The",
    " cat",
    " saw",
    " the",
    " dog",
    ",",
    " and",
    " the",
    " dog",
    " saw",
    " the",
    "\n",
    "cat",
    " <b>&",
    " mañana",
    " end",
    "s",
]


@functools.cache
def record_small_model() -> regard.Recording:
    """Two layers of three heads on seventeen words, of which some stand at several places."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=2, heads=3, width=12, context=32, vocabulary=19)).double()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(12 if weights.dim() > 1 else 1)  # so that heads are not nearly even
        with regard.record(model) as recording:
            model(torch.arange(len(WORDS))[None])
    recording.model, recording.tokens = "small", list(WORDS)
    return recording


WRITTEN, READ = [" un", " chat", " dort"], ["a", " cat", " is", " asleep", "⟨end⟩"]


@functools.cache
def record_translator(kind: str = "additive") -> regard.Recording:
    """A translator that writes three words and reads five: of cross attention alone where it is additive."""
    model = make_translator(kind)
    with torch.no_grad(), regard.record(model) as recording:
        model(*pad_sentences(sentences(5)), torch.tensor([[5, 7, 8]]))
    recording.model, recording.tokens = kind, {"rows": WRITTEN, "columns": READ}
    return recording


@functools.cache
def record_long_text(tokens: int = 700) -> regard.Recording:
    """One layer of two heads on many words."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=1, heads=2, width=8, context=tokens, vocabulary=11)).double()
    with torch.no_grad(), regard.record(model) as recording:
        for weights in model.parameters():
            weights.mul_(12 if weights.dim() > 1 else 1)
        model(torch.randint(11, (1, tokens), generator=torch.Generator().manual_seed(1)))
    recording.model, recording.tokens = "long", [f" w{n}" for n in range(tokens)]
    return recording

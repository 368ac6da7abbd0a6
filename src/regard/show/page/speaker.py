"""The model that the page runs on typed text, and what it generates."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, RegardError
from regard.generate import choices
from regard.models import GPT2
from regard.models.own import Own
from regard.observe import Recording, record
from regard.show.axes import byte_note
from regard.show.page import translating
from regard.show.page.entry import short
from regard.show.page.translating import Translating
from regard.show.telling import last_layers, told

NEXT = 10  # likeliest next words that are shown
LIKELIEST = 5  # likeliest alternatives shown of each new token
SENTENCES = (  # the first three that a model can read are offered
    "Your journey starts with one step",
    "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his",
    "The dog chased the rabbit because it was hungry.",
    "CBABBC",
    "ABCABCABC",
    "CCCBBBAAA",
    "3 1 2",
    "1 2 3 1 2 3",
    "0 1 1 0",
)


class Speaker(Protocol):
    """A model in evaluation mode, and its tokenizer."""

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def model(self) -> nn.Module:
        """Module that is recorded."""

    @property
    def context(self) -> int | None:
        """Number of tokens that the model was made for, or None."""

    def tokens(self, text: str, most: int | None) -> tuple[Tensor, list[str], int]:
        """Return the first tokens of a text, (1, t), each of them as text, and how many the whole text has."""

    def encode(self, text: str) -> list[int]:
        """Return all tokens of a text and nothing else."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""

    def run(self, ids: Tensor) -> object:
        """Run the model on tokens."""


def speaker_of(model: Any) -> Speaker | Translating:
    """Return a model with its tokenizer, given a GPT2, a translator of regard, or an object that has both already.

    Raises ConfigError for anything else.
    """
    if isinstance(model, GPT2):
        return Own("GPT-2", model)
    if isinstance(model, translating.Translator):
        return translating.translating("translator", model)
    if isinstance(model, Translating):
        return model
    if not all(hasattr(model, name) for name in ("tokens", "encode", "decode", "run")):
        raise ConfigError(f"the page runs a GPT2, or what has tokens, encode, decode and run; got {type(model).__name__}.")
    speaker: Speaker = model
    return speaker


def writes(speaker: Speaker | Translating | None) -> bool:
    """Return whether the model can continue a text."""
    return isinstance(speaker, Own)


def typed(speaker: Speaker | Translating, text: str, most: int) -> tuple[Recording, list[dict[str, Any]] | None, list[str]]:
    """Record a model on the first tokens of a text; return the recording, the likeliest next words, and notes."""
    if isinstance(speaker, Translating):
        note = byte_note(speaker.pieces(speaker.ids(text)))
        return translating.recorded(speaker, text, most), None, [note] if note else []
    ids, words, whole = speaker.tokens(text, None if speaker.context is not None and speaker.context <= most else most)
    with torch.inference_mode(), record(speaker.model, keep="values") as recording:
        said = speaker.run(ids)
    recording.model, recording.tokens = speaker.name, words
    cut = f"The first {len(words):,} of {whole:,} tokens were read: as many as fit." if len(words) < whole else None
    return recording, coming(speaker, said), [note for note in (cut, byte_note(words)) if note]


def coming(speaker: Speaker, said: object) -> list[dict[str, Any]] | None:
    """Return the likeliest next words, by the logits (1, t, n), or None for a model that does not predict them."""
    logits = getattr(said, "logits", said)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        return None
    values, ids = logits[0, -1].float().softmax(-1).topk(min(NEXT, logits.shape[-1]))
    words = [short(speaker.decode([number])) for number in ids.tolist()]
    return [{"word": word, "probability": value} for word, value in zip(words, values.tolist(), strict=True)]


def written(
    speaker: Speaker | Translating, text: str, tokens: int, temperature: float, seed: int | None
) -> Iterator[dict[str, Any] | Recording]:
    """Generate each new token as JSON, with the likeliest ones and what it attends to, and the recording of all last."""
    if not isinstance(speaker, Own):
        raise ConfigError(
            f"{speaker.name} can be looked at here, but does not write: the page writes with regard's own GPT-2s."
        )
    model, vocabulary = speaker.model, speaker.words
    ids = vocabulary.encode(text)
    refuse_beyond(speaker, max(len(ids), 1), tokens)
    settings = {"text": vocabulary, **model.ending(), "temperature": temperature, "seed": seed}
    if not ids and settings.get("end") is not None:
        ids = [settings["end"]]
    steps, words = choices(model, [ids], tokens, **settings), vocabulary.pieces(ids)
    with record(model, keep="values") as recording:
        for one in told(steps, words, vocabulary, LIKELIEST, recording, len(last_layers(model.config.layers))):
            yield {
                "word": one.word,
                "place": len(words),  # the position of the new token
                "probability": one.probability,
                "likeliest": [{"word": word, "probability": value} for word, value in one.likeliest],
                "looked": [{"place": near.place, "word": short(near.word), "weight": near.weight} for near in one.looked],
            }
    if recording.runs:
        recording.model, recording.tokens = speaker.name, words[: recording.map(0).shape[3]]
        yield recording


def refuse_beyond(speaker: Own, begun: int, tokens: int) -> None:
    """Raise ConfigError where the context has no room for `tokens` more; the last one is not read."""
    room = speaker.context - begun + 1
    if tokens > room:
        fits = f"choose at most {room:,} more" if room > 0 else "shorten it"
        raise ConfigError(
            f"{speaker.name} reads {speaker.context:,} tokens at a time; the text has {begun:,} and {tokens:,} more are asked "
            f"for, so {fits}{', or begin with a shorter text' if room > 0 else ''}."
        )


def sentences(speaker: Speaker | Translating | None) -> list[str]:
    """Return three texts to try that the model can read."""
    if isinstance(speaker, Translating):
        return list(translating.SENTENCES)
    return [] if speaker is None else [text for text in SENTENCES if reads(speaker, text)][:3]


def reads(speaker: Speaker, text: str) -> bool:
    """Return whether a model can read a text; models of few letters refuse others."""
    try:
        return bool(speaker.encode(text))
    except RegardError:
        return False

"""Speaker: the model that the page runs on what is typed, and what it writes."""

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

NEXT = 10  # words that may come next, shown
LIKELIEST = 5  # of each new token
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
    """A model in evaluation mode, and what turns a text into its tokens."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def model(self) -> nn.Module:
        """What is recorded."""

    @property
    def context(self) -> int | None:
        """How many tokens it was made for, where it says so."""

    def tokens(self, text: str, most: int | None) -> tuple[Tensor, list[str], int]:
        """The first tokens of a text, (1, t), each of them as text, and how many the whole text has."""

    def encode(self, text: str) -> list[int]:
        """All tokens of a text and nothing else."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""

    def run(self, ids: Tensor) -> object:
        """The model on tokens."""


def speaker_of(model: Any) -> Speaker | Translating:
    """A model and its vocabulary, given a GPT2, a translator of this house, or what has both already."""
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
    """Whether it can write on from a text."""
    return isinstance(speaker, Own)


def typed(speaker: Speaker | Translating, text: str, most: int) -> tuple[Recording, list[dict[str, Any]] | None, list[str]]:
    """The recording of a model on the first tokens of a text, what it holds likely next, and notes."""
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
    """The likeliest next words, by the logits (1, t, n); None of a model that does not foretell them."""
    logits = getattr(said, "logits", said)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        return None
    values, ids = logits[0, -1].float().softmax(-1).topk(min(NEXT, logits.shape[-1]))
    words = [short(speaker.decode([number])) for number in ids.tolist()]
    return [{"word": word, "probability": value} for word, value in zip(words, values.tolist(), strict=True)]


def written(
    speaker: Speaker | Translating, text: str, tokens: int, temperature: float, seed: int | None
) -> Iterator[dict[str, Any] | Recording]:
    """Each new token as JSON, with what was likely and what it looked at; at last the recording of all."""
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
                "place": len(words),  # its own, once it is written
                "probability": one.probability,
                "likeliest": [{"word": word, "probability": value} for word, value in one.likeliest],
                "looked": [{"place": near.place, "word": short(near.word), "weight": near.weight} for near in one.looked],
            }
    if recording.runs:
        recording.model, recording.tokens = speaker.name, words[: recording.map(0).shape[3]]
        yield recording


def refuse_beyond(speaker: Own, begun: int, tokens: int) -> None:
    """Raises ConfigError where there is no room for so many more tokens; the last one is not read."""
    room = speaker.context - begun + 1
    if tokens > room:
        fits = f"choose at most {room:,} more" if room > 0 else "shorten it"
        raise ConfigError(
            f"{speaker.name} reads {speaker.context:,} tokens at a time; the text has {begun:,} and {tokens:,} more are asked "
            f"for, so {fits}{', or begin with a shorter text' if room > 0 else ''}."
        )


def sentences(speaker: Speaker | Translating | None) -> list[str]:
    """Three texts to try, which the model can read."""
    if isinstance(speaker, Translating):
        return list(translating.SENTENCES)
    return [] if speaker is None else [text for text in SENTENCES if reads(speaker, text)][:3]


def reads(speaker: Speaker, text: str) -> bool:
    """Whether a model can read a text: those of few letters refuse others."""
    try:
        return bool(speaker.encode(text))
    except RegardError:
        return False

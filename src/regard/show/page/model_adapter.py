"""The model that the page runs on typed text, and what it generates."""

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, RegardError
from regard.generate import TokenChoice
from regard.generate.decode import start_decoding
from regard.generate.sequence_reader import SequenceReader
from regard.models import GPT2, TransformersDecoder
from regard.models.gpt2_adapter import GPT2Adapter
from regard.observe import Recording, load, record
from regard.observe.record import Recorder
from regard.show.axis_words import describe_bytes
from regard.show.generated_tokens import PieceTokenizer, describe_tokens, list_attended, select_last_layers
from regard.show.page import translator_adapter
from regard.show.page.head_pictures import Alive
from regard.show.page.model_lock import check_client_in_modules
from regard.show.page.recording_entry import truncate_word
from regard.show.page.translator_adapter import TranslatorAdapter

MAX_NEXT_WORDS = 10  # likeliest next words that are shown
SLOW_STEP = 0.5  # seconds of a token; the client is looked after while the next one is computed
MAX_LIKELIEST = 5  # likeliest alternatives shown of each new token
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


class ModelAdapter(Protocol):
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


def adapt_model(model: Any) -> ModelAdapter | TranslatorAdapter:
    """Return a model with its tokenizer, given a GPT2, a translator of regard, or an object that has both already.

    Raises ConfigError for anything else.
    """
    if isinstance(model, GPT2):
        return GPT2Adapter("GPT-2", model)
    if isinstance(model, translator_adapter.Translator):
        return translator_adapter.adapt_translator("translator", model)
    if isinstance(model, TranslatorAdapter):
        return model
    if not all(hasattr(model, name) for name in ("tokens", "encode", "decode", "run")):
        raise ConfigError(
            f"the page needs a GPT2, or an object with tokens, encode, decode and run; got {type(model).__name__}."
        )
    adapter: ModelAdapter = model
    return adapter


def can_generate(adapter: ModelAdapter | TranslatorAdapter | None) -> bool:
    """Return whether the model can continue a text."""
    return isinstance(adapter, GPT2Adapter) or bool(getattr(adapter, "can_generate", False))


def get_decoder(adapter: ModelAdapter | TranslatorAdapter | None) -> nn.Module | None:
    """Return the model that `regard.generate` continues texts with, None if another function does."""
    found = adapter.model if isinstance(adapter, GPT2Adapter) else getattr(adapter, "decoder", None)
    return found if isinstance(found, GPT2 | TransformersDecoder) else None


def has_chat_template(adapter: ModelAdapter | TranslatorAdapter | None) -> bool:
    """Return whether the model can be asked in the form of its own chat template."""
    return can_generate(adapter) and bool(getattr(adapter, "has_chat_template", False))


def get_device(model: nn.Module) -> torch.device:
    """Return the device of a model, the CPU if it has no parameters."""
    return next((one.device for one in model.parameters()), torch.device("cpu"))


def copy_to_cpu(recording: Recording, device: torch.device) -> Recording:
    """Return a recording of a model on a device with all its numbers on the CPU, where the page computes."""
    if device.type == "cpu":
        return recording
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording.reg"
        recording.save(path)
        return load(path)


@dataclass(frozen=True, eq=False)
class RecordedText:
    """A recording of a model on a text, and notes; of a model that predicts them, the next words, and the tokens (1, t).

    Of a text that a model wrote, `looked` lists for each new token what it attends to.
    """

    recording: Recording
    notes: list[str]
    next_words: list[dict[str, Any]] | None = None
    ids: Tensor | None = None
    looked: list[list[dict[str, Any]]] = field(default_factory=list)


def record_text(adapter: ModelAdapter | TranslatorAdapter, text: str, most: int) -> RecordedText:
    """Record a model on the first tokens of a text."""
    if isinstance(adapter, TranslatorAdapter):
        note = describe_bytes(adapter.pieces(adapter.encode_sentence(text)))
        return RecordedText(translator_adapter.record_translation(adapter, text, most), [note] if note else [])
    ids, words, whole = read_tokens(adapter, text, most)
    with torch.inference_mode(), record(adapter.model, keep="values") as recording:
        output = adapter.run(ids)
    recording.model, recording.tokens = adapter.name, words
    recording = copy_to_cpu(recording, get_device(adapter.model))
    cut = f"The first {len(words):,} of {whole:,} tokens were read, as many as fit." if len(words) < whole else None
    notes = [note for note in (cut, describe_bytes(words)) if note]
    next_words = predict_next_words(adapter, output)
    return RecordedText(recording, notes, next_words, None if next_words is None else ids)


def read_tokens(adapter: ModelAdapter, text: str, most: int) -> tuple[Tensor, list[str], int]:
    """Return the first tokens of a text, (1, t), as many as the model was made for, their text, and the number of all."""
    return adapter.tokens(text, None if adapter.context is not None and adapter.context <= most else most)


def predict_next_words(adapter: ModelAdapter, output: object) -> list[dict[str, Any]] | None:
    """Return the likeliest next words, by the logits (1, t, n), or None for a model that does not predict them."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        return None
    values, ids = logits[0, -1].cpu().float().softmax(-1).topk(min(MAX_NEXT_WORDS, logits.shape[-1]))
    return [
        name_token(adapter, token) | {"probability": value} for token, value in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def name_token(adapter: ModelAdapter, token: int) -> dict[str, Any]:
    """Return a predicted token as JSON: its word, and whether it ends the text."""
    ends = adapter.list_ends() if hasattr(adapter, "list_ends") else []
    return {"word": truncate_word(adapter.decode([token])), **({"ends": True} if token in ends else {})}


@dataclass(frozen=True, eq=False)
class Continuation:
    """A model that continues a text: its tokens so far, and the choices that follow.

    `reader` reads the text with a cache; None where the adapter generates by itself.
    """

    ids: list[int]
    steps: Iterator[TokenChoice]
    text: PieceTokenizer
    reader: SequenceReader | None = None


@dataclass(frozen=True, eq=False)
class TokenDecoder:
    """The text of tokens, each on its own."""

    adapter: ModelAdapter

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        return [self.adapter.decode([token]) for token in ids]


def generate_tokens(
    adapter: ModelAdapter | TranslatorAdapter,
    text: str,
    tokens: int,
    temperature: float,
    seed: int | None,
    alive: Alive,
    chat: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
    end: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any] | RecordedText]:
    """Generate each new token as JSON, with the likeliest ones, and the recording of all last.

    With a cache the prompt is recorded as it is read, and the new tokens in one forward that continues it; else all in one.

    With `chat` the text is a message in the model's own chat template. is_stopped() is called after each token: true ends the
    text; end() is called after the last one. alive() is called before each module while the prompt and the whole text are read.
    Raises ConfigError after the last token if nothing was recorded.
    """
    if isinstance(adapter, TranslatorAdapter) or not can_generate(adapter):
        raise ConfigError(
            f"{adapter.name} can be shown here, but cannot generate: it does not predict the next token of a text."
        )
    if chat and not has_chat_template(adapter):
        raise ConfigError(f"{adapter.name} has no chat template: generate without it.")
    text = adapter.format_chat(text) if chat else text  # type: ignore[attr-defined]
    found = continue_text(adapter, text, tokens, temperature, seed, chat)
    ids, words, last = list(found.ids), found.text.pieces(found.ids), len(found.ids) - 1
    recorder = Recorder(adapter.model, keep="values")
    steps = check_client_in_steps(found.steps, alive, nullcontext() if found.reader is None else recorder.resume())
    for one in describe_tokens(steps, found.text, MAX_LIKELIEST):
        yield {
            "word": one.word,
            "place": len(words),  # the position of the new token
            "token": one.token,
            "probability": one.probability,
            "likeliest": [{"word": word, "probability": value} for word, value in one.likeliest],
        }
        ids.append(one.token)
        words.append(one.word)
        if is_stopped():
            break
    end()
    with check_client_in_modules(alive):
        recording = record_rest(adapter, found, recorder, ids[:-1])  # the last token was chosen and not read
    yield describe_story(adapter, recording, torch.tensor([ids[:-1]]), words[:-1], last)


def record_rest(adapter: ModelAdapter, found: Continuation, recorder: Recorder, ids: list[int]) -> Recording:
    """Record what was not recorded of tokens: those after the prompt, which its cache continues, or all without a cache."""
    new = ids[len(found.ids) :]
    with recorder.resume():
        if found.reader is None:
            with torch.inference_mode():
                adapter.run(torch.tensor([ids]))
        elif new:
            found.reader.crop(len(found.ids))
            found.reader.read([new])
    recorder.finish()
    return recorder.recording


def check_client_in_steps(
    steps: Iterable[TokenChoice], alive: Alive, first: AbstractContextManager[object]
) -> Iterator[TokenChoice]:
    """Yield steps; alive() is called before each module of the first one, which reads the prompt, and of one after a slow one.

    The first step is computed in the context `first`. Nothing observes the model in the others: compiled code can run it.
    """
    iterator, seconds = iter(steps), math.inf
    while True:
        begun = time.perf_counter()
        with check_client_in_modules(alive) if seconds > SLOW_STEP else nullcontext(), first:
            chosen = next(iterator, None)
        if chosen is None:
            return
        seconds, first = time.perf_counter() - begun, nullcontext()
        yield chosen


def describe_story(adapter: ModelAdapter, recording: Recording, ids: Tensor, words: list[str], first: int) -> RecordedText:
    """Return a recording of a text that a model wrote, with what each token from the query `first` on attends to."""
    recording.model, recording.tokens = adapter.name, words
    recording = copy_to_cpu(recording, get_device(adapter.model))
    layers = len(select_last_layers(len(recording.last.layers())))
    looked = [
        [{"place": near.position, "word": truncate_word(near.word), "weight": near.weight} for near in row]
        for row in list_attended(recording, layers, words, first)
    ]
    note = describe_bytes(words)
    return RecordedText(recording, [note] if note else [], None, ids, looked)


def continue_text(
    adapter: ModelAdapter, text: str, tokens: int, temperature: float, seed: int | None, is_complete: bool = False
) -> Continuation:
    """Start to continue a text, which has the tokens that begin it if `is_complete`, as a chat template writes it.

    Raises ConfigError where the context has no room.
    """
    takes_prompts = not isinstance(adapter, GPT2Adapter) and not is_complete
    ids = list(adapter.encode_prompt(text) if takes_prompts else adapter.encode(text))  # type: ignore[attr-defined]
    decoder = get_decoder(adapter)
    check_context(adapter, max(len(ids), 1), tokens)
    settings: dict[str, Any] = {"temperature": temperature, "seed": seed}
    if isinstance(adapter, GPT2Adapter):
        words: PieceTokenizer = adapter.words
        settings |= {"text": adapter.words, **adapter.model.get_end_settings()}
        ids = ids or adapter.list_ends()
    else:
        words = TokenDecoder(adapter)
    if decoder is None:
        return Continuation(ids, adapter.choices(ids, tokens, **settings), words)  # type: ignore[attr-defined]
    if not isinstance(adapter, GPT2Adapter):
        settings["stop"] = adapter.list_ends()  # type: ignore[attr-defined]
    found = start_decoding(decoder, [ids], tokens, **settings)  # type: ignore[arg-type]
    return Continuation(ids, found.steps, words, found.reader)


def check_context(adapter: ModelAdapter, prompt_tokens: int, tokens: int) -> None:
    """Raise ConfigError where the context has no room for `tokens` more; the last one is not read."""
    if adapter.context is None:
        return
    room = adapter.context - prompt_tokens + 1
    if tokens > room:
        fits = f"choose at most {room:,} more" if room > 0 else "shorten it"
        raise ConfigError(
            f"{adapter.name} reads {adapter.context:,} tokens at a time; the text has {prompt_tokens:,} and {tokens:,} more "
            f"are requested, so {fits}{', or start with a shorter text' if room > 0 else ''}."
        )


def list_sentences(adapter: ModelAdapter | TranslatorAdapter | None) -> list[str]:
    """Return three texts to try that the model can read."""
    if isinstance(adapter, TranslatorAdapter):
        return list(translator_adapter.SENTENCES)
    return [] if adapter is None else [text for text in SENTENCES if can_read(adapter, text)][:3]


def can_read(adapter: ModelAdapter, text: str) -> bool:
    """Return whether a model can read a text; models of few letters refuse others."""
    try:
        return bool(adapter.encode(text))
    except RegardError:
        return False

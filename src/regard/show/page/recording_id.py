"""Ids of recordings by content: the same recording has the same id on every server, and no other recording has it."""

import hashlib
import re
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from regard.observe import Recording
from regard.observe.implicit_history import StoredRecurrence
from regard.observe.recorded_runs.words import TextPair
from regard.observe.stored_calls.kv_history import KVHistory, StoredCall
from regard.show.page.model_adapter import ModelAdapter
from regard.show.page.translator_adapter import TranslatorAdapter

SAMPLED = 64  # numbers of a tensor that are hashed
DIGITS = 12  # of the hash, in hexadecimal
NAME_LETTERS, TEXT_LETTERS = 16, 24  # of the model and of the text in an id


def identify_recording(recording: Recording) -> str:
    """Return the id of a recording: its model, its first words, and a hash of its words and of numbers of every call."""
    tokens = recording.tokens
    words = [tokens.columns, tokens.rows] if isinstance(tokens, TextPair) else tokens or []
    numbers = [part for call in recording.calls for part in list_numbers(call.stored) if part is not None]
    histories = [history for run in recording.runs for history in run.histories.values()]
    keys = [keys for history in histories if isinstance(history, KVHistory) for keys in history.keys]
    text = "".join(find_first_words(words))
    return make_id(recording.model, text, [encode_text(repr(words)), *sample_tensors([*numbers, *keys])])


def list_numbers(stored: StoredCall | StoredRecurrence) -> list[Tensor | None]:
    """Return tensors of a stored call that tell it from calls on other texts."""
    return [stored.q, stored.v] if isinstance(stored, StoredCall) else [stored.values, stored.outputs]


def find_first_words(words: object) -> list[str]:
    """Return the first words of a list, or of the first of several lists."""
    few = list(words)[:TEXT_LETTERS] if isinstance(words, (list, tuple)) else []
    return [one for one in few if isinstance(one, str)] or (find_first_words(few[0]) if few else [])


def identify_model(adapter: ModelAdapter | TranslatorAdapter) -> bytes:
    """Return a hash of the name of a model and of numbers of each of its parameters and buffers."""
    digest = hashlib.sha256(encode_text(adapter.name))
    for name, tensor in adapter.model.state_dict().items():
        digest.update(encode_text(name))
        for part in sample_tensors([tensor]):
            digest.update(part)
    return digest.digest()


def make_id(model: str, text: str, parts: Iterable[bytes]) -> str:
    """Return an id that a link can hold: the beginning of the model's name and of the text, and a hash of all parts."""
    digest = hashlib.sha256(encode_text(model))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    names = simplify_text(model, NAME_LETTERS), simplify_text(text, TEXT_LETTERS), digest.hexdigest()[:DIGITS]
    return "-".join(name for name in names if name)


def encode_text(text: str) -> bytes:
    """Return the bytes of a text, which may have half a surrogate pair."""
    return text.encode("utf-8", "surrogatepass")


def simplify_text(text: str, letters: int) -> str:
    """Return the first ASCII letters and digits of a text, in lower case and with dashes between words."""
    return re.sub(r"[^a-z0-9]+", "-", text[: 4 * letters].lower()).strip("-")[:letters].strip("-")


def sample_tensors(tensors: Iterable[Tensor]) -> Iterable[bytes]:
    """Yield the shape and dtype of each tensor and the bytes of some of its numbers, at even distances."""
    for tensor in tensors:
        yield repr((tuple(tensor.shape), str(tensor.dtype))).encode()
        if tensor.numel():
            places = torch.linspace(0, tensor.numel() - 1, min(SAMPLED, tensor.numel()), dtype=torch.float64).long()
            index = np.unravel_index(places.numpy(), tensor.shape) if tensor.dim() else ()  # torch's imports sympy: 30 MB
            yield tensor.detach()[index].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

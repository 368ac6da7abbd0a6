"""The words of a map's axes: as ids, so that equal words can be found, and in classes, such as punctuation."""

import operator
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism.arguments import describe_value
from regard.observe.recorded_runs.token_ids import ENCODER, find_side

Words = Sequence[str] | Sequence[Sequence[str]]  # of one batch row or of each
Tokens = Words | Tensor  # or ids
Class = Tensor | Callable[[str], bool]
READERS: dict[str, Callable[[Any, list[int]], list[Any]]] = {  # by the method of a tokenizer: how it makes words of ids
    "pieces": lambda read, ids: read(ids),
    "convert_ids_to_tokens": lambda read, ids: read(ids),
    "id_to_token": lambda read, ids: [read(number) for number in ids],
    "decode": lambda read, ids: [read([number]) for number in ids],
    "__call__": lambda read, ids: read(ids),
}
UNKNOWN = "\ufffd"  # the word of an id that a tokenizer lacks
MARKS = "Ġ▁ĊĉĠ \t\r\n"  # white space as tokenizers write it


class TextPair(Sequence[Any]):
    """The words of a target and of its source: in cross attention those of the queries and of the keys.

    As a sequence it is the target's words, for callers that handle one text only: those of a decoder's self-attention. If the
    target's words are those that were written, `read` are those that the decoder read to write them, one place behind.
    """

    def __init__(self, rows: Words, columns: Words, read: Words | None = None) -> None:
        for words in (rows, columns, read):
            check_tokens(words)
        self.rows, self.columns, self.read = rows, columns, rows if read is None else read

    @classmethod
    def from_tokens(cls, tokens: Any) -> Any:
        """Convert {"rows": of the queries, "columns": of the keys} and optionally "read"; return anything else as it is."""
        if not isinstance(tokens, Mapping):
            return check_tokens(tokens)
        if set(tokens) - {"read"} != {"rows", "columns"}:
            raise ConfigError(
                f'words of two texts must be {{"rows": [...], "columns": [...]}}; got {", ".join(map(str, tokens))}.'
            )
        return cls(tokens["rows"], tokens["columns"], tokens.get("read"))

    def __len__(self) -> int:
        return len(self.read)

    def __getitem__(self, index: Any) -> Any:
        return self.read[index]


def number_sentences(words: Sequence[str]) -> list[int]:
    """Return the number of each word's sentence, from 0: one ends with ., ! or ?, and with what closes it."""
    numbers, number, ended = [], 0, False
    for word in words:
        text = word.strip(MARKS)
        if ended and text and any(one.isalnum() for one in text):
            number, ended = number + 1, False
        numbers.append(number)
        ended = ended or text.rstrip("\"')]”’»").endswith((".", "!", "?"))
    return numbers


def place_words(tokens: Any, rows: Sequence[int | None], b: int, lengths: Collection[int], is_generated: bool) -> Any:
    """Return words, or those of two texts, in the b batch rows of a map; see place_generated_words."""
    if tokens is None or isinstance(tokens, Tensor):
        return tokens
    if isinstance(tokens, TextPair):
        asking, answering, read = (
            place_words(words, rows, b, lengths, is_generated and words is not tokens.columns)
            for words in (tokens.rows, tokens.columns, tokens.read)
        )
        return TextPair(asking, answering, None if tokens.read is tokens.rows else read)
    return place_generated_words(tokens, rows, b, lengths) if is_generated else tokens


def check_lengths(tokens: Any, lengths: Collection[int]) -> None:
    """Raise ConfigError for words of a number of tokens that is not among the lengths; of two texts for those of either."""
    for words in (tokens.rows, tokens.columns) if isinstance(tokens, TextPair) else (tokens,):
        if isinstance(words, Tensor) or not words:
            continue
        if all(len(row) not in lengths for row in split_rows(words)):
            raise ConfigError(
                f"tokens must be the words of a layer's tokens: got {len(split_rows(words)[0])} words, but the layers have "
                f"{', '.join(map(str, sorted(lengths)))} tokens. recording.last.ids are those that the model read."
            )


def place_generated_words(words: Words, rows: Sequence[int | None], b: int, lengths: Collection[int]) -> Words:
    """Return the words of what `generate` returned as words of the b rows of a map, of which `rows` has that of each sequence.

    Row p of a map chose word p + 1, so that the last word is of no row: words one longer than all axes lose it. The rows of
    other beams have numbers in place of words. Words of all rows are returned as they are.
    """
    sequences = split_rows(words)
    are_returned = all(len(row) not in lengths for row in sequences) and any(len(row) - 1 in lengths for row in sequences)
    if are_returned:
        sequences = [row[:-1] if len(row) - 1 in lengths else row for row in sequences]
    if len(sequences) == len(rows) and b and (are_returned or len(rows) != b) and all(sequences):
        placed = dict(reversed([*zip(rows, sequences, strict=True)]))  # of sequences of the same row the first, the likeliest
        numbers = [str(n) for n in range(len(sequences[0]))]
        sequences = [placed.get(row, numbers) for row in range(b)]
    return sequences[0] if len(sequences) == 1 and isinstance(words[0], str) else sequences


def fit_words(words: Words | Tensor | None, b: int, n: int, repeats_rows: bool = False) -> Any:
    """Return the words of an axis of n tokens in b batch rows, or ids; None if no row has n.

    A row of another number has the positions of its tokens. `repeats_rows` states that each row may be that of several.
    """
    if words is None or isinstance(words, Tensor):
        return words if words is None or words.shape[-1] == n else None
    rows = split_rows(words)
    if all(len(row) != n for row in rows):
        return None
    if len(rows) == 1:
        return words
    if repeats_rows and b > len(rows) and b % len(rows) == 0:
        rows = [row for row in rows for _ in range(b // len(rows))]
    if len(rows) != b:
        return None
    fitted = [row if len(row) == n else [str(place) for place in range(n)] for row in rows]
    return words if len(words) == b and all(map(operator.is_, fitted, rows)) else fitted


def select_last_words(words: Any, count: int) -> Any:
    """Return the last words of each batch row."""
    return (
        [row[len(row) - count :] for row in words] if words and not isinstance(words[0], str) else words[len(words) - count :]
    )


def find_decoder(tokens: Any) -> Callable[[list[int]], list[str]] | None:
    """Return the function from ids to words that a tokenizer has, or that `tokens` is; None if it is neither."""
    name = None if isinstance(tokens, (bytes, type, Tensor)) else next((one for one in READERS if hasattr(tokens, one)), None)
    if name is None:
        return None
    return lambda ids: [UNKNOWN if word is None else word for word in READERS[name](getattr(tokens, name), ids)]


def select_axis_words(tokens: Any, kind: str, name: str) -> tuple[Any, Any]:
    """Return the words, or ids, of a layer's queries and keys, by its kind and its module's path; None where there are none.

    Of two texts, an encoder's self-attention has the source on both axes, a decoder's the target as it was read.
    """
    if not isinstance(tokens, TextPair):
        return tokens, tokens
    if kind == "cross":
        return tokens.rows, tokens.columns
    own = tokens.columns if find_side(name) == ENCODER else tokens.read
    return own, own


def check_tokens(tokens: Any) -> Any:
    """Return words or ids as they are.

    Raises ConfigError if they are neither words, rows of words nor an integer tensor of ids.
    """
    if tokens is None or isinstance(tokens, TextPair):
        return tokens
    if isinstance(tokens, Tensor):
        is_plain = tokens.layout is torch.strided and not (tokens.is_nested or tokens.is_complex() or tokens.is_quantized)
        if is_plain and not tokens.is_floating_point():
            return tokens
    elif isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes)):
        some = [row for row in tokens if not isinstance(row, str)]
        are_rows = len(some) in (0, len(tokens)) and all(isinstance(row, Sequence) for row in some)
        if are_rows and all(isinstance(word, str) for row in some for word in row):
            return tokens
    raise ConfigError(
        "tokens must be a list of words, a list of words for each batch row, a tensor of ids, or, once the model ran, a "
        f"tokenizer; got {describe_value(tokens)}."
    )


def is_punctuation(word: str) -> bool:
    """Return whether a token is only punctuation and white space: `,` and `Ġ,` and `...`, not `'s`."""
    bare = word.strip(MARKS).removeprefix("##")
    return bool(bare) and all(unicodedata.category(character).startswith("P") for character in bare)


def convert_to_ids(tokens: Tokens, b: int, k: int, device: torch.device) -> Tensor:
    """Return tokens as ids (b, k), equal where the words are equal. Words of one batch row apply to all. Raises ShapeError."""
    if isinstance(tokens, Tensor):
        found = tokens if tokens.dim() == 2 else tokens.unsqueeze(0)
    else:
        numbers: dict[str, int] = {}
        found = stack_rows([[numbers.setdefault(word, len(numbers)) for word in row] for row in split_rows(tokens)], k)
    if found.dim() != 2 or found.shape[0] not in (1, b) or found.shape[1] != k:
        raise ShapeError(
            f"tokens must be words or ids of the {k} keys, for one batch row or for each of {b}; {describe_words(tokens)}."
        )
    return found.to(device).expand(b, k)


def mark_classes(tokens: Tokens | None, chosen: Mapping[str, Class], b: int, k: int, device: torch.device) -> Tensor:
    """Return which keys belong to each class, bool (b, n, k).

    A class is a bool tensor (k,) or (b, k), or a function of a word. Raises ShapeError if words are needed and missing.
    """
    found = []
    for name, rule in chosen.items():
        if isinstance(rule, Tensor):
            members = rule
        elif tokens is None or isinstance(tokens, Tensor):
            raise ShapeError(
                f"the class {name!r} needs words, but there are none. Set recording.tokens, or pass a bool tensor (k,)."
            )
        else:
            members = stack_rows([[bool(rule(word)) for word in row] for row in split_rows(tokens)], k)
        members = members if members.dim() == 2 else members.unsqueeze(0)
        if members.dtype != torch.bool or members.shape[0] not in (1, b) or members.shape[1] != k:
            raise ShapeError(
                f"the class {name!r} must be bool (k,) = ({k},) or (b, k), got {members.dtype} {tuple(members.shape)}."
            )
        found.append(members.to(device).expand(b, k))
    return torch.stack(found, 1) if found else torch.zeros(b, 0, k, dtype=torch.bool, device=device)


def split_rows(tokens: Sequence[str] | Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Return words as one sequence per batch row."""
    return [tokens] if all(isinstance(word, str) for word in tokens) else list(tokens)  # type: ignore[list-item]


def stack_rows(found: Sequence[Sequence[int]], k: int) -> Tensor:
    """Return a tensor with one row for each list. Raises ShapeError if a list has not k entries."""
    for row, one in enumerate(found):
        if len(one) != k:
            raise ShapeError(f"tokens must have one word for each of the {k} keys; batch row {row} has {len(one)}.")
    return torch.tensor(found)


def describe_words(tokens: Tokens) -> str:
    """Return what was given, in words, for an error message."""
    return f"got {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else f"got words of {len(split_rows(tokens))} batch rows"

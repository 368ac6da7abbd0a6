"""A tokenizer of transformers as `regard.generate` reads it: texts to tokens, and tokens to bytes."""

import builtins
import re
from collections.abc import Sequence
from typing import Any

from regard.text.byte_pair_files import map_bytes_to_letters, map_letters_to_bytes
from regard.text.padded_vocabulary import UNKNOWN

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of one byte, as SentencePiece writes it
SPACE = "\u2581"  # a space, as SentencePiece writes it


class TransformersTokenizer:
    """The vocabulary of a tokenizer of transformers: of bytes as GPT-2's, SentencePiece as Llama 2's, WordPiece as BERT's."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        pieces: dict[str, int] = {} if backend is None else backend.get_vocab(with_added_tokens=False)
        read_added = getattr(tokenizer, "get_added_vocab", None)
        added = () if read_added is None else read_added()  # pieces among them too, if they are special
        self.added = frozenset(piece for piece in added if piece not in pieces)  # their letters stand for themselves
        self.is_of_bytes = map_bytes_to_letters()[ord(" ")] in vocabulary
        inner = next((piece for piece in vocabulary if piece.startswith("##") and piece.strip("#")), None)
        # a tokenizer without such a piece, as ByT5's, may be unable to write one
        self.is_wordpiece = not self.is_of_bytes and inner is not None and self.join_to_word(inner) == inner[2:]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that begin or end one."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @property
    def beginning(self) -> list[int]:
        """The tokens that the tokenizer puts before every text, such as that of its beginning; often none."""
        with_added, plain = (list(self.tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (True, False))
        starts = range(len(with_added) - len(plain) + 1)
        return with_added[: next((n for n in starts if with_added[n : n + len(plain)] == plain), 0)]

    def bytes(self, ids: Sequence[int]) -> builtins.bytes:
        """Return the bytes of tokens; those of special tokens are their names, and U+FFFD of one that the vocabulary lacks."""
        return b"".join(map(self.read_piece, self.tokenizer.convert_ids_to_tokens(list(ids))))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; bytes of incomplete characters are written like \\xe2."""
        return [self.bytes([number]).decode(errors="backslashreplace") for number in ids]

    def restore_start(self, first: int, text: str) -> str:
        """Return a text of tokens as its first one begins, which decoders take for the first of a whole text.

        SentencePiece's drops one of its spaces, WordPiece's the space before a word or leaves the ## of what continues one.
        """
        if self.is_of_bytes:
            return text
        piece = str(self.tokenizer.convert_ids_to_tokens(first) or "")
        if self.is_wordpiece:
            return self.read_piece(piece or None).decode() + text.removeprefix(piece)
        spaces = len(piece) - len(piece.lstrip(SPACE))
        return " " * max(spaces - (len(text) - len(text.lstrip(" "))), 0) + text

    def join_to_word(self, piece: str) -> str:
        """Return the text of a token of WordPiece after another one, by the tokenizer's own decoder."""
        return str(self.tokenizer.convert_tokens_to_string(["a", piece]))[1:]

    def read_piece(self, piece: str | None) -> builtins.bytes:
        """Return the bytes of a token by its name in the vocabulary; None is one that a model has beyond it, as Qwen2 does."""
        if piece is None:
            return UNKNOWN.encode()
        if self.is_wordpiece:
            return self.join_to_word(piece).encode()
        byte, letters = BYTE.fullmatch(piece), map_letters_to_bytes()
        if not self.is_of_bytes:
            return piece.replace(SPACE, " ").encode() if byte is None else builtins.bytes([int(byte[1], 16)])
        known = piece not in self.added and all(letter in letters for letter in piece)
        return builtins.bytes(letters[letter] for letter in piece) if known else piece.encode()


class PromptTokenizer(TransformersTokenizer):
    """A tokenizer of texts that are continued: they begin as the tokenizer begins every text, and do not end.

    An empty text, which would have no tokens, begins with that of the beginning of a text, or of the end of another.
    """

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; none for an empty one if nothing begins it."""
        ids, beginning = super().encode(text), self.beginning
        if beginning and ids[: len(beginning)] != beginning:  # a text that was written with them has them once
            return beginning + ids
        known = [self.tokenizer.bos_token_id, self.tokenizer.eos_token_id]
        return ids or [int(token) for token in known if token is not None][:1]

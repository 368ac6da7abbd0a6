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
    """The vocabulary of a tokenizer of transformers, of bytes as GPT-2's or of SentencePiece as Llama 2's."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.is_of_bytes = map_bytes_to_letters()[ord(" ")] in tokenizer.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that begin or end one."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def bytes(self, ids: Sequence[int]) -> builtins.bytes:
        """Return the bytes of tokens; those of special tokens are their names, and U+FFFD of one that the vocabulary lacks."""
        return b"".join(map(self.read_piece, self.tokenizer.convert_ids_to_tokens(list(ids))))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; bytes of incomplete characters are written like \\xe2."""
        return [self.bytes([number]).decode(errors="backslashreplace") for number in ids]

    def read_piece(self, piece: str | None) -> builtins.bytes:
        """Return the bytes of a token by its name in the vocabulary; None is one that a model has beyond it, as Qwen2 does."""
        if piece is None:
            return UNKNOWN.encode()
        byte, letters = BYTE.fullmatch(piece), map_letters_to_bytes()
        if not self.is_of_bytes:
            return piece.replace(SPACE, " ").encode() if byte is None else builtins.bytes([int(byte[1], 16)])
        known = all(letter in letters for letter in piece)
        return builtins.bytes(letters[letter] for letter in piece) if known else piece.encode()

"""Soft alignments in words: the attention of each word that a translator writes to the words of the source.

Source: Bahdanau et al. 2014, section 5.2.1 and figure 3.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import DataError
from regard.generate.translation_search import END_LABEL, Translator, get_end_token
from regard.observe import record
from regard.text import BytePair

WORD = re.compile(r"\w(?:\S*\w)?|[^\w\s]+")  # runs without white space, less the signs at their ends: l'homme, t-shirt, don't


@dataclass(frozen=True, eq=False)
class Alignment:
    """weights (layers, target words, source words): rows sum to 1; the last word of either side is its end."""

    source: list[str]
    target: list[str]
    weights: Tensor


@torch.no_grad()
def align(model: Translator, source: str, target: str) -> Alignment:
    """Compute the attention of each word of a target to the source words, in every cross-attention layer, averaged over heads.

    The target is read as in training, so it need not be the model's own; row i is of the query that predicts word i. Pieces
    of a word share a row, their mean, and a column, their sum. Raises DataError if the model has no attention or a side has no
    word.
    """
    end, text = get_end_token(model), model.text
    source_ids, target_ids = (text.encode(" ".join(side.split())) for side in (source, target))
    if not source_ids or not target_ids:
        raise DataError("there is no word to align: source and target must have at least one each.")
    with record(model) as recording:  # type: ignore[arg-type]  # every translator is a module
        model(torch.tensor([[*source_ids, end]]), torch.tensor([len(source_ids) + 1]), torch.tensor([[end, *target_ids]]))
    layers = recording.layers("cross") if recording.runs else []
    if not layers:
        raise DataError("this translator has no attention, so its words cannot be aligned.")
    weights = torch.stack([recording.map(layer, kind="cross").dense()[0].mean(0) for layer in layers])
    (columns, source_words), (rows, target_words) = group_by_word(text, source_ids), group_by_word(text, target_ids)
    return Alignment(
        [*source_words, END_LABEL],
        [*target_words, END_LABEL],
        merge_weights(weights, [*rows, len(target_words)], [*columns, len(source_words)]),
    )


def group_by_word(text: BytePair, tokens: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return the index of the word that each token is a piece of, and the words."""
    joined = text.decode(tokens)
    found_words = WORD.finditer(repeat_marked_letters(joined))
    ends = [len(joined[: found.end()].encode()) for found in found_words] or [len(joined.encode())]
    belongs, stop = [], 0
    for token in tokens:
        stop += len(text.bytes([token]))
        belongs.append(next((n for n, end in enumerate(ends) if stop <= end), len(ends) - 1))
    found = list(dict.fromkeys(belongs))  # a piece of two words counts for the later one, which may leave the first without any
    words = [text.decode([token for token, n in zip(tokens, belongs, strict=True) if n == one]).strip() for one in found]
    return [found.index(n) for n in belongs], words


def repeat_marked_letters(text: str) -> str:
    """Replace each combining mark, such as an accent or a vowel sign, by the letter or sign before it: both are of one word."""
    letters: list[str] = []
    for letter in text:
        is_mark = unicodedata.category(letter).startswith("M") and bool(letters) and not letters[-1].isspace()
        letters.append(letters[-1] if is_mark else letter)
    return "".join(letters)


def merge_weights(weights: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """Merge weights (..., q, k) of tokens to weights of words: average a word's rows, sum its columns; rows still sum to 1.

    rows and columns hold the index of the word of each token, from 0 on without a gap.
    """
    asking, answering = (torch.nn.functional.one_hot(torch.tensor(one)).to(weights) for one in (rows, columns))
    return (asking / asking.sum(0)).mT @ weights @ answering

"""Tasks of any length, as in RULER: sentences hidden in a text, or a list of words, and a question after it."""

import bisect
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from regard.errors import DataError
from regard.mechanism.arguments import check_choice, check_count
from regard.probe.retrieval import join_question
from regard.text.encoder import Encoder

COMMON_WORDS = "common words"
KINDS = ("single", "multi key", "multi value", "variable tracking", COMMON_WORDS)
KEYS = ("harbor", "lantern", "orchard", "violin", "glacier", "compass", "meadow", "thimble")
SENTENCE = "The magic number of the {key} is {number}."
QUESTION = "The magic number of the {key} is"
VALUES = 3  # numbers of a key, and variables of a chain
DIGITS = 5  # of a number
COMMON, RARE = 30, 3  # times that the common word is listed, and every other one, as in RULER


@dataclass(frozen=True)
class NeedleTask:
    """The tokens of a text with needles, of a question and of its answer; `context` tokens come before the question.

    answer is the place of the first token of the answer, which ends the task.
    """

    kind: str
    tokens: tuple[int, ...]
    context: int
    answer: int


def make_needle_tasks(
    vocabulary: Encoder, haystack: str, *, length: int, kinds: Sequence[str] = KINDS, count: int = 4, seed: int = 0
) -> list[NeedleTask]:
    """Make `count` tasks of each kind, of at most `length` tokens, from a text in which the needles are hidden.

    single: one sentence with a number. multi key: four of them, one is asked for. multi value: three numbers of one key, in
    order. variable tracking: a chain of assignments, whose names are asked for. common words: a numbered list of words of the
    text in random order, of which one stands ten times as often as every other one; it is asked for (RULER asks for the ten
    most common ones, in any order, which a single greedy answer cannot be). Any language model can be asked, since the question
    begins the sentence of the answer. Needles lie at random depths. Source: Hsieh et al. 2024 (RULER), section 3.
    Raises DataError for a text that is too short.
    """
    check_count("length", length)
    check_count("count", count)
    draw = random.Random(seed)
    text, words = vocabulary.encode(haystack), sorted(set(re.findall(r"\b[a-z]{4,}\b", haystack)))
    return [
        list_words(vocabulary, words, length, draw)
        if kind == COMMON_WORDS
        else hide_needles(vocabulary, text, length, kind, *write_needles(kind, draw), draw)
        for kind in kinds
        for _ in range(count)
        if check_choice("a kind", kind, KINDS)
    ]


def write_needles(kind: str, draw: random.Random) -> tuple[list[str], str, str]:
    """Write the needles of a task in their order, its question and its answer."""
    numbers = [str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in range(4)]
    keys = draw.sample(KEYS, 4)
    if kind == "single":
        return [SENTENCE.format(key=keys[0], number=numbers[0])], QUESTION.format(key=keys[0]), f" {numbers[0]}"
    if kind == "multi key":
        pairs = list(zip(keys, numbers, strict=True))
        key, number = draw.choice(pairs)
        return [SENTENCE.format(key=one, number=other) for one, other in pairs], QUESTION.format(key=key), f" {number}"
    if kind == "multi value":
        needles = [f"A magic number of the {keys[0]} is {number}." for number in numbers[:VALUES]]
        return needles, f"The magic numbers of the {keys[0]}, in order, are", f" {', '.join(numbers[:VALUES])}"
    names = draw.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", VALUES)
    chain = [f"Set {names[0]} = {numbers[0]}.", *(f"Set {b} = {a}." for a, b in pairwise(names))]
    return chain, f"The variables that equal {numbers[0]}, in order, are", f" {', '.join(names)}"


def hide_needles(
    vocabulary: Encoder,
    text: Sequence[int],
    length: int,
    kind: str,
    needles: Sequence[str],
    question: str,
    answer: str,
    draw: random.Random,
) -> NeedleTask:
    """Hide needles at random depths of a text, in their order, and append the question and its answer."""
    hidden = [vocabulary.encode(f"\n{needle}\n") for needle in needles]
    all_ids, first = join_question(vocabulary, question, answer)
    room = length - sum(map(len, hidden)) - len(all_ids)
    if room < 1:
        raise DataError(
            f"tasks of {length:,} tokens have no room for a text beside needles and a question, which take {length - room:,}: "
            f"they need at least {length - room + 1:,} tokens."
        )
    if room > len(text):
        raise DataError(
            f"the text has {len(text):,} tokens; tasks of {length:,} tokens need {room:,} of a text. Pass a longer text or a "
            "smaller length."
        )
    places = sorted(draw.randrange(room) for _ in hidden)
    tokens: list[int] = []
    for start, stop, needle in zip([0, *places], [*places, room], [*hidden, []], strict=True):
        tokens += [*text[start:stop], *needle]
    return NeedleTask(kind, (*tokens, *all_ids), len(tokens), len(tokens) + first)


def list_words(vocabulary: Encoder, words: Sequence[str], length: int, draw: random.Random) -> NeedleTask:
    """List as many words as `length` tokens have room for, one of them more often, and append the question and its answer."""
    common, *others = draw.sample(words, len(words)) or [""]
    question, first = join_question(vocabulary, "The most common word in the list is", f" {common}")
    seed = draw.random()

    def encode_list(count: int) -> list[int]:
        entries = [common] * COMMON + others[:count] * RARE
        random.Random(seed).shuffle(entries)
        return vocabulary.encode(" ".join(f"{n}. {word}" for n, word in enumerate(entries, 1)))

    counts = range(1, len(others) + 1)
    fitting = bisect.bisect_right(counts, length - len(question), key=lambda count: len(encode_list(count)))
    if not fitting:
        least = len(encode_list(1)) + len(question)
        raise DataError(
            f"a list of common words needs {least:,} tokens and two different words of the text: the text has {len(words):,}, "
            f"and tasks have {length:,} tokens."
        )
    tokens = encode_list(fitting)
    return NeedleTask(COMMON_WORDS, (*tokens, *question), len(tokens), len(tokens) + first)

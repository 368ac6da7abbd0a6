"""Longer sentences than there are: captions joined by "and", in both languages; the same words can also be read apart."""

from collections.abc import Sequence

AND = {"source": "and", "target": "et"}
COUNTS = (1, 2, 3, 4, 5)  # captions of a sentence


def joined(captions: Sequence[str], word: str) -> str:
    """One sentence of several: "A man sits. A dog runs." is "A man sits and a dog runs."."""
    *before, last = (one if not n else one[:1].lower() + one[1:] for n, one in enumerate(captions))
    return f" {word} ".join([*(one.strip().removesuffix(".").rstrip() for one in before), last])


def groups(captions: Sequence[str], count: int, word: str) -> list[str]:
    """All captions, each `count` of them that follow one another as one; those left over are left out."""
    return [joined(captions[n : n + count], word) for n in range(0, len(captions) - count + 1, count)]

"""WikiText as its articles were written: without the spaces and marks that its makers put around words."""

import re

MARKED = re.compile(r" @([-,.])@ ")  # such as 1 @,@ 000, first @-@ class
SPACE_BEFORE = re.compile(r" (?=[,.;:!?)\]%°]|n't\b|'(?:s|d|m|t|ll|re|ve)\b)")  # no space before these
SPACE_AFTER = re.compile(r"(?<=[(\[$£€]) ")  # no space after these
OWNERS = re.compile(r"(?<=s) '(?= \w)")  # such as the players ' own
QUOTED = re.compile(r'(?<!\S)" ([^"\n]*?) "(?!\w)')
SINGLE = re.compile(r"(?<!\S)' ([^'\n]*?) '(?!\w)")
HEADING = re.compile(r"^ ((?:= )+)(.*?)((?: =)+) *$", re.MULTILINE)
EDGES = re.compile(r"^ +| +$", re.MULTILINE)


def detokenize(text: str) -> str:
    """Return the text with ` @-@ ` as `-`, `( 1990 )` as `(1990)`, ` = Title = ` as `= Title =`, and so on.

    Nothing but spaces and the marks @,@ @.@ and @-@ is changed, and line breaks are kept. GPT-2's figures for WikiText are of
    texts treated like this ("invertible de-tokenizers", section 3.1 of its paper), by rules that were not published; the words
    in a perplexity by word are those of the text before: see `words`.
    """
    text = MARKED.sub(r"\1", text)
    text = HEADING.sub(lambda found: found[1].replace(" ", "") + " " + found[2] + " " + found[3].replace(" ", ""), text)
    text = EDGES.sub("", text)
    text = SPACE_AFTER.sub("", SPACE_BEFORE.sub("", text))
    return SINGLE.sub(r"'\1'", QUOTED.sub(r'"\1"', OWNERS.sub("'", text)))


def count_words(text: str) -> int:
    """Count the words of WikiText: the runs between white space, and each line's end, which its makers count as <eos>."""
    return len(text.split()) + text.count("\n")

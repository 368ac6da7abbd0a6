"""The example of `regard walk` from the user's own words, files and settings, with notes on what was drawn at random."""

import argparse
import re
from collections.abc import Sequence

from torch import Tensor

from regard.errors import ConfigError, DataError, ShapeError, WeightsError
from regard.lectures.custom_example import HEAD_WIDTH, WIDTH, build_custom_example, draw_weights, make_vectors
from regard.lectures.example_steps import Example, number_labels
from regard.lectures.examples import load_journey
from regard.mechanism import EVERYTHING, Causal, Mask, Prefix, Window
from regard.weights.arrays import read_arrays
from regard.weights.projections import Projections, find_projections

SEED, MOST_HEADS = 123, 128


def make_custom_example(options: argparse.Namespace) -> Example:
    """Return every step of attention on the given words, vectors, weights, heads and mask."""
    seed = check_seed(options)
    if options.heads is not None and not 1 <= options.heads <= MOST_HEADS:
        raise ConfigError(f"--heads must be at least 1 and at most {MOST_HEADS}, got {options.heads}.")
    weights = None if options.weights is None else read_projections(options.weights)
    words, x, notes = make_words(options, None if weights is None else weights.d_in, seed)
    count = options.heads or (weights.heads if weights is not None and weights.heads else 1)
    if weights is not None:
        notes.append(
            f"W_query, W_key and W_value are those of {options.weights}" + ", as one head." * (count == 1) + "." * (count > 1)
        )
    elif options.heads is not None:
        weights = draw_weights(x.shape[-1], count, seed)
        notes.append(f"W_query, W_key and W_value are random (seed {seed}), {HEAD_WIDTH} numbers a head.")
    mask, mask_notes = choose_mask(options.mask, weights)
    return build_custom_example(words, x, mask, weights=weights, count=count, notes=(*notes, *mask_notes))


def check_seed(options: argparse.Namespace) -> int:
    """Return the seed; raise ConfigError for a seed that is invalid or not used."""
    if options.seed is None:
        return SEED
    seed: int = options.seed
    if all(getattr(options, name) is None for name in ("words", "vectors", "heads")):
        raise ConfigError("--seed applies to random vectors and weights: give --words or --heads with it.")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed must be at least 0 and below 2^63, got {seed}.")
    return seed


def make_words(options: argparse.Namespace, width: int | None, seed: int) -> tuple[Sequence[str], Tensor, list[str]]:
    """Return the words, their vectors (t, d), and notes on them."""
    words = None if options.words is None else options.words.split()
    if words is not None and not words:
        raise ConfigError("--words needs at least one word, as in --words 'the cat sleeps'.")
    if options.vectors is not None:
        return read_vectors(options.vectors, words, seed)
    if words is None:
        return *load_journey(), ["The words and their vectors are those of the example 'simple'."]
    x, _ = make_vectors(words, {}, width or WIDTH, seed)
    return words, x, [f"The vectors are random (seed {seed}), {x.shape[-1]} numbers a word."]


def read_vectors(path: str, words: Sequence[str] | None, seed: int) -> tuple[Sequence[str], Tensor, list[str]]:
    """Return the words with the vectors of a file: a table with a row for each word, or vectors named after words."""
    tensors = read_arrays(path)
    notes = [f"The vectors are those of {path}."]
    if [tensor.dim() for tensor in tensors.values()] == [2]:
        table = next(iter(tensors.values()))
        names = number_labels("w", len(table)) if words is None else words
        if len(names) != len(table):
            raise ShapeError(f"there are {len(names)} words, but {path} has {len(table)} rows: one is needed for each word.")
        return names, table, notes
    if len({tensor.shape for tensor in tensors.values()}) != 1 or any(tensor.dim() != 1 for tensor in tensors.values()):
        shapes = ", ".join(f"{name!r} {tuple(tensor.shape)}" for name, tensor in list(tensors.items())[:6])
        raise DataError(
            f"{path} must hold one table (words, numbers), or vectors of one width by the words' names; got {shapes}."
        )
    names = tuple(tensors) if words is None else words
    if not set(names) & set(tensors):
        raise DataError(f"{path} has no vector for any of the words; its names are {', '.join(map(repr, list(tensors)[:6]))}.")
    x, random_words = make_vectors(names, tensors, len(next(iter(tensors.values()))), seed)
    if random_words:
        notes.append(f"The vectors of {', '.join(random_words)} are random (seed {seed}).")
    return names, x, notes


def choose_mask(text: str | None, weights: Projections | None) -> tuple[Mask, tuple[str, ...]]:
    """Return the given mask and notes on it; causal if none is given and the weights include the lectures' mask."""
    if text is None and weights is not None and weights.causal:
        return Causal(), ("The file of weights contains a causal mask, which is used; --mask none turns it off.",)
    return (EVERYTHING, ()) if text is None else (parse_mask(text), ())


def parse_mask(text: str) -> Mask:
    """Parse a mask: rules joined by & and |, of which & binds closer. Raises ConfigError."""
    return join_masks(
        [join_masks([parse_single_rule(part, text) for part in side.split("&")], "&") for side in text.split("|")], "|"
    )


def join_masks(masks: Sequence[Mask], sign: str) -> Mask:
    """Combine masks by one operator."""
    joined, *rest = masks
    for mask in rest:
        joined = joined & mask if sign == "&" else joined | mask
    return joined


def parse_single_rule(part: str, text: str) -> Mask:
    """Parse a single rule."""
    part = part.strip()
    if part == "causal":
        return Causal()
    if part == "none":
        return EVERYTHING
    if found := re.fullmatch(r"window:([0-9]{1,9})(?:,([0-9]{1,9}))?", part):
        return Window(int(found[1]), None if found[2] is None else int(found[2]))
    if found := re.fullmatch(r"prefix:([0-9]{1,9})", part):
        return Prefix(int(found[1]))
    known = "causal, none, window:LEFT[,RIGHT] or prefix:N, joined by & and |"
    raise ConfigError(f"--mask {text!r} is not a rule: expected {known}.")


def read_projections(path: str) -> Projections:
    """Read the projections in a file; a WeightsError names the file."""
    try:
        return find_projections(read_arrays(path))
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None

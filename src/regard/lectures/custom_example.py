"""The user's own sentence as an example: vectors, weights, heads and a mask, with seeded random ones for what is missing."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regard.errors import ConfigError, DataError, ShapeError, TooLargeError
from regard.lectures.example_steps import Example, ExampleStep, make_word_panel, show_inputs, show_matrices, show_projections
from regard.lectures.examples import make_projected_example, show_joined_heads
from regard.mechanism import EVERYTHING, Mask, attend, heads
from regard.weights.projections import Projection, Projections

WIDTH, HEAD_WIDTH = 3, 2  # of random vectors, and of a head with random weights, as in the lectures
MAX_WEIGHTS = 2**22  # most weights, over all heads


def build_custom_example(
    words: Sequence[str],
    x: Tensor,
    mask: Mask = EVERYTHING,
    *,
    weights: Projections | None = None,
    count: int = 1,
    notes: Sequence[str] = (),
) -> Example:
    """Compute every step of attention on given words: softmax(x xᵀ) x without weights, else with `count` heads.

    Shapes: x (t, d), a row for each word. Raises ShapeError or ConfigError if words, vectors, weights and heads do not fit,
    TooLargeError if there would be too many steps to store.
    """
    words = tuple(words)
    if len(words) != len(x):
        raise ShapeError(f"there are {len(words)} words, but {len(x)} vectors: one is needed for each word.")
    if count * len(words) ** 2 > MAX_WEIGHTS:
        most = int((MAX_WEIGHTS / count) ** 0.5)
        spread = "one head" if count == 1 else f"{count} heads"
        raise TooLargeError(f"{len(words)} words are too many to store every step: with {spread} at most {most}.")
    return (
        build_unweighted_example(words, x, mask, notes)
        if weights is None
        else build_weighted_example(words, x, mask, weights, count, notes)
    )


def build_unweighted_example(words: tuple[str, ...], x: Tensor, mask: Mask, notes: Sequence[str]) -> Example:
    """Compute softmax(x xᵀ) x."""
    return Example(
        name="own",
        title="Self-attention with nothing to train",
        source="your words",
        words=words,
        focus=len(words) - 1,
        q=x,
        k=x,
        v=x,
        steps=attend(x, x, x, mask, scale=1.0),
        formulas={"scores": "x xᵀ", "context": "weights x"}
        | {name: formula.replace("scaled", "scores") for name, formula in mask_formula(mask).items()},
        before=(show_inputs(words, x),),
        notes=tuple(notes),
        leads_to="trainable",
    )


def build_weighted_example(
    words: tuple[str, ...], x: Tensor, mask: Mask, weights: Projections, count: int, notes: Sequence[str]
) -> Example:
    """Compute softmax(q kᵀ / √d) v with `count` heads."""
    q, k, v = project_words(x, weights, count)
    steps = attend(q, k, v, mask)
    joined = heads.join(steps.context) if count > 1 else steps.context
    sentence = "Three matrices turn the vector of a word into its query, key and value."
    return make_projected_example(
        (words, q, k, v),
        name="own",
        title="Self-attention with weights" if count == 1 else f"Attention of {count} heads",
        source="your words",
        focus=len(words) - 1,
        steps=steps,
        formulas=mask_formula(mask),
        before=(
            show_inputs(words, x),
            show_matrices({"query": weights.query.weight, "key": weights.key.weight, "value": weights.value.weight}, sentence),
            show_projections(words, q, k, v),
        ),
        after=tuple(show_outputs(words, joined, count, weights.out)),
        notes=tuple(notes),
        leads_to="causal" if count == 1 else "heads",
    )


def mask_formula(mask: Mask) -> dict[str, str]:
    """Return the formula of the mask, if there is one."""
    return {} if mask == EVERYTHING else {"masked": f"scaled, -inf outside {mask}"}


def project_words(x: Tensor, weights: Projections, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the queries, keys and values: (t, d), or (h, t, d) with several heads."""
    if x.shape[-1] != weights.d_in:
        raise ShapeError(f"the vectors have {x.shape[-1]} numbers each, but W_query takes {weights.d_in}.")
    if weights.heads is not None and count != weights.heads:
        raise ConfigError(f"the weights are those of {weights.heads} stacked heads, not of {count}.")
    for name, one in (("W_query", weights.query), ("W_value", weights.value)):
        if one.weight.shape[1] % count:
            raise ConfigError(f"{name} gives {one.weight.shape[1]} numbers, which cannot be split evenly into {count} heads.")
    projections = (weights.query(x), weights.key(x), weights.value(x))
    q, k, v = projections if count == 1 else (heads.split(part, count) for part in projections)
    return q, k, v


def show_outputs(words: tuple[str, ...], joined: Tensor, count: int, out: Projection | None) -> list[ExampleStep]:
    """List the steps after the contexts of the heads: these joined, and the output projection."""
    steps = []
    if count > 1:
        steps.append(show_joined_heads(words, joined, count, "One row for each word again."))
    if out is not None:
        formula = "joined out_proj" if count > 1 else "context out_proj"
        sentence = "One more projection mixes these numbers."
        steps.append(ExampleStep("output", formula, sentence, (make_word_panel(out(joined), words, "y"),)))
    return steps


def make_vectors(words: Sequence[str], known: Mapping[str, Tensor], width: int, seed: int) -> tuple[Tensor, tuple[str, ...]]:
    """Return a vector for each word, (t, width), and the words whose vector was drawn.

    Vectors that are not in `known` are uniform in 0 ... 1 from the seed, rounded to two decimals so that they can be checked by
    hand; equal words share one.
    """
    generator = torch.Generator().manual_seed(seed)
    random_words = {
        word: (torch.rand(width, generator=generator) * 100).round() / 100 for word in dict.fromkeys(words) if word not in known
    }
    rows = {**known, **random_words}
    for word in words:
        if rows[word].shape != (width,):
            raise DataError(f"the vector of {word!r} has the shape {tuple(rows[word].shape)}, but ({width},) is needed.")
    return torch.stack([rows[word] for word in words]), tuple(random_words)


def draw_weights(d_in: int, count: int, seed: int) -> Projections:
    """Draw the projections of `count` heads from the seed: normal, rounded to two decimals."""
    generator = torch.Generator().manual_seed(seed)

    def draw_linear() -> Projection:
        return Projection((torch.randn(d_in, count * HEAD_WIDTH, generator=generator) * 100).round() / 100)

    return Projections(query=draw_linear(), key=draw_linear(), value=draw_linear())

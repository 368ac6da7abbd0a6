"""The lectures' examples as values: their words, every step of their attention, and what else they show."""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.layers import AdditiveAttention, BareSelfAttention, SimpleSelfAttention, StackedHeads
from regard.layers.causal import past, renormalised_after_softmax
from regard.lectures import recompute
from regard.lectures.figures import figure, known, sentence, tensor
from regard.lectures.forms import four_softmaxes
from regard.lectures.scaling import scaling
from regard.lectures.scenes import (
    Example,
    Line,
    Panel,
    Scene,
    inputs,
    lectures,
    matrices,
    matrix,
    numbered,
    of_words,
    projected,
)
from regard.mechanism import Causal, Steps, attend, heads, softmax
from regard.mechanism.scores import default_scale

SEED = 123  # the lectures'
ALIKE = 1e-12  # largest difference of float64 numbers by rounding alone


def example(name: str) -> Example:
    """Return the example of this name.

    The global random state is restored. Raises ConfigError if there is no such example.
    """
    with recompute.apart():
        return EXAMPLES[known(name, EXAMPLES)]()


def summary(name: str) -> str:
    """Return the first line of an example's docstring: what the example shows, in a sentence."""
    return (EXAMPLES[name].__doc__ or "").partition("\n")[0]


def journey() -> tuple[tuple[str, ...], Tensor]:
    """Return the words of the first sentence, and their vectors."""
    words, x = sentence("journey")
    return tuple(words), x


def dog() -> tuple[tuple[str, ...], Tensor, BareSelfAttention]:
    """Return the words of the second sentence, their vectors, and the layer whose matrices are printed."""
    words, x = sentence("dog")
    layer = BareSelfAttention(3, 3)
    for name, weight in layer.named_parameters():
        weight.copy_(tensor(figure("dog-self-attention")[name]))
    return tuple(words), x, layer


def bare(layer: BareSelfAttention, said: str) -> Scene:
    """Show the matrices of a layer."""
    return matrices({"query": layer.W_query, "key": layer.W_key, "value": layer.W_value}, said)


def simple() -> Example:
    """Simplified self-attention: each word looks at every other by the dot product of their vectors, nothing to train."""
    words, x = journey()
    layer = SimpleSelfAttention()
    return Example(
        name="simple",
        title="Self-attention with nothing to train",
        source=lectures("simple-all"),
        words=words,
        focus=figure("simple-one-query")["query_index"],
        q=x,
        k=x,
        v=x,
        scale=layer.scale,
        steps=layer.steps(x),
        formulas={"scores": "x xᵀ", "context": "weights x"},
        before=(inputs(words, x),),
        leads_to="trainable",
    )


def trainable() -> Example:
    """Self-attention with weights to train: queries, keys and values are projections of the words' vectors."""
    words, x = journey()
    layer = recompute.trainable()
    q, k, v = layer.project(x)
    said = "Three matrices, drawn at random here (seed 123) and trained later, turn 3 numbers a word into 2."
    return Example(
        name="trainable",
        title="Self-attention with weights to train",
        source=lectures("trainable-parameters"),
        words=words,
        focus=1,
        q=q,
        k=k,
        v=v,
        scale=default_scale(q),
        steps=layer.steps(x),
        before=(inputs(words, x), bare(layer, said), projected(words, q, k, v)),
        leads_to="causal",
    )


def causal() -> Example:
    """Causal attention: a word sees those before it and itself; the mask by both recipes, which agree."""
    words, x = journey()
    q, k, v = recompute.trainable().project(x)
    steps = attend(q, k, v, Causal())
    return Example(
        name="causal",
        title="Causal attention: no word sees what comes after it",
        source=lectures("causal-minus-infinity"),
        words=words,
        focus=1,
        q=q,
        k=k,
        v=v,
        scale=default_scale(q),
        steps=steps,
        formulas={"masked": "scaled, -inf above the diagonal"},
        before=(projected(words, q, k, v),),
        after=(renormalised(words, steps),),
        notes=(
            "q, k and v are those of the example 'trainable'.",
            "The lectures print the masked scores before the division by √2; -inf stays -inf, and the weights are the same.",
        ),
        leads_to="dropout",
    )


def renormalised(words: tuple[str, ...], steps: Steps) -> Scene:
    """Show the other recipe for the causal mask: zeros after the softmax, then rows divided by their sums."""
    everywhere = softmax.stable(steps.scaled)
    weights = renormalised_after_softmax(steps.scaled)
    off = (renormalised_after_softmax(steps.scaled.double()) - softmax.stable(steps.masked.double())).abs().max().item()
    panels = (("softmax over all words", everywhere), ("zeros above the diagonal", everywhere * past(steps.scaled)))
    return Scene(
        "weights by the other recipe",
        "zeros above the diagonal, then each row / its sum",
        f"Zeroing the future after the softmax and dividing each row by what is left gives the same weights "
        f"(in float64 to {max(off, ALIKE):.0e}).",
        tuple(
            Panel(values, words, words, "pairs", title) for title, values in (*panels, ("each row divided by its sum", weights))
        ),
    )


def dropout() -> Example:
    """Dropout of the causal weights: in training some are zeroed at random, and those left are made larger to match."""
    words, x = journey()
    made = figure("dropout-weights")
    q, k, v = recompute.trainable().project(x)
    ones = recompute.dropout_of_ones(figure("dropout-ones"))
    share = made["p"]
    fallen = int((ones == 0).sum())
    said = f"Of {ones.numel()} ones {fallen} became 0; the others became 1 / (1 - {share:g}) = {1 / (1 - share):g}."
    side = numbered("", len(ones))
    return Example(
        name="dropout",
        title="Dropout of attention weights",
        source=lectures("dropout-weights"),
        words=words,
        focus=len(words) - 1,
        q=q,
        k=k,
        v=v,
        scale=default_scale(q),
        steps=attend(q, k, v, Causal(), dropout=share),  # the second draw from the seed
        formulas={"masked": "scaled, -inf above the diagonal", "dropped": f"dropout(weights, {share:g})"},
        before=(Scene("dropout of ones", f"dropout(1, {share:g})", said, (Panel(ones, side, side),)),),
        notes=(f"Both draws are from seed {made['seed']}, the ones first; outside training dropout does nothing.",),
        leads_to="heads",
    )


def stacked_heads() -> Example:
    """Two causal heads stacked: each has weights of its own, and their contexts stand side by side."""
    words, x = journey()
    printed = figure("multi-head-stacked")
    recompute.seeded(printed["seed"])
    layer = StackedHeads(3, 2, len(words), 0.0, printed["num_heads"])
    q, k, v = (torch.stack(parts) for parts in zip(*(head.project(x) for head in layer), strict=True))  # (h, t, d)
    joined = side_by_side(
        words, layer(x), len(q), "Each word's new vector is what head 1 found, followed by what head 2 found."
    )
    return Example(
        name="heads",
        title="Two heads, stacked",
        source=lectures("multi-head-stacked"),
        words=words,
        focus=len(words) - 1,
        q=q,
        k=k,
        v=v,
        scale=default_scale(q),
        steps=layer.steps(x),
        formulas={"masked": "scaled, -inf above the diagonal"},
        before=(inputs(words, x), projected(words, q, k, v)),
        after=(joined,),
        notes=("The lectures run a batch of two copies of the sentence; both give these numbers.",),
        leads_to="split",
    )


def side_by_side(words: tuple[str, ...], joined: Tensor, count: int, said: str) -> Scene:
    """Show the contexts of all heads in one row for each word."""
    width = joined.shape[-1] // count
    columns = tuple(f"h{head + 1} c{number + 1}" for head in range(count) for number in range(width))
    return Scene("joined", "the heads' contexts side by side", said, (Panel(joined, words, columns, "words"),))


def weight_split() -> Example:
    """Two heads from one projection split by columns, the worked example 'the cat sleeps', from its printed scores on."""
    printed = figure("multi-head-split")
    words, x, count = tuple(printed["tokens"]), tensor(printed["x"]), printed["num_heads"]
    values = x @ tensor(printed["W_value"])
    v = heads.split(values, count)
    scale = printed["head_dim"] ** -0.5
    steps = recompute.given_scores(tensor(printed["scores"]), v, Causal(), scale)
    shapes = tuple(Line(name, " x ".join(map(str, shape))) for name, shape in printed["shapes"].items())
    parts = tuple(of_words(part, words, "v", f"head {head + 1}") for head, part in enumerate(v))
    return Example(
        name="split",
        title="Two heads by weight splits: 'the cat sleeps'",
        source=lectures("multi-head-split"),
        words=words,
        focus=len(words) - 1,
        v=v,
        scale=scale,
        steps=steps,
        formulas={"scores": "as the document prints them", "masked": "scaled, -inf above the diagonal"},
        before=(
            inputs(words, x),
            Scene(
                "shapes", "batch x words x ..., on the way", "One wide projection is cut into heads of 3 numbers.", (), shapes
            ),
            Scene("values", "x W_value", "All heads' values in one product.", (of_words(values, words, "v"),)),
            Scene("split", "columns 1 to 3 | columns 4 to 6", "Each head takes 3 of the 6 columns.", parts),
        ),
        after=(side_by_side(words, heads.join(steps.context), count, "The two heads stand side by side again: 6 numbers."),),
        notes=(
            "The document's printed queries, keys and scores do not follow from one another (scanning errors). The "
            "weights do follow from the scores; values, context and joined are computed here from its x and W_value.",
        ),
        leads_to="additive",
    )


def dog_attention() -> Example:
    """Self-attention with given matrices on 'The dog chased the rabbit'."""
    words, x, layer = dog()
    q, k, v = layer.project(x)
    return Example(
        name="dog",
        title="Self-attention with given matrices",
        source=lectures("dog-self-attention"),
        words=words,
        focus=1,
        q=q,
        k=k,
        v=v,
        scale=default_scale(q),
        steps=layer.steps(x),
        before=(inputs(words, x), bare(layer, "Three matrices as the document prints them."), projected(words, q, k, v)),
        leads_to="leak",
    )


def leak() -> Example:
    """Causal mask that is WRONG: tril alone leaves 0 where -inf belongs, so every word still sees the future."""
    words, x, layer = dog()
    q, k, v = layer.project(x)
    right = attend(q, k, v, Causal())
    tril = recompute.given_scores(right.scaled.tril(), v)
    wrong = Steps(right.scores, right.scaled, right.capped, tril.masked, tril.weights, tril.dropped, tril.context)
    ahead = wrong.weights.triu(1).sum(-1)
    return Example(
        name="leak",
        title="A wrong mask: tril alone leaks the future",
        source=lectures("dog-leaky-mask"),
        words=words,
        focus=1,
        q=q,
        k=k,
        v=v,
        scale=default_scale(q),
        steps=wrong,
        right=right,
        formulas={"masked": "tril(scaled)"},
        sentences={
            "masked": "This mask is WRONG: tril writes 0 above the diagonal, and a score of 0 is no worse than many others; "
            "-inf belongs there.",
            "weights": f"With the wrong mask {words[0]} gives {ahead[0]:.2f} of its attention to words that come after it and "
            f"{words[1]} gives {ahead[1]:.2f}; with the right one both give 0.",
            "context": "Every context but the last is mixed with words that come later.",
        },
        before=(projected(words, q, k, v),),
        notes=("The document prints these weights, and they are WRONG. q, k and v are those of the example 'dog'.",),
        leads_to="softmax",
    )


def additive() -> Example:
    """Additive attention, where attention came from: a small network scores each pair instead of a dot product."""
    words, x = journey()
    recompute.seeded(SEED)
    layer = AdditiveAttention(x.shape[-1], x.shape[-1], 2)
    q, k = layer.W_query(x), layer.W_key(x)
    panels = (
        matrix(layer.W_query.weight.T, "x", "q", "W_query"),
        matrix(layer.W_key.weight.T, "x", "k", "W_key"),
        matrix(layer.weight.unsqueeze(-1), "w", "w", "weight"),
    )
    drawn = f"A network with a hidden layer of 2, its weights drawn at random (seed {SEED})."
    sides = (of_words(q, words, "q", "query"), of_words(k, words, "k", "key"))
    return Example(
        name="additive",
        title="Additive attention",
        source="Bahdanau et al. 2014, appendix A.1.2",
        words=words,
        focus=1,
        q=q,
        k=k,
        v=x,
        weight=layer.weight.detach(),
        steps=layer.steps(x),
        formulas={"scores": "weightᵀ tanh(q + k)", "context": "weights x"},
        before=(
            inputs(words, x),
            Scene("W_query, W_key, weight", "the weights to train", drawn, panels),
            Scene("q, k", "x W_query, x W_key", "Queries and keys are added in a hidden layer of one width.", sides),
        ),
        leads_to="scale",
    )


EXAMPLES: dict[str, Callable[[], Example]] = {
    "simple": simple,
    "trainable": trainable,
    "causal": causal,
    "dropout": dropout,
    "heads": stacked_heads,
    "split": weight_split,
    "dog": dog_attention,
    "leak": leak,
    "softmax": four_softmaxes,
    "scale": scaling,
    "additive": additive,
}

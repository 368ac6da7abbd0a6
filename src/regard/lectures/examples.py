"""The lectures' examples as values: their words, every step of their attention, and what else they show."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.layers import AdditiveAttention, BareSelfAttention, SimpleSelfAttention, StackedHeads
from regard.layers.causal import make_causal_table, renormalize_after_softmax
from regard.lectures import recompute
from regard.lectures.example_steps import (
    Example,
    ExampleStep,
    Line,
    StepTable,
    check_name,
    make_matrix_panel,
    make_word_panel,
    number_labels,
    show_inputs,
    show_matrices,
    show_projections,
)
from regard.lectures.printed_numbers import get_printed_example, load_sentence, name_lectures, parse_tensor
from regard.lectures.score_scaling import build_scale_example
from regard.lectures.softmax_forms import build_softmax_example
from regard.mechanism import Causal, Steps, attend, heads, softmax
from regard.mechanism.scores import default_scale

SEED = 123  # the lectures'
ROUNDING_ERROR = 1e-12  # largest difference of float64 numbers by rounding alone


def build_example(name: str) -> Example:
    """Return the example of this name.

    The global random state is restored. Raises ConfigError if there is no such example.
    """
    with recompute.isolate_random_state():
        return EXAMPLES[check_name(name, EXAMPLES)]()


def summarize_example(name: str) -> str:
    """Return the first line of an example's docstring: what the example shows, in a sentence."""
    return (EXAMPLES[name].__doc__ or "").partition("\n")[0]


def load_journey() -> tuple[tuple[str, ...], Tensor]:
    """Return the words of the first sentence, and their vectors."""
    words, x = load_sentence("journey")
    return tuple(words), x


def load_dog() -> tuple[tuple[str, ...], Tensor, BareSelfAttention]:
    """Return the words of the second sentence, their vectors, and the layer whose matrices are printed."""
    words, x = load_sentence("dog")
    layer = BareSelfAttention(3, 3)
    for name, weight in layer.named_parameters():
        weight.copy_(parse_tensor(get_printed_example("dog-self-attention")[name]))
    return tuple(words), x, layer


def make_projected_example(parts: tuple[tuple[str, ...], Tensor, Tensor, Tensor], **fields: Any) -> Example:
    """Make an example of words with their queries, keys and values, whose scores are divided by √d; fields are the others."""
    words, q, k, v = parts
    return Example(words=words, q=q, k=k, v=v, scale=default_scale(q), **fields)


def show_joined_heads(words: tuple[str, ...], joined: Tensor, count: int, sentence: str) -> ExampleStep:
    """Show the contexts of all heads in one row for each word."""
    width = joined.shape[-1] // count
    columns = tuple(f"h{head + 1} c{number + 1}" for head in range(count) for number in range(width))
    return ExampleStep("joined", "the heads' contexts side by side", sentence, (StepTable(joined, words, columns, "words"),))


def show_layer_matrices(layer: BareSelfAttention, sentence: str) -> ExampleStep:
    """Show the matrices of a layer."""
    return show_matrices({"query": layer.W_query, "key": layer.W_key, "value": layer.W_value}, sentence)


def build_simple_example() -> Example:
    """Simplified self-attention: each word looks at every other by the dot product of their vectors, nothing to train."""
    words, x = load_journey()
    layer = SimpleSelfAttention()
    return Example(
        name="simple",
        title="Self-attention with nothing to train",
        source=name_lectures("simple-all"),
        words=words,
        focus=get_printed_example("simple-one-query")["query_index"],
        q=x,
        k=x,
        v=x,
        scale=layer.scale,
        steps=layer.steps(x),
        formulas={"scores": "x xᵀ", "context": "weights x"},
        before=(show_inputs(words, x),),
        leads_to="trainable",
    )


def build_trainable_example() -> Example:
    """Self-attention with weights to train: queries, keys and values are projections of the words' vectors."""
    words, x = load_journey()
    layer = recompute.make_trainable_layer()
    q, k, v = layer.project(x)
    sentence = "Three matrices, drawn at random here (seed 123) and trained later, turn 3 numbers a word into 2."
    return make_projected_example(
        (words, q, k, v),
        name="trainable",
        title="Self-attention with weights to train",
        source=name_lectures("trainable-parameters"),
        focus=1,
        steps=layer.steps(x),
        before=(show_inputs(words, x), show_layer_matrices(layer, sentence), show_projections(words, q, k, v)),
        leads_to="causal",
    )


def build_causal_example() -> Example:
    """Causal attention: a word sees those before it and itself; the mask by both recipes, which agree."""
    words, x = load_journey()
    q, k, v = recompute.make_trainable_layer().project(x)
    steps = attend(q, k, v, Causal())
    return make_projected_example(
        (words, q, k, v),
        name="causal",
        title="Causal attention: no word sees what comes after it",
        source=name_lectures("causal-minus-infinity"),
        focus=1,
        steps=steps,
        formulas={"masked": "scaled, -inf above the diagonal"},
        before=(show_projections(words, q, k, v),),
        after=(show_renormalized_weights(words, steps),),
        notes=(
            "q, k and v are those of the example 'trainable'.",
            "The lectures print the masked scores before the division by √2; -inf stays -inf, and the weights are the same.",
        ),
        leads_to="dropout",
    )


def show_renormalized_weights(words: tuple[str, ...], steps: Steps) -> ExampleStep:
    """Show the other recipe for the causal mask: zeros after the softmax, then rows divided by their sums."""
    everywhere = softmax.stable(steps.scaled)
    weights = renormalize_after_softmax(steps.scaled)
    difference = (renormalize_after_softmax(steps.scaled.double()) - softmax.stable(steps.masked.double())).abs().max().item()
    panels = (
        ("softmax over all words", everywhere),
        ("zeros above the diagonal", everywhere * make_causal_table(steps.scaled)),
    )
    return ExampleStep(
        "weights by the other recipe",
        "zeros above the diagonal, then each row / its sum",
        f"Zeroing the future after the softmax and dividing each row by what is left gives the same weights "
        f"(in float64 to {max(difference, ROUNDING_ERROR):.0e}).",
        tuple(
            StepTable(values, words, words, "pairs", title)
            for title, values in (*panels, ("each row divided by its sum", weights))
        ),
    )


def build_dropout_example() -> Example:
    """Dropout of the causal weights: in training some are zeroed at random, and those left are made larger to match."""
    words, x = load_journey()
    printed = get_printed_example("dropout-weights")
    q, k, v = recompute.make_trainable_layer().project(x)
    ones = recompute.drop_ones(get_printed_example("dropout-ones"))
    share = printed["p"]
    fallen = int((ones == 0).sum())
    sentence = f"Of {ones.numel()} ones {fallen} became 0; the others became 1 / (1 - {share:g}) = {1 / (1 - share):g}."
    side = number_labels("", len(ones))
    return make_projected_example(
        (words, q, k, v),
        name="dropout",
        title="Dropout of attention weights",
        source=name_lectures("dropout-weights"),
        focus=len(words) - 1,
        steps=attend(q, k, v, Causal(), dropout=share),  # the second draw from the seed
        formulas={"masked": "scaled, -inf above the diagonal", "dropped": f"dropout(weights, {share:g})"},
        before=(ExampleStep("dropout of ones", f"dropout(1, {share:g})", sentence, (StepTable(ones, side, side),)),),
        notes=(f"Both draws are from seed {printed['seed']}, the ones first; outside training dropout does nothing.",),
        leads_to="heads",
    )


def build_heads_example() -> Example:
    """Two causal heads stacked: each has weights of its own, and their contexts stand side by side."""
    words, x = load_journey()
    printed = get_printed_example("multi-head-stacked")
    recompute.seed_cpu(printed["seed"])
    layer = StackedHeads(3, 2, len(words), 0.0, printed["num_heads"])
    q, k, v = (torch.stack(parts) for parts in zip(*(head.project(x) for head in layer), strict=True))  # (h, t, d)
    joined = show_joined_heads(
        words, layer(x), len(q), "Each word's new vector is what head 1 found, followed by what head 2 found."
    )
    return make_projected_example(
        (words, q, k, v),
        name="heads",
        title="Two heads, stacked",
        source=name_lectures("multi-head-stacked"),
        focus=len(words) - 1,
        steps=layer.steps(x),
        formulas={"masked": "scaled, -inf above the diagonal"},
        before=(show_inputs(words, x), show_projections(words, q, k, v)),
        after=(joined,),
        notes=("The lectures run a batch of two copies of the sentence; both give these numbers.",),
        leads_to="split",
    )


def build_split_example() -> Example:
    """Two heads from one projection split by columns, the worked example 'the cat sleeps', from its printed scores on."""
    printed = get_printed_example("multi-head-split")
    words, x, count = tuple(printed["tokens"]), parse_tensor(printed["x"]), printed["num_heads"]
    values = x @ parse_tensor(printed["W_value"])
    v = heads.split(values, count)
    scale = printed["head_dim"] ** -0.5
    steps = recompute.attend_from_scores(parse_tensor(printed["scores"]), v, Causal(), scale)
    shapes = tuple(Line(name, " x ".join(map(str, shape))) for name, shape in printed["shapes"].items())
    parts = tuple(make_word_panel(part, words, "v", f"head {head + 1}") for head, part in enumerate(v))
    return Example(
        name="split",
        title="Two heads by weight splits: 'the cat sleeps'",
        source=name_lectures("multi-head-split"),
        words=words,
        focus=len(words) - 1,
        v=v,
        scale=scale,
        steps=steps,
        formulas={"scores": "as the document prints them", "masked": "scaled, -inf above the diagonal"},
        before=(
            show_inputs(words, x),
            ExampleStep(
                "shapes", "batch x words x ..., on the way", "One wide projection is cut into heads of 3 numbers.", (), shapes
            ),
            ExampleStep("values", "x W_value", "All heads' values in one product.", (make_word_panel(values, words, "v"),)),
            ExampleStep("split", "columns 1 to 3 | columns 4 to 6", "Each head takes 3 of the 6 columns.", parts),
        ),
        after=(
            show_joined_heads(words, heads.join(steps.context), count, "The two heads stand side by side again: 6 numbers."),
        ),
        notes=(
            "The document's printed queries, keys and scores do not follow from one another (scanning errors). The "
            "weights do follow from the scores; values, context and joined are computed here from its x and W_value.",
        ),
        leads_to="additive",
    )


def build_dog_example() -> Example:
    """Self-attention with given matrices on 'The dog chased the rabbit'."""
    words, x, layer = load_dog()
    q, k, v = layer.project(x)
    return make_projected_example(
        (words, q, k, v),
        name="dog",
        title="Self-attention with given matrices",
        source=name_lectures("dog-self-attention"),
        focus=1,
        steps=layer.steps(x),
        before=(
            show_inputs(words, x),
            show_layer_matrices(layer, "Three matrices as the document prints them."),
            show_projections(words, q, k, v),
        ),
        leads_to="leak",
    )


def build_leak_example() -> Example:
    """Causal mask that is WRONG: tril alone leaves 0 where -inf belongs, so every word still sees the future."""
    words, x, layer = load_dog()
    q, k, v = layer.project(x)
    right = attend(q, k, v, Causal())
    tril = recompute.attend_from_scores(right.scaled.tril(), v)
    wrong = Steps(right.scores, right.scaled, right.capped, tril.masked, tril.weights, tril.dropped, tril.context)
    ahead = wrong.weights.triu(1).sum(-1)
    return make_projected_example(
        (words, q, k, v),
        name="leak",
        title="A wrong mask: tril alone leaks the future",
        source=name_lectures("dog-leaky-mask"),
        focus=1,
        steps=wrong,
        right=right,
        formulas={"masked": "tril(scaled)"},
        sentences={
            "masked": "This mask is WRONG: tril writes 0 above the diagonal, and a score of 0 is no worse than many others; "
            "-inf belongs there.",
            "weights": f"With the wrong mask ‘{words[0]}’ gives {ahead[0]:.2f} of its attention to words that come after it "
            f"and ‘{words[1]}’ gives {ahead[1]:.2f}; with the right one both give 0.",
            "context": "Every context but the last is mixed with words that come later.",
        },
        before=(show_projections(words, q, k, v),),
        notes=("The document prints these weights, and they are WRONG. q, k and v are those of the example 'dog'.",),
        leads_to="softmax",
    )


def build_additive_example() -> Example:
    """Additive attention, where attention came from: a small network scores each pair instead of a dot product."""
    words, x = load_journey()
    recompute.seed_cpu(SEED)
    layer = AdditiveAttention(x.shape[-1], x.shape[-1], 2)
    q, k = layer.W_query(x), layer.W_key(x)
    panels = (
        make_matrix_panel(layer.W_query.weight.T, "x", "q", "W_query"),
        make_matrix_panel(layer.W_key.weight.T, "x", "k", "W_key"),
        make_matrix_panel(layer.weight.unsqueeze(-1), "w", "w", "weight"),
    )
    note = f"A network with a hidden layer of 2, its weights drawn at random (seed {SEED})."
    sides = (make_word_panel(q, words, "q", "query"), make_word_panel(k, words, "k", "key"))
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
            show_inputs(words, x),
            ExampleStep("W_query, W_key, weight", "the weights to train", note, panels),
            ExampleStep("q, k", "x W_query, x W_key", "Queries and keys are added in a hidden layer of one width.", sides),
        ),
        leads_to="scale",
    )


EXAMPLES: dict[str, Callable[[], Example]] = {
    "simple": build_simple_example,
    "trainable": build_trainable_example,
    "causal": build_causal_example,
    "dropout": build_dropout_example,
    "heads": build_heads_example,
    "split": build_split_example,
    "dog": build_dog_example,
    "leak": build_leak_example,
    "softmax": build_softmax_example,
    "scale": build_scale_example,
    "additive": build_additive_example,
}

"""Each example of the lectures recomputed, by the public functions and layers.

Random numbers are drawn in float32, as the lectures draw them; everything after is computed in float64, so that the
differences from the printed numbers are the same on every processor.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from regard.layers import BareSelfAttention, CausalAttention, SelfAttention, SimpleSelfAttention, StackedHeads
from regard.lectures import printed_numbers
from regard.lectures.comparison import Claim, Example, FieldComparison, Verdict, compare_fields, compare_steps
from regard.lectures.gpt2_sizes import recompute_gpt2_sizes
from regard.mechanism import EVERYTHING, Causal, Mask, Steps, attend, heads, scores, softmax

SIDE = 6  # of the square of ones for dropout
DRAWING = threading.RLock()  # all threads share the global generator: two examples at a time would mix their draws


@contextmanager
def isolate_random_state() -> Iterator[None]:
    """Allow seeding and drawing in float32, without gradients, in one thread at a time.

    The global random state and the default dtype are restored at the end.
    """
    with DRAWING, torch.random.fork_rng(devices=[]), torch.no_grad():  # draws are on the CPU
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # the lectures' draws: those of other dtypes are other numbers
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def seed_cpu(seed: int) -> None:
    """Seed the CPU's generator only: unlike torch.manual_seed, it leaves the state of other devices unchanged."""
    torch.default_generator.manual_seed(seed)


def load_vectors(example: Example) -> Tensor:
    """Return the vectors of the example's input, in float64."""
    return printed_numbers.load_sentence(example["input"], torch.float64)[1]


def get_head_width() -> int:
    """Return the width of a head in the examples on 'journey'."""
    width: int = printed_numbers.get_printed_example("trainable-parameters")["d_out"]
    return width


def make_trainable_layer() -> BareSelfAttention:
    """Build the layer that several examples start from."""
    example = printed_numbers.get_printed_example("trainable-parameters")
    seed_cpu(example["seed"])
    return BareSelfAttention(load_vectors(example).shape[-1], get_head_width())


def attend_from_scores(raw: Tensor, v: Tensor, mask: Mask = EVERYTHING, scale: float = 1.0) -> Steps:
    """Compute the steps that follow from scores (..., q, k): with the unit vectors as keys, q kᵀ is q itself."""
    return attend(raw, torch.eye(raw.shape[-1], dtype=raw.dtype).expand_as(raw), v, mask, scale=scale)


def recompute_simple_one_query(example: Example) -> Iterable[Claim]:
    """Compute softmax(q xᵀ) x for one word as the query."""
    x, scale = load_vectors(example), SimpleSelfAttention.scale
    q = x[example["query_index"]].unsqueeze(0)
    steps = attend(q, x, x, scale=scale)
    yield Claim(
        compare_fields(
            example,
            scale=torch.tensor(scale),
            scores=steps.scores[0],
            weights_sum_normalised=softmax.by_sum(steps.scores)[0],
            weights=steps.weights[0],
            context=steps.context[0],
            dot_of_token0_and_query=scores.dot(x[:1], q)[0, 0],
        )
    )


def recompute_simple_all(example: Example) -> Iterable[Claim]:
    """Compute softmax(x xᵀ) x."""
    layer = SimpleSelfAttention()
    steps = layer.steps(load_vectors(example))
    scale = torch.tensor(layer.scale)
    context = layer(load_vectors(example))
    yield Claim(compare_fields(example, scale=scale, scores=steps.scores, weights=steps.weights, context=context))


def recompute_softmax_211(example: Example) -> Iterable[Claim]:
    """Compute the softmax of three numbers, its numerators and its denominator."""
    z = printed_numbers.parse_tensor(example["z"], torch.float64)
    yield Claim(compare_fields(example, exponentials=z.exp(), sum=z.exp().sum(), softmax=softmax.naive(z)))


def recompute_trainable_parameters(example: Example) -> Iterable[Claim]:
    """Compute softmax(q kᵀ / √d) v with q, k and v from plain parameters."""
    x, layer = load_vectors(example), make_trainable_layer().double()
    steps, q = layer.steps(x), layer.project(x)[0]
    row = printed_numbers.load_sentence(example["input"])[0].index("journey")
    journey = {f"{name}_row_journey": getattr(steps, name)[row] for name in ("scores", "weights", "context")}
    scale = torch.tensor(scores.default_scale(q))
    yield Claim(
        compare_fields(example, scale=scale, queries=q) + compare_steps(example, steps) + compare_fields(example, **journey)
    )


def recompute_trainable_linear(example: Example) -> Iterable[Claim]:
    """Compute softmax(q kᵀ / √d) v with q, k and v from linear layers, by the fused kernel."""
    x = load_vectors(example)
    seed_cpu(example["seed"])
    layer = SelfAttention(x.shape[-1], example["d_out"]).double()
    scale = torch.tensor(scores.default_scale(layer.project(x)[0]))
    yield Claim(compare_fields(example, scale=scale, context=layer(x)))


def recompute_weight_transfer(example: Example) -> Iterable[Claim]:
    """Convert plain parameters to linear layers."""
    x, layer = load_vectors(example), make_trainable_layer().to_linear().double()
    other = printed_numbers.get_printed_example(example["equals"])
    note = f"compared with what {example['equals']} prints"
    yield Claim(compare_fields(other, weights=layer.steps(x).weights, context=layer(x)), note)


def recompute_causal_renormalized(example: Example) -> Iterable[Claim]:
    """Set the weights above the diagonal to zero, and divide each row by its sum."""
    steps = make_trainable_layer().double().steps(load_vectors(example))
    masked = steps.weights * Causal().table(*steps.weights.shape)
    yield Claim(compare_fields(example, masked_weights=masked, row_sums=masked.sum(-1), weights=softmax.by_sum(masked)))


def recompute_causal_minus_infinity(example: Example) -> Iterable[Claim]:
    """Set the scores above the diagonal to -inf, before the softmax."""
    q, k, v = make_trainable_layer().double().project(load_vectors(example))
    unscaled = attend(q, k, v, Causal(), scale=1.0)
    weights = attend(q, k, v, Causal()).weights
    note = "'masked' is printed before the division by the root of d; the weights follow from the scores divided by it"
    yield Claim(compare_fields(example, masked=unscaled.masked, weights=weights), note)


def drop_ones(example: Example) -> Tensor:
    """Apply dropout to a square of ones: a query that has only one key gives it weight 1."""
    q, k = torch.zeros(SIDE, SIDE, 1), torch.zeros(SIDE, 1, 1)
    seed_cpu(example["seed"])
    return attend(q, k, k, dropout=example["p"]).dropped.squeeze(-1)


def recompute_dropout_ones(example: Example) -> Iterable[Claim]:
    """Apply dropout to weights that are all 1."""
    yield Claim(compare_fields(example, value=drop_ones(example)))


def recompute_dropout_weights(example: Example) -> Iterable[Claim]:
    """Apply dropout to the causal weights, the second draw from the seed."""
    q, k, v = make_trainable_layer().double().project(load_vectors(example))
    drop_ones(example)
    yield Claim(compare_fields(example, dropped=attend(q, k, v, Causal(), dropout=example["p"]).dropped))


def recompute_causal_batch(example: Example) -> Iterable[Claim]:
    """Run two copies of a sentence through causal attention."""
    x = load_vectors(example)
    seed_cpu(example["seed"])
    layer = CausalAttention(x.shape[-1], get_head_width(), len(x), dropout=0.0).double()
    yield Claim(compare_fields(example, shape=torch.tensor(layer(torch.stack((x, x))).shape)))


def recompute_multi_head_stacked(example: Example) -> Iterable[Claim]:
    """Run two causal heads, with their contexts concatenated."""
    x = load_vectors(example)
    seed_cpu(example["seed"])
    layer = StackedHeads(x.shape[-1], get_head_width(), len(x), 0.0, example["num_heads"]).double()
    yield Claim(compare_fields(example, context=layer(x.expand(example["batch"], -1, -1))))


def project_inputs(example: Example, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the queries, keys and values of x with the matrices that an example prints."""
    q, k, v = (x @ printed_numbers.parse_tensor(example[name], x.dtype) for name in ("W_query", "W_key", "W_value"))
    return q, k, v


def recompute_dog_self_attention(example: Example) -> Iterable[Claim]:
    """Compute softmax(q kᵀ / √d) v with given matrices."""
    q, k, v = project_inputs(example, load_vectors(example))
    scale = torch.tensor(scores.default_scale(q))
    yield Claim(compare_fields(example, scale=scale, queries=q, keys=k, values=v) + compare_steps(example, attend(q, k, v)))


def recompute_dog_leaky_mask(example: Example) -> Iterable[Claim]:
    """Set the scaled scores above the diagonal to zero, where -inf belongs."""
    q, k, v = project_inputs(printed_numbers.get_printed_example(example["from_example"]), load_vectors(example))
    leaky = attend_from_scores(attend(q, k, v).scaled.tril(), v)
    words = printed_numbers.load_sentence(example["input"])[0]
    ahead = leaky.weights.triu(1).sum(-1)
    note = (
        "the figures reproduce, and the mask is WRONG: tril alone leaves zeros above the diagonal, not -inf, so every query "
        f"that has a future still sees it ('{words[0]}' gives {ahead[0]:.2f} of its weight to the words after it)"
    )
    yield Claim(compare_steps(example, leaky), note, known=Verdict.WRONG)
    right = attend(q, k, v, Causal()).weights
    yield Claim(
        compare_fields(example, correct_weights=right), "the right weights: -inf above the diagonal, before the softmax"
    )


def recompute_multi_head_split(example: Example) -> Iterable[Claim]:
    """Split one projection into two heads: the shapes of each step, and the weights that follow from the printed scores."""
    x = printed_numbers.parse_tensor(example["x"], torch.float64).unsqueeze(0)
    projections = project_inputs(example, x)
    q, k, v = (heads.split(part, example["num_heads"]) for part in projections)
    steps = attend(q, k, v, Causal())
    regrouped = steps.context.transpose(1, 2)
    shapes = {
        "x": x,
        "projected": projections[0],
        "split": q.transpose(1, 2),
        "grouped": q,
        "scores": steps.scores,
        "context": steps.context,
        "regrouped": regrouped,
        "joined": heads.join(steps.context),
    }
    laid_out = [
        FieldComparison(f"shapes.{name}", torch.tensor(example["shapes"][name]), torch.tensor(value.shape))
        for name, value in shapes.items()
    ]
    yield Claim(laid_out + compare_fields(example, head_dim=torch.tensor(q.shape[-1])))
    follow = attend_from_scores(
        printed_numbers.parse_tensor(example["scores"], torch.float64), v[0], Causal(), scores.default_scale(q)
    )
    note = "from the scores as they are printed"
    yield Claim(compare_fields(example, scaled_and_masked=follow.masked, weights=follow.weights), note)
    note = "the printed scores do not follow from the printed x, W_query and W_key: scanning errors in the document"
    yield Claim(compare_fields(example, scores=steps.scores[0]), note, known=Verdict.MISPRINT)


RECOMPUTED: dict[str, Callable[[Example], Iterable[Claim]]] = {
    "simple-one-query": recompute_simple_one_query,
    "simple-all": recompute_simple_all,
    "softmax-211": recompute_softmax_211,
    "trainable-parameters": recompute_trainable_parameters,
    "trainable-linear": recompute_trainable_linear,
    "weight-transfer": recompute_weight_transfer,
    "causal-renormalised": recompute_causal_renormalized,
    "causal-minus-infinity": recompute_causal_minus_infinity,
    "dropout-ones": recompute_dropout_ones,
    "dropout-weights": recompute_dropout_weights,
    "causal-batch": recompute_causal_batch,
    "multi-head-stacked": recompute_multi_head_stacked,
    "dog-self-attention": recompute_dog_self_attention,
    "dog-leaky-mask": recompute_dog_leaky_mask,
    "multi-head-split": recompute_multi_head_split,
    "gpt2-sizes": recompute_gpt2_sizes,
}

"""Check that nothing is random in evaluation, and that in training the mean of dropout is what evaluation gives."""

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from regard.examination import dependency, evidence
from regard.examination.call_reading.function_calls import record_functions
from regard.examination.case import Case, join_context_heads
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject.call_conventions import AttentionFunction
from regard.examination.subject.restore_state import seed_generators

DRAWS, PART = 4096, 512  # sequences in training mode, and how many of them at most at a time
MANY = 64  # sequences, of which one has something dropped even if that is rare
TOKENS, BUDGET = 16, 2**21  # of each sequence at most, and numbers of all sequences at a time
SURE, LEAST, LARGE = 6.0, 0.005, 3.0  # standard errors and distance from 1 that make a mean differ; a size of inputs
STRAIGHT = 1e-3  # of an output: tolerance for being affine in the input
RESCALED = "the mean output with dropout in training equals the output in evaluation"
DRAWN = (
    "Apply dropout in training only: F.dropout(weights, p, training=self.training), nn.Dropout, or "
    "dropout_p=self.p if self.training else 0.0 for F.scaled_dot_product_attention."
)
DIVIDE = (
    "Divide the kept weights by 1 - p, as F.dropout and nn.Dropout do, and apply dropout last, after the softmax: "
    "F.dropout(scores.softmax(-1), p, training=self.training)."
)
AFTER = (
    "Apply dropout to the weights, after the softmax, not to the scores: "
    "weights = F.dropout(scores.softmax(-1), p, training=self.training)."
)
DROPOUTS = [f"{kind}dropout{axes}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for axes in ("", "1d", "2d", "3d")]
LOST = f"A score of -inf that is dropped is -inf * 0, which is NaN. {AFTER}"


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check that evaluation is not random, and in training the mean of dropout."""
    change = measure_randomness(case)
    if change > 0:
        what = "function" if case.subject.module is None else "layer in evaluation mode"
        differ = f"two calls of the {what} with the same input differ by {change:.2g}"
        yield Finding("dropout in evaluation", differ, DRAWN, 3.0, "dropout")
        return
    yield Checked("evaluation is not random", "two calls give the same outputs")
    call = make_training_call(case)
    lost = None if call is None else describe_lost_row(case, call)
    if lost is not None:
        yield Finding("dropout not rescaled", lost, LOST, 1.5, "dropout")
    elif call is not None and measure_spread(call, case.make_usual_inputs(), case) > 0:
        if has_fixed_buffers(case):
            yield from check_training(case, call)
        else:
            yield Unknown(f"whether {RESCALED}", "a layer whose buffers do not change in training")


def measure_randomness(case: Case) -> float:
    """Return how far two calls in evaluation differ beyond rounding."""
    inputs = case.make_usual_inputs()
    one, other = (case.compute_seeded_context(*inputs, seed=seed).double().cpu() for seed in (1, 2))
    return dependency.measure_difference(one, other, case.subject.dtype)


def make_training_call(case: Case) -> AttentionFunction | None:
    """Return a call that runs a copy in training mode, a new one each time, since a call may leave something behind.

    None if the subject cannot be copied.
    """
    module, again = case.subject.module, case.subject.again
    if module is None or again is None:
        return None
    try:
        copy_in_training(module)
    except Exception:  # some objects that a module holds cannot be copied
        return None
    return lambda *inputs: again(copy_in_training(module))(*inputs)


def copy_in_training(module: nn.Module) -> nn.Module:
    """Return a copy of a module in training mode."""
    return copy.deepcopy(module).train()


def has_fixed_buffers(case: Case) -> bool:
    """Return whether a call in training leaves buffers as they are: if not, it differs from evaluation without dropout too."""
    module, again = case.subject.module, case.subject.again
    if module is None or again is None:
        return True
    one = copy_in_training(module)
    before = {name: x.clone() for name, x in one.named_buffers() if x.is_floating_point()}
    with torch.no_grad():
        again(one)(*case.make_usual_inputs())
    return all(name in before and torch.equal(before[name], x) for name, x in one.named_buffers() if x.is_floating_point())


def measure_spread(call: AttentionFunction, inputs: tuple[Tensor, ...], case: Case) -> float:
    """Return how far two draws in training differ beyond rounding; 0 if a call raises."""
    outputs = []
    for seed in (1, 2):
        seed_generators(seed, case.subject.device)
        try:
            with torch.no_grad():
                outputs.append(call(*inputs).context.double().cpu())
        except Exception:  # training may need more than evaluation, as batch norms do
            return 0.0
    return dependency.measure_difference(outputs[0], outputs[1], case.subject.dtype, times=1e2)


def describe_lost_row(case: Case, call: AttentionFunction) -> str | None:
    """Describe the first output that is NaN in training and finite in evaluation, as dropped scores of -inf make it.

    None if there is none, or if something else than dropout of infinite numbers makes it.
    """
    inputs = case.make_usual_inputs()
    usual = case.compute_seeded_context(*inputs).cpu()
    for seed in (1, 2):
        run, outputs = partial(compute_in_training, case, call, inputs, seed), list[Tensor]()
        try:
            dropped = record_functions(DROPOUTS, lambda run=run, outputs=outputs: outputs.append(run()))  # type: ignore[misc]
        except Exception:  # training may need more than evaluation
            return None
        lost = outputs[0].isnan().any(-1) & usual.isfinite().all(-1)
        if lost.any():
            row = evidence.format_token(case, evidence.get_token_number(case, int(lost.nonzero()[0][1])))
            is_dropped = any(bool(one.given.isinf().any()) for one in dropped)
            return f"in training output {row} is NaN, and in evaluation it is finite" if is_dropped else None
    return None


def compute_in_training(case: Case, call: AttentionFunction, inputs: tuple[Tensor, ...], seed: int) -> Tensor:
    """Return the context (b, t, c) of a call in training, with fixed random numbers."""
    seed_generators(seed, case.subject.device)
    with torch.no_grad():
        return join_context_heads(call(*inputs).context, case.subject.form).cpu()


def check_training(case: Case, call: AttentionFunction) -> Iterator[Finding | Checked | Unknown]:
    """Check dropout in training, if the subject takes single tokens and as many sequences as there are draws."""
    try:
        results = list(check_single_token(case, call)) if case.can_resize and case.subject.form == "x" else []
    except Exception:  # refusing another shape is allowed
        results = []
    yield from results or [Unknown(f"whether {RESCALED}", "a layer that accepts a single token and any number of sequences")]


def check_single_token(case: Case, call: AttentionFunction) -> Iterator[Finding | Checked | Unknown]:
    """Check the mean of outputs of one token, whose weight is 1: if the rest is linear, it is the output of evaluation."""
    one = case.make_inputs(1, MANY)
    case.run_subject(*one)
    if measure_spread(call, one, case) == 0:
        dropped = describe_score_dropout(case, call)
        if dropped is not None:
            yield Finding("dropout not rescaled", dropped, AFTER, 1.0, "dropout")
    elif not is_affine(case):
        yield Unknown(f"whether {RESCALED}", "the attention alone, without norms and feed-forward parts")
    else:
        difference = describe_mean_difference(case, call)
        if difference is not None:
            yield Finding("dropout not rescaled", f"with a single token {difference}", DIVIDE, 1.5, "dropout")
        else:
            yield Checked(RESCALED, f"{DRAWS} draws of one token; a mean {100 * LEAST:.1f} % off might be detected")


def is_affine(case: Case) -> bool:
    """Return whether the output of a single token is affine in its input, so that it preserves a mean."""
    best = case.double or case
    (x,), (y,) = best.make_inputs(1, 2, 31), best.make_inputs(1, 2, 32)
    of_both, of_x, of_y, of_none = (best.run_subject(z).context.double() for z in (x + y, x, y, 0 * x))
    return bool((of_both - of_x - of_y + of_none).abs().max() < STRAIGHT * (of_both - of_none).abs().max())


def iterate_draws(case: Case, call: AttentionFunction, x: Tensor) -> Iterator[Tensor]:
    """Yield outputs (b, t, c) in training of one sequence, repeated DRAWS times in batches that fit the budget."""
    part = min(PART, max(1, BUDGET // x.numel()))
    for n, first in enumerate(range(0, DRAWS, part)):
        seed_generators(100 + n, case.subject.device)
        with torch.no_grad():
            many = x.expand(min(part, DRAWS - first), -1, -1).contiguous()
            yield join_context_heads(call(many).context, "x").double().cpu()


def describe_mean_difference(case: Case, call: AttentionFunction) -> str | None:
    """Describe how the mean over draws of a single token differs from evaluation; None if it may be the same."""
    (x,) = case.make_inputs(1, 1, 33)
    expected, none = case.run_subject(x).context.double().cpu(), case.run_subject(0 * x).context.double().cpu()
    direction = expected - none
    # for each draw: 1 if it equals evaluation
    share = (
        torch.cat([((y - none) * direction).flatten(1).sum(1) for y in iterate_draws(case, call, x)]) / direction.square().sum()
    )
    mean, error = float(share.mean()), float(share.std()) / DRAWS**0.5
    if abs(mean - 1) < max(SURE * error, LEAST):
        return None
    return f"the mean of {DRAWS} outputs in training is {mean:.3g} times that in evaluation (± {error:.1g})"


def describe_score_dropout(case: Case, call: AttentionFunction) -> str | None:
    """Describe how the mean over draws differs from evaluation if a single token's does not, as with dropout of scores.

    None if it may be the same.
    """
    (x,) = case.make_inputs(min(case.shapes.tokens, TOKENS), 1, 33, LARGE)
    expected, total, squares = case.run_subject(x).context.double().cpu(), torch.zeros(()), torch.zeros(())
    for y in iterate_draws(case, call, x):
        total, squares = total + (y - expected).sum(0), squares + (y - expected).square().sum(0)
    mean = total / DRAWS
    error = ((squares / DRAWS - mean.square()).clamp_min(0) / DRAWS).sqrt()
    sure = mean.abs() > SURE * error + dependency.estimate_rounding(case.subject.dtype) * expected.abs().max()
    if not sure.any():
        return None
    t, far = x.shape[1], float((mean.abs() * sure).max())
    return (
        f"with a single token nothing is dropped; with {t} tokens the mean of {DRAWS} outputs in training differs from "
        f"evaluation by {far:.2g}: scores are dropped, not weights"
    )

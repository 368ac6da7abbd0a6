"""LeGrad: which tokens raise the score that each layer would give through the model's own head."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from regard.attribution.activation_trace import find_input
from regard.attribution.head_effects import Measure, call_model, check_numbers, require_gradients
from regard.errors import ConfigError, ShapeError
from regard.evaluation_mode import evaluate_mode
from regard.map.attention_map import Index
from regard.map.attribution_map import AttributionMap
from regard.map.indexing import select_places
from regard.mechanism.arguments import check_index, check_instance, check_sequence, describe_value
from regard.observe.attribution import attribute
from regard.observe.map_view import MapView
from regard.observe.record import record
from regard.observe.recorded_runs.part_names import is_inside
from regard.observe.recording import Recording

Blocks = dict[str, tuple[Tensor | None, Any]]  # by the path of a block, in the order they ran: what it was given and returned


@dataclass(frozen=True, eq=False)
class LeGrad:
    """How much each token raises the score of each layer: scores (b, layers, k), of the layers in `numbers`.

    The score of token j in layer l is the mean over heads and queries i of the positive part of ∂s_l/∂A_ij, with s_l the number
    that the model gives if all later layers are left out. Padding, which is not among the tokens, `is_token` (b, k), has 0.
    """

    numbers: tuple[int, ...]
    scores: Tensor
    is_token: Tensor

    def merge(self, tokens: Index = slice(None)) -> Tensor:
        """Return the mean over the layers, for some tokens, scaled to 0 to 1 in each row of the batch, (b, n).

        The paper leaves out the token of the class: tokens=slice(1, None). A row of equal scores is 0, and so is padding.
        """
        places = select_places("tokens", tokens, self.scores.shape[2]).to(self.scores.device)
        mean, is_padding = self.scores.mean(1)[:, places], ~self.is_token[:, places]
        low = mean.masked_fill(is_padding, torch.inf).amin(-1, keepdim=True)
        high = mean.masked_fill(is_padding, -torch.inf).amax(-1, keepdim=True)
        return ((mean - low) / (high - low).masked_fill(high <= low, 1)).masked_fill(is_padding, 0)


def legrad(model: nn.Module, inputs: Any, measure: Measure, *, layers: Sequence[int] | None = None) -> LeGrad:
    """Compute LeGrad of a model with self-attention in blocks, such as a vision transformer or BERT.

    inputs is a tensor for the model, or a dict of its arguments; measure takes what the model returns and gives a number, or
    one (b,) for each row, such as the logit of a class. For each of the layers (all by default) the model runs once more on the
    output of its block, with every block left out, also those without attention, so that its own pooling, norm and head give
    that layer's score. Nothing of T x T is kept. The model's mode and parameters are left as they were.
    Raises ConfigError where the layers are not in blocks of their own that hand on the stream, or a score has no gradient.
    Source: Bousselham et al. 2024, "LeGrad: An Explainability Method for Vision Transformers via Feature Formation
    Sensitivity".
    """
    check_instance("model", model, nn.Module)
    if not callable(measure):
        raise ConfigError(f"measure must be a function of what the model returns, got {describe_value(measure)}.")
    with evaluate_mode(model), torch.enable_grad(), require_gradients(model):
        outputs: Blocks = {}
        with record(model, keep="values") as recording, watch_outputs(model, outputs):
            call_model(model, inputs)
        blocks = find_blocks(recording, outputs)
        left_out = list_left_out(blocks, outputs)
        chosen = range(len(blocks)) if layers is None else select_layers(layers, len(blocks))
        scores = {}
        for layer in chosen:
            with leave_out_blocks(model, {name: outputs[name][1] for name in left_out}, blocks[layer]):
                scores[layer] = check_numbers(measure(call_model(model, inputs))).sum()
        return collect_scores(recording, scores)


def select_layers(layers: Sequence[int], count: int) -> list[int]:
    """Return the numbers of chosen layers. Raises ConfigError where they are no list of numbers, or an empty one."""
    chosen = [check_index("a layer", layer, count, "the model") for layer in check_sequence("layers", layers)]
    if not chosen:
        raise ConfigError("layers must name at least one layer; leave it out for all.")
    return chosen


def collect_scores(recording: Recording, scores: Mapping[int, Tensor]) -> LeGrad:
    """Return LeGrad of a recording with values and gradients, given the score of each layer, a number of the same graph.

    For scores that are not those of the model's own head, such as the similarity of an image's features with a text.
    Raises ConfigError for a score that does not depend on its layer by a gradient.
    """
    found = {layer: attribute(recording, score, layers=[layer]) for layer, score in scores.items()}
    means = [mean_columns(one.map(layer, kind="gradient")) for layer, one in found.items()]
    if len({one.shape for one in means}) != 1:
        raise ShapeError(f"LeGrad needs layers with equally many tokens, got {[tuple(one.shape) for one in means]}.")
    layer, first = next(iter(found.items()))
    return LeGrad(tuple(scores), torch.stack(means, 1), MapView(first.run.map(layer)).is_real_key.any(1))


def mean_columns(gradients: AttributionMap) -> Tensor:
    """Return the mean of the positive part of each column over heads and queries, (b, k), block by block.

    A key that a number in the bias hides counts as little as one that the mask hides.
    """
    b, h, q, k = gradients.shape
    found = torch.zeros(b, k, dtype=torch.float64, device=gradients.device)
    for n, _, run, entries in gradients.iterate_blocks():
        found[n].index_add_(0, run.columns, entries.clamp(min=0).sum(0, dtype=torch.float64))
    return found / (h * q)


def find_blocks(recording: Recording, outputs: Blocks) -> list[str]:
    """Return the path of the block of each layer: the outermost module of a list that holds this layer's self-attention alone.

    Raises ConfigError where there is none, or no self-attention.
    """
    names, found = recording.layers(), []
    if not names:
        raise ConfigError("LeGrad needs self-attention with a softmax, and none was recorded.")
    for name in names:
        around = [block for block in outputs if [other for other in names if is_inside(other, block)] == [name]]
        if not around:
            raise ConfigError(
                f"{name} is in no block of its own, a module in a list of modules that returns the stream (b, t, c)."
            )
        found.append(min(around, key=len))
    return found


def list_left_out(blocks: Sequence[str], outputs: Blocks) -> list[str]:
    """Return the paths of the modules to leave out: all that stand in one list with the block of a layer.

    Raises ConfigError where one of a list is given anything but what the one before it returned: the model does something with
    the stream between them, which would not be left out. So it does for streams of different shapes.
    """
    found = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
        siblings = [name for name in outputs if name.rpartition(".")[0] == parent]
        for one, other in pairwise(siblings):
            returned, given = get_stream(outputs[one][1]), outputs[other][0]
            if returned is not given and (returned is None or given is None or not is_equal(returned, given)):
                raise ConfigError(
                    f"what {one} returns is not what {other} is given, so the layers are in no blocks that hand on the stream, "
                    "which could be left out. Pass scores of your own to regard.attribution.legrad.collect_scores."
                )
        found += siblings
    shapes = {stream.shape for name in found if (stream := get_stream(outputs[name][1])) is not None}
    if len(shapes) != 1:
        raise ConfigError(
            f"the blocks return streams of different shapes, {sorted(map(tuple, shapes))}: none can stand for another."
        )
    return found


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have one shape, one dtype and the same numbers."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


@contextmanager
def watch_outputs(model: nn.Module, outputs: Blocks) -> Iterator[None]:
    """Keep what the modules of lists of modules get and return, with its graph, by their paths, while the context is active."""

    def make_hook(name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if get_stream(output) is not None:
                outputs[name] = find_input(args, kwargs), output

        return keep

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.rpartition(".")[2].isdigit():
                stack.callback(module.register_forward_hook(make_hook(name), with_kwargs=True).remove)
        yield


def get_stream(output: Any) -> Tensor | None:
    """Return the residual stream (b, t, c) that a module returns, alone or first in a tuple; None if it returns none."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) and first.dim() == 3 and first.is_floating_point() else None


@contextmanager
def leave_out_blocks(model: nn.Module, outputs: Mapping[str, Any], block: str) -> Iterator[None]:
    """Make modules, by their paths with what they returned, return what one block did, without computing anything."""
    stream = get_stream(outputs[block])
    modules = [model.get_submodule(name) for name in outputs]
    before = [{"forward": vars(module)["forward"]} if "forward" in vars(module) else {} for module in modules]
    for module, output in zip(modules, outputs.values(), strict=True):
        answer = (stream, *output[1:]) if isinstance(output, tuple) else stream
        vars(module)["forward"] = lambda *args, answer=answer, **kwargs: answer
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            vars(module).pop("forward", None)
            vars(module).update(own)  # a forward of its own, as hooks of accelerate set it

"""The direct path: by what number the output of each layer's projection is multiplied on its way to the last norm."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.attribution.activation_trace import NEAR, Activation, ActivationTrace, find_input
from regard.generate.sequence_reader import compute_logits

SPARE = 4  # numbers of the residual stream for each layer, so that rounding is not magnified


@torch.no_grad()
def measure_direct_gains(model: nn.Module, trace: ActivationTrace, projections: Sequence[Activation]) -> dict[int, float]:
    """Return by what number each projection's output is multiplied in the last norm's input, by the projection's id.

    Past all other norms: a few tokens are run again with a random vector added to each output, while every norm but the last
    gives what it gave before, so that no branch sees the vectors. It is 1 where outputs are added as they are, and 0 where the
    vectors do not arrive, as in a model whose norms follow the sums, or not each times one number. A forward takes as many
    projections as the numbers of the residual stream tell apart: one is enough but for few tokens in a deep, narrow model.
    """
    if not projections or trace.tokens is None:
        return {}
    replay, norms = NormReplay(), {id(one.module): one.module for one in trace.norms}.values()
    with replay.watch(norms, {}):
        compute_logits(model, trace.tokens)
    before, generator = replay.start_again(), torch.Generator().manual_seed(0)
    size, share = before.square().mean().sqrt(), max(1, before.numel() // SPARE)
    tolerance = max(NEAR, (2 * len(projections)) ** 0.5 * replay.eps)  # each block adds twice
    gains: list[float] = []
    for start in range(0, len(projections), share):
        part = projections[start : start + share]
        vectors = torch.randn(len(part), *before.shape, generator=generator, dtype=torch.float64) * size
        with replay.watch(norms, place_vectors(trace, part, vectors)):
            compute_logits(model, trace.tokens)
        change, columns = (replay.start_again() - before).flatten(), vectors.flatten(1).T
        found = torch.linalg.lstsq(columns, change.unsqueeze(-1)).solution.squeeze(-1)
        is_linear = (change - columns @ found).norm() <= tolerance * columns.sum(1).norm()
        gains += (found if is_linear else torch.zeros_like(found)).tolist()
    rounded = [gain if abs(gain - 1) > tolerance else 1.0 for gain in gains]
    return {id(one): gain if gain > tolerance else 0.0 for one, gain in zip(projections, rounded, strict=True)}


def place_vectors(
    trace: ActivationTrace, projections: Sequence[Activation], vectors: Tensor
) -> dict[nn.Module, dict[int, Tensor]]:
    """Return the vector of each projection by its module and the number of its call."""
    placed: dict[nn.Module, dict[int, Tensor]] = {}
    for one, vector in zip(projections, vectors, strict=True):
        calls = [other for other in trace.linear if other.module is one.module]
        placed.setdefault(one.module, {})[next(n for n, call in enumerate(calls) if call is one)] = vector
    return placed


class NormReplay:
    """Hooks that let norms give in a second forward what they gave in the first, but for the last of them."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.is_first = True
        self.calls = 0  # of this forward
        self.final = torch.empty(0)  # what went into the last norm, (p, c)
        self.eps = 0.0

    def start_again(self) -> Tensor:
        """Begin the second forward, and return what went into the last norm of the one before, (p, c)."""
        self.is_first, self.calls = False, 0
        return self.final

    @contextmanager
    def watch(self, norms: Iterable[nn.Module], added: Mapping[nn.Module, Mapping[int, Tensor]]) -> Iterator[None]:
        """Keep the outputs of norms, or give them again, and add vectors (p, c) to outputs of modules, by their calls."""
        with ExitStack() as stack:
            for norm in norms:
                stack.callback(norm.register_forward_hook(self.handle_norm, with_kwargs=True).remove)
            for module, vectors in added.items():
                stack.callback(module.register_forward_hook(self.make_adder(vectors)).remove)
            yield

    def handle_norm(self, module: nn.Module, args: Any, kwargs: Any, result: Tensor) -> Tensor | None:
        """Keep the input of a norm, and its output or give again what it was."""
        self.calls, self.eps = self.calls + 1, torch.finfo(result.dtype).eps
        x = find_input(args, kwargs)
        self.final = torch.empty(0) if x is None else x.detach().cpu().double().flatten(0, -2)  # (p, c)
        if self.is_first:
            self.given.append(result.clone())  # a model may write into it
            return None
        return self.given[self.calls - 1].clone() if self.calls < len(self.given) else None

    def make_adder(self, vectors: Mapping[int, Tensor]) -> Any:
        """Return a hook that adds vectors to the outputs of a module, by the number of the call."""
        calls = itertools.count()

        def add(module: nn.Module, args: Any, result: Tensor) -> Tensor:
            vector = vectors.get(next(calls))
            return result if vector is None else result + vector.to(result)

        return add

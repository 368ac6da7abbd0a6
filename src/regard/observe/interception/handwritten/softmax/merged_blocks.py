"""Blocks of keys with a softmax each, whose contexts are merged by the logarithms of their sums, as in flash decoding."""

from typing import Any

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.products.traces import Traced, TraceKind
from regard.observe.interception.handwritten.softmax.divided_exponentials import LOGARITHMS_OF_SUMS

MERGED = (
    "the logarithms of the sums of its scores were computed too, by which blocks of keys are merged: the rows of each map sum "
    "to 1 over the keys of its block"
)
Owners = list[tuple[Any, str]]  # watchers, each with the name of a module


class MergedBlocks:
    """The softmaxes of one forward, and the scores whose logarithms of sums were computed, by the roots of their traces."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self.calls: list[tuple[int, Owners]] = []

    def clear(self) -> None:
        """Forget all softmaxes and sums."""
        self.sums.clear()
        self.calls.clear()

    def add_sum(self, name: str, traced: list[Traced]) -> None:
        """Add the scores of pairs of tokens among the arguments of a function of this name, if it sums their exponentials."""
        if strip_affixes(name) in LOGARITHMS_OF_SUMS:
            self.sums += [trace.roots for _, trace in traced if trace.kind is TraceKind.SCORES and trace.pairs]

    def report(self) -> None:
        """Report each module with several softmaxes of such scores, and forget all."""
        merged = [owners for roots, owners in self.calls if any(roots & one for one in self.sums)]
        every = [owner for owners in merged for owner in owners]
        for watcher, name in dict.fromkeys(every):
            if every.count((watcher, name)) > 1:
                watcher.handle_unread_part(MERGED, name)
        self.clear()

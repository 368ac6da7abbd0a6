"""Check that torch's fast path of encoder layers, which runs in inference only, attends as the layers do otherwise."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from regard.examination.call_reading.inner_calls import CallCollector
from regard.examination.case import Case
from regard.examination.report import Finding
from regard.observe import interception
from regard.observe.interception.module_calls import FAST

BOOL = (
    "Pass a boolean mask, True where a key is hidden. If its numbers are meant to be added to the scores in inference too: "
    "torch.backends.mha.set_fastpath_enabled(False)."
)


def check_case(case: Case) -> Iterator[Finding]:
    """Check what a subject computes without gradients."""
    inputs = case.make_usual_inputs()
    yield from check_inference(case.subject.module, lambda: case.run_subject(*inputs))


def check_inference(module: nn.Module | None, run: Callable[[], object]) -> Iterator[Finding]:
    """Yield the finding of a mask that a module reads otherwise in inference, in the first of its calls that does, if any.

    No hook is on the module while it runs: hooks disable the fast path.
    """
    modules = {} if module is None else dict(module.named_modules())
    if not any(isinstance(part, FAST) for part in modules.values()):
        return
    collector = CallCollector(modules)
    with interception.watch_modules(collector, modules), torch.no_grad():
        run()
    found = [(name, call.unread_bias) for name, call, _ in collector.calls if call.unread_bias is not None]
    for name, numbers in found[:1]:
        added = numbers.masked_fill((numbers == 0) | numbers.isnan(), -torch.inf)
        b, _, i, j = (int(n) for n in torch.unravel_index(added.argmax(), added.shape))
        who = f"of sequence {b} " * (len(added) > 1) + (f"query {i} does not" if added.shape[2] > 1 else "no query does")
        more = f" (and {len(found) - 1} more calls)" if len(found) > 1 else ""
        sentence = (
            f"{name or 'it'}: in inference, without gradients, {who} see token {j}, to whose score the mask adds "
            f"{float(added.max()):.4g}: torch's fast path hides each key whose number is not 0{more}"
        )
        yield Finding("wrong mask", sentence, BOOL, 2.0, "fast path", name)

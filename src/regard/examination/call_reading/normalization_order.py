"""Find which module outputs existed before scores of an attention call became weights: its queries and keys are among them."""

from collections.abc import Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from regard.examination.call_reading.projection_source import ModuleOutput
from regard.observe.interception.function_roles import NORMALISES

BY_HAND = "by hand"  # how the kernel of a handwritten call begins, which is recorded at its product with the values


class NormalizationWatcher(TorchFunctionMode):
    """A torch function mode that counts the outputs that existed when a softmax or an exponential last ran."""

    def __init__(self, outputs: Sequence[ModuleOutput]) -> None:
        super().__init__()
        self.outputs, self.count = outputs, -1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and count the outputs before a softmax or an exponential."""
        if getattr(func, "__name__", "") in NORMALISES:
            self.count = len(self.outputs)
        return func(*args, **(kwargs or {}))

    def count_earlier_outputs(self, kernel: str) -> int:
        """Return how many outputs came before the weights of the call that is being recorded."""
        return self.count if self.count >= 0 and kernel.startswith(BY_HAND) else len(self.outputs)


def select_earlier(outputs: Sequence[ModuleOutput], count: int) -> list[ModuleOutput]:
    """Return the first `count` outputs, and later ones that are projections of a module's inputs, known when it has run."""
    return [*outputs[:count], *(one for one in outputs[count:] if one.is_of_inputs)]

"""record: what any model attends to while it runs, without a bit of its output changing."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from regard.errors import ConfigError
from regard.observe import doors
from regard.observe.chosen import Chosen
from regard.observe.recorder import Recorder
from regard.observe.recording import Recording
from regard.observe.store import Store


@contextmanager
def record(
    model: nn.Module,
    *,
    layers: Iterable[int | str] | None = None,
    heads: Iterable[int] | None = None,
    keep: str | Iterable[str] | None = None,
    to: str | Path | None = None,
) -> Iterator[Recording]:
    """A context in which every call of attention in a model is recorded: its q, k and rule, O(T), from which come its maps.

    layers, numbers or paths of modules, and heads choose what is kept; keep="bfloat16" halves it, keep="values" keeps
    the values too (keep=("bfloat16", "values") both). to=FOLDER writes queries and keys there as they come and reads them
    back by memory map. Nothing of the model's output, gradients or random numbers changes. A Hugging Face model that is
    asked for output_attentions=True returns maps. What could not be recorded is in recording.missed, and warned of once.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"record takes a torch.nn.Module, got {type(model).__name__}.")
    modules = dict(model.named_modules())
    refuse_compiled(modules)
    recorder = Recorder(modules, Chosen.of(modules, layers, heads), Store.of(keep, to))
    with doors.watching(recorder, modules):
        yield recorder.recording
    tell(recorder.recording)


def refuse_compiled(modules: Mapping[str, nn.Module]) -> None:
    """Raises where torch.compile or torch.jit has made of the model what no door is in."""
    for name, module in modules.items():
        what = f"its module {name}" if name else "the model"
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigError(
                f"{what} is compiled, and compiled code meets no door: its kernels are fused into it. Record the module that "
                "was compiled (compiled._orig_mod), or a copy that was not."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"{what} is compiled by torch.jit, and meets no door: record the module that it was made from.")


def tell(recording: Recording) -> None:
    """Warns once of what was missed."""
    if recording.missed:
        first, more = recording.missed[0], len(recording.missed) - 1
        others = f" and {more} more, see recording.missed" if more else ""
        warnings.warn(f"not recorded: {first.kernel} in {first.module or 'the model'}: {first.reason}{others}.", stacklevel=4)

"""record: capture the attention of any model while it runs, without changing a bit of its output."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import nn

from regard.errors import ConfigError
from regard.observe import interception
from regard.observe.interception.compiled.observer_op import IMPLEMENTATION
from regard.observe.recorded_runs.block_outputs import watch_blocks
from regard.observe.recorded_runs.part_names import describe_module
from regard.observe.recording import Recording
from regard.observe.recording_watcher import RecordingWatcher
from regard.observe.stored_calls.selection import Selection
from regard.observe.stored_calls.tensor_store import Store

Parameters = ParamSpec("Parameters")
Entered = TypeVar("Entered")


class SingleUse(AbstractContextManager[Entered], Generic[Entered]):
    """A context manager that raises ConfigError where it is entered again, in any thread."""

    def __init__(self, name: str, manager: AbstractContextManager[Entered]) -> None:
        self.name, self.manager, self.unused = name, manager, [manager]

    def __enter__(self) -> Entered:
        try:
            manager = self.unused.pop()
        except IndexError:
            raise ConfigError(f"this {self.name}(...) was entered before: call {self.name} again for each with.") from None
        return manager.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self.manager.__exit__(kind, error, trace)


def enter_once(function: Callable[Parameters, Iterator[Entered]]) -> Callable[Parameters, SingleUse[Entered]]:
    """Make a function of context managers of a generator function, as contextlib.contextmanager does, for one use each."""
    make_manager = contextmanager(function)

    @wraps(function)
    def make(*args: Parameters.args, **settings: Parameters.kwargs) -> SingleUse[Entered]:
        return SingleUse(function.__name__, make_manager(*args, **settings))

    return make


@enter_once
def record(
    model: nn.Module,
    *,
    layers: Iterable[int | str] | None = None,
    heads: Iterable[int] | None = None,
    keep: str | Iterable[str] | None = None,
    to: str | Path | None = None,
) -> Iterator[Recording]:
    """Record every attention call of a model in the context: its q, k and rule, O(T), from which its maps are computed.

    Of layers without a softmax, such as Mamba, the factors of the implied matrix are recorded: recording.map(layer,
    kind="implicit").

    layers (numbers as of recording.map, or paths of modules) and heads select what is recorded. keep="bfloat16" halves the
    memory, keep="values" also keeps the values, keep="residual" the residual stream after each block, keep=("bfloat16",
    "values") does two of these. to=FOLDER writes what is kept to the folder as it is recorded and memory-maps it. The output,
    gradients and random numbers of the model do not change. A Hugging Face model called with output_attentions=True returns
    maps. Calls that could not be recorded are listed in recording.missed, and a warning is issued once.
    Raises ConfigError for a model compiled by torch.compile or torch.jit, and for wrong arguments. While compiled, models with
    attn_implementation="regard" (regard.register_attention) are recorded, and F.scaled_dot_product_attention in those that are
    compiled in the context.
    """
    recorder = Recorder(model, layers=layers, heads=heads, keep=keep, to=to)
    with recorder.resume():
        yield recorder.recording
    recorder.finish()


class Recorder:
    """A recording of a model in parts: its calls are recorded in each context of `resume`, and it runs unobserved between them.

    The arguments are those of `record`. A part may continue a run of the parts before it through a cache.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: Iterable[int | str] | None = None,
        heads: Iterable[int] | None = None,
        keep: str | Iterable[str] | None = None,
        to: str | Path | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"record needs a torch.nn.Module, got {type(model).__name__}.")
        if uses_op(model):
            model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
        self.modules = list_modules(model)
        refuse_compiled(self.modules)
        store = Store.from_arguments(keep, to)
        self.watcher = RecordingWatcher(self.modules, Selection.from_arguments(self.modules, layers, heads), store)
        self.blocks = self.modules if store.residual else {}

    @property
    def recording(self) -> Recording:
        """What is recorded so far."""
        return self.watcher.recording

    @contextmanager
    def resume(self) -> Iterator[Recording]:
        """Record the calls of the model in the context."""
        watcher = self.watcher
        with interception.watch_modules(watcher, self.modules), watch_blocks(self.blocks, watcher.handle_block):
            yield watcher.recording

    def finish(self) -> None:
        """Remove layers that are not selected, note what maps join, infer the places of tokens and warn of what is missing."""
        self.watcher.remove_unselected()
        self.watcher.fill_places()
        self.watcher.note_joined_layers()
        warn_missed(self.recording)


def list_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by their paths, as its `named_modules` yields them, which takes a call for each level."""
    found: dict[str, nn.Module] = {}
    queue, visited = [("", model)], set[nn.Module]()
    while queue:
        path, module = queue.pop()
        if module not in visited:
            visited.add(module)
            found[path] = module
            if module._modules:
                prefix = f"{path}." if path else ""
                queue += [(prefix + name, part) for name, part in [*module._modules.items()][::-1] if part is not None]
    return found


def uses_op(model: nn.Module) -> bool:
    """Return whether a model's attention hands its arguments to record in compiled code too."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == IMPLEMENTATION


def refuse_compiled(modules: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError if a module was compiled by torch.compile or torch.jit, and its calls cannot be intercepted."""
    for name, module in modules.items():
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        if is_compiled and not uses_op(modules[""]):
            raise ConfigError(
                f"{describe_module(name)} is compiled, and torch.compile bypasses the hooks of regard. Use the module that "
                "was compiled (compiled._orig_mod) or an uncompiled copy, compile it inside record, or load a model of "
                "transformers with attn_implementation='regard'."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{describe_module(name)} is compiled by torch.jit, which bypasses the hooks of regard: use the module that it "
                "was made from."
            )


def warn_missed(recording: Recording) -> None:
    """Warn once about calls that were not recorded."""
    if recording.missed:
        first, more = recording.missed[0], len(recording.missed) - 1
        others = f" and {more} more, see recording.missed" if more else ""
        warnings.warn(f"not recorded: {first.kernel} in {describe_module(first.module)}: {first.reason}{others}.", stacklevel=6)

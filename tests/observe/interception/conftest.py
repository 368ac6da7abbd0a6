"""Every test of the doors: when it is over, all that a door could have replaced is the very object it was."""

import sys
from collections.abc import Iterator
from types import FunctionType

import pytest
import torch
import torch._dynamo  # which replaces names of torch by itself when it is imported
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from regard.observe.interception.thread_state import OPEN_ENTRIES, STATE

NAMES = {
    "torch": ("compile", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    "torch.nn.functional": ("scaled_dot_product_attention", "multi_head_attention_forward", "softmax", "linear"),
    "torch._dynamo.eval_frame": ("_maybe_set_eval_frame", "set_eval_frame"),
    "torch.nn.attention.flex_attention": ("flex_attention",),
}
HOOKS = [name for name in vars(nn.modules.module) if name.startswith("_global_")]


def snapshot() -> dict[str, object]:
    """Every name that a door stands in, the registry of transformers, the hooks of all modules and the stacks of modes."""
    found = {f"{path}.{name}": getattr(sys.modules.get(path), name, None) for path, names in NAMES.items() for name in names}
    found["nn.Module.__call__"] = vars(nn.Module)["__call__"]
    transformers = sys.modules.get("transformers.modeling_utils")
    interface = getattr(transformers, "AttentionInterface", None)
    if interface is not None:
        found |= {f"AttentionInterface.{name}": value for name, value in vars(interface).items()}
        found |= {f"local {name}": value for name, value in transformers.ALL_ATTENTION_FUNCTIONS._local_mapping.items()}
    hooks = vars(nn.modules.module)
    found |= {name: (id(hooks[name]), repr(hooks[name])) for name in HOOKS}
    found["modes of functions"] = tuple(torch.overrides._get_current_function_mode_stack())
    found["modes of dispatch"] = tuple(_get_current_dispatch_mode_stack())
    found["flags"] = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.backends.mha.get_fastpath_enabled()
    state = vars(STATE)
    found["state"] = tuple(
        state[name]
        for name in (
            "pause_depth",
            "mode",
            "compiled_frame",
            "is_in_unwatched",
            "is_in_fast_path",
            "is_cross",
            "is_in_skippable",
            "keeps_mode",
        )
    )
    found["empty"] = (
        tuple(len(state[name]) for name in ("inferred_masks", "skippable_modules", "frames", "watchers", "entries")),
        len(OPEN_ENTRIES),
    )
    return found


def ours() -> list[str]:
    """Names of other libraries that stand for something of this one."""
    modules = [(path, module) for path, module in sys.modules.items() if path.split(".")[0] in ("torch", "transformers")]
    values = [(f"{path}.{name}", value) for path, module in modules for name, value in list(vars(module).items())]
    return [name for name, value in values if str(vars(type(value)).get("__module__")).startswith("regard") or mine(value)]


def mine(value: object) -> bool:
    return type(value) is FunctionType and str(value.__module__).startswith("regard.")


@pytest.fixture(autouse=True)
def nothing_of_ours() -> Iterator[None]:
    """Fails the test that leaves anything else than it found."""
    before = snapshot()
    yield
    after = snapshot()
    changed = [
        name for name, value in before.items() if value is not None and after[name] is not value and after[name] != value
    ]
    assert not changed


@pytest.fixture(autouse=True, scope="module")
def no_name_of_ours() -> Iterator[None]:
    """Fails where the tests of a file leave something of ours under a name of another library: a long search, done once."""
    yield
    assert not ours()

"""Models inside other people's wrappers, and how far their recorded maps are from what they compute."""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from observe.family import Widened, widen
from observe.recording_checks import compute_weights, distance, record_and_compare
from ranks import run_ranks
from regard.observe import Recording

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}
IDS = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(5))
RANKED = Path(__file__).with_name("distributed_wrappers.py")


def build_llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, **settings)).eval()
    widen(model, 1.2)
    return model.double()


def compare_with_eager(wrapped: nn.Module, eager: nn.Module) -> tuple[int, float]:
    """Return the number of maps, and the largest difference of one from the attentions of the eager model.

    Raises AssertionError if the output of the wrapped model changes inside `record`, or something is missed.
    """
    with torch.no_grad(), Widened():
        recording, _ = record_and_compare(wrapped, lambda m: m(input_ids=IDS).logits)
        attentions = eager(input_ids=IDS, output_attentions=True).attentions
    assert len(recording.calls) == len(attentions)
    return len(attentions), max(distance(recording.map(layer), weights) for layer, weights in enumerate(attentions))


ADAPTERS = {
    "LoRA": ("LoraConfig", {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}),
    "DoRA": ("LoraConfig", {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "use_dora": True}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}),
}


def compare_adapted(adapter: str) -> tuple[int, float]:
    """Return the number of maps of a model with an adapter of peft, and the largest difference from the same run eager."""
    peft = import_module("peft")
    kind, settings = ADAPTERS[adapter]
    models = []
    for implementation in ("sdpa", "eager"):
        model = build_llama(attn_implementation=implementation)
        torch.manual_seed(4)
        models.append(peft.get_peft_model(model, getattr(peft, kind)(**settings)).eval().double())
    return compare_with_eager(*models)


OFFLOADS = {
    "cpu_offload": lambda accelerate, model, folder: accelerate.cpu_offload(model, execution_device=torch.device("cpu")),
    "cpu_offload_with_hook": lambda accelerate, model, folder: accelerate.cpu_offload_with_hook(model, torch.device("cpu"))[0],
    "disk_offload": lambda accelerate, model, folder: accelerate.disk_offload(model, folder, torch.device("cpu")),
}


def compare_offloaded(offload: str) -> tuple[int, float]:
    """Return the number of maps of a model whose weights accelerate offloads, and the largest difference from it run eager."""
    with tempfile.TemporaryDirectory() as folder:
        wrapped = OFFLOADS[offload](import_module("accelerate"), build_llama(), folder)
        return compare_with_eager(wrapped, build_llama(attn_implementation="eager"))


class Attention(nn.Module):
    """Attention whose projections are quantised, and whose queries and keys are kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        self.kept = q, k
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def quantize_dynamically(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def quantize_by_torchao(name: str, model: nn.Module) -> nn.Module:
    torchao = import_module("torchao.quantization")
    torchao.quantize_(model, getattr(torchao, name)())
    return model


QUANTIZERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "dynamic, torch.ao": quantize_dynamically,
    "int8 weights, torchao": partial(quantize_by_torchao, "Int8WeightOnlyConfig"),
    "int8 activations, torchao": partial(quantize_by_torchao, "Int8DynamicActivationInt8WeightConfig"),
}


def record_quantized(quantizer: str) -> tuple[Recording, Tensor, Tensor]:
    """Return a recording of attention whose projections are quantised, and its queries and keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated; of what torchao itself imports
        model = QUANTIZERS[quantizer](nn.Sequential(Attention()).eval())
    assert type(model[0].q) is not nn.Linear or type(model[0].q.weight) is not nn.Parameter or "torchao" in quantizer
    torch.manual_seed(6)
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        recording, _ = record_and_compare(model, lambda m: m(x))
    return recording, *model[0].kept


def compute_causal_weights(q: Tensor, k: Tensor) -> Tensor:
    return compute_weights(q, k, torch.ones(q.shape[-2], k.shape[-2]).tril().bool())


def compare_quantized(quantizer: str) -> tuple[int, float]:
    """Return the number of maps of quantised attention, and the largest difference from the softmax of its queries and keys."""
    recording, q, k = record_quantized(quantizer)
    return len(recording.calls), distance(recording.map(0), compute_causal_weights(q, k))


def compare_ranks() -> dict[str, tuple[int, float]]:
    """Return the number of maps and their largest difference on two ranks, for each wrapper of a process group."""
    found: dict[str, tuple[int, float]] = {}
    for text in run_ranks(RANKED):
        for line in text.splitlines():
            if line.startswith("recorded: "):
                name, maps, difference = line.removeprefix("recorded: ").rsplit(" ", 2)
                before = found.get(name, (0, 0.0))
                found[name] = before[0] + int(maps), max(before[1], float(difference))
    return found


@dataclass(frozen=True)
class Wrapper:
    """A wrapper, its package, how its maps are compared, and with what."""

    name: str
    package: str
    compare: Callable[[], tuple[int, float]]
    reference: str


def list_wrappers() -> Iterator[Wrapper]:
    """Return the wrappers of models on one process."""
    for name in ADAPTERS:
        yield Wrapper(name, "peft", partial(compare_adapted, name), "the same model run eager, in float64")
    for name in OFFLOADS:
        yield Wrapper(name, "accelerate", partial(compare_offloaded, name), "the same model run eager, in float64")
    for name in QUANTIZERS:
        package = "torchao" if "torchao" in name else "torch"
        yield Wrapper(name, package, partial(compare_quantized, name), "the softmax of its own q and k, in float32")

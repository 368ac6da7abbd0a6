"""Models inside other people's wrappers: adapters, quantised weights, offloaded weights, and the ranks of a process group.

A wrapped model computes the same to the bit while recorded, and its maps are those of the same model with eager attention.
"""

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from observe.family import Widened, widen
from observe.recording_checks import EQUAL, assert_map, compute_weights, distance, record_and_compare
from ranks import run_ranks

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}
IDS = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(5))


def build_llama(**settings) -> LlamaForCausalLM:
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, **settings)).eval()
    widen(model, 1.2)
    return model.double()


def assert_equal_to_eager(wrapped: nn.Module, eager: nn.Module) -> None:
    """Fail unless the wrapped model is recorded unchanged, and its maps are the attentions of the eager one."""
    with torch.no_grad(), Widened():
        recording, _ = record_and_compare(wrapped, lambda m: m(input_ids=IDS).logits)
        attentions = eager(input_ids=IDS, output_attentions=True).attentions
    assert len(recording.calls) == len(attentions) == 3
    for layer, weights in enumerate(attentions):
        assert distance(recording.map(layer), weights) < EQUAL


ADAPTERS = {
    "LoRA": ("LoraConfig", {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}),
    "DoRA": ("LoraConfig", {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "use_dora": True}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what peft itself imports
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_of_peft_is_recorded(adapter):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    kind, settings = ADAPTERS[adapter]
    models = []
    for implementation in ("sdpa", "eager"):
        model = build_llama(attn_implementation=implementation)
        torch.manual_seed(4)
        models.append(peft.get_peft_model(model, getattr(peft, kind)(**settings)).eval().double())
    assert_equal_to_eager(*models)


OFFLOADS = {
    "cpu_offload": lambda accelerate, model, folder: accelerate.cpu_offload(model, execution_device=torch.device("cpu")),
    "cpu_offload_with_hook": lambda accelerate, model, folder: accelerate.cpu_offload_with_hook(model, torch.device("cpu"))[0],
    "disk_offload": lambda accelerate, model, folder: accelerate.disk_offload(model, str(folder), torch.device("cpu")),
}


@pytest.mark.slow
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_model_whose_weights_accelerate_offloads_is_recorded(offload, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert_equal_to_eager(OFFLOADS[offload](accelerate, build_llama(), tmp_path), build_llama(attn_implementation="eager"))


class Attention(nn.Module):
    """Attention whose projections are quantised, and whose queries and keys are kept for the test."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        self.kept = q, k
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def quantize_dynamically(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def quantize_by_torchao(name: str):
    def quantize(model: nn.Module) -> nn.Module:
        torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        torchao.quantize_(model, getattr(torchao, name)())
        return model

    return quantize


QUANTIZERS = {
    "dynamic, torch.ao": quantize_dynamically,
    "int8 weights, torchao": quantize_by_torchao("Int8WeightOnlyConfig"),
    "int8 activations, torchao": quantize_by_torchao("Int8DynamicActivationInt8WeightConfig"),
}


@pytest.mark.filterwarnings("ignore")  # of what torchao itself imports
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_quantised_model_is_recorded(quantizer):
    model = QUANTIZERS[quantizer](nn.Sequential(Attention()).eval())
    assert type(model[0].q) is not nn.Linear or type(model[0].q.weight) is not nn.Parameter or "torchao" in quantizer
    with torch.no_grad():
        recording, _ = record_and_compare(model, lambda m: m(torch.randn(2, 7, 32)))
    q, k = model[0].kept
    assert_map(recording.map(0), compute_weights(q, k, torch.ones(7, 7).tril().bool()), q, k)


@pytest.mark.slow
def test_the_ranks_of_ddp_fsdp_tensor_and_pipeline_parallel_models_are_recorded():
    printed = run_ranks(Path(__file__).with_name("distributed_wrappers.py"))
    assert all(text.splitlines()[-1] == "recorded: ddp, fsdp2, tensor parallel, pipeline" for text in printed), printed

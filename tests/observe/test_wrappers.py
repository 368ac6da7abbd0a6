"""Models inside other people's wrappers: adapters, quantised weights, offloaded weights, and the ranks of a process group.

A wrapped model computes the same to the bit while recorded, and its maps are those of the same model with eager attention.
"""

import pytest

from observe.recording_checks import EQUAL, assert_map
from observe.wrapped_models import (
    ADAPTERS,
    OFFLOADS,
    QUANTIZERS,
    compare_adapted,
    compare_offloaded,
    compare_ranks,
    compute_causal_weights,
    record_quantized,
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what peft itself imports
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_of_peft_is_recorded(adapter):
    pytest.importorskip("peft", reason="peft is not installed")
    maps, difference = compare_adapted(adapter)
    assert maps == 3
    assert difference < EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_model_whose_weights_accelerate_offloads_is_recorded(offload):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    maps, difference = compare_offloaded(offload)
    assert maps == 3
    assert difference < EQUAL


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_quantised_model_is_recorded(quantizer):
    if "torchao" in quantizer:
        pytest.importorskip("torchao", reason="torchao is not installed")
    recording, q, k = record_quantized(quantizer)
    assert_map(recording.map(0), compute_causal_weights(q, k), q, k)


@pytest.mark.slow
def test_the_ranks_of_ddp_fsdp_tensor_and_pipeline_parallel_models_are_recorded():
    found = compare_ranks()
    assert found.keys() == {
        "DistributedDataParallel",
        "fully_shard",
        "tensor parallel",
        "DTensors split along heads",
        "pipeline",
    }
    assert all(difference < EQUAL for _, difference in found.values()), found

"""Hugging Face's continuous batching, which runs the model in a thread of its own."""

import pytest
import torch

from observe.models import llama
from regard.observe import record

generation = pytest.importorskip("transformers.generation", reason="transformers is not installed")


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(generation, "ContinuousBatchingConfig"), reason="this version of transformers has no continuous batching"
)
def test_what_continuous_batching_runs_in_its_thread_is_missed_with_what_to_do():
    model, prompts = llama(), [[3, 5, 7, 11], [13, 17, 19]]
    room = generation.ContinuousBatchingConfig(page_size=8, num_blocks=16, max_batch_tokens=32, max_requests_per_batch=4)
    with pytest.warns(UserWarning, match="another thread than record"), record(model) as recording:
        found = model.generate_batch(prompts, max_new_tokens=4, continuous_batching_config=room)
    assert [len(one.generated_tokens) for one in found.values()] == [4, 4]
    assert not recording.calls
    (missed,) = recording.missed
    assert (missed.kernel, missed.module) == ("threads", "")
    assert "enter record in the thread that runs the model" in missed.reason
    for prompt, one in zip(prompts, found.values(), strict=True):  # what it generates is what the model says beside it
        assert (
            one.generated_tokens == model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, -4:].tolist()
        )

"""The loops that generation with a model calls are known before it calls them, and compiled in a thread."""

import threading
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from generate.small_models import gpt2
from regard.compiled import threads
from regard.generate import generate, quantise
from regard.models import TransformersDecoder, loop_compilation
from regard.models.loop_compilation import list_loops, start_compilation

pytestmark = pytest.mark.skipif(
    not (threads.can_run_loops() and threads.find_barrier_address()),
    reason="this torch has no OpenMP to call, or numba is not installed",
)
WIDE = {"width": 256, "heads": 4, "dtype": torch.float32}


def make_llama(dtype: torch.dtype = torch.float32) -> TransformersDecoder:
    sizes = {"hidden_size": 264, "intermediate_size": 331, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 53}
    config = LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=48, bos_token_id=None, eos_token_id=None)
    return TransformersDecoder(LlamaForCausalLM(config).eval().to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (gpt2, set()),
        (partial(gpt2, **WIDE, vocabulary=3), {"multiply_shared", "run_worker"}),
        (lambda: quantise(gpt2(**WIDE), "int8"), {"multiply_shared", "run_worker"}),
        (partial(gpt2, width=33, vocabulary=2003, dtype=torch.float32), {"multiply_shared"}),
        (partial(gpt2, **{**WIDE, "dtype": torch.float64}), set()),
        (make_llama, {"run_worker"}),
        (lambda: TransformersDecoder(quantise(make_llama().model, "int8")), {"multiply_shared", "run_worker"}),
        (partial(make_llama, torch.bfloat16), set()),
    ],
    ids=["small", "wide", "quantized", "many words", "float64", "llama", "quantized llama", "bfloat16"],
)
def test_the_loops_that_are_compiled_beforehand_are_those_that_generation_calls(make, names, monkeypatch):
    called, run = set(), threads.run_callback
    monkeypatch.setattr(threads, "run_callback", lambda work, *given, **more: called.add(work) or run(work, *given, **more))
    model = make()
    listed = {loop() for loop in list_loops(model)}
    assert {loop._pyfunc.__name__ for loop in listed} == names
    list(generate(model, [[1, 2, 0, 1, 2]], 3))
    assert called <= listed


def test_a_loop_is_compiled_in_a_thread_and_its_error_is_raised_in_those_who_wait(monkeypatch):
    began, going = threading.Event(), threading.Event()

    def compile_slowly():
        began.set()
        going.wait(60)
        raise MemoryError("no room")

    monkeypatch.setattr(loop_compilation, "list_loops", lambda model: [compile_slowly])
    future = start_compilation(gpt2())
    assert began.wait(60)
    assert not future.done()
    going.set()
    with pytest.raises(MemoryError, match="no room"):
        future.result(60)


def test_a_model_that_calls_no_loops_is_ready_at_once():
    assert start_compilation(gpt2()).done()

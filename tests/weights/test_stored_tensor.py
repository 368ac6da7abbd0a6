import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from regard.errors import WeightsError
from regard.weights import gpt2
from regard.weights.stored_tensor import StoredTensor, read_numbers
from weights import checkpoint_formats
from weights.checkpoint_formats import FORMATS


@pytest.mark.parametrize("kind", ["TensorFlow", "npz", "packed npz"])
def test_one_changed_bit_of_a_tensor_is_noticed_where_there_is_a_checksum(tmp_path, kind):
    FORMATS[kind](checkpoint_formats.make_small_gpt2(), tmp_path)
    file = next(path for path in tmp_path.iterdir() if ".data-" in path.name or path.suffix == ".npz")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightsError, match=r"damaged.*model/h\d|model/h\d.*damaged"):
        gpt2.load_weights(tmp_path)


@pytest.mark.parametrize("kind", ["transformers", "pickle", "TensorFlow", "npz"])
def test_a_truncated_file_is_refused(tmp_path, kind):
    FORMATS[kind](checkpoint_formats.make_small_gpt2(), tmp_path)
    file = max((path for path in tmp_path.iterdir()), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-600])
    with pytest.raises(WeightsError, match=re.escape(file.name)):
        gpt2.load_weights(tmp_path)


def test_numbers_that_end_early_are_noticed_without_a_checksum(tmp_path):
    numbers, path = torch.arange(35.0), tmp_path / "numbers"
    path.write_bytes(b"head" + numbers.numpy().tobytes())
    whole = StoredTensor(path, "w", (5, 7), torch.float32, partial(read_numbers, path, 4, (5, 7), torch.float32))
    assert torch.equal(whole.load(), numbers.view(5, 7))
    short = replace(whole, read=partial(read_numbers, path, 4, (6, 7), torch.float32))
    with pytest.raises(WeightsError, match="numbers: w is damaged or cut short: the file ends before its last number"):
        short.load()


@pytest.mark.parametrize("turned", [False, True])
def test_tensors_that_lie_side_by_side_are_parted(turned):
    numbers = torch.randn(7, 6) if turned else torch.randn(6, 7)
    expected = (numbers.T if turned else numbers).split([2, 3, 1])
    targets = [torch.empty(part.shape, dtype=torch.float64) for part in expected]
    StoredTensor(Path("numbers"), "w", (*numbers.shape,), torch.float32, lambda: numbers).copy_into(targets, turned)
    assert all(torch.equal(target, part.double()) for target, part in zip(targets, expected, strict=True))


PEAK = """
import sys, torch
from benchmarks.timing import measure_peak_megabytes
from regard.weights import gpt2
kept = []
peak = measure_peak_megabytes(lambda: kept.append(gpt2.load_weights(sys.argv[1], getattr(torch, sys.argv[2]))))
print(-1 if peak is None else peak / (sum(tensor.nbytes for tensor in kept[0].tensors.values()) / 2**20))
"""


@pytest.fixture(scope="module", params=["transformers", "TensorFlow"])
def real_size(request, tmp_path_factory) -> Iterator[Path]:
    """GPT-2's smallest size in one format."""
    path, sizes = tmp_path_factory.mktemp("real"), {"n_layer": 12, "n_embd": 768, "vocab_size": 50257}
    FORMATS[request.param](checkpoint_formats.make_small_gpt2(n_head=12, n_positions=1024, **sizes), path)
    (path / "hparams.json").write_text(json.dumps({**sizes, "n_head": 12, "n_ctx": 1024}))
    yield path
    shutil.rmtree(path)  # half a gigabyte


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_the_memory_of_the_weights_and_little_more(real_size, dtype):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PEAK, str(real_size), dtype]
    peak = float(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    if peak < 0:
        pytest.skip("needs Linux, which tells the most memory a process held")
    assert 0.9 < peak <= 1.15

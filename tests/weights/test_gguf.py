import re
import weakref
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.cli import model_loading
from regard.cli.model_loading import BASE_MODEL, CAUSAL_LM, convert_panics, load_model, load_weights
from regard.errors import DataError, RegardError, WeightsError
from regard.weights.gguf import read_layout
from weights import gguf_files
from weights.damage import attempt, damage, differing

CASES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
needs_gguf = pytest.mark.skipif(
    not (find_spec("gguf") and find_spec("accelerate")), reason="needs gguf and accelerate, with which transformers reads .gguf"
)


def test_every_tensor_lies_where_its_bytes_are(tmp_path):
    content, arrays = gguf_files.write(tmp_path / "m.gguf"), gguf_files.tensors()
    found = read_layout(tmp_path / "m.gguf")
    start = len(content) - found[-1].offset - -(-found[-1].size // 32) * 32
    assert [tensor.name for tensor in found] == [*arrays]
    for tensor in found:
        array, part = arrays[tensor.name], content[start + tensor.offset :][: tensor.size]
        assert tensor.shape == array.shape[::-1]
        assert np.array_equal(np.frombuffer(part, array.dtype), array.ravel())


def change_setting(name: str, value: object) -> bytes:
    return gguf_files.gguf(gguf_files.tensors(), gguf_files.SETTINGS | {name: value})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is damaged or not a .gguf file"),
        (b"GGUF", "it ends before its last setting"),
        (b"JUNK" * 20, "it does not begin with GGUF"),
        (change_setting("llama.block_count", 2**31 + 2), "llama.block_count is 2,147,483,650, where 1 to 20 is expected"),
        (change_setting("llama.block_count", 0), "its llama.block_count is 0, where 1 to 20 is expected"),
        (change_setting("llama.context_length", 0), "its llama.context_length is 0"),
        (change_setting("llama.context_length", 2**31 + 1), "its llama.context_length is 2,147,483,649"),
        *(
            (change_setting("llama.attention.layer_norm_rms_epsilon", eps), f"epsilon is {eps}, where 1e-30 to 1.0")
            for eps in (float("nan"), float("inf"), 0.0, -1.0)
        ),
        (change_setting("llama.rope.freq_base", 0.0), "its llama.rope.freq_base is 0.0"),
        (change_setting("llama.attention.head_count", 5), "its 5 heads do not divide its width, 24"),
        (change_setting("general.alignment", 48), "its alignment is 48"),
        (gguf_files.gguf(gguf_files.tensors(), gguf_files.SETTINGS, 64), "is expected"),  # by an alignment it does not say
        (change_setting("general.alignment", 32) + bytes(4096), "bytes, but its last tensor ends at"),
    ],
)
def test_a_file_that_does_not_fit_itself_is_refused(tmp_path, content, sentence):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(WeightsError, match=sentence):
        read_layout(tmp_path / "m.gguf")
    with pytest.raises(WeightsError, match=sentence):
        load_model(str(tmp_path / "m.gguf"))


@pytest.mark.slow
@needs_gguf
def test_a_panic_of_the_library_of_tokenizers_is_an_error_like_any_other(tmp_path, capfd):
    (tmp_path / "m.gguf").write_bytes(change_setting("tokenizer.ggml.merges", [*gguf_files.PAIRS, "o h"]))
    with pytest.raises(DataError, match=r"m\.gguf could not be loaded: "):
        load_model(str(tmp_path / "m.gguf"))
    assert not capfd.readouterr().err
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), convert_panics():
            raise error


def test_every_truncation_is_refused(tmp_path):
    content = gguf_files.write(tmp_path / "m.gguf")
    for length in (*range(0, 6000, 3), *range(6000, len(content), 501)):
        (tmp_path / "m.gguf").write_bytes(content[:length])
        assert attempt(lambda: read_layout(tmp_path / "m.gguf")) is None, length


@pytest.mark.slow
def test_one_bit_changes_at_most_the_name_of_a_tensor_and_other_damage_is_read_or_refused(tmp_path):
    content = gguf_files.write(tmp_path / "m.gguf")
    expected, counts = read_layout(tmp_path / "m.gguf"), Counter()

    @settings(CASES, max_examples=2000)
    @given(data=st.data())
    def check_damage(data):
        done, other = damage(data, content, head=6000)
        (tmp_path / "m.gguf").write_bytes(other)
        found = attempt(lambda: read_layout(tmp_path / "m.gguf"))
        counts[done, "refused" if found is None else "read"] += 1
        assert found is None or done in ("flip", "write", "insert")
        if found is not None and done == "flip":
            assert [tensor[1:] for tensor in found] == [tensor[1:] for tensor in expected]
            assert sum(tensor.name != other.name for tensor, other in zip(found, expected, strict=True)) <= 1

    check_damage()
    print(f"\nlayout: {dict(sorted(counts.items()))}")


def numbers(path: Path) -> dict[str, Tensor]:
    """What transformers reads; the head is the embedding once more."""
    return {name: x for name, x in load_model(str(path), CAUSAL_LM).model.state_dict().items() if name != "lm_head.weight"}


@needs_gguf
def test_a_model_whose_weights_transformers_names_with_the_head_alone_loads_without_it(tmp_path, monkeypatch):
    alive = []

    def load_alone(*args):
        assert not any(model() is not None for model in alive)
        model, missing = load_weights(*args)
        alive.append(weakref.ref(model))
        return model, missing

    monkeypatch.setattr(model_loading, "load_weights", load_alone)
    path, (width, inner) = tmp_path / "m.gguf", (gguf_files.WIDTH, gguf_files.INNER)
    arrays = {name: x for name, x in gguf_files.tensors().items() if not re.search("attn_[qkv]|ffn_(gate|up)", name)}
    for n in range(gguf_files.LAYERS):
        arrays[f"blk.{n}.attn_qkv.weight"] = np.ones((2 * width, width), np.float32)
        arrays[f"blk.{n}.ffn_up.weight"] = np.full((2 * inner, width), 0.5 + n, np.float32)
    arrays["output.weight"] = arrays["token_embd.weight"]
    settings = {name.replace("llama.", "phi3."): value for name, value in gguf_files.SETTINGS.items()}
    path.write_bytes(
        gguf_files.gguf(arrays, settings | {"general.architecture": "phi3", "tokenizer.ggml.padding_token_id": gguf_files.END})
    )
    model = load_model(str(path), BASE_MODEL).model
    assert type(model).__name__ == "Phi3Model"
    assert [layer.mlp.gate_up_proj.weight[0, 0].item() for layer in model.layers] == [0.5, 1.5]
    assert len(alive) == 2


@pytest.mark.slow
@needs_gguf
def test_a_damaged_model_is_refused_or_differs_in_the_number_that_was_hit(tmp_path):
    path = tmp_path / "m.gguf"
    content, counts = gguf_files.write(path), Counter()
    expected = {name: tensor.clone() for name, tensor in numbers(path).items()}
    places = content.index(gguf_files.text("token_embd.weight"))  # before it: settings, by which numbers are read
    assert len(expected) > 18
    assert torch.equal(expected["model.norm.weight"], torch.from_numpy(gguf_files.tensors()["output_norm.weight"]))

    @settings(CASES, max_examples=60)
    @given(data=st.data())
    def check_damage(data):
        done, other = damage(data, content, head=6000)
        path.write_bytes(other)
        found = attempt(lambda: numbers(path), RegardError)
        counts[done, "refused" if found is None else "loaded"] += 1
        if found is not None and done == "flip" and other[:places] == content[:places]:
            assert differing(found, expected) <= 1

    check_damage()
    print(f"\nmodel: {dict(sorted(counts.items()))}")

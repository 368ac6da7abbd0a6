import contextlib
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from bounds import assert_within, sum_bound
from regard import BareSelfAttention, DataError, MultiHeadAttention, SelfAttention, WeightsError
from regard.weights.arrays import read_arrays
from regard.weights.projections import find_projections

TABLE = np.array([[0.5, -1.25], [3.0, 4.0], [5.0, 7.5]])


def test_every_format_gives_the_numbers_that_were_written(tmp_path):
    np.save(tmp_path / "t.npy", TABLE)
    np.savez(tmp_path / "t.npz", a=TABLE, b=TABLE[0])
    np.savetxt(tmp_path / "t.csv", TABLE, delimiter=",")
    save_file({"a": torch.tensor(TABLE, dtype=torch.bfloat16)}, tmp_path / "t.safetensors")
    expected = torch.tensor(TABLE, dtype=torch.float32)
    assert {name: tensor.dtype for name, tensor in read_arrays(tmp_path / "t.npy").items()} == {"t": torch.float32}
    assert torch.equal(read_arrays(tmp_path / "t.npy")["t"], expected)
    assert torch.equal(read_arrays(tmp_path / "t.npz")["b"], expected[0])
    assert torch.equal(read_arrays(tmp_path / "t.csv")["t"], expected)
    assert torch.equal(read_arrays(tmp_path / "t.safetensors")["a"], expected)


def test_a_csv_with_words_names_its_rows(tmp_path):
    (tmp_path / "t.csv").write_text('word,a,b\nthe,1,2\n"cat, big",3,4\n7,5,6\n', encoding="utf-8")
    found = read_arrays(tmp_path / "t.csv")
    assert {word: vector.tolist() for word, vector in found.items()} == {"the": [1, 2], "cat, big": [3, 4], "7": [5, 6]}


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a file was executed",))


def broken_files():
    array = TABLE.tobytes()
    return {
        "missing.npy": (None, "No such file"),
        "empty.npy": (b"", "damaged, or not a NumPy file"),
        "foreign.npy": (b"hello", "damaged, or not a NumPy file"),
        "pickle.npy": (pickle.dumps(Trap()), "Python objects"),
        "foreign.npz": (b"PK\x03\x04junk", "damaged, or not a NumPy file"),
        "foreign.safetensors": (array, "damaged, or not a safetensors file"),
        "short.safetensors": (save({"a": torch.ones(4)})[:-3], "damaged, or not a safetensors file"),
        "layer.pt": (pickle.dumps(Trap()), "is a pickle"),
        "table.xlsx": (b"PK", "ends in .xlsx"),
        "bytes.csv": (bytes(range(128, 256)), "not UTF-8 text"),
        "text.csv": (b"1,2\n3,x\n", "line 2, column 2: 'x' is not a number"),
        "hole.csv": (b"1,2\n3,\n", "line 2, column 2: is empty"),
        "ragged.csv": (b"1,2\n3,4\n5\n", "line 3: 1 numbers, but the first row has 2"),
        "twice.csv": (b"a,1\na,2\n", "'a' more than once"),
        "nothing.csv": (b"\n \n", "holds no numbers"),
        "nan.csv": (b"1,2\n3,nan\n", r"nan at \(1, 1\)"),
        "inf.csv": (b"1,2\n-inf,1\n", r"-inf at \(1, 0\)"),
        "huge.csv": (b"1,2\n1e300,1\n", r"1e\+300 at \(1, 0\)"),
    }


@pytest.mark.parametrize("name", broken_files())
def test_a_file_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, name):
    content, sentence = broken_files()[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=sentence) as refused:
        read_arrays(tmp_path / name)
    assert "\n" not in str(refused.value)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.array(["a"]), "holds text"),
        (np.array([1j]), "complex numbers"),
        (np.array([True]), "truth values"),
        (np.array([{}], dtype=object), "Python objects"),
        (np.zeros((0, 3)), "holds no numbers"),
    ],
)
def test_an_array_of_anything_but_numbers_is_refused(tmp_path, array, sentence):
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(DataError, match=sentence):
        read_arrays(tmp_path / "t.npy")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_refused_or_harmless_and_never_anything_else(tmp_path, data):
    kind = data.draw(st.sampled_from(["npy", "npz", "csv", "safetensors"]))
    path = tmp_path / f"t.{kind}"
    if kind == "npy":
        np.save(path, TABLE)
    elif kind == "npz":
        np.savez_compressed(path, a=TABLE)
    elif kind == "csv":
        np.savetxt(path, TABLE, delimiter=",")
    else:
        save_file({"a": torch.tensor(TABLE)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    found = {}
    with contextlib.suppress(DataError):
        found = read_arrays(path)
    assert all(tensor.isfinite().all() for tensor in found.values())


def assert_product_within(linear, x, expected):
    """x W + b, a sum of n + 1 terms, as another product of the same numbers has it."""
    size = x.double().abs() @ linear.weight.double().abs()
    size = size if linear.bias is None else size + linear.bias.double().abs()
    assert_within(linear(x), expected, sum_bound(torch.float32, x.shape[-1] + 1) * size)


def test_the_state_dicts_of_the_lectures_layers_project_as_the_layers_do():
    x = torch.randn(5, 3)
    linear, bare = SelfAttention(3, 2, qkv_bias=True), BareSelfAttention(3, 2)
    for layer in (linear, bare):
        found = find_projections(layer.state_dict())
        for mine, theirs in zip((found.query, found.key, found.value), layer.project(x), strict=True):
            assert_product_within(mine, x, theirs)
    many = MultiHeadAttention(3, 4, 5, 0.0, 2)
    found = find_projections(many.state_dict() | {"mask": torch.ones(5, 5)})
    assert_product_within(found.out, x @ torch.ones(3, 4), many.out_proj(x @ torch.ones(3, 4)))
    assert found.causal
    assert found.heads is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"W_key": None}, "no W_key and no W_key.weight"),
        ({"W_key": torch.ones(3, 4)}, "do not match"),
        ({"W_value": torch.ones(4, 2)}, "do not match"),
        ({"W_query": torch.ones(3)}, "must have two axes"),
        ({"W_query.bias": torch.ones(5)}, "W_query.bias is"),
        ({"out_proj.weight": torch.ones(2, 5)}, "out_proj takes 5"),
        ({"c_attn": torch.ones(2)}, "'c_attn', which is not part"),
    ],
)
def test_weights_that_are_no_attention_are_refused(change, sentence):
    tensors = {name: torch.ones(3, 2) for name in ("W_query", "W_key", "W_value")} | change
    with pytest.raises(WeightsError, match=sentence):
        find_projections({name: tensor for name, tensor in tensors.items() if tensor is not None})

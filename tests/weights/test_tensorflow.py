import base64
import struct
import sys
import zlib

import numpy as np
import pytest
import torch

from regard.errors import WeightsError
from regard.weights import gpt2, sorted_table, tensorflow
from weights import bundle

# what tf.compat.v1.train.Saver of TensorFlow 2.21 wrote of a GPT-2 of one layer, its numbers 0, 1/8, 2/8, ... in the order of
# ORDER
INDEX = """
eNpjYGDjYJRi4mBkEOPPzU9JzdHPMNBPLCnJ00+OB1NJHIxCLEJMHGwaEqY/4rkkRRkly4FCPEAhRiBmAkkpSGgYmOoWy10XYBMsKMrPgmtiUvDQ4DCNXXmS
AYs2JoUADQHTl/cqlnOyCebkxRsiaUsAapPYsJiNj1EwHS6YARRcrfqok4dZ0AhJbQFQuGBfcjiK2gqg4GMxpVucXEK5OQVAz6Qlw7VwKDQwaiiYlq/3MxNi
lEJ3FofCAkYNB9OwgnxmfjYhNO88YASay31KoV8EVSMHWPYFSOPMsnmz2NiEgB5KQ9K4ggmocbrMIUNuRiGEKzeARFl2Hl7HxixWXpAKFAcZxAqW28GkoWF6
YfqiywycYpCYKS+BqWCGOIYJGCdc7842MwDBYkYGBiYQI0FlgQWIZgQRBz4t3MDAyJzHcJEZLna7SezbNWaOx8z8DARB+O+GbpVS99sA4cVjvw==
"""
DATA = """
eNod0C1Ig3EQB+A/MoaMIUNEhgx5kSFDhgyRMQz7aEaj0bi4uLhgMBgWFgyGBYPBsGAwLLzBYFhYWDAsLBgWDAsLhgWfdwdPOe6OHxfCsBnCC6+8MeKdO9p0
6NLjngce6TPgiWe+mPDBmJhPKtSIKHHDLU2u2W2FkCHLHjn2OeCQqZkZ38xZ8MOSX1as+WNDsLNDijQ1rshzRIFjIk4ockqJM8qcU+GCS6pJLrfzyf0kc5K/
4Uf06DNkRMyUBSu2VTdHTNCLGv+xHD3z
"""
ORDER = [
    *("wte", "wpe", "ln_f/g", "ln_f/b", "h0/ln_1/g", "h0/ln_1/b", "h0/ln_2/g", "h0/ln_2/b"),
    *(f"h0/{name}/{kind}" for name in ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj") for kind in "wb"),
]
SHAPES = [(3, 2), (5, 2), *[(2,)] * 6, (2, 6), (6,), (2, 2), (2,), (2, 8), (8,), (8, 2), (2,)]


def decompress_text(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


@pytest.fixture
def real(tmp_path):
    (tmp_path / "model.ckpt.index").write_bytes(decompress_text(INDEX))
    (tmp_path / "model.ckpt.data-00000-of-00001").write_bytes(decompress_text(DATA))
    (tmp_path / "hparams.json").write_text('{"n_vocab": 3, "n_ctx": 5, "n_embd": 2, "n_head": 1, "n_layer": 1}')
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/home/someone/run1/model.ckpt"\n')
    return tmp_path


def test_what_tensorflow_itself_wrote_is_read(real):
    found, start = tensorflow.read_checkpoint(real), 0
    assert len(found) == len(ORDER)
    for name, shape in zip(ORDER, SHAPES, strict=True):
        stored, count = found[f"model/{name}"], int(np.prod(shape))
        assert stored.shape == shape
        assert torch.equal(stored.load().flatten(), torch.arange(start, start + count) / 8), name
        start += count
    assert gpt2.load_weights(real).config["heads"] == 1


def test_the_checkpoint_that_the_note_names_is_read_and_else_the_only_one(real):
    (real / "model.ckpt-7.index").write_bytes(b"another")
    assert len(tensorflow.read_checkpoint(real)) == 16
    (real / "checkpoint").unlink()
    with pytest.raises(WeightsError, match=r"must hold one TensorFlow checkpoint.*model\.ckpt-7\.index, model\.ckpt\.index"):
        tensorflow.read_checkpoint(real)
    (real / "model.ckpt-7.index").unlink()
    assert len(tensorflow.read_checkpoint(real)) == 16
    (real / "checkpoint").write_text('model_checkpoint_path: "other"')
    with pytest.raises(WeightsError, match=r"found other\.index"):
        tensorflow.read_checkpoint(real)


def test_a_data_file_that_is_missing_is_named(real):
    (real / "model.ckpt.data-00000-of-00001").unlink()
    with pytest.raises(WeightsError, match="data-00000-of-00001 is missing"):
        gpt2.load_weights(real)


def index_with(folder, **changes: bytes) -> None:
    """A checkpoint of one small tensor, with the entry or the header changed."""
    array = np.ones((2, 3), np.float32)
    entries = {b"": changes.get("header", bundle.number(1, 1)), b"a": changes.get("entry", bundle.entry(array, 0))}
    (folder / "m.index").write_bytes(bundle.table(entries))
    (folder / "m.data-00000-of-00001").write_bytes(array.tobytes())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"header": bundle.number(1, 1) + bundle.number(2, 1)}, "big-endian"),
        ({"header": bundle.number(1, 3)}, "data-00000-of-00003 is missing"),
        ({"header": bundle.number(1, 10**15)}, "data-00000-of-1000000000000000 is missing"),
        ({"header": bundle.message(1, b"x")}, "field 1 is not a number"),
        ({"header": b"\x0b"}, "wire type 3"),
        ({"entry": bundle.entry(np.ones((2, 3), np.float32), 0) + bundle.message(7, b"")}, "a is stored in slices"),
        ({"entry": bundle.number(1, 1) + bundle.number(5, 8)}, r"a has the shape \(\) but 8 bytes"),
        ({"entry": bundle.number(1, 1) + bundle.number(2, 8)}, "field 2 is not a message"),
        ({"entry": bundle.number(1, 1) + bundle.number(3, 4) + bundle.number(5, 4)}, "damaged"),
        ({"entry": struct.pack("<B", 0x09)}, "damaged"),
    ],
)
def test_an_index_that_says_something_else_is_refused(tmp_path, changes, sentence):
    index_with(tmp_path, **changes)
    with pytest.raises(WeightsError, match=sentence):
        tensorflow.read_checkpoint(tmp_path)


def test_without_the_library_of_its_checksums_the_error_states_what_to_install(tmp_path, monkeypatch):
    bundle.write(tmp_path, {"a": np.ones((2, 3), np.float32)})
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    sorted_table.import_crc32c.cache_clear()
    with pytest.raises(WeightsError, match=r'pip install "regard\[tensorflow\]"'):
        tensorflow.read_checkpoint(tmp_path)
    monkeypatch.undo()
    sorted_table.import_crc32c.cache_clear()
    assert set(tensorflow.read_checkpoint(tmp_path)) == {"a"}

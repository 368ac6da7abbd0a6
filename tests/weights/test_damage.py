"""Every reader of weights on damaged files: the same tensors, or an error; without a checksum, one bit changes one number."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from models.translators import make_translator
from regard.errors import DataError, RegardError
from regard.models import translator
from regard.weights import gpt2
from regard.weights.arrays import read_arrays
from weights import checkpoint_formats
from weights.checkpoint_formats import FORMATS
from weights.damage import attempt, damage, differing

UNCHECKED = ("transformers", "without prefix", "head present", "sharded", "old pickle")  # formats without a checksum
CASES = 250  # of each format
ROUNDS = settings(max_examples=CASES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WRITERS = {**FORMATS, "nanoGPT": lambda model, path: checkpoint_formats.nanogpt(model, path).parent}


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    """A folder of each format, from which the tests of damage copy."""
    root, model = tmp_path_factory.mktemp("originals"), checkpoint_formats.make_small_gpt2()
    return {kind: write(model, root / kind.replace(" ", "-")) for kind, write in WRITERS.items()}


@contextmanager
def replace_content(file: Path, content: bytes) -> Iterator[None]:
    """A file with other content inside the block, and with its own again behind it; tensors that were read may be mapped."""
    held = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.unlink()
        file.write_bytes(held)


@pytest.fixture
def counts() -> Counter:
    """What became of the cases, shown by pytest -s."""
    return Counter()


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS)
def test_a_damaged_file_of_weights_gives_the_same_tensors_or_is_refused(tmp_path, originals, counts, kind):
    expected = gpt2.load_weights(originals[kind]).tensors
    shutil.copytree(originals[kind], tmp_path, dirs_exist_ok=True)
    files = sorted(path for path in tmp_path.iterdir() if path.suffix != ".json" or path.name.endswith("index.json"))

    @ROUNDS
    @given(data=st.data())
    def check_damage(data):
        file = data.draw(st.sampled_from(files))
        done, content = damage(data, (originals[kind] / file.name).read_bytes())
        with replace_content(file, content):
            found = attempt(lambda: gpt2.load_weights(tmp_path).tensors)
        counts[done, "refused" if found is None else "loaded"] += 1
        if found is not None and (kind not in UNCHECKED or done == "flip"):
            assert differing(found, expected) <= (kind in UNCHECKED)

    check_damage()
    print(f"\n{kind}: {dict(sorted(counts.items()))}")
    assert sum(counts.values()) >= CASES / 2
    assert any(result == "refused" for _, result in counts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformers", "TensorFlow", "lectures"])
def test_a_damaged_config_changes_no_tensor(tmp_path, originals, counts, kind):
    expected = gpt2.load_weights(originals[kind]).tensors
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    values = st.recursive(plain, lambda x: st.lists(x) | st.dictionaries(st.text(), x))
    shutil.copytree(originals[kind], tmp_path, dirs_exist_ok=True)

    @ROUNDS
    @given(data=st.data())
    def check_damage(data):
        file = next(tmp_path.glob("*config.json"), tmp_path / "hparams.json")
        if data.draw(st.booleans()):
            said = json.loads(file.read_text())
            said[data.draw(st.sampled_from([*said, "activation_function", "n_embd"]))] = data.draw(values)
            content = json.dumps(said).encode()
        else:
            _, content = damage(data, file.read_bytes())
        with replace_content(file, content):
            found = attempt(lambda: gpt2.load_weights(tmp_path).tensors)
        counts["refused" if found is None else "loaded"] += 1
        assert found is None or differing(found, expected) == 0

    check_damage()
    print(f"\nconfig of {kind}: {dict(counts)}")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["settings.json", "model.safetensors"])
def test_a_damaged_translator_is_the_same_or_refused(tmp_path, counts, file):
    make_translator("additive", dtype=torch.float32).save(tmp_path / "whole")
    expected = translator.load(tmp_path / "whole").state_dict()
    content = (tmp_path / "whole" / file).read_bytes()

    @ROUNDS
    @given(data=st.data())
    def check_damage(data):
        done, changed = damage(data, content)
        (tmp_path / "whole" / file).write_bytes(changed)
        found = attempt(lambda: translator.load(tmp_path / "whole").state_dict(), RegardError)
        counts[done, "refused" if found is None else "loaded"] += 1
        if found is not None and done == "flip":
            assert differing(found, expected) <= (file == "model.safetensors")

    check_damage()
    print(f"\ntranslator's {file}: {dict(sorted(counts.items()))}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npy", "npz", "csv", "safetensors"])
def test_a_damaged_file_of_numbers_is_read_or_refused(tmp_path, counts, kind):
    path, numbers = tmp_path / f"t.{kind}", np.array([[0.5, -1.25], [3.0, 4.0], [5.0, 7.5]], np.float32)
    {
        "npy": lambda: np.save(path, numbers),
        "npz": lambda: np.savez_compressed(path, t=numbers),
        "csv": lambda: np.savetxt(path, numbers, delimiter=","),
        "safetensors": lambda: save_file({"t": torch.tensor(numbers)}, path),
    }[kind]()
    expected, content = read_arrays(path), path.read_bytes()

    @ROUNDS
    @given(data=st.data())
    def check_damage(data):
        done, changed = damage(data, content, head=80)
        path.write_bytes(changed)
        found = attempt(lambda: read_arrays(path), DataError)
        counts[done, "refused" if found is None else "loaded"] += 1
        if found is not None and kind == "npz":
            assert differing(found, expected) == 0
        if found is not None and (kind, done) == ("safetensors", "flip") and found.keys() == expected.keys():
            assert differing(found, expected) <= 1  # where the name is not another

    check_damage()
    print(f"\n{kind}: {dict(sorted(counts.items()))}")

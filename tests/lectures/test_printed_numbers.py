import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.lectures import printed_numbers

SEED = Path(__file__).parents[2] / "../shared/seed/figures.json"


@pytest.mark.skipif(not SEED.exists(), reason="needs the folder shared/seed beside the repository, which this machine lacks")
def test_the_packaged_figures_are_those_of_the_seed():
    assert printed_numbers.load_printed_numbers() == json.loads(SEED.read_text(encoding="utf-8"))


def test_every_example_has_a_name_of_its_own_and_is_found_by_it():
    names = [example["id"] for example in printed_numbers.load_printed_numbers()["examples"]]
    assert len(set(names)) == len(names) == 16
    assert all(printed_numbers.get_printed_example(name)["id"] == name for name in names)


@pytest.mark.parametrize("name", ["journey", "dog"])
def test_a_sentence_has_a_vector_for_each_word(name):
    words, x = printed_numbers.load_sentence(name)
    assert x.shape == (len(words), 3)
    assert x.dtype == torch.float32


def test_a_sentence_is_the_callers_to_change():
    words, x = printed_numbers.load_sentence("dog")
    words.clear()
    x.zero_()
    words, x = printed_numbers.load_sentence("dog")
    assert words == ["The", "dog", "chased", "the", "rabbit"]
    assert x[0].tolist() == pytest.approx([0.86, 0.97, 0.89], rel=2**-24)  # as float32 holds them


def test_minus_infinity_is_read_as_a_number_wherever_it_stands():
    read = printed_numbers.parse_tensor([[1, "-inf"], ["-inf", 0.5]])
    assert read.tolist() == [[1, -torch.inf], [-torch.inf, 0.5]]
    assert printed_numbers.parse_tensor(3).shape == ()


def test_every_example_that_goes_on_from_another_names_one_that_there_is():
    names = {example["id"] for example in printed_numbers.load_printed_numbers()["examples"]}
    for example in printed_numbers.load_printed_numbers()["examples"]:
        assert {example[key] for key in ("from_example", "equals") if key in example} <= names
        assert example.get("input", "dog") in printed_numbers.load_printed_numbers()["inputs"]


@pytest.mark.slow
def test_importing_the_figures_reads_no_file():
    program = "import regard.lectures.printed_numbers as f; assert f.load_printed_numbers.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", program], check=True)

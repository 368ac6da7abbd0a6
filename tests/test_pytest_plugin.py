"""The pytest plugin: a test for each attention layer of a model, whose evidence is in JUnit's XML."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

NUMBERS = itertools.count()  # of modules, which stay imported in this process

HEAD = """
import pytest, torch, regard
from torch import nn
from regard import GPT2, GPT2Config

def make(leak=False):
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=2, heads=3, width=21, context=11, vocabulary=31)).eval()
    if leak:
        attention = model.blocks[1].attention
        def forward(x, past=None, rest=None):
            q, k, v = attention.project(x)
            return attention.out_proj(regard.attention(q, k, v).transpose(1, 2).flatten(2))
        attention.forward = forward
    return model
"""


def run(folder, code, *options):
    """The outcome and the message of each test of a project, by name, and the properties of each."""
    (folder / f"test_project_{next(NUMBERS)}.py").write_text(HEAD + code)
    (folder / "pytest.ini").write_text("[pytest]\n")
    place = folder / "junit.xml"
    fixed = [
        "-p",
        "regard.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:unraisableexception",  # which collects all garbage of this process again and again
        "--rootdir",
        folder,
        "-c",
        folder / "pytest.ini",
        "-q",
        "--import-mode=importlib",
    ]
    pytest.main([*map(str, fixed), f"--junitxml={place}", *options, str(folder)])
    cases = list(ElementTree.parse(place).getroot().iter("testcase"))
    outcomes = {one.get("name"): next((part.text for part in one.findall("failure")), None) for one in cases}
    return outcomes, {one.get("name"): [(p.get("name"), p.get("value")) for p in one.iter("property")] for one in cases}


def test_each_layer_of_a_model_is_a_test(tmp_path):
    code = "@pytest.mark.attention(expects=regard.Causal())\ndef test_mine():\n    return make(leak=True)\n"
    outcomes, properties = run(tmp_path, code)
    names = ["test_mine[model]", "test_mine[blocks.0.attention]", "test_mine[blocks.1.attention]"]
    assert list(outcomes) == names
    assert [outcomes[name] is None for name in names] == [True, True, False]
    assert "future leak: blocks.1.attention: row 0 puts" in outcomes[names[2]]
    assert any(name == "future leak" for name, _ in properties[names[2]])
    assert any(name == "checked" for name, _ in properties[names[0]])


def test_a_layer_alone_is_one_test_and_an_inconclusive_report_fails(tmp_path):
    code = (
        "@pytest.mark.attention\ndef test_layer():\n    return regard.CausalAttention(7, 5, 13, 0.0)\n"
        "@pytest.mark.attention\ndef test_nothing():\n    return nn.Identity()\n"
        "@pytest.mark.skip\n@pytest.mark.attention\ndef test_later():\n    return nn.Identity()\n"
    )
    outcomes, _ = run(tmp_path, code, "-k", "layer or later or nothing")
    assert list(outcomes) == ["test_layer", "test_nothing", "test_later"]
    assert outcomes["test_layer"] is None
    assert outcomes["test_nothing"]


def test_the_fixture_examines_inside_a_test(tmp_path):
    code = (
        "def test_right(examine_attention):\n    assert examine_attention(regard.CausalAttention(7, 5, 13, 0.0)).checked\n"
        "def test_wrong(examine_attention):\n    examine_attention(regard.SelfAttention(7, 5))\n"
    )
    outcomes, properties = run(tmp_path, code)
    assert outcomes["test_right"] is None
    assert "future leak" in outcomes["test_wrong"]
    assert properties["test_wrong"][0] == ("verdict", "SelfAttention: 1 finding")


def test_a_marked_function_takes_nothing(tmp_path):
    code = "@pytest.mark.attention\ndef test_mine(layer):\n    return layer\n"
    (tmp_path / "sub").mkdir()
    outcomes, _ = run(tmp_path / "sub", code)
    assert not any(name.startswith("test_mine") for name in outcomes)

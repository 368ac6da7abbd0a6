"""CONTRIBUTING.md agrees with the code: the layers of packages, and the files that it names."""

import re
from pathlib import Path

from test_floors import FLOORS

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LAYER = re.compile(r"^\| (\d+) \| ([\w, ]+) \|", re.MULTILINE)
NAMED = re.compile(r"`((?:\w+/)+(?:\w+\.(?:py|md|json))?)`")


def test_the_layers_are_those_that_the_tests_hold():
    assert [set(names.split(", ")) for _, names in LAYER.findall(CONTRIBUTING)] == FLOORS


def test_every_file_and_folder_that_it_names_is_there():
    named = set(NAMED.findall(CONTRIBUTING))
    assert len(named) > 15
    assert [
        path for path in sorted(named) if not (ROOT / path).exists() and not (ROOT / "src" / "regard" / path).exists()
    ] == []

"""docs/architecture.md and CONTRIBUTING.md agree with the code: the layers, and every function that a walk names."""

import ast
import re
from pathlib import Path

import pytest

from test_layers import LAYERS

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
STEP = re.compile(r"^\d+\. `([\w/]+\.(?:py|js))`, `([\w.]+)`", re.MULTILINE)
LAYER = re.compile(r"^\| (\d+) \| ([\w, ]+) \|", re.MULTILINE)
MOST = 30  # functions of a walk


def read_walks() -> dict[str, list[tuple[str, str]]]:
    parts = re.split(r"^## ", ARCHITECTURE, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: STEP.findall(part) for part in parts if STEP.search(part)}


def find_names(path: str) -> set[str]:
    """The functions, classes and methods of a file, methods after the name of their class."""
    source = (ROOT / "src" / "regard" / path).read_text(encoding="utf-8")
    if path.endswith(".js"):
        return set(re.findall(r"(?:function|const|class) (\w+)", source))
    found = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return found


def read_layers(text: str) -> list[set[str]]:
    return [set(names.split(", ")) for _, names in LAYER.findall(text)]


def test_there_are_four_walks_of_at_most_thirty_functions():
    walks = read_walks()
    assert len(walks) == 4
    assert all(1 < len(steps) <= MOST for steps in walks.values())


@pytest.mark.parametrize(("path", "name"), [step for steps in read_walks().values() for step in steps])
def test_every_function_of_a_walk_is_where_it_says(path, name):
    assert name in find_names(path)


def test_the_layers_are_those_that_the_tests_hold():
    assert read_layers(ARCHITECTURE) == LAYERS


def test_every_file_that_contributing_names_is_there():
    named = re.findall(r"`([\w/]+\.(?:py|js|md|json))`", CONTRIBUTING)
    assert len(named) > 30
    for path in named:
        if "/" in path:
            assert (ROOT / path).is_file() or (ROOT / "src" / "regard" / path).is_file(), path
        else:
            assert any(any((ROOT / folder).rglob(path)) for folder in ("src", "tests")), path

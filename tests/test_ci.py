"""tests/ci.txt lists slow tests that exist, each once."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parent
LINES = (FOLDER / "ci.txt").read_text().splitlines()


def find_tests(path: str) -> list[str]:
    return [node.name for node in ast.parse((FOLDER / path).read_text()).body if isinstance(node, ast.FunctionDef)]


def test_each_test_that_ci_lists_exists():
    assert not [line for line in LINES if line.partition("::")[2] not in find_tests(line.partition("::")[0])]
    assert len(set(LINES)) == len(LINES)

"""The notebooks, run from top to bottom. They store what they showed: these tests keep that from going stale.

`python notebooks/refresh.py` runs them all and stores their output anew.
"""

import ast
import base64
import re
import runpy
from io import BytesIO
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")
SIZE = 64  # pictures are compared as thumbnails of so many pixels
ROUNDING = 1e-12  # of numbers in double precision: what is less differs from one machine to the next


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(cell):
    """All that a cell printed."""
    parts = (output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    return "\n".join(part for part in parts if not part.startswith("<Picture"))


def html(cell):
    """All that a cell showed as HTML, without what is folded, and of its pictures what they are called."""
    found = "\n".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)
    return re.sub(r"<details.*?</details>|(?<=base64,)[^\"]*", "", found)


def pictures(cell):
    """All that a cell drew."""
    found = [output["data"]["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    return [Image.open(BytesIO(base64.b64decode(picture))).convert("L") for picture in found]


def numbers(printed):
    return [float(found.replace("−", "-")) for found in NUMBER.findall(printed)]


def unit(printed):
    """One in the last digit that is printed."""
    mantissa, _, exponent = printed.partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def alike(fresh, kept):
    """Whether two printed texts are the same words, and the same numbers but for the last digit."""
    if " ".join(NUMBER.sub("#", fresh).split()) != " ".join(NUMBER.sub("#", kept).split()):
        return False
    slack = [2 * unit(found) for found in NUMBER.findall(kept)]
    pairs = zip(numbers(fresh), numbers(kept), slack, strict=True)
    return all(abs(a - b) <= most or max(abs(a), abs(b)) < ROUNDING for a, b, most in pairs)


def difference(a, b):
    """How far two pictures are from each other, 0 to 255, whatever the font."""
    small = (np.asarray(picture.resize((SIZE, SIZE)), dtype=float) for picture in (a, b))
    return np.abs(next(small) - next(small)).mean()


def test_the_notebooks_stand_in_order_those_of_the_lectures_first():
    assert [path.stem.partition("_")[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5", "6", "7", "8"]


@pytest.mark.slow
def test_a_fresh_run_shows_what_the_notebook_stores(path, notebook):
    fresh = runpy.run_path(str(FOLDER / "refresh.py"))["run"](path)  # raises where a cell fails
    for now, before in zip(code(fresh), code(notebook), strict=True):
        assert alike(text(now), text(before)), f"{before.id}: {text(before)!r} is stored, {text(now)!r} is shown now"
        assert alike(html(now), html(before)), f"{before.id} shows other HTML now"
        assert len(pictures(now)) == len(pictures(before)), before.id
        for a, b in zip(pictures(now), pictures(before), strict=True):
            assert difference(a, b) < 2, f"the picture of {before.id} has changed"


def test_the_stored_cells_were_run_in_order_and_none_failed(notebook):
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert not [output for cell in code(notebook) for output in cell.outputs if output.output_type == "error"]
    assert not [output for cell in code(notebook) for output in cell.outputs if output.get("name") == "stderr"]


def test_every_number_in_the_prose_is_printed_by_a_cell_near_it(notebook):
    for place, cell in enumerate(notebook.cells):
        if cell.cell_type != "markdown":
            continue
        prose = re.sub(r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)|^#.*$|^\d+\. ", "", cell.source, flags=re.M)
        around = [other for other in notebook.cells[max(place - 3, 0) : place + 4] if other.cell_type == "code"]
        near = numbers("\n".join(text(other) + "\n" + other.source for other in around))
        for found in NUMBER.findall(prose):
            value, half = float(found), unit(found) / 2
            assert any(abs(value - printed) <= half * (1 + 1e-9) for printed in near), f"{cell.id} says {found}"


def test_a_notebook_needs_no_network_and_no_magic(notebook):
    trees = [ast.parse(cell.source) for cell in code(notebook)]  # % and ! do not parse
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [getattr(node, "module", None) or alias.name for node in imports for alias in node.names]
    assert {module.partition(".")[0] for module in modules} <= {"torch", "regard"}


def test_a_notebook_ends_with_what_the_next_one_adds(path, notebook):
    following = NOTEBOOKS[NOTEBOOKS.index(path) + 1 :]
    assert notebook.cells[-1].cell_type == "markdown"
    assert following[0].name in notebook.cells[-1].source if following else "whole" in notebook.cells[-1].source


def test_only_the_last_notebook_is_called_the_last(notebook):
    names = re.findall(r"\[last notebook\]\(([^)]*)\)", "\n".join(cell.source for cell in notebook.cells))
    assert set(names) <= {NOTEBOOKS[-1].name}


def test_links_lead_to_notebooks_that_exist_or_to_the_web(notebook):
    for cell in notebook.cells:
        for link in re.findall(r"\]\(([^)]*)\)", cell.source if cell.cell_type == "markdown" else ""):
            assert link.startswith("https://") or (FOLDER / link).exists(), link


def test_a_stored_notebook_says_nothing_of_the_machine_it_ran_on(path, notebook):
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert not any(cell.metadata for cell in notebook.cells)
    assert str(Path.home()) not in path.read_text(encoding="utf-8")
    assert str(FOLDER.parent) not in path.read_text(encoding="utf-8")

"""Each processor has a section of its own in docs/benchmarks.md, and a run touches no other."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import benchmarks.__main__ as command
import pytest
from benchmarks.standings import summarize_standings
from benchmarks.tables import Table

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/regard/**/*.py")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of one benchmark, which finds one figure, on a processor of this name; gives the page and the results."""
    page, results = tmp_path / "benchmarks.md", tmp_path / "results.json"
    page.write_text(f"above\n{command.BEGIN}\n{command.END}\nbelow\n")
    monkeypatch.setattr(command, "PAGE", page)
    monkeypatch.setattr(command, "RESULTS", results)
    monkeypatch.setattr(command.machine, "gigaflops", lambda dtype: 1.0)
    monkeypatch.setattr(command.machine, "gigabytes", lambda: 1.0)

    def measure(processor: str, figure: float) -> tuple[str, dict]:
        table = Table("a figure", ["ms"], [[figure]])
        monkeypatch.setattr(command.machine, "name_processor", lambda: processor)
        monkeypatch.setattr(command, "import_module", lambda name: SimpleNamespace(TITLE="a figure", run=lambda peak: table))
        command.main(["windows"])
        return page.read_text(), json.loads(results.read_text())

    return measure


def test_another_processor_adds_its_own_and_leaves_the_first(run):
    run("an Intel", 1.5)
    page, results = run("an AMD", 2.5)
    assert page.startswith("above\n")
    assert page.endswith("\nbelow\n")
    assert page.index("## an Intel") < page.index("| 1.5 |") < page.index("## an AMD") < page.index("| 2.5 |")
    page, results = run("an Intel", 3.5)
    assert "| 1.5 |" not in page
    assert page.index("## an Intel") < page.index("| 3.5 |") < page.index("## an AMD") < page.index("| 2.5 |")
    assert [own["windows"]["rows"] for own in results.values()] == [[[3.5]], [[2.5]]]


def test_a_name_that_is_no_benchmark_is_refused_before_anything_is_measured(run):
    with pytest.raises(SystemExit, match=r"expected names among kernels, .*; got kernel$"):
        command.main(["kernel"])


def test_the_page_has_the_tables_of_the_results(tmp_path, monkeypatch):
    page = tmp_path / "benchmarks.md"
    page.write_text(command.PAGE.read_text())
    monkeypatch.setattr(command, "PAGE", page)
    command.write_page(json.loads(command.RESULTS.read_text()))
    assert page.read_text() == (ROOT / "docs" / "benchmarks.md").read_text()


def test_a_standing_is_relative_to_the_fastest_other_that_computes_in_as_many_bits():
    columns = ["batch", "prompt", "by", "weights", "tokens a second"]
    rows = [
        [1, 16, "Hugging Face", "float32", 20.0],
        [1, 16, "ONNX Runtime", "float32", 40.0],
        [1, 16, "llama.cpp", "int8, Q8_0", 99.0],
        [1, 16, "regard", "float32", 50.0],
        [1, 16, "regard", "int4", 80.0],
    ]
    text = summarize_standings({"an AMD": {"generation": {"columns": columns, "rows": rows}}, "a GPU": {}})
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[0] == "| what | an AMD |"
    assert table[2:] == ["| GPT-2, a token after a prompt of 16, float32 | 1.25 × ONNX Runtime |"]


@pytest.mark.parametrize("page", [page for page in PAGES if "-m benchmarks" in page.read_text()], ids=lambda page: page.name)
def test_a_command_that_a_page_names_runs_benchmarks_that_exist(page):
    commands = re.findall(r"python\s+-m\s+benchmarks((?: \w+)*)", page.read_text())
    assert commands
    assert set(" ".join(commands).split()) <= set(command.NAMES)


def test_the_page_of_benchmarks_names_each_of_them():
    text = command.PAGE.read_text().partition(command.END)[2]
    assert [name for name in command.NAMES if f"`{name}`" not in text] == []

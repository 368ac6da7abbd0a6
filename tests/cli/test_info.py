"""What `regard info` prints is what the machine is, with and without the extras."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

import regard
from regard import machine
from regard.cli import main
from regard.compiled import kernel_choice, processor

FOR_CHANGES = {"bench", "dev"}  # extras of those who change regard, which are not listed


def run(capsys, *arguments):
    assert main(["info", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_it_names_versions_processor_kernels_and_extras(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    printed = run(capsys, "--no-measure")
    lines = dict(line.strip().split("  ", 1) for line in printed.splitlines() if line.startswith("  "))
    lines = {label: value.strip() for label, value in lines.items()}
    assert lines["regard"] == regard.__version__
    assert lines["torch"] == torch.__version__
    assert lines["processor"].startswith(processor.read_processor_name())
    assert {name: lines[name] for name in kernel_choice.list_choices()} == kernel_choice.list_choices()
    assert set(machine.EXTRAS) <= set(lines)
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) - set(machine.EXTRAS) == FOR_CHANGES | {"all"}
    assert "GFLOP/s" not in printed


@pytest.mark.parametrize("columns", [40, 80])
def test_no_line_is_wider_than_the_screen_or_ends_in_blanks(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run(capsys, "--no-measure").splitlines()
    assert all(len(line) <= columns and line == line.rstrip() for line in lines)


@pytest.mark.slow
def test_for_a_program_it_prints_every_field_with_the_rates(capsys):
    found = json.loads(run(capsys, "--json"))
    assert found["processor"] == processor.read_processor_name()
    assert found["kernels"] == kernel_choice.list_choices()
    assert min(found[name] for name in ("bytes_per_second", "float32_per_second", "bfloat16_per_second")) > 1e6

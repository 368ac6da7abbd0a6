"""Runs the notebooks that are named, or all beside this file, and stores what they show."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook out of a fresh kernel, top to bottom. Raises where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    folder = {"metadata": {"path": str(path.parent)}}
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=120,
        record_timing=False,
        coalesce_streams=True,
        resources=folder,
    ).execute()
    notebook.metadata["language_info"] = {
        "name": "python"
    }  # without the version of the machine at hand
    return notebook


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        print(f"running {path.name}")
        nbformat.write(run(path), path)

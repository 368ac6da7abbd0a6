"""Rows of figures, as Markdown and as JSON."""

from dataclasses import dataclass, field

Cell = str | int | float | None


@dataclass
class Table:
    """A title, the names of the columns, and rows of them."""

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """One row more."""
        assert len(cells) == len(self.columns), (cells, self.columns)
        self.rows.append(list(cells))
        print("  ".join(format_cell(cell) for cell in cells), flush=True)

    def markdown(self) -> str:
        title = self.title[0].upper() + self.title[1:]
        lines = [f"### {title}", "", "| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        return "\n".join([*lines, *("| " + " | ".join(format_cell(cell) for cell in row) + " |" for row in self.rows)])


def format_cell(cell: Cell) -> str:
    """Three significant digits of a number."""
    if cell is None:
        return ""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"

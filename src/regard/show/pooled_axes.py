"""The axes of a picture of many tokens: the numbers of its queries and keys, and how many of them a bin holds."""

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from regard.show.figure import FAINT, TEXT_SIZE


def label_picture(axes: Axes, below: str, left: str) -> None:
    """Set the names and token numbers of both axes of the picture."""
    axes.set_xlabel(below, fontsize=TEXT_SIZE)
    axes.set_ylabel(left, fontsize=TEXT_SIZE)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(labelsize=TEXT_SIZE - 1, length=2, color=FAINT)
    axes.spines[:].set_visible(False)


def describe_bins(span: tuple[int, int], count: int) -> str:
    """Describe how many tokens a bin holds; return an empty string where it is one."""
    size = (span[1] - span[0]) / count
    return f", in bins of {f'{size:,.1f}'.removesuffix('.0')} tokens" if size > 1 else ""

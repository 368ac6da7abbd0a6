"""Pictures as matplotlib figures."""

import subprocess
import sys
from io import BytesIO
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle

from regard import Causal, ConfigError, Everything, ShapeError, Steps, attend
from regard.show import figure
from regard.show.color_scale import LinearScale, Log, Signed

WORDS = ["Your", "journey", "starts", "with", "one", "step"]
B, H, T, D = 2, 3, 5, 7


def words(n, long=False):
    return [f"counterexample {i}" if long and i % 3 == 0 else f"word{i}" for i in range(n)]


def some_steps(mask=None, shape=(T, D), **settings):
    q, k, v = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).unbind()
    return attend(q, k, v, mask or Everything(), **settings)


def render_picture(picture):
    """The renderer, after the picture has been drawn once."""
    canvas = FigureCanvasAgg(picture)
    canvas.draw()
    return canvas.get_renderer()


def panels(picture):
    return [axes for axes in picture.axes if axes.collections and axes.get_xlim()[0] == 0 and axes.yaxis_inverted()]


def read_texts(axes):
    return {text.get_position(): text.get_text() for text in axes.texts}


def list_hatched_cells(axes):
    """The cells under hatches, as (row, column)."""
    found = set()
    for patch in axes.patches:
        if isinstance(patch, Rectangle) and patch.get_hatch() == "////":
            row, start = int(patch.get_y()), int(patch.get_x())
            found |= {(row, start + n) for n in range(int(patch.get_width()))}
    return found


def labels(picture, axis):
    renderer = render_picture(picture)
    return [label.get_window_extent(renderer) for label in axis.get_ticklabels() if label.get_text()]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 6, 23, 60, 200])
@pytest.mark.parametrize("long", [False, True])
def test_words_never_overlap_however_many_and_long(n, long):
    picture = figure.draw_matrix(torch.rand(n, n), words(n, long))
    axes = panels(picture)[0]
    columns, rows = labels(picture, axes.xaxis), labels(picture, axes.yaxis)
    assert min(len(columns), len(rows)) >= min(n, 60)
    assert all(a.x1 <= b.x0 for a, b in pairwise(columns))
    assert all(a.y0 >= b.y1 for a, b in pairwise(rows))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 6, 60])
def test_everything_lies_on_the_page(n):
    picture = figure.draw_matrix(
        torch.rand(n, n).tril() - 1, words(n, long=True), title="a title of some length", names=("query", "key")
    )
    renderer = render_picture(picture)
    for axes in picture.axes:
        box = axes.get_tightbbox(renderer)
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= picture.bbox.x1
        assert box.y1 <= picture.bbox.y1


@pytest.mark.slow
def test_numbers_are_written_where_they_can_be_read_and_nowhere_else():
    few, many = torch.rand(6, 6), torch.rand(60, 60)
    small = read_texts(panels(figure.draw_matrix(few, WORDS))[0])
    assert small == {(j + 0.5, i + 0.5): f"{few[i, j]:.2f}" for i in range(6) for j in range(6)}
    assert not read_texts(panels(figure.draw_matrix(many, words(60)))[0])


def test_hidden_keys_are_hatched_and_have_no_number():
    picture = figure.draw_matrix(torch.rand(6, 6).masked_fill(~Causal().table(6, 6), -torch.inf), WORDS)
    axes = panels(picture)[0]
    future = {(i, j) for i in range(6) for j in range(6) if j > i}
    assert list_hatched_cells(axes) == future
    assert set(read_texts(axes)) == {(j + 0.5, i + 0.5) for i in range(6) for j in range(6) if j <= i}
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["hidden (−∞)"]


def test_the_scale_of_colours_has_numbers_that_reach_over_the_values():
    picture = figure.draw_matrix(torch.tensor([[0.25, 0.75]]).expand(6, 2), WORDS, ["a", "b"], scale=LinearScale(0, 1))
    render_picture(picture)
    shown = [float(label.get_text()) for axes in picture.axes[0].child_axes for label in axes.get_yticklabels()]
    assert min(shown) == 0
    assert max(shown) == 1


def test_the_same_value_has_the_same_colour_in_all_heads():
    steps = some_steps(shape=(H, T, D))
    meshes = [axes.collections[0] for axes in panels(figure.draw_heads(steps, words(T)))]
    assert len(meshes) == H
    assert len({(mesh.norm.vmin, mesh.norm.vmax) for mesh in meshes}) == 1
    assert meshes[0].norm.vmax == float(steps.weights.max())


def test_on_a_signed_scale_zero_is_white_and_opposite_numbers_are_as_far_from_it():
    values = torch.tensor([[-0.3, 0.0, 0.15, 0.3], [-0.15, 0.07, -0.07, 0.6]])
    mesh = panels(figure.draw_matrix(values, ["a", "b"], words(4), scale=Signed()))[0].collections[0]
    colours = mesh.to_rgba(values.numpy())
    assert (mesh.norm.vmin, mesh.norm.vmax) == pytest.approx((-0.6, 0.6))
    assert (colours[0, 1, :3] == 1).all()
    for value, (red, _, blue, _) in zip(values.flatten().tolist(), colours.reshape(-1, 4), strict=True):
        assert (blue > red, red > blue) == (value > 0, value < 0)
    high = panels(figure.draw_matrix(values, ["a", "b"], words(4), scale=Signed(2)))[0].collections[0].norm.vmax
    assert high == 2
    with pytest.raises(ConfigError, match="above 0"):
        Signed(0)


def test_steps_show_each_that_did_something_under_its_formula():
    picture = figure.draw_steps(some_steps(Causal()), words(T))
    names = [axes.get_title(loc="left").partition(" ")[0] for axes in panels(picture)]
    assert names == ["scores", "scaled", "masked", "weights", "context"]
    assert picture.legends[0].get_texts()[-1].get_text().endswith("capped, dropped")


def test_weights_of_hidden_keys_are_hatched_too():
    by_title = {
        axes.get_title(loc="left").partition(" ")[0]: axes for axes in panels(figure.draw_steps(some_steps(Causal()), words(T)))
    }
    future = {(i, j) for i in range(T) for j in range(T) if j > i}
    assert list_hatched_cells(by_title["scores"]) == set()
    assert list_hatched_cells(by_title["masked"]) == list_hatched_cells(by_title["weights"]) == future


@pytest.mark.slow
def test_at_picks_the_batch_row_and_the_head():
    steps = some_steps(shape=(B, H, T, D))
    one = Steps(*(step[1, 2] for _, step in steps.items()))
    for a, b in zip(
        panels(figure.draw_steps(steps, words(T), at=(1, 2))), panels(figure.draw_steps(one, words(T))), strict=True
    ):
        assert read_texts(a) == read_texts(b)


def test_queries_and_keys_may_have_different_words():
    q, k = torch.randn(2, D), torch.randn(T, D)
    axes = panels(figure.draw_steps(attend(q, k, k), ["a", "b"], words(T)))[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert [label.get_text() for label in axes.get_xticklabels()] == words(T)


def test_a_word_is_shown_as_it_is_and_never_as_a_formula():
    picture = figure.draw_matrix(torch.rand(4, 4), ["$x^2$", "\\frac", "a\nb", " "])
    render_picture(picture)
    rows = panels(picture)[0].get_yticklabels()
    assert [label.get_text() for label in rows] == ["$x^2$", "\\frac", "a\\nb", "␣"]
    assert not any(label.get_parse_math() for label in rows)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.sampled_from([0.0, 1.0, -1.0, 1e30, -1e-30, np.nan, np.inf, -np.inf])))
def test_any_matrix_can_be_drawn(rows, columns, values):
    values = (values or [0.0]) * (rows * columns)
    matrix = torch.tensor(values[: rows * columns], dtype=torch.float64).view(rows, columns)
    for scale in (LinearScale(), Log()):
        render_picture(figure.draw_matrix(matrix, words(rows), words(columns), scale=scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.bool])
def test_a_matrix_of_any_dtype_with_or_without_a_gradient_can_be_drawn(dtype):
    matrix = torch.ones(2, 2, dtype=dtype).requires_grad_(dtype.is_floating_point)
    assert panels(figure.draw_matrix(matrix, ["a", "b"]))


@pytest.mark.slow
def test_words_beside_curves_and_arrows_never_overlap():
    vectors = torch.tensor([[1.0, 0.5]]).expand(9, 2)
    curves = {word: [1.0, 2.0] for word in words(9)}
    for picture in (figure.draw_arrows(vectors, words(9)), figure.draw_lines([1, 2], curves)):
        render_picture(picture)
        axes = picture.axes[0]
        heights = sorted(text.get_position()[1] for text in axes.texts if text.get_text())
        line = figure.TEXT_SIZE / 72 * picture.dpi / axes.get_window_extent().height
        assert len(heights) == 9
        assert all(b - a >= line for a, b in pairwise(heights))


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda: figure.draw_matrix(torch.rand(2, 3), ["a", "b"]), r"\(2, 3\).*2 rows and 2 columns"),
        (lambda: figure.draw_matrix(torch.rand(3), ["a"]), "matrix"),
        (lambda: figure.draw_matrix(torch.rand(0, 0), []), "at least one entry"),
        (lambda: figure.draw_steps(some_steps(shape=(H, T, D)), words(T)), "at must select one matrix"),
        (lambda: figure.draw_heads(some_steps(), words(T)), r"the axes \(h, q, k\)"),
        (lambda: figure.draw_arrows(torch.rand(2, 3), ["a", "b"]), r"\(n, 2\)"),
        (lambda: figure.draw_lines([1, 2], {"a": [1.0]}), "each of the 2 values of x"),
    ],
)
def test_words_and_numbers_that_do_not_agree_are_refused_in_a_sentence(draw, says):
    with pytest.raises(ShapeError, match=says):
        draw()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_a_picture_is_written_in_every_format(kind):
    buffer = BytesIO()
    figure.draw_steps(some_steps(Causal()), words(T)).savefig(buffer, format=kind)
    assert buffer.getvalue().startswith({"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}[kind])


@pytest.mark.slow
def test_drawing_leaves_matplotlib_as_it_was():
    before = dict(matplotlib.rcParams)
    render_picture(figure.draw_steps(some_steps(Causal()), words(T)))
    assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
def test_neither_regard_nor_a_picture_imports_pyplot():
    script = (
        "import sys, regard; assert 'matplotlib' not in sys.modules;"
        "import torch; from regard.show.figure import draw_matrix; draw_matrix(torch.rand(2, 2), ['a', 'b']);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)

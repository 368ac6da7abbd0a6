"""What holds of every picture: nothing lies off the page, no words lie over one another, and it is written as vectors."""

from io import BytesIO
from itertools import combinations

from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text


def words(picture):
    """The boxes, in pixels, of all that is written, upright ones and others, with their text."""
    canvas = FigureCanvasAgg(picture)
    canvas.draw()
    renderer = canvas.get_renderer()
    ticks, drawn = set(), set()
    for axis in picture.findobj(Axis):
        low, high = sorted(axis.get_view_interval())
        ticks |= {text for tick in (*axis.majorTicks, *axis.minorTicks) for text in (tick.label1, tick.label2)}
        drawn |= {
            text
            for tick in (*axis.majorTicks, *axis.minorTicks)
            for text in (tick.label1, tick.label2)
            if axis.axes.axison and low <= tick.get_loc() <= high and text.get_visible()
        }
    texts = [text for text in picture.findobj(Text) if text.get_text().strip() and (text not in ticks or text in drawn)]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_visible()]
    return [(text, box) for text, box in boxes if box.width > 0]


def assert_readable(picture):
    found = words(picture)
    for text, box in found:
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= picture.bbox.x1 + 1, text
        assert box.y1 <= picture.bbox.y1 + 1, text
    for (a, one), (b, other) in combinations(found, 2):
        apart = one.x1 <= other.x0 + 1 or other.x1 <= one.x0 + 1 or one.y1 <= other.y0 + 1 or other.y1 <= one.y0 + 1
        assert apart, f"{a!r} lies over {b!r}"


def vectors(picture):
    """The picture as SVG."""
    held = BytesIO()
    picture.savefig(held, format="svg")
    return held.getvalue().decode()

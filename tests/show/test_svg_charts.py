"""Charts place their points where the numbers say, with names apart and few round ticks."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from regard.show.svg_charts import HEIGHT, LEFT, LINE, TOP, WIDTH, Curve, draw_chart, spread_labels


@given(st.lists(st.floats(TOP, TOP + HEIGHT), min_size=1, max_size=HEIGHT // LINE))
def test_labels_keep_their_order_and_their_distance_and_stay_in_the_plot(heights):
    found = spread_labels(heights)
    order = sorted(range(len(heights)), key=lambda n: heights[n])
    assert all(found[b] - found[a] >= LINE - 1e-9 for a, b in pairwise(order))
    assert max(found) <= TOP + HEIGHT
    assert min(found) >= TOP - LINE


def test_points_lie_where_their_numbers_say():
    chart = draw_chart([Curve("a < b", [(0, 0.5), (40, 1.0)])], "keys", "recall", mark=20)
    places = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', chart)
    assert [(float(x), float(y)) for x, y in places] == [(LEFT, TOP + HEIGHT / 2), (LEFT + WIDTH, TOP)]
    assert f'd="M{LEFT + WIDTH / 2:.1f} ' in chart
    assert "a &lt; b" in chart

"""Fingers on a page: points that touch, move and leave, as the browser's own protocol sends them."""

from typing import Any

from show.page.browser.page_waits import wait_for_frames

Point = tuple[float, float]


def move_fingers(page: Any, *paths: list[Point]) -> None:
    """Moves a finger along each path, all at once and step by step, and lifts them."""
    session = page.context.new_cdp_session(page)

    def send(kind: str, points: list[Point]) -> None:
        named = [{"x": x, "y": y, "id": finger} for finger, (x, y) in enumerate(points)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": named})

    first, *rest = zip(*paths, strict=True)
    send("touchStart", list(first))
    for points in rest:
        send("touchMove", list(points))
        wait_for_frames(page)  # or the browser makes one of several moves
    send("touchEnd", [])


def way(start: Point, end: Point, steps: int = 8) -> list[Point]:
    """The points of a straight path."""
    (x, y), (u, v) = start, end
    return [(x + (u - x) * n / steps, y + (v - y) * n / steps) for n in range(steps + 1)]


def middle(locator: Any) -> Point:
    """The middle of an element."""
    box = locator.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

"""How fast the page is in a real browser: a sentence typed, a head of 100,000 tokens panned, zoomed and pointed at.

`python -m benchmarks page`; the last row takes ten minutes, or REGARD_PAGE_MINUTES. Needs Chromium and the extras view and dev.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from docs.chromium import launch_chromium
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard
from benchmarks.tables import Table
from regard.show.page.server import make_server

TITLE = "the page in Chromium"
COLUMNS = ["what", "tokens", "median", "95th or worst", "at most"]
LONG, WIDTH, HEADS = 100_000, 64, 2
SENTENCE = (
    "Once upon a time there was a little girl who had a red ball and she liked to play with it in the park until it was dark"
)
ENDINGS = ("again", "outside", "there", "at last", "and cold", "for her")  # a different text each time
TOURS, HOVERS, MINUTES = 24, 60, float(os.environ.get("REGARD_PAGE_MINUTES", "10"))
SIZE = {"width": 1280, "height": 800}
WATCH = """
window.seen = { tiles: [], frames: [], asked: {} };
const fetched = window.fetch;
window.fetch = async (...given) => {
  const from = performance.now();
  const answer = await fetched(...given);
  if (!String(given[0]).includes("/tile?")) return answer;
  const read = answer.arrayBuffer.bind(answer);
  answer.arrayBuffer = async () => {
    const bytes = await read();
    setTimeout(() => requestAnimationFrame(() => seen.tiles.push(performance.now() - from)));
    return bytes;
  };
  return answer;
};
let last = performance.now();
const beat = (now) => { seen.frames.push(now - last); last = now; requestAnimationFrame(beat); };
requestAnimationFrame(beat);
"""

POINTING = """(() => {
  seen.hovers = [];
  let from = null;
  const [canvas, numbers] = ["canvas", ".readout dl"].map((one) => document.querySelector(one));
  canvas.addEventListener("pointermove", () => (from = performance.now()), true);
  const told = () => {
    if (from === null || !numbers.querySelector("dd").textContent) return;
    seen.hovers.push(performance.now() - from);
    from = null;
  };
  new MutationObserver(told).observe(numbers, { childList: true, subtree: true, characterData: true });
})()"""


def run(peak: dict[torch.dtype, float]) -> Table:
    """The figures of the issue's table, each against what it may be at most."""
    from playwright.sync_api import sync_playwright

    table = Table(TITLE, COLUMNS)
    with sync_playwright() as playwright:
        browser = launch_chromium(playwright)
        with serve_page("short") as (address, _):
            measure_typing(table, browser, address)
        with serve_page("long") as (address, process):
            measure_long_map(table, browser, address, process)
        browser.close()
    return table


def measure_typing(table: Table, browser: Any, address: str) -> None:
    """From Enter to the sentence's attention on screen, and what the first view of a page takes."""
    page, loaded = visit(browser, f"{address}#view=type")
    table.add("kB until the first view stands", 0, loaded / 1000, None, 300)
    box, times = page.get_by_role("textbox").first, []
    for ending in ENDINGS:
        box.fill(f"{SENTENCE} {ending}")
        start = time.perf_counter()
        box.press("Enter")
        last = json.dumps(ending.replace(" ", ""))
        wait_until(page, f"document.querySelector('.type-words')?.textContent.replace(/\\s/g, '').endsWith({last})")
        wait_until(page, "document.querySelector('.type-words .word')?.style.backgroundColor !== ''")
        times.append(1e3 * (time.perf_counter() - start))
    table.add("ms from Enter to drawn", 30, statistics.median(times[1:]), max(times[1:]), 1000)
    page.context.close()


def measure_long_map(table: Table, browser: Any, address: str, process: subprocess.Popen) -> None:
    """Tiles, hovers, frames and memory at 100,000 tokens, once the head has been opened."""
    page, loaded = visit(browser, f"{address}#view=text")
    table.add("kB until the first view stands", LONG, loaded / 1000, None, 300)
    page.evaluate("location.hash = '#view=map'")
    wait_until(
        page,
        "document.querySelector('#caption').textContent.includes('Layer 0') && document.querySelector('#wait').hidden",
        600,
    )
    tiles(table, page)
    hovers(table, page)
    frames(table, page)
    before = read_process_megabytes(process)
    wander(page, 60 * MINUTES)
    table.add(f"MiB held after {MINUTES:g} minutes of random use", LONG, read_process_megabytes(process) - before, None, 300)
    page.context.close()


def tiles(table: Table, page: Any) -> None:
    """From a tile's request to the frame that shows it, at random places of every level."""
    found: list[float] = []
    for n in range(TOURS):
        stand(page, n)
        page.evaluate("seen.tiles.length = 0")
        page.mouse.move(500, 450)
        page.mouse.wheel(0, -150)  # a level closer: what is above is there
        quiet(page)
        found += page.evaluate("seen.tiles")
    table.add("ms from a tile's request to drawn", LONG, statistics.median(found), quantile(found, 0.95), "80, 95th 250")


def hovers(table: Table, page: Any) -> None:
    """From a move of the pointer to the exact weight in the readout."""
    page.evaluate(POINTING)
    chance = random.Random(0)
    for _ in range(HOVERS):
        page.mouse.move(chance.uniform(320, 700), chance.uniform(320, 680))
        page.wait_for_timeout(120)
    found = page.evaluate("seen.hovers")
    table.add("ms from hover to exact weight", LONG, statistics.median(found), quantile(found, 0.95), 50)


def frames(table: Table, page: Any) -> None:
    """Frames a second while the map is dragged and zoomed, and the longest frame."""
    stand(page, TOURS)
    page.evaluate("seen.frames.length = 0")
    for n in range(6):
        page.mouse.move(500, 450)
        page.mouse.down()
        page.mouse.move(500 + 120 * (-1) ** n, 450 + 60 * (-1) ** n, steps=40)
        page.mouse.up()
        for _ in range(10):
            page.mouse.wheel(0, -60 if n % 2 else 60)
            page.wait_for_timeout(16)
    found = page.evaluate("seen.frames")
    table.add("frames a second, panning and zooming", LONG, 1e3 / statistics.median(found), None, "at least 50")
    table.add("ms of the longest frame", LONG, statistics.median(found), max(found), 100)


def wander(page: Any, seconds: float) -> None:
    """Uses the page at random for so long."""
    chance, end = random.Random(1), time.monotonic() + seconds
    while time.monotonic() < end:
        head, how = chance.randrange(HEADS), chance.choice(("mean", "max"))
        column, row, zoom = chance.uniform(0, LONG), chance.uniform(0, LONG), 2 ** chance.uniform(0, 13)
        view = chance.choice(("map", "map", "text"))
        page.evaluate(
            f"location.hash = '#view={view}&head={head}&how={how}&x={column:.0f}&y={row:.0f}&zoom={zoom:.2f}&q={int(row)}'"
        )
        page.wait_for_timeout(800)


def stand(page: Any, number: int) -> None:
    """Goes to one of the random places on the diagonal and waits until it is drawn."""
    chance = random.Random(number)
    place, zoom = chance.uniform(0.1, 0.9) * LONG, 2 ** chance.uniform(1, 12)
    page.evaluate(f"location.hash = '#view=map&x={place:.0f}&y={place:.0f}&zoom={zoom:.2f}'")
    quiet(page)


def quiet(page: Any) -> None:
    """Waits until no tile has come for a while."""
    page.wait_for_timeout(350)
    page.wait_for_load_state("networkidle")
    wait_until(page, "performance.now() - (performance.getEntriesByType('resource').at(-1)?.responseEnd ?? 0) > 300")
    page.evaluate("performance.clearResourceTimings()")


def visit(browser: Any, address: str) -> tuple[Any, int]:
    """A fresh page at an address once it stands, and the bytes that came for it."""
    page = browser.new_context(viewport=SIZE).new_page()
    page.add_init_script(WATCH)
    answers: list[Any] = []
    page.on("response", lambda answer: answers.append(answer))
    page.goto(address)
    wait_until(page, "document.querySelector('#stage').childElementCount > 0")
    page.wait_for_load_state("networkidle")
    return page, sum(answer.request.sizes()["responseBodySize"] for answer in answers)


def wait_until(page: Any, expression: str, seconds: float = 60) -> None:
    """Waits for an expression to become true; the page's policy lets it not be polled there."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(5)


@contextlib.contextmanager
def serve_page(name: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """The address of a server in a process of its own, and the process."""
    command = [sys.executable, "-m", "benchmarks.page", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.send_signal(signal.SIGTERM)


def read_process_megabytes(process: subprocess.Popen) -> float:
    """The megabytes that a process holds."""
    line = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return float(line.split()[1]) / 1024


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


class Attends(torch.nn.Module):
    """A layer that attends with the q and k it was given."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        super().__init__()
        self.q, self.k = q, k

    def forward(self) -> Tensor:
        return scaled_dot_product_attention(self.q, self.k, self.k, is_causal=True)


def main(name: str) -> None:
    """Serves one of the two subjects and prints its address first."""
    subject = regard.GPT2.load("pocket") if name == "short" else long_recording()
    with make_server(subject) as running:
        print(running.address, flush=True)
        signal.pause()


def long_recording() -> regard.Recording:
    """A recording of random q and k, with words."""
    torch.manual_seed(0)
    model = Attends(*torch.randn(2, 1, HEADS, LONG, WIDTH)).eval()
    with regard.record(model) as recording, torch.no_grad():
        model()
    recording.tokens = [f" word{n % 5000}" for n in range(LONG)]
    return recording


if __name__ == "__main__":
    main(sys.argv[1])

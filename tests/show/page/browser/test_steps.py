"""The Steps view, by mouse and by keyboard: its numbers are attend's with any switch, its examples those of regard walk."""

import re

import pytest
import torch

import regard
from regard.lectures.examples import EXAMPLES, build_example
from regard.mechanism import EVERYTHING, Causal
from regard.show.page.session import Session
from regard.show.step_descriptions import describe_example
from show.page.browser.page_waits import link, wait_until, wait_until_quiet
from show.page.browser.recordings import EVIL, PLAIN, Layers, draw_queries_and_keys, space_words, weights

LAYERS, HEADS, T, LONG = 2, 3, 7, 101
Q, K = draw_queries_and_keys(LAYERS, HEADS, T)
LONGER = draw_queries_and_keys(1, 1, LONG, seed=3)
PLACES = 5.01e-4  # half a unit of the last of three places
STEPS = ["q, k, v", "scores", "scaled", "masked", "weights", "context"]


def record_layers(q, k, words) -> regard.Recording:
    model = Layers(q, k).eval()
    with regard.record(model, keep="values") as recording, torch.no_grad():
        model()
    recording.tokens = words
    return recording


@pytest.fixture(scope="module")
def address(serving):
    session = Session(record_layers(Q, K, space_words(PLAIN, T)))
    session.add_recording(record_layers(*LONGER, space_words(PLAIN, LONG)))
    session.add_recording(record_layers(*draw_queries_and_keys(1, 1, len(EVIL), seed=5), EVIL))
    return serving(session)


def replace_minus_signs(text: str) -> str:
    """A text of the page with the hyphens that regard walk writes in place of minus signs."""
    return text.replace("−∞", "-inf").replace("−", "-")


def wait_until_drawn(page):
    page.wait_for_selector(".steps-formula b")
    wait_until_quiet(page)
    return page


def table(page) -> torch.Tensor:
    """The numbers of the first table on screen."""
    rows = page.locator(".panel").first.locator("tbody tr").all()
    text = [[cell.replace("−", "-").replace("∞", "inf") for cell in row.locator("td").all_inner_texts()] for row in rows]
    return torch.tensor([[float(cell) for cell in row] for row in text], dtype=torch.float64)


def exact(page) -> float:
    """The number that the line of arithmetic is about, all digits."""
    return float(page.locator(".steps-sum span").get_attribute("title").replace("Infinity", "inf"))


def compute_steps(layer: int, head: int, mask=None, **settings) -> regard.Steps:
    q, k = Q[layer, 0, head].double(), K[layer, 0, head].double()
    v = Layers(Q, K).layers[layer].v[0, head].double()
    return regard.attend(q, k, v, Causal() if mask is None else mask, **settings)


@pytest.mark.parametrize("step", STEPS[1:])
def test_each_table_is_the_step_of_attend(open_page, address, step):
    page = wait_until_drawn(open_page(f"{address}#view=steps&r=r1&layer=1&head=2&step={step}"))
    torch.testing.assert_close(table(page), getattr(compute_steps(1, 2), step), rtol=0, atol=PLACES)


def test_what_a_query_may_not_see_is_marked(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=steps&r=r1&step=weights"))
    assert page.locator(".panel-hidden").count() == T * (T - 1) // 2


def test_the_arrow_keys_and_the_slider_walk_through_the_steps(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=steps&r=r1&layer=1"))
    assert page.locator(".steps-names button").all_inner_texts() == STEPS
    walked = []
    page.keyboard.press("ArrowLeft")
    for _ in STEPS:
        walked.append(page.locator(".steps-formula b").inner_text())
        page.keyboard.press("ArrowRight")
    assert walked == STEPS
    slider = page.get_by_role("slider", name="Step")
    slider.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.locator(".steps-formula").inner_text() == "scores = q kᵀ"
    assert slider.get_attribute("aria-valuetext") == "scores"
    page.get_by_role("button", name="context").click()
    assert link(page)["step"] == "context"


def test_a_click_picks_the_number_whose_arithmetic_is_written(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=steps&r=r1&layer=1&head=2&step=weights"))
    page.locator(".panel tbody tr").nth(5).locator("td").nth(3).click()
    assert {name: link(page)[name] for name in "qk"} == {"q": "5", "k": "3"}
    page.mouse.move(0, 0)
    assert exact(page) == pytest.approx(float(compute_steps(1, 2).weights[5, 3]), rel=1e-9)
    assert page.locator(".steps-sum b").inner_text() == f"‘{PLAIN[5]}’ → ‘{PLAIN[3]}’"
    page.locator(".panel tbody tr").nth(6).locator("td").nth(1).hover()
    assert exact(page) == pytest.approx(float(compute_steps(1, 2).weights[6, 1]), rel=1e-9)
    assert link(page)["q"] == "5"


def test_the_keys_go_from_query_to_query_and_from_key_to_key(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=steps&r=r1&layer=1&head=2&step=scores&q=4&k=1"))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+ArrowRight")
    assert exact(page) == pytest.approx(float(compute_steps(1, 2).scores[5, 2]), rel=1e-9)
    page.keyboard.press("[")
    page.keyboard.press("]")
    wait_until_quiet(page)
    rest = {"view": "steps", "layer": "1", "head": "2", "q": "5", "k": "2", "step": "scores"}
    assert link(page) == {"r": link(page)["r"], **rest}
    page.keyboard.press("Escape")
    assert "q" not in link(page)


@pytest.mark.parametrize(
    ("switch", "settings", "mask"),
    [
        ("mask=none", {}, EVERYTHING),
        ("root=off", {"scale": 1.0}, Causal()),
        ("temperature=0.5", {"scale": 2 / 11**0.5}, Causal()),
    ],
)
def test_a_switch_shows_what_attend_gives_with_it(open_page, address, switch, settings, mask):
    page = wait_until_drawn(open_page(f"{address}#view=steps&r=r1&layer=1&head=2&step=weights&q=4&k=2&{switch}"))
    right = compute_steps(1, 2, mask, **settings).weights
    torch.testing.assert_close(table(page), right, rtol=0, atol=PLACES)
    assert exact(page) == pytest.approx(float(right[4, 2]), rel=1e-9)
    assert page.locator(".steps-was").count() == T  # marks of what the head itself does


def test_the_switches_are_used_by_mouse_and_by_keyboard_and_let_go(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=steps&r=r1&layer=1&head=2&step=weights&q=2"))
    page.get_by_role("button", name="none", exact=True).click()
    page.get_by_role("checkbox").press("Space")
    warmth = page.get_by_role("slider", name="Temperature")
    warmth.focus()
    page.keyboard.press("End")
    assert {name: link(page)[name] for name in ("mask", "root", "temperature")} == {
        "mask": "none",
        "root": "off",
        "temperature": "10.0",
    }
    torch.testing.assert_close(table(page), compute_steps(1, 2, EVERYTHING, scale=0.1).weights, rtol=0, atol=PLACES)
    page.get_by_role("button", name="reset").click()
    torch.testing.assert_close(table(page), compute_steps(1, 2).weights, rtol=0, atol=PLACES)
    assert "mask" not in link(page)


def name_tokens(sentence: str) -> str:
    """Return a sentence about words as one about tokens, as the page names them; regard walk speaks of the lectures' words."""
    return re.sub(r"\bword(s?)\b", r"token\1", sentence)


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if name not in ("heads", "split")]
)  # these tell of two heads at once
def test_an_example_is_told_as_regard_walk_tells_it(open_page, address, name):
    page = wait_until_drawn(open_page(f"{address}#view=steps&r=r1"))
    page.locator(f"[data-example={name}]").click()
    wait_until(page, f"document.querySelector('.steps-head h2').innerText === {build_example(name).title!r}")
    for scene in describe_example(build_example(name)):
        assert replace_minus_signs(page.locator(".steps-formula").inner_text()) == scene.heading
        said = replace_minus_signs(page.locator(".steps-sentence").inner_text())
        assert name_tokens(said) == name_tokens(scene.sentence)
        assert page.locator(".panel").count() == sum(panel.title != "right: -inf" for panel in scene.panels)
        page.keyboard.press("ArrowRight")


def test_a_long_text_is_told_by_the_row_of_one_query(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=steps&r=r2&q=90&step=weights"))
    right = weights(*LONGER, 0, 0)[90]
    shown = table(page)[:, 0]
    torch.testing.assert_close(shown.sort().values, right.topk(24).values.sort().values, rtol=0, atol=PLACES)
    assert "Of 101 tokens, ‘mat’ attends most to these 24" in page.locator(".steps-main > .note").inner_text()
    before = page.locator(".steps-sentence").inner_text()
    assert before.startswith("Of these 24 tokens, ‘mat’ attends most to ")  # the least of all 101 is none of them
    assert page.locator("[data-strip=weights] figcaption span").first.inner_text() == "the 24 largest weights of ‘mat’"
    page.keyboard.press("ArrowUp")
    wait_until(page, f"document.querySelector('.steps-sentence').innerText !== {before!r}")
    assert link(page)["q"] == "89"
    torch.testing.assert_close(table(page)[:, 0].max(), weights(*LONGER, 0, 0)[89].max(), rtol=0, atol=PLACES)


def test_the_numbers_are_copied_with_every_digit(open_page, address):
    page = wait_until_drawn(
        open_page(f"{address}#view=steps&r=r1&layer=1&head=2&step=weights", permissions=["clipboard-read", "clipboard-write"])
    )
    page.keyboard.press("c")
    page.get_by_role("button", name="copied").wait_for()
    lines = page.evaluate("navigator.clipboard.readText()").split("\n")
    found = torch.tensor([[float(cell) for cell in line.split("\t")[1:]] for line in lines[1:]], dtype=torch.float64)
    torch.testing.assert_close(found, compute_steps(1, 2).weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("where", ["r=r1&layer=1&step=weights", "example=causal&step=q,+k,+v", "r=r2&step=context"])
def test_on_a_phone_the_page_itself_never_scrolls_sideways(open_page, address, where):
    page = wait_until_drawn(open_page(f"{address}#view=steps&{where}", width=390, height=844))
    assert page.evaluate("document.querySelector('#stage').scrollWidth <= innerWidth")


TRACE = """() => Object.fromEntries([...document.querySelectorAll(".trace-strip")].map((strip) => {
  const zero = Number(strip.querySelector("line").getAttribute("y1"));
  const bars = [...strip.querySelectorAll("rect[class]:not(.trace-mark):not(.trace-behind):not(.trace-place)")].map((bar) => {
    const [y, height] = ["y", "height"].map((name) => Number(bar.getAttribute(name)));
    return y + 1e-9 < zero ? height : -height;
  });
  return [strip.dataset.strip, bars];
}))"""


def read_trace(page) -> dict[str, torch.Tensor]:
    """The heights of the bars of each strip, below 0 where they point down."""
    return {name: torch.tensor(bars, dtype=torch.float64) for name, bars in page.evaluate(TRACE).items()}


def get_trace(i: int, j: int) -> dict[str, torch.Tensor]:
    """What the strips of layer 1, head 2 are proportional to."""
    q, k = Q[1, 0, 2].double(), K[1, 0, 2].double()
    v = Layers(Q, K).layers[1].v[0, 2].double()
    weights = compute_steps(1, 2).weights
    added = weights[i, j] * v[j]
    return {"q": q[i], "k": k[j], "products": q[i] * k[j], "weights": weights[i], "value": v[j], "added": added}


def check_trace(page, i: int, j: int) -> None:
    found = read_trace(page)
    right = get_trace(i, j)
    assert list(found) == list(right)
    for name, expected in right.items():
        scaled = expected / expected.abs().max()
        if name == "added":  # its scale is that of the context behind it
            scaled = expected / max(float(compute_steps(1, 2).context[i].abs().max()), float(expected.abs().max()))
        torch.testing.assert_close(
            found[name] / (48 if (expected < 0).any() or name == "added" else 96), scaled, rtol=1e-5, atol=1e-6
        )
    assert page.locator(".trace-lit").count() == 1
    assert page.locator("[data-strip=weights] :is(.trace-share, .trace-lit)").nth(j).get_attribute("class") == "trace-lit"
    assert float(page.locator(".trace-score b").first.get_attribute("title")) == pytest.approx(
        float(right["products"].sum()), rel=1e-9
    )


@pytest.mark.parametrize("step", ["scores", "weights"])
def test_hovering_a_cell_lights_how_its_weight_came_about(open_page, address, step):
    page = wait_until_drawn(open_page(f"{address}#view=steps&r=r1&layer=1&head=2&step={step}&q=5&k=3"))
    check_trace(page, 5, 3)
    page.locator(".panel tbody tr").nth(6).locator("td").nth(1).hover()
    check_trace(page, 6, 1)
    assert page.locator(".trace h2").inner_text() == f"‘{PLAIN[6]}’ → ‘{PLAIN[1]}’"
    page.mouse.move(0, 0)
    check_trace(page, 5, 3)


def test_the_pictures_follow_the_keyboard_the_bars_and_the_rows_of_q_and_k(open_page, address):
    page = wait_until_drawn(open_page(f"{address}#view=steps&r=r1&layer=1&head=2&step=weights&q=5&k=3"))
    page.keyboard.press("Shift+ArrowLeft")
    check_trace(page, 5, 2)
    page.locator(".steps-bar").nth(1).focus()
    check_trace(page, 5, 1)
    page.get_by_role("button", name="q, k, v", exact=True).click()
    for panel, row, place in ((0, 6, (6, 2)), (1, 4, (5, 4)), (2, 0, (5, 0))):
        page.locator(".panel").nth(panel).locator("tbody tr").nth(row).locator("td").nth(0).hover()
        check_trace(page, *place)
    chosen = [one.locator("tr.panel-asks").evaluate("(one) => one.rowIndex - 1") for one in page.locator(".panel").all()]
    assert chosen == [5, 2, 2]  # the query's row of q, the key's of k and of v

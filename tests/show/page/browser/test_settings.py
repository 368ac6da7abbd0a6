"""The switch beside the pictures: weight, carried, pull and cut, drawn from the numbers of recording.attribute."""

import json
import re

import pytest
import torch

import regard
from regard import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.session import Session
from show.page.browser.page_waits import link, wait_until, wait_until_quiet, wait_until_settled
from show.page.browser.recordings import PLAIN, draw_queries_and_keys, record_layers, space_words

TEXT = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his"
LAYER, HEAD, LAST = 5, 4, 23
SETTINGS = ("weight", "carried", "pull", "cut")
GROUNDS = """() => [...document.querySelectorAll(".word")].map(
    (word) => (word.style.backgroundColor.match(/\\d+/g) ?? []).map(Number))"""
# of the last row of each small picture
COLORS = """() => [...document.querySelectorAll(".head canvas")].map((one) => one.width && [...one.getContext("2d")
    .getImageData(0, one.height - 1, one.width, 1).data].filter((_, n) => n % 4 < 3))"""
PAPER = "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)"


@pytest.fixture(scope="module")
def address(serving):
    session = Session(None, GPT2Adapter("pocket", GPT2.load("pocket", torch.float64)))
    session.run_text(TEXT, lambda: None)
    session.add_recording(record_layers(*draw_queries_and_keys(2, 3, 13), space_words(PLAIN, 13)))
    return serving(session)


@pytest.fixture(scope="module")
def pocket_attribution():
    """The model, the text's ids and its recording, the likeliest next word, and what moved its logit."""
    model = GPT2.load("pocket", torch.float64)
    ids = torch.tensor([model.text.encode(TEXT)])
    with regard.record(model, keep="values") as recording:
        logits = model(ids)
    token = int(logits[0, -1].argmax())
    attribution = recording.attribute(logits[0, -1, token])
    return model, ids, recording, token, attribution


@pytest.fixture(scope="module")
def rows(pocket_attribution):
    """What the last word's row of a head is, by setting, and the word whose logit it is about."""
    model, ids, recording, token, attribution = pocket_attribution
    carried = regard.contributions(model, ids, token).map(LAYER, kind="carried")
    found = {kind: attribution.map(LAYER, HEAD, kind=kind)[0, 0, LAST] for kind in ("pull", "cut")}
    found |= {"carried": carried[0, HEAD, LAST], "weight": recording.map(LAYER, HEAD)[0, 0, LAST]}
    return found, model.text.pieces([token])[0].strip()


def press(page, setting: str) -> None:
    page.get_by_role("button", name=setting, exact=True).click()
    wait_for_setting(page, setting)


def wait_for_setting(page, setting: str) -> None:
    """Wait until a setting is drawn, chosen by a button or from the list of a phone."""
    wait_until(page, f"document.querySelector('[data-control=\"show {setting}\"]').getAttribute('aria-pressed') === 'true'")
    wait_until_quiet(page)


@pytest.mark.parametrize("dark", [False, True])
def test_the_switch_draws_each_setting_from_its_numbers(open_page, address, rows, dark):
    numbers, word = rows
    page = wait_until_settled(open_page(f"{address}#view=text&layer={LAYER}&head={HEAD}&q={LAST}", dark=dark))
    paper = page.evaluate(PAPER)
    for setting in (*SETTINGS[1:], "weight"):
        press(page, setting)
        assert link(page).get("show", "weight") == setting
        row = numbers[setting]
        order = row.abs().argsort(descending=True)[:3].tolist()
        wait_until(page, f"document.querySelectorAll('.text-links .note')[0]?.textContent === '{order[0]}'")
        titles = [one.get_attribute("title") for one in page.locator(".text-links .link").all()[:3]]
        grounds = page.evaluate(GROUNDS)
        if setting not in ("pull", "cut"):
            assert [float(one) for one in titles] == pytest.approx(row[order].tolist(), rel=1e-4)
            assert page.locator(".legend .sign").count() == 0
            continue
        assert page.locator(".legend .sign").all_inner_texts() == [
            f"{'cutting it ' if setting == 'cut' else ''}raises the logit of ‘{word}’",
            "lowers it",
        ]
        for title, value in zip(titles, row[order].tolist(), strict=True):
            written, said = title.replace("−", "-").split(", ")
            assert float(written) == pytest.approx(value, rel=6e-3)
            assert said == ("raises" if value > 0 else "lowers")
        for ground, value in zip(grounds, row.tolist(), strict=True):
            apart = ground[2] - paper[2] - (ground[0] - paper[0])  # to blue, or to orange, from the paper
            if abs(value) > 0.05 * float(row.abs().max()):
                assert (apart > 0) == (value > 0)
            if abs(value) < 1e-6:
                assert ground == paper


def tell_type(page) -> list[float]:
    """The number that the title of each word of Type states; its sign must be said in words, too."""
    found = []
    for title in page.evaluate("[...document.querySelectorAll('.type-words .word')].map((word) => word.title)"):
        number, _, said = title.split(" ", 1)[1].replace("−", "-").partition(", ")
        found.append(float(number))
        assert said == (
            "" if title.startswith(("weight", "carried")) or not found[-1] else "raises" if found[-1] > 0 else "lowers"
        )
    return found


@pytest.mark.parametrize("dark", [False, True])
def test_type_draws_each_setting_from_its_numbers_and_says_the_signs(open_page, address, rows, dark):
    numbers, word = rows
    page = wait_until_settled(open_page(f"{address}#view=type&layer={LAYER}&head={HEAD}&q={LAST}", dark=dark))
    paper = page.evaluate(PAPER)
    for setting in (*SETTINGS[1:], "weight"):
        press(page, setting)
        exact = numbers[setting].tolist()
        wait_until(page, f"document.querySelector('.type-words .word').title.startsWith('{setting} ')")
        assert tell_type(page) == pytest.approx(exact, rel=6e-3, abs=1e-12)
        is_signed = setting in ("pull", "cut")
        assert ("why" in page.locator("#bar h1").inner_text()) == is_signed
        assert page.locator(".legend .sign").count() == 2 * is_signed
        if not is_signed:
            continue
        assert f"the logit of ‘{word}’" in page.locator(".type-told").inner_text()
        for ground, value in zip(page.evaluate(GROUNDS), exact, strict=True):
            apart = ground[2] - paper[2] - (ground[0] - paper[0])  # to blue, or to orange, from the paper
            if abs(value) > 0.05 * max(map(abs, exact)):
                assert (apart > 0) == (value > 0)


@pytest.mark.parametrize("view", ["type", "text", "heads", "map", "steps", "compare"])
def test_a_setting_lives_through_reload_back_and_forward(open_page, address, view):
    pressed = "document.querySelector('[data-control^=show][aria-pressed=true]')?.textContent"
    page = wait_until_settled(
        open_page(f"{address}#view={view}&layer={LAYER}&head={HEAD}&q={LAST}", quiet=False)
    )  # canvases are read slowly
    press(page, "cut")
    page.reload()
    wait_until(page, f"{pressed} === 'cut'")
    page.go_back()
    wait_until(page, f"{pressed} === 'weight'")
    page.go_forward()
    wait_until(page, f"{pressed} === 'cut'")


def test_the_map_writes_the_signed_numbers_and_the_readout_says_the_sign(open_page, address, rows):
    numbers, word = rows
    page = wait_until_settled(open_page(f"{address}#view=map&layer={LAYER}&head={HEAD}&q={LAST}&k=9&show=pull"))
    value = float(numbers["pull"][9])
    wait_until(page, "document.querySelector('.readout dd:nth-of-type(4)').textContent.includes('raises')")
    assert page.locator(".readout dt:visible").all_inner_texts() == ["weight", "rank", "pull"]
    assert page.locator(".readout dd").nth(3).inner_text() == f"+{value:#.3g}, raises"
    assert page.locator(".readout dd").nth(0).inner_text() == f"{float(numbers['weight'][9]):#.3g}"
    assert f"the logit of ‘{word}’" in page.locator("#caption").inner_text()
    strongest = int(numbers["pull"].abs().argmax())
    assert page.locator(".readout-links .note").first.inner_text() == str(strongest)
    press(page, "weight")
    wait_until(page, "!document.querySelector('.readout dl').innerText.includes('pull')")
    assert page.locator(".readout dt:visible").all_inner_texts() == ["weight", "score", "rank"]


def test_heads_draws_every_head_in_one_signed_scale(open_page, address):
    # heads are drawn when they are near the screen; Chromium says that canvases are read slowly
    page = wait_until_settled(open_page(f"{address}#view=heads", height=3000, quiet=False))
    wait_until(page, """document.querySelectorAll('.head canvas[width="24"]').length === 36""")
    before = page.evaluate(COLORS)
    press(page, "pull")
    wait_until(page, f"JSON.stringify(({COLORS})()) !== {json.dumps(json.dumps(before, separators=(',', ':')))}")
    model = GPT2.load("pocket", torch.float64)
    with regard.record(model, keep="values") as recording:
        logits = model(torch.tensor([model.text.encode(TEXT)]))
    attribution = recording.attribute(logits[0, -1].max())
    exact = torch.stack([attribution.map(layer).dense()[0, :, LAST] for layer in range(6)]).flatten(0, 1)  # (heads, keys)
    top = float(exact.abs().max())
    shown = torch.tensor(wait_until_quiet(page).evaluate(COLORS)).view(36, 24, 3)
    blue = shown[..., 2] - shown[..., 0]
    paper = page.evaluate(PAPER)
    sure = exact.abs() > 0.1 * top
    assert int(sure.sum()) > 10
    assert torch.equal((blue > paper[2] - paper[0])[sure], (exact > 0)[sure])
    assert page.locator(".legend .sign").count() == 2
    press(page, "weight")
    wait_until(page, f"JSON.stringify(({COLORS})()) === {json.dumps(json.dumps(before, separators=(',', ':')))}")
    assert page.locator(".legend .sign").count() == 0


@pytest.mark.parametrize("view", ["heads", "map"])
def test_while_the_model_runs_it_is_marked_and_nothing_moves(open_page, serving, view):
    session = Session(None, GPT2Adapter("pocket", GPT2.load("pocket", torch.float64)))
    session.run_text(TEXT, lambda: None)
    page = wait_until_settled(open_page(f"{serving(session)}#view={view}&layer={LAYER}", quiet=False))
    pictures = ".head" if view == "heads" else ".map-sheet"
    boxes = f"JSON.stringify([...document.querySelectorAll('{pictures}')].map((one) => one.getBoundingClientRect()))"
    with session._model_lock.hold(lambda: None):
        page.get_by_role("button", name="pull", exact=True).click()
        wait_until(page, "document.querySelectorAll('[data-busy]').length > 0")
        wait_until(page, "document.querySelector('#wait').textContent.startsWith('Running pocket')")
        wait_until(page, "document.querySelector('[data-control=token]')")
        before = page.evaluate(boxes)
    wait_until(page, "document.querySelectorAll('[data-busy]').length === 0 && document.querySelector('#wait').hidden")
    wait_until(page, "document.querySelectorAll('[data-control=token] option').length === 10")
    assert page.evaluate(boxes) == before


def test_a_recording_shows_weights_alone_and_says_why(open_page, address):
    for view in ("type", "text", "heads", "map", "steps", "compare"):
        page = wait_until_settled(open_page(f"{address}#view={view}&r=r2&show=pull"))
        assert page.locator("[aria-pressed=true][data-control^='show']").inner_text() == "weight"
        assert "why" not in page.locator("#bar h1").inner_text()
        for setting in SETTINGS[1:]:
            button = page.get_by_role("button", name=setting, exact=True)
            assert button.get_attribute("aria-disabled") == "true"
            assert "press Run in Type" in button.get_attribute("title")
        button.click(force=True)  # playwright waits for what is marked as disabled
        assert "press Run in Type" in page.locator(".error").inner_text()
        assert page.locator("[aria-pressed=true][data-control^='show']").inner_text() == "weight"


@pytest.fixture(scope="module")
def matrices(pocket_attribution):
    """What each setting is for every query and key of some heads of a layer: (h, q, k)."""
    model, ids, _, token, attribution = pocket_attribution
    found = {kind: attribution.map(LAYER, kind=kind).dense()[0] for kind in ("pull", "cut")}
    return found | {"carried": regard.contributions(model, ids, token).map(LAYER, kind="carried").dense()[0]}


@pytest.mark.parametrize("setting", SETTINGS[1:])
def test_steps_computes_each_setting_as_one_more_step(open_page, address, matrices, setting):
    exact = matrices[setting][HEAD]
    page = wait_until_settled(open_page(f"{address}#view=steps&layer={LAYER}&head={HEAD}&q={LAST}&k=9"))
    press(page, setting)
    assert link(page)["step"] == setting
    assert page.locator(".steps-names button").all_inner_texts()[-2:] == ["context", setting]
    told = page.locator(".steps-sum span")
    assert float(told.get_attribute("title")) == pytest.approx(float(exact[LAST, 9]), rel=1e-5)
    *factors, result = map(float, re.findall(r"(?<![\d.])-?[\d.]+(?:e-?\d+)?", told.inner_text().replace("−", "-")))
    assert result == pytest.approx(float(exact[LAST, 9]), rel=5e-4, abs=5e-5)
    if setting != "cut":
        assert factors[0] * factors[1] == pytest.approx(result, rel=2e-2, abs=1e-4)
    numbers = [text.replace("−", "-") for text in page.locator(".steps-bar > .numbers").all_inner_texts()]
    largest = sorted(exact[LAST].abs().topk(16).indices.tolist())
    assert [float(text) for text in numbers] == pytest.approx(exact[LAST, largest].tolist(), rel=6e-3, abs=1e-12)
    is_alone = int((exact != 0).any(-1).sum()) == 1  # from the last layer, only the last word reaches the logit
    assert ("no other token reaches the logit" in page.locator("body").inner_text()) == is_alone == (setting != "carried")
    press(page, "weight")
    assert link(page)["step"] == "weights"
    assert setting not in page.locator(".steps-names button").all_inner_texts()


@pytest.mark.parametrize("setting", SETTINGS[1:])
def test_compare_reads_each_setting_of_both_heads(open_page, address, matrices, setting):
    page = wait_until_settled(
        open_page(f"{address}#view=compare&layer={LAYER}&head={HEAD}&head2=1&q={LAST}&k=9&show={setting}")
    )
    wait_until(page, "document.querySelector('.compare-read .note')")
    text = page.locator(".compare-read").inner_text().replace("−", "-")
    read = {name: float(value) for name, value in re.findall(r"(first|second|difference)\s+([+-]?[\d.]+(?:e-?\d+)?)", text)}
    first, second = (float(matrices[setting][head, LAST, 9]) for head in (HEAD, 1))
    exact = {"first": first, "second": second, "difference": second - first}
    assert {name: read[name] for name in exact} == pytest.approx(exact, rel=6e-3, abs=1e-9)
    told = page.locator(".compare-told").inner_text().replace("−", "-")
    sums = [float(one) for one in re.findall(r"[+-]?\d+(?:\.\d+)?(?:e-?\d+)?", told)]
    assert sums[-2:] == pytest.approx([float(matrices[setting][head].sum()) for head in (HEAD, 1)], rel=6e-3)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("view", ["type", "text", "heads", "map", "steps", "compare"])
def test_nothing_is_wider_than_a_phone_in_any_setting(open_page, address, view, dark):
    wide = """() => [...document.querySelectorAll("body *")].filter((one) =>
        !one.closest("nav, .chips, .steps-line, .panel-scroll, [hidden]") &&
        one.getBoundingClientRect().right > innerWidth + 1 && getComputedStyle(one).visibility !== "hidden")
        .map((one) => one.outerHTML.slice(0, 120))"""
    page = wait_until_settled(open_page(f"{address}#view={view}&q={LAST}&k=9", width=360, height=740, dark=dark))
    for setting in SETTINGS:
        page.get_by_role("combobox", name="What is shown of the attention").select_option(setting)
        wait_for_setting(page, setting)
        assert page.evaluate(wide) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def read_bars(page) -> list[tuple[str, str]]:
    """The predicted words with their numbers."""
    rows = page.locator(".type-expected").all()
    return [(row.locator(".type-word").inner_text().strip(), row.locator(".numbers").inner_text()) for row in rows]


def test_switching_a_head_off_shows_the_next_words_before_and_after(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=type&layer={LAYER}&head={HEAD}"))
    before = read_bars(page)
    page.get_by_role("button", name=f"Switch head {LAYER}.{HEAD} off").click()
    wait_until(page, "document.querySelectorAll('.type-after').length > 0")
    wait_until_quiet(page)
    assert link(page)["off"] == f"{LAYER}.{HEAD}"
    after = read_bars(page)
    assert {(word, number.partition(" → ")[0]) for word, number in after} >= set(before)
    assert any(number.partition(" → ")[0] != number.partition(" → ")[2] for _, number in after)
    assert page.locator(".type-off").count() == 1
    page.reload()
    wait_until(page, "document.querySelectorAll('.type-after').length > 0")
    assert read_bars(page) == after
    page.get_by_role("button", name="All heads on").click()
    wait_until(page, "document.querySelectorAll('.type-after').length === 0")
    assert read_bars(page) == before

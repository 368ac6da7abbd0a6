"""The pictures of the page: `python -m docs.pictures.page`. Needs the `view` and `dev` extras, and Chromium.

Six words and three hundred tokens are read by the pocket model; a hundred thousand words attend by two heads that were planted:
one looks at what stood just before, the other at what came after earlier places of the same word, nearer ones more. Type and
Generate run a model, and none here reads so much: they have no picture of a hundred thousand. Who may see whom is asked of
the pocket model without the mask of one layer; a translation is of the translator that is carried; the page
opens with the pocket model, whose head is switched off.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks.page import Attends
from docs.chromium import launch_chromium
from playwright.sync_api import sync_playwright

import regard
from regard.layers.multi_head import MultiHeadAttention
from regard.mechanism import attention, heads
from regard.models import translator
from regard.show.page.model_adapter import adapt_model
from regard.show.page.server import Server
from regard.show.page.session import Session
from regard.show.page.translator_adapter import SENTENCE
from regard.weights.translator_weights import INCLUDED_TRANSLATORS

FOLDER = Path(__file__).parent
SIX = "Your journey starts with one step"
BALLS = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom."
RED = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his"
STORY = 300  # tokens
LONG, WIDTH, VOCABULARY = 100_000, 64, 4000
VIEWS = {  # the name of a picture, and the link that it shows
    "type": "view=type&layer={layer}&heads=all",
    "text": "view=text&layer=3&q={q}",
    "heads": "view=heads",
    "map": "view=map&layer={layer}&head={head}",
    "steps": "view=steps&layer={layer}&head={head}&step=weights",
    "compare": "view=compare&layer=0&head=0&layer2={layer}&head2={head}",
}
ALONE = {"opening", "sight", "pull", "translation"}  # pictures of sessions of their own
WRITTEN = {"6": 5, "300": 80}  # of the words, those that Generate writes: it offers so many; the rest is what it begins with


def main() -> None:
    """Takes them all, or those named."""
    named = set(sys.argv[1:])
    model = regard.GPT2.load("pocket")
    with sync_playwright() as playwright:
        browser = launch_chromium(playwright)
        if not named or named - ALONE:
            gallery(browser, model, named)
        if not named or "opening" in named:
            with Server(Session(None, adapt_model(model))) as server:
                opening(browser, server.address, "page-opening.png")
        if not named or "sight" in named:
            with Server(read(make_model_without_mask(), BALLS)) as server:
                shoot(browser, f"{server.address}#view=heads&sight=earlier", "page-sight.png", shown=".sight-square")
        if not named or "pull" in named:
            with Server(read(model, RED)) as server:
                shoot(browser, f"{server.address}#view=type&layer=5&heads=all&show=pull", "page-pull.png")
        if not named or "translation" in named:
            with Server(Session(None, adapt_model(translator.load(INCLUDED_TRANSLATORS["translator"])))) as server:
                translation(browser, server.address, "page-translation.png")
        browser.close()


def gallery(browser: Any, model: regard.GPT2, named: set[str]) -> None:
    """The views at each length."""
    for name, session, place in (
        ("6", read(model, SIX), {"layer": 3, "head": 1, "q": 5}),
        ("300", read(model, stories(model)), {"layer": 3, "head": 1, "q": 250}),
        ("100000", Session(make_long_recording()), {"layer": 0, "head": 1, "q": 60_000}),
    ):
        views = VIEWS if name != "100000" else {view: link for view, link in VIEWS.items() if view != "type"}
        with Server(session) as server:
            for view, link in views.items():
                if not named or f"{view}-{name}" in named:
                    shoot(browser, f"{server.address}#{link.format(**place)}", f"page-{view}-{name}.png")
            if name in WRITTEN and (not named or f"generate-{name}" in named):
                begun = "Once" if name == "6" else begin(model, STORY - WRITTEN[name])
                generate(browser, server.address, begun, WRITTEN[name], f"page-generate-{name}.png")
            if name == "300" and (not named or "dark" in named):
                text = f"{server.address}#{VIEWS['text'].format(**place)}"
                shoot(browser, text, "page-dark.png", dark=True)
                shoot(browser, text, "page-phone.png", width=390)


def opening(browser: Any, address: str, name: str) -> None:
    """The picture of what the page opens on, after the click that it asks for."""
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("#finding:not([hidden])", timeout=120_000)
        page.click("[data-control=off]")
        page.wait_for_selector(".type-compared")
        settle(page)
        page.screenshot(path=FOLDER / name)


def stories(model: regard.GPT2) -> str:
    """Three hundred tokens of stories of the model's own, one after the other."""
    told = ""
    for seed in range(2, STORY):  # that of seed 0 says one word over and over
        told += (
            "Once upon a time" + "".join(model.complete("Once upon a time", STORY, temperature=0.8, top_k=40, seed=seed)) + "\n"
        )
        if len(tokens := model.text.encode(told)) >= STORY:
            break
    return str(model.text.decode(tokens[:STORY]))


def read(model: regard.GPT2, text: str) -> Session:
    """A session whose model has read a text."""
    session = Session(None, adapt_model(model))
    session.run_text(text, lambda: None)
    return session


def shoot(browser: Any, address: str, name: str, dark: bool = False, width: int = 1280, shown: str = "#stage") -> None:
    """A picture of an address, once `shown` is there and it is quiet."""
    look = {"color_scheme": "dark" if dark else "light", "viewport": {"width": width, "height": 800}}
    with browser.new_context(**look) as context:
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector(shown, timeout=120_000)
        settle(page)
        page.screenshot(path=FOLDER / name)


def begin(model: regard.GPT2, tokens: int) -> str:
    """The beginning of these stories."""
    return str(model.text.decode(model.text.encode(stories(model))[:tokens]))


def generate(browser: Any, address: str, begun: str, words: int, name: str) -> None:
    """The picture of a text that was written."""
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        page.goto(f"{address}#view=generate")
        settle(page)
        page.locator("select[name=tokens]").select_option(str(words))
        box = page.get_by_role("textbox").first
        box.fill(begun)
        box.press("Enter")
        page.wait_for_selector(".generate-after a", timeout=120_000)
        settle(page)
        page.screenshot(path=FOLDER / name)


def translation(browser: Any, address: str, name: str) -> None:
    """The picture of a sentence that was offered and translated."""
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        page.goto(address)
        page.get_by_role("button", name=SENTENCE).click()
        page.wait_for_selector(".type-words >> nth=1", timeout=120_000)
        settle(page)
        page.screenshot(path=FOLDER / name)


class Unmasked(MultiHeadAttention):
    """A layer that has lost its mask."""

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        """The context of every word, of all words."""
        output: torch.Tensor = self.out_proj(heads.join(attention(*self.project(x))))
        return output


def make_model_without_mask() -> regard.GPT2:
    """The pocket model with such a layer."""
    model = regard.GPT2.load("pocket")
    model.blocks[2].attention.__class__ = Unmasked
    return model


def settle(page: Any) -> None:
    """Waits until nothing is waited for, and a little longer."""
    page.wait_for_timeout(1500)
    while not page.evaluate("document.querySelector('#wait').hidden"):
        page.wait_for_timeout(500)
    page.wait_for_timeout(1500)


def make_long_recording() -> regard.Recording:
    """A recording of a hundred thousand words under two heads."""
    dice = torch.Generator().manual_seed(0)
    often = 1 / torch.arange(1, VOCABULARY + 1).double()
    words = torch.multinomial(often, LONG, replacement=True, generator=dice)
    places = regard.mechanism.positions.sinusoidal(LONG, WIDTH)
    meanings = torch.randn(VOCABULARY, WIDTH, generator=dice)[words]
    before, follows = torch.roll(places, 1, 0), torch.roll(meanings, 1, 0)  # a word is found by the one that it follows
    q = torch.stack([9 * before, 1.6 * meanings + places])
    k = torch.stack([places, 1.6 * follows + places])
    model = Attends(q[None].float(), k[None].float()).eval()
    with regard.record(model) as recording, torch.no_grad():
        model()
    recording.model = "two planted heads"
    recording.tokens = [f" {spell_number(n)}" for n in words.tolist()]
    return recording


def spell_number(number: int) -> str:
    """A word for a number, no two alike."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    word = ""
    while True:
        number, rest = divmod(number, len(consonants) * len(vowels))
        word += consonants[rest // len(vowels)] + vowels[rest % len(vowels)]
        if not number:
            return word


if __name__ == "__main__":
    main()

"""Each view by a link that holds its whole state: what stands there stands there again after reload, back and forward."""

import pytest

from regard.models import GPT2
from regard.show.page.model_adapter import adapt_model
from regard.show.page.session import Session
from show.page.browser.patience import link, quiet, rung, settled, until
from show.page.browser.recordings import PLAIN, recorded, some, spaced

STATES = {
    "type": "view=type&r=r1&layer=1&head=2&q=3&of=head",
    "text": "view=text&r=r1&layer=1&q=6&k=2&heads=0,2&way=to&scale=log",
    "heads": "view=heads&r=r1&layer=1&head=1&by=itself&only=local&scale=log",
    "map": "view=map&r=r2&head=1&q=100&k=90&how=max&scale=linear&x=110&y=130&zoom=5",
    "steps": "view=steps&r=r1&layer=1&head=2&q=5&k=3&step=weights&mask=none&root=off&temperature=2.00",
    "compare": "view=compare&r=r1&layer=1&q=5&k=3&layer2=0&head2=2&pane=0&r2=r1&scale=linear",
    "generate": "view=generate&r=r1&text=Once+upon&heat=0.5",
}
# what stands on the stage, in words and pressed buttons, without what is still arriving
STANDS = """() => JSON.stringify([document.querySelector("#caption").textContent, document.querySelector("#legend").textContent,
    [...document.querySelectorAll("#stage [aria-pressed=true], #bar [aria-pressed=true]")].map((one) => one.textContent),
    [...document.querySelectorAll("#stage :is(select, input, textarea), #bar select")].map((one) => one.value),
    [...document.querySelectorAll("#stage :is(.selected, .linked, .panel-cell, .chosen)")].map((one) => one.textContent)])"""


@pytest.fixture(scope="module")
def address(serving):
    session = Session(recorded(*some(2, 3, 13), spaced(PLAIN, 13)), adapt_model(GPT2.load("pocket")))
    session.add_recording(recorded(*some(1, 2, 300, seed=3), spaced(PLAIN, 300)))
    return serving(session)


def stands(page) -> str:
    """What stands on the stage, once it no longer changes."""
    until(page, "document.querySelector('#wait').hidden")
    quiet(page)
    before = None
    while (now := page.evaluate(STANDS)) != before:
        before = now
        quiet(rung(page, 250))
    return now


@pytest.mark.parametrize("view", STATES)
def test_a_link_is_kept_as_it_was_given_and_shows_the_same_when_it_is_loaded_again(opened, address, view):
    page = opened(f"{address}#{STATES[view]}")
    first = stands(page)
    assert page.evaluate("location.hash").removeprefix("#") == STATES[view]
    page.reload()
    assert stands(page) == first
    assert page.evaluate("location.hash").removeprefix("#") == STATES[view]


@pytest.mark.parametrize("view", STATES)
def test_back_and_forward_lead_through_the_views(opened, address, view):
    page = opened(f"{address}#{STATES[view]}")
    first = stands(page)
    other = "Text" if view != "text" else "Map"
    page.locator("#views").get_by_role("link", name=other, exact=True).click()
    until(page, f"location.hash.includes('view={other.lower()}')")
    second = stands(page)
    page.go_back()
    assert stands(page) == first
    page.go_forward()
    assert stands(page) == second


def test_what_is_picked_in_one_view_is_picked_in_the_next(opened, address):
    page = settled(opened(f"{address}#view=text&r=r1&layer=1&head=2"))
    page.locator(".word[data-n='7']").click()
    page.get_by_role("link", name="Map", exact=True).click()
    until(page, "location.hash.includes('view=map')")
    assert link(page)["q"] == "7"
    page.get_by_role("link", name="Steps", exact=True).click()
    until(page, "document.querySelector('.steps-bars select')?.value === '7'")

"""The Generate view: words come one by one, each with what it looked at and what else was likely; it stops when told to."""

from concurrent.futures import Future
from threading import Event
from time import sleep

import pytest
import torch

import regard
from regard.models import GPT2, GPT2Config
from regard.show.generated_tokens import select_last_layers
from regard.show.page import generation_loops, model_adapter
from regard.show.page.model_adapter import adapt_model
from regard.show.page.session import GenerationRequest, Session
from regard.text import Letters
from show.page.browser.page_waits import link, wait_until, wait_until_quiet
from show.page.browser.recordings import expect_digits

TEXT, COUNT, ALPHABET = "dabaca", 20, "abcdefghijklmnopqrstuvwxyzABCDE"
PERCENT = 5.01e-4  # half a unit of the last digit of 12.3 %


def make_letter_model(**sizes: int) -> GPT2:
    """An untrained model of single letters, with dice strong enough that it does not say one letter for ever."""
    torch.manual_seed(7)
    model = GPT2(GPT2Config(vocabulary=len(ALPHABET), context=257, **sizes)).double().eval()
    with torch.no_grad():
        model.tokens.weight.mul_(12)
    model.text = Letters(ALPHABET)
    return model


@pytest.fixture(scope="module")
def model():
    return make_letter_model(width=22, heads=2, layers=3)


@pytest.fixture(scope="module")
def address(serving, model):
    session = Session(None, adapt_model(model))
    session.run_text(TEXT, lambda: None)
    return serving(session)


@pytest.fixture
def reading(monkeypatch):
    """The event for which the model waits before it reads a text that it has written."""
    read, going = model_adapter.record_rest, Event()
    monkeypatch.setattr(model_adapter, "record_rest", lambda *given, **more: (going.wait(60), read(*given, **more))[1])
    return going


def generate_text(page, *, temperature: float = 0.0):
    """The page once the model has gone on from the text."""
    page.get_by_role("textbox", name="Prompt").fill(TEXT)
    page.locator("select[name=tokens]").select_option(str(COUNT))
    page.get_by_role("slider").fill(str(temperature))
    page.get_by_role("button", name="Generate").click()
    page.wait_for_selector(".generate-after a")
    wait_until_quiet(page)
    return page


def came(page) -> str:
    return "".join(page.locator(".generate-came .word").all_inner_texts())


def bars(page, which: int) -> list[tuple[str, float]]:
    """The words and numbers of a list: 0 what it looked at, 1 what it might have been, 2 what moved it."""
    found = []
    for line in page.locator([".generate-looked > li", ".generate-bar", ".generate-moves > li"][which]).all():
        word, number = line.locator(".generate-word").inner_text(), line.locator(".numbers").inner_text()
        share = float(number.removesuffix(" %").removeprefix("< ").replace("−", "-"))
        found.append((word, share / 100 if "%" in number else share))
    return found


def test_the_page_says_what_comes_until_there_are_words(open_page, address):
    page = wait_until_quiet(open_page(f"{address}#view=generate"))
    hint = page.get_by_text("The model continues the text, one token at a time:")
    assert hint.is_visible()
    assert not generate_text(page).get_by_text(hint.inner_text()).is_visible()


def test_the_words_are_those_that_the_model_writes(open_page, address, model):
    page = generate_text(open_page(f"{address}#view=generate"))
    assert came(page) == "".join(model.complete(TEXT, COUNT, temperature=0.0))


def test_words_come_at_once_and_what_they_looked_at_once_the_text_is_read(open_page, serving, model, reading):
    page = open_page(f"{serving(Session(None, adapt_model(model)))}#view=generate")
    page.get_by_role("textbox", name="Prompt").fill(TEXT)
    page.locator("select[name=tokens]").select_option(str(COUNT))
    page.get_by_role("slider").fill("0")
    page.get_by_role("button", name="Generate").click()
    wait_until(page, f"document.querySelectorAll('.generate-came .word').length === {COUNT}")
    page.locator(".generate-came .word").nth(2).click()
    assert page.locator(".generate-side h2").inner_text() == f"Token ‘{came(page)[2]}’"
    assert len(bars(page, 1)) == 5
    assert (bars(page, 0), bars(page, 2)) == ([], [])
    assert page.locator(".generate-causes .note").all_inner_texts() == ["Known once the text is complete."] * 2
    assert page.locator("#legend > *").count() == 0
    reading.set()
    page.wait_for_selector(".generate-after a")
    wait_until(page, "document.querySelector('.generate-moves').ariaBusy === 'false'")
    shown = [bars(page, which) for which in range(3)]
    assert [len(one) for one in shown] == [4, 5, 4]
    assert page.locator(".generate-side h2").inner_text() == f"Token ‘{came(page)[2]}’"
    written = came(page)
    page.reload()
    page.wait_for_selector(".generate-after a")
    wait_until(page, "document.querySelector('.generate-moves').ariaBusy === 'false'")
    assert came(page) == written
    assert [bars(page, which) for which in range(3)] == shown


def test_a_picked_word_tells_what_else_was_likely_and_what_it_looked_at(open_page, address, model):
    page = generate_text(open_page(f"{address}#view=generate"))
    page.locator(".generate-came .word").nth(2).click()
    whole = TEXT + came(page)
    ids = model.text.encode(whole[:8])
    with regard.record(model) as recording, torch.no_grad():
        logits = model(torch.tensor([ids]))[0, -1]
    best = logits.softmax(-1).sort(descending=True).values.tolist()
    assert [share for _, share in bars(page, 1)] == pytest.approx(best[: len(bars(page, 1))], abs=PERCENT)
    assert page.locator(".generate-chosen").locator("> :first-child").inner_text() == whole[8]
    layers = select_last_layers(model.config.layers)
    row = torch.cat([recording.map(layer)[0, :, -1] for layer in layers]).mean(0)
    looked = bars(page, 0)
    assert [share for _, share in looked] == [expect_digits(weight) for weight in row.topk(len(looked)).values]
    assert [word for word, _ in looked] == [whole[place] for place in row.topk(len(looked)).indices.tolist()]


def numbers(page) -> list[float | None]:
    """The number that the title of each word of the whole text states, None where it has none."""
    titles = page.evaluate("[...document.querySelectorAll('.generate-words .word')].map((word) => word.title)")
    return [float(one.split(" ")[1].rstrip(",").replace("−", "-")) if one else None for one in titles]


def test_every_word_before_a_picked_one_is_shaded_by_its_weight(open_page, address, model):
    page = generate_text(open_page(f"{address}#view=generate"))
    page.locator(".generate-came .word").nth(12).click()
    ids = model.text.encode(TEXT + came(page)[:12])
    with regard.record(model) as recording, torch.no_grad():
        model(torch.tensor([ids]))
    row = torch.cat([recording.map(layer)[0, :, -1] for layer in select_last_layers(model.config.layers)]).mean(0)
    wait_until(page, "[...document.querySelectorAll('.generate-prompt .word')].every((one) => one.title.startsWith('weight'))")
    shown = numbers(page)
    assert shown[: len(ids)] == [expect_digits(weight) for weight in row]
    assert shown[len(ids) :] == [None] * (len(TEXT) + COUNT - len(ids))
    assert page.locator(".legend").inner_text().startswith("weight")


def test_a_picked_word_tells_side_by_side_what_it_looked_at_and_what_moved_it(open_page, address, model):
    page = generate_text(open_page(f"{address}#view=generate"))
    page.locator(".generate-came .word").nth(12).click()
    whole = TEXT + came(page)
    ids = torch.tensor([model.text.encode(whole[:-1])])
    at = len(TEXT) + 11
    with regard.record(model, keep="values") as recording:
        logits = model(ids)
    token = model.text.encode(whole[at + 1])[0]
    attribution = recording.attribute(logits[0, at, token])
    for setting, title in (("pull", "was moved by"), ("cut", "would change without")):
        page.get_by_role("button", name=setting, exact=True).click()
        exact = sum(attribution.map(layer, kind=setting).column_sums()[0].sum(0) for layer in range(3))
        order = exact.abs().argsort(descending=True)[:4].tolist()
        wait_until(page, f"document.querySelector('.generate-prompt .word')?.title.startsWith('{setting}')")
        assert page.locator(".generate-causes h3").all_inner_texts() == ["looked at", title]
        assert bars(page, 2) == [(whole[place], pytest.approx(float(exact[place]), rel=6e-3)) for place in order]
        for line, place in zip(page.locator(".generate-moves > li").all(), order, strict=True):
            assert ("raises" if exact[place] > 0 else "lowers") in line.get_attribute("title")
        assert numbers(page)[: at + 1] == pytest.approx(exact[: at + 1].tolist(), rel=6e-3, abs=1e-12)
        assert f"the logit of ‘{whole[at + 1]}’" in page.locator(".legend").inner_text()
        assert "why" in page.locator("#bar h1").inner_text()
    page.get_by_role("button", name="weight", exact=True).click()
    wait_until(page, "document.querySelector('.generate-prompt .word')?.title.startsWith('weight')")
    assert "why" not in page.locator("#bar h1").inner_text()


def test_the_keys_go_from_word_to_word_and_let_go(open_page, address):
    page = generate_text(open_page(f"{address}#view=generate"))
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".generate-came [aria-current=true]").get_attribute("data-n") == str(COUNT - 3)
    page.keyboard.press("Escape")
    assert page.locator(".generate-came [aria-current=true]").count() == 0


def test_what_was_written_is_read_on_in_the_other_views(open_page, address):
    page = generate_text(open_page(f"{address}#view=generate"))
    whole = TEXT + came(page)
    page.get_by_role("navigation", name="The same tokens").get_by_role("link", name="Steps").click()
    page.wait_for_selector(".steps-formula b")
    words = [option.strip("‘’")[0] for option in page.get_by_role("combobox", name="Query").locator("option").all_inner_texts()]
    assert "".join(words) == whole[: len(words)]
    assert len(words) >= len(whole) - 1  # the last word was written and not read


def waiting(wait) -> GPT2:
    """A model that waits before each word, as a large one does on any machine."""
    slow = make_letter_model(width=22, heads=2, layers=3)
    slow.register_forward_pre_hook(lambda *_: wait())
    return slow


def write_and_stop(page, count: int = 160):
    """The page, told to stop after its first word."""
    page.get_by_role("textbox", name="Prompt").fill(TEXT)
    page.locator("select[name=tokens]").select_option(str(count))
    page.get_by_role("slider").fill("0")
    page.get_by_role("button", name="Generate").click()
    page.wait_for_selector(".generate-came .word")
    page.get_by_role("button", name="Stop").click()
    return page


def test_what_the_words_of_a_stopped_text_looked_at_is_known_as_of_one_of_that_length(open_page, serving, model):
    session = Session(None, adapt_model(waiting(lambda: sleep(0.1))))
    page = write_and_stop(open_page(f"{serving(session)}#view=generate"))
    page.wait_for_selector(".generate-after a")
    page.get_by_role("button", name="Generate").wait_for()
    count = page.locator(".generate-came .word").count()
    assert 0 < count < 160
    assert page.locator(".generate-count").inner_text() == f"Stopped after {count} token{'s' * (count > 1)}."
    page.locator(".generate-came .word").nth(0).click()
    wait_until(page, "document.querySelector('.generate-moves').ariaBusy === 'false'")
    shown = [bars(page, which) for which in range(3)]
    assert [len(one) for one in shown] == [4, 5, 4]
    *lines, _ = Session(None, adapt_model(model)).generate_text(GenerationRequest(TEXT, count, 0.0, seed=0), lambda: None)
    assert came(page) == "".join(line["word"] for line in lines)
    assert link(page)["words"] == str(count)
    page.reload()
    page.wait_for_selector(".generate-after a")
    wait_until(page, "document.querySelector('.generate-moves').ariaBusy === 'false'")
    assert [bars(page, which) for which in range(3)] == shown
    assert page.locator("select[name=tokens]").input_value() in ("40", str(count))  # a number that can be asked for


def test_a_wait_for_code_that_is_compiled_is_told_until_the_words_come(open_page, serving, model, monkeypatch):
    compiled = Future()
    monkeypatch.setattr(generation_loops, "start_compilation", lambda model: compiled)
    monkeypatch.setattr(generation_loops, "PATIENCE_SECONDS", 0.1)
    page = open_page(f"{serving(Session(None, adapt_model(model)))}#view=generate")
    page.get_by_role("textbox", name="Prompt").fill(TEXT)
    page.get_by_role("button", name="Generate").click()
    wait = page.get_by_role("status").get_by_text("is being prepared for this processor")
    wait.wait_for()
    assert page.locator(".generate-came .word").count() == 0
    compiled.set_result(None)
    page.wait_for_selector(".generate-after a")
    assert wait.count() == 0


def test_to_leave_generate_is_to_stop_it(open_page, serving):
    said = []
    session = Session(None, adapt_model(waiting(lambda: said.append(sleep(0.1)))))
    page = open_page(f"{serving(session)}#view=generate")
    page.get_by_role("textbox", name="Prompt").fill(TEXT)
    page.locator("select[name=tokens]").select_option("160")
    page.get_by_role("button", name="Generate").click()
    page.wait_for_selector(".generate-came .word")
    page.get_by_role("navigation", name="Views", exact=True).get_by_role("link", name="Steps").click()
    page.wait_for_selector(".steps-formula b")  # of an example, as nothing was recorded
    with session._model_lock.hold(lambda: None):  # which is free once the model no longer writes
        assert 0 < len(said) < 160


def test_stop_before_the_first_word_is_told(open_page, serving):
    stopped = Event()
    page = open_page(f"{serving(Session(None, adapt_model(waiting(lambda: stopped.wait(30)))))}#view=generate")
    page.get_by_role("textbox", name="Prompt").fill(TEXT)
    page.get_by_role("button", name="Generate").click()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Generate").wait_for()
    stopped.set()
    assert page.locator(".generate-after").inner_text() == "Stopped before the first token."


def test_nothing_to_begin_with_is_told_beside_the_box(open_page, address):
    page = open_page(f"{address}#view=generate")
    page.get_by_role("textbox", name="Prompt").press("Enter")
    assert page.locator(".generate-form + .error").inner_text() == "Type a prompt first."


def test_on_a_phone_the_page_itself_never_scrolls_sideways(open_page, address):
    page = generate_text(open_page(f"{address}#view=generate", width=390, height=844))
    assert page.evaluate("document.querySelector('#stage').scrollWidth <= innerWidth")

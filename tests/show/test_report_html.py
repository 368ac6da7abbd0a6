"""A report as HTML: verdict, findings and cures in the open, the rest folded, and everything from outside as text."""

import re

import pytest
import torch

import regard
from regard.examination.report import Checked, Finding, Report, Unknown, Visibility
from regard.show.report_html import mark_up_code, render_document
from show.elements import EVIL, Page


def make_report(word="word"):
    """A report that says a word wherever it can say one."""
    seen = torch.ones(2, 2, dtype=torch.bool)
    return Report(
        subject=word,
        expects=word,
        findings=(Finding("future leak", f"evidence {word}", f"cure {word}: weights = f({word})."),),
        checked=(Checked(f"first {word}", "alike"), Checked("second", "alike"), Checked("third", word)),
        unknown=(Unknown(f"the {word}", f"pass {word}"),),
        notes=(word,),
        reach=Visibility(seen.tril(), seen, seen.double(), (word, word)),
    )


def test_a_layer_that_leaks_shows_its_finding_its_cure_and_the_picture(leaking):
    shown = leaking._repr_html_()
    page = Page(shown)
    assert page.text.startswith("✗ Leaking: 1 finding (expects Causal())future leak: ")
    assert "<code>scores = scores.masked_fill(" in shown
    (image,) = page.all("img")
    assert image["alt"] == "who sees whom: 15 of 36 pairs differ from what is expected"
    assert not page.all("script")
    assert "http" not in re.sub(r"base64,[^\"]+", "", shown)
    assert len(shown) < 12_000


def test_a_clean_report_says_so_and_what_was_checked():
    report = regard.examine(regard.CausalAttention(3, 2, 6, 0.0))
    text = Page(report._repr_html_()).text
    assert text.startswith("✓ CausalAttention: no finding (expects Causal())")
    assert f"What was checked ({len(report.checked)})" in text
    assert all(one.what in text and one.sensitivity in text for one in report.checked)


@pytest.mark.parametrize("word", [*EVIL, "\x1b]52;c;ZQ==\x07", "\x9b2J"])
@pytest.mark.parametrize("shown", [Report._repr_html_, render_document], ids=["cell", "file"])
def test_words_that_hold_html_are_always_text(word, shown):
    plain, page = Page(shown(make_report())), Page(shown(make_report(word)))
    elements = [name for name, _ in plain.found]
    assert [name for name, _ in page.found if name != "code"] == [name for name in elements if name != "code"]
    assert all(
        set(attributes) <= {"style", "src", "alt", "class", "lang", "charset", "name", "content"}
        for _, attributes in page.found
    )
    shown(make_report(word)).encode()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown(make_report(word)))


@pytest.mark.parametrize(
    "cure",
    [
        "Hide keys with -inf before it: `scores = scores.masked_fill(~mask, -torch.inf)`, where True means visible.",
        "Split with a view: `q, k, v = self.qkv(x).view(b, t, 3, h, d)`.",
        "Give finite scores before the softmax, `scores.masked_fill(~mask.any(-1, keepdim=True), 0)`.",
        "Round once: `torch.softmax` and @ do. If 0.2 is intended, pass `scale=0.2`.",
        "Scores are (b, h, q, k): `q @ k.mT / math.sqrt(k.shape[-1])`. Hide keys (the last axis).",
        "Apply dropout in training: `dropout_p=self.p if self.training else 0.0` for `F.dropout`.",
        "It follows from the wrong axis: fix that and examine again.",
        "Write `x = x + y` instead of `x += y`, `x.mul(s)` instead of `x.mul_(s)`; or clone the tensor first.",
        "Add a bias, e.g. `scores + bias`, to finite scores, i.e. before `torch.softmax`.",
        "Keep it in float32, e.g. with `x.float()`.",
    ],
)
def test_the_line_of_code_of_a_cure_stands_in_code_type(cure):
    assert mark_up_code(cure.replace("`", "")) == re.sub("`([^`]*)`", r"<code>\1</code>", cure)


@pytest.mark.slow
def test_in_a_browser_the_file_is_read_in_light_and_dark_and_unfolds(browser, tmp_path, leaking):
    (tmp_path / "report.html").write_text(render_document(leaking), encoding="utf-8")
    for scheme in ("light", "dark"):
        page = browser.new_context(color_scheme=scheme, viewport={"width": 420, "height": 800}).new_page()
        said = []
        page.on("console", lambda message, said=said: said.append(message.text))
        page.goto((tmp_path / "report.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("document.querySelector('img').naturalWidth > 400")
        first = page.locator("details li").first
        assert not first.is_visible()
        page.locator("summary").first.click()
        assert first.is_visible()
        assert said == []


@pytest.fixture(scope="module")
def leaking():
    """The report of a layer that writes zeros where -inf belongs."""

    class Leaking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.W_query, self.W_key, self.W_value = (torch.nn.Linear(5, 3) for _ in range(3))

        def forward(self, x):
            return torch.softmax(torch.tril(self.W_query(x) @ self.W_key(x).mT / 3**0.5), -1) @ self.W_value(x)

    torch.manual_seed(0)
    return regard.examine(Leaking())

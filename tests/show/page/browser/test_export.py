"""What is saved as a table, the HTML that embeds a page, and the page in the output cell of a notebook."""

import csv
import html
import json
import re
from pathlib import Path
from urllib.parse import quote, urlencode

import numpy as np
import pytest
import torch

import regard
from bounds import assert_within, attention_bounds
from regard import GPT2, Causal
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.session import Session
from regard.show.page.single_file import page as write_page
from show.page.browser.page_waits import wait_until, wait_until_settled
from show.page.browser.recordings import PLAIN, draw_queries_and_keys, expect_weight, record_layers, space_words
from show.page.server_client import in_steps, rows_and_keys
from show.vision_models import llava, swin, vit

TEXT = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his"
T, LAYER, HEAD, QUERY = 13, 1, 2, 7


Q, K = draw_queries_and_keys(2, 3, T)


@pytest.fixture(scope="module")
def recording():
    return record_layers(Q, K, space_words(PLAIN, T))


@pytest.fixture(scope="module")
def address(serving, recording):
    session = Session(recording, GPT2Adapter("pocket", GPT2.load("pocket", torch.float64)))
    session.run_text(TEXT, lambda: None)
    return serving(session)


def save(page, kind: str, folder: Path) -> str:
    """The text of the file that the menu saves."""
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as saving:
        page.get_by_role("menuitem", name=kind).click()
    place = folder / saving.value.suggested_filename
    saving.value.save_as(place)
    return place.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def in_file(recording, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "page.html"
    regard.page(recording, path)
    return path.as_uri()


@pytest.mark.parametrize("kind", ["server", "file"])
@pytest.mark.parametrize("view", ["text", "text&way=to", "map", "compare", "type"])
def test_the_weights_on_screen_are_saved_with_all_their_digits(open_page, address, in_file, view, kind, tmp_path):
    if view == "type" and kind == "file":
        view = "text"  # which a file shows in its place
    place = f"layer={LAYER}&head={HEAD}&q={QUERY}&head2={HEAD}&layer2={LAYER}"
    page = wait_until_settled(
        open_page(f"{address}#view={view}&r=r1&{place}" if kind == "server" else f"{in_file}#view={view}&{place}")
    )
    rows = list(csv.DictReader(save(page, "CSV", tmp_path).splitlines()))
    shown = [one for one in rows if one.get("picture", "first") == "first" and one["weight"] not in ("", "0")]
    assert len(shown) == {"text": QUERY + 1, "type": QUERY + 1, "text&way=to": T - QUERY}.get(view, T * (T + 1) // 2)
    for one in shown:
        assert float(one["weight"]) == expect_weight(Q, K, LAYER, HEAD, int(one["query"]), int(one["key"]))
    if view == "text":
        assert [one["word"] for one in rows] == space_words(PLAIN, T)


@pytest.mark.parametrize("sink", [-9.0, 0.5, 6.0])
def test_the_weights_beside_a_sink_are_saved_from_a_file_with_all_their_digits(open_page, tmp_path, sink):
    recording = rows_and_keys(Q[0], K[0], sinks=torch.tensor([sink, 1.0, 2.0]))
    regard.page(recording, tmp_path / "page.html")
    page = wait_until_settled(open_page((tmp_path / "page.html").as_uri() + "#view=map&head=0"))
    expected = regard.attend(
        Q[0].double(), K[0].double(), K[0].double(), Causal(), sinks=torch.tensor([sink, 1.0, 2.0]).double()
    )
    for one in csv.DictReader(save(page, "CSV", tmp_path).splitlines()):
        weight = float(expected.weights[0, 0, int(one["query"]), int(one["key"])])
        assert float(one["weight"]) == pytest.approx(weight, rel=1e-5)


@pytest.mark.parametrize("way", ["", "&way=to"])
def test_a_file_shows_the_words_of_the_text_that_is_selected(open_page, tmp_path, way):
    recording = in_steps()
    regard.page(recording, tmp_path / "page.html")
    page = wait_until_settled(open_page(f"{(tmp_path / 'page.html').as_uri()}#view=text&layer=1&head=2&b=1&q={QUERY}{way}"))
    assert [one["word"] for one in csv.DictReader(save(page, "CSV", tmp_path).splitlines())] == recording.tokens[1]
    wait_until(page, "document.querySelector('.text-links .link')")
    linked = page.locator(".text-links .link-word").all_inner_texts()
    assert linked
    assert all(word.strip().startswith("b") for word in linked)


@pytest.mark.parametrize("view", ["type", "heads", "steps"])
def test_each_view_saves_json_that_says_what_it_is(open_page, address, view, tmp_path):
    page = wait_until_settled(open_page(f"{address}#view={view}&r=r2&layer=5&head=4&step=weights"))
    found = json.loads(save(page, "JSON", tmp_path))
    assert found["view"] == view
    assert found["caption"] == page.locator("#caption").inner_text()
    assert found["link"] == page.url
    assert "float32" in found["precision"]
    if view == "heads":
        assert len(found["rows"]) == 36
        assert {"layer", "head", "kind", "sentence", "induction"} <= set(found["rows"][0])
    elif view == "type":
        assert [one["word"] for one in found["rows"] if "key" in one][:2] == ["Lily", " had"]
        assert len([one for one in found["rows"] if "next" in one]) == 10
    else:
        assert len(found["rows"]) == 24**2
        assert {"step", "table", "row", "column", "value"} == set(found["rows"][0])


IMAGE = np.zeros((30, 42, 3), np.uint8)
LOOKED = re.compile(r"(.) at (\d+): ([\d.e-]+)")


@pytest.mark.parametrize("kind", ["CSV", "JSON"])
def test_the_numbers_of_written_words_are_saved(open_page, serving, kind, tmp_path):
    adapter = GPT2Adapter("sorter", GPT2.load("sorter", torch.float64))
    page = open_page(f"{serving(Session(None, adapter))}#view=generate&heat=0&words=5")
    page.get_by_role("textbox", name="Prompt").fill("CBABB")
    page.get_by_role("button", name="Generate").click()
    page.wait_for_selector(".generate-after a")
    rows = read_rows(save(wait_until_settled(page), kind, tmp_path), kind)
    ids = [*adapter.encode("CBABB"), *(int(one["token"]) for one in rows)]
    words = adapter.words.pieces(ids)
    assert [(one["word"], int(one["place"])) for one in rows] == [(words[place], place) for place in range(5, 10)]
    with torch.no_grad(), regard.record(adapter.model) as recording:
        shares = adapter.run(torch.tensor([ids[:-1]]))[0].softmax(-1)
    for n, one in enumerate(rows, 4):
        assert float(one["probability"]) == pytest.approx(float(shares[n, ids[n + 1]]), rel=1e-12)
        values, tokens = shares[n].topk(len(one["alternatives"].split("; ")))
        expected = [
            (word, pytest.approx(value, rel=1e-12))
            for word, value in zip(adapter.words.pieces(tokens.tolist()), values.tolist(), strict=True)
        ]
        assert [(found[0], float(found[3:])) for found in one["alternatives"].split("; ")] == expected
        weights, places = recording.map(len(recording.layers()) - 1)[0, :, n].mean(0)[: n + 1].topk(4)
        looked = [(word, int(place), float(weight)) for word, place, weight in LOOKED.findall(one["looked at"])]
        assert looked == [
            (words[place], place, pytest.approx(weight, rel=1e-12))
            for place, weight in zip(places.tolist(), weights.tolist(), strict=True)
        ]


def name_patches(rows: int, columns: int, first: int = 0) -> list[tuple[str, int]]:
    """Names and numbers of some rows of patches."""
    return [(f"patch {n // columns},{n % columns}", n) for n in range(first * columns, (first + rows) * columns)]


def read_rows(text: str, kind: str) -> list[dict]:
    """The records of a saved table."""
    return list(csv.DictReader(text.splitlines())) if kind == "CSV" else json.loads(text)["rows"]


SWIN = [name_patches(4, 8, 4)[n] for n in range(32) if n % 8 < 4]  # the third window of four by four


@pytest.mark.parametrize("kind", ["CSV", "JSON"])
@pytest.mark.parametrize(
    ("make", "link", "keys"),
    [
        (vit, {"layer": 1, "head": 2, "q": 27}, [("class token", None), *name_patches(5, 7)]),
        (swin, {"layer": 0, "head": 1, "q": 5, "b": 2}, SWIN),
        (
            llava,
            {"layer": 1, "head": 2, "q": 12, "part": "language_model"},
            [("<s>", None), ("what", None), *name_patches(3, 3), ("is", None), ("this", None)],
        ),
    ],
)
def test_the_numbers_of_an_image_are_saved(open_page, make, link, keys, kind, tmp_path):
    recording, weights = make()
    write_page(recording, tmp_path / "page.html", image=IMAGE)
    page = wait_until_settled(open_page(f"{(tmp_path / 'page.html').as_uri()}#view=image&{urlencode(link)}"))
    rows = read_rows(save(page, kind, tmp_path), kind)
    layer, head, b = link["layer"], link["head"], link.get("b", 0)
    patches = [None if one["patch"] in ("", None) else int(one["patch"]) for one in rows]
    assert [(one["word"], patch) for one, patch in zip(rows, patches, strict=True)] == keys
    assert [(int(one["query"]), int(one["key"])) for one in rows] == [(link["q"], key) for key in range(len(keys))]
    request = recording.map(layer, part=link.get("part")).select(b, head).planes.request
    exact = weights[layer][b : b + 1, head : head + 1]
    bounds = attention_bounds(torch.float32, request.q, request.k, request.k, exact, scale=request.scale)
    found = torch.tensor([float(one["weight"] or 0) for one in rows], dtype=torch.float64)
    assert_within(found, exact[0, 0, link["q"]], bounds.weights[0, 0, link["q"]])


def test_the_embedding_is_html_with_the_state_of_the_link(open_page, address):
    page = wait_until_settled(open_page(f"{address}#view=map&r=r1&layer=1", permissions=["clipboard-read", "clipboard-write"]))
    page.get_by_role("button", name="Save").click()
    page.get_by_role("menuitem", name="Copy the HTML").click()
    wait_until(page, "document.querySelector('[role=status]') !== null")
    text = page.evaluate("navigator.clipboard.readText()")
    assert (
        html.unescape(re.search(r'^<iframe src="([^"]*)" title="[^"]+" sandbox="allow-scripts allow-downloads"', text)[1])
        == page.url
    )


def test_a_recording_stands_in_the_output_cell_of_a_notebook(open_page, recording, tmp_path):
    cell = tmp_path / "cell.html"
    shown = recording.page(height=640)
    assert "which a notebook shows" in repr(shown)
    cell.write_text(f"<!doctype html><title>cell</title>{shown._repr_html_()}", encoding="utf-8")
    page = open_page(f"file://{quote(str(cell))}")
    inner = page.frame_locator("iframe")
    inner.get_by_role("link", name="Map", exact=True).click()
    inner.locator("#stage.map canvas").wait_for()
    inner.get_by_role("link", name="Text", exact=True).click()
    inner.locator(".word").nth(3).click()
    inner.locator("#caption b").filter(has_text=PLAIN[3]).wait_for()
    assert page.url.endswith("cell.html")  # what is around it stays
    page.evaluate("document.querySelector('iframe').contentWindow.postMessage('', '*')")


def test_a_framed_page_cannot_reach_what_is_around_it(recording):
    frame = recording.page().html
    assert 'sandbox="allow-scripts allow-downloads"' in frame
    assert "allow-same-origin" not in frame
    with pytest.raises(regard.ConfigError, match="height must be"):
        recording.page(height=0)

"""The tables and pages of an atlas say what its statistics are."""

import itertools
import re
from html.parser import HTMLParser

import pytest
import torch

import regard
from head_atlas.small_atlas import SETTINGS, make_model, make_texts
from regard.head_atlas.atlas import read_atlas
from regard.head_atlas.sampled_rows import SCORES
from regard.head_atlas.statistics import EXAMPLES

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'regard[atlas]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("atlas")
    regard.atlas(make_model(), make_texts(), place, **SETTINGS)
    return place


def read(folder, name):
    return parquet.read_table(folder / f"{name}.parquet").to_pylist()


@pytest.mark.slow
def test_the_table_of_heads_is_that_of_heads(folder):
    atlas = read_atlas(folder)
    lines = read(folder, "heads")
    assert len(lines) == len(atlas.heads) == 4
    for line, row in zip(lines, atlas.heads, strict=True):
        assert [line[name] for name in ("layer", "name", "head", "kind", "sentence")] == [
            row.layer,
            row.name,
            row.head,
            row.kind,
            row.sentence,
        ]
        for name, score in row.scores.items():
            found = [line[name], line[f"{name} low"], line[f"{name} high"], line[f"{name} count"]]
            assert found == pytest.approx([score, score.low, score.high, score.count], nan_ok=True, abs=0)


@pytest.mark.slow
def test_histograms_and_positions_count_the_queries_of_each_score(folder):
    queries = {(n["layer"], n["head"], score): n[f"{score} count"] for n in read(folder, "heads") for score in SCORES}
    for table in ("histograms", "positions"):
        counted: dict[tuple, int] = {}
        for line in read(folder, table):
            place = line["layer"], line["head"], line["score"]
            counted[place] = counted.get(place, 0) + line["queries"]
        assert counted == {place: count for place, count in queries.items() if count}


def test_weights_by_distance_add_up_to_the_queries(folder):
    total: dict[tuple, float] = {}
    for line in read(folder, "distances"):
        place = line["layer"], line["head"]
        assert line["nearest"] <= line["farthest"]
        total[place] = total.get(place, 0.0) + line["mean"] * line["keys"]
    # each of the 18 pieces has 16 queries whose weights add up to one; float32 weights of at most 48 keys
    assert total == pytest.approx(dict.fromkeys(total, 18 * 16), rel=48 * torch.finfo(torch.float32).eps)


def test_examples_are_ranked_and_their_texts_end_with_the_query(folder):
    lines = read(folder, "examples")
    assert {line["score"] for line in lines} <= set(EXAMPLES)
    model, texts = make_model(), make_texts()
    pieces = [text[start : start + 47] for text in texts for start in (0, 47)]
    begins = model.get_end_settings().get("end") is not None
    for line in lines:
        assert line["value"] > 0
        assert line["text"].endswith(line["query_text"])
        if not begins:
            continue
        piece = pieces[line["document"]]
        assert line["query_text"] == piece[line["query"] - 1]
        assert line["weights"] == sorted(line["weights"], reverse=True)
    ranks = [(line["layer"], line["head"], EXAMPLES.index(line["score"]), line["rank"]) for line in lines]
    assert ranks == sorted(ranks)
    for one, other in itertools.pairwise(lines):
        if other["rank"]:
            assert one["value"] >= other["value"]
            assert one["document"] != other["document"]


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag, attributes) -> None:
        self.targets += [value for name, value in attributes if name in ("href", "src")]


def test_every_link_of_the_pages_holds_and_none_leaves_the_folder(folder):
    pages = sorted((folder / "site").glob("*.html"))
    assert len(pages) == 5
    for page in pages:
        links = Links()
        links.feed(page.read_text(encoding="utf-8"))
        assert links.targets
        for target in links.targets:
            assert target == "data:," or (page.parent / target).is_file(), target


def test_texts_with_html_in_them_are_text(tmp_path):
    hostile = "</p><script>alert('x')</script>&amp;\u2028"
    regard.atlas(make_model(hostile), [hostile * 3], tmp_path, **SETTINGS)
    for page in (tmp_path / "site").glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<script>alert", text)
    data = (tmp_path / "site" / "atlas-data.js").read_text(encoding="utf-8")
    assert data.startswith("const ATLAS = {")
    assert len(data.splitlines()) == 1 + data.count("\u2028")  # a line separator is allowed in a string of JavaScript

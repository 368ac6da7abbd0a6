import copy
import json
from types import SimpleNamespace

import pytest
import torch
from docs.pictures import lineage as pictures
from recipes.lineage import alignments, lengths, measure, page, probes, table
from recipes.lineage.captions import groups, joined
from recipes.lineage.measure import ALIGNMENTS, RESULTS, compact
from recipes.lineage.runs import runs
from recipes.lineage.word_alignment import Alignment

from bounds import assert_within, estimate_rounding, sum_bound
from regard.models.recurrent import RecurrentTranslator
from regard.text import BytePair

PLACES = ["red", "blue", "green", "white"]


@pytest.fixture(scope="module")
def model():
    text = BytePair.train([f"A {one} dog and a {one} cat." for one in PLACES], 320)
    torch.manual_seed(0)
    found = RecurrentTranslator("additive", vocabulary=text.vocabulary, width=13, hidden=31).eval()
    found.text = text
    return found


@pytest.fixture(scope="module")
def lineage_results():
    """What is committed: the runs' numbers, and what was looked at."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, ALIGNMENTS)]


def test_captions_are_joined_as_one_sentence():
    assert joined(["A man sits.", "Two dogs run .", "A cat sleeps"], "et") == "A man sits et two dogs run et a cat sleeps"
    assert joined(["A man sits."], "and") == "A man sits."


def test_each_caption_is_in_one_group_and_those_left_over_in_none():
    captions = [f"A{n}." for n in range(7)]
    assert groups(captions, 3, "and") == ["A0 and a1 and a2.", "A3 and a4 and a5."]
    assert groups(captions, 1, "and") == captions


def test_what_is_read_together_and_apart_is_held_against_the_same_words(monkeypatch):
    sources = [f"A {one} dog and a {other} cat." for one in PLACES for other in PLACES]
    sources[1] = "A" + 17 * " dog" + "."
    asked = []

    def stops_early(model, sentences, beams):
        """A translator that forgets what comes after nineteen words."""
        asked.append(list(sentences))
        return [" ".join(one.split()[:19]).replace(" and ", " et ") for one in sentences]

    monkeypatch.setattr(lengths, "translate_sentences", stops_early)
    found = lengths.measured(None, sources, [one.replace(" and ", " et ") for one in sources])
    assert [(one["captions"], one["most_words"], one["sentences"]) for one in found] == [
        (1, 0, 16),
        (2, 20, 7),
        (2, 0, 8),
        (3, 0, 5),
        (4, 0, 4),
        (5, 0, 3),
    ]
    assert [len(some) for some in asked] == [16, 8, 5, 4, 3]
    assert found[1]["words"] == 15
    assert found[2]["words"] == (7 * 15 + 26) / 8
    assert [one["apart"]["score"] for one in found] == pytest.approx([100] * 6)
    assert [one["together"]["score"] > 99 for one in found] == [True, True, False, False, False, False]
    assert found[0]["written"] == 1 > found[3]["written"] > found[5]["written"]


def test_captions_and_other_sentences_are_each_held_against_their_own_length():
    captions, others = [f"A {one} dog." for one in PLACES] * 4, ["Tom " + 8 * "ran "] * 10 + ["Run!"] * 9
    sides = {"source": [*others, *captions], "target": [*others, *captions]}
    part = SimpleNamespace(decode_sentences=lambda side: sides[side])
    found = lengths.natural(part, [*others, *(one.replace("dog", "cat") for one in captions)], captions)
    assert {name: [(one["above"], one["sentences"]) for one in bins] for name, bins in found.items()} == {
        "captions": [(0, 16)],
        "others": [(8, 10)],
    }
    assert found["captions"][0]["score"] < found["others"][0]["score"] == pytest.approx(100)


def test_a_model_without_attention_says_what_it_says_and_looks_at_nothing(lineage_results):
    text = BytePair.train(list(alignments.CAPTIONS), 400)
    plain = RecurrentTranslator(vocabulary=text.vocabulary, width=5, hidden=7).eval()
    plain.text = text
    assert [*alignments.measured(plain, [], [])] == ["says"]
    rows, seen = lineage_results
    row = {**rows[0], "run": "multi30k-plain-0", "model": "plain"}
    told = page.filled(
        page.PAGE.read_text(encoding="utf-8"), [*rows[1:], row], {**seen, row["run"]: {"says": "Le chien a sauté"}}
    )
    assert "| without attention | 0 | Le chien a sauté |" in told


def test_the_words_of_a_sentence_by_their_place():
    said = "The dog, a black one, sleeps."
    assert [probes.at(place, said) for place in probes.PLACES] == ["the", "dog", "black", "sleeps"]
    assert [probes.at(place, "Run!") for place in probes.PLACES] == ["run"] * 4


@pytest.mark.slow
def test_a_state_knows_best_the_words_that_it_has_read_last(model, monkeypatch):
    monkeypatch.setattr(probes, "LEAST", 5)
    dice = torch.Generator().manual_seed(0)

    def some(count):
        numbers = torch.randint(len(PLACES), (count, 14), generator=dice).tolist()
        return [" ".join(PLACES[n] for n in row) for row in numbers]

    found = probes.measured(model, some(300), some(60))
    share = {(one["place"], one["state"]): one["share"] for one in found if one["above"] == 11}
    assert share["first", "backward"] > 0.9 > share["first", "forward"]
    assert share["last", "forward"] > 0.9 > share["last", "backward"]
    assert all(one["within"][0] <= one["share"] <= one["within"][1] for one in found)


def test_a_state_is_that_of_its_sentence_whatever_stands_beside_it(model):
    sentences = ["red blue", "green", "white red blue green red"]
    rows = [[*model.text.encode(one), model.text.end] for one in sentences]

    @torch.no_grad()
    def states(model):
        return torch.cat([model.encode(torch.tensor([row]), torch.tensor([len(row)])).summary for row in rows])

    exact = copy.deepcopy(model).double()
    allowed = estimate_rounding(exact, states, terms=13 + 31)  # a gate is a sum over the word and the state
    assert_within(probes.summaries(model, sentences), states(exact), allowed, "together")
    assert_within(torch.cat([probes.summaries(model, [one]) for one in sentences]), states(exact), allowed, "alone")


def test_twins_stand_once_on_either_side_and_are_words():
    source = ["taxi", "orange", "on", "taxi", "...", "Tom", "12345", "⟨end⟩"]
    target = ["orange", "taxi", "on", "12345", "...", "Tom", "⟨end⟩"]
    assert alignments.alike(Alignment(source, target, torch.ones(1, 7, 8))) == [(0, 1), (3, 6)]


def test_the_weight_of_twins_is_their_mean_in_each_layer(model, monkeypatch):
    weights = torch.tensor([[[0.7, 0.3], [0.2, 0.8]], [[0.9, 0.1], [0.6, 0.4]]])
    given = Alignment(["orange", "⟨end⟩"], ["une", "orange"], weights)
    given.target.append("⟨end⟩")
    monkeypatch.setattr(alignments, "align", lambda *asked: given)
    shares, counted = alignments.twins(model, ["orange", "blue", "orange"], ["orange", "bleu", "orange"])
    assert counted == 2
    assert shares == pytest.approx([0.2, 0.6], rel=sum_bound(torch.float32, 3))  # each as float32 holds it, and the mean of two


def test_numbers_of_a_run_hold_no_translations(lineage_results):
    assert table.numbers({"run": "a", "translations_4": ["Un"], "BLEU_4": {}}) == {"run": "a", "BLEU_4": {}}
    assert all(not name.startswith("translations") for row in lineage_results[0] for name in row)


def test_json_with_short_lines_is_the_same_json():
    value = [{"a": 1, "b": [{"c": [1, 2]}, {"c": []}], "d": {"e": "é"}, "f": []}]
    assert json.loads(compact(value)) == value
    assert compact({"a": [[1, 2], [3]]}).count("\n") == 5


def test_the_page_says_what_was_measured_and_written_again_says_no_more(lineage_results):
    page_now = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(page_now, *lineage_results) == page_now
    changed = copy.deepcopy(lineage_results)
    changed[0][0]["BLEU_4"]["score"] = 99.94
    assert "99.9" in page.filled(page_now, *changed)


@pytest.mark.slow
def test_runs_that_are_not_done_are_named_and_not_drawn(lineage_results, tmp_path, monkeypatch):
    rows, seen = (
        lineage_results[0][:1],
        {name: one for name, one in lineage_results[1].items() if name == lineage_results[0][0]["run"]},
    )
    told = page.filled(page.PAGE.read_text(encoding="utf-8"), rows, seen)
    for one in runs():
        assert (f"`{one.name}`" in told) == (one.name != rows[0]["run"])
    for name, value in (("RESULTS", rows), ("ALIGNMENTS", seen)):
        (tmp_path / name).write_text(json.dumps(value))
        monkeypatch.setattr(pictures, name, tmp_path / name)
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main()
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert f"lineage-length-{rows[0]['pairs']}.svg" in drawn
    assert all(f"pictures/{name}" in told for name in drawn)


def test_every_picture_that_the_page_shows_is_there():
    named = [part.partition(")")[0] for part in page.PAGE.read_text(encoding="utf-8").split("](pictures/")[1:]]
    assert named
    assert all((pictures.FOLDER / name).is_file() for name in named)


def test_what_was_measured_of_a_run_elsewhere_stays(lineage_results, tmp_path, monkeypatch):
    for name, value in zip(("RESULTS", "ALIGNMENTS"), lineage_results, strict=True):
        (tmp_path / name).write_text(json.dumps(value))
        monkeypatch.setattr(measure, name, tmp_path / name)
    monkeypatch.setattr(measure, "MEASURES", {"natural": lambda *_: 7, "alignment": lambda *_: 8})
    monkeypatch.setattr(measure.Pairs, "load", lambda folder: None)
    (tmp_path / "multi30k-additive-0").mkdir()
    row = {"run": "multi30k-additive-0", "BLEU_4": {"score": 1.5}, "translations_4": ["Oui."]}
    (tmp_path / "multi30k-additive-0" / "table.json").write_text(json.dumps(row))
    measure.measured(tmp_path)
    seen = json.loads((tmp_path / "ALIGNMENTS").read_text())
    rows = {one["run"]: one for one in json.loads((tmp_path / "RESULTS").read_text())}
    assert rows.pop("multi30k-additive-0") == {"run": "multi30k-additive-0", "BLEU_4": {"score": 1.5}, "natural": 7}
    assert seen.pop("multi30k-additive-0") == 8
    before = {one["run"]: one for one in lineage_results[0] if one["run"] != "multi30k-additive-0"}
    assert rows == before
    assert seen == {name: lineage_results[1][name] for name in before}
    order = [one["run"] for one in json.loads((tmp_path / "RESULTS").read_text())]
    assert order == [one.name for one in runs() if one.name in order]

"""What a page opens on: the head, its word and the sentences agree with regard.heads and with the weights."""

import json
import re

import pytest
import torch

import regard
from regard.mechanism import Causal, Everything
from regard.models import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page import finding as findings
from regard.show.page.effect_finding import EFFECT, MIN_SEEN_WEIGHT
from regard.show.page.finding import DOES, LEAK, find_finding, name_word
from regard.show.page.gallery import ITEMS
from regard.show.page.model_adapter import record_text
from regard.show.page.recording_entry import RecordingEntry
from regard.show.page.session import LEAK_ID, Session
from regard.show.page.translator_adapter import record_example
from show.page.server_client import open_client, rows_and_keys

WORDS = ["Ann", " met", " Bob", " in", " the", " blue", " park", "."]  # twice: each word has followed another before
T = 2 * len(WORDS)


def find(recording, wanted=None):
    return find_finding(RecordingEntry("r", recording), lambda: None, wanted)


def attend_to(*targets: list[int], mask=None):
    """A recording of one layer; query i of head h attends almost only to targets[h][i]."""
    size = len(targets[0])
    keys = 40 * torch.eye(size, dtype=torch.float64).repeat(1, len(targets), 1, 1)
    queries = torch.stack([torch.eye(size, dtype=torch.float64)[row] for row in targets])[None]
    recording = rows_and_keys(queries, keys, mask)
    recording.tokens = (WORDS * 2)[:size]
    return recording


BEFORE = [max(i - 1, 0) for i in range(T)]
FOLLOWED = [max(i - len(WORDS) + 1, 0) if i >= len(WORDS) else i for i in range(T)]
FIRST = [0] * T


@pytest.mark.parametrize(
    ("targets", "what", "key"),
    [
        ([BEFORE, FIRST, FOLLOWED], "prefix matching", lambda q: q - len(WORDS) + 1),
        ([FIRST, BEFORE], "previous token", lambda q: q - 1),
        ([FIRST], "first token", lambda q: 0),
    ],
)
def test_the_most_telling_kind_is_found_with_its_head_its_score_and_a_word_that_shows_it(targets, what, key):
    recording = attend_to(*targets)
    found = find(recording)
    (row,) = [one for one in regard.heads(recording) if one.head == found.place.head]
    assert (found.what, row.kind, found.k) == (what, what, key(found.q))
    seen, average, touch = found.sentences[0], found.sentences[1], found.sentences[2:]
    assert seen.startswith(f"Here head {row.head} of layer 0 looks at ")
    weights = recording.map(0)[0, found.place.head, found.q]
    assert found.k == int(weights.argmax())
    marked = f"The marked token, ‘{recording.tokens[found.q].strip()}’ at {found.q}, puts {100 * weights.max():.0f} %"
    assert average.startswith(f"{marked} of its attention on ")
    assert average.endswith(f"; on average over {row.deciding_score.count} tokens it is {100 * row.deciding_score:.0f} %.")
    others = f", or see all {len(targets)} heads in Heads" if len(targets) > 1 else ""
    assert touch == (f"The stronger a color, the more it looks there; select another token{others}.",)


@pytest.mark.parametrize(("targets", "key", "count"), [(BEFORE, "the patch just before", T - 1), (FIRST, "the first token", T)])
def test_the_patches_of_an_image_are_not_called_words(targets, key, count):
    recording = attend_to(targets)
    recording.tokens, recording.places = None, regard.PatchGrid(3, 5)
    found = find(recording)
    said = " ".join(found.sentences)
    assert not re.search(r"\bwords?\b|\btokens\b|(?<!first )(?<!class )(?<!-)\btoken\b", said)
    assert f"The marked patch, ‘patch\u00a0{(found.q - 1) // 5},{(found.q - 1) % 5}’, puts " in said
    assert f", {key}; on average over {count} patches it is " in said
    assert said.endswith("select another patch.")


@pytest.mark.parametrize(("count", "place", "name"), [(1, 0, "‘it’"), (3, 0, "‘it’ at 0"), (1024, 1022, "‘it’ at 1,022")])
def test_a_word_is_named_with_its_place_where_others_look_alike(count, place, name):
    words = ["it", *[" it"] * (count - 1), " sat"]
    assert (name_word(words, place), name_word(words, count)) == (name, "‘sat’")


def test_a_kind_that_is_wanted_is_preferred_to_one_that_tells_more():
    assert find(attend_to(BEFORE, FOLLOWED), "previous token").place.head == 0
    assert find(attend_to(BEFORE, FOLLOWED)).place.head == 1


class Masked(torch.nn.Module):
    """A layer of random queries and keys under a mask."""

    def __init__(self, mask, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.q, self.k = (2 * torch.randn(1, 3, 7, 5, dtype=torch.float64, generator=generator) for _ in range(2))
        self.mask = mask

    def forward(self, _):
        return regard.attention(self.q, self.k, self.k, self.mask)


def test_a_layer_that_sees_later_words_while_another_does_not_is_a_leak():
    model = torch.nn.Sequential(Masked(Causal(), 0), Masked(Everything(), 1))
    with regard.record(model) as recording, torch.no_grad():
        model(None)
    found = find(recording)
    assert (found.what, found.place.layer) == (LEAK, 1)
    later = regard.attend(model[1].q, model[1].k, model[1].k).weights[0].triu(1)
    assert (found.place.head, found.q, found.k) == tuple(map(int, torch.unravel_index(later.argmax(), later.shape)))


def test_a_recording_that_is_too_long_to_classify_at_once_has_no_finding(monkeypatch):
    monkeypatch.setattr(findings, "MAX_WEIGHTS", T * T - 1)
    assert find(attend_to(BEFORE)) is None


def test_the_finding_of_a_translation_says_what_its_words_look_at_and_names_the_largest_weight():
    entry = RecordingEntry("r", record_example())
    found = find_finding(entry, lambda: None)
    (rows, columns), weights = entry.get_axis_words(found.place), entry.get_map(found.place).dense()[0, 0]
    assert (found.place.kind, len(found.sentences)) == ("cross", 3)
    assert found.sentences[0].startswith("Each token here looks at another input")
    marked, seen = rows[found.q].strip(), columns[found.k].strip()
    share = f"puts {100 * weights[found.q, found.k]:.0f} % of its attention on ‘{seen}’"
    assert f"the marked token, ‘{marked}’, {share}" in found.sentences[1]
    assert weights[found.q, found.k] == weights.max()


@pytest.mark.slow
def test_the_gallery_opens_by_name_and_each_finding_is_what_it_says():
    adapter = GPT2Adapter("pocket", GPT2.load("pocket"))
    with open_client(adapter=adapter) as client:
        start = client.json("/api/start")
        for item in start["gallery"]:
            if item["link"] is None:
                opened = json.loads(client.post("/api/gallery", {"name": item["name"]})[1])
                assert opened["finding"]["what"] in (*DOES, LEAK, EFFECT, None)
                assert len(opened["finding"]["sentences"]) >= 2
                assert client.json("/api/recordings", ids=opened["recording"]["id"])["recordings"]
        first = json.loads(client.post("/api/gallery", {"name": start["opening"]})[1])
        assert first["finding"]["what"] == EFFECT
        assert client.post("/api/gallery", {"name": "nothing"})[0] == 404
        assert client.json(f"/api/r/{LEAK_ID}/finding")["finding"]["what"] == LEAK


def test_repeated_words_are_shown_at_the_head_that_the_probe_names_and_no_head_is_named_on_the_text():
    adapter = GPT2Adapter("pocket", GPT2.load("pocket"))
    recording = record_text(adapter, next(item.text for item in ITEMS if item.name == "induction"), 100).recording
    found = find(recording, "prefix matching")
    probed = regard.probe_heads(adapter.model, ablate="none").select_kind("induction")
    assert [(row.layer, row.head) for row in probed] == [(found.place.layer, found.place.head)]
    assert "induction" not in {row.kind for row in regard.heads(recording)}
    assert "head 4 of layer 5 looks at what followed" in found.sentences[0]


def test_what_the_page_opens_on_is_computed_before_it_is_asked_for():
    adapter = GPT2Adapter("pocket", GPT2.load("pocket"))
    given = record_text(adapter, "Lily had a red ball and Tom had a blue ball.", 100).recording
    session = Session(given, adapter)
    session.prepare_opening(lambda: None)
    (entry,) = map(session.get_entry, session.listed)
    assert entry.head_rows


BALLS = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his"


@pytest.mark.parametrize("text", [BALLS, next(item.text for item in ITEMS if item.name == "induction")])
def test_the_finding_of_a_text_is_the_head_without_which_the_prediction_falls_most(text):
    """Every head is taken out of the weights in turn; of those that look at a token, none takes more of the probability."""
    model = GPT2.load("pocket", torch.float64)
    session = Session(adapter=GPT2Adapter("pocket", model))
    entry = session.get_entry(session.run_text(text, lambda: None)["id"])
    found = session.get_finding(entry, None, lambda: None)
    ids, width = entry.ids, model.config.width // model.config.heads
    with torch.inference_mode():
        whole = model(ids)[0, -1].softmax(-1)
        losses = {}
        for layer, block in enumerate(model.blocks):
            weight = block.attention.out_proj.weight
            for head in range(model.config.heads):
                part = weight[:, head * width : (head + 1) * width]
                saved = part.clone()
                part.zero_()
                losses[layer, head] = float(whole.max() - model(ids)[0, -1].softmax(-1)[whole.argmax()])
                part.copy_(saved)
    place = found.place
    assert found.loss == pytest.approx(losses[place.layer, place.head], rel=1e-4)
    row = entry.get_map(place)[0, 0, -1]
    others = range(1, len(row) - 1)
    assert found.q == len(row) - 1
    assert found.k == max(others, key=lambda key: row[key])

    def is_seen(layer, head):
        return entry.recording.map(layer)[0, head, -1, 1:-1].max() >= MIN_SEEN_WEIGHT

    assert losses[place.layer, place.head] == max(loss for head, loss in losses.items() if is_seen(*head))

import copy
import json

import pytest
import torch

import regard
from regard.errors import ConfigError, DataError
from regard.evaluate.translation_scores import translate_sentences
from regard.generate.translation_search import END_LABEL
from regard.map.codes import encode_weights
from regard.models.recurrent import RecurrentTranslator
from regard.show.page.model_adapter import adapt_model, record_text
from regard.show.page.session import Session
from regard.show.page.translator_adapter import TranslatorAdapter, adapt_translator, record_translation
from regard.weights.translator_weights import INCLUDED_TRANSLATORS
from show.page.server_client import open_client
from show.page.translators import PAIRS, READ, WRITTEN, train_small_translator

KINDS = ["additive", "transformer"]


@pytest.fixture
def translator_package(tmp_path, monkeypatch):
    """A package that carries a translator."""
    train_small_translator("additive").save(tmp_path / "translator")
    monkeypatch.setitem(INCLUDED_TRANSLATORS, "translator", tmp_path / "translator")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [READ, f"  {PAIRS[1][0]}\n"])
def test_what_it_writes_is_what_regard_translate_prints(kind, text):
    found = record_translation(adapt_translator("small", train_small_translator(kind)), text, 2048)
    (expected,) = translate_sentences(train_small_translator(kind), [text])
    assert found.tokens.rows[-1] == found.tokens.columns[-1] == END_LABEL
    assert "".join(found.tokens.rows[:-1]).strip() == expected
    assert "".join(found.tokens.columns[:-1]) == text.strip()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_cross_attention_is_the_word_that_was_written_there(kind):
    model = train_small_translator(kind)
    found = record_translation(adapt_translator("small", model), READ, 2048)
    ids = torch.tensor([[*model.text.encode(READ), model.text.end]])
    written = [model.text.end, *model.text.encode(WRITTEN)]
    for n in range(1, len(written) + 1):  # each word from those before it alone
        with torch.inference_mode(), regard.record(model) as alone:
            logits = model(ids, [ids.shape[1]], torch.tensor([written[:n]]))[0, -1]
        assert found.tokens.rows[n - 1] == (END_LABEL if n == len(written) else model.text.pieces([int(logits.argmax())])[0])
        last = alone.map(0, kind="cross")[0, :, -1]
        torch.testing.assert_close(found.map(0, kind="cross")[0, :, n - 1], last, atol=1e-10, rtol=0)
    own = found.words(0, kind="cross")[0] if kind == "additive" else found.words(0, part="decoder")[1]
    assert own == (found.tokens.rows if kind == "additive" else [END_LABEL, *found.tokens.rows[:-1]])


def test_typing_translates_and_each_axis_has_the_words_of_its_own_text():
    model = train_small_translator("transformer")
    with open_client(model) as client:
        start = client.json("/api/start")
        assert (start["translates"], start["writes"], len(start["sentences"])) == (True, False, 3)
        status, body = client.post("/api/type", {"text": READ})
        found = json.loads(body)
        assert status == 200
        right = record_translation(adapt_translator("small", model), READ, 2048)
        assert "".join(found["words"]["words"]["first"]) == WRITTEN + END_LABEL
        assert "".join(found["words"]["source"]["first"]) == READ + END_LABEL
        assert "".join(found["words"]["read"]["first"]) == END_LABEL + WRITTEN
        axes = {(one["part"], one["kind"]): (one["rows"], one["columns"]) for one in found["attentions"]}
        assert axes == {
            ("encoder", "self"): ("source", "source"),
            ("decoder", "self"): ("read", "read"),
            ("decoder", "cross"): ("words", "source"),
        }
        place = {"kind": "cross", "part": "decoder", "b": 0, "layer": 2, "head": 1}
        seen = client.codes(f"/api/r/{found['id']}/tile", **place, level=0, row=0, column=0)
        weights = right.map(2, 1, kind="cross")[0, 0]
        assert torch.equal(seen, encode_weights(weights, torch.ones_like(weights, dtype=torch.bool)).to(torch.int32))
        (row,) = right.map(2, 1, kind="cross")[0, 0, [3]]
        top = client.json(f"/api/r/{found['id']}/top", **place, q=3, n=1)["found"][0]
        assert (top["place"], top["word"]) == (int(row.argmax()), right.tokens.columns[int(row.argmax())])


def test_a_text_that_cannot_be_translated_is_refused_in_a_sentence():
    adapter = adapt_translator("small", copy.deepcopy(train_small_translator("transformer")))
    with pytest.raises(DataError, match="no word"):
        record_text(adapter, " \n", 2048)
    with pytest.raises(ConfigError, match=r"reads at most 5 tokens here, but the text has 7"):
        record_text(adapter, READ, 5)
    with pytest.raises(ConfigError, match="no attention"):
        adapt_model(RecurrentTranslator(vocabulary=7, width=3, hidden=2))
    assert isinstance(adapt_model(train_small_translator("additive")), TranslatorAdapter)
    adapter.model.text = None
    with pytest.raises(ConfigError, match="small has no vocabulary"):
        record_text(adapter, READ, 2048)


@pytest.mark.slow
@pytest.mark.usefixtures("translator_package")
def test_the_example_is_recorded_once_and_stays_however_much_is_typed():
    session = Session(None, adapt_model(train_small_translator("transformer")))
    assert session.get_start_state()["translation"]["id"] == "translation"
    found = session.get_translation(lambda: None)
    assert found["id"] == "translation"
    assert found["attentions"][0]["columns"] == "source"
    first = session.get_entry("translation")
    for n in range(34):
        session.run_text(READ + " " * n, lambda: None)
    session.get_translation(lambda: None)
    assert session.get_entry("translation") is first
    assert "translation" not in [one["id"] for one in session.get_start_state()["recordings"]]
    assert len(session.listed) == 32

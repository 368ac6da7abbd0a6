"""The translators that are carried in the package; what a folder of one holds is tested with the models."""

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.cli import main
from regard.evaluate.translation_scores import chrf, translate_sentences
from regard.models import translator
from regard.weights.translator_weights import INCLUDED_TRANSLATORS

PAIRS = {  # ours, and so in nobody's training set, of words that captions have
    "A man is riding a horse.": "Un homme monte un cheval.",
    "Two dogs are running on the grass.": "Deux chiens courent sur l'herbe.",
    "A woman in a red dress is singing on a stage.": "Une femme en robe rouge chante sur une scène.",
    "A young boy is jumping into a swimming pool.": "Un jeune garçon saute dans une piscine.",
    "Some people are sitting at a table in a restaurant.": "Des gens sont assis à une table dans un restaurant.",
    "A man in a blue shirt is standing next to a woman with a black bag on a busy street.": "Un homme en t-shirt bleu se tient "
    "à côté d'une femme avec un sac noir dans une rue animée.",
    "Two children in yellow coats are playing with a ball in the snow while an old man is watching them.": "Deux enfants en "
    "manteaux jaunes jouent avec un ballon dans la neige pendant qu'un vieil homme les regarde.",
}


@pytest.mark.slow
def test_together_they_have_at_most_six_megabytes_and_their_matrices_are_bytes():
    assert sum(path.stat().st_size for folder in INCLUDED_TRANSLATORS.values() for path in folder.iterdir()) <= 6_000_000
    for name, folder in INCLUDED_TRANSLATORS.items():
        weights = load_file(folder / "model.safetensors")
        assert {weight.dtype for weight in weights.values() if weight.dim() == 2} == {torch.int8}
        model = translator.load(name)
        assert not model.training
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        assert model.sizes["attention"] == {"translator": "additive", "translator-plain": None}[name]


@pytest.mark.parametrize("name", INCLUDED_TRANSLATORS)
def test_each_has_a_card_with_its_data_its_scores_and_what_it_cannot_do(name):
    card = (INCLUDED_TRANSLATORS[name] / "README.md").read_text(encoding="utf-8")
    for said in (
        "Multi30k",
        "CC BY 2.0",
        "tatoeba.org",
        "tok:13a",
        "## What it cannot do",
        "python -m recipes.lineage --carry",
    ):
        assert said in card


@pytest.mark.slow
def test_both_write_french_and_the_one_with_attention_is_nearer_to_peoples():
    scores = {
        name: chrf(list(translate_sentences(translator.load(name), [*PAIRS])), [*PAIRS.values()]).score
        for name in INCLUDED_TRANSLATORS
    }
    assert scores["translator"] > 60
    assert 20 < scores["translator-plain"] < scores["translator"] - 10


@pytest.mark.parametrize("flags", [[], ["--model", "translator"], ["--model", "translator-plain"]])
def test_regard_translate_works_at_once(capsys, flags):
    assert main(["translate", "A man is riding a horse.", *flags]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("Un homme ")
    if "translator-plain" not in flags:
        assert "cheval" in out


@pytest.mark.parametrize(("written", "read"), [("homme", "man"), ("cheval", "horse")])
def test_a_word_looks_at_the_word_that_it_translates(written, read):
    model = translator.load("translator")
    source, target = ([*model.text.encode(side), model.text.end] for side in next(iter(PAIRS.items())))
    with torch.no_grad(), regard.record(model) as recording:
        model(torch.tensor([source]), [len(source)], torch.tensor([[model.text.end, *target[:-1]]]))
    weights = recording.map(0, kind="cross").dense()[0, 0]
    rows, columns = (([piece.strip() for piece in model.text.pieces(ids)]) for ids in (target, source))
    assert columns[int(weights[rows.index(written)].argmax())] == read

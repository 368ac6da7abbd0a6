import json

import pytest
import torch
from recipes.lineage import carry
from recipes.lineage.card import OWN
from recipes.lineage.runs import Run
from safetensors.torch import load_file

from regard.evaluate.translation_scores import chrf, translate_sentences
from regard.models import translator
from regard.models.recurrent import RecurrentTranslator
from regard.text.pairs import Pairs, prepare
from text.pairs.small_pairs import make_pairs, write_pairs

MODELS = {"one": Run("additive", "joined"), "two": Run("plain", "joined")}
SEEDS = (0, 0)  # of numbers with which the bytes write something else than what they are nearest to
FILES = {"README.md", "settings.json", "model.safetensors", "vocab.bpe", "encoder.json"}


@pytest.fixture
def root(tmp_path):
    """Two runs that say they have all their steps, of models with random numbers, and the pairs of both sets."""
    data, root = tmp_path / "data", tmp_path / "runs"
    for name, some in (("train", make_pairs(60)), ("val", make_pairs(70)[60:]), ("test", make_pairs(90)[70:])):
        write_pairs(data / "captions", name, some)
    (data / "others.tsv").write_text("".join(f"so {one}\tet {other}\n" for one, other in make_pairs(2000)))
    prepare(data / "captions", root / "multi30k", vocabulary=280)
    text = prepare([data / "captions", data / "others.tsv"], root / "joined", vocabulary=300).text
    for seed, run in zip(SEEDS, MODELS.values(), strict=True):
        torch.manual_seed(seed)
        model = RecurrentTranslator("additive" if run.model == "additive" else None, vocabulary=300, width=16, hidden=19)
        model.text = text
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(10)  # so that every small difference grows
        model.save(root / run.name / "model")
        (root / run.name / "log.jsonl").write_text(json.dumps({"step": 3752, "seconds": 1800}) + "\n")
    return root


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_is_carried_in_bytes_and_its_card_is_measured_of_what_is_carried(root, tmp_path):
    carry.write(root, tmp_path / "package", MODELS)
    test = Pairs.load(root / "multi30k").test
    for name, run in MODELS.items():
        folder = tmp_path / "package" / name
        assert {one.name for one in folder.iterdir()} == FILES
        assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir())  # for everybody to read
        weights = load_file(folder / "model.safetensors").values()
        assert {weight.dtype for weight in weights if weight.dim() == 2} == {torch.int8}
        card, carried = (folder / "README.md").read_text(), translator.load(folder)
        own = list(translate_sentences(carried, OWN))
        assert own != list(
            translate_sentences(translator.load(root / run.name / "model"), OWN)
        )  # else nobody knows whose they are
        for sentence, found in zip(OWN, own, strict=True):
            assert f"| {sentence} | {found.replace('|', ' ')} |" in card
        score = chrf(
            list(translate_sentences(carried, test.decode_sentences("source"), beams=4)), test.decode_sentences("target"), 1000
        )
        assert f"| Multi30k, test_2016_flickr | {len(test)} |" in card
        assert f"| {score.score:.1f} ± {score.interval:.1f} |\n| Tatoeba | " in card
        assert f"`chrF|{score.signature}`" in card
        assert f"--only {run.name}`, in 0.5 hours of training, seed 0" in card


@pytest.mark.slow
def test_a_run_that_is_not_done_is_not_carried_and_what_was_carried_stays(root, tmp_path):
    carry.write(root, tmp_path / "package", MODELS)
    before = contents(tmp_path / "package")
    log = root / "joined-plain-0" / "log.jsonl"
    log.write_text(log.read_text().replace("3752", "3751"))
    with pytest.raises(SystemExit, match=r"joined-plain-0 has not all of its steps: .*--only joined-plain-0"):
        carry.write(root, tmp_path / "package", MODELS)
    assert contents(tmp_path / "package") == before


@pytest.mark.slow
def test_more_than_there_is_room_for_is_not_carried(root, tmp_path, monkeypatch):
    monkeypatch.setattr(carry, "MOST", 20_000)
    with pytest.raises(SystemExit, match=r"bytes together, and at most 20,000 are carried"):
        carry.write(root, tmp_path / "package", MODELS)
    assert not (tmp_path / "package").exists()

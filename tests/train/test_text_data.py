import os
from dataclasses import replace
from pathlib import Path

import pytest

from regard import ConfigError
from regard.text import BytePair, Letters
from regard.text.corpus import Corpus
from regard.train import TrainConfig, begin, run
from regard.train.text_data import load_or_prepare_corpus
from regard.train.translation_task import load_or_prepare_pairs
from text.corpus.small_corpus import contents
from text.pairs.small_pairs import make_pairs, write_pairs
from train import small_runs


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(small_runs.TEXT)
    return path


@pytest.mark.parametrize(("vocabulary", "kind", "size"), [("letters", Letters, None), ("262", BytePair, 262)])
def test_a_text_is_prepared_into_the_folder_of_the_run(tmp_path, story, vocabulary, kind, size):
    config = TrainConfig(text=str(story), vocabulary=vocabulary, out=str(tmp_path / "run"))
    corpus = load_or_prepare_corpus(config)
    assert isinstance(corpus.text, kind)
    assert corpus.vocabulary == (size or len(set(small_runs.TEXT)))
    assert corpus.text.decode(corpus[: corpus.tokens].tolist()).startswith(small_runs.TEXT[:50])
    assert Corpus.load(tmp_path / "run" / "corpus").checksum == corpus.checksum


@pytest.mark.slow
def test_gpt2s_own_vocabulary_is_there_by_its_name(tmp_path, story):
    assert (
        load_or_prepare_corpus(TrainConfig(text=str(story), vocabulary="gpt2", out=str(tmp_path / "run"))).vocabulary == 50257
    )


@pytest.mark.parametrize("vocabulary", ["gpt2", "300", "letters"])
def test_a_vocabulary_that_a_prepared_corpus_does_not_have_is_refused(tmp_path, story, vocabulary):
    load_or_prepare_corpus(TrainConfig(text=str(story), vocabulary="262", out=str(tmp_path / "pieces")))
    load_or_prepare_corpus(TrainConfig(text=str(story), out=str(tmp_path / "letters")))
    for name in {"pieces", "letters"} - {vocabulary}:
        corpus = str(tmp_path / name / "corpus")
        with pytest.raises(ConfigError, match=rf"vocabulary is {vocabulary}, but the corpus .*{name}.corpus was prepared with"):
            load_or_prepare_corpus(TrainConfig(corpus=corpus, vocabulary=vocabulary, out=str(tmp_path / "run")))
    corpus = str(tmp_path / "pieces" / "corpus")
    assert load_or_prepare_corpus(TrainConfig(corpus=corpus, vocabulary="262", out=str(tmp_path / "run"))).vocabulary == 262
    assert load_or_prepare_corpus(TrainConfig(corpus=corpus, out=str(tmp_path / "run"))).vocabulary == 262
    letters = TrainConfig(corpus=str(tmp_path / "letters" / "corpus"), vocabulary="letters", out=str(tmp_path / "run"))
    assert load_or_prepare_corpus(letters).vocabulary == len(set(story.read_text()))


def decode_corpus(corpus) -> str:
    return corpus.text.decode(corpus[:].tolist())


def change_source(story, tmp_path, change):
    """The config after a change to what a corpus was prepared from."""
    config = {"text": str(story), "out": str(tmp_path / "run")}
    if change == "another file":
        other = tmp_path / "other.txt"
        other.write_text(small_runs.TEXT[::-1])
        return TrainConfig(**{**config, "text": str(other)})
    if change == "other contents":  # of the same length, and as old
        when = story.stat()
        story.write_text(small_runs.TEXT.replace("cat", "cow"))
        os.utime(story, ns=(when.st_atime_ns, when.st_mtime_ns))
        return TrainConfig(**config)
    return TrainConfig(**config, vocabulary="262")


CHANGES = ["another file", "other contents", "another vocabulary"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_corpus_that_was_prepared_from_something_else_is_made_anew(tmp_path, story, change):
    """As after a run that was killed before its first checkpoint."""
    load_or_prepare_corpus(TrainConfig(text=str(story), out=str(tmp_path / "run")))
    config = change_source(story, tmp_path, change)
    expected = load_or_prepare_corpus(replace(config, out=str(tmp_path / "fresh")))
    found = load_or_prepare_corpus(config)
    assert found.checksum == expected.checksum
    assert decode_corpus(found).removesuffix("<|endoftext|>") == Path(config.text).read_text()
    assert load_or_prepare_corpus(config).checksum == expected.checksum


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_with_a_checkpoint_refuses_another_text_and_keeps_its_own(tmp_path, story, change):
    settings = {"corpus": "", "steps": 2, "evaluate_every": 0}
    run(small_runs.config(tmp_path, text=str(story), **settings))
    before = contents(tmp_path / "run" / "corpus")
    one = change_source(story, tmp_path, change)
    says = {"another file": "text is '.*other.txt', but the run in", "other contents": "the contents are not those that the"}
    with pytest.raises(ConfigError, match=says.get(change, "vocabulary is '262', but the run in .* has 'letters'")):
        begin(small_runs.config(tmp_path, text=one.text, vocabulary=one.vocabulary, **settings))
    assert contents(tmp_path / "run" / "corpus") == before


def test_sentence_pairs_belong_to_their_files_too(tmp_path):
    config = {"out": str(tmp_path / "run"), "vocabulary": "290", "model": {"kind": "recurrent", "width": 6, "hidden": 7}}
    write_pairs(tmp_path, "some", make_pairs(30))
    write_pairs(tmp_path, "more", make_pairs(40)[10:])
    texts = [TrainConfig.from_table({**config, "pairs": [str(tmp_path / name)]}) for name in ("some", "more")]
    assert load_or_prepare_pairs(texts[0]).checksum != load_or_prepare_pairs(texts[1]).checksum
    assert (
        load_or_prepare_pairs(texts[1]).checksum
        == load_or_prepare_pairs(replace(texts[1], out=str(tmp_path / "fresh"))).checksum
    )

import pytest

from regard import ConfigError
from regard.models import GPT2Config
from regard.text import BytePair, Letters
from regard.text.corpus import Corpus
from regard.train import TrainConfig
from regard.train.texts import corpus_of, fitted
from train import small


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(small.TEXT)
    return path


@pytest.mark.parametrize(("vocabulary", "kind", "size"), [("letters", Letters, None), ("262", BytePair, 262)])
def test_a_text_is_prepared_into_the_folder_of_the_run(tmp_path, story, vocabulary, kind, size):
    config = TrainConfig(text=str(story), vocabulary=vocabulary, out=str(tmp_path / "run"))
    corpus = corpus_of(config)
    assert isinstance(corpus.text, kind)
    assert corpus.vocabulary == (size or len(set(small.TEXT)))
    assert corpus.text.decode(corpus[: corpus.tokens].tolist()).startswith(small.TEXT[:50])
    assert Corpus.load(tmp_path / "run" / "corpus").checksum == corpus.checksum


def test_gpt2s_own_vocabulary_is_there_by_its_name(tmp_path, story):
    assert corpus_of(TrainConfig(text=str(story), vocabulary="gpt2", out=str(tmp_path / "run"))).vocabulary == 50257


def test_a_text_is_prepared_once(tmp_path, story):
    config = TrainConfig(text=str(story), out=str(tmp_path / "run"))
    first = corpus_of(config)
    story.unlink()
    assert corpus_of(config).checksum == first.checksum


def test_a_text_given_as_a_corpus_is_told_what_to_do(story):
    with pytest.raises(ConfigError, match=r"Is it a text\? Say it as text"):
        corpus_of(TrainConfig(corpus=str(story)))


@pytest.mark.parametrize("both", [{}, {"corpus": "a", "text": "b"}])
def test_a_run_has_a_corpus_or_a_text(both):
    with pytest.raises(ConfigError, match="one of the two"):
        corpus_of(TrainConfig(**both))


def test_a_vocabulary_may_be_larger_than_the_corpuss_and_never_smaller(tmp_path):
    corpus = Corpus.load(small.corpus(tmp_path))
    for size, expected in ((50257, corpus.vocabulary), (64, 64)):
        config = TrainConfig(model=GPT2Config(layers=1, heads=1, width=4, vocabulary=size))
        assert fitted(config, corpus).model.vocabulary == expected
    with pytest.raises(ConfigError, match=r"model\.vocabulary is 5, and the corpus has"):
        fitted(TrainConfig(model=GPT2Config(layers=1, heads=1, width=4, vocabulary=5)), corpus)

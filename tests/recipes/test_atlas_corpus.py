import pytest
from recipes.atlas.corpus import ARTICLES, PLAYS, write_corpus

from regard.errors import DataError
from regard.text.corpus import documents

FIRST = " = A lobster = \n \n The lobster is blue . \n \n = = Legs = = \n \n It has ten legs . "
SECOND = " = An actor = \n \n He acted in a play . "


def write_data(folder, names) -> None:
    (folder / "deep").mkdir()
    for name in names:
        text = f" \n{FIRST}\n \n{SECOND}\n" if name in ARTICLES else f"The whole of {name}.\n\nIn two parts.\n"
        (folder / "deep" / name).write_text(text)


def test_an_article_is_a_document_from_its_title_on_and_a_play_is_a_whole_file(tmp_path):
    write_data(tmp_path, (*PLAYS, *ARTICLES))
    write_corpus(tmp_path, tmp_path / "texts")
    found = [text.strip() for text in documents(tmp_path / "texts")]
    plays = [f"The whole of {name}.\n\nIn two parts." for name in sorted(PLAYS)]
    assert found == [*plays, *[FIRST.strip(), SECOND.strip()] * len(ARTICLES)]


def test_the_same_texts_are_written_again_in_the_same_bytes(tmp_path):
    write_data(tmp_path, (*PLAYS, *ARTICLES))
    for _ in range(2):
        write_corpus(tmp_path, tmp_path / "texts")
        files = {path.name: path.read_bytes() for path in (tmp_path / "texts").iterdir()}
    write_corpus(tmp_path, tmp_path / "others")
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "others").iterdir()}


@pytest.mark.parametrize("name", [*PLAYS, *ARTICLES])
def test_a_text_that_is_missing_is_named(tmp_path, name):
    write_data(tmp_path, {*PLAYS, *ARTICLES} - {name})
    with pytest.raises(DataError, match=f"has no {name}"):
        write_corpus(tmp_path, tmp_path / "texts")
    assert not (tmp_path / "texts").exists()

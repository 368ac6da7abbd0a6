"""The documents of an atlas: pieces of texts, as tokens on disk."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import DataError
from regard.head_atlas.documents import SHORTEST, DocumentStore, write_documents


def write(folder, source, **settings):
    places = [folder / name for name in ("tokens.npy", "documents.npy", "pieces.json")]
    given = {"tokens": 64, "begin": None, "most": None, **settings}
    return write_documents(source, lambda text: [ord(letter) for letter in text], lambda ids: chr(ids[0]), places, **given)


@given(
    st.lists(st.text("abc ", min_size=1, max_size=300).filter(str.strip), min_size=1, max_size=6),
    st.integers(SHORTEST + 1, 90),
    st.none() | st.integers(0, 9),
    st.none() | st.integers(1, 5),
)
def test_documents_are_pieces_of_the_texts_in_order(tmp_path_factory, texts, tokens, begin, most):
    folder = tmp_path_factory.mktemp("documents")
    room = tokens - (begin is not None)
    pieces = [text[start : start + room] for text in texts for start in range(0, len(text), room)]
    expected = [piece for piece in pieces if len(piece) >= SHORTEST][:most]
    if not expected:
        with pytest.raises(DataError, match="no document of 32 tokens or more"):
            write(folder, texts, tokens=tokens, begin=begin, most=most)
        return
    assert write(folder, texts, tokens=tokens, begin=begin, most=most) == len(expected)
    documents = DocumentStore.open(folder)
    before = [] if begin is None else [begin]
    assert [documents[n].tolist() for n in range(len(documents))] == [[*before, *map(ord, piece)] for piece in expected]
    assert documents.pieces == {token: chr(token) for token in {*before, *map(ord, "".join(expected))}}


@pytest.mark.slow
def test_a_long_document_is_read_in_parts_and_cut_into_pieces(tmp_path):
    text = "to be or not to be " * 150_000  # several blocks of a megabyte
    (tmp_path / "long.txt").write_text(text)
    write(tmp_path, tmp_path / "long.txt", tokens=1000)
    documents = DocumentStore.open(tmp_path)
    assert "".join(chr(token) for n in range(len(documents)) for token in documents[n].tolist()) == text


@pytest.mark.parametrize("name", ["tokens.npy", "documents.npy", "pieces.json"])
@pytest.mark.parametrize(
    "data", [None, b"", b"\x93NUMPY", b"[1, 2]", 200_000 * b"["], ids=["none", "empty", "begun", "list", "deep"]
)
def test_files_that_are_missing_or_damaged_are_refused(tmp_path, name, data):
    write(tmp_path, ["a" * 40])
    if data is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match="has no documents of an atlas"):
        DocumentStore.open(tmp_path)


def test_the_text_of_a_token_may_be_any_text(tmp_path):
    write(tmp_path, ["\u2028ä\x00😀" * 10])
    assert set(json.loads((tmp_path / "pieces.json").read_text(encoding="utf-8")).values()) == set("\u2028ä\x00😀")

import json

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import ConfigError, DataError
from regard.text import BytePair
from regard.text.corpus import sources
from regard.text.corpus.sources import documents, parts, portions

END = "<|endoftext|>"
WORDS = st.text(st.sampled_from("ab 'sé1\n\r\t\x0b\x1c\x85\u00a0\u2028\u3000.—🦊"))


@given(text=WORDS, limit=st.integers(1, 20))
def test_the_tokens_of_a_texts_portions_are_those_of_the_text(text, limit):
    words = BytePair.gpt2()
    found = list(portions(text, limit))
    assert "".join(found) == text
    assert [one for portion in found for one in words.encode(portion)] == words.encode(text)


@given(
    st.lists(st.text(st.sampled_from("ab é\n\r🦊<|"), min_size=1).filter(str.strip), min_size=1),
    st.integers(1, 80),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_lines_of_the_end_of_text_part_the_documents_of_a_file(tmp_path_factory, texts, block, line, closed):
    path = tmp_path_factory.mktemp("text") / "some.txt"
    held = f"{line}{END}{line}".join(texts) + f"{line}{END}" * closed
    path.write_bytes(held.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", block)
        found = list(parts(path))
    expected = [text.removesuffix("\r") if line == "\n" else text for text in texts]
    if not closed:
        expected[-1] = texts[-1]
    assert "".join(part.text + END * part.ends for part in found) == "".join(text + END for text in expected)
    assert sum(part.size for part in found) <= len(held.encode())


def test_a_file_without_such_lines_is_one_document(tmp_path):
    path = tmp_path / "verse.txt"
    path.write_text(f"one {END} line\n\n  two\n", newline="")
    assert list(documents(path)) == [f"one {END} line\n\n  two\n"]


def test_a_long_document_is_never_whole_in_memory(tmp_path):
    path = tmp_path / "long.txt"
    text = "word and word\n" * 400_000
    path.write_text(text, newline="")
    found = list(parts(path))
    assert max(len(part.text) for part in found) <= 2 * sources.BLOCK
    assert [part.ends for part in found] == [False] * (len(found) - 1) + [True]
    assert "".join(part.text for part in found) == text
    assert sum(part.size for part in found) == len(text)


def test_a_folder_is_its_files_in_the_order_of_their_paths(tmp_path):
    for name, text in {"b.txt": "second", "a/z.md": "first", "c.bin": "no text", "b.jsonl": '{"text": "one"}'}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(documents(tmp_path)) == ["first", "one", "second"]
    assert sources.total(tmp_path) == len("first") + len("second") + len('{"text": "one"}')


def test_json_lines_have_a_document_a_line_under_a_field(tmp_path):
    path = tmp_path / "some.jsonl"
    texts = ["one\ntwo", f"three {END}", "naïve 🦊", "a\u2028b"]
    path.write_text("\n\n".join(json.dumps({"story": text, "id": 1}, ensure_ascii=False) for text in texts), encoding="utf-8")
    assert list(documents(path, "story")) == texts


def test_strings_rows_and_datasets_are_documents_too():
    texts = ["one two", "  ", "three", ""]
    rows = [{"text": text, "id": n} for n, text in enumerate(texts)]
    for source in (texts, iter(texts), rows, datasets.Dataset.from_list(rows), (row for row in rows)):
        assert list(documents(source)) == ["one two", "three"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl:2 is no JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n{"words": "b", "id": 1}', r'a\.jsonl:3 has no field "text"; it has words, id'),
        ("a.jsonl", b'{"text": 5}', r'a\.jsonl:1: the field "text" must be a text; it is of type int'),
        ("a.jsonl", b"[1]", r"a\.jsonl:1 must be a row .* it is of type list"),
        ("a.jsonl", b'{"text": "a\xff"}', r"a\.jsonl:1 is no text in UTF-8: invalid start byte at byte 11 of the line"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1 is no JSON"),
        ("a.txt", b"ab\xff", r"a\.txt is no text in UTF-8: invalid start byte at byte 2"),
        ("a.txt", b"x" * (1 << 20) + b"\xf0\x9f", r"a\.txt is no text in UTF-8: unexpected end of data at byte 1048576"),
        ("a.txt", b"x" * ((1 << 20) - 1) + b"\xf0\x9fx", r"a\.txt is no text in UTF-8: .* at byte 1048575"),
    ],
)
def test_what_is_no_text_is_named_with_its_place(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=says):
        list(parts(tmp_path))


def test_a_mark_of_utf_8_is_no_part_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("word".encode("utf-8-sig"))
    assert list(documents(tmp_path / "a.txt")) == ["word"]


def test_what_cannot_be_gone_through_is_refused(tmp_path):
    with pytest.raises(DataError, match="no file and no folder"):
        list(parts(tmp_path / "missing.txt"))
    with pytest.raises(DataError, match="no file that ends in"):
        list(parts(tmp_path))
    with pytest.raises(ConfigError, match=r"several corpora: train, test"):
        list(parts({"train": ["a"], "test": ["b"]}))
    with pytest.raises(DataError, match="document 1 must be a row"):
        list(parts(["a", 3]))

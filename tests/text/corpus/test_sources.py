import json

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import ConfigError, DataError
from regard.text import BytePair, byte_pair
from regard.text.corpus import sources
from regard.text.corpus.sources import documents, iterate_parts, split_text

END = "<|endoftext|>"
WORDS = st.text(st.sampled_from("ab 'sé1\n\r\t\x0b\x1c\x85\u00a0\u2028\u3000.—🦊"))


LEARNED = {
    size: BytePair.train(["the cat's hat, aaaaaaaa abab, '''' 1234 \n\n   x 東京"] * 9, size) for size in (257, 270, 300)
}


def runs(draw_from: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Texts of some thousand characters: short words that come again and again, among other characters."""
    again = st.tuples(st.text(draw_from, min_size=1, max_size=7), st.integers(100, 900)).map(lambda one: one[0] * one[1])
    return st.lists(st.one_of(again, st.text(draw_from, max_size=50)), min_size=1, max_size=8).map("".join)


@given(text=WORDS, limit=st.integers(1, 20))
def test_a_text_with_white_space_is_cut_before_it(text, limit):
    words, cuts = BytePair.gpt2(), []
    found = list(split_text(text, limit, lambda text: cuts.append(text) or len(text)))
    assert "".join(found) == text
    if not cuts:
        assert [one for portion in found for one in words.encode(portion)] == words.encode(text)
    assert all(len(portion) <= 2 * limit for portion in found)


@given(
    text=runs(st.sampled_from("ab'slrevtdm1. \n\r\t\x1c\x85\u00a0é東🦊—_")),
    limit=st.integers(400, 1500),
    size=st.sampled_from([None, *LEARNED]),
)
def test_the_tokens_of_a_text_in_portions_are_those_of_the_whole(text, limit, size):
    """UNSURE is 256 where texts are cut; already of 16 tokens none changes with what follows."""
    words, is_sure = LEARNED.get(size, BytePair.gpt2()), []

    def cut(text):
        is_sure.append(words.find_cut(text) < len(text))
        return words.find_cut(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_pair, "UNSURE", 16)
        found = list(split_text(text, limit, cut))
    assert "".join(found) == text
    assert all(len(portion) <= 2 * limit for portion in found)
    if all(is_sure):  # not where pieces are so long that there are 16 tokens or fewer
        assert [one for portion in found for one in words.encode(portion)] == words.encode(text)


@pytest.mark.parametrize("letters", ["ACGT", "a", "東京、大阪。", "''", "'s", "0", "!", " ", "\n", "ab🦊"])
def test_what_has_no_white_space_before_which_it_could_be_cut_is_cut_elsewhere_with_the_same_tokens(
    tmp_path, monkeypatch, letters
):
    monkeypatch.setattr(sources, "BLOCK", 1 << 15)
    text = "x" + letters * (3 * sources.BLOCK // len(letters)) + "y"
    path = tmp_path / "long.txt"
    path.write_text(text, newline="")
    words = BytePair.gpt2()
    for source in (path, [text]):
        found = list(iterate_parts(source, cut=words.find_cut))
        assert max(len(part.text) for part in found) <= 3 * sources.BLOCK
        assert len(found) > 1
        assert "".join(part.text for part in found) == text
        assert [one for part in found for one in words.encode(part.text)] == words.encode(text)


@pytest.mark.parametrize("block", [40, 64, 99])
def test_a_line_of_the_end_of_text_is_one_wherever_a_part_ends(tmp_path, monkeypatch, block):
    monkeypatch.setattr(sources, "BLOCK", block)
    path = tmp_path / "some.txt"
    for length in range(2 * block, 5 * block):
        path.write_text(f"{'x' * length}{END}\nyy\n{END}\n{END}\nz", newline="")
        assert list(documents(path)) == [f"{'x' * length}{END}\nyy", "z"]
        path.write_text(f"x{chr(10) * length}{END}\nz", newline="")
        assert list(documents(path)) == [f"x{chr(10) * (length - 1)}", "z"]
        path.write_text(f"{chr(10) * length}{END}\nz", newline="")
        assert list(documents(path)) == ["z"]


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
        found = list(iterate_parts(path))
    expected = [text.removesuffix("\r") if line == "\n" else text for text in texts]
    if not closed:
        expected[-1] = texts[-1]
    assert "".join(part.text + END * part.ends for part in found) == "".join(text + END for text in expected)
    assert sum(part.size for part in found) <= len(held.encode())


def test_a_long_document_is_never_whole_in_memory(tmp_path):
    path = tmp_path / "long.txt"
    text = "word and word\n" * 400_000
    path.write_text(text, newline="")
    found = list(iterate_parts(path))
    assert max(len(part.text) for part in found) <= 2 * sources.BLOCK
    assert [part.ends for part in found] == [False] * (len(found) - 1) + [True]
    assert "".join(part.text for part in found) == text
    assert sum(part.size for part in found) == len(text)


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
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n{"words": "b", "id": 1}', r'a\.jsonl:3 has no field "text"; it has words, id'),
        ("a.jsonl", b'{"text": 5}', r'a\.jsonl:1: the field "text" must be a text; it is of type int'),
        ("a.jsonl", b"[1]", r"a\.jsonl:1 must be a row .* it is of type list"),
        ("a.jsonl", b'{"text": "a\xff"}', r"a\.jsonl:1 is not UTF-8 text: invalid start byte at byte 11 of the line"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1 is not JSON"),
        ("a.txt", b"ab\xff", r"a\.txt is not UTF-8 text: invalid start byte at byte 2"),
        ("a.txt", b"x" * (1 << 20) + b"\xf0\x9f", r"a\.txt is not UTF-8 text: unexpected end of data at byte 1048576"),
        ("a.txt", b"x" * ((1 << 20) - 1) + b"\xf0\x9fx", r"a\.txt is not UTF-8 text: .* at byte 1048575"),
    ],
)
def test_what_is_no_text_is_named_with_its_place(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=says):
        list(iterate_parts(tmp_path))


def test_a_mark_of_utf_8_is_no_part_of_json_lines(tmp_path):
    (tmp_path / "texts.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    assert list(documents(tmp_path / "texts.jsonl")) == ["one", "two"]


def test_what_cannot_be_gone_through_is_refused(tmp_path):
    with pytest.raises(DataError, match="neither a file nor a folder"):
        list(iterate_parts(tmp_path / "missing.txt"))
    with pytest.raises(DataError, match="no file that ends in"):
        list(iterate_parts(tmp_path))
    with pytest.raises(ConfigError, match=r"several corpora: train, test"):
        list(iterate_parts({"train": ["a"], "test": ["b"]}))
    with pytest.raises(DataError, match="document 1 must be a row"):
        list(iterate_parts(["a", 3]))


@pytest.mark.parametrize("source", [["a", "b\ud800c"], [{"text": "a"}, {"text": "b\udfffc"}]])
def test_half_of_a_surrogate_pair_is_named_with_its_place(source):
    with pytest.raises(DataError, match="document 1 has half of a surrogate pair at 1"):
        list(iterate_parts(source))
